"""Allocations: does everybody have what is said, once, within every server; does everybody keep the floor; and does the bound hold?

Speeds are read off the profiles here again, linear between points and 0 below the first. A gang is as fast as its slowest part. The floor of a
part with n of a server's GPUs is its speed with n shares of the server's cores and memory, rounded down to whole cores. Shares nothing
with the planner but the types of job, server and allocation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..bound import Bound
from ..cluster.allocation import Allocation, Given
from ..cluster.queue import Queue, QueuedJob
from ..cluster.sensitivity import Sensitivity
from ..cluster.servers import Server, Servers
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding, Verdict, guarded

__all__ = ["check_allocation", "check_speed_bound"]

THIRDS = 3  # of a GPU's share of the memory, in which memory is given out
TOLERANCE = 1e-9  # of sums of floats, relative
BOUND_TOLERANCE = 1e-7  # by which a bound may round
GB = 1e9


def check_allocation(allocation: Allocation, servers: Servers, queue: Queue) -> Verdict:
    """Findings name jobs and servers. `facts`: the speed, and the least speed over floor of any job."""
    facts: dict[str, Any] = {}
    found = guarded("values", lambda: _given(allocation, servers, queue))
    if not found:
        found += guarded("values", lambda: _speeds(allocation, servers, queue, facts))
    notes = []
    if allocation.bound is None:
        notes.append("the allocation states no bound")
    elif not found:
        found += guarded("certificate", lambda: check_speed_bound(allocation, servers, queue))
    return Verdict(findings=tuple(found), facts=facts, notes=tuple(notes))


def _wrong(message: str, **witness: Any) -> Finding:
    return Finding(check="values", message=message, witness=witness)


def _given(a: Allocation, servers: Servers, queue: Queue) -> list[Finding]:
    """Names, whole gangs, capacities."""
    jobs, hosts = {j.name: j for j in queue.jobs}, {s.name: s for s in servers.servers}
    found = [_wrong(f"there is no job {name[:64]}", job=name) for name in (*a.order, *a.waiting) if name not in jobs]
    found += [_wrong(f"job {name} is listed {n} times", job=name) for name, n in Counter((*a.order, *a.waiting)).items() if n > 1]
    found += [_wrong(f"job {g.job[:64]} has something and is not said to run", job=g.job) for g in a.given if g.job not in set(a.order)]
    found += [_wrong(f"there is no server {g.server[:64]}", server=g.server) for g in a.given if g.server not in hosts]
    if found:
        return found[:MAX_FINDINGS_OF_A_KIND]
    of_job: dict[str, list[Given]] = {name: [] for name in a.order}
    of_server: dict[str, list[Given]] = {}
    for g in a.given:
        of_job[g.job].append(g)
        of_server.setdefault(g.server, []).append(g)
    for name, parts in of_job.items():
        found += _gang(jobs[name], parts, hosts)
    for name, parts in of_server.items():
        found += _capacity(hosts[name], parts)
    return found[:MAX_FINDINGS_OF_A_KIND]


def _gang(job: QueuedJob, parts: list[Given], hosts: Mapping[str, Server]) -> Iterable[Finding]:
    has = sum(len(g.gpus) for g in parts)
    if has != job.gpus:
        yield _wrong(f"job {job.name} wants {job.gpus} GPUs and has {has}", job=job.name)
    if len({g.server for g in parts}) < len(parts):
        yield _wrong(f"job {job.name} has two parts on one server", job=job.name)
    if job.together and len(parts) > 1:
        yield _wrong(f"job {job.name} must be on one server and is on {len(parts)}", job=job.name)
    for g in parts:
        if job.types and hosts[g.server].type not in job.types:
            yield _wrong(f"job {job.name} may not have GPUs of type {hosts[g.server].type}", job=job.name, server=g.server)
        if not g.gpus or g.cores < 1 or g.memory_bytes < 1:
            yield _wrong(f"job {job.name} has a part without GPUs, cores or memory on {g.server}", job=job.name, server=g.server)


def _capacity(server: Server, parts: list[Given]) -> Iterable[Finding]:
    for gpu, times in Counter(x for g in parts for x in g.gpus).items():
        if gpu not in server.gpus or times > 1:
            what = f"is given {times} times" if gpu in server.gpus else "does not exist"
            yield _wrong(f"GPU {gpu[:64]} of server {server.name} {what}", server=server.name, gpu=gpu)
    for what, used, there in (
        ("cores", sum(g.cores for g in parts), server.cores), ("bytes of memory", sum(g.memory_bytes for g in parts), server.memory_bytes),
    ):  # fmt: skip
        if used > there:
            yield _wrong(f"server {server.name} has {there} {what}, {used} are given", server=server.name, used=used)


def _speed(profile: Sensitivity, kind: str, cores: float, memory_bytes: float) -> float:
    """Per GPU; bilinear."""
    if cores < profile.cores[0] * (1 - TOLERANCE) or memory_bytes < profile.memory_bytes[0] * (1 - TOLERANCE):
        return 0.0
    low, share = _between(profile.cores, cores)
    column, part = _between(profile.memory_bytes, memory_bytes)

    def row(i: int) -> float:
        values = profile.speed[i]
        return values[column] if not part else values[column] * (1 - part) + values[column + 1] * part

    return profile.types.get(kind, 1.0) * (row(low) if not share else row(low) * (1 - share) + row(low + 1) * share)


def _between(axis: tuple[Any, ...], x: float) -> tuple[int, float]:
    """The point below x, and how far x is on the way to the next one."""
    at = max(0, bisect_right(axis, x) - 1)
    return (at, 0.0) if at == len(axis) - 1 else (at, max(0.0, (x - axis[at]) / (axis[at + 1] - axis[at])))


def _floor(profile: Sensitivity, server: Server, gpus: int) -> float:
    cores, memory = gpus * server.cores // len(server.gpus), gpus * server.memory_bytes // len(server.gpus)
    return _speed(profile, server.type, cores / gpus, memory / gpus)


def _speeds(a: Allocation, servers: Servers, queue: Queue, facts: dict[str, Any]) -> list[Finding]:
    """Everybody at the floor at least, and the sum as claimed."""
    jobs, hosts = {j.name: j for j in queue.jobs}, {s.name: s for s in servers.servers}
    profiles = {p.name: p for p in queue.profiles}
    speed, floor = dict.fromkeys(a.order, np.inf), dict.fromkeys(a.order, np.inf)
    for g in a.given:
        profile, host, n = profiles[jobs[g.job].profile], hosts[g.server], len(g.gpus)
        speed[g.job] = min(speed[g.job], _speed(profile, host.type, g.cores / n, g.memory_bytes / n))
        floor[g.job] = min(floor[g.job], _floor(profile, host, n))
    found = [
        _wrong(f"job {name} runs at {speed[name]:.6g}, below its floor of {floor[name]:.6g}", job=name, speed=speed[name], floor=floor[name])
        for name in a.order if speed[name] < floor[name] * (1 - TOLERANCE)
    ]  # fmt: skip
    total = sum(jobs[name].gpus * speed[name] for name in a.order)
    if abs(total - a.speed) > TOLERANCE * max(1.0, total):
        found.append(_wrong(f"the speeds add up to {total:.9g}, claimed is {a.speed:.9g}", speed=total))
    facts |= {"speed": total, "least_over_floor": min((speed[x] / floor[x] for x in a.order if floor[x] > 0), default=1.0)}
    return found[:MAX_FINDINGS_OF_A_KIND]


def check_speed_bound(a: Allocation, servers: Servers, queue: Queue) -> list[Finding]:
    """The certificate's prices, with the running jobs and the servers at hand, give at most what is claimed."""
    bound = a.bound
    assert bound is not None
    try:
        proved = _by_prices(bound, a, servers, queue) if bound.certificate.kind == "prices" else _by_fillings(bound, a, servers, queue)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        text = f"the bound on the speed lacks or mangles {error}"
        return [Finding(check="certificate", message=text, witness={"kind": bound.certificate.kind})]
    if bound.unit != "GPUs" or not bound.quantity.startswith("speed") or float(bound) < proved * (1 - BOUND_TOLERANCE):
        text = f"the certificate proves that the speed is at most {proved:.9g}, claimed is {float(bound):.9g} {bound.unit}"
        return [Finding(check="certificate", message=text, witness={"value": bound.value})]
    if a.speed > float(bound) * (1 + BOUND_TOLERANCE):
        text = f"the speed {a.speed:.9g} is above the bound {float(bound):.9g}"
        return [Finding(check="certificate", message=text, witness={"value": bound.value})]
    return []


