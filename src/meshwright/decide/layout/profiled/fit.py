"""Fitting a runtime's overheads and constant memory to measured runs.

Times are almost linear in the three overheads (per action, per message, per iteration), so each round linearises the simulated time of every run
and solves a non-negative least squares on relative errors; rounds end when nothing moves. Constant memory per device is the median of what was
measured beyond the model. Runs that are suspicious (equal times of different layouts, times below the compute bound) are named and left out,
never averaged in.
Only what predicts runs that a fit did not see is fitted: every set of overheads is judged by leaving one run out at a time (of the linearised
times), and one that does not do better than the runtime as it was given changes nothing. One run says nothing about overheads that could be
checked; it still gives the constant memory. Error bars are 90 % prediction intervals of the errors on the runs left out, wider for few runs
(Student's t).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....errors import Infeasible
from ....profile.layer_profile import LayerProfile
from ....profile.network import MeasuredRun, NetworkProfile, TrainingRuntime
from .predict import compute_bound_s, predict, require_layout

__all__ = ["FittedRuntime", "RunFinding", "fit_runtime", "suspicious_runs"]

F64 = NDArray[np.float64]
OVERHEADS = ("per_action_s", "per_message_s", "per_iteration_s")
# Step of the difference quotient: times are almost linear in the overheads, so it only has to stand out of the rounding of seconds.
DIFFERENCE_STEP_S = 1e-4
# Linearisations at most; the fit ends when predictions move by less than 1e-4.
GAUSS_NEWTON_STEPS = 6
# Error bar at least, as a share of a prediction: a few runs that agree better by chance do not promise more.
MIN_ERROR_SHARE = 0.01
MAX_ERROR_SHARE = 0.9
# A set of overheads must do better by so much of a run's time, else it fits noise.
MIN_GAIN = 1e-4
# Student's t, two-sided 90 %, for 1, 2, ... degrees of freedom; the last for all beyond (statistical tables).
STUDENT_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.753, 1.725)


@dataclass(frozen=True)
class RunFinding:
    kind: str  # "duplicate" | "below-bound"
    runs: tuple[int, ...]
    detail: str


@dataclass(frozen=True, kw_only=True)
class FittedRuntime:
    """`errors`: |predicted / measured - 1| of the runs that were used, in order. `determined`: fields that the runs could determine.

    `unfitted_error`, `validated_error`: mean error of the runtime as given, and of the fit on runs that were left out of it.
    """

    runtime: TrainingRuntime
    used: tuple[int, ...]
    findings: tuple[RunFinding, ...]
    errors: tuple[float, ...]
    memory_errors: tuple[float, ...]
    determined: tuple[str, ...] = ()
    unfitted_error: float
    validated_error: float


def suspicious_runs(profile: LayerProfile, runs: Sequence[MeasuredRun], runtime: TrainingRuntime) -> tuple[RunFinding, ...]:
    """Exactly equal times of several runs, and times that no schedule of the profile's layer times reaches."""
    found = []
    by_time: dict[float, list[int]] = {}
    for i, run in enumerate(runs):
        by_time.setdefault(run.time_s, []).append(i)
    found += [RunFinding("duplicate", tuple(same), f"{len(same)} runs took exactly {t:.9g} s") for t, same in by_time.items() if len(same) > 1]
    bare = msgspec.structs.replace(runtime, per_action_s=0.0, per_message_s=0.0, per_iteration_s=0.0)
    for i, run in enumerate(runs):
        bound = compute_bound_s(require_layout(profile, run.layout), run.layout, bare) * (1 - runtime.compute_error)
        if run.time_s < bound:
            found.append(RunFinding("below-bound", (i,), f"{run.time_s:.6g} s is below the {bound:.6g} s that its computation needs"))
    return tuple(found)


