"""Bytes alive and seconds of a straight-line plan of a training step.

Results that are held keep their storages; running a node again makes its storages anew, beside older ones that a view may still hold. While an action
runs, what it makes and its inner workspace exist beside everything that was held before; then its `drops` are let go.
Cost: O(operands + drops) per action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..graph.step_graph import StepAction, StepGraph

__all__ = ["AliveStorage", "StepRun", "alive_at", "simulate_step"]


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """`bytes_at[i]`: alive while action i runs; `held_after`: nodes (placeholders aside) whose results are held after action i, for those asked."""

    bytes_at: tuple[int, ...]
    peak_bytes: int
    peak_at: int
    time_s: float
    held: dict[int, tuple[int, ...]]


def simulate_step(graph: StepGraph, actions: Sequence[StepAction], *, held_before: Sequence[int] = (), boundary: int | None = None) -> StepRun:
    """`held_before`: positions before which to report who is held (the number of actions: at the end); `StepRun.held` maps them to node numbers.
    `boundary`: the action at which backward begins, needed where several micro-batches are in flight.

    Raises: UsageError for an action that reads what is not held, runs what is held, or drops what is not held, or a boundary that is missing.
    """
    if graph.in_flight > 1 and boundary is None:
        raise UsageError("several micro-batches are in flight, and nothing says where backward begins", where=graph.name)
    state = _State(graph)
    wanted, held = {*held_before}, dict[int, tuple[int, ...]]()
    bytes_at: list[int] = []
    time_s, kept = 0.0, 0
    for i, action in enumerate(actions):
        if i in wanted:
            held[i] = state.holds()
        if i == boundary:
            kept = state.live - graph.fixed_bytes()
        node = graph.nodes[action.node]
        way = node if action.alternative < 0 else node.alternatives[action.alternative]
        bytes_at.append(state.run(action))
        time_s += way.time_s
    if len(actions) in wanted:
        held[len(actions)] = state.holds()
    if boundary == len(actions):
        kept = state.live - graph.fixed_bytes()
    # The other micro-batches in flight have run their forward and wait: each holds what this one holds when its backward begins.
    bytes_at = [b + (graph.in_flight - 1) * kept for b in bytes_at]
    peak = max(bytes_at, default=state.live)
    return StepRun(bytes_at=tuple(bytes_at), peak_bytes=peak, peak_at=bytes_at.index(peak) if bytes_at else 0, time_s=time_s, held=held)


@dataclass(frozen=True, kw_only=True)
class AliveStorage:
    """A storage that the step made and that exists while an action runs. `holders`: nodes whose held results lie in it; `since`, `until`: actions of
    its making and of its end (the number of actions: it stays)."""

    size_bytes: int
    made_by: int
    holders: tuple[int, ...]
    since: int
    until: int


def alive_at(graph: StepGraph, actions: Sequence[StepAction], position: int) -> tuple[AliveStorage, ...]:
    """What the step has made that exists while action `position` runs, largest first. Raises: UsageError as `simulate_step`."""
    state = _State(graph)
    there: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # instance -> (maker, since, holders)
    maker: list[tuple[int, int]] = []
    until: dict[int, int] = {}
    for i, action in enumerate(actions):
        before = {x for x, h in enumerate(state.holders) if h}
        state.run(action)
        maker += [(action.node, i)] * (len(state.size) - len(maker))
        if i == position:
            there = {x: (*maker[x], tuple(sorted(state.holders[x]))) for x in {*before, *(x for x, m in enumerate(maker) if m[1] == i)}}
        if i >= position:
            until |= {x: i for x in there if x not in until and not state.holders[x]}
    found = [
        AliveStorage(size_bytes=state.size[x], made_by=m, holders=h or (m,), since=since, until=until.get(x, len(actions)))
        for x, (m, since, h) in there.items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda a: (-a.size_bytes, a.since)))


class _State:
    """`lies[n]`: the instances that the held result of node n lies in, one per storage of the node that the step makes."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph, self.live = graph, graph.fixed_bytes()
        self.lies: dict[int, dict[int, int]] = {i: {} for i, n in enumerate(graph.nodes) if n.phase == "input"}
        self.given = len(self.lies)
        self.size: list[int] = []
        self.holders: list[set[int]] = []

    def holds(self) -> tuple[int, ...]:
        return tuple(sorted(n for n in self.lies if self.graph.nodes[n].phase != "input"))

    def run(self, action: StepAction) -> int:
        """Bytes alive while it runs."""
        graph, node = self.graph, self.graph.nodes[action.node]
        way = node if action.alternative < 0 else node.alternatives[action.alternative]
        over = -1 if action.alternative < 0 else node.alternatives[action.alternative].over
        if action.node in self.lies:
            raise UsageError("is run while its result is held", where=node.name)
        for x in way.inputs:
            if x not in self.lies:
                raise UsageError(f"reads {graph.nodes[x].name}, which is not held", where=node.name)
        place: dict[int, int] = {}
        gone: set[int] = set()
        for s in node.storages:
            if s in node.makes:
                place[s] = next(iter(self.lies[over].values())) if over >= 0 else self._new(graph.storages[s].size_bytes)
                gone = {*self.holders[place[s]]} if over >= 0 else gone
            elif graph.storages[s].kind == "made":
                found = [self.lies[x][s] for x in way.inputs if s in self.lies[x]]
                if not found:
                    raise UsageError(f"its result lies in a storage of {graph.storages[s].owner}, which no operand holds", where=node.name)
                place[s] = found[0]
        self.lies[action.node] = place
        for instance in place.values():
            self.holders[instance].add(action.node)
        most = self.live + way.workspace_bytes
        for x in gone:
            self._drop(x)
        for x in action.drops:
            if x in self.lies and graph.nodes[x].phase != "input":
                self._drop(x)
            elif x not in gone:
                raise UsageError(f"{graph.nodes[x].name} is dropped, which is not held", where=node.name)
        return most

    def _new(self, size: int) -> int:
        self.size.append(size)
        self.holders.append(set())
        self.live += size
        return len(self.size) - 1

    def _drop(self, x: int) -> None:
        for instance in self.lies.pop(x).values():
            self.holders[instance].discard(x)
            if not self.holders[instance]:
                self.live -= self.size[instance]