def _kinds(servers: Servers) -> dict[tuple[int, int, int, str], list[Server]]:
    found: dict[tuple[int, int, int, str], list[Server]] = {}
    for s in servers.servers:
        found.setdefault((len(s.gpus), s.cores, s.memory_bytes, s.type), []).append(s)
    return found


def _prices(values: Any, count: int) -> list[float]:
    found = [float(x) for x in values]
    if len(found) != count or not all(np.isfinite(x) and x >= 0 for x in found):
        raise ValueError("prices")
    return found


def _by_prices(bound: Bound, a: Allocation, servers: Servers, queue: Queue) -> float:
    """Any prices >= 0: what servers have is worth so much; what a GPU of a job adds beyond what it pays is at most its best measured point's."""
    data, kinds = bound.certificate.data, _kinds(servers)
    listed = [(int(g), int(c), int(m), str(t)) for g, c, m, t in data["kinds"]]
    if set(listed) != set(kinds) or len(listed) != len(kinds):
        raise ValueError("kinds")
    gpu, core, gb = (_prices(data[name], len(listed)) for name in ("gpu", "core", "gb"))
    mu = {(str(p), tuple(types), int(t)): _prices([x], 1)[0] for p, types, t, x in data["floors"]}
    total = sum(
        len(kinds[k]) * (k[0] * gpu[t] + k[1] * core[t] + k[2] / GB * gb[t]) for t, k in enumerate(listed)
    )  # fmt: skip
    jobs, profiles = {j.name: j for j in queue.jobs}, {p.name: p for p in queue.profiles}
    for name in a.order:
        job, best = jobs[name], -np.inf
        profile = profiles[job.profile]
        for t, k in enumerate(listed):
            if job.types and k[3] not in job.types:
                continue
            floor, extra = _floor(profile, kinds[k][0], 1), mu.get((job.profile, job.types, t), 0.0)
            w = profile.types.get(k[3], 1.0) * np.array(profile.speed)
            pays = gpu[t] + core[t] * np.array(profile.cores)[:, None] + gb[t] * np.array(profile.memory_bytes)[None, :] / GB
            best = max(best, float((w + extra * (w - floor) - pays).max()))
        total += job.gpus * best
    return total


