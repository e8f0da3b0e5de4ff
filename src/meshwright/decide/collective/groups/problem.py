"""Several collectives at once on one fabric: tensor groups and data groups of one job, or jobs that share links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ....bound import Bound
from ....errors import UsageError
from ....fabric.fabric import Fabric
from ....kernels.effort import Deadline
from ....program.program import Program
from ..problem import CollectiveProblem

__all__ = ["GroupsPlan", "GroupsProblem"]


@dataclass(frozen=True, kw_only=True)
class GroupsProblem:
    """Collectives that start together; a device may be in several groups. The time is when the last of them ends.

    Raises: UsageError without a group, or for groups on different fabrics or transports.
    """

    groups: tuple[CollectiveProblem, ...]
    time_limit_s: float = float("inf")
    effort_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise UsageError("no group is named", hint="give at least one collective")
        for i, group in enumerate(self.groups):
            if group.fabric is not self.fabric and group.fabric != self.fabric:
                raise UsageError("all groups must be on one fabric", where=f"groups[{i}]", hint="plan groups on other fabrics on their own")
            if group.transport != self.groups[0].transport:
                raise UsageError("all groups must have one transport", where=f"groups[{i}].transport")
        if self.time_limit_s <= 0:
            raise UsageError(f"time_limit_s must be > 0, got {self.time_limit_s}")

    def deadline(self) -> Deadline:
        """When a planner that begins now must stop; limits as a `CollectiveProblem` has them."""
        return replace(self.groups[0], time_limit_s=self.time_limit_s, effort_s=self.effort_s).deadline()

    @property
    def fabric(self) -> Fabric:
        return self.groups[0].fabric

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Devices of all groups, in fabric order; rank i of the program is `ranks[i]`."""
        used = {name for group in self.groups for name in group.ranks}
        return tuple(d.name for d in self.fabric.devices if d.name in used)

    def members(self, number: int) -> tuple[int, ...]:
        """Ranks of one group."""
        return tuple(self.ranks.index(name) for name in self.groups[number].ranks)


@dataclass(frozen=True, kw_only=True)
class GroupsPlan:
    """`program.contracts[i]` is what group i is promised. `strategies[i]`: how group i is done. `notes` as in CollectivePlan."""

    program: Program
    bound: Bound | None
    strategies: tuple[str, ...]
    options: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)
