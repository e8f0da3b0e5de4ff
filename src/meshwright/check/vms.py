"""Placements of machines: was everybody somewhere, from coming to leaving; did every host hold it; are the claimed times and their bound true?

Everything is worked out again from the stays: sums per host in the order of time, in whole billionths of a host. Shares nothing with the planner,
the kernels and the simulator but the types of trace and placement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster.vm_placement import VmPlacement
from ..cluster.vms import VmHosts, VmTrace
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding, Verdict, guarded

__all__ = ["check_vm_placement"]

BILLION = 10**9
TOLERANCE = 1e-9  # of sums of floats, relative
BOUND_TOLERANCE = 1e-6  # by which a bound may round


def check_vm_placement(placement: VmPlacement, trace: VmTrace, hosts: VmHosts) -> Verdict:
    """Findings name machines and hosts. `facts`: host seconds in use and their least, moves, share of empty hosts."""
    facts: dict[str, Any] = {}
    s = _Stays(placement, trace)
    found = guarded("values", lambda: _names(placement, trace, hosts))
    found = found or guarded("values", lambda: [*_covered(placement, trace, s), *_resizes(placement, trace, s)])
    found = found or guarded("values", lambda: _room(placement, trace, hosts, s))
    notes = [] if placement.bound is not None else ["the placement states no bound"]
    if not found:
        found = guarded("values", lambda: _times(placement, trace, hosts, s, facts))
    return Verdict(findings=tuple(found[:MAX_FINDINGS_OF_A_KIND]), facts=facts, notes=tuple(notes))


def _wrong(message: str, **witness: Any) -> Finding:
    return Finding(check="values", message=message, witness=witness)


class _Stays:
    """Columns, by machine and time."""

    def __init__(self, placement: VmPlacement, trace: VmTrace) -> None:
        vm = np.array([s.vm for s in placement.stays], np.int64)
        host = np.array([s.host for s in placement.stays], np.int64)
        begin = np.array([s.from_s for s in placement.stays], np.float64)
        end = np.array([np.inf if s.to_s is None else s.to_s for s in placement.stays], np.float64)
        order = np.lexsort((end, begin, vm))
        self.vm, self.host, self.begin, self.end = vm[order], host[order], begin[order], end[order]
        self.first = np.append(True, self.vm[1:] != self.vm[:-1]) if len(vm) else np.zeros(0, np.bool_)
        self.last = np.append(self.vm[1:] != self.vm[:-1], True) if len(vm) else np.zeros(0, np.bool_)
        self.until_s = trace.until_s
        self.shape = np.zeros(0, np.int64)


def _names(p: VmPlacement, trace: VmTrace, hosts: VmHosts) -> list[Finding]:
    """Numbers that exist, and times."""
    found = []
    counts = np.bincount(hosts.kind, minlength=len(trace.kinds)).tolist()
    if list(p.hosts) != counts or p.trace != trace.name or not trace.since_s <= p.from_s < trace.until_s:
        found.append(_wrong(f"it is of {list(p.hosts)} hosts and {p.trace[:64]!r}, not of {counts} and {trace.name[:64]!r}", hosts=counts))
    n = len(trace)
    found += [_wrong(f"there is no machine {s.vm} or no host {s.host}", vm=s.vm, host=s.host)
              for s in p.stays if not (0 <= s.vm < n and 0 <= s.host < len(hosts))][:MAX_FINDINGS_OF_A_KIND]
    found += [_wrong(f"machine {s.vm} is on host {s.host} from {s.from_s} to {s.to_s} s", vm=s.vm) for s in p.stays
              if not np.isfinite(s.from_s) or (s.to_s is not None and not s.to_s >= s.from_s)][:MAX_FINDINGS_OF_A_KIND]
    found += [_wrong(f"there is no machine {v}", vm=v) for v in p.refused if not 0 <= v < n]
    found += [_wrong(f"there is no resize {r}", resize=r) for r in p.resized if not 0 <= r < len(trace.resizes)]
    return found


def _covered(p: VmPlacement, trace: VmTrace, s: _Stays) -> list[Finding]:
    """Everybody who comes is somewhere without a gap until the end, or refused, and not both."""
    come = (trace.arrival_s <= trace.until_s) & (trace.end_s > np.maximum(trace.arrival_s, trace.since_s))
    placed, refused = np.zeros(len(trace), np.bool_), np.zeros(len(trace), np.bool_)
    placed[s.vm] = True
    refused[list(p.refused)] = True
    found = [_wrong(f"machine {v} is neither somewhere nor refused, or both", vm=int(v)) for v in np.flatnonzero(placed + refused * 1 != come * 1)]
    if found:
        return found
    begin, end = np.maximum(trace.arrival_s[s.vm], trace.since_s), trace.end_s[s.vm]
    end = np.where(end > trace.until_s, np.inf, end)
    joined = np.append(True, s.begin[1:] <= s.end[:-1]) | s.first if len(s.vm) else s.first
    bad = (s.first & (s.begin != begin)) | (s.last & (s.end != end)) | (s.begin < begin) | (s.end > end) | ~joined
    return [_wrong(f"machine {int(s.vm[i])} is not on a host all the time from {begin[i]:g} to {end[i]:g} s",
        vm=int(s.vm[i])) for i in np.flatnonzero(bad)]


def _shapes(p: VmPlacement, trace: VmTrace) -> dict[int, list[tuple[float, int]]]:
    """Of machines with resizes that were done: shapes from a time on."""
    done, found = set(p.resized), dict[int, list[tuple[float, int]]]()
    for number, r in enumerate(sorted(trace.resizes)):
        if number in done:
            found.setdefault(r.vm, [(-np.inf, int(trace.shape[r.vm]))]).append((r.at_s, r.shape))
    return found


def _resizes(p: VmPlacement, trace: VmTrace, s: _Stays) -> list[Finding]:
    """A resize is of a machine that is there, and begins a stay: then sizes are constant within every stay."""
    found = []
    resizes = sorted(trace.resizes)
    for number in p.resized:
        r = resizes[number]
        if not ((s.vm == r.vm) & (s.begin == r.at_s)).any():
            found.append(_wrong(f"resize {number} of machine {r.vm} begins no stay", resize=number))
    return found


def _stay_shapes(p: dict[int, list[tuple[float, int]]], trace: VmTrace, s: _Stays) -> NDArray[np.int64]:
    shape = trace.shape[s.vm].astype(np.int64)
    for i in np.flatnonzero(np.isin(s.vm, list(p))).tolist():
        shape[i] = [to for at_s, to in p[int(s.vm[i])] if at_s <= s.begin[i]][-1]
    return shape


def _room(p: VmPlacement, trace: VmTrace, hosts: VmHosts, s: _Stays) -> list[Finding]:
    """No host holds more than all of it; who leaves at a time makes room for who comes at it."""
    s.shape = _stay_shapes(_shapes(p, trace), trace, s)
    share = trace.size[s.shape, hosts.kind[s.host]]
    takes = np.where(np.isfinite(share), np.floor(np.minimum(np.where(np.isfinite(share), share, 2), 2) * BILLION + 1e-6),
        2 * BILLION).astype(np.int64)
    at_s, host = np.concatenate([s.begin, s.end]), np.concatenate([s.host, s.host])
    sign = np.repeat([1, -1], len(s.vm))
    order = np.lexsort((sign, at_s, host))
    sums = np.cumsum((np.concatenate([takes, takes]) * sign[:, None])[order], 0)  # of a host all comes and goes, so every host begins at 0
    over = (sums > BILLION).any(1)
    return [
        _wrong(f"host {int(host[order[i]])} holds {sums[i].max() / BILLION:.6g} of itself at {at_s[order[i]]:g} s", host=int(host[order[i]]))
        for i in np.flatnonzero(over)[:MAX_FINDINGS_OF_A_KIND]
    ]  # fmt: skip


def _used_s(s: _Stays, from_s: float) -> float:
    """Time of hosts with a machine: of every host the union of its stays."""
    order = np.lexsort((s.begin, s.host))
    begin, end = np.clip(s.begin[order], from_s, s.until_s), np.clip(s.end[order], from_s, s.until_s)
    total, host, reached = 0.0, -1, 0.0
    for h, a, b in zip(s.host[order].tolist(), begin.tolist(), end.tolist(), strict=True):
        if h != host:
            host, reached = h, a
        if b > reached:
            total += b - max(a, reached)
            reached = b
    return total


def _times(p: VmPlacement, trace: VmTrace, hosts: VmHosts, s: _Stays, facts: dict[str, Any]) -> list[Finding]:
    span_s = trace.until_s - p.from_s
    used_s = _used_s(s, p.from_s)
    facts |= {"used_host_s": used_s, "empty_share": 1 - used_s / (span_s * len(hosts)), "moves": int((~s.first).sum())}
    found = []
    if abs(used_s - p.used_host_s) > TOLERANCE * max(1.0, span_s * len(hosts)):
        found.append(_wrong(f"hosts are in use for {used_s:.9g} s, claimed is {p.used_host_s:.9g}", used_host_s=used_s))
    if p.bound is None:
        return found
    least_s = _least_s(p, trace, s)
    facts["least_host_s"] = least_s
    data = p.bound.certificate.data
    if p.bound.certificate.kind != "hosts" or p.bound.unit != "s" or data.get("from_s") != p.from_s or data.get("until_s") != trace.until_s:
        found.append(Finding(check="certificate", message="the bound is of other times", witness={"data": data}))
    elif float(p.bound) > least_s * (1 + BOUND_TOLERANCE) or float(p.bound) > used_s * (1 + BOUND_TOLERANCE):
        text = f"the load proves at least {least_s:.9g} host seconds of {used_s:.9g}, claimed is {float(p.bound):.9g}"
        found.append(Finding(check="certificate", message=text, witness={"value": p.bound.value}))
    return found


def _least_s(p: VmPlacement, trace: VmTrace, s: _Stays) -> float:
    """At every moment as many hosts as the load of the scarcest resource; each machine at its smallest share. Of overlapping stays the earlier
    counts until the next begins."""
    smallest = np.floor(np.minimum(trace.size.min(1), 1) * BILLION + 1e-6).astype(np.int64)[s.shape]
    end = np.where(s.last, s.end, np.append(s.begin[1:], np.inf))
    changes = sorted([(float(a), 1, i) for i, a in enumerate(s.begin)] + [(float(b), 0, i) for i, b in enumerate(end) if b < np.inf])
    load, total, before = np.zeros(smallest.shape[1], np.int64), 0.0, p.from_s
    columns = [list(row) for row in smallest.tolist()]
    held = load.tolist()
    for at_s, come, i in changes:
        now = min(max(at_s, p.from_s), trace.until_s)
        if now > before:
            total += (now - before) * max(-(-x // BILLION) for x in held)
            before = now
        held = [x + y if come else x - y for x, y in zip(held, columns[i], strict=True)]
    return float(total + (trace.until_s - before) * max(-(-x // BILLION) for x in held))
