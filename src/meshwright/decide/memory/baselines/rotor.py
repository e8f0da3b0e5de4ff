"""Rotor: the optimal schedule of a heterogeneous chain within a budget, by dynamic programming.

Source: J. Herrmann, O. Beaumont, L. Eyraud-Dubois, J. Hermann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", 2019, theorem 1. C(s, t, m) is the least time to run stages s..t forward and backward with m bytes,
the input of s stored beside them: either the input of some later stage is stored, the stages between run without keeping anything, and s.. runs again
later; or stage s runs keeping all that its backward needs.
Deviations: none in the recurrence; memory is cut into 500 slots, sizes rounded up. Its sizes leave out what does not belong to the chain (gradients
of parameters, results), so every m is tried and the plan is the fastest whose true peak fits. What a stage runs again but nobody reads is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite
from ....graph.step_graph import StepGraph, StepPlan
from ..lifetimes import Lifetimes, lifetimes_of
from ..problem import StepStrategy
from .chain import Chain, chain_of
from .choice import Schedule, chosen, measured

__all__ = ["CITE", "Rotor", "RotorTable", "rotor_table"]

CITE = Cite(
    key="rotor", title="Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory",
    authors="Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova", year=2019, venue="arXiv", url="https://arxiv.org/abs/1911.13214",
)  # fmt: skip
# Slots that the memory limit is divided into: cost grows with them linearly, and what rounding every size up to slots loses falls.
MEMORY_SLOTS = 500


@dataclass(frozen=True, kw_only=True)
class Rotor(StepStrategy):
    name: ClassVar[str] = "rotor"
    cite: ClassVar[Cite] = CITE
    in_frontier: ClassVar[bool] = True

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible with the least peak of its schedules."""
        lives, schedules = _schedules(graph)
        return chosen(lives, schedules, budget_bytes, strategy=self.name)


@dataclass(frozen=True, kw_only=True)
class RotorTable:
    """`cost[s][t][m]`: seconds with m slots of `slot_bytes`, inf where it does not fit; `split[s][t][m]`: t' > s, or s for keeping all of s."""

    cost: NDArray[np.float64]
    split: NDArray[np.int32]
    slot_bytes: int


def rotor_table(
    forward_s: list[float], backward_s: list[float], input_bytes: list[int], all_bytes: list[int], gradient_bytes: list[int],
    forward_extra: list[int], backward_extra: list[int], *, limit_bytes: int, slots: int = MEMORY_SLOTS,
) -> RotorTable:  # fmt: skip
    """`input_bytes[i]`: of the input of stage i (so of the output of stage i - 1), `all_bytes[i]`: of all that stage i keeps when it keeps all, its
    output included; `gradient_bytes[i]`: of the gradient of stage i's input, with one more entry at the end for that of the last output."""
    count = len(forward_s)
    slot = max(1, -(-limit_bytes // slots))
    a, every, delta, extra_f, extra_b = (np.array([-(-x // slot) for x in v], np.int64) for v in (
        input_bytes, all_bytes, gradient_bytes, forward_extra, backward_extra))  # fmt: skip
    m = np.arange(slots + 1)
    cost = np.full((count, count, slots + 1), np.inf)
    split = np.full((count, count, slots + 1), -1, np.int32)
    run = np.concatenate([[0.0], np.cumsum(forward_s)])
    for s in range(count - 1, -1, -1):
        passing = 0
        for t in range(s, count):
            out = delta[t + 1]
            if t > s:
                j = t - 1  # stages s..t-1 run without keeping: input and output of each, beside the gradient of t's output
                passing = max(passing, (a[j] if j > s else 0) + a[j + 1] + extra_f[j])
            # keeping all of s: its forward beside the gradient of the output, and its backward beside that of its input, must both fit
            whole = max(out + every[s] + extra_f[s], delta[s] + every[s] + extra_b[s])
            if t == s:
                cost[s, s, whole:] = forward_s[s] + backward_s[s]
                split[s, s, whole:] = s
                continue
            best = np.full(slots + 1, np.inf)
            where = np.full(slots + 1, -1, np.int32)
            for k in range(s + 1, t + 1):
                # run s..k-1 without keeping, store the input of k, do k..t with so much less memory, then s..k-1 with all of it again
                c = run[k] - run[s] + _less(cost[k, t], a[k]) + cost[s, k - 1]
                c[m < out + passing] = np.inf
                better = c < best
                best[better], where[better] = c[better], k
            c = forward_s[s] + backward_s[s] + _less(cost[s + 1, t], every[s])
            c[m < whole] = np.inf
            better = c <= best  # of equally fast ways keeping everything, which runs nothing again
            best[better], where[better] = c[better], s
            where[np.isinf(best)] = -1
            cost[s, t], split[s, t] = best, where
    return RotorTable(cost=cost, split=split, slot_bytes=slot)


def _less(row: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """row[m - slots] for every m."""
    found = np.full(len(row), np.inf)
    if slots < len(row):
        found[slots:] = row[: len(row) - slots]
    return found


@lru_cache(maxsize=8)
def _schedules(graph: StepGraph) -> tuple[Lifetimes, tuple[Schedule, ...]]:
    lives = lifetimes_of(graph)
    chain = chain_of(lives)
    return lives, measured(chain, tried(chain))


def table_of(chain: Chain) -> RotorTable:
    count = len(chain)
    inputs = [0, *chain.value_bytes[:-1]]
    gradients = [*chain.gradient_bytes, 0]
    most = sum(chain.all_bytes) + max(chain.backward_extra_bytes) + max(chain.forward_extra_bytes) + 2 * max(gradients) + 1
    most += 2 * most * (count + 4) // MEMORY_SLOTS  # every size is rounded up to slots
    # what a stage's forward takes beyond the values that the recurrence counts anyway
    extra = [max(0, x - max(chain.value_bytes[i], chain.all_bytes[i])) for i, x in enumerate(chain.forward_extra_bytes)]
    return rotor_table(
        list(chain.forward_s), list(chain.backward_s), inputs[:count], list(chain.all_bytes), gradients, extra, list(chain.backward_extra_bytes),
        limit_bytes=most,
    )  # fmt: skip


def tried(chain: Chain) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], dict[str, Any]]]:
    table = table_of(chain)
    ahead = chain.together()
    seen: set[bytes] = set()
    for m in range(MEMORY_SLOTS, -1, -1):
        # time never falls with fewer slots, so from the first m that does not fit on none does
        if np.isinf(table.cost[0, len(chain) - 1, m]):
            break
        held = chain.nothing_held()
        _follow(chain, table, held, 0, len(chain) - 1, m, 0)
        if held.tobytes() not in seen:
            seen.add(held.tobytes())
            yield held, ahead, {"slots": m, "slot_bytes": table.slot_bytes}


def _follow(chain: Chain, table: RotorTable, held: NDArray[np.int32], s: int, t: int, m: int, now: int) -> None:
    """Stages s..t from schedule stage `now` on, with m slots."""
    inputs, every = [0, *chain.value_bytes[:-1]], chain.all_bytes
    while True:
        k = int(table.split[s, t, m])
        if k == s:
            index = list(chain.needed[s])
            held[index] = np.minimum(held[index], now)
            if s == t:
                return
            s, m = s + 1, m - -(-every[s] // table.slot_bytes)
        else:
            index = list(chain.crossing[k])
            held[index] = np.minimum(held[index], now)
            _follow(chain, table, held, k, t, m - -(-inputs[k] // table.slot_bytes), now)
            t, now = k - 1, chain.first_backward[k - 1]
