"""Schedules of steps that repeat themselves: storages alike, one of every time step or layer, are held alike, so that few changes decide for all.

Storages are alike when the nodes around them are: what makes them, what that reads and who reads it, two nodes far. Of such a class all, halves,
quarters and so on, in the order in which they are made, are changed together: kept from forward, computed again where backward begins with them
(`home`), or computed again at their first use in backward. Above the budget the change with the least time per byte-run above it goes first; within
it, what saves most time. So a graph of any length takes as many looks as one of a few steps.
Source: the labels are those of B. Weisfeiler, A. Leman, "The reduction of a graph to canonical form", 1968, stopped after two rounds.
Cost: one evaluation per class, part and way of holding in each look; `effort` runs of nodes altogether.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....kernels.step_schedule import IMPOSSIBLE
from ..lifetimes import Lifetimes

__all__ = ["alike", "homes", "searched_alike"]

I32 = NDArray[np.int32]
# Rounds of labels: nodes further away than this do not tell storages apart. With more, the first and last steps of a chain are classes of their own.
MAX_LABEL_ROUNDS = 2
# Storages in a class at least: fewer are what single changes are for.
MIN_ALIKE = 4
# Times a class is halved for parts of it that change alone: 16 parts at most.
MAX_HALVINGS = 4
# Changes made one after the other from one look, at most.
MAX_CHANGES_PER_LOOK = 12
# Uses of a storage in backward that are no further apart than this many repetitions belong together.
MAX_REPETITIONS_APART = 2


def alike(lives: Lifetimes) -> list[I32]:
    """Classes of movable storages, each in the order in which they are made, the largest first."""
    nodes, storages = lives.graph.nodes, lives.graph.storages
    label = [hash((n.phase, n.target, tuple(storages[s].size_bytes for s in n.makes), len(n.inputs))) for n in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, n in enumerate(nodes):
        for x in n.inputs:
            readers[x].append(i)
    number = _numbered(label)
    for _ in range(MAX_LABEL_ROUNDS):
        around = (((number[x] for x in n.inputs), sorted(number[r] for r in readers[i])) for i, n in enumerate(nodes))
        number = _numbered([(own, *map(tuple, beside)) for own, beside in zip(number, around, strict=True)])
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, n in enumerate(nodes):
        for k, s in enumerate(n.makes):
            if lives.movable[s]:
                found[number[i], k].append(s)
    return sorted((np.array(c, np.int32) for c in found.values() if len(c) >= MIN_ALIKE), key=lambda c: (-len(c), int(c[0])))


def _numbered(labels: Sequence[object]) -> list[int]:
    """Equal labels as equal numbers, by first appearance: the same in every process."""
    known: dict[object, int] = {}
    return [known.setdefault(x, len(known)) for x in labels]


def homes(lives: Lifetimes, apart: int) -> I32:
    """Of every storage the stage in which the last of its uses in backward begin that are at most `apart` stages from one another.

    Uses are those by backward nodes, and by what runs again for them when nothing is kept and everything is held from its own home.
    """
    graph, arrays = lives.graph, lives.arrays
    uses: list[list[int]] = [[] for _ in lives.maker]
    for b in range(arrays.boundary, len(graph.nodes)):
        if arrays.wanted[b]:
            for x in graph.nodes[b].inputs:
                for s in graph.nodes[x].storages:
                    uses[s].append(b - arrays.boundary + 1)
    home = np.ones(len(lives.maker), np.int32)
    for i in range(arrays.boundary - 1, -1, -1):
        runs = set[int]()
        for s in graph.nodes[i].makes:
            if lives.movable[s] and uses[s]:
                stages = sorted({*uses[s]})
                at = len(stages) - 1
                while at and stages[at] - stages[at - 1] <= apart:
                    at -= 1
                home[s] = stages[at]
                runs.update(stages[: at + 1])
        for x in graph.nodes[i].inputs if runs else ():
            for s in graph.nodes[x].storages:
                uses[s] += runs
    return home


@dataclass
class _Search:
    """`spent`: runs of nodes so far. `moves`: (members, mode); a mode's value per storage is `values[mode]`."""

    lives: Lifetimes
    budget_bytes: int
    effort: int
    moves: list[tuple[I32, int]]
    values: NDArray[np.int32]
    spent: int = 0

    def measured(self, hold: I32) -> tuple[float, float]:
        """(byte-runs above the budget, seconds)."""
        peak, seconds = self.lives.measure(hold)
        w = self.lives.scratch
        count = int(w.counts[0])
        self.spent += count + 1
        if peak == IMPOSSIBLE:
            return float("inf"), float("inf")
        live = w.live[:count]
        return (float((live[live > self.budget_bytes] - self.budget_bytes).sum()) if peak > self.budget_bytes else 0.0), seconds

    def better(self, hold: I32) -> tuple[I32, float, float]:
        """`hold` after looks that each take the best changes, until none helps or the effort is spent."""
        above, seconds = self.measured(hold)
        while self.spent < self.effort:
            changed = False
            for _, (members, mode) in self._worthwhile(hold, above, seconds)[:MAX_CHANGES_PER_LOOK]:
                trial = self._with(hold, members, mode)
                a, s = self.measured(trial)
                if (a < above) if above else (not a and s < seconds):
                    hold, above, seconds, changed = trial, a, s, True
            if not changed:
                break
        return hold, above, seconds

    def _worthwhile(self, hold: I32, above: float, seconds: float) -> list[tuple[float, tuple[I32, int]]]:
        """Changes that help, the best first: seconds per byte-run that is no longer above the budget, or seconds saved."""
        found: list[tuple[float, tuple[I32, int]]] = []
        for members, mode in self.moves:
            if self.spent >= self.effort:
                break
            if np.array_equal(hold[members], self.values[mode][members]):
                continue
            a, s = self.measured(self._with(hold, members, mode))
            if above and a < above:
                found.append(((s - seconds) / (above - a), (members, mode)))
            elif not above and not a and s < seconds:
                found.append((s - seconds, (members, mode)))
        return sorted(found, key=lambda x: x[0])

    def _with(self, hold: I32, members: I32, mode: int) -> I32:
        trial = hold.copy()
        trial[members] = self.values[mode][members]
        return trial


