"""A sharding plan at work on one rank: the traced forward graph on pieces, redistributions where the plan says, backward, optimiser.

The graph is run node by node; every operand comes through the plan's redistribution for that operand (an autograd function, so the backward takes
the plan's way back); gradients that the plan puts into buckets are summed at the end. Nothing else is sent: the counters equal the plan's bytes.
Pieces of parameters are what DTensor would hold under `placements` (`dtensor_placements`), so they can be wrapped and unwrapped at will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.forward import TracedForward
from ...capture.nodes import draws_random_numbers, target_name
from ...decide.layout.autoddl.network import MUTATING
from ...decide.layout.autoddl.problem import MoveRecord, ShardingPlan, ValueState
from ...errors import PlanMismatch, Unsupported
from .local import LocalCall, Slot, Step, run_local
from .redistribute import Move, Place, apply_steps, cut, redistributed

__all__ = ["ShardedStep", "local_call"]



@dataclass(frozen=True)
class _Operand:
    value: str  # name of the value, or hub:<value>
    move: Move | None


class ShardedStep:
    """One rank's part of training with `plan`. `traced` holds the whole model in real tensors; only this rank's pieces are kept of it.

    Raises: PlanMismatch when the model is not the planned one; Unsupported for in-place operators whose operand is read again later.
    """

    def __init__(self, plan: ShardingPlan, traced: TracedForward, place: Place, *, dtype: torch.dtype | None = None, device: str = "cpu") -> None:
        self.plan, self.place, self.device, self.dtype = plan, place, device, dtype
        self.shapes = {name: tuple(traced.value(name).shape) for name in traced.placeholders}
        self.moves = {(m.reader, m.slot): m for m in plan.moves}
        self.pieces: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self.planned_item = {name: plan.item_bytes or p.element_size() for name, p in traced.parameters.items()}  # bytes per element, as planned
        for name in traced.placeholders:
            kind, _, rest = name.partition(":")
            if kind == "input":
                continue
            piece = cut(self._cast(traced.value(name).detach()).to(device), self._state(name), place)
            if kind == "param" and traced.parameters[rest].requires_grad:
                piece.requires_grad_(True)
                self.parameters[rest] = piece
            self.pieces[name] = piece
        self._prepare(traced)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x

    def _state(self, name: str) -> tuple[str, ...]:
        try:
            return self.plan.hubs[name[4:]] if name.startswith("hub:") else self.plan.sources[name] if ":" in name else self.plan.ops[name].output
        except KeyError:
            raise PlanMismatch(f"the plan says nothing about {name!r}", hint="make the plan again for this model") from None

    # ---- preparation -------------------------------------------------------------------------------------------------
    def _prepare(self, traced: TracedForward) -> None:
        names: dict[fx.Node, str] = {}
        self.calls: list[tuple[LocalCall, list[_Operand]]] = []
        self.last: dict[str, int] = {}
        placeholders = iter(traced.placeholders)
        for node in traced.graph_module.graph.nodes:
            if node.op == "placeholder":
                names[node] = next(placeholders)
            elif node.op == "call_function":
                names[node] = node.name
                self._prepare_call(node, names)
            elif node.op == "output":
                self.loss = names[node.args[0][0]]
        if set(self.plan.ops) != {c.name for c, _ in self.calls}:
            odd = sorted(set(self.plan.ops) ^ {c.name for c, _ in self.calls})
            raise PlanMismatch(f"the model is not the planned one: {len(odd)} operators differ, e.g. {odd[0]!r}", hint="make the plan again")
        self.hub_moves = {h: self._move(f"hub:{h}", 0, h) for h in self.plan.hubs}
        for i, (_, operands) in enumerate(self.calls):
            for operand in operands:
                self.last[operand.value.removeprefix("hub:")] = i

    def _prepare_call(self, node: fx.Node, names: Mapping[fx.Node, str]) -> None:
        operands: list[_Operand] = []
        known = self.plan.ops.get(node.name)
        if known is None:
            raise PlanMismatch(f"the plan has no operator {node.name!r}", hint="make the plan again for this model")
        name = target_name(node.target)
        mutating = name.count(".") > 0 and name.split(".")[1] in MUTATING

        call, inputs = local_call(node, names, self.shapes, known)
        for value in inputs:
            source = f"hub:{value}" if value in self.plan.hubs and not (mutating and value.startswith("buffer:")) else value
            operands.append(_Operand(source, self._move(node.name, len(operands), source)))
        self.calls.append((call, operands))
        self._refuse_overwriting(node, inputs)

    def _refuse_overwriting(self, node: fx.Node, inputs: Sequence[str]) -> None:
        """In-place operators are run out of place: right as long as nobody reads the overwritten value afterwards."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not inputs or inputs[0].startswith("buffer:"):
            return
        later = [u for x in _aliases(node.args[0]) for u in x.users if u is not node and u > node and x is not node]
        if later:
            message = f"{node.name} overwrites {inputs[0]}, which {later[0].name} reads afterwards"
            raise Unsupported(message, hint="write it out of place in the model")

    def _move(self, reader: str, slot: int, source: str) -> Move | None:
        record = self.moves.get((reader, slot))
        if record is None or record.bucket:
            return None
        value = source.removeprefix("hub:")
        target = self.plan.hubs[reader[4:]] if reader.startswith("hub:") else self.plan.ops[reader].inputs[slot]
        ahead = "parameters" if value.startswith("param:") else "loader" if ":" in value else "activations"
        back = "gradients" if ahead == "parameters" else ahead
        return Move(self.shapes[value], self._state(source), target, record.forward, record.backward, ahead, back)

    # ---- a step ------------------------------------------------------------------------------------------------------
    def load(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """This rank's pieces of a batch."""
        return {f"input:{i}": cut(self._cast(x).to(self.device), self._state(f"input:{i}"), self.place) for i, x in enumerate(inputs)}

    def forward(self, batch: Mapping[str, Tensor], draws: Step) -> Tensor:
        """This rank's piece of the loss."""
        values: dict[str, Any] = {**self.pieces, **batch}
        for i, (call, operands) in enumerate(self.calls):
            taken = []
            for operand in operands:
                piece = self._piece(values, operand.value)
                taken.append(redistributed(piece, operand.move, self.place) if operand.move is not None else piece)
            values[call.name] = run_local(call, taken, self.place, draws)
            for operand in operands:
                name = operand.value.removeprefix("hub:")
                if self.last[name] == i and ":" not in name and name != self.loss:
                    values.pop(name, None)
                    values.pop(f"hub:{name}", None)
        loss: Tensor = values[self.loss]
        return loss

    def _piece(self, values: dict[str, Any], name: str) -> Any:
        if name.startswith("hub:") and name not in values:
            piece, move = values[name[4:]], self.hub_moves[name[4:]]
            values[name] = redistributed(piece, move, self.place) if move is not None else piece
        return values[name]

    def backward(self, loss: Tensor) -> None:
        """Gradients of this rank's pieces of the parameters, complete."""
        state = self._state(self.loss)
        counted = all(kind != "B" or self.place.at[axis] == 0 for axis, kind in enumerate(state))
        if loss.requires_grad:
            loss.backward(torch.ones_like(loss) if counted else torch.zeros_like(loss))
        for p in self.parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self._sum_buckets()

    def _sum_buckets(self) -> None:
        members: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
        for record in self._bucketed():
            name = record.source.partition(":")[2]
            gradient = self.parameters[name].grad
            assert gradient is not None
            members.setdefault((record.bucket, self.planned_item[name]), []).append(gradient)
        ways = {(b.axes, b.item): b.steps for b in self.plan.buckets}
        for key, gradients in members.items():
            flat = torch.cat([g.reshape(-1) for g in gradients])
            state = tuple("P" if i in key[0] else "B" for i in range(len(self.place.sizes)))
            summed = apply_steps(flat, tuple(flat.shape), state, ways[key], self.place, "gradients")
            for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _bucketed(self) -> list[MoveRecord]:
        return [m for m in self.plan.moves if m.bucket]

    # ---- what is whole -----------------------------------------------------------------------------------------------
    def whole(self, piece: Tensor, shape: Sequence[int], state: tuple[str, ...], reason: str = "report") -> Tensor:
        """The whole tensor on every rank, gathered outside of the plan's traffic (counted as `report`)."""
        steps = []
        current = tuple("B" if k == "R" else k for k in state)
        for axis in reversed(range(len(current))):  # inner splits first
            if current[axis] != "B":
                steps.append((axis, "B"))
        return apply_steps(piece.detach(), tuple(shape), current, steps, self.place, reason)

    def whole_loss(self, loss: Tensor) -> float:
        return float(self.whole(loss, (), self._state(self.loss)))

    def whole_parameters(self, *, gradients: bool = False) -> dict[str, Tensor]:
        """Every parameter (or its gradient), whole, by name."""
        found = {}
        for name, piece in self.parameters.items():
            x = piece.grad if gradients else piece
            assert x is not None
            found[name] = self.whole(x, self.shapes[f"param:{name}"], self._state(f"param:{name}"))
        return found

    def whole_buffers(self) -> dict[str, Tensor]:
        names = [n for n in self.pieces if n.startswith("buffer:")]
        return {n.partition(":")[2]: self.whole(self.pieces[n], self.shapes[n], self._state(n)) for n in names}

    def kept_bytes(self) -> int:
        """Bytes of parameters and buffers on this rank."""
        return sum(prod(p.shape) * p.element_size() for p in self.pieces.values())


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
