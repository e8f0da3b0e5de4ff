"""From what was measured to a fabric: hosts, ports, trunks, direct links, latencies; and what the fabric says of every trial.

Ours (no publication): rates come from transfers that ran at once, so that shared ports and trunks are seen and not guessed from pairs; a fabric is
given out only after every trial has been laid against it, along its own routes: no link beyond its rate, every transfer held back by a full one.
A link that no trial filled has the most that was ever seen on it as its rate ("at least").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import CheckFailed, UsageError
from ...fabric.fabric import Fabric
from ...kernels.effort import Budget
from ...kernels.stages import stage
from .build import Nodes, build_direct, build_loopback, build_tree
from .direct import MAX_NODES, DirectFit, fit_direct
from .fair_share import F64, Bools, Fit, MIN_Bps, Trial, errors_of, share
from .measurements import Measurements
from .tree import fit_tree, linkage_sets

__all__ = ["MAX_ERROR_SHARE", "MAX_UNEXPLAINED_SHARE", "Inferred", "TrialCheck", "Trunk", "infer_fabric", "nodes_of", "require_explained", "verify"]

MAX_ERROR_SHARE = 0.10  # of a measured rate by which the fabric may miss it, unless the caller says otherwise
MAX_UNEXPLAINED_SHARE = 0.05  # of the trials that may be missed by more: now and then TCP does not fill its links
UNFINISHED = "time was up before every explanation was tried"  # a note of the fabric that was found
MAX_ROUNDING_ERROR_SHARE = 0.02  # that rounding rates may add to the worst error; else the exact ones are kept


@dataclass(frozen=True)
class TrialCheck:
    """One trial against the fabric: what max-min sharing predicts, and the errors of `fabric_share.errors_of`.

    single: mean relative error of single transfers against max-min; why: what the larger error is about.
    """

    trial: Trial
    held_out: bool
    predicted_Bps: tuple[float, ...]
    overload: float
    slack: float
    single: float
    why: str

    @property
    def error(self) -> float:
        return max(self.overload, self.slack)


@dataclass(frozen=True)
class Trunk:
    """Endpoints behind a shared trunk, and what it lets out and in, bytes/s."""

    members: tuple[int, ...]
    out_Bps: float
    in_Bps: float


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """kind: "tree" (switches), "direct" (links of pairs) or "loopback" (one host). `at_least`: links that no trial filled, `src -> dst`.

    latency_error: largest relative error of a round trip as the fabric's latencies add up (0 where none was measured).
    """

    fabric: Fabric
    kind: str
    trunks: tuple[Trunk, ...]
    checks: tuple[TrialCheck, ...]
    at_least: tuple[str, ...]
    latency_error: float
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> TrialCheck:
        return max(self.checks, key=lambda c: c.error)

    @property
    def worst_held_out(self) -> float | None:
        """None where nothing was held out."""
        return max((c.error for c in self.checks if c.held_out), default=None)

    def stands(self, tolerance: float, most: float = MAX_UNEXPLAINED_SHARE) -> bool:
        """Few trials are not explained, and none of them shows a link beyond its rate (unless all may be unexplained: `most` = 1)."""
        bad = self.unexplained(tolerance)
        return len(bad) <= most * len(self.checks) and (most >= 1 or all(c.overload <= tolerance for c in bad))

    def unexplained(self, tolerance: float) -> tuple[TrialCheck, ...]:
        return tuple(c for c in self.checks if c.error > tolerance)


def verify(fabric: Fabric, measured: Measurements) -> tuple[TrialCheck, ...]:
    """Lay max-min sharing along the fabric's own routes against every trial. Raises: Disconnected, UnknownName (other devices)."""
    actor = [fabric.actor_of[fabric.device(name).name] for name in measured.names]
    capacity = np.array([x.rate_Bps for x in fabric.links], np.float64)
    checks = []
    for trial, held_out in zip(measured.trials, measured.held_out, strict=True):
        crossed, back = np.zeros((2, len(trial.flows), len(capacity)), bool)
        for row, returned, (i, j) in zip(crossed, back, trial.flows, strict=True):
            row[list(fabric.route(actor[i], actor[j]))] = True
            returned[list(fabric.route(actor[j], actor[i]))] = True
        rate, _ = share(crossed, capacity)
        got = np.array(trial.rate_Bps)
        over, slack = errors_of(crossed, crossed | back, capacity, got)
        single = float(np.abs(rate / np.maximum(got, MIN_Bps) - 1).mean())
        why = _why(fabric, measured, trial, crossed, crossed | back, capacity, over >= slack)
        checks.append(TrialCheck(trial, held_out, tuple(rate.tolist()), over, slack, single, why))
    return tuple(checks)


