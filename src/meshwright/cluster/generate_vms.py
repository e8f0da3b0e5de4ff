"""Seeded traces of machines with owners, as clouds report them: most live below an hour, few long ones take nearly all of the load.

Owners are drawn by Zipf's law; `long` of the arrivals are of owners with lifetimes of 10^N(1.6 +- 0.5, 0.4) hours, the others of 10^N(-1 +- 0.3,
0.35). Machines come in batches of one owner and one shape (geometric, 3 in the mean), by Poisson's law with waves of a day and a week. Two thirds
have one core and 2 GB, as in Huawei-East-1; the others 2 to 32 cores by Zipf's law and 2, 4 or 8 GB per core. A host has 64 cores and 384 GB. As
published of Azure and Google, at least 85 % live below an hour and take at most 5 % of the core hours. Batches are left out at random until the load
is the one that was asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .vms import VmTrace

__all__ = ["synthetic_vms"]

DAY_S, HOUR_S = 86_400.0, 3600.0
HOST = (64, 384)  # cores, GB
CORES = (1, 2, 4, 8, 16, 32)
GB_PER_CORE = (2, 4, 8)
ONE_CORE = 2 / 3
BATCH = 3.0  # machines, in the mean
BATCH_S = 60.0  # within which they come
WAVES = (0.3, 0.15)  # of a day, of a week
PER_HOST_DAY = 55.0  # arrivals that are drawn at first for a load of 1; doubled until they suffice
MAX_DRAWN = 20_000_000


def _sizes() -> NDArray[np.float64]:
    return np.array([[[c / HOST[0], c * g / HOST[1]]] for c in CORES for g in GB_PER_CORE])


def _owners(owners: int, long: float, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares of the arrivals; mean and deviation of log10 of hours."""
    share = 1 / np.arange(1, owners + 1) ** 0.8
    share /= share.sum()
    shuffled = rng.permutation(owners)
    chosen = np.zeros(owners, np.bool_)
    chosen[shuffled[: int(np.searchsorted(np.cumsum(share[shuffled]), long)) + 1]] = True
    mean = np.where(chosen, rng.normal(1.6, 0.5, owners), rng.normal(-1.0, 0.3, owners))
    return share, np.stack([mean, np.where(chosen, 0.4, 0.35)], 1)


def synthetic_vms(
    hosts: int = 200, *, days: float = 14.0, before_days: float = 21.0, load: float = 0.7, owners: int = 500, long: float = 0.1,
    warm_days: float = 3.0, hint: float = 0.5, low: float = 0.0, seed: int = 0,
) -> VmTrace:  # fmt: skip
    """`load`: of the cores, from `warm_days` to the end. `before_days`: the cluster is filled so long before time 0. `hint`: deviation of the noise
    on the one feature, log10 of hours. `low`: share of low priority. Equal arguments give equal traces. Raises: UsageError."""
    sizes = {"hosts": hosts, "days": days, "load": load, "owners": owners, "long": long}
    if not all(np.isfinite(x) and x > 0 for x in sizes.values()) or before_days < 0 or not 0 <= warm_days < days or load > 1 or long >= 1 or hint < 0:
        said = ", ".join(f"{name}={value:g}" for name, value in (sizes | {"before_days": before_days, "warm_days": warm_days}).items())
        say = "all above 0, load and long below 1, warm_days below days: vms:hosts=200,days=14,warm_days=3,load=0.7"
        raise UsageError(f"no trace can be drawn of {said}", where="synthetic machines", hint=say)
    rng, drawn = np.random.default_rng(seed), PER_HOST_DAY * hosts * load / BATCH
    share, truth = _owners(owners, long, rng)
    while True:
        count = int(drawn * (days + before_days))
        if count * BATCH > MAX_DRAWN:
            raise UsageError(f"a load of {load:g} takes more than {MAX_DRAWN} machines", where="synthetic machines",
                hint="fewer hosts or days, or longer lives")
        at_s = np.sort(rng.uniform(-before_days * DAY_S, days * DAY_S, count))
        wave = 1 + WAVES[0] * np.sin(2 * np.pi * at_s / DAY_S) + WAVES[1] * np.sin(2 * np.pi * at_s / (7 * DAY_S))
        at_s = at_s[rng.random(count) * (1 + sum(WAVES)) < wave]
        found = _drawn(at_s, share, truth, rng)
        taken = _thinned(found, hosts, load, warm_days * DAY_S, days * DAY_S, rng)
        if taken is not None:
            break
        drawn *= 2
    shape, arrival_s, end_s, owner = (column[taken] for column in found[1:])
    life = np.log10((end_s - arrival_s) / HOUR_S)
    return VmTrace(
        name=f"synthetic machines, {hosts} hosts, {days:g} days, load {load:g}, seed {seed}", resources=("cores", "memory"), kinds=("host",),
        shapes=tuple(f"{c}c{c * g}g" for c in CORES for g in GB_PER_CORE), size=_sizes(), shape=shape, arrival_s=arrival_s, end_s=end_s, owner=owner,
        low=rng.random(len(shape)) < low, since_s=-before_days * DAY_S, until_s=days * DAY_S, features=(life + rng.normal(0, 1, len(life)) * hint)[:,
            None],
        feature_names=("hint",), truth=truth,
    )  # fmt: skip


def _drawn(at_s: NDArray[np.float64], share: NDArray[np.float64], truth: NDArray[np.float64], rng: np.random.Generator) -> tuple[NDArray[Any], ...]:
    """Batch, shape, arrival, end and owner of every machine."""
    n = len(at_s)
    owner, sizes = rng.choice(len(share), n, p=share).astype(np.int32), rng.geometric(1 / BATCH, n)
    larger = 1 / np.arange(1, len(CORES))
    cores = np.where(rng.random(n) < ONE_CORE, 0, 1 + rng.choice(len(CORES) - 1, n, p=larger / larger.sum()))
    shape = cores * len(GB_PER_CORE) + np.where(cores == 0, 0, rng.integers(len(GB_PER_CORE), size=n))
    batch = np.repeat(np.arange(n), sizes).astype(np.int32)
    mean, deviation = truth[owner[batch]].T
    arrival_s = at_s[batch] + rng.uniform(0, BATCH_S, len(batch))
    end_s = arrival_s + 10 ** rng.normal(mean, deviation) * HOUR_S
    return batch, shape[batch].astype(np.int32), arrival_s, end_s, owner[batch]


def _thinned(
    found: tuple[NDArray[Any], ...], hosts: int, load: float, from_s: float, until_s: float, rng: np.random.Generator
) -> NDArray[np.intp] | None:
    """The machines of batches, taken in a random order until their load is reached, by arrival; None where all together do not reach it."""
    batch, shape, arrival_s, end_s, _ = found
    stays_s = np.clip(np.minimum(end_s, until_s) - np.maximum(arrival_s, from_s), 0, None)
    count = int(batch[-1]) + 1 if len(batch) else 0
    of_batch = np.bincount(batch, _sizes()[shape, 0, 0] * stays_s, count) / (hosts * (until_s - from_s))
    order = rng.permutation(count)
    sums = np.cumsum(of_batch[order])
    if not count or sums[-1] < load:
        return None
    kept = np.zeros(count, np.bool_)
    kept[order[: int(np.searchsorted(sums, load))]] = True
    chosen = np.flatnonzero(kept[batch] & (arrival_s < until_s))
    return chosen[np.argsort(arrival_s[chosen], kind="stable")]
