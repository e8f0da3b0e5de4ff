"""What all ranks of an expert layer agree on before a step: one all-reduce of a few numbers, the same on all afterwards.

It carries the largest demand and number of tokens, the slowest rank's time of the step before, and what must be equal everywhere. So no rank enters
an exchange that another does not: what is wrong at one rank is an error at all of them, in the same step.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import GroupFailed, NotFinite, RankDiverged

__all__ = ["Agreement", "Facts", "agree"]

NAMES = ("k", "capacity factor", "experts", "model dimension", "state of the search", "passes")


@dataclass(frozen=True)
class Facts:
    """Of one rank. finite: no score is NaN or infinite; time_s: of its step before, 0 for none; equal: what must be equal, in the order of NAMES;
    changed: this rank's weights are not those of its call before."""

    demand: int
    tokens: int
    finite: bool
    time_s: float
    equal: tuple[int, ...]
    changed: bool


@dataclass(frozen=True)
class Agreement:
    demand: int
    tokens: int
    time_s: float
    changed: bool


def number_of(value: float) -> int:
    """A float's bits as an integer, so that it can be compared exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0]) if value else 0


def agree(facts: Facts, group: Any, rank: int, ranks: int) -> Agreement:
    """The same on all ranks. Raises, on all: NotFinite naming the first rank with such scores, RankDiverged naming what differs; GroupFailed."""
    rows = [facts.demand, facts.tokens, 0 if facts.finite else ranks - rank, int(facts.time_s * 1e9), int(facts.changed)]
    for value in facts.equal:
        rows += [value, -1 - value]
    numbers = torch.tensor(rows, dtype=torch.int64)
    if ranks > 1:
        try:
            from torch.distributed import AllreduceOptions, ReduceOp

            most = AllreduceOptions()
            most.reduceOp = ReduceOp.MAX
            group.allreduce([numbers], most).wait()
        except RuntimeError as error:
            raise GroupFailed(
                f"rank {rank} lost the others before a step: {str(error)[:200]}", where="experts", data={"rank": rank, "error": str(error)[:300]},
            ) from error
    demand, tokens, broken, time_ns, changed, *equal = numbers.tolist()
    if broken:
        bad = ranks - broken
        raise NotFinite(
            f"scores of the router hold NaN or infinity at rank {bad}", where=f"rank {bad}", hint="look at that rank's inputs and learning rate",
            data={"rank": bad},
        )  # fmt: skip
    for name, high, low in zip(NAMES, equal[::2], equal[1::2], strict=True):
        if high != -1 - low:
            raise RankDiverged(
                f"ranks differ in {name}: between {-1 - low} and {high}", where="experts", hint="give all ranks the same arguments in every step",
                data={"what": name, "rank": rank},
            )  # fmt: skip
    return Agreement(demand, tokens, time_ns * 1e-9, bool(changed))