def _why(fabric: Fabric, measured: Measurements, trial: Trial, crossed: Bools, either: Bools, capacity: F64, over: bool) -> str:
    full = (np.array(trial.rate_Bps) @ crossed) / capacity
    if over:
        k = int(np.where(crossed.any(axis=0), full, -1.0).argmax())
        return f"{fabric.links[k].src} -> {fabric.links[k].dst} carried {full[k]:.0%} of its {capacity[k] / 1e6:.4g} MB/s"
    fullest = np.where(either, full, 0.0).max(axis=1)
    f = int(fullest.argmin())
    i, j = trial.flows[f]
    way = f"{measured.names[i]} -> {measured.names[j]}"
    return f"{way} had {trial.rate_Bps[f] / 1e6:.4g} MB/s, though no link on its way or back was more than {fullest[f]:.0%} full"


def require_explained(found: Inferred, names: Sequence[str], tolerance: float, most: float = MAX_UNEXPLAINED_SHARE) -> None:
    """Raise CheckFailed, naming the worst trial, if more than `most` of the trials are not explained, or one by which a link is beyond its rate."""
    bad = found.unexplained(tolerance)
    if found.stands(tolerance, most):
        return
    worst = max(bad, key=lambda c: c.error)
    flows = [f"{names[i]} -> {names[j]}" for i, j in worst.trial.flows]
    raise CheckFailed(
        f"the best {found.kind} fabric does not explain {len(bad)} of {len(found.checks)} trials within {tolerance:.0%}; the worst, "
        f"{worst.trial.kind} of {len(flows)} transfers, is off by {worst.error:.0%}: {worst.why}",
        hint="was the network busy, or is it neither a tree nor direct links? probe again, or raise --tolerance or --unexplained",
        data={
            "trial": worst.trial.kind, "flows": flows[:64], "measured_Bps": list(worst.trial.rate_Bps[:64]),
            "predicted_Bps": list(worst.predicted_Bps[:64]), "error": worst.error, "unexplained": len(bad), "trials": len(found.checks),
        },
    )  # fmt: skip


def nodes_of(measured: Measurements) -> Nodes:
    """Endpoints by host, in order of each host's first endpoint."""
    number: dict[str, int] = {}
    node = tuple(number.setdefault(h, len(number)) for h in measured.host)
    return Nodes(names=measured.names, hosts=tuple(number), node=node)


@stage("inferring the fabric from the trials")
def infer_fabric(measured: Measurements, *, name: str = "probed", tolerance: float = MAX_ERROR_SHARE, time_limit_s: float = 60.0) -> Inferred:
    """The fabric that explains the trials that are not held out, judged on all of them. Whether that is well enough: `require_explained`.

    Raises: UsageError (no trial, a host that never sent or received).
    """
    until = Budget(1, time_limit_s=time_limit_s)  # the net; both searches count what they try
    nodes = nodes_of(measured)
    n = len(nodes.hosts)
    rtt = _between_nodes(measured, nodes)
    loopback = _loopback(measured, nodes)
    if n == 1:
        return _judged(measured, build_loopback(nodes, loopback, name, measured), "loopback", (), (), rtt, nodes)
    trials = _node_trials(measured.fitted(), nodes)
    for what, end in (("sent", 0), ("received", 1)):
        missing = set(range(n)) - {f[end] for t in trials for f in t.flows}
        if missing:
            text = f"host {nodes.hosts[min(missing)]} never {what} anything in the trials"
            raise UsageError(text, where="measurements", hint="add a transfer in each direction")
    hints = linkage_sets(rtt) if n > 3 and (rtt[~np.eye(n, dtype=bool)] > 0).all() else []
    with until.net():
        tree, splits = fit_tree(trials, n, tolerance=tolerance, hints=hints)
    direct = None
    together = any(len(t.flows) > 1 for t in trials)
    if n == 2 or (together and n <= MAX_NODES and (tree.worst > tolerance / 2 or len(splits) >= n - 3)):
        rival = tree.loss if len(splits) < n - 3 else float("inf")
        with until.net():
            direct = fit_direct(trials, n, tolerance=tolerance, rival=rival)
    unfinished = (UNFINISHED,) if until.cut else ()
    if direct is not None and _is_direct(tree, direct, n, tolerance):
        built = [build_direct(nodes, direct, rtt, loopback, name, measured, exact=exact) for exact in (False, True)]
        return _chosen(*(_judged(measured, f, "direct", (), _loose(direct.fit, links), rtt, nodes, unfinished) for f, links in built))
    notes: tuple[str, ...] = () if together else ("no transfers ran at once: links that pairs share are a guess (the least that explains the rates)",)
    notes += unfinished
    found = []
    for exact in (False, True):
        fabric, links = build_tree(nodes, tree.capacity_Bps, splits, rtt, loopback, name, measured, exact=exact)
        trunks = tuple(_trunk(nodes, s, tree, 2 * n + 2 * k) for k, s in enumerate(splits))
        found.append(_judged(measured, fabric, "tree", trunks, _loose(tree, links), rtt, nodes, notes))
    return _chosen(*found)


