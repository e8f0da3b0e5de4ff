"""What the compute steps of a sharded step (`lower.sharding`) do on one rank: local operators forward and backward, redistributions, optimiser.

An operator runs under autograd on detached pieces of its operands, so its backward is a call of its own; between the two lies what autograd keeps.
An operator whose pieces talk to each other is cut at every exchange: what comes back is a leaf, and its gradient, added up over the same
ranks, goes on through what was sent. Pieces of parameters are what DTensor would hold under `placements`, so they can be wrapped at will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.forward import TracedForward
from ...capture.nodes import draws_random_numbers, target_name
from ...errors import Unsupported
from ...graph.graph import MUTATING
from ...lower.sharding import Move, Redistribution, ShardedProgram
from ...plan.sbp import coordinates
from ...plan.sharding import ShardingPlan, ValueState
from ...program.program import Program
from ..executor.memory import RankMemory
from .local import LocalCall, Slot, Step, run_local
from .pieces import Place, cut
from .redistribute import buffers_around, put_flat, stage, take_flat

__all__ = ["ShardedWork", "local_call"]


@dataclass
class _Done:
    """An operator's forward, as its backward needs it. `sent`, `came`: around every exchange inside it."""

    leaves: list[Any]
    sent: list[Tensor] = field(default_factory=list)
    came: list[Tensor] = field(default_factory=list)
    output: Any = None
    talk: Generator[Any, Tensor, Any] | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by number of the leaf, then of what came and has one


