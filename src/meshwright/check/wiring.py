"""A wiring of accelerators without switches: its ports, its steps and its load, found again from the arcs alone. Shares nothing with the planner.

The load of a step is the largest, over nodes and non-empty sets S of the neighbours that send to it, of the shards that only S can bring, over the
links from S (Hall's theorem; NSDI 2025, arXiv 2202.03356, section 5). Here sets of shards are bits of one integer for every node, and each set S is
tried by itself. Nodes with more than `MAX_TRIED_PORTS` neighbours have too many sets: for them the stated sets are counted, which proves that the
load cannot be less, and the answer is `unknown`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import reduce
from operator import or_

from .verdict import Finding, Verdict, guarded

__all__ = ["MAX_TRIED_PORTS", "check_schedule", "check_wiring"]

MAX_TRIED_PORTS = 8  # neighbours of a node whose sets are all tried: 255 sets of each


def check_wiring(
    nodes: int,
    ports: int,
    arcs: Sequence[tuple[int, int]],
    *,
    steps: int,
    load: Fraction,
    paired: bool = False,
    tight: Sequence[tuple[int, Sequence[int]]] = (),
    most_peers: int = 0,
    most_parallel: int = 0,
) -> Verdict:
    """Claimed of an all-gather: `steps`, and `load` shards over the busiest link, summed over steps. `tight[t]`: (node, senders) of step t.

    The reduce-scatter of a wiring is checked as the all-gather of the reversed arcs.
    `most_peers`, `most_parallel`: others that a node may send to, and arcs to the same one; 0: any number.
    """
    facts: dict[str, object] = {}
    findings = guarded("plan", lambda: _ports(nodes, ports, arcs, paired))
    findings = findings or guarded("plan", lambda: _limits(arcs, most_peers, most_parallel))
    if not findings:
        findings = guarded("certificate", lambda: _load(nodes, arcs, steps, load, tight, facts))
    return Verdict(findings=tuple(findings), facts=facts)


def _ports(nodes: int, ports: int, arcs: Sequence[tuple[int, int]], paired: bool) -> Iterator[Finding]:
    for what, ends in (("sends over", [a for a, _ in arcs]), ("receives over", [b for _, b in arcs])):
        count = Counter(ends)
        wrong = next((x for x in sorted(set(range(nodes)) | set(count)) if count[x] != ports or not 0 <= x < nodes), None)
        if wrong is not None:
            yield Finding(check="plan", message=f"node {wrong} {what} {count[wrong]} ports, not {ports}", witness={"node": wrong})
    both = Counter(arcs)
    alone = next((arc for arc in arcs if paired and both[arc] != both[arc[1], arc[0]]), None)
    if alone is not None:
        yield Finding(check="plan", message=f"no link back from node {alone[1]} to node {alone[0]}", witness={"arc": list(alone)})


def _limits(arcs: Sequence[tuple[int, int]], most_peers: int, most_parallel: int) -> Iterator[Finding]:
    links = Counter((a, b) for a, b in arcs if a != b)
    for (a, b), count in links.items():
        if most_parallel and count > most_parallel:
            yield Finding(check="plan", message=f"{count} links from node {a} to node {b}, of at most {most_parallel}", witness={"arc": [a, b]})
    for node, count in Counter(a for a, _ in links).items():
        if most_peers and count > most_peers:
            yield Finding(check="plan", message=f"node {node} sends to {count} others, of at most {most_peers}", witness={"node": node})


def _load(
    nodes: int, arcs: Sequence[tuple[int, int]], steps: int, load: Fraction, tight: Sequence[tuple[int, Sequence[int]]], facts: dict[str, object]
) -> Iterator[Finding]:
    into: list[Counter[int]] = [Counter() for _ in range(nodes)]
    for a, b in arcs:
        if a != b:
            into[b][a] += 1
    front = [1 << u for u in range(nodes)]
    seen, everyone, total, found = list(front), (1 << nodes) - 1, Fraction(0), 0
    complete = True
    while any(row != everyone for row in seen):
        after = [reduce(or_, (front[w] for w in into[u]), 0) & ~seen[u] for u in range(nodes)]
        if not any(after):
            u = next(i for i, row in enumerate(seen) if row != everyone)
            yield Finding(check="plan", message=f"some shards never reach node {u}", witness={"node": u})
            return
        busiest = Fraction(0)
        for u in range(nodes):
            if not after[u]:
                continue
            stated = [tuple(w) for v, w in tight[found : found + 1] if v == u]
            sets = stated if len(into[u]) > MAX_TRIED_PORTS else _sets(sorted(into[u]))
            complete &= len(into[u]) <= MAX_TRIED_PORTS
            for chosen in sets:
                others = reduce(or_, (front[w] for w in into[u] if w not in chosen), 0)
                busiest = max(busiest, Fraction((after[u] & ~others).bit_count(), sum(into[u][w] for w in chosen)))
        total, found = total + busiest, found + 1
        seen = [a | b for a, b in zip(seen, after, strict=True)]
        front = after
    facts.update(steps=found, load=str(total))
    if found != steps:
        yield Finding(check="certificate", message=f"an all-gather takes {found} steps, not {steps}", witness={"steps": found})
    if total > load or (complete and total != load):
        yield Finding(check="certificate", message=f"its busiest links carry {total} shards, not {load}", witness={"load": str(total)})
    elif not complete:
        yield Finding(check="certificate", message=f"its busiest links carry at least {total} shards, as stated {load}", status="unknown")


def _sets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for mask in range(1, 1 << len(items)):
        yield tuple(x for k, x in enumerate(items) if mask >> k & 1)


def check_schedule(
    nodes: int, arcs: Sequence[tuple[int, int]], pieces: int, transfers: Sequence[tuple[int, int, int, int, int, int]], *, steps: int, load: Fraction
) -> Verdict:
    """An all-gather as transfers (step, source, first piece, last piece + 1, sender, receiver), replayed.

    They go over links that there are, carry pieces that the sender had before the step, bring each to a node once, until everyone has all.
    """
    return Verdict(findings=tuple(guarded("values", lambda: _replayed(nodes, arcs, pieces, transfers, steps, load))))


def _replayed(
    nodes: int, arcs: Sequence[tuple[int, int]], pieces: int, transfers: Sequence[tuple[int, int, int, int, int, int]], steps: int, load: Fraction
) -> Iterator[Finding]:
    links = set(arcs)
    held = {(u, v): (1 << pieces) - 1 if u == v else 0 for u in range(nodes) for v in range(nodes)}
    total, last = 0, 0
    by_step: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
    for transfer in transfers:
        by_step.setdefault(transfer[0], []).append(transfer)
    for step in sorted(by_step):
        before, on = dict(held), Counter[tuple[int, int]]()
        for _, source, first, end, sender, receiver in by_step[step]:
            mask = (1 << end) - (1 << first)
            witness = {"step": step, "source": source, "sender": sender, "receiver": receiver}
            if (sender, receiver) not in links or not 0 <= first < end <= pieces:
                yield Finding(check="values", message="a transfer over no link, or of no pieces", witness=witness)
            elif before[sender, source] & mask != mask:
                yield Finding(check="values", message="a sender has not got what it sends", witness=witness)
            elif held[receiver, source] & mask:
                yield Finding(check="values", message="a piece arrives twice", witness=witness)
            else:
                held[receiver, source] |= mask
                on[sender, receiver] += end - first
        total, last = total + max(on.values(), default=0), step + 1
    lacking = next((key for key, mask in held.items() if mask != (1 << pieces) - 1), None)
    if lacking is not None:
        yield Finding(check="values", message="a node lacks a part of a shard", witness={"node": lacking[0], "source": lacking[1]})
    if (last, Fraction(total, pieces)) != (steps, load):
        said = f"{last} steps and a load of {Fraction(total, pieces)}, not {steps} and {load}"
        yield Finding(check="certificate", message=said, witness={"steps": last, "load": str(Fraction(total, pieces))})
