"""What an assignment costs exactly: seconds by part, bytes per rank by reason, memory; the paths the executor will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from ....plan.sbp import coordinates, gradient_of, local_shape, value_of
from ....plan.sharding import Bytes
from .model import Choice, Model, is_bucketed, reduced_axes
from .redistribute import Step, step_sent

__all__ = ["Evaluation", "Move", "evaluate", "moves"]

Assignment = Sequence[int]  # choice per vertex


@dataclass(frozen=True)
class Move:
    """One edge as it is executed: steps of the value forward, of the gradient backward; `bucket`: the gradient waits for the common all-reduce."""

    edge: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    bucket: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    time_s: float
    parts_s: dict[str, float]
    bytes_sent: tuple[Bytes, ...]
    memory_bytes: int
    buckets: dict[tuple[tuple[int, ...], int], tuple[Step, ...]]  # of (axes, bytes per element): how a flat bucket of gradients is summed

    @property
    def mean_bytes(self) -> float:
        return sum(b.total for b in self.bytes_sent) / len(self.bytes_sent)


def moves(model: Model, assignment: Assignment) -> list[Move]:
    """All redistributions of an assignment, in edge order; edges that need none are left out."""
    found = []
    for index, edge in enumerate(model.network.edges):
        source = model.choices[edge.source][assignment[edge.source]].output
        reader = model.choices[edge.reader][assignment[edge.reader]].inputs[edge.slot]
        if source == reader or edge.fixed:
            continue
        value = edge.value
        path = partial(model.redistribute.path, value.shape, value.item)
        forward = path(value_of(source), value_of(reader))
        backward: tuple[Step, ...] = ()
        bucket: tuple[int, ...] = ()
        if value.gradient:
            if model.network.vertices[edge.source].kind == "param" and is_bucketed(source, reader):
                bucket = reduced_axes(source, reader)
            else:
                backward = path(gradient_of(reader), gradient_of(source))
        if forward or backward or bucket:
            found.append(Move(index, forward, backward, bucket))
    return found


def evaluate(model: Model, assignment: Assignment) -> Evaluation:
    """Raises: KeyError if two choices along an edge cannot be joined."""
    sizes = model.mesh.sizes
    ranks = list(coordinates(sizes))
    parts = dict.fromkeys(("compute", "redistribute", "inside", "gradients", "loader"), 0.0)
    sent = [dict.fromkeys(("activations", "gradients", "parameters", "inside", "loader"), 0) for _ in ranks]
    memory = 0.0
    for index, vertex in enumerate(model.network.vertices):
        choice = model.choices[index][assignment[index]]
        seconds = float(model.times[index][assignment[index]])
        memory += float(model.memory[index][assignment[index]])
        inside = _inside(model, choice, sent, ranks)
        parts["inside"] += inside
        parts["loader" if vertex.kind == "input" else "compute"] += seconds - inside
    buckets: dict[tuple[tuple[int, ...], int], list[int]] = {}
    paths: dict[tuple[tuple[int, ...], int], tuple[Step, ...]] = {}
    for move in moves(model, assignment):
        edge = model.network.edges[move.edge]
        value, name = edge.value, edge.value.name
        if move.bucket:
            state = model.choices[edge.source][assignment[edge.source]].output
            totals = buckets.setdefault((move.bucket, value.item), [0] * len(ranks))
            for r, at in enumerate(ranks):
                totals[r] += prod(local_shape(value.shape, state, sizes, at))
        elif move.forward:
            memory += float(model.edge_costs(move.edge)[1][assignment[edge.source], assignment[edge.reader]])
        ahead = "parameters" if name.startswith("param:") else "loader" if name.startswith(("input:", "buffer:")) else "activations"
        for steps, reason in ((move.forward, ahead), (move.backward, "gradients" if ahead == "parameters" else ahead)):
            for step in steps:
                parts["loader" if reason == "loader" else "redistribute"] += model.redistribute.step_time_s(value.shape, value.item, step)
                for r, at in enumerate(ranks):
                    sent[r][reason] += step_sent(value.shape, step, sizes, at) * value.item
    for (axes, item), totals in buckets.items():
        parts["gradients"] += model.bucket_time_s(max(totals), item, axes)
        before, after = model.bucket_states(axes)
        paths[axes, item] = model.redistribute.path((max(totals),), item, before, after)
        for r, at in enumerate(ranks):
            for step in paths[axes, item]:
                sent[r]["gradients"] += step_sent((totals[r],), step, sizes, at) * item
    return Evaluation(sum(parts.values()), parts, tuple(Bytes(**s) for s in sent), int(memory), paths)


def _inside(model: Model, choice: Choice, sent: list[dict[str, int]], ranks: Sequence[tuple[int, ...]]) -> float:
    """Seconds of the exchanges inside an operator; adds their bytes."""
    sizes, seconds = model.mesh.sizes, 0.0
    plain = ("B",) * len(sizes)
    for axis, signature in enumerate(choice.signatures):
        for exchange in signature.exchanges:
            seconds += model.exchange_time_s(exchange, choice, axis)
            step = Step(axis, (*plain[:axis], "P", *plain[axis + 1 :]), plain)
            for r, at in enumerate(ranks):
                elements = _pieces_of(exchange.elements, choice, axis, exchange.letters, sizes, at)
                sent[r]["inside"] += step_sent((elements,), step, sizes, at) * exchange.item
    return seconds


def _pieces_of(elements: int, choice: Choice, axis: int, letters: str, sizes: Sequence[int], at: Sequence[int]) -> int:
    """Elements of this rank's piece: nested as `torch.chunk` nests them."""
    for other, signature in enumerate(choice.signatures):
        if other != axis and signature.letter and signature.letter in letters:
            step = -(-elements // sizes[other])
            elements = max(0, min(step, elements - at[other] * step))
    return elements
