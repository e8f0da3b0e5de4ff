"""Parts that the sparse all-reduces share: the header, sums by region, the gathering of blocks of unlike size, exact thresholds over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MessageDamaged, NotFinite, PlanMismatch
from ...kernels.entries import LEVELS, add_entries, descend, entry_values, histogram
from .protocol import AllGather, AllReduce, Message, Post, Protocol, Wait
from .state import Entries, RankState, StepStats

__all__ = ["BUCKET", "FIXED", "UNDER_WAY", "gather_blocks", "gather_words", "global_threshold", "greet", "sum_regions"]

BUCKET, UNDER_WAY = 2, 2  # messages of a bucket, and buckets under way at once: while one is waited for, the next keeps links busy
FIELDS = ("elements", "k", "method", "step", "index bytes")  # which must be equal on all ranks
FIXED = len(FIELDS) + 4  # words of the header before the counts
MASS_TOLERANCE = 2.0**-22  # of the sum of magnitudes, per addition in float32


def greet(
    state: RankState, method: int, wrong: int, counts: NDArray[np.int64], stats: StepStats, proposed: NDArray[np.int64] | None = None
) -> Protocol[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Exchange headers, always the first thing in a step: all ranks learn what each will send to each, and refuse together what cannot be right.

    wrong: index of an element that is not finite, or -1. counts: rows for every rank. proposed: inner boundaries of regions, where a method has some.
    Returns row counts, [sender, receiver], and everybody's proposals.
    Raises on all ranks alike: PlanMismatch (ranks that differ in what they reduce), NotFinite, MessageDamaged (mass was lost in the last step).
    """
    mass = np.array([state.given, state.given_size]).view(np.int64)
    fields = [state.elements, state.k, method, state.step, 8 if state.wide else 4, state.rank, wrong]
    inner = np.zeros(state.ranks - 1, np.int64) if proposed is None else proposed
    row = np.concatenate([np.array(fields, np.int64), mass, counts, inner])
    stats.control_words += 2 * len(row) * (state.ranks - 1)
    rows: NDArray[np.int64] = yield AllGather("headers", row)
    for column, name in enumerate(FIELDS):
        differ = np.flatnonzero(rows[:, column] != rows[0, column])
        if len(differ):
            text = ", ".join(f"rank {r} has {int(rows[r, column])}" for r in differ[:8])
            raise PlanMismatch(
                f"ranks differ in {name}: rank 0 has {int(rows[0, column])}, {text}", where=f"sparse all-reduce, step {state.step}",
                hint="give every rank the same size, k, method and number of steps", data={"field": name, "ranks": differ.tolist()},
            )  # fmt: skip
    bad = np.flatnonzero(rows[:, 6] >= 0)
    if len(bad):
        at = int(rows[bad[0], 6])
        raise NotFinite(
            f"the gradient (with its residual) of rank {', '.join(map(str, bad[:8]))} is not finite, at element {at} of rank {bad[0]}",
            where=f"sparse all-reduce, step {state.step}", hint="nothing was sent, residuals are as before: skip the step or lower the loss scale",
            data={"ranks": bad.tolist(), "element": at},
        )  # fmt: skip
    given, size = rows[:, 7].view(np.float64).sum(), rows[:, 8].view(np.float64).sum()
    if abs(given - state.total) > MASS_TOLERANCE * state.ranks * size:
        raise MessageDamaged(
            f"ranks gave {given:.9g} in step {state.step - 1}, its result sums up to {state.total:.9g}", where="sparse all-reduce",
            hint="a message was damaged on the way: start again from the last checkpoint", data={"given": float(given), "result": state.total},
        )  # fmt: skip
    return rows[:, FIXED : FIXED + state.ranks], rows[:, FIXED + state.ranks :]


def buckets(ranks: int) -> Iterator[range]:
    """Distances 1..ranks-1 in groups of BUCKET."""
    for first in range(1, ranks, BUCKET):
        yield range(first, min(ranks, first + BUCKET))


