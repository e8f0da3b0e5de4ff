"""Sparse gradients by whichever way is fastest: dense or as pairs through the switch, as pairs among the hosts, or the hosts' ring.

Cite: Flare (see `kernels.sparse_block`), section 7, which compares these ways.
Left open by the paper: who chooses. Our answer: a line per way, fixed seconds and seconds per byte of the busiest link, through two calls of unlike
sizes that are timed when the job begins. What a call costs follows from its pairs and from how alike the workers' places were in the last call.
Lines are no better than some 20 %: ways that promise to be closer are tried by calls of the job itself, and their median times decide (`Trials`).
Deviations: none known.
Invariant: all workers take the same way: it follows from numbers that all share (the slowest's times, the most pairs, the last result).
Cost: one small all-reduce among the hosts per call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import GroupFailed, LinkLost, MeshwrightError, RunTimeout, Unsupported, UsageError
from .client import Seat
from .fallback import Hosts, Reducer
from .frames import HEADER_BYTES
from .sockets import Address
from .sparse_client import SparseStream, pairs_of
from .sparse_rounds import FRAME_WORDS, most_pairs, sparse_mode

__all__ = ["WAYS", "Load", "SparseReducer", "Trials", "link_bytes"]

WAYS = ("dense", "sparse", "hosts", "ring")
BROKEN = 1 << 62  # instead of a number of pairs: the switch is lost
FRAME_BYTES = 42 + HEADER_BYTES  # of a packet on the wire beside its payload: Ethernet, IP, UDP, ours
TCP_SHARE = 1 + 66 / 1448  # bytes on the wire per byte of the hosts' own messages
TIMED = ((1 << 10, 0.01), (1 << 18, 0.05))  # elements and density of the calls that are timed; the larger takes a tenth of a second at 50 Mbit/s
SLOTS = 64  # of a job, as `Seat` has them unless told otherwise
TRIES = 3  # of each; the fastest counts: what else runs on the machine only adds
# Measured with 8 workers at 50 Mbit/s: calls of 30 to 70 ms by one way differ by 24 %, and lines are off by up to 35 % there.
MAX_BEHIND = 1.5  # ways that promise at most so many times the fastest's time are tried
TRIED = 5  # calls by each of them, before medians decide
KEPT = 11  # last calls by a way whose median counts
MIN_GAIN = 0.95  # of the time of the way in use: another must be faster than that to take its place


@dataclass(frozen=True)
class Load:
    """What a call carries: `pairs` of the worker with the most, `union` of the sum."""

    workers: int
    elements: int
    pairs: float
    union: float


def link_bytes(way: str, load: Load, *, words: int, span: int) -> float:
    """Bytes on a worker's busiest direction, headers included; pairs are taken to be spread evenly over the blocks."""
    if way == "dense":
        return load.elements * 4 * (1 + FRAME_BYTES / (4 * words))
    if way == "ring":
        return 2 * (load.workers - 1) / load.workers * load.elements * 4 * TCP_SHARE
    if way == "hosts":
        return (load.workers - 1) * load.pairs * 8 * TCP_SHARE
    blocks = max(1, -(-load.elements // span))
    up, down = (_packets(pairs / blocks, min(span, load.elements), words) for pairs in (load.pairs, load.union))
    rounds = max(up[0] + down[0] - 1, 1)
    alone = min(1.0, SLOTS / 2 / blocks)  # share of the pairs that go up while nothing comes down: of the first half of the slots
    return blocks * (max(up[1], down[1]) + alone * up[1] + rounds * (FRAME_BYTES + 4 * FRAME_WORDS))


def _packets(pairs: float, span: int, words: int) -> tuple[int, float]:
    """(packets, bytes of pairs or of numbers in a row) of a block."""
    as_pairs, as_array = 8 * pairs, 4.0 * span
    room = 8 * (most_pairs.py_func(words)) if as_pairs <= as_array else 4 * (words - FRAME_WORDS - 1)
    least = min(as_pairs, as_array)
    return max(1, math.ceil(least / room)), least


@dataclass
class Trials:
    """What calls of one kind (elements, pairs, union within a factor of 1.4) took by each way, of all workers the longest; `way`: the one in use."""

    times_s: dict[str, deque[float]] = field(default_factory=lambda: {w: deque(maxlen=KEPT) for w in WAYS})
    way: str = ""

    def untried(self, promised_s: Mapping[str, float]) -> list[str]:
        """Ways that may be the fastest, with too few calls to say. `promised_s`: of every way that there is, by its line."""
        took = self.took_s(promised_s)
        most = MAX_BEHIND * min(took.values())
        return [w for w in took if len(self.times_s[w]) < TRIED and min(took[w], promised_s[w]) <= most]

    def took_s(self, promised_s: Mapping[str, float]) -> dict[str, float]:
        """The median, or what is promised until there is one."""
        return {w: statistics.median(self.times_s[w]) if self.times_s[w] else s for w, s in promised_s.items()}

    def choose(self, promised_s: Mapping[str, float]) -> str:
        """The way of the next call."""
        took = self.took_s(promised_s)
        best = min(took, key=took.__getitem__)
        if untried := self.untried(promised_s):
            return min(untried, key=lambda w: (len(self.times_s[w]), took[w]))
        if self.way not in took or took[best] < MIN_GAIN * took[self.way]:
            self.way = best
        return self.way


class SparseReducer(Reducer):
    """A `Reducer` of float32 arrays of which most elements are zero. `pace`: per way, fixed seconds and seconds per byte."""

    sparse: SparseStream | None = None
    pace: dict[str, tuple[float, float]]
    span: int
    words: int
    apart: float  # independent workers that would have made the last call's union
    trials: dict[tuple[int, int, int], Trials]  # by what a call carries
    took: tuple[tuple[int, int, int], str, float] | None = None  # of the last call whose way was chosen: its kind, its way, its seconds here

    @classmethod
    def join(cls, switch: Address, seat: Seat, hosts: Hosts, rank: int, *, span: int = 1 << 12) -> SparseReducer:
        """As `Reducer.join`, with blocks of `span` indices; then times every way. `seat`: of mode `sum`; the job of pairs is named after it."""
        made = super().join(switch, seat, hosts, rank)
        assert isinstance(made, cls)
        made.span, made.words, made.pace, made.apart, made.trials = span, seat.words, {}, float(made.workers), {}
        if made.stream is not None:
            made._join_sparse(switch, seat)
        for way in WAYS if made.stream is not None else WAYS[2:]:
            made._time(way)
        return made

    def _join_sparse(self, switch: Address, seat: Seat) -> None:
        try:
            self.sparse = SparseStream.join(switch, replace(seat, job=f"{seat.job[:57]} pairs", mode=sparse_mode(self.span)))
        except (Unsupported, LinkLost, RunTimeout) as error:
            self.why = error
        if any(self.hosts.most(int(self.sparse is None))):
            self._leave()
            self.why = self.why or GroupFailed("another worker could not join the job of pairs", where=seat.job)
            self.stream = None

    def _time(self, way: str) -> None:
        """Find a way's fixed seconds and seconds per byte, from two calls; the slowest worker's."""
        points = []
        for elements, density in TIMED:
            rng = np.random.default_rng(self.rank)
            array = np.where(rng.random(elements) < density, 1.0, 0.0).astype(np.float32)
            took, total = [], array
            for _ in range(TRIES):
                total = array.copy()
                begin = time.perf_counter()
                self.all_reduce(total, way=way)
                took.append(time.perf_counter() - begin)
            most_s = self._most(int(min(took) * 1e9), 0, self.last)[0] / 1e9
            load = Load(self.workers, elements, elements * density, float(np.count_nonzero(total)))
            points.append((link_bytes(way, load, words=self.words, span=self.span), most_s))
        (few, short_s), (many, long_s) = points
        slope = max(long_s - short_s, 0.0) / (many - few)
        if self.stream is not None or way in WAYS[2:]:
            self.pace[way] = max(short_s - slope * few, 0.0), slope

    # ---- one call --------------------------------------------------------------------------------------------------
    def all_reduce(self, array: NDArray[Any], *, arithmetic: str = "exact", way: str = "auto") -> NDArray[Any]:
        """The sum over all workers of a float32 array, in place. `way`: one of `WAYS`, alike at all workers, or the one that promises to be fastest.

        Ways that promise much the same are tried by the first calls of a kind. Which way is taken may differ from run to run and from call to call,
        and so may the sum's last bits: name one for equal bits. Once the switch is lost, the hosts go on.
        Raises: UsageError; as `Reducer.all_reduce`.
        """
        if array.dtype != np.float32 or not array.flags.c_contiguous or way not in ("auto", *WAYS):
            raise UsageError(f"{array.dtype}, way {way!r}: a contiguous float32 array by one of auto, {', '.join(WAYS)}", where="all_reduce")
        most, slowest_ns = self._most(int(np.count_nonzero(array)), 0 if self.took is None else int(self.took[2] * 1e9), array)
        if self.took is not None:
            before, last, _ = self.took
            self.trials[before].times_s[last].append(slowest_ns / 1e9)
        kind = self._kind(array.size, most)
        chosen = self.best(array.size, most) if way == "auto" else way
        stream, begin = self.stream, time.perf_counter()
        self._go(chosen if self.stream is not None or chosen in WAYS[2:] else "ring", array, arithmetic)
        served = way == "auto" and self.stream is stream
        self.took = (kind, chosen, time.perf_counter() - begin) if served else None
        total = int(np.count_nonzero(array))
        share, whole = most / max(array.size, 1), total / max(array.size, 1)
        if 0 < share < 1 and share <= whole < 1:
            self.apart = math.log1p(-whole) / math.log1p(-share)
        self.done += 1
        return array

    def best(self, elements: int, pairs: int) -> str:
        """The way of the next call in which the worker with the most has so many pairs: the fastest, or one that is tried."""
        return self._trials(elements, pairs).choose(self._promised(elements, pairs))

    def settled(self, elements: int, pairs: int) -> bool:
        """Has every way been tried that may be the fastest for such calls?"""
        return not self._trials(elements, pairs).untried(self._promised(elements, pairs))

    def _trials(self, elements: int, pairs: int) -> Trials:
        return self.trials.setdefault(self._kind(elements, pairs), Trials())

    def _kind(self, elements: int, pairs: int) -> tuple[int, int, int]:
        """Calls of one kind are tried together: half powers of two of elements, of pairs, and of places that some worker has."""
        carried, sent, made = (round(2 * math.log2(x + 1)) for x in (elements, pairs, self._union(elements, pairs)))
        return carried, sent, made

    def _union(self, elements: int, pairs: int) -> float:
        """Places that some worker has, if they are as alike as in the last call."""
        missed: float = (1 - min(pairs / max(elements, 1), 1.0)) ** self.apart
        return elements * (1 - missed)

    def _promised(self, elements: int, pairs: int) -> dict[str, float]:
        """Seconds of a call by each way, by its line."""
        load = Load(self.workers, elements, pairs, self._union(elements, pairs))
        return {w: fixed + byte * link_bytes(w, load, words=self.words, span=self.span) for w, (fixed, byte) in self.pace.items()}

    def _most(self, value: int, other: int, array: NDArray[Any]) -> tuple[int, int]:
        """The largest of all workers' values, and of their others. Where one of them has lost the switch, all leave it."""
        most, others = self.hosts.most(value, other)
        if most < BROKEN:
            return most, others
        self._leave()
        super()._agree(GroupFailed("another worker lost the switch"), array)  # it lost the call before this one, whose result it is given
        return self._most(value, 0, array)

    def _go(self, way: str, array: NDArray[Any], arithmetic: str = "exact") -> None:
        stream, sparse = self.stream, self.sparse
        if way == "dense" and stream is not None:
            self._through(stream, array, lambda: stream.all_reduce(array, arithmetic=arithmetic))
        elif way == "sparse" and sparse is not None:
            self._through(sparse, array, lambda: np.copyto(array, sparse.all_reduce_pairs(*pairs_of(array), array.size).reshape(array.shape)))
        elif way == "hosts":
            self._gathered(array)
        else:
            self._by_hosts(array)

    def _gathered(self, array: NDArray[Any]) -> None:
        """Every worker's pairs to all, added in order of workers."""
        keys, values = pairs_of(array)
        flat = array.reshape(-1)
        flat[:] = 0
        for words in self.hosts.gather(np.concatenate([keys, values.view(np.int32)])):
            flat[words[: len(words) // 2]] += words[len(words) // 2 :].view(np.float32)

    # ---- the end ---------------------------------------------------------------------------------------------------
    def _agree(self, why: MeshwrightError, array: NDArray[Any]) -> bool:
        self.hosts.most(BROKEN, 0)  # others are in this call too, or at the beginning of the next
        self._leave()
        return super()._agree(why, array)

    def _leave(self) -> None:
        """Neither job goes on."""
        for stream in (self.stream, self.sparse):
            if stream is not None:
                stream.abandon("the hosts go on alone")
        self.sparse = self.took = None
        self.trials = {}  # some workers may know of a call more than others
        self.pace = {way: pace for way, pace in self.pace.items() if way in WAYS[2:]}

    def close(self) -> None:
        """As `Reducer.close`."""
        if self.sparse is not None:
            try:
                self.sparse.close()
            except (GroupFailed, LinkLost) as error:
                self._agree(error, self.last)
        super().close()