class ShardedWork:
    """One rank's part of training with `plan`. `traced` holds the whole model in real tensors; only this rank's pieces are kept of it.

    Raises: Unsupported for in-place operators whose operand is read again later.
    """

    def __init__(
        self, plan: ShardingPlan, traced: TracedForward, lowered: ShardedProgram, program: Program, rank: int, *,
        dtype: torch.dtype | None = None, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.plan, self.lowered, self.program, self.rank, self.device, self.dtype = plan, lowered, program, rank, device, dtype
        self.places = [Place(plan.mesh, at) for at in coordinates(plan.mesh)]
        self.place = self.places[rank]
        self.optimizer: Any = None  # None: gradients are left in the parameters
        self.draws, self.shapes = Step(0, 0), {name: tuple(traced.value(name).shape) for name in traced.placeholders}
        self.pieces = {name: self.piece(name, traced.value(name)) for name in traced.placeholders if not name.startswith("input:")}
        self.parameters: dict[str, Tensor] = {}
        for name, parameter in traced.parameters.items():
            if parameter.requires_grad and f"param:{name}" in self.pieces:
                self.parameters[name] = self.pieces[f"param:{name}"].requires_grad_(True)
        self.calls: dict[str, LocalCall] = {}
        self._prepare(traced)
        self.readers = Counter(k for keys in lowered.operands.values() for k in keys)
        self.readers.update(m.source for m in lowered.moves.values())
        self.readers[self.loss] += 1  # it stays
        self.values: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self.done: dict[str, _Done] = {}
        self.left: Counter[str] = Counter()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a parameter, buffer or input."""
        x = whole.detach()
        x = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        return cut(x.to(self.device), self.plan.sources[name], self.place)

    def _prepare(self, traced: TracedForward) -> None:
        names: dict[fx.Node, str] = {}
        placeholders = iter(traced.placeholders)
        for node in traced.graph_module.graph.nodes:
            if node.op == "placeholder":
                names[node] = next(placeholders)
            elif node.op == "call_function":
                names[node] = node.name
                self.calls[node.name], inputs = local_call(node, names, self.shapes, self.plan.ops[node.name])
                _refuse_overwriting(node, inputs)
            elif node.op == "output":
                self.loss = names[node.args[0][0]]

    # ---- a step ------------------------------------------------------------------------------------------------------
    def begin(self, inputs: Sequence[Tensor], draws: Step) -> None:
        """Load this rank's pieces of a batch; the next pass of the program trains on them."""
        self.draws, self.left = draws, self.readers.copy()
        self.values = {**self.pieces, **{f"input:{i}": self.piece(f"input:{i}", x) for i, x in enumerate(inputs)}}
        self.gradients = {}
        for p in self.parameters.values():
            p.grad = None

    def compile(self, op: int, memory: RankMemory) -> Callable[[], None]:
        ops = self.program.ops
        name, key, number = ops.name[op], ops.graph[op], int(ops.microbatch[op])
        came, sent = around = buffers_around(self.program, op, memory)
        if name == "F":
            return lambda: self._forward(key, number, memory, came, sent)
        if name == "B":
            return lambda: self._backward(key, number, memory, came, sent)
        if name == "optimizer":
            return self._update
        move = self.lowered.moves[key]
        way, take, give = {"move": self._ahead, "back": self._back, "sum": self._bucket}[name](key, move)
        return stage(way, number, self.rank, self.place, memory, around, take, give)

    # ---- redistributions ---------------------------------------------------------------------------------------------
    def _ahead(self, key: str, move: Move) -> tuple[Redistribution, Callable[[], Tensor], Callable[[Tensor], None]]:
        kept = move.source.removeprefix("hub:") in self.pieces and len(move.ahead.stages(self.place.sizes)) > 1

        def take() -> Tensor:
            piece: Tensor = self._take(move.source).detach()
            return piece.clone() if kept else piece  # a message may still be on its way when the optimizer overwrites the piece

        return move.ahead, take, lambda piece: self.values.__setitem__(key, piece)

    def _back(self, key: str, move: Move) -> tuple[Redistribution, Callable[[], Tensor], Callable[[Tensor], None]]:
        way = move.back
        assert way is not None
        shape = self.place.local(way.shapes[self.rank], way.state)

        def take() -> Tensor:
            found = self.gradients.pop(key, None)
            return found.contiguous() if found is not None else torch.zeros(shape, dtype=getattr(torch, move.dtype), device=self.device)

        return way, take, lambda piece: self._add(move.source, piece)

    def _bucket(self, key: str, move: Move) -> tuple[Redistribution, Callable[[], Tensor], Callable[[Tensor], None]]:
        names = [m.partition(":")[2] for m in move.members]

        def give(flat: Tensor) -> None:
            for name, part in zip(names, flat.split([self.parameters[n].numel() for n in names]), strict=True):
                self.gradients[f"param:{name}"] = part.view_as(self.parameters[name])

        return move.ahead, lambda: torch.cat([self.gradient(n).reshape(-1) for n in names]), give

    # ---- operators ---------------------------------------------------------------------------------------------------
    def _take(self, name: str) -> Any:
        """A value for one of its readers; after the last one it is let go."""
        value = self.values[name]
        self.left[name] -= 1
        if not self.left[name] and name not in self.pieces:
            del self.values[name]
        return value

    def _add(self, name: str, gradient: Any) -> None:
        """`gradient`: a tensor, None where nothing came, or a list of those for a value of several tensors."""
        before = self.gradients.get(name)
        if isinstance(before, list):
            gradient = [b if g is None else g if b is None else b + g for b, g in zip(before, gradient, strict=True)]
        elif before is not None and gradient is not None:
            gradient = before + gradient
        if gradient is not None:
            self.gradients[name] = gradient

    def gradient(self, name: str) -> Tensor:
        """Of this rank's piece of a parameter; zero where nothing came."""
        found = self.gradients.get(f"param:{name}")
        return found if found is not None else torch.zeros_like(self.parameters[name])

    def _forward(self, name: str, number: int, memory: RankMemory, came: int, sent: int) -> None:
        with torch.enable_grad():
            if number == 0:
                leaves = [_leaf(self._take(key), key in self.lowered.gradients) for key in self.lowered.operands[name]]
                self.done[name] = done = _Done(leaves)
                found = run_local(self.calls[name], leaves, self.place, self.draws)
                done.talk = found if isinstance(found, Generator) else None
            else:
                done, found = self.done[name], None
                done.came.append(_leaf(take_flat(memory, came).view_as(done.sent[-1]), done.sent[-1].requires_grad))
            if done.talk is not None:
                try:
                    done.sent.append((done.talk.send(done.came[-1]) if done.came else next(done.talk)).x)
                    put_flat(memory, sent, done.sent[-1].detach().reshape(-1))
                    return
                except StopIteration as end:
                    done.talk, found = None, end.value
        done.output = found
        self.values[name] = found.detach() if isinstance(found, Tensor) else [x.detach() for x in found]
        if name not in self.lowered.gradients:
            del self.done[name]
        if name == self.loss:
            state = self.plan.ops[name].output
            counted = all(kind != "B" or self.place.at[axis] == 0 for axis, kind in enumerate(state))
            self.gradients[name] = torch.ones_like(self.values[name]) if counted else torch.zeros_like(self.values[name])

    def _backward(self, name: str, number: int, memory: RankMemory, came: int, sent: int) -> None:
        """From the result to the last exchange whose gradient is added up too, from that to the one before it, ..., to the operands."""
        done, cuts = self.done[name], [i for i, x in enumerate(self.lowered.insides[name][self.rank]) if x.gradient]
        here = len(cuts) - number  # exchanges before this stretch
        if number == 0:
            roots = list(zip(_listed(done.output), _listed(self.gradients.pop(name, None)), strict=False))
        else:
            roots = [(done.sent[cuts[here]], take_flat(memory, came).view_as(done.sent[cuts[here]]))]
        roots = [(y, g) for y, g in roots if g is not None and y.requires_grad]
        leaves = [x for leaf in done.leaves for x in _listed(leaf)]
        ends = [*leaves, *(done.came[i] for i in cuts[:here])]
        wanted = [i for i, x in enumerate(ends) if x.requires_grad]
        if roots and wanted:
            ys, gs = zip(*roots, strict=True)
            found = torch.autograd.grad(ys, [ends[i] for i in wanted], gs, retain_graph=here > 0, allow_unused=True)
            for i, g in zip(wanted, found, strict=True):
                if g is not None:
                    done.gradients[i] = done.gradients[i] + g if i in done.gradients else g
        if here:
            last = done.came[cuts[here - 1]]
            total = done.gradients.get(len(leaves) + here - 1)
            put_flat(memory, sent, (total if total is not None else torch.zeros_like(last)).reshape(-1))
            return
        del self.done[name]
        found_of = iter([done.gradients.get(i) for i in range(len(leaves))])
        for key, leaf in zip(self.lowered.operands[name], done.leaves, strict=True):
            gradients = [next(found_of) for _ in _listed(leaf)]
            self._add(key, gradients if isinstance(leaf, list) else gradients[0])

    def _update(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self.gradient(name)
        if self.optimizer is not None:
            self.optimizer.step()


def _leaf(value: Any, trained: bool) -> Any:
    if isinstance(value, list):
        return [_leaf(x, trained) for x in value]
    return value.detach().requires_grad_(trained and value.is_floating_point())


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def local_call(
    node: fx.Node, names: Mapping[fx.Node, str], shapes: dict[str, tuple[int, ...]], known: ValueState
) -> tuple[LocalCall, list[str]]:
    """A node of a traced graph with the states of its operands and result, and its operands' names; notes the result's shape in `shapes`."""
    inputs: list[str] = []

    def place(x: fx.Node) -> Slot:
        inputs.append(names[x])
        return Slot(len(inputs) - 1)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), place)
    name, outputs = target_name(node.target), _shapes(node)
    if outputs:
        shapes[node.name] = outputs[0]
    whole = tuple(outputs[0] if name == "operator.getitem" else shapes[v] for v in inputs)
    mutating = name.count(".") > 0 and name.split(".")[1] in MUTATING
    call = LocalCall(
        name=node.name, target=node.target, target_name=name, args=tuple(args), kwargs=dict(kwargs), shapes=whole, outputs=outputs,
        inputs=known.inputs, output=known.output, random=draws_random_numbers(node),
        mutates_buffer=mutating and any(v.startswith("buffer:") for v in inputs),
    )  # fmt: skip
    return call, inputs


def _refuse_overwriting(node: fx.Node, inputs: Sequence[str]) -> None:
    """In-place operators are run out of place: right as long as nobody reads the overwritten value afterwards."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or not inputs or inputs[0].startswith("buffer:"):
        return
    later = [u for x in _aliases(node.args[0]) for u in x.users if u is not node and u > node and x is not node]
    if later:
        message = f"{node.name} overwrites {inputs[0]}, which {later[0].name} reads afterwards"
        raise Unsupported(message, hint="write it out of place in the model")


def _aliases(value: Any) -> list[fx.Node]:
    """A value and everything that shares its memory by views."""
    if not isinstance(value, fx.Node):
        return []
    while getattr(value.target, "is_view", False) and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    found, todo = [], [value]
    while todo:
        found.append(todo.pop())
        todo += [u for u in found[-1].users if getattr(u.target, "is_view", False)]
    return found


def _shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (tuple(int(d) for d in value.shape),)
    if isinstance(value, (list, tuple)):
        return tuple(tuple(int(d) for d in v.shape) for v in value if isinstance(v, torch.Tensor))
    return ()
