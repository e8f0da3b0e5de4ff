"""Memory of one training step by liveness on the joint graph: what is alive while each call runs.

A storage is alive from the call that creates it to the last call that reads any view of it. Parameters, buffers and inputs are alive
throughout; gradients of parameters from their creation to the end. Not counted: the optimiser's state, memory that a call takes
inside itself (library workspaces), padding of the allocator. Liveness is computed on the joint graph rather than watched in a run,
because holding tensors to watch them changes what is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from .errors import UsageError
from .graph import OpGraph

__all__ = ["Liveness", "held_bytes", "peak_bytes", "segment_workspace"]


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


_RECENT: deque[tuple[OpGraph, Liveness]] = deque(maxlen=4)  # by identity: graphs are immutable, and too large to hash


def _liveness(graph: OpGraph) -> Liveness:
    for known, liveness in list(_RECENT):
        if known is graph:
            return liveness
    liveness = Liveness(graph)
    _RECENT.append((graph, liveness))
    return liveness


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
        """(forward, backward) peak bytes of temporaries while the named forward nodes, and later their backward calls, run.

        Temporaries are storages created and last used by these calls. Not counted: what the backward or other forward nodes read
        (saved and written values), gradients handed to other nodes, gradients of parameters. Raises UsageError for an unknown node
        name. Without a joint graph the backward is assumed to hold at most as much as was saved.
        """
        for name in node_names:
            if name not in self._calls:
                raise UsageError(f"the graph has no node {name!r}", where=self.graph.model, hint="names are those of OpGraph.nodes")
        if not self.graph.joint:
            return 0, self.graph.saved_bytes if node_names else 0
        calls = sorted(i for name in set(node_names) for i in self._calls[name])
        forward = [i for i in calls if self.graph.joint[i].phase == "forward"]
        backward = [i for i in calls if self.graph.joint[i].phase == "backward"]
        return self._temporaries(forward), self._temporaries(backward)

    def _temporaries(self, calls: Sequence[int]) -> int:
        inside = {call: position for position, call in enumerate(calls)}
        lives = []
        for call in calls:
            for s in self._creates[call]:
                users = self._users[s]
                if s not in self._gradients and all(u in inside for u in users):
                    lives.append((s, inside[call], inside[users[-1]]))
        return self._peak(lives, len(calls))

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
