"""Measured rates made alike where they are meant to be alike, for planners.

Links of one kind never measure exactly alike. A tree packing would use even a difference of one part in a thousand, with many more trees, and an
executor would send many more and smaller messages. So rates that differ by less than a measurement does are given one value,
and values that are near simple multiples of the slowest become those. Predictions and bounds keep the rates as they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from statistics import median_low

from ...fabric.fabric import Fabric

__all__ = ["MAX_RATE_DIFFERENCE_SHARE", "merge_near_rates"]

MAX_RATE_DIFFERENCE_SHARE = 0.015  # up to which two rates are one: half of the 3 % by which the lab lets a link miss its rate
MAX_RATIO_DENOMINATOR = 4  # rates near a multiple of the slowest, or of its half, third or quarter, become that multiple


def merge_near_rates(fabric: Fabric) -> Fabric:
    """The fabric with rates within MAX_RATE_DIFFERENCE_SHARE of each other made equal; no rate changes by more than 2 MAX_RATE_DIFFERENCE_SHARE."""
    rates = sorted({x.rate_Bps for x in fabric.links})
    groups = _groups(rates)
    typical = [median_low(group) for group in groups]
    value: dict[int, int] = {}
    for group, one in zip(groups, typical, strict=True):
        ratio = Fraction(one, typical[0]).limit_denominator(MAX_RATIO_DENOMINATOR)
        near = int(typical[0] * ratio)
        chosen = near if abs(near - one) <= MAX_RATE_DIFFERENCE_SHARE * one else one
        value.update(dict.fromkeys(group, chosen))
    if all(value[rate] == rate for rate in rates):
        return fabric
    return replace(fabric, links=tuple(replace(x, rate_Bps=value[x.rate_Bps]) for x in fabric.links))


def _groups(rates: Sequence[int]) -> list[list[int]]:
    """Runs of ascending rates whose ends differ by at most MAX_RATE_DIFFERENCE_SHARE."""
    groups = [[rates[0]]] if rates else []
    for _, rate in pairwise(rates):
        if rate <= groups[-1][0] * (1 + MAX_RATE_DIFFERENCE_SHARE):
            groups[-1].append(rate)
        else:
            groups.append([rate])
    return groups
