"""Runs an FX graph on several threads over one storage: every tensor it makes lies at its planned offset, and bytes nobody wants are overwritten.

One run with ordinary tensors says which calls make storages, which are views, and which write in place. Calls are spread over streams; a call waits
for those on other streams that write what it reads or touch what it writes. Where an operator has a variant that writes into given tensors the
result is made in the arena; otherwise it is copied there (`copied`).
A range is overwritten with ones (not-a-number as floats) by the last call that uses it, before anything may wait for that call, so a plan that lets
two storages share bytes too early, or a call that reads before it may, gives wrong results instead of lucky ones.
Cost: one thread per stream, one event per call that another stream waits for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...arena import ArenaPlan, ArenaProblem, rows
from ...capture.torch_private import storage_key
from ...capture.work import tensors_in
from ...check.arena import check_arena
from ...decide.memory.static import StaticMemory
from ...errors import MeshwrightError, RunError, Unsupported, UsageError

__all__ = ["ArenaGraph", "arena_graph"]

ALIGNMENT_BYTES = 64  # of every storage: a cache line, and the widest vector load
POISON_BYTE = 0xFF  # written over what nobody wants any more: makes NaN of every float, so a wrong plan shows in the result


@dataclass(frozen=True)
class _Place:
    """A tensor of a call's result: its storage in the arena, -1 for one that the call got."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class _Call:
    node: fx.Node
    stream: int
    waits: tuple[int, ...] = ()  # calls on other streams
    touches: tuple[int, ...] = ()  # storages in the arena
    makes: tuple[_Place, ...] = ()  # per tensor of the result; empty: nothing new
    tree: Any = None
    into: Any = None  # the variant that writes into given tensors, and their names
    event: threading.Event = field(default_factory=threading.Event)


