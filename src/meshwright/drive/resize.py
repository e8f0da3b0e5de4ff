"""Resizing composed: a strategy under the rules in virtual time, what it learned for another job, and what another would have earned on a log."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster.resize import ACTIONS, ResizeLog, Rules, Tenants
from ..decide.cluster.resize import Prior, Resizer, ResizeStrategy
from ..decide.cluster.resize.model import Regression, Watched
from ..errors import UsageError
from ..kernels.offpolicy import MIN_PROPENSITY, Estimate, off_policy
from ..simulate.resize import ResizeRun, simulate_resizing

__all__ = ["Evaluated", "Resized", "evaluate_log", "resize_simulated"]


@dataclass(frozen=True, kw_only=True)
class Resized:
    """`log`: where it was recorded. `prior`: what a learner has to give."""

    run: ResizeRun
    log: ResizeLog | None
    prior: Prior | None


def resize_simulated(
    tenants: Tenants, demand: NDArray[np.float64], strategy: ResizeStrategy, *, rules: Rules | None = None, seed: int = 0, prior: Prior | None = None,
    start: NDArray[np.int64] | None = None, record: bool = False,
) -> Resized:  # fmt: skip
    """`demand`: [windows, tenants] in steps. A recorded run is checked. Raises: UsageError, CheckFailed."""
    from ..check.resize import check_resize_log

    rules = rules or Rules()
    policy = strategy.plan(tenants, rules, prior=prior)
    run = simulate_resizing(tenants, demand, Resizer(tenants, rules, policy, seed=seed), start=start, ahead=strategy.ahead, record=record)
    log = None
    if record:
        log = ResizeLog(tenants=tenants, rules=rules, strategy=strategy.name, options=asdict(strategy), seed=seed, windows=run.windows,  # type: ignore[call-overload]
            total=run.total())  # fmt: skip
        check_resize_log(log).raise_if_wrong()
    return Resized(run=run, log=log, prior=policy.prior() if strategy.learns else None)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Mean reward per tenant and window, -waste x steps - violation: of the log, and estimates for another strategy. `rows` of `of` count: those
    where the log could have taken every action that the other strategy would take."""

    logged: float
    estimates: tuple[Estimate, ...]
    rows: int
    of: int


def evaluate_log(log: ResizeLog, strategy: ResizeStrategy, *, waste: float = 0.001) -> Evaluated:
    """The other strategy sees the log's windows and learns from them; its probabilities are laid beside the log's.

    Raises: UsageError for a log without a row that says something of it, Unsupported as the strategy does."""
    policy = strategy.plan(log.tenants, log.rules)
    watched, model = Watched(log.tenants, log.rules), Regression()
    steps = np.array(ACTIONS, np.int64)
    columns: list[list[NDArray[np.float64]]] = []
    of = 0
    for row, after in zip(log.windows, log.windows[1:], strict=False):
        seen, then = row.seen(), after.seen()
        allowed = (np.array(row.allowed)[:, None] >> np.arange(len(ACTIONS)) & 1).astype(np.bool_)
        propensity, chosen = np.array(row.propensity), np.array(row.chosen)
        if (known := watched.outcome(seen)) is not None:
            model.add(known[0].at, known[0].part, known[1])
            model.fit()
        watched.forecast(seen)
        rows = watched.actions(seen)
        guess = -waste * (seen.before[:, None] + steps) - np.clip(model.at(rows.at, rows.part)[0], 0, 1)
        target = policy.probabilities(seen, allowed)
        reward = -waste * then.before - then.violated
        counts = ((target == 0) | (propensity >= MIN_PROPENSITY * (1 - 1e-9))).all(1)
        at = np.arange(len(chosen))
        found = (reward, propensity[at, chosen], target[at, chosen], guess[at, chosen], (target * guess).sum(1))
        columns.append([c[counts] for c in found])
        of += len(counts)
    if not columns or not sum(len(c[0]) for c in columns):
        raise UsageError(f"{len(log.windows)} windows say nothing of {strategy.name}", where="log",
            hint="log with squarecb or doubly-robust, for longer")
    joined = [np.concatenate(c) for c in zip(*columns, strict=True)]
    return Evaluated(logged=float(joined[0].mean()), estimates=off_policy(*joined), rows=len(joined[0]), of=of)
