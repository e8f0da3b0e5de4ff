"""Fitting a runtime's overheads and constant memory to measured runs.

Times are almost linear in the three overheads (per action, per message, per iteration), so each round linearises the simulated time of every run
and solves a non-negative least squares on relative errors; rounds end when nothing moves. Constant memory per device is the median of what was
measured beyond the model. The errors that remain become the runtime's error bar. Runs that are suspicious (equal times of different layouts, times
below the compute bound) are named and left out, never averaged in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class RunFinding:
    kind: str  # "duplicate" | "below-bound"
    runs: tuple[int, ...]
    detail: str


@dataclass(frozen=True, kw_only=True)
class FittedRuntime:
    """`errors`: |predicted / measured - 1| of the runs that were used, in order."""

    runtime: TrainingRuntime
    used: tuple[int, ...]
    findings: tuple[RunFinding, ...]
    errors: tuple[float, ...]
    memory_errors: tuple[float, ...]


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
    overheads = np.zeros(len(OVERHEADS))
    for _ in range(GAUSS_NEWTON_STEPS):
        now = _times(profile, network, kept, base, overheads)
        stepped = [_times(profile, network, kept, base, overheads + DIFFERENCE_STEP_S * unit) for unit in np.eye(len(OVERHEADS))]
        slope = np.stack([(t - now) / DIFFERENCE_STEP_S for t in stepped], 1)
        # errors relative to what was measured: a long run must not outweigh the short ones
        fresh = _non_negative(slope / measured[:, None], 1 - (now - slope @ overheads) / measured)
        moved = float(np.abs(slope @ (fresh - overheads) / measured).max())
        overheads = fresh
        if moved < 1e-4:
            break
    runtime = msgspec.structs.replace(base, **dict(zip(OVERHEADS, map(float, overheads), strict=True)), source=f"fitted to {len(kept)} runs")
    errors = np.abs(_times(profile, network, kept, runtime, overheads) / measured - 1)
    constant, memory_errors = _memory(profile, network, kept, runtime)
    runtime = msgspec.structs.replace(
        runtime, constant_memory_bytes={**base.constant_memory_bytes, **constant}, compute_error=_bar(errors, base.compute_error),
        memory_error=_bar(np.array(memory_errors), base.memory_error),
    )  # fmt: skip
    return FittedRuntime(runtime=runtime, used=used, findings=findings, errors=tuple(errors.tolist()), memory_errors=tuple(memory_errors))


def _same(runs: Sequence[MeasuredRun], numbers: Sequence[int]) -> bool:
    """The same run written twice, of which one copy may stay."""
    return all(runs[i].layout == runs[numbers[0]].layout for i in numbers)


def _bar(errors: F64, stated: float) -> float:
    return float(min(0.9, max(MIN_ERROR_SHARE, np.percentile(errors, 90)))) if len(errors) >= 3 else stated


def _times(profile: LayerProfile, network: NetworkProfile, runs: Sequence[MeasuredRun], base: TrainingRuntime, overheads: F64) -> F64:
    runtime = msgspec.structs.replace(base, **dict(zip(OVERHEADS, map(float, overheads), strict=True)))
    return np.array([predict(profile, r.layout, network, runtime, bars=False).time_s for r in runs])


def _memory(
    profile: LayerProfile, network: NetworkProfile, runs: Sequence[MeasuredRun], runtime: TrainingRuntime
) -> tuple[dict[str, int], list[float]]:
    """(constant bytes by device, relative errors with them). Stages of several kinds of device say nothing about one of them."""
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
    return constant, [abs((model + constant[device]) / real - 1) for device, model, real in rows if real > 0]


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
