"""`meshwright train replan`: plan a training job again on fewer or more devices, and say what restarting there takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import TIME_LIMIT, at_least_one, require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..drive.training.replan import OldShards
    from ..fabric.fabric import Fabric
    from ..plan.plan import Plan
    from ..traffic import GradientTensor, TrafficProfile

HELP = "plan a job again after devices are lost or added, reusing what the others hold"
EPILOG = """\
examples:
  meshwright train replan plan.json --without gpu3 --checkpoint run/checkpoint -o smaller.json
  meshwright train replan plan.json --without box1/gpu0 --with box0/gpu0 --keep tp --steps-left 20000
then: meshwright train run smaller.json --resume --out run/"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="the plan that was running")
    parser.add_argument("--without", metavar="DEVICE,...", help="devices (or servers, NICs, links) that are lost")
    parser.add_argument("--with", dest="added", metavar="DEVICE,...", help="devices to add; each is named by an existing device that it is like")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints on storage that every rank can read")
    parser.add_argument("--keep", metavar="dp,tp,pp,microbatch", help="decisions of the old layout to keep")
    parser.add_argument("--global-batch", type=at_least_one, help="samples per step (default: as before)")
    parser.add_argument(
        "--pipeline", metavar="NAME", help="order of micro-batches (default: as asked for the old plan; 1f1b if no layout has that)"
    )
    parser.add_argument("--steps-left", type=int, metavar="N", help="decide by restart plus N steps (default: by the step alone)")
    parser.add_argument(
        "--storage-rate", default="1GB/s", help="rate of the checkpoint's storage for all ranks together (default 1GB/s, assumed)"
    )
    parser.add_argument("--graph", type=Path, help="the captured graph of the job's model, instead of capturing it again")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="S", help=TIME_LIMIT.format(600))
    parser.add_argument("--out", "-o", type=Path, default=Path("plan.json"), help="where to write the new plan (default plan.json)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import read_plan, write_plan
    from ..drive.training.pipeline import PipelineWanted
    from ..drive.training.replan import replan_training
    from ..errors import UsageError
    from ..io.model.graph import read_graph
    from ..io.quantity import parse_rate_Bps
    from ..kernels.effort import cut_of
    from ..report.replan_text import replan_document, replan_text

    require_directory(args.out)
    old = read_plan(args.plan)
    try:
        rate = parse_rate_Bps(args.storage_rate)
    except ValueError as error:
        raise UsageError(str(error), where="--storage-rate") from None
    found = replan_training(
        old, lost=_names(args.without), added=_names(args.added), graph=read_graph(args.graph) if args.graph else None,
        shards=_shards(old, args.checkpoint), keep=_names(args.keep), global_batch=args.global_batch, steps_left=args.steps_left,
        storage_Bps=rate, schedule=PipelineWanted(name=args.pipeline) if args.pipeline else None, profile=_profile, time_limit_s=args.time_limit,
    )  # fmt: skip
    write_plan(args.out, found.plan)
    return Result(replan_document(found, path=str(args.out)), replan_text(found, written=str(args.out)), cut=cut_of(found.plan.decisions))


def _profile(tensors: Sequence[GradientTensor], backward_ns: int, fabric: Fabric, codecs: Sequence[str]) -> TrafficProfile:
    from ..probe.traffic.profile import profile_tensors

    return profile_tensors(tensors, backward_ns, fabric, codecs)


def _names(text: str | None) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()] if text else []


def _shards(old: Plan, folder: Path | None) -> OldShards | None:
    """What the newest checkpoint under `folder` holds; None without one."""
    if folder is None:
        return None
    from ..drive.training.replan import OldShards
    from ..run.checkpoint.index import find_index, tensors_of

    found, index = find_index(folder)
    tensors, files = tensors_of(index, str(found))
    stored = frozenset(f for f in files if (found / f).is_file())
    return OldShards(tensors=tensors, files=files, stored=stored, step=index.step)
