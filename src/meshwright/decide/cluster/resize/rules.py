"""What is allowed, and the draw: masks from the rules, probabilities from a policy, one action for each tenant.

Cite: the safety section of ADARES. Invariant: nobody leaves its limits, no node gives more than it has, and what is logged as a propensity is the
probability after the mask. Cost: O(tenants log tenants) per window.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....cluster.resize import ACTIONS, Choice, Rules, Seen, Tenants
from .problem import Policy

__all__ = ["Masks", "Resizer"]

DOWN, STAY, UP, TWO = range(len(ACTIONS))


@dataclass(kw_only=True)
class Masks:
    """Remembers violations and use of the windows that the rules look back at."""

    tenants: Tenants
    rules: Rules
    _quiet: NDArray[np.int64] | None = None  # windows since the last violation
    _used: deque[NDArray[np.float64]] = field(default_factory=deque)

    def allowed(self, seen: Seen) -> NDArray[np.bool_]:
        tenants, rules = self.tenants, self.rules
        n = len(tenants.names)
        quiet = np.full(n, rules.calm_windows + 1, np.int64) if self._quiet is None else self._quiet
        self._quiet = np.where(seen.violated, 0, np.minimum(quiet + 1, rules.calm_windows + 1))
        settled = self._quiet > rules.calm_windows
        if rules.hold_windows:
            self._used.append(seen.used)
            if len(self._used) > rules.hold_windows:
                self._used.popleft()
            settled &= seen.before - 1 >= rules.hold_share * np.max(self._used, axis=0)
        room = np.minimum(self._room(seen), np.array(tenants.most) - seen.before)
        forced = np.where(seen.violated, np.minimum(room, rules.recover_steps), 0)
        allowed = np.zeros((n, len(ACTIONS)), np.bool_)
        allowed[:, DOWN] = settled & (seen.before > np.array(tenants.least))
        allowed[:, STAY] = forced == 0
        allowed[:, UP] = np.where(forced > 0, forced == 1, room >= 1)
        allowed[:, TWO] = forced == 2
        return allowed

    def _room(self, seen: Seen) -> NDArray[np.int64]:
        """Steps by which each may grow: what a node has left goes to those that were violated, then to the fullest."""
        n, wish = len(self.tenants.names), np.where(seen.violated, max(1, self.rules.recover_steps), 1)
        if not self.tenants.capacity:
            return wish
        node = np.array(self.tenants.node or (0,) * n)
        left = np.array(self.tenants.capacity, np.int64) - np.bincount(node, seen.before, len(self.tenants.capacity)).astype(np.int64)
        room = np.zeros(n, np.int64)
        for i in np.lexsort((np.arange(n), -seen.used / seen.before, ~seen.violated)).tolist():
            room[i] = min(wish[i], max(0, left[node[i]]), self.tenants.most[i] - seen.before[i])
            left[node[i]] -= room[i]
        return room


class Resizer:
    """Decides window after window: call it with what was seen. Equal seeds and windows give equal actions."""

    def __init__(self, tenants: Tenants, rules: Rules, policy: Policy, *, seed: int = 0) -> None:
        self.masks, self.policy = Masks(tenants=tenants, rules=rules), policy
        self._rng = np.random.default_rng(seed)

    def __call__(self, seen: Seen) -> Choice:
        allowed = self.masks.allowed(seen)
        propensity = self.policy.probabilities(seen, allowed)
        drawn = self._rng.random(len(propensity))[:, None]
        reached = np.cumsum(propensity, 1)
        chosen = np.argmax((drawn * reached[:, -1:] < reached) & (propensity > 0), 1)
        return Choice(allowed=allowed, propensity=propensity, chosen=chosen)