def _parts(members: I32, halvings: int) -> Iterator[I32]:
    for k in range(halvings + 1):
        if len(members) >= 1 << k:
            yield from np.array_split(members, 1 << k)


def searched_alike(lives: Lifetimes, seeds: Sequence[I32], budget_bytes: int, effort: int) -> tuple[list[I32], int]:
    """(schedules (`hold_from`) within the budget, or near it: the best of the seeds, changed class by class, none where nothing repeats itself; runs
    of nodes that this took)."""
    classes = alike(lives)
    if not classes:
        return [], 0
    home = homes(lives, MAX_REPETITIONS_APART * lives.stages // len(classes[0]))
    count = len(lives.maker)
    values = np.stack([np.zeros(count, np.int32), home, np.ones(count, np.int32)])
    search = _Search(lives, budget_bytes, effort, [], values)
    local = np.where(lives.movable, home, 0).astype(np.int32)
    starts = [*seeds, local, *(np.where(seed > 0, np.where(lives.movable, home, seed), 0).astype(np.int32) for seed in seeds)]
    told = [(search.measured(h), h) for h in starts if search.spent < effort // 4]
    inside = [(m, h) for m, h in told if m[0] == 0]
    # from what is within the budget, and from the seed that is fastest, on the way down
    begin = [min(inside, key=lambda x: x[0][1])[1]] if inside else []
    begin.append(min((x for x in told if np.isfinite(x[0][1])), key=lambda x: (x[0][1], x[0][0]))[1])
    found = []
    for k, hold in enumerate(begin):
        search.effort = search.spent + (effort - search.spent) // (len(begin) - k)
        for halvings in range(0, MAX_HALVINGS + 1, 2):
            search.moves = [(part, mode) for c in classes for part in _parts(c, halvings) for mode in range(len(values))]
            hold, _, _ = search.better(hold)
        found.append(hold)
    return found, search.spent
