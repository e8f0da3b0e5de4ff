"""Binned hazards: gradient-boosted trees say, for every machine and every span of ages, how likely it ends within.

Cite: Ling et al., MLSys 2025, for learned distributions; the form, one row per machine and span, is that of discrete-time survival models (Singer
and Willett, "It's About Time", Journal of Educational Statistics 18, 1993).
Left open by the paper: spans, features. Our answer: a span per doubling of the age from a minute on; owner, sizes, hour of the day, what the trace
knows more.
Deviations: none. Machines that are still there give rows up to their present age and none behind it, so censoring needs no weights.
Invariant: the same rows and seed give the same forecast.
Cost: O(rows · trees); rows are drawn by machine where there are more than MAX_ROWS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....cluster.forecast import FINE_S, FIRST_S, Forecast, curves
from ....cluster.vms import VmTrace
from ....errors import MissingExtra, UsageError
from .past import MAX_TAIL_S, observed

__all__ = ["hazards"]

SPANS_S: NDArray[np.float64] = np.concatenate([[0.0], FIRST_S * 2.0 ** np.arange(18)])  # to 91 days
MAX_ROWS = 1_000_000
MAX_LEARNT = 500_000  # machines whose forecasts are kept, a row each
TREES, LEAVES, RATE = 120, 31, 0.1


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise MissingExtra("lightgbm", extra="lifetimes", needed_for="the predictor hazards") from None
    return lightgbm


def _features(trace: VmTrace) -> NDArray[np.float32]:
    sizes = np.where(np.isfinite(trace.size), trace.size, 2.0).min(1)[trace.shape]
    hour = np.floor(trace.arrival_s / 3600.0) % 24
    more = trace.features if trace.features.size else np.zeros((len(trace), 0))
    return np.column_stack([trace.owner, sizes, hour, more]).astype(np.float32)


def hazards(trace: VmTrace, at_s: float, rng: np.random.Generator) -> Forecast:
    """Raises: MissingExtra without LightGBM, UsageError for a trace in which nothing ended by `at_s`, or with too many machines."""
    lightgbm = _lightgbm()
    if len(trace) > MAX_LEARNT:
        raise UsageError(f"{len(trace)} machines, each with a forecast of its own", where="predictor hazards",
            hint=f"at most {MAX_LEARNT}: kaplan-meier has a row per owner")
    entry_s, age_s, ended, there = observed(trace, at_s)
    if not ended.any():
        raise UsageError(f"no machine has ended by {at_s:g} s", where="predictor hazards", hint="learn later, or from a trace with a past")
    known, features = np.flatnonzero(there), _features(trace)
    chosen = rng.permutation(len(known))
    first = np.searchsorted(SPANS_S, entry_s, "left")  # spans that were seen from their beginning
    last = np.clip(np.searchsorted(SPANS_S, age_s, "left") - 1, 0, len(SPANS_S) - 1)  # the span in which it ended or was seen last
    rows = np.maximum(last + ended - first, 0)  # a span in which it was only seen last says nothing
    chosen = chosen[: int(np.searchsorted(np.cumsum(rows[chosen]), MAX_ROWS)) + 1]
    rows = rows[chosen]
    machine = np.repeat(np.arange(len(chosen)), rows)
    span = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows) + first[chosen][machine]
    ends = ended[chosen][machine] & (span == last[chosen][machine])
    table = np.column_stack([features[known[chosen]][machine], span])
    parameters = {
        "objective": "binary", "num_leaves": LEAVES, "learning_rate": RATE, "seed": int(rng.integers(1 << 30)), "deterministic": True,
        "num_threads": 1, "force_row_wise": True, "verbosity": -1, "min_data_in_leaf": 50, "max_cat_threshold": 64,
    }  # fmt: skip
    model = lightgbm.train(parameters, lightgbm.Dataset(table, ends.astype(np.float32), categorical_feature=[0], free_raw_data=True), TREES)
    alive = np.ones((len(trace), len(SPANS_S)), np.float32)
    for k in range(len(SPANS_S) - 1):
        alive[:, k + 1] = alive[:, k] * (1 - model.predict(np.column_stack([features, np.full(len(trace), k)]), num_threads=1))
    return _made(trace, alive)


def _made(trace: VmTrace, alive: NDArray[np.float32]) -> Forecast:
    """Curves between the spans' ends, in pieces, so that memory stays small."""
    left, share = [], []
    for piece in np.array_split(np.arange(len(trace)), max(1, len(trace) // 20_000)):
        fine = np.array([np.interp(FINE_S, SPANS_S, row) for row in alive[piece]]).reshape(len(piece), len(FINE_S))
        found = curves(fine, np.full(len(piece), min(float(SPANS_S[-1]), MAX_TAIL_S)))
        left.append(found[0])
        share.append(found[1])
    return Forecast(name="hazards", row=np.arange(len(trace), dtype=np.int32), left_s=np.concatenate(left), alive=np.concatenate(share))
