"""Programs of an expert layer's steps: the exchanges that a choice needs, planned by the collective strategies, and the layer around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ...check import check_program
from ...decide.collective import CollectivePlan, CollectiveProblem, CollectiveStrategy
from ...decide.collective import strategy as collective_strategy
from ...decide.experts import Choice, Exchanges, ExpertShape, layer_program
from ...errors import Unsupported
from ...fabric.fabric import Fabric
from ...graph.graph import Work
from ...program.calls import Callee
from ...program.hash import program_hash
from ...program.program import Program

__all__ = ["ALGORITHMS", "LayerPrograms"]

# All-to-all of tokens, all-gather and reduce-scatter of weights, by the algorithm's name; others are names of collective strategies.
ALGORITHMS = {"linear": ("direct", "ring"), "2dh": ("hierarchical", "hierarchical")}
SAMPLE_BYTES = 1 << 20  # for which exchanges are planned: chunks follow the layer's sizes, the steps stay


class LayerPrograms:
    """Makes programs of one layer on one fabric, and keeps what they call. Raises, from all: Unsupported for algorithms that do not apply there."""

    def __init__(self, fabric: Fabric, ranks: Sequence[str], shape: ExpertShape) -> None:
        self.fabric, self.ranks, self.shape = fabric, tuple(ranks), shape
        self.callees: dict[str, Program] = {}
        self._planned: dict[tuple[str, tuple[int, ...], str], Callee] = {}

    def step(self, choice: Choice, capacity: int, *, backward: bool) -> tuple[Program, dict[str, Work]]:
        """(program with calls into `callees`, work of its ops) of a pass."""
        return layer_program(self.shape, choice, capacity, self.exchanges(choice), backward=backward)

    def require_sound(self, choice: Choice, capacity: int) -> None:
        """Both passes, proved. Raises: CheckFailed with a witness."""
        for backward in (False, True):
            check_program(self.step(choice, capacity, backward=backward)[0], programs=self.callees).raise_if_wrong()

    def exchanges(self, choice: Choice) -> Exchanges:
        shape, every = self.shape, tuple(range(self.shape.ranks))
        there, gathers = ALGORITHMS.get(choice.algorithm, (choice.algorithm, "ring"))
        if there == "hierarchical" and not self._in_servers(every):
            raise Unsupported(
                "two steps need several servers with several ranks each", where=choice.text, hint="use the algorithm linear",
                data={"servers": len({self._server(r) for r in every})},
            )  # fmt: skip
        slices, whole = every[: shape.group(choice.degree)], every[: shape.whole_group(choice.degree)]
        sliced, rest = shape.slice_elements > 0 and len(slices) > 1, shape.whole_slice_elements > 0 and len(whole) > 1

        def of(op: str, members: tuple[int, ...]) -> Callee:
            return self._exchange(op, members, gathers if gathers != "hierarchical" or self._in_servers(members) else "ring")

        return Exchanges(
            tokens=self._exchange("all-to-all", every, there) if choice.degree and len(every) > 1 else None, direct=there == "direct",
            gather=of("all-gather", slices) if sliced else None, scatter=of("reduce-scatter", slices) if sliced else None,
            whole_gather=of("all-gather", whole) if rest else None, whole_scatter=of("reduce-scatter", whole) if rest else None,
        )  # fmt: skip

    def _server(self, rank: int) -> str:
        return self.fabric.device(self.ranks[rank]).group

    def _in_servers(self, members: Sequence[int]) -> bool:
        """Do these lie in several servers, and several in one?"""
        servers = {self._server(r) for r in members}
        return 1 < len(servers) < len(members)

    def _exchange(self, op: str, members: tuple[int, ...], name: str) -> Callee:
        """Planned for the first of all groups of this size; the others are its images."""
        key = (op, members, name)
        if key not in self._planned:
            kind = collective_strategy(name, where="algorithm")
            size_bytes = 4 * len(members) * max(1, SAMPLE_BYTES // 4 // len(members))
            problem = CollectiveProblem(fabric=self.fabric, op=op, ranks=tuple(self.ranks[r] for r in members), size_bytes=size_bytes)
            made: CollectivePlan = _inlined(kind).plan(problem, rng=np.random.default_rng(0))
            label = program_hash(made.program)
            self.callees[label] = made.program
            self._planned[key] = Callee(label, made.program, len(members), ())
        return self._planned[key]


def _inlined(kind: type[CollectiveStrategy]) -> CollectiveStrategy:
    """The strategy's form for calls, in as few pieces as it has."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    options: dict[str, Any] = {name: value for name, value in (("unroll", True), ("pieces", 1)) if name in names}
    return kind(**options)
