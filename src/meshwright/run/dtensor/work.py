"""What the compute steps of a sharded step (`lower.sharding`) do on one rank: local operators forward and backward, redistributions, optimiser.

Operators run under autograd in stretches (`stretches`): nothing is exchanged between the backwards of a stretch, so one call of autograd at the first
of them gives all, where a call for each would cost more than small operators do. What comes from outside of its stretch is a leaf to every
operator, and the leaf's gradient is added where the operator's `B` stands: sums are added up in the program's order.
An operator whose pieces talk to each other is cut at every exchange: what comes back is a leaf, and its gradient, added up over the same
ranks, goes on through what was sent. Pieces of parameters are what DTensor would hold under `placements`, so they can be wrapped at will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
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
from ...program.program import Kind, Program
from ..executor.memory import RankMemory
from .local import LocalCall, Slot, Step, run_local
from .pieces import Place, cut
from .redistribute import buffers_around, put_flat, stage, take_flat

__all__ = ["ShardedWork", "local_call", "stretches"]


@dataclass(frozen=True)
class _Operand:
    """`joined`: a value of the reader's own stretch; else it is read as a leaf, one that has a gradient where it is `trained`."""

    key: str
    joined: bool
    trained: bool


@dataclass
class _Done:
    """An operator's forward, as its backward needs it. `leaves`: by key of the operand, those that have a gradient. `sent`, `came`: around every
    exchange inside it. `output`: None where only its stretch reads it."""

    leaves: list[tuple[str, Any]]
    sent: list[Tensor] = field(default_factory=list)
    came: list[Tensor] = field(default_factory=list)
    output: Any = None
    talk: Generator[Any, Tensor, Any] | None = None
    gradients: list[Any] = field(default_factory=list)  # of the leaves


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
        self.stretches = {found[0]: found for found in stretches(lowered, rank)}
        where = {name: first for first, found in self.stretches.items() for name in found}
        self.operands = {
            name: [_Operand(k, k in where and where[k] == where.get(name), k in lowered.gradients) for k in keys]
            for name, keys in lowered.operands.items()
        }
        joined = Counter(o.key for operands in self.operands.values() for o in operands if o.joined)
        self.leaving = {name for name in where if self.readers[name] > joined[name]}
        self.cuts = {name: [i for i, x in enumerate(of_rank[rank]) if x.gradient] for name, of_rank in lowered.insides.items()}
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
        total = _plus(self.gradients.get(name), gradient)
        if total is not None:
            self.gradients[name] = total

    def gradient(self, name: str) -> Tensor:
        """Of this rank's piece of a parameter; zero where nothing came."""
        found = self.gradients.get(f"param:{name}")
        return found if found is not None else torch.zeros_like(self.parameters[name])

    def _given(self, name: str, done: _Done) -> list[Any]:
        """What an operator computes with; its leaves are noted."""
        given = []
        # Autograd goes through the latest of views first, and the first operand's gradient is to be added first.
        for operand in reversed(self.operands[name]):
            key, value = operand.key, self._take(operand.key)
            if not operand.joined:
                value = _leaf(value, operand.trained)
                if operand.trained:
                    done.leaves.append((key, value))
            elif self.readers[key] > 1 and isinstance(value, Tensor):
                value = value.view_as(value)  # what comes back from one reader is added up before it is added to what others gave
            given.append(value)
        done.leaves.reverse()
        return given[::-1]

    def _forward(self, name: str, number: int, memory: RankMemory, came: int, sent: int) -> None:
        if number == 0:
            self.done[name] = done = _Done([])
            found = run_local(self.calls[name], self._given(name, done), self.place, self.draws)
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
        if name not in self.lowered.gradients:
            del self.done[name]
        elif name in self.leaving:
            done.output = found
        if self.readers[name]:
            self.values[name] = found if name in self.lowered.gradients and name != self.loss else _leaf(found, False)
        if name == self.loss:
            state = self.plan.ops[name].output
            counted = all(kind != "B" or self.place.at[axis] == 0 for axis, kind in enumerate(state))
            self.gradients[name] = torch.ones_like(self.values[name]) if counted else torch.zeros_like(self.values[name])

    def _backward(self, name: str, number: int, memory: RankMemory, came: int, sent: int) -> None:
        """The first of a stretch differentiates all of it; each gives its operands' gradients on. With exchanges inside: from the result to the last
        exchange whose gradient is added up too, from that to the one before it, ..., to the operands."""
        done, cuts = self.done[name], self.cuts[name]
        here = len(cuts) - number  # exchanges before this part
        before = [done.came[i] for i in cuts[:here]]
        if number:
            _differentiate([done], [(done.sent[cuts[here]], take_flat(memory, came).view_as(done.sent[cuts[here]]))], before)
        elif name in self.stretches:
            members = [(self.done[x], self.gradients.pop(x, None)) for x in self.stretches[name]]
            _differentiate([d for d, _ in members], [r for d, g in members for r in zip(_listed(d.output), _listed(g), strict=False)], before)
        if here:
            put_flat(memory, sent, (done.gradients[-1] if done.gradients[-1] is not None else torch.zeros_like(before[-1])).reshape(-1))
            return
        del self.done[name]
        for (key, _), gradient in zip(done.leaves, done.gradients, strict=True):
            self._add(key, gradient)

    def _update(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self.gradient(name)
        if self.optimizer is not None:
            self.optimizer.step()


def stretches(lowered: ShardedProgram, rank: int) -> list[list[str]]:
    """Operators by stretch, in the order of their backwards: between those of a stretch nothing is exchanged, and nothing that is redistributed comes
    back to one of them. An operator with gradients to exchange inside is alone."""
    program, found, open_, back = lowered.program, list[list[str]](), False, set[str]()
    of_rank = program.lanes.actor[program.lane_of_step()] == rank
    for kind, op in zip(program.steps.kind[of_rank].tolist(), program.steps.op[of_rank].tolist(), strict=True):
        if kind != Kind.COMPUTE:
            open_ = False
            continue
        name, key = program.ops.name[op], program.ops.graph[op]
        if name == "back":
            back.add(lowered.moves[key].source)
        if name != "B" or program.ops.microbatch[op]:
            continue
        talks = any(x.gradient for x in lowered.insides[key][rank])
        if not open_ or talks or key in back:
            found.append([])
            back = set()
        found[-1].append(key)
        open_ = not talks
    return found


def _differentiate(members: Sequence[_Done], roots: Sequence[tuple[Tensor, Tensor | None]], came: Sequence[Tensor]) -> None:
    """From `roots` (value, gradient) to the leaves of `members` and to what `came` in exchanges inside the only one."""
    roots = [(y, g) for y, g in roots if g is not None and y.requires_grad]
    ends = [[*(leaf for _, leaf in done.leaves), *came] for done in members]
    wanted = [x for of_one in ends for end in of_one for x in _listed(end) if x.requires_grad]
    found: Iterator[Tensor | None] = repeat(None)
    if roots and wanted:
        ys, gs = zip(*roots, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, gs, retain_graph=bool(came), allow_unused=True))
    for done, of_one in zip(members, ends, strict=True):
        new = [_like(end, found) for end in of_one]
        done.gradients = [_plus(b, g) for b, g in zip(done.gradients, new, strict=False)] if done.gradients else new


def _like(end: Any, found: Iterator[Tensor | None]) -> Any:
    """The next of the gradients `found`, in a list where `end` is one; None for what has none."""
    return [_like(x, found) for x in end] if isinstance(end, list) else next(found) if end.requires_grad else None


def _plus(before: Any, gradient: Any) -> Any:
    """The sum of two gradients: tensors, None where nothing came, or lists of those for a value of several tensors."""
    if isinstance(before, list):
        return [_plus(b, g) for b, g in zip(before, gradient, strict=True)]
    return gradient if before is None else before if gradient is None else before + gradient


def _leaf(value: Any, trained: bool) -> Any:
    if isinstance(value, (list, tuple)):
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
