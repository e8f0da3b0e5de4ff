"""The layouts that came next, simulated again: by what they lose, and how wrong compute or link rates may be before one of them wins.

A rate that is `factor` times what was believed is simulated for the chosen layout and its rivals alike; the smallest departure from 1 at
which a rival is faster is found by bisection between 1 and a quarter or four times. A rival that wins, loses and wins again in
between is found once only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from ..cost import Cost, Priced
from ..drive.training.evaluated import Evaluated
from ..fabric.fabric import Fabric
from ..kernels.effort import Budget
from .numbers import seconds_text

__all__ = ["FACTOR_PRECISION", "Axis", "Crossing", "Rival", "Scenario", "crossings", "interval", "rivals_of", "scaled_compute", "scaled_links"]

Axis = Literal["compute", "links"]
MAX_RATE_FACTOR = 4.0  # rates are tried from a quarter to four times what was believed
FACTOR_PRECISION = 0.005  # relative, of the factor at which a rival wins
PHASE_WORDS = ("forward", "backward", "optimizer", "tensor-parallel", "gradient", "pipeline", "idle")


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    time_s: float
    ratio: float  # of its step time to the chosen one's
    fits: bool
    why: str


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """`rival` wins once the rates of `axis` are `factor` times what was believed."""

    axis: str
    factor: float
    rival: str


def scaled_compute(fabric: Fabric, cost: Cost, factor: float) -> tuple[Fabric, Cost]:
    """Devices `factor` times as fast: peaks, memory, launches and every price of the table."""
    devices = tuple(
        replace(
            d, flops={k: max(int(v * factor), 1) for k, v in d.flops.items()},
            memory_bandwidth_Bps=max(int(d.memory_bandwidth_Bps * factor), 1) if d.memory_bandwidth_Bps else 0,
        )
        for d in fabric.devices
    )  # fmt: skip
    table = {k: Priced(p.time_s / factor, p.evidence, p.cpu_s / factor) for k, p in cost.table.items()}
    changed = msgspec.structs.replace(
        cost, table=table, per_call_s=cost.per_call_s / factor, default_flops=cost.default_flops * factor,
        default_memory_Bps=cost.default_memory_Bps * factor,
    )  # fmt: skip
    return replace(fabric, devices=devices), changed


def scaled_links(fabric: Fabric, factor: float) -> Fabric:
    return replace(fabric, links=tuple(replace(x, rate_Bps=max(int(x.rate_Bps * factor), 1)) for x in fabric.links))


@dataclass
class Scenario:
    """Step times of judged layouts at other rates, each simulated once."""

    fabric: Fabric
    known: dict[tuple[object, str, float], float] = field(default_factory=dict)

    def time_s(self, e: Evaluated, axis: Axis, factor: float) -> float:
        key = (e.identity, axis, factor)
        if key not in self.known:
            assert e.cost is not None
            fabric, cost = scaled_compute(self.fabric, e.cost, factor) if axis == "compute" else (scaled_links(self.fabric, factor), e.cost)
            self.known[key] = e.steady.time_s(fabric, e.placement, cost, e.works)
        return self.known[key]


def crossings(scenario: Scenario, chosen: Evaluated, rivals: Sequence[Evaluated], budget: Budget) -> tuple[Crossing, ...]:
    """For each axis and direction the nearest factor at which a rival wins, if one does before a quarter or four times."""
    found: list[Crossing] = []
    axes: tuple[Axis, ...] = ("compute", "links")
    for axis in axes:
        for extreme in (1 / MAX_RATE_FACTOR, MAX_RATE_FACTOR):
            nearest: Crossing | None = None
            for rival in rivals:
                if budget.late or not budget.spend():
                    break
                factor = _crossing(lambda f, r=rival, a=axis: scenario.time_s(r, a, f) < scenario.time_s(chosen, a, f), extreme)  # type: ignore[misc]
                if factor is not None and (nearest is None or abs(math.log(factor)) < abs(math.log(nearest.factor))):
                    nearest = Crossing(axis=axis, factor=factor, rival=name_of(rival))
            if nearest is not None:
                found.append(nearest)
    return tuple(found)


def _crossing(wins: Callable[[float], bool], extreme: float) -> float | None:
    """The factor between 1 (the rival loses) and `extreme` where the rival starts to win; None if it never does."""
    if not wins(extreme):
        return None
    low, high = 0.0, math.log(extreme)
    while abs(high - low) > FACTOR_PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if wins(math.exp(middle)) else (middle, high)
    return math.exp(high)


def interval(scenario: Scenario, chosen: Evaluated, *, compute: float, links: float) -> tuple[float, float]:
    """Step times if compute and links are both faster, both slower, by their relative errors: the ends of the error bar."""
    assert chosen.cost is not None
    ends, steady = [], chosen.steady
    now = 1.0 if len(steady.programs) == 1 else chosen.time_s / steady.time_s(scenario.fabric, chosen.placement, chosen.cost, chosen.works)
    for sign in (1, -1):
        fabric, cost = scaled_compute(scenario.fabric, chosen.cost, 1 + sign * compute)
        fabric = scaled_links(fabric, 1 + sign * links)
        t = cost.transport
        scale = 1 / (1 + sign * links)
        transport = msgspec.structs.replace(
            t, per_message_s=t.per_message_s * scale, per_byte_s=t.per_byte_s * scale, per_step_s=t.per_step_s * scale
        )
        cost = msgspec.structs.replace(cost, transport=transport)
        ends.append(now * steady.time_s(fabric, chosen.placement, cost, chosen.works))
    return ends[0], ends[1]


def name_of(e: Evaluated) -> str:
    return ", ".join(x for x in (str(e.candidate.degrees), e.candidate.schedule, str(e.candidate.division), e.placement_name, str(e.policy)) if x)


def rivals_of(chosen: Evaluated, judged: Sequence[Evaluated], *, limit: int) -> tuple[list[Evaluated], tuple[Rival, ...]]:
    """The next `limit` layouts, those that fit first, with the phase that each loses most in."""
    others = [e for e in judged if e.timeline is not None and e.identity != chosen.identity]
    others.sort(key=lambda e: (e.excess_bytes > 0, e.time_s, name_of(e)))
    kept = others[:limit]
    mine = _means(chosen)
    found = []
    for e in kept:
        fits = e.excess_bytes <= 0
        why = _loses_in(_means(e), mine) if fits else f"needs {e.excess_bytes} bytes more than rank {e.worst_rank} has"
        found.append(Rival(what=name_of(e), time_s=e.time_s, ratio=e.time_s / chosen.time_s, fits=fits, why=why))
    return kept, tuple(found)


def _means(e: Evaluated) -> dict[str, float]:
    """Mean over ranks of the seconds in each phase."""
    assert e.fabric is not None and e.cost is not None
    return e.steady.mean_phases_s(e.fabric, e.placement, e.cost, e.works)


def _loses_in(theirs: dict[str, float], mine: dict[str, float]) -> str:
    worst = max(PHASE_WORDS, key=lambda name: theirs[name] - mine[name])
    more = theirs[worst] - mine[worst]
    if more <= 0:
        return "as fast in every phase"
    best = min(PHASE_WORDS, key=lambda name: theirs[name] - mine[name])
    text = f"{seconds_text(more)} more {worst}"
    less = mine[best] - theirs[best]
    return text + (f", {seconds_text(less)} less {best}" if less > 0 else "")