def fit_runtime(
    profile: LayerProfile, network: NetworkProfile, runs: Sequence[MeasuredRun], base: TrainingRuntime, *, interpolate: bool = False
) -> FittedRuntime:
    """`base` with fitted overheads, constant memory and errors. Raises: Infeasible when no run is left, and what `predict` raises."""
    if interpolate:
        profile = profile.completed(e for run in runs for e in run.layout.entries())
    findings = suspicious_runs(profile, runs, base)
    out = {i for f in findings for i in (f.runs if f.kind == "below-bound" else f.runs[1:] if _same(runs, f.runs) else f.runs)}
    used = tuple(i for i in range(len(runs)) if i not in out)
    if not used:
        raise Infeasible(f"none of {len(runs)} measured runs can be used", hint="; ".join(f.detail for f in findings[:3]) or "give measured runs")
    kept = [runs[i] for i in used]
    measured = np.array([r.time_s for r in kept])
    given = np.array([getattr(base, name) for name in OVERHEADS])
    now, slope = _linear(profile, network, kept, base, given)
    left_out = now / measured - 1
    unfitted_error = validated_error = float(np.abs(left_out).mean())
    chosen: tuple[int, ...] = ()
    for columns in _sets():
        found = _left_out_errors(now, slope, given, measured, columns)
        if found is not None and float(np.abs(found).mean()) < validated_error - MIN_GAIN:
            chosen, left_out, validated_error = columns, found, float(np.abs(found).mean())
    overheads = given
    for _ in range(GAUSS_NEWTON_STEPS if chosen else 0):
        fresh = _solved(now, slope, overheads, measured, chosen)
        moved = float(np.abs(slope @ (fresh - overheads) / measured).max())
        overheads = fresh
        if moved < 1e-4:
            break
        now, slope = _linear(profile, network, kept, base, overheads)
    if chosen:  # once more where the fit ended: times are not quite linear
        found = _left_out_errors(now, slope, overheads, measured, chosen)
        assert found is not None
        left_out, validated_error = found, float(np.abs(found).mean())
    source = f"fitted to {len(kept)} runs" if chosen else base.source
    runtime = msgspec.structs.replace(base, **dict(zip(OVERHEADS, map(float, overheads), strict=True)), source=source)
    errors = np.abs(_times(profile, network, kept, runtime, overheads) / measured - 1)
    constant, memory_errors = _memory(profile, network, kept, runtime)
    runtime = msgspec.structs.replace(
        runtime, constant_memory_bytes={**base.constant_memory_bytes, **constant}, compute_error=_bar(left_out, base.compute_error),
        memory_error=_bar(np.array(memory_errors), base.memory_error),
    )  # fmt: skip
    return FittedRuntime(
        runtime=runtime, used=used, findings=findings, errors=tuple(errors.tolist()), memory_errors=tuple(np.abs(memory_errors).tolist()),
        determined=(*(OVERHEADS[i] for i in chosen), *(f"constant memory of {d}" for d in sorted(constant))), unfitted_error=unfitted_error,
        validated_error=validated_error,
    )  # fmt: skip


def _linear(
    profile: LayerProfile, network: NetworkProfile, runs: Sequence[MeasuredRun], base: TrainingRuntime, overheads: F64
) -> tuple[F64, F64]:
    """Times at these overheads, and their slopes."""
    now = _times(profile, network, runs, base, overheads)
    stepped = [_times(profile, network, runs, base, overheads + DIFFERENCE_STEP_S * unit) for unit in np.eye(len(OVERHEADS))]
    return now, np.stack([(t - now) / DIFFERENCE_STEP_S for t in stepped], 1)


def _sets() -> list[tuple[int, ...]]:
    """Of overheads, the small ones first: among equally good ones fewer are fitted."""
    every = range(len(OVERHEADS))
    return [c for size in range(1, len(OVERHEADS) + 1) for c in combinations(every, size)]


