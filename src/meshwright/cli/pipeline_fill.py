"""`meshwright pipeline fill`: K-FAC, other statistics, checkpoints or evaluation in a pipeline's idle time."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, require_directory
from .frame import Result
from .pipeline_problem import EACH, numbers

if TYPE_CHECKING:
    from ..decide.pipeline import PipelineProblem, Schedule
    from ..deferrable import FillWork
    from ..drive.pipeline.fill import Filled

__all__ = ["HELP", "arguments", "run"]

HELP = "put K-FAC or other work that can wait into a pipeline's idle time, and prove that no step gets longer"
KINDS = ("kfac", "shampoo", "muon", "checkpoint", "evaluate")
NEEDED = {
    "kfac": ("curvature_s", "inverse_s"), "shampoo": ("statistics_s", "roots_s"), "muon": ("orthogonalise_s",), "checkpoint": ("write_s",),
    "evaluate": ("evaluations",),
}  # fmt: skip
EPILOG = """\
--work kfac        --curvature-s, --inverse-s; also --gradient-curvature-s, --gradient-inverse-s, --sync-s, --precondition-s, --*-bytes
--work shampoo     --statistics-s, --roots-s            --work muon      --orthogonalise-s
--work checkpoint  --write-s; also --snapshot-s         --work evaluate  --evaluations N
--work FILE.json   items of your own; see docs/bubble_filling.md
A cycle of steps repeats; used: share of time that a device computes, without the work and with it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", nargs="?", help="a plan of `meshwright pipeline plan`; none with --profile")
    add("--work", action="append", default=[], metavar="KIND|FILE", help=f"{', '.join(KINDS)}, or a file; may be given several times")
    add("--curvature-s", metavar="S", help=f"time of both factors of one micro-batch of a stage: {EACH}")
    add("--gradient-curvature-s", metavar="S", help="time of factor B alone; --curvature-s is then factor A alone")
    add("--inverse-s", metavar="S", help=f"time of both inverses of a stage: {EACH}")
    add("--gradient-inverse-s", metavar="S", help="time of factor B's inverse alone; --inverse-s is then factor A's alone")
    add(
        "--sync-s", metavar="S",
        help="time to sum both factors of a stage over its copies and replicas (default: a ring all-reduce of --factor-bytes)",
    )  # fmt: skip
    add("--precondition-s", metavar="S", help="time of preconditioning at the end of every step; it is not put into idle time (default 0)")
    add("--layers", type=at_least_one, default=1, help="layers per stage; the work is cut into one piece per layer (default 1)")
    add("--input-bytes", metavar="B", help="bytes of inputs kept per micro-batch and stage until their curvature is done (default 0)")
    add("--error-bytes", metavar="B", help="bytes of output gradients kept per micro-batch and stage until their curvature is done (default 0)")
    add("--factor-bytes", metavar="B", help="bytes of both factors of a stage; the inverses take as many again (default 0)")
    add("--statistics-s", metavar="S", help="time of Shampoo's statistics of a stage, per refresh")
    add("--roots-s", metavar="S", help="time of Shampoo's inverse roots of a stage, per refresh")
    add("--orthogonalise-s", metavar="S", help="time of Muon's orthogonalisation of a stage")
    add("--write-s", metavar="S", help="time to write a stage's checkpoint")
    add("--snapshot-s", metavar="S", help="time to copy a stage's weights before they are written (default 0)")
    add("--piece-s", type=float, default=0.0, metavar="S", help="longest piece of writing a checkpoint, in seconds (default: one piece)")
    add("--evaluations", type=int, metavar="N", help="evaluation micro-batches per cycle")
    add("--profile", metavar="CSV", help="print what PipeFisher's model says of a measured block (prof/*.csv of its repository), and stop")
    add("--depths", default="4,8,16", help="with --profile: numbers of stages, with as many micro-batches and one block per stage (default 4,8,16)")
    add("--compat", action="store_true", help="also print what the greedy method of PipeFisher's authors does with the K-FAC work, device by device")
    add("--margin", type=float, default=0.0, help="idle time must be longer than the work in it by this share (default 0)")
    add("--most-steps", type=at_least_one, default=256, help="longest cycle, in steps (default 256)")
    add("--out", "-o", type=Path, default=Path("filled.json"), help="where to write the plan (default filled.json)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.pipeline.fill import fill_plan
    from ..drive.plans import read_plan
    from ..errors import UsageError
    from ..io.plan.plan import write_plan

    if args.profile is not None:
        return _profile(args.profile, args.depths)
    if args.plan is None or not args.work:
        raise UsageError("needs a plan and --work", hint="or --profile CSV; see `meshwright pipeline fill --help`")
    require_directory(args.out)
    plan = read_plan(args.plan)
    filled = fill_plan(plan, lambda problem, schedule: _work(args, problem, schedule), margin=args.margin, most_steps=args.most_steps)
    write_plan(args.out, filled.plan)
    document, text = _document(filled, args.out), _text(filled, args.out)
    return _with_greedy(filled, document, text) if args.compat else Result(document, text)


def _with_greedy(filled: Filled, document: dict[str, Any], text: str) -> Result:
    from dataclasses import asdict

    from ..decide.pipeline.fill_compat import published_greedy
    from ..io.quantity import show_time

    found = published_greedy(filled.filling.idle, filled.filling.work)
    lines = [text, "the greedy of PipeFisher's authors, each device by itself (no plan is made of it):"]
    for rank, g in enumerate(found):
        left = f", {show_time(g.exposed_s)} fit into no idle time" if g.exposed_s else ""
        lines.append(f"  rank {rank}: {g.steps} steps, used {g.used * 100:.1f} %{left}")
    return Result({**document, "published_greedy": [asdict(g) for g in found]}, "\n".join(lines))


def _profile(path: str, depths: str) -> Result:
    from dataclasses import asdict

    from ..errors import UsageError
    from ..io.plan.kfac_csv import read_kfac_csv
    from ..io.quantity import show_size, show_time
    from ..profile.kfac import capacity

    parts = depths.split(",")
    if not all(p.isdecimal() and 1 < int(p) <= 4096 for p in parts):
        raise UsageError(f"{depths!r} is not a list of stages from 2 to 4096", where="--depths", hint="e.g. 4,8,16")
    rows = []
    lines = [f"{'batch':>6}{'stages':>8}  {'schedule':<22}{'step':>10}{'bubble':>10}{'work':>10}{'refresh':>9}{'memory':>11}"]
    for row in read_kfac_csv(path):
        for depth in map(int, parts):
            for both_ways in (False, True):
                for again in (False, True):
                    c = capacity(row, depth, both_ways=both_ways, recompute=again)
                    name = ("chimera" if both_ways else "gpipe, 1f1b") + (" recompute" if again else "")
                    rows.append({"batch": row.batch, "stages": depth, "both_ways": both_ways, "recompute": again, **asdict(c)})
                    lines.append(
                        f"{row.batch:>6}{depth:>8}  {name:<22}{show_time(c.step_s):>10}{show_time(c.bubble_s):>10}{show_time(c.work_s):>10}"
                        f"{c.refresh_steps:>9}{show_size(round(c.memory_bytes)):>11}"
                    )  # fmt: skip
    lines.append("step: with preconditioning; work: of one refresh; refresh: steps whose bubbles hold it")
    return Result({"schema": "meshwright.kfac-capacity", "version": 1, "rows": rows}, "\n".join(lines))


def _work(args: argparse.Namespace, problem: PipelineProblem, schedule: Schedule) -> FillWork:
    from ..decide.pipeline.fill_work import joined
    from ..errors import UsageError
    from ..io.plan.fill import read_fill_work

    parts = []
    for kind in args.work:
        if kind in KINDS:
            missing = [n for n in NEEDED[kind] if getattr(args, n) is None]
            if missing:
                flag = "--" + missing[0].replace("_", "-")
                raise UsageError(f"--work {kind} needs {flag}", where="--work", hint="see `meshwright pipeline fill --help`")
            parts.append(_made(args, kind, problem, schedule))
        elif Path(kind).suffix or "/" in kind:
            parts.append(read_fill_work(kind))
        else:
            raise UsageError(f"there is no work {kind!r}", where="--work", hint=f"there is: {', '.join(KINDS)}, or a file such as work.json")
    return joined(parts, problem.devices * problem.data)


def _made(args: argparse.Namespace, kind: str, problem: PipelineProblem, schedule: Schedule) -> FillWork:
    from ..decide.pipeline.fill_work import KFACCosts, checkpoint_work, evaluation_work, gradient_work, kfac_work

    def each(name: str, *, size: bool = False) -> Any:
        return numbers(getattr(args, name), "--" + name.replace("_", "-"), size=size)

    if kind == "kfac":
        return kfac_work(problem, schedule, KFACCosts(
            curvature_s=each("curvature_s"), inverse_s=each("inverse_s"), gradient_curvature_s=each("gradient_curvature_s"),
            gradient_inverse_s=each("gradient_inverse_s"), sync_s=each("sync_s"), precondition_s=each("precondition_s") or 0.0, layers=args.layers,
            input_bytes=each("input_bytes", size=True) or 0, error_bytes=each("error_bytes", size=True) or 0,
            factor_bytes=each("factor_bytes", size=True) or 0,
        ))  # fmt: skip
    if kind == "shampoo":
        phases = (("statistics", each("statistics_s")), ("roots", each("roots_s")))
        return gradient_work(problem, schedule, kind, phases, layers=args.layers, kept_bytes=problem.gradient_bytes)
    if kind == "muon":
        return gradient_work(
            problem, schedule, kind, (("orthogonalise", each("orthogonalise_s")),), layers=args.layers, kept_bytes=problem.gradient_bytes
        )
    if kind == "checkpoint":
        return checkpoint_work(problem, schedule, write_s=each("write_s"), snapshot_s=each("snapshot_s") or 0.0, piece_s=args.piece_s)
    return evaluation_work(problem, schedule, args.evaluations)


def _rows(filled: Filled) -> list[dict[str, Any]]:
    f = filled.filling
    kinds = {i.name: i.kind for i in f.work.items}
    rows = []
    for rank in range(len(f.idle.gaps)):
        own: Counter[str] = Counter()
        for p in f.placements:
            if p.rank == rank:
                own[kinds[p.item]] += 1
        total = f.steps * f.idle.step_s
        busy = f.steps * f.idle.busy_s[rank]
        rows.append({
            "rank": rank, "busy_s": f.idle.busy_s[rank], "idle_s": float(f.idle.idle_s(rank)), "work_s": f.work_s(rank),
            "used_before": busy / total if total else 1.0, "used_after": (busy + f.work_s(rank)) / total if total else 1.0,
            "exposed_s": f.work.exposed_s[rank] if f.work.exposed_s else 0.0, "memory_bytes": filled.memory_bytes[rank],
            "pieces": dict(sorted(own.items())),
        })  # fmt: skip
    return rows


def _document(filled: Filled, path: Path) -> dict[str, Any]:
    import msgspec

    f = filled.filling
    return {
        "schema": "meshwright.pipeline-fill", "version": 1, "strategy": filled.judged.schedule.name, "items": len(f.work.items), "steps": f.steps,
        "bound_steps": f.bound_steps, "step_s": f.idle.step_s, "makespans_s": list(filled.makespans_s), "margin": filled.margin, "order": f.order,
        "used_before": f.used(filled=False), "used_after": f.used(filled=True), "exposed_s": max(f.work.exposed_s, default=0.0),
        "bound": msgspec.to_builtins(f.bound), "ranks": _rows(filled), "path": str(path),
    }  # fmt: skip


def _text(filled: Filled, path: Path) -> str:
    from ..io.quantity import show_size, show_time

    f = filled.filling
    exposed = max(f.work.exposed_s, default=0.0)
    lines = [
        f"{filled.judged.schedule.name}: {len(f.work.items)} items in the idle time of {f.steps} steps, no fewer than {f.bound_steps} can do; used "
        f"{f.used(filled=False) * 100:.1f} % -> {f.used(filled=True) * 100:.1f} %",
        f"a step takes {show_time(f.idle.step_s)} without the work, {show_time(max(filled.makespans_s))} with it"
        + (f"; then {show_time(exposed)} of preconditioning" if exposed else ""),
        f"  {'rank':<6}{'busy':>10}{'idle':>10}{'work / cycle':>14}{'used':>17}{'memory':>11}  pieces",
    ]
    for r in _rows(filled):
        used = f"{r['used_before'] * 100:.1f} -> {r['used_after'] * 100:.1f} %"
        pieces = ", ".join(f"{n} {k}" for k, n in r["pieces"].items())
        lines.append(
            f"  {r['rank']:<6}{show_time(r['busy_s']):>10}{show_time(r['idle_s']):>10}{show_time(r['work_s']):>14}{used:>17}"
            f"{show_size(r['memory_bytes']):>11}  {pieces}"
        )
    lines.append("checked: every step's form, deadlock, races and simulated time; placements: order, overlap, memory; certificate")
    return "\n".join([*lines, f"written: {path}"])
