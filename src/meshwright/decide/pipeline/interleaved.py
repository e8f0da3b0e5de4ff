"""Interleaved 1F1B: several stages per device, micro-batches in groups; from depth-first to breadth-first in one number.

Cite: see CITE.
Left open by the paper: micro-batches that are no multiple of the devices. Our answer, after Llama 3 and Megatron's group size: groups of about
    `group` micro-batches, as even as possible and none smaller than the devices; group = devices is the paper's depth-first order, group =
    microbatches runs all of them through a stage before its next one, as breadth-first does.
Invariant: forwards in one order and backwards in one order on all devices; device d warms up with 2·(devices-1-d) + (chunks-1)·group
    forwards. With group = devices, equal stages and free messages: (N + (devices-1)/chunks)·(F + B), and device d keeps
    min(N·chunks, warm-up + 1) stage activations.
Cost: O(devices · chunks · microbatches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

import numpy as np

from ...cite import Cite
from ...errors import Unsupported, UsageError
from .orders import looped
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule, Traits

__all__ = ["CITE", "Interleaved", "group_sizes"]

CITE = Cite(
    key="narayanan2021megatron", title="Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", year=2021, venue="SC",
    authors="Narayanan et al.", url="https://arxiv.org/abs/2104.04473",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Interleaved(PipelineStrategy):
    """`chunks`: stages per device. `group`: micro-batches that run through a stage before its device's next one; 0: the devices."""

    name: ClassVar[str] = "interleaved"
    cite: ClassVar[Cite] = CITE
    told: ClassVar[tuple[str, ...]] = ("chunks",)

    chunks: int = 2
    group: int = 0

    @classmethod
    def variants(cls, problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> tuple[Self, ...]:
        d, n = problem.devices, problem.microbatches
        groups = [g for g in sorted({d, 2 * d, n}) if g == d or d < g <= n]
        return tuple(cls(chunks=v, group=g) for v in chunks for g in groups)

    @classmethod
    def applies(cls, problem: PipelineProblem) -> bool:
        return problem.microbatches >= problem.devices

    @property
    def traits(self) -> Traits:
        return Traits(stages_per_device=self.chunks)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        p, n, v = problem.devices, problem.microbatches, self.chunks
        if v < 2:
            raise UsageError(f"must be >= 2, got {v}", where="chunks", hint="with one stage per device use 1f1b")
        if not self.applies(problem):
            raise Unsupported(
                f"interleaved 1F1B needs at least as many micro-batches as devices: {n} < {p}", where="microbatches",
                hint=f"use {p} micro-batches or more, or breadth-first, 1f1b, chimera", data={"least": p},
            )  # fmt: skip
        sizes = group_sizes(n, self.group or p, p)
        forward, backward = _sequences(p, v, sizes)
        orders = []
        for d in range(p):
            mine = [Action("F", c * p + d, m) for c, m in forward]
            back = [Action("B", c * p + d, m) for c, m in backward]
            warm = min(len(mine), 2 * (p - 1 - d) + (v - 1) * max(sizes))
            order = mine[:warm]
            for f, b in zip(mine[warm:], back, strict=False):
                order += [f, b]
            orders.append(tuple(order + back[len(mine) - warm :]))
        return Schedule(
            name=self.name, devices=p, stages=p * v, placement=(looped(p, v),), copy_of=(0,) * n, orders=tuple(orders), options=asdict(self)
        )


def group_sizes(microbatches: int, group: int, devices: int) -> list[int]:
    """Sizes of the groups, as even as possible, none below `devices`. Raises: UsageError for a group that is smaller."""
    if group < devices:
        raise UsageError(f"a group of {group} micro-batches is smaller than the {devices} devices", where="group", hint=f"use {devices} or more")
    rounds = max(1, microbatches // group)
    return [microbatches // rounds + (i < microbatches % rounds) for i in range(rounds)]


def _sequences(devices: int, chunks: int, sizes: list[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(chunk, micro-batch) of the forwards and of the backwards, the same on every device."""
    forward, backward, first = [], [], 0
    for size in sizes:
        group = range(first, first + size)
        forward += [(c, m) for c in range(chunks) for m in group]
        backward += [(c, m) for c in reversed(range(chunks)) for m in group]
        first += size
    return forward, backward