def _solved(now: F64, slope: F64, at: F64, measured: F64, columns: Sequence[int]) -> F64:
    """Overheads with those of `columns` fitted, the others as they are. Errors are relative: a long run must not outweigh the short ones."""
    part = slope[:, list(columns)]
    fresh = at.copy()
    fresh[list(columns)] = _non_negative(part / measured[:, None], 1 - (now - part @ at[list(columns)]) / measured)
    return fresh


def _left_out_errors(now: F64, slope: F64, at: F64, measured: F64, columns: Sequence[int]) -> F64 | None:
    """Of every run, predicted by a fit to the others; None where these are too few."""
    if len(measured) <= len(columns):
        return None
    found = []
    for i in range(len(measured)):
        others = np.arange(len(measured)) != i
        fresh = _solved(now[others], slope[others], at, measured[others], columns)
        found.append((now[i] + slope[i] @ (fresh - at)) / measured[i] - 1)
    return np.array(found)


def _same(runs: Sequence[MeasuredRun], numbers: Sequence[int]) -> bool:
    """The same run written twice, of which one copy may stay."""
    return all(runs[i].layout == runs[numbers[0]].layout for i in numbers)


def _bar(errors: F64, stated: float) -> float:
    """Half of a 90 % prediction interval around the next run. One error alone has no spread: the stated bar, or that error if it is larger."""
    n = len(errors)
    if n < 2:
        return float(min(MAX_ERROR_SHARE, max([stated, *np.abs(errors)])))
    student = STUDENT_90[min(n - 2, len(STUDENT_90) - 1)]
    spread = student * float(np.sqrt((errors**2).mean() * (1 + 1 / n)))
    return min(MAX_ERROR_SHARE, max(MIN_ERROR_SHARE, spread))


def _times(profile: LayerProfile, network: NetworkProfile, runs: Sequence[MeasuredRun], base: TrainingRuntime, overheads: F64) -> F64:
    runtime = msgspec.structs.replace(base, **dict(zip(OVERHEADS, map(float, overheads), strict=True)))
    return np.array([predict(profile, r.layout, network, runtime, bars=False).time_s for r in runs])


def _memory(
    profile: LayerProfile, network: NetworkProfile, runs: Sequence[MeasuredRun], runtime: TrainingRuntime
) -> tuple[dict[str, int], list[float]]:
    """(constant bytes by device, signed relative errors with them). Stages of several kinds of device say nothing about one of them."""
    bare = msgspec.structs.replace(runtime, constant_memory_bytes={})
    beyond: dict[str, list[float]] = {}
    rows: list[tuple[str, float, float]] = []
    for run in runs:
        if not run.memory_peak_bytes:
            continue
        modelled = predict(profile, run.layout, network, bare, bars=False).memory_peak_bytes
        for stage, model, real in zip(run.layout.stages, modelled, run.memory_peak_bytes, strict=True):
            devices = {r.device for r in stage.replicas}
            if len(devices) == 1:
                device = devices.pop()
                beyond.setdefault(device, []).append(real - model)
                rows.append((device, model, real))
    constant = {device: max(0, round(median(values))) for device, values in beyond.items()}
    return constant, [(model + constant[device]) / real - 1 for device, model, real in rows if real > 0]


def _non_negative(a: F64, b: F64) -> F64:
    """min |a x - b| over x >= 0: the best of all sets of positive unknowns (three unknowns, eight sets)."""
    best, best_loss = np.zeros(a.shape[1]), float(b @ b)
    # the optimum has some set of positive unknowns, and is the unconstrained one on that set: all sets are tried
    for mask in range(1, 2 ** a.shape[1]):
        columns = [i for i in range(a.shape[1]) if mask >> i & 1]
        solution, _, rank, _ = np.linalg.lstsq(a[:, columns], b, rcond=1e-9)
        if rank < len(columns) or np.any(solution < 0):
            continue
        loss = float(((a[:, columns] @ solution - b) ** 2).sum())
        if loss < best_loss * (1 - 1e-9):
            best, best_loss = np.zeros(a.shape[1]), loss
            best[columns] = solution
    return best
