"""Memory of one training step by liveness on the joint graph: what is alive while each call runs.

A storage is alive from the call that creates it to the last call that reads any view of it. Parameters, buffers and inputs are alive
throughout; gradients of parameters from their creation to the end. Not counted: the optimiser's state, memory that a call takes
inside itself (library workspaces; segments of LSTMs know theirs, see `recurrent`), padding of the allocator. Liveness is computed on the
joint graph rather than watched in a run, because holding tensors to watch them changes what is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from ..errors import UsageError
from .graph import OpGraph
from .recurrent import recurrent_workspaces

__all__ = ["Liveness", "held_bytes", "kept_storages", "peak_bytes", "replay_workspace", "segment_workspace"]

T = TypeVar("T")


def held_bytes(graph: OpGraph) -> int:
    """Bytes alive through the whole step: parameters, buffers, inputs."""
    inputs = {g.storage for g in graph.inputs if g.storage >= 0}
    return sum(p.size_bytes for p in (*graph.parameters, *graph.buffers)) + sum(graph.storages[s].size_bytes for s in inputs)


def peak_bytes(graph: OpGraph) -> int:
    """Peak of live tensor storage over one forward and backward pass at the graph's batch size, parameters and gradients included.

    A graph captured as one opaque operator has no joint graph: then everything it saved and every gradient count as alive at once.
    """
    return _liveness(graph).peak_bytes()


def segment_workspace(graph: OpGraph, node_names: Collection[str]) -> tuple[int, int]:
    """`Liveness(graph).segment_workspace(node_names)`; the `Liveness` of the last few graphs is remembered."""
    return _liveness(graph).segment_workspace(node_names)


def replay_workspace(graph: OpGraph, node_names: Collection[str], regions: Sequence[Collection[str]]) -> tuple[int, int]:
    """`Liveness(graph).replay_workspace(node_names, regions)`; the `Liveness` of the last few graphs is remembered."""
    return _liveness(graph).replay_workspace(node_names, regions)


def kept_storages(graph: OpGraph) -> dict[str, set[int]]:
    """Per forward node the storages (of `OpGraph.storages`) that autograd keeps for its backward; those of the last few graphs are remembered.

    `OpNode.saved` names a storage at its first saver only; the joint graph's backward calls show the later ones. A storage that is saved
    but cannot be found in the joint graph counts as kept by every node that reads it.
    """
    return _of_recent(_RECENT_KEPT, graph, _kept_storages)


def _kept_storages(graph: OpGraph) -> dict[str, set[int]]:
    storage_of = {n.name: n.outputs[0].storage for n in graph.nodes if n.outputs}
    result: dict[str, int] = {}  # forward node -> joint storage of its result, which its last forward call makes
    made: dict[str, tuple[int, ...]] = {}
    kept = {n.name: {*n.saved} for n in graph.nodes}
    for call in graph.joint:
        made[call.name] = tuple(o.storage for o in call.outputs if o.storage >= 0)
        if call.phase == "forward" and made[call.name]:
            result[call.node] = made[call.name][0]
    forward_of = {joint: storage_of[node] for node, joint in result.items() if storage_of.get(node, -1) >= 0}
    for call in graph.joint:
        if call.phase == "backward" and call.node in kept:
            kept[call.node] |= {forward_of[s] for v in call.inputs for s in made.get(v, ()) if s in forward_of}
    lost = {s for n in graph.nodes for s in n.saved} - {*forward_of.values()}
    for n in graph.nodes:
        kept[n.name] |= {storage_of[v] for v in n.inputs if storage_of.get(v, -1) in lost}
    return kept


_RECENT: deque[tuple[OpGraph, Liveness]] = deque(maxlen=4)  # by identity: graphs are immutable, and too large to hash
_RECENT_KEPT: deque[tuple[OpGraph, dict[str, set[int]]]] = deque(maxlen=4)


def _liveness(graph: OpGraph) -> Liveness:
    return _of_recent(_RECENT, graph, Liveness)


def _of_recent(recent: deque[tuple[OpGraph, T]], graph: OpGraph, make: Callable[[OpGraph], T]) -> T:
    for known, value in list(recent):
        if known is graph:
            return value
    recent.append((graph, make(graph)))
    return recent[-1][1]


class Liveness:
    """The lifetimes of a graph's joint storages; O(calls) to make, then O(calls of the segment) per question."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._calls: dict[str, list[int]] = {n.name: [] for n in graph.nodes}
        outputs: dict[str, tuple[int, ...]] = {}
        self._touches: list[tuple[int, ...]] = []  # per call: storages read or returned, those that exist before the step left out
        self._creates: list[tuple[int, ...]] = []
        self._users: dict[int, list[int]] = {}
        owners = {n.name for n in graph.joint}
        for i, n in enumerate(graph.joint):
            outputs[n.name] = tuple(o.storage for o in n.outputs if o.storage >= 0 and graph.joint_storages[o.storage].owner in owners)
            touched = {s for name in n.inputs for s in outputs.get(name, ())} | set(outputs[n.name])
            self._touches.append(tuple(sorted(touched)))
            self._creates.append(tuple(sorted({s for s in outputs[n.name] if graph.joint_storages[s].owner == n.name})))
            for s in touched:
                self._users.setdefault(s, []).append(i)
            if n.node in self._calls:
                self._calls[n.node].append(i)
        self._kernels = recurrent_workspaces(graph)
        self._gradients = {s for value in graph.gradients.values() for s in outputs.get(value, ())}

    def peak_bytes(self) -> int:
        """See the function `peak_bytes`."""
        graph = self.graph
        if not graph.joint:
            return held_bytes(graph) + sum(p.size_bytes for p in graph.parameters if p.trainable) + graph.saved_bytes
        end = len(graph.joint)
        lives = ((s, i, end if s in self._gradients else self._users[s][-1]) for i, made in enumerate(self._creates) for s in made)
        return held_bytes(graph) + self._peak(lives, end + 1)

    def segment_workspace(self, node_names: Collection[str]) -> tuple[int, int]:
        """(forward, backward) bytes that the named forward nodes, and later their backward calls, need beyond what lives with the segment.

        Forward: peak of what these calls create, less what stays (saved for backward, or read by other nodes). Backward: peak of its
        temporaries, of gradients of parameters until they are added to their buffer (one forward node's at a time, as autograd does),
        and of the gradients handed to other nodes, less all of the latter, and less what was saved inside the segment and is released
        by then (autograd releases a node's saved values when its backward is done); at least 0. Raises UsageError for an unknown node
        name. Without a joint graph the backward is assumed to hold at most as much as was saved.
        """
        return self.replay_workspace(node_names, ())

    def replay_workspace(self, node_names: Collection[str], regions: Sequence[Collection[str]]) -> tuple[int, int]:
        """`segment_workspace` where the calls of each region are computed again in backward: what they make is not saved.

        Forward: it lives to its last forward reader. Backward: all that a region makes again lives from the first backward call that asks for
        any of it, each storage to its own last use.
        """
        for name in (*node_names, *(name for names in regions for name in names)):
            if name not in self._calls:
                raise UsageError(f"the graph has no node {name!r}", where=self.graph.model, hint="names are those of OpGraph.nodes")
        if not self.graph.joint:
            return 0, self.graph.saved_bytes if node_names else 0
        calls = sorted(i for name in set(node_names) for i in self._calls[name])
        forward = [i for i in calls if self.graph.joint[i].phase == "forward"]
        backward = [i for i in calls if self.graph.joint[i].phase == "backward"]
        again = [set[int]() for _ in regions]
        for made, names in zip(again, regions, strict=True):
            for i in (i for name in names for i in self._calls[name] if self.graph.joint[i].phase == "forward"):
                made.update(self._creates[i])
        found = self._forward_workspace(forward, set().union(*again)), self._backward_workspace(forward, backward, again)
        own = [found, *(self._kernels[name] for name in node_names if name in self._kernels)]
        return max(x for x, _ in own), max(x for _, x in own)

    def _forward_workspace(self, calls: Sequence[int], again: Collection[int] = ()) -> int:
        inside = {call: position for position, call in enumerate(calls)}
        lives, stays = [], 0
        for call in calls:
            for s in self._creates[call]:
                users = self._users[s]
                if s in again or all(u in inside for u in users):
                    lives.append((s, inside[call], max(inside[u] for u in users if u in inside)))
                else:
                    lives.append((s, inside[call], len(calls) - 1))
                    stays += self.graph.joint_storages[s].size_bytes
        return self._peak(lives, len(calls)) - stays

    def _backward_workspace(self, forward: Sequence[int], backward: Sequence[int], again: Sequence[Collection[int]] = ()) -> int:
        inside = {call: position for position, call in enumerate(backward)}
        mine = {*forward, *backward}
        done = {self.graph.joint[call].node: position for call, position in inside.items()}  # node -> its last backward call
        end = len(backward) - 1
        lives, counted = [], 0
        for call in backward:
            for s in self._creates[call]:
                users = self._users[s]
                if s in self._gradients:
                    lives.append((s, inside[call], done[self.graph.joint[call].node]))
                elif all(u in mine for u in users):
                    lives.append((s, inside[call], inside[users[-1]]))
                else:
                    lives.append((s, inside[call], end))
                    counted += self.graph.joint_storages[s].size_bytes
        remade = set().union(*again)
        for made in again:
            asked = [inside[u] for s in made for u in self._users[s] if u in inside]
            lives += [(s, min(asked), max([min(asked), *(inside[u] for u in self._users[s] if u in inside)])) for s in made if asked]
        for call in forward:
            for s in self._creates[call]:
                users = self._users[s]
                if s in remade:
                    continue
                if all(u in mine for u in users) and users[-1] in inside:
                    lives.append((s, 0, max(done[self.graph.joint[u].node] for u in users if u in inside)))
                    counted += self.graph.joint_storages[s].size_bytes
        return max(self._peak(lives, len(backward)) - counted, 0)

    def _peak(self, lives: Iterable[tuple[int, int, int]], calls: int) -> int:
        change = [0] * (calls + 1)
        for storage, first, last in lives:
            size = self.graph.joint_storages[storage].size_bytes
            change[first] += size
            change[last + 1] -= size
        peak = alive = 0
        for delta in change:
            alive += delta
            peak = max(peak, alive)
        return peak
