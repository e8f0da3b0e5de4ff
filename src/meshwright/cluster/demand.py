"""Seeded demands for resizing: a daily wave, slow noise, and rare bursts, per tenant and window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .resize import Tenants

__all__ = ["DAY_WINDOWS", "synthetic_demand"]

DAY_WINDOWS = 288  # of five minutes
NOISE, NOISE_KEPT = 0.03, 0.9  # of a step of the noise; what remains of it in the next window
BURSTS, BURST_WINDOWS, BURST_LEAST, BURST_MOST = 0.002, 6, 0.2, 0.8  # chance per window; how long; how much more
MEDIAN_STEPS, SPREAD, LEAST_STEPS, MOST_STEPS = 2.0, 0.7, 0.3, 12.0  # of the base, log-normal: 300 tenants need 905 whole cores, the card's 910
WAVE_LEAST, WAVE_MOST = 0.1, 0.6  # height of the daily wave, of the base
GUESS_LEAST, GUESS_MOST = 1.5, 3.0  # what users ask for, times the wave's top


def synthetic_demand(
    tenants: int, windows: int, *, seed: int = 0, median_steps: float = MEDIAN_STEPS, day_windows: int = DAY_WINDOWS, wave: bool = True,
    resource: str = "cpu", unit: float = 1.0, window_s: float = 300.0,
) -> tuple[Tenants, NDArray[np.float64]]:  # fmt: skip
    """Who may be resized (`most` is what its user asked for), and [windows, tenants] of steps that are wanted. Equal arguments give equal demands.

    base x (1 + amplitude x sine of the day) x (1 + noise) x bursts. `wave` off: neither wave nor bursts, like the heap of a server.
    Raises: UsageError."""
    if tenants < 1 or windows < 1 or not median_steps > 0 or day_windows < 2 or seed < 0:
        raise UsageError(f"{tenants} tenants, {windows} windows, {median_steps:g} steps", where="demand", hint="at least one of each")
    rng = np.random.default_rng(seed)
    scale = median_steps / MEDIAN_STEPS
    base = np.clip(rng.lognormal(np.log(MEDIAN_STEPS), SPREAD, tenants), LEAST_STEPS, MOST_STEPS) * scale
    amplitude, phase = rng.uniform(WAVE_LEAST, WAVE_MOST, tenants), rng.uniform(0, 2 * np.pi, tenants)
    noise = rng.normal(0, NOISE, (windows, tenants))
    for t in range(1, windows):
        noise[t] += NOISE_KEPT * noise[t - 1]
    more = np.where(rng.random((windows, tenants)) < BURSTS, rng.uniform(BURST_LEAST, BURST_MOST, (windows, tenants)), 0.0)
    burst = more.copy()
    for late in range(1, BURST_WINDOWS):
        np.maximum(burst[late:], more[:-late], out=burst[late:])
    guess = rng.uniform(GUESS_LEAST, GUESS_MOST, tenants)
    demand = base * np.maximum(1 + noise, 0.01)
    if wave:
        demand *= (1 + amplitude * np.sin(2 * np.pi * np.arange(windows)[:, None] / day_windows + phase)) * (1 + burst)
    most = np.ceil(base * (1 + amplitude) * guess).astype(np.int64) + 1
    made = Tenants(
        resource=resource, unit=unit, names=tuple(f"v{i}" for i in range(tenants)), least=(1,) * tenants, most=tuple(most.tolist()),
        window_s=window_s
    )  # fmt: skip
    return made, np.asarray(demand)
