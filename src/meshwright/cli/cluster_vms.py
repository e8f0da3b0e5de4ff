"""Machines on hosts: what `cluster plan`, `simulate` and `compare` do where their input is a trace of machines."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import require_directory
from .cluster_arguments import OF_QUEUES, refuse_options
from .frame import Result

if TYPE_CHECKING:
    from ..cluster.vms import VmHosts, VmTrace
    from ..drive.vms import Compared
    from ..simulate.vms import VmRun

__all__ = ["compare", "plan", "simulate", "vm_arguments"]

MORE = 4  # times the hosts that were named are tried for --needed
STRATEGIES = "first-fit,best-fit,most-allocated,la,la-binary,aligned,nilas,lava,lars"


def vm_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    group = parser.add_argument_group("where the input is a trace of machines: vms:hosts=200,days=14,load=0.7,seed=1, meshwright.vms .json, "
        "Azure Packing 2020 (SQLite) or Huawei-East-1 (.csv)")
    group.add_argument("--hosts", help="how many, of each kind of the trace: 200 or 100,50 (default: those of vms:, or the groups of --fabric)")
    group.add_argument("--warm-up", default="3d", help="from time 0; nothing in it is measured (default 3d)")
    group.add_argument("--learn", help="predictors know what happened until then (default 0s; where no machine had ended by then, --warm-up)")
    if several:
        group.add_argument("--strategies", default=STRATEGIES, help=f"default {STRATEGIES}; there is also least-allocated")
        group.add_argument("--predictors", default="kaplan-meier", help="of perfect, owners, kaplan-meier (default), hazards, shuffled")
    else:
        group.add_argument("--strategy", default="aligned", help="aligned (default), nilas, lava, lars, la, la-binary, first-fit, best-fit, ...")
        group.add_argument("--predictor", default="kaplan-meier", help="kaplan-meier (default), perfect, owners, hazards or shuffled")


def _trace(args: argparse.Namespace) -> tuple[VmTrace, VmHosts, float, float]:
    """Trace, hosts, and when measuring and learning end. Raises: UsageError."""
    from ..cluster.vms import VmHosts
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..io.cluster import load_vms
    from ..io.quantity import parse_time_s

    refuse_options(args, OF_QUEUES, "machines")
    times = []
    for what in ("warm_up", "learn"):
        text = getattr(args, what) or "0s"
        try:
            times.append(86_400 * float(text[:-1]) if text.endswith("d") else parse_time_s(text))
        except ValueError as error:
            raise UsageError(str(error), where=f"--{what.replace('_', '-')}", hint="as in 3d, 12h") from None
    trace = load_vms(args.queue)
    if args.learn is None and not (trace.end_s <= 0).any():  # published traces begin with machines that are there
        times[1] = times[0]
    kinds = len(trace.kinds)
    if args.hosts:
        counts = args.hosts.split(",")
        if not all(c.isdigit() for c in counts) or len(counts) != kinds:
            raise UsageError(f"{args.hosts!r} for {kinds} kinds of host", where="--hosts",
                hint=f"a whole number for each of: {', '.join(trace.kinds[:12])}")
        return trace, VmHosts.of([int(c) for c in counts]), times[0], times[1]
    if args.fabric and kinds == 1:
        return trace, VmHosts.of([max(1, len(read_fabric(args.fabric).groups))]), times[0], times[1]
    if args.queue.startswith("vms"):
        named = [x.partition("=")[2] for x in args.queue.partition(":")[2].split(",") if x.startswith("hosts=")]
        return trace, VmHosts.of([int(named[-1]) if named else 200]), times[0], times[1]
    raise UsageError(f"how many hosts of {kinds} kinds?", where="--hosts", hint=f"a whole number for each of: {', '.join(trace.kinds[:12])}")


def _row(run: VmRun, strategy: str, predictor: str, most: float) -> dict[str, Any]:
    return {"strategy": strategy, "predictor": predictor, **asdict(run.measures), "most_empty_share": most}


def _rows(found: list[Compared]) -> list[dict[str, Any]]:
    return [_row(x.run, x.strategy, x.predictor, x.most_empty_share) for x in found]


def _table(rows: list[dict[str, Any]], resources: tuple[str, ...]) -> list[str]:
    names = "".join(f"{r[:8]:>9}{'dense':>7}" for r in resources[:2])
    lines = [f"{'strategy':<17}{'predictor':<14}{'empty':>7}{'bound':>7}{names}"
        f"{'refused':>9}{'moves':>7}{'inverted':>10}{'overdue':>9}{'fell back':>11}"]
    for r in rows:
        loads = "".join(f"{a:>9.1%}{b:>7.1%}" for a, b in list(zip(r["load"], r["density"], strict=True))[:2])
        lines.append(
            f"{r['strategy']:<17}{r['predictor'] or '-':<14}{r['empty_share']:>7.1%}{r['most_empty_share']:>7.1%}{loads}{r['refused']:>9}"
            f"{r['moves']:>7}"
            f"{r['inversions']:>10}{r['overdue_share']:>9.1%}{r['doubtful_share'] + r['packed_share']:>11.0%}"
        )
    return lines


def _head(trace: VmTrace, hosts: VmHosts) -> str:
    return f"{trace.name}: {len(trace)} machines on {len(hosts)} hosts"


def compare(args: argparse.Namespace) -> Result:
    from ..decide.cluster.vms import strategy
    from ..drive.vms import compare_vms
    from ..kernels.effort import Budget

    kinds = [strategy(name, where="--strategies") for name in args.strategies.split(",")]
    trace, hosts, from_s, learn_s = _trace(args)
    strategies, predictors = [kind() for kind in kinds], args.predictors.split(",")
    budget = Budget(sum(len(predictors) if s.forecasts else 1 for s in strategies))
    rows = _rows(compare_vms(trace, hosts, strategies, predictors, from_s=from_s, learn_s=learn_s, seed=args.seed, budget=budget))
    document = {"schema": "meshwright.cluster-vm-runs", "version": 1, "trace": trace.name, "hosts": len(hosts), "resources": list(trace.resources),
        "rows": rows}
    return Result(document, "\n".join([_head(trace, hosts), "", *_table(rows, trace.resources)]), cut=budget.cut)


def simulate(args: argparse.Namespace) -> Result:
    import numpy as np

    from ..cluster.vms import VmHosts
    from ..decide.cluster.vms import forecast, strategy
    from ..drive.vms import hosts_needed, run_vms, stranded
    from ..io.cluster import write_vms

    if args.export is not None:
        require_directory(args.export)
    chosen = strategy(args.strategy, where="--strategy")()
    trace, hosts, from_s, learn_s = _trace(args)
    predicted = forecast(args.predictor if chosen.forecasts else "perfect", trace, at_s=learn_s, seed=args.seed, where="--predictor")
    run = run_vms(trace, hosts, chosen, predicted, from_s=from_s, seed=args.seed)
    row = _row(run, chosen.name, predicted.name if chosen.forecasts else "", _most(run))
    row["stranded"] = stranded(run, seed=args.seed)
    lines = [_head(trace, hosts), "", *_table([row], trace.resources), ""]
    lines.append("stranded: " + ", ".join(f"{x:.1%} of {name}" for name, x in zip(trace.resources, row["stranded"], strict=True)))
    if args.needed:
        more = VmHosts(kind=np.tile(hosts.kind, MORE), name=hosts.name)  # in the same proportions
        row["hosts_needed"] = hosts_needed(trace, more, chosen, predicted, from_s=from_s, seed=args.seed)
        lines.append(f"hosts needed: {row['hosts_needed']}")
    if args.export is not None:
        write_vms(args.export, trace)
        lines.append(f"machines: {args.export}")
    document = {"schema": "meshwright.cluster-vm-run", "version": 1, "trace": trace.name, "hosts": len(hosts), "resources": list(trace.resources),
        **row}
    return Result(document, "\n".join(lines))


def _most(run: VmRun) -> float:
    import numpy as np

    from ..decide.cluster.vms import used_hosts_bound

    placed = np.zeros(len(run.trace), np.bool_)
    placed[run.stays["vm"]] = True
    least = used_hosts_bound(run.trace, placed, run.resized, from_s=run.from_s, until_s=run.trace.until_s)
    return 1 - float(least) / ((run.trace.until_s - run.from_s) * len(run.hosts))


def plan(args: argparse.Namespace) -> Result:
    from ..decide.cluster.vms import forecast, strategy
    from ..drive.vms import place_vms
    from ..io.cluster import write_vm_placement

    out: Path | None = args.out
    if out is not None:
        require_directory(out)
    chosen = strategy(args.strategy, where="--strategy")()
    trace, hosts, from_s, learn_s = _trace(args)
    predicted = forecast(args.predictor if chosen.forecasts else "perfect", trace, at_s=learn_s, seed=args.seed, where="--predictor")
    made, run = place_vms(trace, hosts, chosen, predicted, from_s=from_s, seed=args.seed)
    assert made.bound is not None
    row = _row(run, made.strategy, made.predictor, _most(run))
    lines = [
        _head(trace, hosts), f"{len(made.stays)} stays, proved; hosts are in use for {made.used_host_s / 3600:.0f} host hours, at least "
        f"{float(made.bound) / 3600:.0f} by the load", "", *_table([row], trace.resources),
    ]  # fmt: skip
    document = {"schema": "meshwright.cluster-vm-plan", "version": 1, "trace": trace.name, "hosts": len(hosts), "stays": len(made.stays), **row}
    if out is not None:
        write_vm_placement(out, made)
        document["written"] = str(out)
        lines.append(f"written: {out}")
    return Result(document, "\n".join(lines))
