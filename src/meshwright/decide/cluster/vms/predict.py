"""Predictors of lifetimes: survival curves, read again as machines grow older.

Cite: Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", JASA 53, 1958; Ling et al., MLSys 2025, for predicting again.
Left open by the paper: owners with few machines, what comes behind the last end. Our answer: an owner's curve is mixed with that of all, which
counts as one machine; survivors at the last age die at the rate of all deaths over all machine seconds of the owner.
Deviations: none of the estimator. Machines that are still there when the fit is made are censored there and kept; those that were there before the
recording enter at the age they had (left truncation), so that being seen at all does not make lives look long. Low priority is left out.
Invariant: a longer-lived owner's forecast is nowhere a shorter one: means and shares are those of one curve.
Cost: O(n log n) for n machines.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, sqrt

import numpy as np
from numpy.typing import NDArray

from ....cluster.forecast import FINE_S, Forecast, curves
from ....cluster.vms import VmTrace
from ....errors import UsageError
from .past import MAX_TAIL_S, observed

__all__ = ["PREDICTORS", "forecast", "kaplan_meier"]

HOUR_S = 3600.0
PRIOR = 1.0  # machines that the curve of all counts as, in an owner's


def kaplan_meier(entry_s: NDArray[np.float64], age_s: NDArray[np.float64], ended: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Share that lives at FINE_S: the product over ends of 1 - ended / at risk; who ends and who is censored at one age were both at risk."""
    times, deaths = np.unique(age_s[ended], return_counts=True)
    at_risk = np.searchsorted(np.sort(entry_s), times, "left") - np.searchsorted(np.sort(age_s), times, "left")
    alive = np.concatenate([[1.0], np.cumprod(1.0 - deaths / np.maximum(at_risk, deaths))])
    return np.asarray(alive[np.searchsorted(times, FINE_S, "right")])


def _tail_s(entry_s: NDArray[np.float64], age_s: NDArray[np.float64], ended: NDArray[np.bool_]) -> float:
    return float(min((age_s - entry_s).sum() / max(int(ended.sum()), 1), MAX_TAIL_S))


def _kaplan_meier(trace: VmTrace, at_s: float, rng: np.random.Generator) -> Forecast:
    entry_s, age_s, ended, there = observed(trace, at_s)
    if not ended.any():
        raise UsageError(f"no machine has ended by {at_s:g} s", where="predictor kaplan-meier", hint="learn later, or from a trace with a past")
    everyone, tail_s = kaplan_meier(entry_s, age_s, ended), _tail_s(entry_s, age_s, ended)
    owners = int(trace.owner.max()) + 1
    owner = trace.owner[there]
    order = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[order], np.arange(owners + 1))
    alive, tails = np.tile(everyone, (owners, 1)), np.full(owners, tail_s)
    for o in np.flatnonzero(np.diff(first)).tolist():
        mine = order[first[o] : first[o + 1]]
        own = kaplan_meier(entry_s[mine], age_s[mine], ended[mine])
        alive[o] = (len(mine) * own + PRIOR * everyone) / (len(mine) + PRIOR)
        tails[o] = _tail_s(entry_s[mine], age_s[mine], ended[mine]) if ended[mine].any() else tail_s
    left_s, share = curves(alive, tails)
    return Forecast(name="kaplan-meier", row=trace.owner, left_s=left_s, alive=share)


def _owners(trace: VmTrace, at_s: float, rng: np.random.Generator) -> Forecast:
    if trace.truth is None:
        raise UsageError("the trace does not know its owners' distributions", where="predictor owners",
            hint="kaplan-meier learns them; synthetic traces know")
    hours = np.log10(np.maximum(FINE_S, 1e-9) / HOUR_S)
    alive = np.array([[0.5 * erfc((h - mean) / (deviation * sqrt(2))) for h in hours.tolist()] for mean, deviation in trace.truth.tolist()])
    means_s = HOUR_S * np.exp(trace.truth[:, 0] * np.log(10) + (trace.truth[:, 1] * np.log(10)) ** 2 / 2)
    left_s, share = curves(alive, np.minimum(means_s, MAX_TAIL_S))
    return Forecast(name="owners", row=trace.owner, left_s=left_s, alive=share)


def _perfect(trace: VmTrace, at_s: float, rng: np.random.Generator) -> Forecast:
    nobody = np.zeros((1, 2))
    return Forecast(name="perfect", row=np.zeros(len(trace), np.int32), left_s=nobody, alive=nobody, end_s=trace.end_s)


def _shuffled(trace: VmTrace, at_s: float, rng: np.random.Generator) -> Forecast:
    true = (_kaplan_meier if trace.truth is None else _owners)(trace, at_s, rng)
    return Forecast(name="shuffled", row=rng.permutation(true.row).astype(np.int32), left_s=true.left_s, alive=true.alive)


def _hazards(trace: VmTrace, at_s: float, rng: np.random.Generator) -> Forecast:
    from .hazards import hazards

    return hazards(trace, at_s, rng)


# perfect: the true end. owners: the distributions of a synthetic trace. shuffled: forecasts exchanged among machines, worth nothing.
Predictor = Callable[[VmTrace, float, np.random.Generator], Forecast]
PREDICTORS: dict[str, Predictor] = {
    "perfect": _perfect, "owners": _owners, "kaplan-meier": _kaplan_meier, "hazards": _hazards, "shuffled": _shuffled,
}  # fmt: skip


def forecast(name: str, trace: VmTrace, *, at_s: float = 0.0, seed: int = 0, where: str = "") -> Forecast:
    """By a predictor's name, learnt from what is known at `at_s`. Raises: UsageError for a name that does not exist, and for a trace that lacks what
    the predictor needs; MissingExtra without LightGBM."""
    if name not in PREDICTORS:
        raise UsageError(f"there is no predictor {name[:64]!r}", where=where or "predictor", hint=f"there are: {', '.join(PREDICTORS)}")
    return PREDICTORS[name](trace, at_s, np.random.default_rng(seed))