def sum_regions(
    state: RankState, entries: Entries, counts: NDArray[np.int64], dense: NDArray[np.float32], base: int, stats: StepStats,
    places: Any = None,
) -> Protocol[None]:  # fmt: skip
    """Send every rank the entries of its region and add up what comes for this one's, in `dense`, whose element 0 is index `base`.

    entries: in the order of their owners, as `counts[rank]` says. At distance i a rank sends to rank + i and receives from rank - i, so that nobody
    hears two at once; a bucket's entries are added while the next ones are under way. `places(entries)` turns indices into places first.
    """
    me, n = state.rank, state.ranks
    first = [0, *accumulate(counts[me].tolist())]
    arriving = [0, *accumulate(int(counts[(me - i) % n, me]) for i in range(1, n))]
    room = state.entries("arriving", arriving[-1])

    def post(distances: range) -> Post:
        to = [(me + i) % n for i in distances]
        sends = tuple(Message(p, entries[first[p] : first[p + 1]].reshape(-1)) for p in to)
        receives = tuple(Message((me - i) % n, room[arriving[i - 1] : arriving[i]].reshape(-1)) for i in distances)
        return Post("regions", sends, receives)

    def add(found: Entries) -> None:
        if places is not None:
            places(found)
        row = add_entries(dense, base, found, entry_values(found))
        if row >= 0:
            raise MessageDamaged(
                f"an entry for element {int(found[row, 0])} reached rank {me}, whose region is {base}..{base + len(dense) - 1}",
                where="sparse all-reduce", hint="start again from the last checkpoint", data={"rank": me, "element": int(found[row, 0])},
            )  # fmt: skip

    dense[:] = 0
    own = entries[first[me] : first[me + 1]]
    groups = list(buckets(n))
    tickets = []
    for group in groups[:UNDER_WAY]:
        tickets.append((yield post(group)))
    add(own if places is None else own.copy())
    for i, group in enumerate(groups):
        yield Wait(tickets[i])
        if i + UNDER_WAY < len(groups):
            tickets.append((yield post(groups[i + UNDER_WAY])))
        add(room[arriving[group[0] - 1] : arriving[group[-1]]])
    stats.words_sent += (first[-1] - len(own)) * state.entry_words
    stats.words_received += arriving[-1] * state.entry_words
    stats.words_to_regions = (counts.sum(0) - np.diag(counts)) * state.entry_words


def gather_blocks(state: RankState, own: NDArray[Any], sizes: Sequence[int], stats: StepStats) -> Protocol[NDArray[Any]]:
    """All ranks' blocks, one after the other by rank; `sizes`: their lengths, `own` this rank's. ceil(log2 P) rounds (Bruck's all-gather)."""
    me, n = state.rank, state.ranks
    turned = [sizes[(me + i) % n] for i in range(n)]
    at = [0, *accumulate(turned)]
    room = state.room("gathering", at[-1], own.dtype)
    room[: at[1]] = own
    have = 1
    while have < n:
        more = min(have, n - have)
        sends = (Message((me - have) % n, room[: at[more]]),)
        receives = (Message((me + have) % n, room[at[have] : at[have + more]]),)
        ticket = yield Post("gather", sends, receives)
        yield Wait(ticket)
        stats.words_sent += at[more] * own.itemsize // 4
        stats.words_received += (at[have + more] - at[have]) * own.itemsize // 4
        have += more
    start = at[n - me] if me else 0  # rank 0's block lies at position n - me
    out = state.room("gathered", at[-1], own.dtype)
    out[: at[-1] - start] = room[start:]
    out[at[-1] - start :] = room[:start]
    return out


def gather_words(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Words that every rank sends and receives in `gather_blocks` of blocks of so many words."""
    n = len(sizes)
    sent, at = np.zeros(n, np.int64), np.concatenate([[0], np.cumsum(np.concatenate([sizes, sizes]))])
    have = 1
    while have < n:
        more = min(have, n - have)
        sent += at[more : more + n] - at[:n]
        have += more
    return sent, sizes.sum() - sizes


def global_threshold(state: RankState, bits: NDArray[np.int32], k: int, stats: StepStats) -> Protocol[tuple[int, int]]:
    """(k-th largest magnitude of all ranks' vectors together, how many lie above it), exactly; (1, all) where fewer than k are not zero."""
    prefix, above = 0, 0
    done = False
    bits = bits[bits != 0]  # a region's sums are mostly zeros, and are read three times
    for low, high in LEVELS:
        counts = np.zeros(1 << (high - low), np.int64 if state.wide else np.int32)
        if not done:
            histogram(bits, low, high, prefix, counts)
        stats.control_words += 2 * counts.nbytes // 4 * (state.ranks - 1) // state.ranks
        yield AllReduce("histogram", counts)
        if done:
            continue
        found, higher = descend(counts.astype(np.int64), k - above)
        above += higher
        if found < 0:
            prefix, done = 1, True
        else:
            prefix = prefix << (high - low) | found
    return prefix, above
