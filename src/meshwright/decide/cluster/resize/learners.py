"""LinUCB, SquareCB and doubly robust: contextual bandits that resize, on forecast features.

Cite: "ADARES: Adaptive Resource Management for Virtual Machines" (arXiv 1812.01837); Li et al., WWW 2010 (LinUCB); Foster and Rakhlin, ICML 2020
(SquareCB); Dudik et al., ICML 2011 (doubly robust).
Left open by the paper: features and weights of the reward. Our answer: the ratio of an allocation to the forecast of use; the cost of an action is
`waste` for each step that it gives, which is known before, and a violation, which alone has to be learned.
Deviations: resources are learned apart, nine actions as three times three; one model for all actions, since an action only moves the ratio; a
window teaches of every allocation up to the tried one (`model`), in LinUCB and SquareCB; the tent reward is left out: small machines cannot meet it,
and it only relearns a threshold; features of nodes are left out, nodes limit the mask.
Invariant: probabilities sum to 1 and are 0 outside the mask; at most `explore` of them is not on the best known action; none on critical tenants;
none is between 0 and LEAST_PROPENSITY.
Cost: O(tenants + knots^3) per window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite
from ....cluster.resize import Rules, Seen, Tenants
from ....errors import UsageError
from .model import Regression, Rows, Watched
from .problem import STEPS, Prior, ResizeStrategy, one_hot

__all__ = ["DoublyRobust", "Learner", "LinUcb", "SquareCb"]

ADARES = Cite(key="cano2018adares", title="ADARES: Adaptive Resource Management for Virtual Machines", year=2018, venue="arXiv 1812.01837",
    authors="Ignacio Cano et al.")
SQUARE_CB = Cite(key="foster2020squarecb", title="Beyond UCB: Optimal and Efficient Contextual Bandits with Regression Oracles", year=2020,
    venue="ICML", authors="Dylan J. Foster, Alexander Rakhlin")
ROBUST = Cite(key="dudik2011dr", title="Doubly Robust Policy Evaluation and Learning", year=2011, venue="ICML",
    authors="Miroslav Dudik, John Langford, Lihong Li")
LEAST_PROPENSITY = 0.01  # of an action that is explored: a log with smaller ones says little of other policies


class Learner(ABC):
    """A policy with a regression, and a prior to give."""

    def __init__(self, options: LinUcb | SquareCb | DoublyRobust, tenants: Tenants, rules: Rules, prior: Prior | None) -> None:
        if not options.waste > 0 or options.prior_weight < 0:
            raise UsageError(f"waste {options.waste}, prior_weight {options.prior_weight}", where=options.name, hint="above 0; at least 0")
        self.waste, self.rules = options.waste, rules
        self.watched, self.model = Watched(tenants, rules), Regression(prior, options.prior_weight)

    def prior(self) -> Prior:
        return self.model.prior()

    def learn(self, seen: Seen) -> None:
        found = self.watched.outcome(seen)
        if found is not None:
            rows, violated = found
            self.model.add(rows.at, rows.part, violated)
            self.model.fit()

    def costs(self, seen: Seen, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[tenants, actions]: what each is expected to cost, and how unsure that is."""
        mean, unsure = self.model.at(rows.at, rows.part)
        return np.asarray(self.waste * (seen.before[:, None] + STEPS) + np.clip(mean, 0, 1), np.float64), unsure

    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        self.learn(seen)
        self.watched.forecast(seen)
        cost, unsure = self.costs(seen, self.watched.actions(seen))
        return self.chances(np.where(allowed, cost, np.inf), unsure, allowed)

    @abstractmethod
    def chances(self, cost: NDArray[np.float64], unsure: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[tenants, actions]: with which probability each is taken. cost: infinite where it is not allowed."""

    def explored(self, others: NDArray[np.float64], best: NDArray[np.int64]) -> NDArray[np.float64]:
        """`others`: wanted probability of actions beside the best, which is cut to what the rules leave; the rest is the best one's."""
        others = np.where(one_hot(best) > 0, 0.0, others)
        mass = others.sum(1, keepdims=True)
        most = np.where(self.watched.critical, 0.0, self.rules.explore)[:, None]
        others = others * np.minimum(1.0, most / np.maximum(mass, 1e-300))
        others = np.where(others < LEAST_PROPENSITY, 0.0, others)
        return np.asarray(others + one_hot(best) * (1 - others.sum(1, keepdims=True)))


@dataclass(frozen=True, kw_only=True)
class LinUcb(ResizeStrategy):
    """waste: violations that a step more is worth: the knob between cost and violations. alpha: how much an unsure estimate is trusted to be low.
    prior_weight: of rows that another job learned from."""

    name: ClassVar[str] = "linucb"
    cite: ClassVar[Cite] = ADARES
    learns: ClassVar[bool] = True

    waste: float = 0.001
    alpha: float = 0.01
    prior_weight: float = 0.1

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Learner:
        """Raises: UsageError."""
        return _LinUcb(self, tenants, rules, prior)


class _LinUcb(Learner):
    def __init__(self, options: LinUcb, tenants: Tenants, rules: Rules, prior: Prior | None) -> None:
        super().__init__(options, tenants, rules, prior)
        self.alpha = np.where(self.watched.critical, 0.0, options.alpha)[:, None]

    def chances(self, cost: NDArray[np.float64], unsure: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        return one_hot(np.argmin(cost - self.alpha * unsure, 1))


@dataclass(frozen=True, kw_only=True)
class SquareCb(ResizeStrategy):
    """waste, prior_weight: as in linucb. gamma: how fast worse actions are given up; it grows with the root of the windows."""

    name: ClassVar[str] = "squarecb"
    cite: ClassVar[Cite] = SQUARE_CB
    learns: ClassVar[bool] = True

    waste: float = 0.001
    gamma: float = 10.0
    prior_weight: float = 0.1

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Learner:
        """Raises: UsageError."""
        return _SquareCb(self, tenants, rules, prior)


class _SquareCb(Learner):
    def __init__(self, options: SquareCb, tenants: Tenants, rules: Rules, prior: Prior | None) -> None:
        super().__init__(options, tenants, rules, prior)
        self.gamma, self.windows = options.gamma / options.waste, 0

    def chances(self, cost: NDArray[np.float64], unsure: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        self.windows += 1
        best = np.argmin(cost, 1)
        gap = cost - cost.min(1, keepdims=True)
        others = np.where(allowed, 1 / (allowed.sum(1, keepdims=True) + self.gamma * np.sqrt(self.windows) * gap), 0.0)
        return self.explored(others, best)


@dataclass(frozen=True, kw_only=True)
class DoublyRobust(ResizeStrategy):
    """waste, prior_weight: as in linucb. temperature: cost beside the best, in steps, at which an action is explored 1/e times as often. It learns
    from the action that was taken alone, weighted by its propensity."""

    name: ClassVar[str] = "doubly-robust"
    cite: ClassVar[Cite] = ROBUST
    learns: ClassVar[bool] = True

    waste: float = 0.001
    temperature: float = 1.0
    prior_weight: float = 0.1

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Learner:
        """Raises: UsageError."""
        return _DoublyRobust(self, tenants, rules, prior)


class _DoublyRobust(Learner):
    """Rows of all allowed actions: the model's own estimate, corrected where the action was taken by the error over the propensity."""

    last: tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.int64]] | None = None

    def __init__(self, options: DoublyRobust, tenants: Tenants, rules: Rules, prior: Prior | None) -> None:
        super().__init__(options, tenants, rules, prior)
        self.scale = max(options.temperature, 1e-9) * options.waste

    def learn(self, seen: Seen) -> None:
        watched = self.watched
        if self.last is None or watched.expected is None:
            return
        allowed, propensity, before = self.last
        rows = watched.rows((before[:, None] + STEPS).astype(np.float64))
        guess, _ = self.model.at(rows.at, rows.part)
        taken = (before[:, None] + STEPS == seen.before[:, None]) & allowed
        weight = taken / np.maximum(propensity, LEAST_PROPENSITY)
        target = guess + weight * (seen.violated[:, None] - guess)
        self.model.add(rows.at[allowed], rows.part[allowed], target[allowed])
        self.model.fit()

    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        found = super().probabilities(seen, allowed)
        self.last = (allowed, found, seen.before)
        return found

    def chances(self, cost: NDArray[np.float64], unsure: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        return self.explored(np.exp(-(cost - cost.min(1, keepdims=True)) / self.scale), np.argmin(cost, 1))
