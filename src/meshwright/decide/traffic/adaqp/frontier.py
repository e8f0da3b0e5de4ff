"""How little variance a message, and a round of messages, can have within a time: exact, without a solver.

With rows sorted by weight in groups of equal size, an optimal assignment gives more bits to heavier groups (exchange argument), so only counts of
groups matter. Taking one group from 2 to 4 bits costs as many bytes as a unit, from 2 to 8 three of them. For a number of units m the variance is
convex in the number of groups at 8 bits, which a search by halves finds, for all m at once. A shorter last group has the least weight; its three
widths are tried apart.
Cost: O(G log G) of a channel with G groups; a round is sorted and looked up, O(W G log G).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....codec.rows import PARAMETER_BYTES, WIDTHS, noise_factor
from .problem import F64, I64, Channel

__all__ = ["ChannelFrontier", "RoundFrontier", "channel_frontier", "round_frontier"]

N2, N4, N8 = (noise_factor(b) for b in WIDTHS)


@dataclass(frozen=True, eq=False)
class ChannelFrontier:
    """Points by rising `time_s` and falling `variance`. `eight`, `four`: groups at these widths, heaviest first; `last`: bits of the shorter last
    group.
    `order` [rows]: rows by falling weight; `group`: rows in a group."""

    time_s: F64
    variance: F64
    eight: I64
    four: I64
    last: I64
    order: I64
    group: int

    def at_most(self, time_s: Any) -> Any:
        """The best point within each time, -1 for none."""
        return np.searchsorted(self.time_s, time_s, side="right") - 1

    def widths(self, point: int) -> I64:
        """Bits of each row, in the order in which rows are sent."""
        rows = len(self.order)
        whole = rows // self.group * self.group
        sorted_bits = np.full(rows, 2, np.int64)
        sorted_bits[: int(self.eight[point] + self.four[point]) * self.group] = 4
        sorted_bits[: int(self.eight[point]) * self.group] = 8
        sorted_bits[whole:] = self.last[point]
        found = np.empty(rows, np.int64)
        found[self.order] = sorted_bits
        return found


def channel_frontier(c: Channel, dim: int, *, group: int, latency_s: float, per_byte_s: float) -> ChannelFrontier:
    """All that a channel can do with groups of `group` rows."""
    rows = len(c.weight)
    group = max(1, min(group, rows))
    order = np.argsort(-c.weight, kind="stable")
    heavy = c.weight[order]
    whole = rows // group
    sums = np.concatenate([[0.0], np.cumsum(heavy[: whole * group].reshape(whole, group).sum(1))])
    rest, rest_weight = rows - whole * group, float(heavy[whole * group :].sum())
    units = np.delete(np.arange(3 * whole + 1), 3 * whole - 1)  # one unit less than all at 8 bits cannot be
    eight = _most_eights(sums, units)
    four = units - 3 * eight
    noise = N8 * sums[eight] + N4 * (sums[eight + four] - sums[eight]) + N2 * (sums[whole] - sums[eight + four])
    unit_bytes = group * dim / 4
    base = (whole * unit_bytes) + PARAMETER_BYTES * rows
    widths = WIDTHS if rest else WIDTHS[:1]
    size = np.concatenate([base + units * unit_bytes + rest * dim * b / 8 for b in widths])
    variance = np.concatenate([noise + noise_factor(b) * rest_weight for b in widths])
    last = np.repeat(np.array(widths, np.int64), len(units))
    time_s = latency_s + per_byte_s * size
    by = np.lexsort((variance, time_s))
    by = by[_falling(variance[by])]
    which = by % len(units)
    return ChannelFrontier(time_s[by], variance[by], eight[which], four[which], last[by], order, group)


def _most_eights(sums: F64, units: I64) -> I64:
    """For each number of units, how many groups at 8 bits leave least variance: where the convex function stops falling."""
    groups = len(sums) - 1
    low, high = np.maximum(0, -((groups - units) // 2)), units // 3
    while (low < high).any():
        middle = (low + high) // 2
        # Another group at 8 bits instead of three units at 4: what is gained there against what is lost at the end of the 4s.
        top = np.clip(units - 2 * middle, 0, groups)
        under = np.clip(top - 2, 0, groups)
        step = (N8 - N4) * (sums[np.minimum(middle + 1, groups)] - sums[middle]) - (N4 - N2) * (sums[top] - sums[under])
        falls = (step < 0) & (low < high)
        low = np.where(falls, np.minimum(middle + 1, high), low)
        high = np.where(falls, high, np.maximum(middle, low))
    return low


def _falling(values: F64) -> NDArray[np.bool_]:
    """Where each value is below all before it."""
    keep = np.ones(len(values), bool)
    keep[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return keep


@dataclass(frozen=True, eq=False)
class RoundFrontier:
    """A round's points by rising `time_s` and falling `variance`, and its channels' frontiers."""

    exchange: str
    channels: tuple[Channel, ...]
    parts: tuple[ChannelFrontier, ...]
    time_s: F64
    variance: F64

    def widths(self, point: int) -> dict[tuple[str, int, int], I64]:
        limit = float(self.time_s[point])
        return {(self.exchange, c.src, c.dst): p.widths(int(p.at_most(limit))) for c, p in zip(self.channels, self.parts, strict=True)}


def round_frontier(exchange: str, channels: Sequence[Channel], parts: Sequence[ChannelFrontier]) -> RoundFrontier:
    """The only tie between a round's channels is its time: given that, each is at its best within it."""
    times = np.unique(np.concatenate([p.time_s for p in parts]))
    times = times[times >= max(p.time_s[0] for p in parts)]
    variance = np.zeros(len(times))
    for p in parts:
        variance += p.variance[p.at_most(times)]
    keep = _falling(variance)
    return RoundFrontier(exchange, tuple(channels), tuple(parts), times[keep], variance[keep])