def _chosen(rounded: Inferred, exact: Inferred) -> Inferred:
    """Rounded rates (equal where they are within noise) are preferred while they explain about as much."""
    return rounded if rounded.worst.error <= max(MAX_ERROR_SHARE / 2, exact.worst.error + MAX_ROUNDING_ERROR_SHARE) else exact


def _is_direct(tree: Fit, direct: DirectFit, n: int, tolerance: float) -> bool:
    """Within the tolerance the fabric with fewer links, else the one that explains more."""
    good = [x.worst <= tolerance for x in (tree, direct.fit)]
    if all(good):
        return n == 2 or len(direct.fit.capacity_Bps) < len(tree.capacity_Bps)
    return good[1] if any(good) else direct.fit.loss < tree.loss


def _trunk(nodes: Nodes, inside: Bools, fit: Fit, link: int) -> Trunk:
    """The smaller side of a split."""
    out, back = float(fit.capacity_Bps[link]), float(fit.capacity_Bps[link + 1])
    if 2 * inside.sum() > len(inside):
        inside, out, back = ~inside, back, out
    return Trunk(tuple(i for i, h in enumerate(nodes.node) if inside[h]), out, back)


def _loose(fit: Fit, links: Sequence[str]) -> tuple[str, ...]:
    """Names of the fitted links that never held anything back."""
    return tuple(link for link, tight in zip(links, fit.tight, strict=True) if link and not tight)


def _judged(
    measured: Measurements, fabric: Fabric, kind: str, trunks: tuple[Trunk, ...], at_least: tuple[str, ...], rtt: F64, nodes: Nodes,
    notes: tuple[str, ...] = (),
) -> Inferred:  # fmt: skip
    return Inferred(
        fabric=fabric, kind=kind, trunks=trunks, checks=verify(fabric, measured), at_least=at_least, notes=notes,
        latency_error=_latency_error(fabric, nodes, rtt),
    )  # fmt: skip


def _latency_error(fabric: Fabric, nodes: Nodes, rtt: F64) -> float:
    worst, first = 0.0, nodes.firsts
    for a in range(len(rtt)):
        for b in range(len(rtt)):
            if a != b and rtt[a, b] > 0:
                ends = [fabric.actor_of[nodes.names[first[x]]] for x in (a, b)]
                ways = (fabric.route(ends[0], ends[1]), fabric.route(ends[1], ends[0]))
                worst = max(worst, abs(sum(fabric.links[x].latency_s for way in ways for x in way) / float(rtt[a, b]) - 1))
    return worst


def _between_nodes(measured: Measurements, nodes: Nodes) -> F64:
    """Least round trip between two hosts, 0 where none was measured."""
    n = len(nodes.hosts)
    rtt = np.full((n, n), np.inf)
    for i, a in enumerate(nodes.node):
        for j, b in enumerate(nodes.node):
            if a != b and measured.rtt_s[i, j] > 0:
                rtt[a, b] = rtt[b, a] = min(rtt[a, b], float(measured.rtt_s[i, j]))
    return np.where(np.isfinite(rtt), rtt, 0.0)


def _loopback(measured: Measurements, nodes: Nodes) -> dict[int, tuple[float, float]]:
    """Per host with several endpoints: (rate of a pair on it by itself, one-way latency)."""
    found: dict[int, tuple[float, float]] = {}
    for trial in measured.fitted():
        (i, j), rate = trial.flows[0], trial.rate_Bps[0]
        if len(trial.flows) == 1 and nodes.node[i] == nodes.node[j]:
            half = float(measured.rtt_s[i, j]) / 2
            before = found.get(nodes.node[i], (0.0, half))
            found[nodes.node[i]] = (max(before[0], rate), min(before[1], half))
    return found


def _node_trials(trials: Sequence[Trial], nodes: Nodes) -> list[Trial]:
    """Between hosts; transfers on one host are left out, they cross no link between hosts."""
    out = []
    for trial in trials:
        kept = [((nodes.node[i], nodes.node[j]), r) for (i, j), r in zip(trial.flows, trial.rate_Bps, strict=True) if nodes.node[i] != nodes.node[j]]
        if kept:
            out.append(Trial(trial.kind, tuple(f for f, _ in kept), tuple(r for _, r in kept)))
    return out
