"""Types of resizing: a strategy opens a policy for some tenants, and the policy answers every window with probabilities of actions."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....cluster.resize import ACTIONS, Rules, Seen, Tenants
from ...strategies import Listed

__all__ = ["STEPS", "Policy", "Prior", "ResizeStrategy", "toward"]

STEPS = np.array(ACTIONS, np.int64)


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a learner knows, to begin another job with: the sums of its regression, and how many rows are in them."""

    knots: tuple[float, ...]
    squares: tuple[tuple[float, ...], ...]
    products: tuple[float, ...]
    rows: float


class Policy(Protocol):
    """Lives as long as a run. Windows come in order."""

    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[tenants, actions]: sum to 1, and 0 where not allowed."""
        ...


class ResizeStrategy(Listed, Protocol):
    """A frozen dataclass of options. `ahead`: it asks for the next window's demand, which only a simulation has. `learns`: `plan` takes a prior
    and its policy has one to give."""

    answers: ClassVar[str] = "resize"
    ahead: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Any:
        """A `Policy`."""
        ...


def toward(target: NDArray[np.float64], seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Certainty for the allowed action that comes nearest to a target in steps; of two as near, the larger."""
    after = seen.before[:, None] + STEPS
    short = np.where(allowed, np.abs(after - target[:, None]) - 1e-6 * STEPS, np.inf)
    return one_hot(np.argmin(short, 1))


def one_hot(chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(np.eye(len(STEPS))[chosen])
