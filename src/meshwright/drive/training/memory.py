"""The decision on a device's memory: whole stages planned by their step graphs, and, where nothing fits, the layouts that need least.

A search simulates the micro-batches that promise the shortest step; where none of them fits, a smaller one may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import Unsupported, UsageError
from .context import Context, Decision, Found
from .evaluated import Evaluated, fastest
from .pipeline import PipelineWanted
from .program_sizes import MAX_PROGRAM_STEPS, expected_steps
from .recompute import RecomputeWanted, with_recomputation
from .sharding import ShardingWanted
from .stage_steps import StageSteps, StepSource

__all__ = ["Memory", "MemoryWanted", "leanest", "leanest_fitting"]

# Combinations of degrees, those with the least weights and state, whose exact need is worked out where nothing fits.
MAX_EXACT_DEGREES = 4


@dataclass(frozen=True)
class MemoryWanted:
    """`steps`: step graphs of stages; with them, recomputation by `auto` and `optimal` also tries plans of whole stages, and takes what is faster."""

    steps: StepSource | None = None


@dataclass(frozen=True)
class Memory(Decision):
    name = "memory"

    def require(self, context: Context) -> None:
        if context.wish(RecomputeWanted).policy == "steps" and context.wish(MemoryWanted).steps is None:
            hint = "give steps, e.g. probe.steps.stages.StageSource"
            raise UsageError("plans of whole stages need the stages' step graphs", where="recompute", hint=hint)

    def fitted(self, found: list[Evaluated], context: Context, limit_s: float) -> list[Evaluated]:
        first, steps = found[0], context.wish(MemoryWanted).steps
        if steps is None or first.timeline is None or first.fits or context.wish(RecomputeWanted).policy not in ("auto", "optimal", "steps"):
            return found
        try:
            whole = StageSteps(first.layout, steps, orders=first.candidate.orders, room_bytes=first.room_bytes())
            again = context.evaluator.again
            return found + with_recomputation("steps", first, whole, lambda layout, chosen: again(first, layout, chosen), limit_s)[1:]
        except Unsupported:  # a segment that no planned step can run
            return found

    def choose(self, found: Found, context: Context) -> Found:
        """Where nothing fits, and any layout would do: the fastest of those that need least."""
        any_layout = not context.wish(ShardingWanted).level and not context.wish(PipelineWanted).one
        best = leanest_fitting(context, found.judged) if found.best is None and any_layout else None
        return found if best is None else replace(found, best=best, judged=[*found.judged, best])


def leanest(context: Context, judged: list[Evaluated]) -> list[Evaluated]:
    """Layouts that need little, simulated in device order: of each combination of degrees the smallest micro-batch, those with least state first."""
    first: dict[tuple[int, int, int, bool], Evaluated] = {}
    limit = max(d.memory_bytes for d in context.fabric.devices)
    possible = [e for e in judged if e.candidate.layout is not None and expected_steps(e.layout) <= MAX_PROGRAM_STEPS]
    for e in sorted(possible, key=lambda e: e.candidate.degrees):
        if 1 < limit < e.candidate.memory_floor_bytes:
            continue
        d = e.candidate.degrees
        first.setdefault((d.data, d.tensor, d.pipeline, d.sequence), e)
    found = []
    for e in sorted(first.values(), key=lambda e: (e.candidate.memory_floor_bytes, e.candidate.degrees))[:MAX_EXACT_DEGREES]:
        placement = tuple(d.name for d in context.fabric.devices[: e.layout.ranks])
        if context.wish(MemoryWanted).steps is None:
            found.append(context.evaluator.evaluate(e.candidate, placement, "device order"))
        else:  # what it can do with less counts, too
            tried = context.judge(e.candidate, placement, "device order")
            found.append(min(tried, key=lambda x: x.excess_bytes if x.timeline is not None else 1 << 62))
    return [e for e in found if e.timeline is not None]


def leanest_fitting(context: Context, judged: list[Evaluated]) -> Evaluated | None:
    """The fastest of `leanest` that fits."""
    return fastest(leanest(context, judged), lambda e: (e.candidate.degrees,))
