"""Operators of a trace aligned with the operators that one forward pass of the module ran (`ModuleTree.operators`).

Each stretch of forward work is aligned once per distinct sequence of names: steps repeat. A true longest common subsequence, because one
operator too many must not shift the rest. What lies between two aligned operators belongs to the innermost module around both.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..trace.module_tree import ModuleTree
from ..trace.trace import I32

__all__ = ["Aligned", "CapturedSequence", "between", "owners_of"]

MIN_ALIGNED_SHARE = 0.5  # of the shorter sequence that must be found for the alignment to count as one of the same model


class Aligned(msgspec.Struct, frozen=True, kw_only=True):
    """Per operator of a stretch: `operator` of the captured sequence or -1; `module`, also of what lies between; the matched range."""

    operator: I32
    module: I32
    first: int
    last: int


class CapturedSequence:
    """The captured operators, as numbers that names of a trace are turned into; remembers what it has aligned."""

    def __init__(self, tree: ModuleTree, *, inner: bool = False) -> None:
        self.tree = tree
        self.number: dict[str, int] = {}
        names = [n for o in tree.operators for n in ((o.name, *o.inner) if inner else (o.name,))]
        self.owner = np.array([i for i, o in enumerate(tree.operators) for _ in range(1 + len(o.inner) if inner else 1)], np.int32)
        self.names = np.array([self.number.setdefault(n, len(self.number)) for n in names], np.int32)
        self.seen: dict[bytes, Aligned | None] = {}

    def numbers(self, names: Sequence[str]) -> I32:
        """Per name its number here, -1 - i for the i-th name that the capture does not have."""
        return np.array([self.number.get(n, -1 - i) for i, n in enumerate(names)], np.int32)

    def align(self, names: I32) -> Aligned | None:
        """Names as `numbers` gives them; None if too little of either sequence is in the other."""
        key = names.tobytes()
        if key not in self.seen:
            self.seen[key] = self._align(names)
        return self.seen[key]

    def _align(self, names: I32) -> Aligned | None:
        copies = self._copies(names)
        from ..kernels.align import common_subsequence  # loads numba, which a trace alone does not need

        here, there = common_subsequence(names, np.tile(self.names, copies))
        if len(here) < max(1, MIN_ALIGNED_SHARE * min(len(names), copies * len(self.names))):
            return None
        operator = np.full(len(names), -1, np.int32)
        operator[here] = self.owner[there % len(self.names)]
        modules = np.array([o.module for o in self.tree.operators], np.int32)
        module = np.where(operator >= 0, modules[np.maximum(operator, 0)], -1).astype(np.int32)
        module = between(self.tree, module)
        return Aligned(operator=operator, module=module, first=int(here[0]), last=int(here[-1]))

    def _copies(self, names: I32) -> int:
        """How often the model seems to have run in a stretch: the middle of the ratios of how often each name occurs."""
        ours, theirs = (np.bincount(x[x >= 0], minlength=len(self.number)) for x in (self.names, names))
        return max(1, round(float(np.median(theirs[ours > 0] / ours[ours > 0]))))


def between(tree: ModuleTree, module: I32) -> I32:
    """Fill every -1 that lies between two modules with the innermost module around both."""
    known: NDArray[np.int64] = np.flatnonzero(module >= 0)
    out = module.copy()
    memo: dict[tuple[int, int], int] = {}
    for left, right in zip(known[:-1].tolist(), known[1:].tolist(), strict=True):
        if right > left + 1:
            ends = int(module[left]), int(module[right])
            if ends not in memo:
                memo[ends] = tree.common(*ends)
            out[left + 1 : right] = memo[ends]
    return out


def owners_of(tree: ModuleTree, operator: int, node: str) -> tuple[int, ...]:
    """Modules whose parameters the autograd node called `node` of a captured operator hands gradients to."""
    return next((owners for name, owners in tree.operators[operator].owners if name == node), ())
