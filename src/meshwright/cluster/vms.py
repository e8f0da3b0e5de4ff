"""Virtual machines that come to the hosts of a cluster and leave: columns, not objects, since traces have a hundred thousand and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["MAX_HOSTS", "MAX_VMS", "WHOLE", "Resize", "VmHosts", "VmTrace"]

MAX_VMS = 10_000_000  # the public trace of Azure's packing has 5.6 million
MAX_SIZES = 1 << 20  # shapes times kinds of host times resources
MAX_HOSTS = 100_000
MAX_S = 1e10
WHOLE = 1_000_000_000  # parts of a host's resource that sizes are rounded down to, so that sums are exact


class Resize(NamedTuple):
    """A machine wants another shape."""

    at_s: float
    vm: int
    shape: int


@dataclass(frozen=True, kw_only=True)
class VmTrace:
    """`size[shape, kind, resource]`: share of a host of that kind, not finite where the shape does not run there. `end_s` not finite: it outlives the
    recording, which ends at `until_s`. `low`: of low priority, whose end says nothing of its owner. `features[vm, :]`: what is known at arrival.
    `truth[owner]`: mean and deviation of log10 of lifetimes in hours, where a generator knows them. Raises: UsageError naming the column."""

    name: str
    resources: tuple[str, ...]
    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    size: NDArray[np.float64]
    shape: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    owner: NDArray[np.int32]
    low: NDArray[np.bool_]
    since_s: float
    until_s: float
    features: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    feature_names: tuple[str, ...] = ()
    resizes: tuple[Resize, ...] = ()
    truth: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        n, where = len(self.shape), f"VMs {self.name[:64]}"
        if n > MAX_VMS or self.size.size > MAX_SIZES:
            raise UsageError(f"{n} machines, {self.size.size} sizes", where=where, hint=f"at most {MAX_VMS} and {MAX_SIZES}")
        if self.size.shape != (len(self.shapes), len(self.kinds), len(self.resources)) or not self.size.size:
            raise UsageError("a size for every shape, kind of host and resource", where=f"{where}: size")
        for what in ("arrival_s", "end_s", "owner", "low"):
            if len(getattr(self, what)) != n:
                raise UsageError(f"{len(getattr(self, what))} entries for {n} machines", where=f"{where}: {what}")
        finite = self.size[np.isfinite(self.size)]
        if np.isnan(self.size).any() or (finite < 0).any() or not (finite > 0).any():
            raise UsageError("sizes are shares of a host, from 0 on, and one of them above 0", where=f"{where}: size")
        self._times(where)
        if n and (self.shape.min() < 0 or self.shape.max() >= len(self.shapes) or self.owner.min() < 0):
            raise UsageError("a machine names a shape or an owner that does not exist", where=where)
        if self.features.size and self.features.shape != (n, len(self.feature_names)):
            raise UsageError("a value for every machine and feature", where=f"{where}: features")
        if self.truth is not None and n and self.owner.max() >= len(self.truth):
            raise UsageError("a mean and a deviation for every owner", where=f"{where}: truth")

    def _times(self, where: str) -> None:
        if not (np.isfinite([self.since_s, self.until_s]).all() and -MAX_S <= self.since_s < self.until_s <= MAX_S):
            raise UsageError(f"a recording from {self.since_s} to {self.until_s} s", where=where)
        bad = ~(np.isfinite(self.arrival_s) & (np.abs(self.arrival_s) <= MAX_S) & (self.end_s > self.arrival_s))
        if bad.any():
            i = int(np.argmax(bad))
            raise UsageError(f"machine {i} comes at {self.arrival_s[i]} s and leaves at {self.end_s[i]} s", where=where,
                hint="it leaves later than it comes")
        for r in self.resizes:
            if not (0 <= r.vm < len(self.shape) and 0 <= r.shape < len(self.shapes) and self.since_s <= r.at_s <= self.until_s):
                raise UsageError(f"the resize {tuple(r)}", where=where, hint="of a machine and a shape that exist, within the recording")

    def __len__(self) -> int:
        return len(self.shape)

    @cached_property
    def billionths(self) -> NDArray[np.int64]:
        """Sizes in whole billionths of a host, rounded down; twice a host where the shape does not run."""
        return np.where(np.isfinite(self.size), np.minimum(np.floor(np.where(np.isfinite(self.size), self.size, 0) * WHOLE + 1e-6), 2 * WHOLE),
            2 * WHOLE).astype(np.int64)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Machines whose end is known."""
        return np.isfinite(self.end_s)

    def load(self, hosts: VmHosts, from_s: float, until_s: float) -> NDArray[np.float64]:
        """Mean share of all hosts, of each resource, that the machines take between these times, each on the kind of host that suits it best."""
        stays = np.clip(np.minimum(self.end_s, until_s) - np.maximum(self.arrival_s, from_s), 0, None)
        least = self.size.min(1)[self.shape]
        return np.asarray((np.where(np.isfinite(least), least, 0) * stays[:, None]).sum(0) / (len(hosts) * (until_s - from_s)))


@dataclass(frozen=True, kw_only=True)
class VmHosts:
    """`kind`: of each host, a number among the trace's kinds. `name`: of the fabric or the count that they come from."""

    kind: NDArray[np.int32]
    name: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.kind) <= MAX_HOSTS or self.kind.min() < 0:
            raise UsageError(f"{len(self.kind)} hosts", where="hosts", hint=f"1 to {MAX_HOSTS}")

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, counts: Sequence[int]) -> VmHosts:
        """So many of every kind."""
        if not counts or min(counts) < 0 or not 1 <= sum(counts) <= MAX_HOSTS:
            raise UsageError(f"{list(counts)[:8]} hosts", where="hosts", hint=f"1 to {MAX_HOSTS} together")
        return cls(kind=np.repeat(np.arange(len(counts)), counts).astype(np.int32), name="+".join(map(str, counts)))
