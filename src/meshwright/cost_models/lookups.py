"""What embedding lookups and their exchanges cost: NeuroShard's two kinds of nets over measured times, and the floor that no measured point is below.

Cite: NeuroShard, MLSys 2023, section 3. Compute: a table's features through 128 and 32 units, summed over the tables of a device, then 64 and 1: any
number of tables, in any order. Exchange: the sums of columns of all devices (forward also when each device starts) through 128, 64, 32, 16 units to
the time of each device.
Deviations: sizes enter as logarithms too, and products of sizes that the sum cannot make; both nets learn relative errors. What a net says is raised
to the floor: no less than the additive floor of compute, no less than a device's bytes over its links.
Shapes: [tables, FEATURES]; sums [..., UNITS]; columns [..., devices]. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["CITE", "FEATURES", "FLOOR_TERMS", "LookupCosts", "Net", "assumed_costs", "features", "floor_terms"]

from ..cite import Cite

CITE = Cite(
    key="zha2023neuroshard", title="Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost Models", year=2023,
    venue="MLSys", authors="Daochen Zha, Louis Feng, Liang Luo, Bhargav Bhushanam, et al.", url="arxiv.org/abs/2305.01868",
)  # fmt: skip
F64 = NDArray[np.float64]
ASSUMED_BANDWIDTH_BPS = 10e9  # of a device that states none: one core's share of a server's memory
FEATURES = 26
FLOOR_TERMS = 2  # elements looked up (batch x pooling x columns), and pooled elements (batch x columns): both keep their sum when columns are split


def features(rows: F64, dim: F64, pooling: F64, histogram: F64, batch: int) -> F64:
    """[tables, FEATURES]: the card's 20 (17 bins, columns, lookups, rows), and logarithms and products of sizes."""
    looked = pooling * batch
    often = np.array([0.0, *range(16)])
    met = looked / np.maximum(histogram @ np.exp2(np.maximum(often - 0.5, 0)), 1.0)  # rows that a batch meets, about
    columns = [
        dim, pooling, rows, np.log2(rows), pooling * dim, np.log2(1 + rows * dim), np.log2(1 + looked * dim), np.minimum(met, rows) * dim,
        np.sqrt(looked),
    ]  # fmt: skip
    return np.concatenate([histogram, np.stack(columns, -1)], -1)


def floor_terms(dim: F64, pooling: F64, batch: int) -> F64:
    """[tables, FLOOR_TERMS]."""
    return np.stack([pooling * dim * batch, dim * float(batch)], -1)


@dataclass(frozen=True)
class Net:
    """Layers with ReLU between them: `weights` [in, out] and `bias` each; inputs are scaled by `mean` and `spread` first."""

    mean: F64
    spread: F64
    layers: tuple[tuple[F64, F64], ...]
    last_relu: bool = False

    def __call__(self, x: F64) -> F64:
        y = (x - self.mean) / self.spread
        for i, (weights, bias) in enumerate(self.layers):
            y = y @ weights + bias
            if i + 1 < len(self.layers) or self.last_relu:
                np.maximum(y, 0.0, out=y)
        return y


@dataclass(frozen=True, kw_only=True)
class LookupCosts:
    """Measured on one kind of device. `table` and `device`: the compute net before and after the sum over tables, giving log2 of seconds; none: the
    floor is all that is known. `forward`, `backward`: exchange nets for `devices` devices of the fabric `fabric` (log2 of seconds). `floor`: seconds
    per floor term, and at `overhead_s` per table. `machine`: what it was measured on. `errors`: median relative errors on points that no net saw."""

    batch: int
    floor: tuple[float, ...]
    overhead_s: float = 0.0
    table: Net | None = None
    device: Net | None = None
    forward: Net | None = None
    backward: Net | None = None
    fabric: str = ""
    devices: int = 0
    machine: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def embed(self, rows: F64, dim: F64, pooling: F64, histogram: F64) -> F64:
        """[tables, units + 1]: what is summed over the tables of a device; the last is the floor's seconds."""
        floor: F64 = floor_terms(dim, pooling, self.batch) @ np.array(self.floor) + self.overhead_s
        if self.table is None:
            return floor[:, None]
        return np.concatenate([self.table(features(rows, dim, pooling, histogram, self.batch)), floor[:, None]], 1)

    def compute_s(self, sums: F64) -> F64:
        """[...] seconds of devices whose tables have these sums [..., units + 1]; 0 where nothing is."""
        floor = sums[..., -1]
        if self.device is None:
            return floor
        with np.errstate(over="ignore"):
            found = np.exp2(np.minimum(self.device(sums[..., :-1])[..., 0], 40.0))
        return np.asarray(np.where(floor > 0, np.maximum(found, floor), 0.0))

    def exchange_s(self, columns: F64, starts_s: F64 | None) -> F64 | None:
        """[..., devices] seconds of the backward exchange, or of the forward one where starts are given; None where no net was trained."""
        net = self.backward if starts_s is None else self.forward
        if net is None:
            return None
        x = columns if starts_s is None else np.concatenate([columns, starts_s * 1e3], -1)
        with np.errstate(over="ignore"):
            return np.asarray(np.exp2(np.minimum(net(x), 40.0)))


def assumed_costs(batch: int, element_bytes: int, bandwidth_Bps: int) -> LookupCosts:
    """By a formula, where nothing was measured: a row is read, read again and written back, its pooled sum written and its gradient read."""
    rate = float(bandwidth_Bps or ASSUMED_BANDWIDTH_BPS)
    return LookupCosts(batch=batch, floor=(3 * element_bytes / rate, 2 * element_bytes / rate))
