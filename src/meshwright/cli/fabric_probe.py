"""`meshwright fabric probe`: measure a network with transfers that run at once, and write the fabric that explains them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..probe.fabric.options import check_arguments, outcome, probe_arguments
from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..probe.fabric.infer import Inferred
    from ..probe.fabric.measurements import Measurements

HELP = "measure latencies, ports and shared trunks between hosts, and write the fabric"
EPILOG = """\
examples:
  python -m meshwright.probe.fabric.rank_order_agent --host 10.0.0.3 --port 7000 --token-file secret      # on every host
  meshwright fabric probe --probe n0=10.0.0.3:7000 --probe n1=10.0.0.4:7000 ... --token-file secret -o cluster.toml --save measured.json
  meshwright fabric probe --from measured.json -o cluster.toml
  torchrun ... -m meshwright.probe.fabric.worker -o cluster.toml                                    # in a job, without agents"""


def arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("what is measured (one of these)")
    agent = "an agent (`python -m meshwright.probe.fabric.rank_order_agent`); repeat"
    source.add_argument("--probe", action="append", metavar="NAME=HOST:PORT", help=agent)
    source.add_argument("--probe-local", type=at_least_one, metavar="N", help="start N agents on this machine and probe them (to try it)")
    source.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="a file written by --save, or by `collective order --save-matrix`")
    parser.add_argument("--token-file", type=Path, help="with --probe: the agents' shared secret")
    probe_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError
    from ..probe.fabric.infer import infer_fabric
    from ..probe.fabric.measurements import read_measurements

    check_arguments(args)
    given = [name for name in ("probe", "probe_local", "saved") if getattr(args, name) is not None]
    if len(given) != 1:
        raise UsageError("give exactly one source of measurements", hint="--probe, --probe-local or --from")
    if args.saved is not None:
        measured = read_measurements(args.saved)
        return Result(*outcome(args, measured, infer_fabric(measured, name=args.name, tolerance=args.tolerance)))
    return Result(*outcome(args, *_measured(args)))


def _measured(args: argparse.Namespace) -> tuple[Measurements, Inferred]:
    from ..probe.fabric.campaign import probe_fabric
    from ..probe.fabric.network import AgentNetwork
    from .collective_order import probed_agents

    more = {"name": args.name, "budget_s": args.budget, "tolerance": args.tolerance, "seed": args.seed, "say": _say}
    with probed_agents(args) as (endpoints, token):
        return probe_fabric(AgentNetwork(endpoints, token, window_s=args.window, one_host=args.probe_local is not None), **more)


def _say(text: str) -> None:
    from ..kernels.stages import innermost

    innermost().what = f"fabric probe: {text}"