class _Record:
    """What one run with ordinary tensors shows: storages by number in the order they are made, hazards between calls."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Any] = {}  # everything stays alive, so an address names one storage
        self.number: dict[int, int] = {}
        self.sizes: list[int] = []
        self.inside: list[bool] = []
        self.calls: list[_Call] = []
        self.depends: list[set[int]] = []
        self.writers: list[list[int]] = []
        self.readers: list[list[int]] = []
        given = iter(inputs)
        self.outputs: Any = None
        self.index: dict[fx.Node, int] = {}
        with torch.no_grad():
            for node in graph.graph.nodes:
                self._step(node, given)

    def _storage(self, x: torch.Tensor, inside: bool) -> int:
        key = storage_key(x)
        if key not in self.number:
            self.number[key] = len(self.sizes)
            self.sizes.append(int(x.untyped_storage().nbytes()))
            self.inside.append(inside)
            self.writers.append([])
            self.readers.append([])
        return self.number[key]

    def _step(self, node: fx.Node, given: Any) -> None:
        if node.op == "placeholder":
            try:
                value = next(given)
            except StopIteration:
                raise UsageError(f"no input for {node.name!r}", where="inputs", hint="one per placeholder of the graph") from None
            self._outside(node, value)
        elif node.op == "get_attr":
            owner: Any = self.graph
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            self._outside(node, owner)
        elif node.op == "output":
            self.outputs = node.args[0]
        elif node.op == "call_function":
            self._call(node)
        else:
            raise Unsupported(f"{node.op} {node.target!s} is no call of an operator", where=node.name, hint="trace the module to ATen calls first")

    def _outside(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value
        for x in tensors_in(value):
            self._storage(x, False)

    def _call(self, node: fx.Node) -> None:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unsupported(f"{node.target} draws random numbers, on threads in any order", where=node.name, hint="draw them outside the graph")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        written = {self._storage(x, False) for x in _written(node.target, args, kwargs)}
        got = {self._storage(x, False) for x in tensors_in((args, kwargs))}
        assert callable(node.target)
        value = self.values[node] = node.target(*args, **kwargs)
        flat, tree = pytree.tree_flatten(value)
        places, fresh = [], set()
        for x in flat:
            if not isinstance(x, torch.Tensor):
                places.append(_Place(-1, (), (), 0, torch.uint8))
                continue
            known = storage_key(x) in self.number
            s = self._storage(x, True)
            if not known or s in fresh:
                fresh.add(s)
                places.append(_Place(s, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype))
            else:
                places.append(_Place(-1, (), (), 0, x.dtype))
        index = len(self.calls)
        before: set[int] = set()
        for s in got | written:
            before.update(self.writers[s][-1:])
            if s in written:
                before.update(self.readers[s])
        for s in got:
            self.readers[s].append(index)
        for s in written | fresh:
            self.writers[s].append(index)
        before |= {self.index[a] for a in node.all_input_nodes if a in self.index}
        self.index[node] = index
        self.depends.append(before - {index})
        touches = tuple(sorted(s for s in got | written | fresh if self.inside[s]))
        into = _into(node.target, len(flat)) if fresh and len(fresh) == len(flat) else None
        self.calls.append(_Call(node=node, stream=0, touches=touches, makes=tuple(places) if fresh else (), tree=tree, into=into))


def _written(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return [x for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write for x in tensors_in(named.get(a.name))]


def _into(target: Any, tensors: int) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """The overload of the same operator that writes its results into tensors it is given."""
    packet, schema = getattr(target, "overloadpacket", None), getattr(target, "_schema", None)
    if packet is None or schema is None:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [a.name for a in other._schema.arguments if a.is_out]
        if len(outs) == tensors and [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out] == wanted:
            return other, tuple(outs)
    return None


def _streams(depends: Sequence[set[int]], streams: int) -> list[int]:
    """Every call, in order, on the stream where it can start first if each lasts one unit; of those the one where it waits for nobody else."""
    chosen: list[int] = []
    free, end = [0] * streams, [0] * len(depends)
    for i, before in enumerate(depends):
        ready = max((end[u] for u in before), default=0)
        last = max(before, key=lambda u: (end[u], u), default=-1)
        s = min(range(streams), key=lambda k: (max(free[k], ready), k != (chosen[last] if last >= 0 else 0), k))
        chosen.append(s)
        free[s] = end[i] = max(free[s], ready) + 1
    return chosen


def arena_graph(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], *, streams: int = 2, effort: int = 1, seed: int = 0) -> ArenaGraph:
    """Plan and check an arena for a graph of ATen calls; `inputs`: one per placeholder, of the shapes that it will be run with.

    Raises: UsageError for fewer than one stream or too few inputs; Unsupported for random operators and calls of modules, named; CheckFailed.
    """
    if streams < 1:
        raise UsageError(f"must be at least 1, got {streams}", where="streams")
    record = _Record(graph, inputs)
    for call, s in zip(record.calls, _streams(record.depends, streams), strict=True):
        call.stream = s
    for call, before in zip(record.calls, record.depends, strict=True):
        call.waits = tuple(sorted(u for u in before if record.calls[u].stream != call.stream))
    inside = [s for s, own in enumerate(record.inside) if own]
    local = {s: i for i, s in enumerate(inside)}
    wanted = {record.number[storage_key(x)] for x in tensors_in(fx.node.map_arg(record.outputs, record.values.__getitem__))}
    problem = ArenaProblem(
        stream=np.array([c.stream for c in record.calls], np.int32), after=rows([list(c.waits) for c in record.calls]),
        size_bytes=np.array([record.sizes[s] for s in inside], np.int64), sources=rows([record.writers[s] for s in inside]),
        consumers=rows([record.readers[s] for s in inside]), alignment_bytes=ALIGNMENT_BYTES,
        to_end=frozenset(local[s] for s in wanted if s in local),
        names=tuple(record.calls[record.writers[s][0]].node.name for s in inside),
    )  # fmt: skip
    plan = StaticMemory(effort=effort).plan(problem, rng=np.random.default_rng(seed))
    check_arena(problem, plan).raise_if_wrong()
    for call in record.calls:
        call.touches = tuple(local[s] for s in call.touches)
        call.makes = tuple(_Place(local.get(p.storage, -1), p.shape, p.stride, p.offset, p.dtype) for p in call.makes)
    outside = {n: v for n, v in record.values.items() if n.op == "get_attr"}
    return ArenaGraph(problem, plan, record.calls, record.outputs, [n for n in graph.graph.nodes if n.op == "placeholder"], outside)


@dataclass
class ArenaGraph:
    """Runs the graph; `plan.arena_bytes` hold all that it makes. `copied`: calls whose results are made elsewhere and copied."""

    problem: ArenaProblem
    plan: ArenaPlan
    calls: list[_Call]
    outputs: Any
    placeholders: list[fx.Node]
    constants: dict[fx.Node, Any]

    @property
    def copied(self) -> int:
        return sum(1 for c in self.calls if c.makes and c.into is None)

    def run(self, *inputs: torch.Tensor, poison: bool = True, sleep_s: float = 0.0, seed: int = 0) -> Any:
        """The graph's outputs, copied out of the arena. `sleep_s`: calls wait at random up to so long, to meet other interleavings.

        Raises: UsageError for too few inputs; RunError that names the call that failed.
        """
        if len(inputs) != len(self.placeholders):
            raise UsageError(f"got {len(inputs)} inputs for {len(self.placeholders)} placeholders", where="inputs")
        run = _Run(self, inputs, poison, sleep_s, seed)
        threads = [threading.Thread(target=run.stream, args=(s,), name=f"arena-{s}") for s in sorted({c.stream for c in self.calls})]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if run.failed:
            node, error = run.failed[0]
            raise RunError(f"{type(error).__name__}: {error}", where=node, data={"call": node}) from error
        values = fx.node.map_arg(self.outputs, run.values.__getitem__)
        return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


class _Run:
    def __init__(self, graph: ArenaGraph, inputs: Sequence[torch.Tensor], poison: bool, sleep_s: float, seed: int) -> None:
        self.graph, self.poison, self.sleep_s, self.seed = graph, poison, sleep_s, seed
        self.bytes = torch.full((max(graph.plan.arena_bytes, 1),), POISON_BYTE, dtype=torch.uint8)
        self.values: dict[fx.Node, Any] = dict(zip(graph.placeholders, inputs, strict=True)) | graph.constants
        self.done = [threading.Event() for _ in graph.calls]
        self.left = np.zeros(len(graph.problem.size_bytes), np.int64)
        for call in graph.calls:
            self.left[list(call.touches)] += 1
        self.lock = threading.Lock()
        self.failed: list[tuple[str, BaseException]] = []

    def stream(self, stream: int) -> None:
        rng = random.Random(self.seed * 1000 + stream)
        with torch.no_grad():
            for i, call in enumerate(self.graph.calls):
                if call.stream != stream:
                    continue
                for u in call.waits:
                    self.done[u].wait()
                if self.sleep_s:
                    time.sleep(rng.random() * self.sleep_s)
                if not self.failed:
                    try:
                        self.values[call.node] = self._result(call)
                        self._release(call)
                    except (MeshwrightError, Exception) as error:  # the other streams must not wait for ever
                        self.failed.append((call.node.name, error))
                self.done[i].set()

    def _tensor(self, place: _Place) -> torch.Tensor:
        start = int(self.graph.plan.offset_bytes[place.storage]) // place.dtype.itemsize + place.offset
        return torch.empty(0, dtype=place.dtype).set_(self.bytes.untyped_storage(), start, place.shape, place.stride)

    def _result(self, call: _Call) -> Any:
        args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), self.values.__getitem__)
        function: Any = call.node.target
        if not call.makes:
            return function(*args, **kwargs)
        if call.into is not None:
            into, names = call.into
            outs = [self._tensor(p) for p in call.makes]
            into(*args, **kwargs, **dict(zip(names, outs, strict=True)))
            return pytree.tree_unflatten(outs, call.tree)
        flat, tree = pytree.tree_flatten(function(*args, **kwargs))
        found = []
        for x, place in zip(flat, call.makes, strict=True):
            if place.storage >= 0:
                target = self._tensor(place)
                target.copy_(x)
                x = target
            found.append(x)
        return pytree.tree_unflatten(found, tree)

    def _release(self, call: _Call) -> None:
        with self.lock:
            self.left[list(call.touches)] -= 1
            over = [t for t in call.touches if not self.left[t] and t not in self.graph.problem.to_end]
        if self.poison:
            for t in over:
                at, size = int(self.graph.plan.offset_bytes[t]), int(self.graph.problem.size_bytes[t])
                self.bytes[at : at + size] = POISON_BYTE
