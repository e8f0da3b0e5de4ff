"""A step graph as a chain of stages, which is what Chen, Revolve and Rotor plan.

The forward pass is cut where all that is alive (fixed storages aside) is one storage: its articulation points. What lies between two cuts is a stage;
backward nodes belong to the last stage of which they, or any later one, still read something. A graph with long stages (skip connections) is cut
inside them too, where the fewest bytes are alive; then what crosses a cut is several storages, and one that crosses several cuts counts at each of
them, as in any chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....errors import Unsupported
from ....kernels.step_schedule import NEVER
from ..lifetimes import Lifetimes

__all__ = ["Chain", "chain_of"]

I32 = NDArray[np.int32]
# Share of the forward pass's time that one stage may hold before it is cut further, with `MIN_CUTS` stages; half of it with fewer.
MAX_STAGE_SHARE = 0.2
# Stages below which a chain is too coarse to choose checkpoints in, so that its longest stages are cut down further.
MIN_CUTS = 8
# Stages beyond which neighbours count as one: Rotor's table has an entry per pair of stages and slot of memory (128: 100 MB; 750: 3.4 GB), and
# its time grows with the cube.
MAX_STAGES = 128


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Stages 0..L-1. `crossing[i]`: storages that stage i takes from earlier ones (stage 0: none that could go). `inside[i]`: storages of stage i.

    `needed[i]`: storages that stage i makes and backward reads. `forward_s`, `backward_s`: seconds. `first_backward[i]`: stage of
    the schedule (1: the first backward node) in which backward of chain stage i begins; that of the last one is 1.
    `value_bytes[i]`: what stage i gives to the next; `all_bytes[i]`: all that it makes and backward reads, its value included; `gradient_bytes[i]`:
    gradients alive where backward of stage i ends, those of parameters aside; `forward_extra_bytes`, `backward_extra_bytes`: beyond operands and
    results.
    """

    lives: Lifetimes
    cuts: tuple[int, ...]  # first node of each stage
    crossing: tuple[tuple[int, ...], ...]
    inside: tuple[tuple[int, ...], ...]
    needed: tuple[tuple[int, ...], ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    first_backward: tuple[int, ...]
    value_bytes: tuple[int, ...]
    all_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    forward_extra_bytes: tuple[int, ...]
    backward_extra_bytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.cuts)

    def nothing_held(self) -> I32:
        """`hold_from` before anything is decided: what can go is there only in the stage that computes it."""
        held = np.full(len(self.lives.maker), NEVER, np.int32)
        held[~self.lives.movable] = 0
        return held

    def with_last_input(self, held: I32) -> tuple[I32, I32]:
        """(`hold_from`, `hold_to`): the input of the last stage, which forward just made, stays for that stage's backward, checkpoint or not."""
        held, to = held.copy(), self.lives.to_the_end()
        if len(self) > 1:
            passing = [s for s in self.crossing[-1] if held[s] > 0]
            held[passing] = 0
            to[passing] = self.first_backward[-2] - 1
        return held, to

    def together(self) -> I32:
        """`ahead`: what the whole backward of a chain stage reads is computed when it begins, as running a stage's forward under autograd does."""
        ahead = self.lives.lazy()
        starts = sorted({t for t in self.first_backward if t <= self.lives.stages})
        for t, after in zip(starts, [*starts[1:], self.lives.stages + 1], strict=True):
            ahead[t] = after - 1
        return ahead


