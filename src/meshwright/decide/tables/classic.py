"""The classic rules: tables, the largest by some measure first, each to the device that has least of it so far and room.

Cite: as in NeuroShard (MLSys 2023, section 4) and AutoShard (KDD 2022), which compare with them.
Deviations: measures are of pieces, so a table that fits no device is halved first. Invariant: memory limits hold. Cost: O(n · D).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cite import FOLKLORE, Cite
from ...errors import Infeasible
from .problem import F64, Piece, TablePlan, TableProblem, TableStrategy, fitting

__all__ = ["CLASSIC", "DimGreedy", "LookupGreedy", "RandomTables", "SizeGreedy", "SizeLookupGreedy"]


class _Rule(TableStrategy):
    cite: ClassVar[Cite] = FOLKLORE

    @abstractmethod
    def measure(self, problem: TableProblem, pieces: list[Piece]) -> F64: ...

    def place(self, problem: TableProblem, *, rng: np.random.Generator) -> tuple[list[Piece], list[int]]:
        """Raises: Infeasible naming the first piece without room."""
        pieces = fitting(problem)
        size, measure = problem.bytes_of(pieces), self.measure(problem, pieces)
        on, load, held = [-1] * len(pieces), np.zeros(problem.devices), np.zeros(problem.devices)
        for i in np.argsort(-measure, kind="stable").tolist():
            free = np.flatnonzero(held + size[i] <= problem.memory)
            if not len(free):
                name, lacks = problem.tables.tables[pieces[i].table].name, float(size[i] - (problem.memory - held).max())
                raise Infeasible(
                    f"{self.name} finds no device with room for {size[i]:.0f} bytes of table {name}", where=f"table {name}",
                    hint=f"{lacks:.0f} bytes more on one device, or --strategy size-greedy or neuroshard", data={"lacking_bytes": lacks},
                )  # fmt: skip
            on[i] = int(free[load[free].argmin()])
            load[on[i]] += measure[i]
            held[on[i]] += size[i]
        return pieces, on

    def plan(self, problem: TableProblem, *, rng: np.random.Generator) -> TablePlan:
        """Raises: Infeasible."""
        return problem.judged(self, *self.place(problem, rng=rng), evaluations=1)


def _widths(pieces: list[Piece]) -> F64:
    return np.array([p.kind[2] for p in pieces], np.float64)


def _lookups(problem: TableProblem, pieces: list[Piece]) -> F64:
    tables = problem.tables.tables
    return np.array([tables[p.table].pooling * p.kind[1] / tables[p.table].rows for p in pieces])


@dataclass(frozen=True, kw_only=True)
class DimGreedy(_Rule):
    """By columns. No options."""

    name: ClassVar[str] = "dim-greedy"

    def measure(self, problem: TableProblem, pieces: list[Piece]) -> F64:
        return _widths(pieces)


@dataclass(frozen=True, kw_only=True)
class SizeGreedy(_Rule):
    """By bytes. No options."""

    name: ClassVar[str] = "size-greedy"

    def measure(self, problem: TableProblem, pieces: list[Piece]) -> F64:
        return problem.bytes_of(pieces)


@dataclass(frozen=True, kw_only=True)
class LookupGreedy(_Rule):
    """By columns times lookups. No options."""

    name: ClassVar[str] = "lookup-greedy"

    def measure(self, problem: TableProblem, pieces: list[Piece]) -> F64:
        return _widths(pieces) * _lookups(problem, pieces)


@dataclass(frozen=True, kw_only=True)
class SizeLookupGreedy(_Rule):
    """By columns times lookups times the logarithm of bytes. No options."""

    name: ClassVar[str] = "size-lookup-greedy"

    def measure(self, problem: TableProblem, pieces: list[Piece]) -> F64:
        return np.log10(1 + problem.bytes_of(pieces)) * _widths(pieces) * _lookups(problem, pieces)


@dataclass(frozen=True, kw_only=True)
class RandomTables(_Rule):
    """Any device with room, tables in any order. No options."""

    name: ClassVar[str] = "random"

    def measure(self, problem: TableProblem, pieces: list[Piece]) -> F64:
        return np.ones(len(pieces))

    def place(self, problem: TableProblem, *, rng: np.random.Generator) -> tuple[list[Piece], list[int]]:
        pieces = fitting(problem)
        size, held, on = problem.bytes_of(pieces), np.zeros(problem.devices), [-1] * len(pieces)
        for i in np.argsort(-size, kind="stable").tolist():  # the largest first, or they find no room
            free = np.flatnonzero(held + size[i] <= problem.memory)
            if not len(free):
                need = float(size[i])
                raise Infeasible("a random plan finds no room", where=problem.fabric.name, hint="--strategy size-greedy", data={"needed_bytes": need})
            on[i] = int(rng.choice(free))
            held[on[i]] += size[i]
        return pieces, on


CLASSIC: tuple[type[_Rule], ...] = (DimGreedy, SizeGreedy, LookupGreedy, SizeLookupGreedy)