def _by_fillings(bound: Bound, a: Allocation, servers: Servers, queue: Queue) -> float:
    """Every job on one server: any prices of jobs, and what the best filling of each server gains beyond them."""
    jobs, profiles = {j.name: j for j in queue.jobs}, {p.name: p for p in queue.profiles}
    price = {(str(p), int(g), tuple(types)): float(x) for p, g, types, x in bound.certificate.data["jobs"]}
    held = {g.job: 0 for g in a.given}
    for g in a.given:
        held[g.job] += 1
    if not bound.quantity.endswith("every job on one server") or any(n > 1 for n in held.values()) or not all(map(np.isfinite, price.values())):
        raise ValueError("jobs on several servers, or prices")
    total, classes = 0.0, set()
    for name in a.order:
        job = jobs[name]
        classes.add((job.profile, job.gpus, job.types))
        total += price[job.profile, job.gpus, job.types]
    for kind, members in _kinds(servers).items():
        total += len(members) * _best_filling(members[0], kind, [(profiles[p], g, price[p, g, types]) for p, g, types in sorted(classes)
                                                                 if not types or kind[3] in types])  # fmt: skip
    return total


def _best_filling(server: Server, kind: tuple[int, int, int, str], items: list[tuple[Sensitivity, int, float]]) -> float:
    """`best[g][c, u]`: the most that jobs of at most g GPUs gain beyond their prices with c cores and u steps."""
    gpus, cores, memory, kind_type = kind
    steps = THIRDS * gpus
    options: list[tuple[int, int, int, float]] = []
    for profile, n, price in items:
        if n > gpus:
            continue
        floor, seen = _floor(profile, server, n), np.full((cores + 1, steps + 1), -np.inf)
        for c in range(1, cores + 1):
            for u in range(1, steps + 1):
                w = _speed(profile, kind_type, c / n, u * memory // steps / n)
                before = max(seen[c - 1, u], seen[c, u - 1])
                seen[c, u] = max(before, w if w >= floor * (1 - TOLERANCE) else -np.inf)
                if seen[c, u] > before:
                    options.append((n, c, u, n * w - price))
    best = [np.zeros((cores + 1, steps + 1))]
    for g in range(1, gpus + 1):
        here = best[-1].copy()
        for n, c, u, gain in options:
            if n <= g:
                np.maximum(here[c:, u:], best[g - n][: cores + 1 - c, : steps + 1 - u] + gain, out=here[c:, u:])
        best.append(here)
    return float(best[-1][-1, -1])