def chain_of(lives: Lifetimes) -> Chain:
    graph, boundary = lives.graph, lives.arrays.boundary
    # A step without a result of its forward pass runs all of it for backward alone: the chain is what backward wants of it.
    wants = lives.arrays.forward_wanted if any(lives.arrays.forward_wanted[:boundary]) else lives.arrays.wanted
    calls = [i for i in range(boundary) if wants[i] and not lives.arrays.given[i]]
    if not calls:
        raise Unsupported("nothing of the forward pass is wanted, so there is no chain", where=graph.name, hint="use --strategy fusionaware")
    crossing = _crossing(lives, calls)
    cuts = _cuts(lives, calls, crossing)
    stage_of = np.searchsorted(np.array([calls[c] for c in cuts]), np.arange(boundary), side="right") - 1
    count = len(cuts)
    stage_of = np.maximum(stage_of, 0)
    home = {s: int(stage_of[m]) for s, m in enumerate(lives.maker) if 0 <= m < boundary}
    block = _blocks(lives, home, count)
    inside: list[list[int]] = [[] for _ in range(count)]
    for s, i in home.items():
        if lives.movable[s]:
            inside[i].append(s)
    needed: list[set[int]] = [set() for _ in range(count)]
    backward_s, forward_s = [0.0] * count, [0.0] * count
    for i in calls:
        forward_s[stage_of[i]] += graph.nodes[i].time_s
    for b in range(boundary, len(graph.nodes)):
        if lives.arrays.wanted[b]:
            i = block[b - boundary]
            backward_s[i] += graph.nodes[b].time_s
            for x in graph.nodes[b].inputs:
                for s in graph.nodes[x].storages:
                    if lives.movable[s] and s in home:
                        needed[home[s]].add(s)
    size = lives.arrays.size
    crosses = [tuple(s for s in crossing[c] if lives.movable[s]) for c in cuts]
    value = [int(size[list(crosses[i + 1])].sum()) if i + 1 < count else 0 for i in range(count)]
    every = [int(size[sorted(needed[i] | {s for s in (crosses[i + 1] if i + 1 < count else ()) if home[s] == i})].sum()) for i in range(count)]
    gradient, extra_f, extra_b = _extras(lives, calls, stage_of, block, count)
    return Chain(
        lives=lives, cuts=tuple(calls[c] for c in cuts), crossing=tuple(crosses), inside=tuple(map(tuple, inside)),
        needed=tuple(tuple(sorted(n)) for n in needed), forward_s=tuple(forward_s), backward_s=tuple(backward_s),
        first_backward=tuple(_first(block, i, lives.stages) for i in range(count)), value_bytes=tuple(value), all_bytes=tuple(every),
        gradient_bytes=tuple(gradient), forward_extra_bytes=tuple(extra_f), backward_extra_bytes=tuple(extra_b),
    )  # fmt: skip


def _crossing(lives: Lifetimes, calls: list[int]) -> list[tuple[int, ...]]:
    """Storages made before call c and read by it or a later forward call, for every c."""
    graph = lives.graph
    first, last = dict[int, int](), dict[int, int]()
    for c, i in enumerate(calls):
        for s in graph.nodes[i].makes:
            first[s] = c
        for x in graph.nodes[i].inputs:
            last |= {s: c for s in graph.nodes[x].storages if s in first}
    start: list[list[int]] = [[] for _ in range(len(calls) + 1)]
    end: list[list[int]] = [[] for _ in range(len(calls) + 1)]
    for s, c in last.items():
        start[first[s] + 1].append(s)
        end[c + 1].append(s)
    alive: set[int] = set()
    found = []
    for c in range(len(calls)):
        alive.update(start[c])
        alive.difference_update(end[c])
        found.append(tuple(sorted(alive)))
    return found


def _cuts(lives: Lifetimes, calls: list[int], crossing: list[tuple[int, ...]]) -> list[int]:
    """Where stages begin (positions in `calls`): articulation points that are not views only, then the cheapest places in long stages."""
    makes = [bool(lives.graph.nodes[i].makes) for i in calls]
    cuts = [0]
    for c in range(1, len(calls)):
        # one storage crosses here, another than at the cut before, and something is made between: views alone are no stage
        if len(crossing[c]) == 1 and makes[c] and any(makes[cuts[-1] : c]) and crossing[c] != crossing[cuts[-1]]:
            cuts.append(c)
    spent = np.concatenate([[0.0], np.cumsum([lives.graph.nodes[i].time_s or 1e-9 for i in calls])])
    size = lives.arrays.size
    weight = [int(size[list(x)].sum()) for x in crossing]
    cuts = _fewer(cuts, spent, weight)
    while True:
        longest = max(range(len(cuts)), key=lambda k: spent[cuts[k + 1] if k + 1 < len(cuts) else len(calls)] - spent[cuts[k]])
        low, high = cuts[longest], cuts[longest + 1] if longest + 1 < len(cuts) else len(calls)
        share = (spent[high] - spent[low]) / spent[-1]
        if share <= (MAX_STAGE_SHARE if len(cuts) >= MIN_CUTS else MAX_STAGE_SHARE / 2):
            return cuts
        where = (spent[low : high + 1] - spent[low]) / spent[-1]
        # not near either end, else the stage would stay about as long; fewest bytes across, then nearest to the middle
        inner = [c for c in range(low + 1, high) if makes[c] and any(makes[low:c]) and 0.2 * share <= where[c - low] <= 0.8 * share]
        if not inner:
            return cuts
        cuts = sorted([*cuts, min(inner, key=lambda c: (weight[c], abs(2 * spent[c] - spent[low] - spent[high])))])


