"""A large job that no layout of its devices can hold is refused before anything is built: in seconds, with what it needs at least.

`decide.layout.least_memory` bounds the fullest device of all layouts of some degrees. What would help is told by the same bound, so it is necessary
and may not be enough: memory, devices, or a choice left open. Of smaller jobs a search takes seconds, and names changes that were found to fit
(`nearest`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...decide.layout.grid import degrees_of, with_experts
from ...decide.layout.least_memory import LeastMemory, least_memory
from ...decide.layout.problem import Degrees
from ...errors import Infeasible
from .context import Context
from .memory import MemoryWanted
from .program_sizes import MAX_SMALL_OPERATORS
from .sharding import Sharding, ShardingWanted
from .step_end import step_end
from .wishes import LayoutWanted, PrecisionWanted

__all__ = ["least_of", "require_room"]

# Times as many devices up to which the bound is asked whether they could hold the job.
MAX_TIMES_DEVICES = 64


def require_room(context: Context) -> None:
    """Raises: Infeasible for a large job whose least need is above what any device has."""
    limit = max(d.memory_bytes for d in context.fabric.devices)
    unlike = not all(d.memory_bytes for d in context.fabric.devices)
    if unlike or len(context.graph.nodes) <= MAX_SMALL_OPERATORS or context.wish(MemoryWanted).steps is not None:
        return
    bounds = _Bounds(context)
    found = list(bounds.of(context))
    need, degrees = min(found, default=(0, None))
    if degrees is None or need <= limit:
        return
    state = bounds.at(degrees).least_state(degrees, _level(context))
    helps = [f"devices with {need} bytes or more", *_helps(context, bounds, found, need, limit)]
    raise Infeasible(
        f"the job does not fit: no layout needs less than {need} bytes on some device, and devices have {limit}; least with {degrees}, weights, "
        f"gradients and optimizer state alone {state}",
        where=f"device {context.fabric.devices[0].name}", hint=f"necessary, and perhaps not enough: {'; or '.join(helps)}",
        data={"needed_bytes": need, "limit_bytes": limit, "state_bytes": state, "layout": str(degrees), "necessary": helps},
    )  # fmt: skip


def least_of(context: Context) -> int:
    """Bytes of the fullest device that no layout goes below. Raises: UsageError for degrees that do not divide."""
    return min((need for need, _ in _Bounds(context).of(context)), default=0)


class _Bounds:
    """By micro-batch size, the least of the job's graph."""

    def __init__(self, context: Context) -> None:
        self.context, self.known = context, dict[int, LeastMemory]()
        self.precision = context.wish(PrecisionWanted).precision
        self.end = step_end(context.job, context.graph, self.precision)

    def at(self, degrees: Degrees) -> LeastMemory:
        size = degrees.microbatch_size
        if size not in self.known:
            self.known[size] = least_memory(self.context.evaluator.graph_at(size), self.end, self.precision)
        return self.known[size]

    def of(self, context: Context) -> Iterator[tuple[int, Degrees]]:
        """What the smallest micro-batch of every combination of degrees needs at least."""
        level, seen = _level(context), set[Degrees]()
        for d in with_experts(degrees_of(context.problem), context.problem):
            if (alike := replace(d, microbatch_size=1)) not in seen:
                seen.add(alike)
                yield self.at(d).least(d, level), d


def _level(context: Context) -> int | None:
    return 0 if Sharding.name in context.without else context.wish(ShardingWanted).level


def _helps(context: Context, bounds: _Bounds, found: list[tuple[int, Degrees]], need: int, limit: int) -> Iterator[str]:
    wish, level = context.wish(LayoutWanted), _level(context)
    fixed: dict[str, Any] = {"--dp": wish.data, "--tp": wish.tensor, "--pp": wish.pipeline, "--microbatch": wish.microbatch, "--zero": level}
    given = [f"{name} {value}" for name, value in fixed.items() if value is not None]
    if given:
        free = context.wishing(replace(wish, data=None, tensor=None, pipeline=None, microbatch=None), ShardingWanted())
        least = least_of(replace(free, without=context.without - {Sharding.name}))
        if least < need:
            yield f"without {', '.join(given)} (at least {least} bytes then)"
    for times in range(2, MAX_TIMES_DEVICES + 1):
        more = [replace(d, data=d.data * times) for _, d in found]
        if any(bounds.at(d).least(d, level) <= limit for d in more):
            yield f"{times * len(context.fabric.devices)} devices like these or more"
            return
