"""Ranks of one process: redistributions on threads with queues for wires, operators whose pieces talk to each other step by step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from meshwright.lower.sharding import Inside
from meshwright.plan.sbp import State, coordinates, local_shape, local_slices

WAIT_S = 20.0


class QueueTransport:
    """Messages of one rank: a queue per ordered pair of ranks and tag."""

    grouped = False

    def __init__(self, rank: int, mail: dict[tuple[int, int, int], queue.Queue[torch.Tensor]], lock: Any) -> None:
        self.rank, self.mail, self.lock = rank, mail, lock

    def _box(self, key: tuple[int, int, int]) -> queue.Queue[torch.Tensor]:
        with self.lock:
            return self.mail.setdefault(key, queue.Queue())

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self._box((self.rank, peer, tag)).put(tensor.clone())

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return tensor, self._box((peer, self.rank, tag))

    def wait(self, work: Any) -> None:
        if work is not None:
            tensor, box = work
            got = box.get(timeout=WAIT_S)
            assert got.shape == tensor.shape and got.dtype == tensor.dtype, (got.shape, tensor.shape)
            tensor.copy_(got)


def run_threads(ranks: int, work: Callable[[int, QueueTransport], Any]) -> list[Any]:
    """`work(rank, transport)` on every rank; results in rank order. Raises the first rank's error; nothing may be left unread."""
    mail: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
    lock, results, errors = threading.Lock(), [None] * ranks, list[BaseException]()

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank, QueueTransport(rank, mail, lock))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * WAIT_S)
    if errors:
        raise errors[0]
    assert all(box.empty() for box in mail.values()), "something was sent that nobody received"
    return results


def talk(sizes: tuple[int, ...], found: Sequence[Any], promised: Sequence[Sequence[Inside]]) -> list[Any]:
    """Results of all ranks of an operator whose pieces may talk to each other: what they yield is added up, under autograd, and is what the program
    was promised."""
    if not isinstance(found[0], Generator):
        assert not any(promised), "the program exchanges what the operator does not"
        return list(found)
    places = list(coordinates(sizes))
    said = [_next(f, None) for f in found]
    for number in range(len(promised[0])):
        sums: dict[tuple[int, ...], torch.Tensor] = {}
        keys = []
        for r, (at, one) in enumerate(zip(places, said, strict=True)):
            wanted = promised[r][number]
            assert (one.axis, one.x.numel(), str(one.x.dtype)) == (wanted.axis, wanted.elements, f"torch.{wanted.dtype}")
            assert one.x.requires_grad == wanted.gradient
            keys.append((*at[: one.axis], -1, *at[one.axis + 1 :]))
            before = sums.get(keys[-1])
            sums[keys[-1]] = one.x if before is None else torch.maximum(before, one.x) if wanted.maximum else before + one.x
        said = [_next(f, sums[key]) for f, key in zip(found, keys, strict=True)]
    assert all(isinstance(x, torch.Tensor) for x in said), "the operator exchanges more than the program"
    return said


def _next(talking: Generator[Any, Any, Any], came: torch.Tensor | None) -> Any:
    """What is said next, or the result."""
    try:
        return talking.send(came)
    except StopIteration as end:
        return end.value


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
