"""Ranks as threads of one process: the exchanges of a sharding plan over queues, with the same counters."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.decide.layout.autoddl.sbp import State, coordinates, local_shape, local_slices
from meshwright.run.dtensor.exchange import AxisGroup, Wires
from meshwright.run.dtensor.redistribute import Place

WAIT_S = 20.0


class Mail:
    """One queue per ordered pair of ranks."""

    def __init__(self, ranks: int) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}


class ThreadWires(Wires):
    def __init__(self, axes: Sequence[AxisGroup], rank: int, mail: Mail) -> None:
        super().__init__(axes)
        self.rank, self.mail = rank, mail

    def exchange(self, axis: int, out: Any, into: Any, reason: str) -> None:
        on = self.axes[axis]
        for i, tensor in enumerate(out):
            if i != on.index and tensor is not None and tensor.numel():
                self.counters.add(reason, tensor)
                self.mail.boxes[self.rank, on.ranks[i]].put(tensor.detach().clone())
        for i, tensor in enumerate(into):
            if i != on.index and tensor is not None and tensor.numel():
                got = self.mail.boxes[on.ranks[i], self.rank].get(timeout=WAIT_S)
                assert got.shape == tensor.shape and got.dtype == tensor.dtype, (got.shape, tensor.shape)
                with torch.no_grad():
                    tensor.copy_(got)


def run_threads(sizes: tuple[int, ...], work: Callable[[Place], Any]) -> list[Any]:
    """`work(place)` on every rank; results in rank order. Raises the first rank's error; nothing may be left unread."""
    at = list(coordinates(sizes))
    number = {c: r for r, c in enumerate(at)}
    mail = Mail(len(at))
    results: list[Any] = [None] * len(at)
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        axes = []
        for axis, p in enumerate(sizes):
            members = tuple(number[(*at[rank][:axis], i, *at[rank][axis + 1 :])] for i in range(p))
            axes.append(AxisGroup(members, at[rank][axis]))
        try:
            results[rank] = work(Place(sizes, at[rank], ThreadWires(axes, rank, mail)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(len(at))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * WAIT_S)
    if errors:
        raise errors[0]
    assert all(box.empty() for box in mail.boxes.values()), "something was sent that nobody received"
    return results


def spread(whole: torch.Tensor, state: State, sizes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Pieces of a tensor by rank: splits cut out, copies, random summands for P, parts below the maximum for M."""
    parts = dict.fromkeys(coordinates(sizes), whole)
    for axis, kind in enumerate(state):
        if kind not in ("P", "M"):
            continue
        fresh = {}
        for at in coordinates(sizes):
            others = tuple(c for i, c in enumerate(at) if i != axis and state[i] in ("P", "M"))  # copies are the same in every bit
            shares = [_noise(whole, (seed, axis, i, *others)) for i in range(sizes[axis] - 1)]
            if kind == "P":
                fresh[at] = shares[at[axis]] if at[axis] < len(shares) else parts[at] - sum(shares)
            else:
                fresh[at] = parts[at] - shares[at[axis]].abs() if at[axis] < len(shares) else parts[at]
        parts = fresh
    pieces = []
    for at in coordinates(sizes):
        x = parts[at]
        for dim, runs in enumerate(local_slices(tuple(whole.shape), state, sizes, at)):
            x = torch.cat([x.narrow(dim, a, b - a) for a, b in runs], dim)
        pieces.append(x.clone())
    return pieces


def _noise(like: torch.Tensor, key: tuple[int, ...]) -> torch.Tensor:
    number = 1
    for k in key:
        number = (number * 1_000_003 + k + 1) % (1 << 31)
    generator = torch.Generator().manual_seed(number)
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return torch.randint(50, like.shape, generator=generator, dtype=like.dtype)


def whole_of(pieces: list[torch.Tensor], shape: tuple[int, ...], state: State, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensor that pieces stand for, once per set of copies: splits put in place, summands added up, maxima taken."""
    total: dict[tuple[int, ...], torch.Tensor] = {}
    for at, piece in zip(coordinates(sizes), pieces, strict=True):
        assert tuple(piece.shape) == local_shape(shape, state, sizes, at), (tuple(piece.shape), shape, state, at)
        index = [torch.cat([torch.arange(a, b) for a, b in runs]) for runs in local_slices(shape, state, sizes, at)]
        full = torch.zeros(shape, dtype=piece.dtype) if "M" not in state else torch.full(shape, -(10**9), dtype=piece.dtype)
        full[torch.meshgrid(*index, indexing="ij") if index else ()] = piece
        key = tuple(i for i, k in zip(at, state, strict=True) if k in "RB")
        total[key] = full if key not in total else torch.maximum(total[key], full) if "M" in state else total[key] + full
    return list(total.values())
