"""Differences of files: traces of two runs, two run folders of one plan, or a plan's prediction beside a run of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..bottleneck.diff import Diff, Leaf, by_module, by_step, difference
from ..bottleneck.lanes import RankView
from ..drive.plans import read_plan
from ..errors import UsageError
from ..io.trace.module_tree import read_module_tree
from ..plan.plan import Plan
from ..program.calls import InlinedProgram, inline
from ..program.phases import PHASES, phases
from ..program.program import Program
from ..run.launch.run_folder import read_run, run_plan
from ..run.recording.recording import plan_identity
from ..timeline import Timeline
from .own_run import plain_steps, run_views
from .ranks import read_ranks, traces_in
from .run import predicted_run, require_costs

__all__ = ["FoundDiff", "diff_of", "kind_of"]


@dataclass(frozen=True, kw_only=True)
class FoundDiff:
    """`joined`: "steps" (of one program) or "modules"."""

    diff: Diff
    joined: str
    a: str
    b: str


def diff_of(a: Path, b: Path, *, plan: Path | None = None, modules: Path | None = None, by: str = "auto") -> FoundDiff:
    """What changed from `a` to `b`, each a trace, a folder of traces (a rank each), a run folder, or a plan.

    `plan`: what run folders ran (default: what they hold). `by`: "steps", "modules", or "auto": steps where both sides are of one plan of ours.
    Raises: UsageError for sides that cannot be joined.
    """
    kinds = [kind_of(p) for p in (a, b)]
    if kinds == ["plan", "plan"]:
        raise UsageError("both are plans", where=str(b), hint="`meshwright program diff` compares plans")
    known = plan or next((p for p, kind in zip((a, b), kinds, strict=True) if kind == "plan"), None)
    ours = all(kind in ("run", "plan") for kind in kinds)
    if by == "steps" and not ours:
        raise UsageError("only runs and plans of ours have steps to join", where="--by", hint="use --by modules")
    if "plan" in kinds and not (ours and by != "modules"):
        raise UsageError("a plan is compared with the folder of a run of it, by steps", where=str((a, b)[kinds.index("plan")]))
    given = read_plan(known) if known is not None and "run" in kinds else None
    plans = {p: given or run_plan(p) for p, kind in zip((a, b), kinds, strict=True) if kind == "run"}
    if ours and by != "modules":
        first, *others = plans.values()
        if all(plan_identity(p) == plan_identity(first) for p in others):
            return _by_steps(first, (a, b), kinds)
        if by == "steps":
            raise UsageError("the runs are of different plans, which have different steps", where="--by", hint="use --by modules")
    tree = read_module_tree(modules) if modules is not None else None
    sides = []
    for path, kind in zip((a, b), kinds, strict=True):
        if kind == "run":
            views: Sequence[RankView] = run_views(plans[path], path)[0]
        else:
            views = [r.view for r in read_ranks(traces_in(path) if path.is_dir() else [path], tree)]
        sides.append(by_module(views))
    return FoundDiff(diff=difference(*sides), joined="modules", a=str(a), b=str(b))


def kind_of(path: Path) -> str:
    """`plan`, `run` (the folder of one of ours), `trace`, or `traces` (a folder of them). Raises: UsageError where nothing can be read."""
    if str(path) == "-":
        return "plan"
    if path.is_dir():
        return "run" if (path / "run.json").is_file() else "traces"
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), hint="check the path") from None
    if head[:2] == b"\x1f\x8b":
        with suppress(zlib.error):  # a damaged file is told of by whoever reads it
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, len(head))
    return "plan" if b'"meshwright.' in head and b'"traceEvents"' not in head else "trace"


def _by_steps(plan: Plan, paths: tuple[Path, Path], kinds: list[str]) -> FoundDiff:
    inlined = inline(plan.main, plan.programs)
    leaves = _leaves(inlined)
    sides = []
    for path, kind in zip(paths, kinds, strict=True):
        if kind == "plan":
            other = paths[1 - kinds.index("plan")]
            run = read_run(other, plan)
            require_costs(run, other)
            sides.append(_of_timeline(predicted_run(plan, inlined.program, run), inlined.program, leaves))
        else:
            run = read_run(path, plan)
            found = [_of_timeline(run.steps[i], inlined.program, leaves) for i in plain_steps(run)]
            keys = dict.fromkeys(k for one in found for k in one)
            sides.append({k: sum(one.get(k, 0.0) for one in found) / len(found) for k in keys})
    return FoundDiff(diff=difference(*sides), joined="steps", a=str(paths[0]), b=str(paths[1]))


def _leaves(inlined: InlinedProgram) -> list[Leaf]:
    """(phase, what the step does) of every program step."""
    codes = phases(inlined).tolist()
    return [(PHASES[code] or "other", inlined.program.describe(s)) for s, code in enumerate(codes)]


def _of_timeline(timeline: Timeline, program: Program, leaves: Sequence[Leaf]) -> dict[Leaf, float]:
    """Mean over ranks, so that the leaves sum to the step."""
    spans = timeline.spans
    columns = (np.asarray(spans.rank), np.asarray(spans.step), spans.start_s, spans.end_s)
    found = by_step(*columns, makespan_s=timeline.makespan_s, ranks=program.ranks, leaf_of=leaves)
    return {k: v / program.ranks for k, v in found.items()}
