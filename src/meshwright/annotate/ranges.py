"""Steps, stages and modules as slices that nest, to be drawn above the track that they were found on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .labels import Evidence, Stage
from .result import Annotation
from .stages import find_steps

__all__ = ["Range", "ranges"]


@dataclass(frozen=True)
class Range:
    """One slice to draw. `evidence`: the weakest of what is inside it. `estimated`: some work inside is shared by an estimate."""

    track: int
    start_ns: int
    end_ns: int
    name: str
    kind: str  # "step" | "stage" | "module" | "communication"
    module: int
    evidence: Evidence
    estimated: bool


def ranges(annotation: Annotation) -> list[Range]:
    """Per track, an outer slice before those inside it. Consecutive units with equal labels form one slice.

    Slices of a track nest: one that would reach into the next is cut there.
    """
    trace, units, labels = annotation.trace, annotation.units, annotation.labels
    rows = units.rows[units.outer[units.rows] < 0]
    rows = rows[np.lexsort((rows, trace.track[rows]))]
    if not len(rows):
        return []
    exchanging = units.communication[rows]
    labelled = (trace.track, labels.step, labels.stage, np.where(units.communication, -2, labels.module))
    keys = [np.asarray(column[rows], np.int64) for column in labelled]
    new = np.ones(len(rows), bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    first = np.flatnonzero(new)
    shared = np.isin(rows, list(labels.shares))
    ends = np.maximum.reduceat(trace.end_ns[rows], first)
    weakest = np.maximum.reduceat(np.where(exchanging, Evidence.EXACT, labels.evidence[rows]), first)
    estimated = np.logical_or.reduceat(shared, first)
    columns = [key[first].tolist() for key in keys]
    starts = trace.start_ns[rows[first]]
    runs: Iterator[tuple[Any, ...]] = zip(*columns, starts.tolist(), ends.tolist(), weakest.tolist(), estimated.tolist(), strict=True)
    maker = _Maker(annotation)
    for track, step, stage, module, start, end, evidence, estimate in runs:
        maker.add(track, [("step", step), ("stage", stage), *maker.chain(module)], start, end, evidence, estimate)
    maker.close(0, None)
    # Inner ones are done first; of equal ones the outer must come first.
    maker.made.reverse()
    return sorted(maker.made, key=lambda r: (r.track, r.start_ns, -r.end_ns))


class _Maker:
    """Slices that are open on the current track, and those that are done."""

    def __init__(self, annotation: Annotation) -> None:
        self.tree = annotation.tree
        self.numbers = find_steps(annotation.trace)[0]
        self.made: list[Range] = []
        self.open: list[list[int]] = []  # start, end, evidence, estimated of every level
        self.path: list[tuple[str, int]] = []
        self.track = -1
        self.chains: dict[int, list[tuple[str, int]]] = {-2: [("communication", -2)], -1: []}

    def chain(self, module: int) -> list[tuple[str, int]]:
        if module not in self.chains:
            inside = self.tree.ancestors(module)[::-1] if self.tree is not None else []
            self.chains[module] = [("module", m) for m in inside]
        return self.chains[module]

    def add(self, track: int, path: list[tuple[str, int]], start: int, end: int, evidence: int, estimate: bool) -> None:
        same = 0
        if track == self.track:
            while same < min(len(path), len(self.path)) and path[same] == self.path[same]:
                same += 1
            self.close(same, start)
        else:
            self.close(0, None)
            self.track = track
        for level in self.open:
            level[1], level[2], level[3] = max(level[1], end), max(level[2], evidence), max(level[3], int(estimate))
        for part in path[same:]:
            self.path.append(part)
            self.open.append([start, end, evidence, int(estimate)])

    def close(self, keep: int, limit: int | None) -> None:
        """End all but the `keep` outermost, at the latest where the next begins."""
        while len(self.open) > keep:
            start, end, evidence, estimated = self.open.pop()
            kind, number = self.path.pop()
            end = end if limit is None else max(start, min(end, limit))
            name = self._name(kind, number)
            module = number if kind == "module" else -1
            self.made.append(Range(self.track, start, end, name, kind, module, Evidence(evidence), bool(estimated)))

    def _name(self, kind: str, number: int) -> str:
        if kind == "step":
            return f"step {self.numbers[number] if 0 <= number < len(self.numbers) else number}"
        if kind == "stage":
            return Stage(number).title
        if kind == "communication" or self.tree is None:
            return "communication"
        module = self.tree.modules[number]
        return module.path or module.kind or "model"
