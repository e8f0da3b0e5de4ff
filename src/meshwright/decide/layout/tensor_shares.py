"""How much of a split region each tensor-parallel rank gets: whole heads, columns, vocabulary rows.

Left open by the paper (Megatron-LM splits evenly and refuses the rest): degrees that do not divide, and devices of different speed. Our answer:
shares in whole units by largest remainder, proportional to speed, at least one unit each; key-value heads of grouped-query attention
are given out whole, or, when there are fewer than ranks, each to a run of neighbouring ranks that divide its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

__all__ = ["LEVEL", "TensorOptions", "choose_shares", "largest_remainder"]


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """What tensor parallelism may do.

    speeds: relative speed of each tensor-parallel rank, the same in every group; empty: equal.
    column_block: with unequal speeds, columns of linear layers and vocabulary rows are given out in multiples of this, where they are many.
    vocabulary: split embeddings, output heads and their cross-entropy over the vocabulary, where each rank gets `vocabulary_rows` of it.
    smoothing: what label smoothing means in a split cross-entropy, see `plan.VocabularyLoss`.
    sequence: split what lies between the regions along the sequence; None leaves it to the search (a single layout is then built without).
    """

    speeds: tuple[float, ...] = ()
    column_block: int = 64
    vocabulary: bool = True
    vocabulary_rows: int = 8
    smoothing: Literal["torch", "megatron"] = "torch"
    sequence: bool | None = None


LEVEL = TensorOptions()  # devices of one speed


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` units in whole parts proportional to `weights`, each at least 1. Needs total >= len(weights)."""
    whole = sum(weights)
    exact = [total * w / whole for w in weights]
    parts = [max(1, int(x)) for x in exact]
    while sum(parts) > total:  # those raised to 1 took too much: from whoever is furthest above its due
        parts[max(range(len(parts)), key=lambda i: (parts[i] > 1, parts[i] - exact[i]))] -= 1
    order = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def choose_shares(units: int, groups: Sequence[int], parts: int, options: TensorOptions = LEVEL) -> tuple[int, ...] | None:
    """Shares of `parts` ranks in a region of `units` indivisible units, or None if there are too few. () means equal shares.

    `groups`: numbers of key-value heads in the region, each a divisor of `units`.
    """
    speeds = options.speeds or (1.0,) * parts
    level = len(set(speeds)) == 1
    if level and units % parts == 0 and all(g % parts == 0 or parts % g == 0 for g in groups):
        return ()
    if units < parts:
        return None
    heads = max(groups, default=0)
    if any(heads % g for g in groups):
        return None
    if not heads:
        block = options.column_block
        grains = units // block if not level and units % block == 0 and units // block >= 4 * parts else units
        return _reduced(largest_remainder(grains, speeds))
    if heads >= parts:
        return _reduced(largest_remainder(heads, speeds)) if len(set(groups)) == 1 else None
    per_head, at, shares = units // heads, 0, list[int]()
    for ranks in largest_remainder(parts, [1.0] * heads):
        if per_head < ranks:
            return None
        shares += largest_remainder(per_head, speeds[at : at + ranks])
        at += ranks
    return tuple(shares)


def _reduced(shares: tuple[int, ...]) -> tuple[int, ...]:
    common = gcd(*shares)
    return tuple(s // common for s in shares)
