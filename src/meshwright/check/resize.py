"""Logs of resizing: is every allocation within its limits, does every mask follow from the rules, do propensities and totals add up?

Masks are worked out here again, tenant by tenant, from what the log says was seen. Shares nothing with the planner but the records of the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ..cluster.resize import ACTIONS, ResizeLog, Window
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding, Verdict, guarded

__all__ = ["check_resize_log"]

TOLERANCE = 1e-9  # of sums of floats, relative


def check_resize_log(log: ResizeLog) -> Verdict:
    """Findings name window and tenant. `facts`: hours of units, violations, windows, and times that a smaller limit was refused."""
    facts: dict[str, Any] = {}
    found = guarded("format", lambda: _some(_shapes(log)))
    if not found:
        found += guarded("values", lambda: _some(_rows(log)))
        found += guarded("values", lambda: _some(_masks(log)))
        found += guarded("values", lambda: _some(_chain(log, facts)))
        found += guarded("values", lambda: _some(_total(log, facts)))
    notes = () if log.total is not None else ("the log states no total: the run did not come to its end",)
    return Verdict(findings=tuple(found), facts=facts, notes=notes)


def _some(findings: Iterator[Finding]) -> Iterable[Finding]:
    return [f for f, _ in zip(findings, range(MAX_FINDINGS_OF_A_KIND), strict=False)]


def _wrong(message: str, window: Window | None = None, tenant: str = "", check: str = "values") -> Finding:
    witness: dict[str, Any] = {} if window is None else {"window": window.window}
    return Finding(check=check, message=message, witness=witness | ({"tenant": tenant} if tenant else {}))


def _shapes(log: ResizeLog) -> Iterator[Finding]:
    n = len(log.tenants.names)
    for number, row in enumerate(log.windows):
        if row.window != log.windows[0].window + number:
            yield _wrong(f"window {row.window} does not follow the one before", row, check="format")
        columns = (row.before, row.used, row.violated, row.allowed, row.propensity, row.chosen)
        if any(len(c) != n for c in columns) or any(len(p) != len(ACTIONS) for p in row.propensity):
            yield _wrong(f"not one entry for each of {n} tenants, or not {len(ACTIONS)} propensities", row, check="format")
        elif not all(0 <= k < len(ACTIONS) for k in row.chosen) or not all(math.isfinite(u) and u >= 0 for u in row.used):
            yield _wrong("an action or a use that cannot be", row, check="format")


def _rows(log: ResizeLog) -> Iterator[Finding]:
    tenants, explore = log.tenants, log.rules.explore
    for row in log.windows:
        for i, name in enumerate(tenants.names):
            if not tenants.least[i] <= row.before[i] <= tenants.most[i]:
                yield _wrong(f"{name} has {row.before[i]} steps, allowed are {tenants.least[i]} to {tenants.most[i]}", row, name)
            chances = row.propensity[i]
            if min(chances) < 0 or abs(sum(chances) - 1) > TOLERANCE:
                yield _wrong(f"propensities of {name} add up to {sum(chances):.6g}", row, name)
            if any(p > 0 and not row.allowed[i] >> k & 1 for k, p in enumerate(chances)):
                yield _wrong(f"{name}: an action that is not allowed has a propensity", row, name)
            if chances[row.chosen[i]] <= 0:
                yield _wrong(f"{name}: the action that was taken has no propensity", row, name)
            spare = 0.0 if tenants.critical and tenants.critical[i] else explore
            if max(chances) < 1 - spare - TOLERANCE:
                yield _wrong(f"{name} is explored with {1 - max(chances):.4g}, {spare:g} is allowed", row, name)
        for node, there in _by_node(log):
            if tenants.capacity and sum(row.before[i] for i in there) > tenants.capacity[node]:
                yield _wrong(f"node {node} has {tenants.capacity[node]} steps, more are given", row)


def _by_node(log: ResizeLog) -> list[tuple[int, list[int]]]:
    node = log.tenants.node or (0,) * len(log.tenants.names)
    return [(k, [i for i, there in enumerate(node) if there == k]) for k in range(max(node) + 1)]


def _masks(log: ResizeLog) -> Iterator[Finding]:
    tenants, rules = log.tenants, log.rules
    for number, row in enumerate(log.windows):
        growth = _growth(log, row)
        back = log.windows[max(0, number - rules.calm_windows) : number + 1]
        held = log.windows[max(0, number - rules.hold_windows + 1) : number + 1] if rules.hold_windows else ()
        for i, name in enumerate(tenants.names):
            must = min(growth[i], rules.recover_steps) if row.violated[i] else 0
            if must:
                actions = {must}
            else:
                actions = {0} | ({1} if growth[i] else set())
                kept = max((w.used[i] for w in held), default=0.0) * rules.hold_share
                if row.before[i] > tenants.least[i] and not any(w.violated[i] for w in back) and row.before[i] - 1 >= kept:
                    actions.add(-1)
            said = {a for k, a in enumerate(ACTIONS) if row.allowed[i] >> k & 1}
            if said != actions or row.allowed[i] >> len(ACTIONS):
                yield _wrong(f"{name}: the rules allow {sorted(actions)}, the log says {sorted(said)}", row, name)


def _growth(log: ResizeLog, row: Window) -> list[int]:
    """Steps by which each tenant may grow: up to its limit, and in turn what its node has left: the violated first, then the fullest."""
    tenants = log.tenants
    wish = [min(tenants.most[i] - b, max(1, log.rules.recover_steps) if row.violated[i] else 1) for i, b in enumerate(row.before)]
    if not tenants.capacity:
        return wish
    for node, there in _by_node(log):
        left = max(0, tenants.capacity[node] - sum(row.before[i] for i in there))
        for i in sorted(there, key=lambda i: (not row.violated[i], -row.used[i] / row.before[i], i)):
            wish[i] = min(wish[i], left)
            left -= wish[i]
    return wish


def _chain(log: ResizeLog, facts: dict[str, Any]) -> Iterator[Finding]:
    facts["refused"] = 0
    for row, after in zip(log.windows, log.windows[1:], strict=False):
        for i, name in enumerate(log.tenants.names):
            step = ACTIONS[row.chosen[i]]
            if step < 0 and after.before[i] == row.before[i]:
                facts["refused"] += 1  # memory that could not be taken back
            elif after.before[i] != row.before[i] + step:
                yield _wrong(f"{name} has {row.before[i]} steps, gets {step:+d}, and has {after.before[i]} then", after, name)


def _total(log: ResizeLog, facts: dict[str, Any]) -> Iterator[Finding]:
    hours = sum(sum(row.before) for row in log.windows) * log.tenants.unit * log.tenants.window_s / 3600
    violations, windows = sum(sum(row.violated) for row in log.windows), len(log.windows) * len(log.tenants.names)
    facts |= {"unit_hours": hours, "violations": violations, "windows": windows}
    if log.total is not None:
        if abs(log.total.unit_hours - hours) > TOLERANCE * max(hours, 1.0):
            yield _wrong(f"the total says {log.total.unit_hours:.9g} hours of units, the rows {hours:.9g}")
        if (log.total.violations, log.total.windows) != (violations, windows):
            yield _wrong(f"the total says {log.total.violations} violations in {log.total.windows}, the rows {violations} in {windows}")
