"""Copies of hot experts in spare memory: which expert on which rank, how tokens divide among the copies, and whether moving pays.

Cite: see CITE, section 3.4.2 (redundant experts), which copies the hottest experts and places them greedily.
Left open by the paper: how far that is from the best, and when copies should move. Our answer: an exact bound on the busiest rank, and the time that
is saved until loads change beside the time that weights travel.
Deviations: an expert keeps its home rank, so no copy of its optimizer state moves; tokens divide among copies as a maximum flow says.
Invariant: every token has a rank with its expert, no rank has more copies than spare places, the busiest rank has no more rows than without copies.
Cost: a flow of E + R nodes per copy placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...cite import Cite
from ...errors import UsageError

__all__ = ["CITE", "Replicas", "best_move", "busiest_bound", "least_busiest", "moving_pays", "place_replicas", "with_copies"]

CITE = Cite(key="deepseek2024v3", title="DeepSeek-V3 Technical Report", year=2024, venue="arXiv:2412.19437", authors="DeepSeek-AI")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """`copies`: (expert, rank) beside each expert's home. `rows`: per expert, (rank, rows of it there). `busiest`: rows of the busiest rank;
    `before`: without copies; `bound`: no placement in the spare places has fewer."""

    copies: tuple[tuple[int, int], ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    busiest: int
    before: int
    bound: int


def _checked(loads: Sequence[int], ranks: int, spare: int) -> int:
    """Experts of a rank. Raises: UsageError."""
    if ranks < 1 or not loads or len(loads) % ranks:
        raise UsageError(f"{len(loads)} experts do not divide among {ranks} ranks", where="replicas", hint="ranks that divide the experts")
    if min(loads) < 0 or spare < 0:
        raise UsageError("loads and spare places must be 0 or more", where="replicas")
    return len(loads) // ranks


def busiest_bound(loads: Sequence[int], ranks: int, spare: int) -> int:
    """Rows that some rank has at least, wherever `spare` copies a rank are placed.

    With at most y rows on every rank, a copy carries at most y rows, and at most those of its expert. A home rank with more than y must give the
    rest to copies of its experts, of which so many are needed that the largest carry it. Where all ranks together need more than there are places,
    y is not enough. Nor is less than the mean. All numbers are whole, so the bound is exact arithmetic.
    """
    own, places = _checked(loads, ranks, spare), ranks * min(spare, len(loads) - len(loads) // ranks)
    homes = [sorted(loads[r * own : (r + 1) * own], reverse=True) for r in range(ranks)]

    def needed(y: int) -> int:
        total = 0
        for mine in homes:
            over = sum(mine) - y
            carried = sorted((min(y, load - k * y) for load in mine for k in range(min(-(-load // y), ranks - 1))), reverse=True)
            for size in carried:
                if over <= 0:
                    break
                over, total = over - size, total + 1
            if over > 0:
                return places + 1
        return total

    low, high = -(-sum(loads) // ranks), max(map(sum, homes))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needed(max(1, middle)) <= places else (middle + 1, high)
    return low


def least_busiest(loads: Sequence[int], holders: Sequence[Sequence[int]], ranks: int) -> tuple[int, list[dict[int, int]]]:
    """(rows of the busiest rank, rows of every expert by rank) when tokens divide best among `holders`: bisection over maximum flows."""
    low, high = -(-sum(loads) // ranks), sum(loads)
    best = [{h[0]: n} for h, n in zip(holders, loads, strict=True)]
    high = min(high, max(sum(flow.get(r, 0) for flow in best) for r in range(ranks)))
    while low < high:
        middle = (low + high) // 2
        flow = _flow(loads, holders, ranks, middle)
        if flow is None:
            low = middle + 1
        else:
            high, best = middle, flow
    return high, best


def _flow(loads: Sequence[int], holders: Sequence[Sequence[int]], ranks: int, most: int) -> list[dict[int, int]] | None:
    """Rows of every expert by rank with at most `most` on each; None where there are none. Augmenting paths, breadth first."""
    flow: list[dict[int, int]] = [dict.fromkeys(h, 0) for h in holders]
    room = [most] * ranks
    for expert, load in enumerate(loads):
        left = load
        while left:
            came: dict[int, tuple[int, int]] = {}  # rank -> (rank before it, or -1; expert whose rows move here)
            queue = [(r, -1, expert) for r in holders[expert]]
            end = -1
            for rank, before, moved in queue:
                if rank in came:
                    continue
                came[rank] = before, moved
                if room[rank]:
                    end = rank
                    break
                queue += [(r, rank, e) for e, of in enumerate(flow) if of.get(rank) for r in holders[e] if r not in came]
            if end < 0:
                return None
            path, at = [], end
            while at >= 0:
                path.append((at, *came[at]))
                at = came[at][0]
            amount = min(left, room[end], *(flow[e][before] for _, before, e in path if before >= 0))
            for rank, before, e in path:
                flow[e][rank] += amount
                if before >= 0:
                    flow[e][before] -= amount
            room[end] -= amount
            left -= amount
    return flow


def place_replicas(loads: Sequence[int], ranks: int, spare: int) -> Replicas:
    """Copies in `spare` places of every rank: again and again the copy, of an expert of the busiest home to the rank with most room, that makes the
    busiest rank least busy. Raises: UsageError."""
    own = _checked(loads, ranks, spare)
    holders = [[e // own] for e in range(len(loads))]
    left, copies = [spare] * ranks, list[tuple[int, int]]()
    busiest, flow = least_busiest(loads, holders, ranks)
    before, bound = busiest, busiest_bound(loads, ranks, spare)
    while busiest > bound and any(left):
        work = [sum(of.get(r, 0) for of in flow) for r in range(ranks)]
        full = {r for r in range(ranks) if work[r] == busiest}
        # a copy helps only where some rank that is full holds its expert
        free = [r for r in range(ranks) if left[r] and r not in full]
        tries = [(e, r) for e, h in enumerate(holders) if full & set(h) and loads[e] for r in free if r not in h]
        tries.sort(key=lambda x: (-max(flow[x[0]].get(r, 0) for r in full), work[x[1]], x))
        if not tries:
            break
        e, r = tries[0]
        holders[e].append(r)
        left[r] -= 1
        copies.append((e, r))
        busiest, flow = least_busiest(loads, holders, ranks)
    used = {(e, r) for e, of in enumerate(flow) for r, n in of.items() if n and r != e // own}
    rows = tuple(tuple(sorted((r, n) for r, n in of.items() if n)) for of in flow)
    return Replicas(copies=tuple(c for c in copies if c in used), rows=rows, busiest=busiest, before=before, bound=bound)


def with_copies(loads: Sequence[int], copies: Sequence[tuple[int, int]], ranks: int) -> Replicas:
    """Given copies as `Replicas`, tokens divided best among them; the bound is that of as many spare places as the fullest rank uses.

    Raises: UsageError for a copy of no expert, at no rank, at its own home, or named twice.
    """
    own, held = _checked(loads, ranks, 0), dict[int, int]()
    holders = [[e // own] for e in range(len(loads))]
    for e, r in copies:
        if not (0 <= e < len(loads) and 0 <= r < ranks) or r in holders[e]:
            raise UsageError(f"no copy of expert {e} can be at rank {r}", where="replicas", hint="each expert once at each rank other than its home")
        holders[e].append(r)
        held[r] = held.get(r, 0) + 1
    busiest, flow = least_busiest(loads, holders, ranks)
    before = max(sum(loads[r * own : (r + 1) * own]) for r in range(ranks))
    rows = tuple(tuple(sorted((r, n) for r, n in of.items() if n)) for of in flow)
    bound = busiest_bound(loads, ranks, max(held.values(), default=0))
    return Replicas(copies=tuple(copies), rows=rows, busiest=busiest, before=before, bound=bound)


def _most(copies: Sequence[tuple[int, int]], own: int) -> int:
    """Copies that some rank holds or sends: what it takes in and gives out travels at once."""
    each: dict[tuple[str, int], int] = {}
    for e, r in copies:
        for way in (("in", r), ("out", e // own)):
            each[way] = each.get(way, 0) + 1
    return max(each.values(), default=0)


def moving_pays(
    now: Replicas, then: Replicas, *, ranks: int, row_s: Fraction, expert_bytes: int, rate_Bps: int, steps: int, step_bytes: int = 0
) -> tuple[bool, Fraction, Fraction]:  # fmt: skip
    """(whether to move, seconds saved, seconds of weights on their way). `row_s`: of a row through an expert, forward and backward; `steps`: until
    loads are expected to change; `step_bytes`: that every copy costs in every step, in training its weights and their gradient. New copies travel
    once; what a rank takes in, and what it gives out, goes one after the other. Raises: UsageError."""
    if rate_Bps <= 0 or steps < 0:
        raise UsageError("needs a rate above 0 and 0 or more steps", where="replicas")
    own = len(then.rows) // ranks
    each = [Fraction(_most(x.copies, own) * step_bytes, rate_Bps) for x in (now, then)]
    saved = ((now.busiest - then.busiest) * row_s + each[0] - each[1]) * steps
    moved = Fraction(_most(sorted(set(then.copies) - set(now.copies)), own) * expert_bytes, rate_Bps)
    return saved > moved, saved, moved


def best_move(
    copies: Sequence[tuple[int, int]], loads: Sequence[int], ranks: int, spare: int, *, row_s: Fraction, expert_bytes: int, rate_Bps: int,
    calls: int, step_bytes: int,
) -> tuple[Replicas, Fraction, Fraction]:  # fmt: skip
    """(copies from now on, seconds saved, seconds of weights on their way) in the next `calls` steps if these have the loads of the last, added up in
    `loads`: those there are, or the first so many that `place_replicas` makes, where they save more than they cost. Arguments as `moving_pays`."""
    now, most = with_copies(loads, copies, ranks), place_replicas(loads, ranks, spare)
    best, gain = (now, Fraction(0), Fraction(0)), Fraction(0)
    for n in range(len(most.copies), -1, -1):
        then = with_copies(loads, most.copies[:n], ranks)
        # `loads` are of all calls together: one call of them saves what all of these save
        pays, saved, moved = moving_pays(
            now, then, ranks=ranks, row_s=row_s, expert_bytes=expert_bytes, rate_Bps=rate_Bps, steps=1, step_bytes=calls * step_bytes,
        )  # fmt: skip
        if pays and saved - moved > gain:
            best, gain = (then, saved, moved), saved - moved
    return best
