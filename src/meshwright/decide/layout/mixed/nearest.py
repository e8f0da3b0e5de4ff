"""What would make an infeasible layout search feasible: the nearest changes, each found by searching with it.

Tried, those that need no other devices first: sharding levels and micro-batches that were ruled out; more memory per device (the least that a layout
needs, by the closed form, raised until a simulated layout fits); more servers of one kind, the fewest found by doubling and halving. The limits
of budget and throughput that could be kept come with the error itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from ....errors import Infeasible, MeshwrightError, UsageError
from .. import strategies
from .candidate import Pool, Problem
from .search import Demands, Found, search_mixed, uniform_choices

__all__ = ["Change", "nearest_feasible"]

# Candidates simulated per changed problem: it is asked whether one fits, not which is best.
MAX_SIMULATED = 6
# Servers of a kind that are tried, as a multiple of those there are.
MAX_SERVERS_FACTOR = 32
# Raises of memory, of 5 % each, where the closed form's least does not do in simulation.
MAX_RAISES = 6


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """`layout`: the best found then, `time_s` its simulated step."""

    kind: str  # "levels" | "micro-batch" | "memory" | "servers"
    what: str
    layout: str
    time_s: float
    devices: int
    memory_bytes: int = 0


def nearest_feasible(
    error: Infeasible, problem: Problem, demands: Demands, *, smaller: Callable[[], Problem] | None = None, methods: tuple[str, ...] = ()
) -> Infeasible:
    """The same error with what would help in `hint` and `data["changes"]`. `smaller` makes the problem with micro-batches down to 1."""
    found = list(_changes(error, problem, demands, smaller, _quick(methods)))
    if not found:
        return error
    said = "; or ".join(f"{c.what} ({c.layout}, {c.time_s:.4g} s a step)" for c in found)
    data: dict[str, Any] = {**error.data, "changes": [msgspec.to_builtins(c) for c in found]}
    return Infeasible(error.message, where=error.where, hint=f"{error.hint}; nearest changes: {said}", data=data)


def _quick(methods: tuple[str, ...]) -> tuple[str, ...]:
    """Of these strategies (none: all) the cheap ones, to try changes with."""
    quick = tuple(kind.name for kind in strategies("layers") if kind.quick)
    return tuple(m for m in methods or quick if m in quick) or quick[:1]


def _changes(
    error: Infeasible, problem: Problem, demands: Demands, smaller: Callable[[], Problem] | None, methods: tuple[str, ...]
) -> Iterator[Change]:
    def change(kind: str, what: str, changed: Problem, memory_bytes: int = 0) -> Change | None:
        found = _search(changed, demands, methods)
        if found is None:
            return None
        devices, best = sum(p.kind.devices for p in changed.pools), found.best
        return Change(kind=kind, what=what, layout=best.candidate.layout.name, time_s=best.time_s, devices=devices, memory_bytes=memory_bytes)

    every = uniform_choices()
    if len(problem.choices) < len(every):
        missing = sorted({c.sharding for c in every} - {c.sharding for c in problem.choices})
        if made := change("levels", f"sharding level {' or '.join(map(str, missing))} too", replace(problem, choices=every)):
            yield made
    if smaller is not None and 1 not in problem.microbatches:
        try:
            lower = smaller()
        except MeshwrightError:
            lower = problem
        if lower is not problem and (made := change("micro-batch", "micro-batches down to 1", lower)):
            yield made
    need = error.data.get("needed_bytes")
    if isinstance(need, int):
        for _ in range(MAX_RAISES):
            roomier = tuple(replace(p, memory_bytes=max(p.memory_bytes, need)) if p.memory_bytes else p for p in problem.pools)
            if made := change("memory", f"devices with {need} bytes", replace(problem, pools=roomier), need):
                yield made
                break
            need = need * 21 // 20
    for pool in problem.pools:
        count = _fewest(problem, pool, demands, methods)
        what = f"{count} servers of {pool.kind.name} instead of {len(pool.kind.servers)}"
        if count and (made := change("servers", what, _with_servers(problem, pool, count))):
            yield made


def _search(problem: Problem, demands: Demands, methods: tuple[str, ...]) -> Found | None:
    try:
        return search_mixed(problem, demands, methods=methods, simulated=MAX_SIMULATED, refine=0)
    except (Infeasible, UsageError):
        return None


def _fewest(problem: Problem, pool: Pool, demands: Demands, methods: tuple[str, ...]) -> int:
    """The fewest servers of this kind with which a layout was found, up to MAX_SERVERS_FACTOR as many; 0 for none."""
    here = len(pool.kind.servers)
    low, high = here, 2 * here
    while high <= MAX_SERVERS_FACTOR * here and _search(_with_servers(problem, pool, high), demands, methods) is None:
        low, high = high, 2 * high
    if high > MAX_SERVERS_FACTOR * here:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        if _search(_with_servers(problem, pool, middle), demands, methods) is None:
            low = middle
        else:
            high = middle
    return high


def _with_servers(problem: Problem, pool: Pool, count: int) -> Problem:
    """The same problem with that many servers of one kind, alike and wired alike."""
    names = (*pool.kind.servers, *(f"{pool.kind.servers[-1]}+{i}" for i in range(1, count)))[:count]
    grown = replace(pool, kind=replace(pool.kind, servers=names))
    return replace(problem, pools=tuple(grown if p.key == pool.key else p for p in problem.pools))