def _fewer(cuts: list[int], spent: NDArray[np.float64], weight: list[int]) -> list[int]:
    """At most `MAX_STAGES` of the cuts: in each equal part of the time the one that the fewest bytes cross, the first among equals."""
    if len(cuts) <= MAX_STAGES:
        return cuts
    best: dict[int, int] = {}
    for c in cuts[1:]:
        part = int((MAX_STAGES - 1) * spent[c] / spent[-1] * (1 - 1e-12))
        if part not in best or weight[c] < weight[best[part]]:
            best[part] = c
    return [cuts[0], *best.values()]


def _blocks(lives: Lifetimes, home: dict[int, int], count: int) -> list[int]:
    """Chain stage of every backward node; never rises along backward."""
    graph = lives.graph
    block = [0] * lives.stages
    top = 0
    for b in range(len(graph.nodes) - 1, lives.arrays.boundary - 1, -1):
        read = [home[s] for x in graph.nodes[b].inputs for s in graph.nodes[x].storages if s in home]
        top = max([top, *read])  # backward goes down the chain: a node belongs to the latest stage that it or a node after it reads
        block[b - lives.arrays.boundary] = top
    return block if not block or block[0] == count - 1 else [count - 1, *block[1:]]


def _first(block: list[int], i: int, stages: int) -> int:
    """First schedule stage whose backward node belongs to chain stage i or an earlier one."""
    return next((t + 1 for t, x in enumerate(block) if x <= i), stages + 1)


def _extras(
    lives: Lifetimes, calls: list[int], stage_of: NDArray[np.int64], block: list[int], count: int
) -> tuple[list[int], list[int], list[int]]:
    """From the schedule that keeps all: gradients alive at the end of every stage's backward, and what forward and backward take beyond."""
    graph, size = lives.graph, lives.arrays.size
    boundary = lives.arrays.boundary
    last = dict[int, int]()
    for b in range(boundary, len(graph.nodes)):
        for x in graph.nodes[b].inputs:
            last |= dict.fromkeys(graph.nodes[x].storages, b)
    gradient, extra_f, extra_b = [0] * count, [0] * count, [0] * count
    alive: dict[int, int] = {}
    held = {s for r in graph.results for s in graph.nodes[r].storages}
    for b in range(boundary, len(graph.nodes)):
        i = block[b - boundary]
        alive |= {s: int(size[s]) for s in graph.nodes[b].makes if s not in held}
        extra_b[i] = max(extra_b[i], sum(alive.values()) + graph.nodes[b].workspace_bytes)
        alive = {s: n for s, n in alive.items() if last.get(s, b) > b}
        gradient[i] = sum(alive.values())
    for i, v in enumerate(_forward_extras(lives, calls, stage_of, count)):
        extra_f[i] = v
    return gradient, extra_f, [max(0, x - g) for x, g in zip(extra_b, gradient, strict=True)]


def _forward_extras(lives: Lifetimes, calls: list[int], stage_of: NDArray[np.int64], count: int) -> list[int]:
    graph, size = lives.graph, lives.arrays.size
    last = dict[int, int]()
    for c in calls:
        for x in graph.nodes[c].inputs:
            last |= dict.fromkeys(graph.nodes[x].storages, c)
    most = [0] * count
    alive: dict[int, int] = {}
    stage = 0
    for c in calls:
        if stage_of[c] != stage:
            stage, alive = int(stage_of[c]), {}
        alive |= {s: int(size[s]) for s in graph.nodes[c].makes}
        most[stage] = max(most[stage], sum(alive.values()) + graph.nodes[c].workspace_bytes)
        alive = {s: n for s, n in alive.items() if last.get(s, c) > c}
    return most
