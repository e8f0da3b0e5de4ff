"""Resizing of running machines and jobs: who may be resized, by what rules, and the log of what was seen and decided.

Everything is counted in whole steps of one resource: tenths of a core, 64 MiB. After every window each tenant gets one action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["ACTIONS", "MAX_TENANTS", "MAX_WINDOWS", "RESOURCES", "Choice", "ResizeLog", "Rules", "Seen", "Tenants", "Total", "Window"]

RESOURCES = ("cpu", "memory")
ACTIONS = (-1, 0, 1, 2)  # steps; two at once only after a violation
MAX_TENANTS = 100_000
MAX_WINDOWS = 1_000_000  # of one log
MAX_STEPS = 1 << 30  # of one tenant


class Tenants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`unit`: cores or bytes of a step. `least`, `most`: steps that a tenant may have. `node`: number of its node, empty: all on one;
    `capacity`: steps of each node, empty: no limit. `critical`: no exploration on it. `window_s`: length of a window.

    Raises: UsageError naming the field."""

    resource: str
    unit: float
    names: tuple[str, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    node: tuple[int, ...] = ()
    capacity: tuple[int, ...] = ()
    critical: tuple[bool, ...] = ()
    window_s: float = 300.0

    def __post_init__(self) -> None:
        n = len(self.names)
        if self.resource not in RESOURCES:
            raise UsageError(f"a resource {self.resource[:64]!r}", where="resource", hint=" or ".join(RESOURCES))
        for what in ("unit", "window_s"):
            if not (math.isfinite(getattr(self, what)) and getattr(self, what) > 0):
                raise UsageError(f"{getattr(self, what)}", where=what, hint="a number above 0")
        if not 1 <= n <= MAX_TENANTS or len(set(self.names)) < n:
            raise UsageError(f"{n} tenants, {len(set(self.names))} names", where="names", hint=f"1 to {MAX_TENANTS}, each with a name of its own")
        for what in ("least", "most", "node", "critical"):
            if len(getattr(self, what)) != n and (what in ("least", "most") or getattr(self, what)):
                raise UsageError(f"{len(getattr(self, what))} values for {n} tenants", where=what, hint="one for each")
        for i in range(n):
            if not 1 <= self.least[i] <= self.most[i] <= MAX_STEPS:
                said = f"{self.names[i][:64]}: from {self.least[i]} to {self.most[i]} steps"
                raise UsageError(said, where="least, most", hint=f"1 <= least <= most <= {MAX_STEPS}")
        if self.capacity and any(not 0 <= k < len(self.capacity) for k in self.node or (0,)):
            raise UsageError("a node without a capacity", where="capacity", hint="one for each node")


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What no strategy may do. After a violation a tenant grows by `recover_steps` (0, 1 or 2), or by what there is, and nothing else; it does not
    shrink then, nor in the `calm_windows` windows after it. It keeps `hold_share` times the most that it used in the last `hold_windows` windows
    (0: no such rule). Nobody gets more than `most`, less than `least`, or what its node does not have. `explore`: most of the probability that may go
    to actions that are not the best known."""

    recover_steps: int = 2
    calm_windows: int = 2
    hold_windows: int = 0
    hold_share: float = 1.1
    explore: float = 0.02

    def __post_init__(self) -> None:
        windows = min(self.calm_windows, self.hold_windows)
        if self.recover_steps not in (0, 1, 2) or windows < 0 or not self.hold_share >= 1 or not 0 <= self.explore <= 0.5:
            raise UsageError("recover_steps is 0, 1 or 2, windows are at least 0, hold_share at least 1, explore within 0 and 0.5", where="rules")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A window, per tenant: `before`, steps that it had; `used`, the most that it used, in steps, which the limit cuts off; `violated`: it wanted
    more. `ahead`: what it will want in the next window, for simulated oracles only."""

    window: int
    before: NDArray[np.int64]
    used: NDArray[np.float64]
    violated: NDArray[np.bool_]
    ahead: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """[tenants, actions]: `allowed` by the rules, `propensity` with which each could be drawn; `chosen`: number of the action."""

    allowed: NDArray[np.bool_]
    propensity: NDArray[np.float64]
    chosen: NDArray[np.int64]

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.asarray(np.array(ACTIONS, np.int64)[self.chosen])


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the log: `Seen` and `Choice` of all tenants. `allowed`: bit k for action k."""

    window: int
    before: tuple[int, ...]
    used: tuple[float, ...]
    violated: tuple[bool, ...]
    allowed: tuple[int, ...]
    propensity: tuple[tuple[float, ...], ...]
    chosen: tuple[int, ...]

    @classmethod
    def of(cls, seen: Seen, choice: Choice) -> Window:
        bits = choice.allowed @ (1 << np.arange(len(ACTIONS)))
        return cls(
            window=seen.window, before=tuple(seen.before.tolist()), used=tuple(seen.used.tolist()), violated=tuple(seen.violated.tolist()),
            allowed=tuple(bits.tolist()), propensity=tuple(map(tuple, choice.propensity.tolist())), chosen=tuple(choice.chosen.tolist()),
        )  # fmt: skip

    def seen(self) -> Seen:
        return Seen(window=self.window, before=np.array(self.before, np.int64), used=np.array(self.used, np.float64),
            violated=np.array(self.violated, np.bool_))


class Total(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`unit_hours`: core-hours or byte-hours that tenants had; `violations`: windows of tenants that were violated, of `windows`."""

    unit_hours: float
    violations: int
    windows: int


class ResizeLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`total` is missing where the run did not come to its end."""

    tenants: Tenants
    rules: Rules
    strategy: str
    options: Mapping[str, Any] = {}
    seed: int = 0
    windows: tuple[Window, ...] = ()
    total: Total | None = None
