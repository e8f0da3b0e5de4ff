"""The best that any strategy can do by the steps and rules that all have, for one tenant of `cluster.demand` at a time: dynamic programming.

The strategy knows base, wave, the noise so far, and the bursts that last and how long. It does not know the next step of the noise and whether a
burst begins. Its state: steps that it has, windows since the last violation, the burst in effect (height, windows left) and the noise. One window
costs its steps, and `price` if it is violated. The wave repeats daily, so the costs of one day are those of every day. Noise
and heights of bursts lie on grids; chances of a violation are exact within a cell. `follow` walks the real demand with the costs interpolated in the
noise, so what it reaches is reachable, whatever the grids; `value` is the grids' own optimum of the same sum.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from meshwright.cluster import demand as made

CELLS, HEIGHTS = 9, 3  # of the noise; of a burst
QUIET = 3  # windows without a violation from which it may shrink: Rules.calm_windows + 1
CORE = made.NOISE / math.sqrt(1 - made.NOISE_KEPT**2)  # deviation of the noise
NOISES = np.linspace(-3.2 * CORE, 3.2 * CORE, CELLS)
EDGES = np.concatenate([[-np.inf], (NOISES[1:] + NOISES[:-1]) / 2, [np.inf]])
BURSTS = np.concatenate([[0.0], made.BURST_LEAST + (made.BURST_MOST - made.BURST_LEAST) * (np.arange(HEIGHTS) + 0.5) / HEIGHTS])
# Which burst and how many windows it still has after this one: number 0 is none; 1 + (height - 1) * windows + left.
LEFT = made.BURST_WINDOWS
STATES = 1 + HEIGHTS * LEFT
ODDS = made.BURSTS


@numba.njit(cache=True)
def below(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


@numba.njit(cache=True)
def best(waves, most, price, noises, edges, bursts, kept, step, odds):  # type: ignore[no-untyped-def]
    """[windows of a day, steps, quiet, burst that lasts, noise]: cost of having so many steps in the next window (number t), and of all that
    follows; and the cost of a window in the long run. A day backwards, after a quarter of a day from which its end is known."""
    day, cells = len(waves), len(noises)
    upto = np.ones((cells, cells))  # chance that the noise comes from n into a cell up to m
    for n in range(cells):
        for m in range(cells - 1):
            upto[n, m] = below((edges[m + 1] - kept * noises[n]) / step)
    after = np.zeros((most + 1, QUIET + 1, STATES, cells))
    here = np.zeros((most + 1, QUIET + 1, STATES, cells))
    found = np.zeros((day, most + 1, QUIET + 1, STATES, cells), np.float32)
    row = np.zeros((QUIET + 1, STATES, cells))
    level = 0.0
    for t in range(day + day // 4 - 1, -1, -1):
        for a in range(1, most + 1):
            for b in range(STATES):
                limit = a / (waves[t % day] * (1 + bursts[0 if b == 0 else 1 + (b - 1) // LEFT])) - 1  # noise above it is a violation
                for n in range(cells):
                    cut, last = below((limit - kept * noises[n]) / step), 0.0
                    one, two, three = float(a), float(a), float(a)
                    for m in range(cells):
                        good = max(0.0, min(upto[n, m], cut) - last)
                        bad = (upto[n, m] - last - good) * (price + after[a, 0, b, m])
                        one += good * after[a, 1, b, m] + bad
                        two += good * after[a, 2, b, m] + bad
                        three += good * after[a, QUIET, b, m] + bad
                        last = upto[n, m]
                    row[0, b, n], row[1, b, n], row[2, b, n], row[QUIET, b, n] = one, two, three, three
            for quiet in range(QUIET + 1):
                for b in range(STATES):  # the burst that still lasts: the same one, a window less
                    now = 0 if b == 0 or (b - 1) % LEFT == 0 else b - 1
                    high = 0 if now == 0 else 1 + (now - 1) // LEFT
                    for n in range(cells):
                        new = 0.0
                        for h in range(1, HEIGHTS + 1):
                            new += row[quiet, now if high > h else h * LEFT, n]
                        here[a, quiet, b, n] = (1 - odds) * row[quiet, now, n] + odds * new / HEIGHTS
        if t < day:
            found[t] = here
        if t == day - 1:
            level = after[most, QUIET, 0, cells // 2]
        for a in range(1, most + 1):
            for quiet in range(QUIET + 1):
                lowest, highest = a, min(a + 1, most)
                if quiet == 0:
                    lowest = highest = min(a + 2, most)
                elif quiet == QUIET:
                    lowest = max(1, a - 1)
                for b in range(STATES):
                    for n in range(cells):
                        value = here[lowest, quiet, b, n]
                        for other in range(lowest + 1, highest + 1):
                            value = min(value, here[other, quiet, b, n])
                        after[a, quiet, b, n] = value
    return found, (after[most, QUIET, 0, cells // 2] - level) / day


@numba.njit(cache=True)
def follow(costs, wave, noise, burst, left, most, noises, bursts, start):  # type: ignore[no-untyped-def]
    """Steps in every window of the real demand. `burst`, `left`: in effect in a window, and for how many windows after it."""
    day, gap = len(costs), noises[1] - noises[0]
    windows = len(wave)
    has, quiet = start, QUIET
    path = np.zeros(windows, np.int64)
    for t in range(windows):
        path[t] = has
        wants = wave[t] * max(1 + noise[t], 0.01) * (1 + burst[t])
        quiet = 0 if wants > has else min(quiet + 1, QUIET)
        lowest, highest = has, min(has + 1, most)
        if quiet == 0:
            lowest = highest = min(has + 2, most)
        elif quiet == QUIET:
            lowest = max(1, has - 1)
        state = 0
        if burst[t] > 0:
            height = 1 + np.argmin(np.abs(bursts[1:] - burst[t]))
            state = 1 + (height - 1) * LEFT + left[t]
        at = min(max((noise[t] - noises[0]) / gap, 0.0), len(noises) - 1.000001)
        n, part = int(at), at - int(at)
        chosen, value = lowest, np.inf
        for a in range(lowest, highest + 1):
            c = costs[(t + 1) % day, a, quiet, state]
            this = (1 - part) * c[n] + part * c[n + 1]
            if this < value:
                chosen, value = a, this
        has = chosen
    return path


def path(wave: np.ndarray, noise: np.ndarray, burst: np.ndarray, left: np.ndarray, most: int, price: float) -> tuple[np.ndarray, float]:
    """[windows] of one tenant: steps of the best strategy, from `most` on; and its expected cost of a window by the grids. The first window of
    `wave` is the first of a day."""
    arguments = (NOISES, EDGES, BURSTS, made.NOISE_KEPT, made.NOISE, ODDS)
    costs, value = best(wave[: made.DAY_WINDOWS], most, price, *arguments)
    return follow(costs, wave, noise, burst, left, most, NOISES, BURSTS, most), value
