"""Which additions the contract `tree` allows: two operands that are the two children of one node of the fold.

The fold is the complete binary tree over contributions 0 .. P-1, left to right, an odd last one moving up unchanged. Its nodes are the aligned blocks
[q 2^j, (q + 1) 2^j) cut off at P; a node of one child is that child. So the sum of a set of contributions is a node of the tree exactly when the set
is such a block, and it has two children: its first 2^(j-1) contributions, for the smallest such j, and the rest. Operands may stand in either order:
IEEE addition commutes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

__all__ = ["FoldTrees", "block_text"]


@dataclass
class FoldTrees:
    """The trees of several contracts, by their quantities (see `values`); what was refused, by step."""

    first: list[int] = field(default_factory=list)  # quantities, rising
    end: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    refused: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # step -> (set, set, leaves)
    known: dict[tuple[int, int, int], bool] = field(default_factory=dict)

    def hold(self, first: int, end: int, leaves: int) -> None:
        """Quantities [first, end) are folded over so many contributions; asked for in rising order."""
        self.first.append(first)
        self.end.append(end)
        self.leaves.append(leaves)

    def allow(self, quantity: int, a: int, b: int, step: int) -> bool:
        """May the sums over the sets `a` and `b` (bits) be added? A refusal is kept."""
        at = bisect_right(self.first, quantity) - 1
        if at < 0 or quantity >= self.end[at]:
            return True
        key = (a, b, self.leaves[at])
        if key not in self.known:
            self.known[key] = _children(*key)
        if not self.known[key]:
            self.refused.setdefault(step, key)
        return self.known[key]

    def why(self, step: int) -> tuple[str, dict[str, list[int]]]:
        """A refused addition in words, with the fold node that both operands lie under; empty where the step has none."""
        if step not in self.refused:
            return "", {}
        a, b, leaves = self.refused[step]
        low, high = _node(a | b, leaves)
        half = _half(low, high)
        text = f"adds {block_text(a)} and {block_text(b)}, which are not the two children of one fold node: [{low}, {high}) of {leaves}"
        text += f" is [{low}, {half}) + [{half}, {high})"
        return text, {"fold_node": [low, high], "operands": [a, b]}


def _node(both: int, leaves: int) -> tuple[int, int]:
    """The smallest node over a set."""
    low, high = (both & -both).bit_length() - 1, both.bit_length()
    size = 1
    while low // size != (high - 1) // size:
        size *= 2
    return low // size * size, min(leaves, low // size * size + size)


def _half(low: int, high: int) -> int:
    """Where the right child of a node begins."""
    size = 1
    while 2 * size < high - low:
        size *= 2
    return low + size if high - low > 1 else high


def _children(a: int, b: int, leaves: int) -> bool:
    low, high = _node(a | b, leaves)
    half = _half(low, high)
    left, right = (1 << half) - (1 << low), (1 << high) - (1 << half)
    return {a, b} == {left, right}


def block_text(mask: int) -> str:
    """A set of contributions: `[4, 8)`, or its numbers where it is no block."""
    low, high = (mask & -mask).bit_length() - 1, mask.bit_length()
    if mask == (1 << high) - (1 << low):
        return f"[{low}, {high})"
    numbers = [i for i in range(high) if mask >> i & 1]
    return "{" + ", ".join(map(str, numbers[:8])) + (", ...}" if len(numbers) > 8 else "}")
