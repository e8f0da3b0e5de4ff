"""Two lower bounds on a step: one for every layout of a layer table on these devices, one for the family of a given layout.

universal: every layer at the best efficiency that it has anywhere in the table (micro-batch, degree), on all devices at once, layers divided over
    unlike kinds as fits best; on one kind, together with the way of a micro-batch through all layers and back; and, unless one server alone could
    be that fast, what must cross between servers. A server either holds a whole copy of the model, and receives its gradients or weights, or every
    sample crosses a border between layers forward and backward. Memory: the least state of all layers against all memory.
family: the layouts with the same devices in every stage, the same tensor degrees (also those of single layers inside a group), micro-batch and
    sharding levels, over all ways to divide layers, to recompute, and to share micro-batches over pipelines. In 1F1B stage s has its first
    backward only after the first micro-batch passed the stages before it, and ends before their last backwards; with x_s seconds a micro-batch,
    messages h and a tail of r seconds per second of x_s (gradients, update) a step takes at least sum over k < s of (x_k + 2 h) + (m + r) x_s.
    Filling every stage greedily shows how much work a pipeline does in T; T is found by bisection. Tensor-parallel collectives are part of x.
    With another schedule a stage may have a small piece early in the model: then its own m x_s and its tail are counted, and `schedule_bounds`.
Both hold for every layout that `predict` simulates (up to the rounding of message sizes to bytes); the tests try to beat them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....profile.layer_profile import Entry
from ....profile.layer_table import LayerChoice
from ....profile.network import Replica
from .candidate import Candidate, Problem
from .schedule_bounds import fastest_Bps, least_ring, path_s, tail_s, work_s

__all__ = ["LayoutBounds", "family_bound_s", "layout_bounds", "universal_bound"]

F64 = NDArray[np.float64]
# Steps of the multiplicative weights: every one of them gives a valid bound, the best of all is kept.
DUAL_STEPS = 120
WEIGHT_STEPS = 40  # thirds of a weight between two bounds: every weight gives a valid one


@dataclass(frozen=True, kw_only=True)
class LayoutBounds:
    """Gaps are shares of the step that the bound does not explain: 1 - bound / time."""

    universal_s: float
    universal: dict[str, Any]
    family_s: float
    family: str

    def gaps(self, time_s: float) -> tuple[float, float]:
        return 1 - self.universal_s / time_s, 1 - self.family_s / time_s


def layout_bounds(problem: Problem, candidate: Candidate) -> LayoutBounds:
    value, parts = universal_bound(problem)
    layout = candidate.layout
    tensors = "/".join(str(t) for t in sorted({r.tensor for s in layout.stages for r in s.replicas}))
    levels = "/".join(str(x) for x in sorted({c.sharding for c in candidate.choices}))
    what = f"{layout.data} pipelines of {len(layout.stages)} stages, tensor degree {tensors}, micro-batch {layout.microbatch}, sharding {levels}"
    return LayoutBounds(universal_s=value, universal=parts, family_s=max(value, family_bound_s(problem, candidate)), family=what)


# ---- universal ---------------------------------------------------------------------------------------------------------
def least_device_s(problem: Problem) -> dict[str, F64]:
    """Device-seconds of every layer for one sample, per kind of device, that no entry of the table goes below; collectives are part of an entry."""
    found: dict[str, F64] = {}
    for entry, context, rows in problem.table.every():
        each = np.array([r.forward_s + r.backward_s for r in rows]) * (entry.tensor * context / entry.microbatch)
        found[entry.device] = np.minimum(found[entry.device], each) if entry.device in found else each
    return found


def universal_bound(problem: Problem) -> tuple[float, dict[str, Any]]:
    """(seconds, its parts). No layout of the table on these pools takes less; where memory is short even when shared by all, infinity."""
    table, least = problem.table, least_device_s(problem)
    flops = _least_flops(problem) * problem.global_batch
    compute = problem.global_batch * _shared_s(problem, least)
    state = min(sum(r.parameters for r in rows) * e.tensor for e, rows in table.rows.items()) * (sum(table.state[:3]))
    memory = sum(p.memory_bytes * p.kind.devices for p in problem.pools) if all(p.memory_bytes for p in problem.pools) else 0
    speed = flops / compute if compute else 0.0
    parts = {"flops": flops, "flops_per_s": speed, "compute_s": compute, "state_bytes": state, "memory_bytes": memory, "cut_s": 0.0}
    parts["cut_s"], parts["path_s"] = _cut_s(problem, least), _path_s(problem)
    if memory and state > memory:
        return float("inf"), parts
    return max(compute, parts["cut_s"], parts["path_s"]), parts


def _shared_s(problem: Problem, least: dict[str, F64]) -> float:
    """Least seconds a sample when its layers are divided over the kinds, even in parts: the dual of that linear programme.

    For any weights w >= 0 of the kinds with sum of w x devices = 1, the sum over layers of the least w x device-seconds is a bound; weights are
    moved towards the kinds that would have more than their share.
    """
    pools = [p for p in problem.pools if p.kind.name in least]
    if not pools:
        return 0.0
    cost = np.stack([least[p.kind.name] for p in pools])
    devices = np.array([p.kind.devices for p in pools], dtype=np.float64)
    weight = 1 / np.maximum(cost.sum(axis=1), 1e-300)
    best, step = 0.0, 0.2
    for _ in range(DUAL_STEPS):
        weight = weight / float(weight @ devices)
        priced = weight[:, None] * cost
        best = max(best, float(priced.min(axis=0).sum()))
        if len(pools) == 1:
            break
        # layers that cost about the same on several kinds are divided evenly between them, else weights would swing to and fro
        ties = priced <= priced.min(axis=0) * (1 + 1e-9)
        load = (cost * ties / ties.sum(axis=0)).sum(axis=1) / devices
        weight = weight * np.exp(step * (load / load.mean() - 1))
        step *= 0.97
    return best


def _path_s(problem: Problem) -> float:
    """Work and way together, on one kind of device: every micro-batch goes forward through all layers and its gradient back, one layer after the
    other, in a step's time. Large tensor degrees shorten that way and lose to collectives, small ones are efficient and long.

    A layout has one entry of the table per layer and pipeline; its step is at least any mean of the two, so at least the sum over the layers of the
    entry that is best in that mean. The sum is concave in the mean's weight: the best weight is found by thirds."""
    kinds = {p.kind.name for p in problem.pools}
    entries = [(e, context) for e, context, _ in problem.table.every() if e.device in kinds]
    if len(kinds) > 1 or not entries:
        return 0.0
    each = problem.global_batch / sum(p.kind.devices for p in problem.pools)
    work, way = (np.empty((len(entries), problem.table.layers)) for _ in range(2))
    for k, (e, context) in enumerate(entries):
        a = problem.table.priced(e, LayerChoice(context=context), 1)
        way[k] = a["forward_s"] + a["backward_s"] - a["weights_s"]
        work[k] = (a["forward_s"] + a["backward_s"]) * (each * e.tensor * context / e.microbatch)

    def mean_s(weight: float) -> float:
        return float((weight * work + (1 - weight) * way).min(axis=0).sum())

    low, high = 0.0, 1.0
    for _ in range(WEIGHT_STEPS):
        third = (high - low) / 3
        low, high = (low, high - third) if mean_s(low + third) >= mean_s(high - third) else (low + third, high)
    return mean_s(low)


def _least_flops(problem: Problem) -> float:
    """Operations of one sample that no entry of the table goes below."""
    each = [sum(sum(r.flops) for r in rows) * e.tensor * context / e.microbatch for e, context, rows in problem.table.every()]
    return min(each, default=0.0)


def _cut_s(problem: Problem, least: dict[str, F64]) -> float:
    table, nics = problem.table, [p.kind.nic_Bps * p.kind.nics for p in problem.pools]
    if not nics or min(nics) <= 0 or table.experts > 1:  # with divided experts no server needs a copy of the model, and tokens may stay
        return 0.0
    parameters = min(sum(r.parameters for r in rows) * e.tensor for e, rows in table.rows.items())
    copy_s = parameters * min(table.state.message, table.state.weight) / max(nics) if max(nics) else 0.0
    border = min((r.output_bytes / e.microbatch for e, rows in table.rows.items() for r in rows[:-1]), default=0.0)
    total = sum(n * len(p.kind.servers) for n, p in zip(nics, problem.pools, strict=True))
    border_s = 2 * border * problem.global_batch / total
    # the third way out: one server does everything, and nothing crosses
    alone = [problem.global_batch * float(least[p.kind.name].sum()) / p.kind.gpus for p in problem.pools if p.kind.name in least]
    return min(copy_s, border_s, min(alone, default=0.0))


# ---- family ------------------------------------------------------------------------------------------------------------
def family_bound_s(problem: Problem, candidate: Candidate) -> float:
    """See the module's docstring. Exact up to the bisection's last bit."""
    layout = candidate.layout
    reference, ratio, tail, hop = _stage_numbers(problem, candidate)
    columns: dict[tuple[Replica, ...], int] = {}
    for d in range(layout.data):
        column = tuple(s.replicas[d] for s in layout.stages)
        columns[column] = columns.get(column, 0) + 1
    total, filled = sum(layout.microbatches), layout.schedule is None

    def enough(limit: float) -> bool:
        # micro-batches are whole; the small share added keeps rounding from losing one
        each = {c: _passes(limit, reference, [ratio[r] for r in c], [tail[r] for r in c], hop, total, filled) for c in columns}
        return sum(n * math.floor(each[c] + 1e-9) for c, n in columns.items()) >= total

    low, high = 0.0, reference * total * max(ratio.values()) * (2 + len(layout.stages)) + 2 * hop * len(layout.stages) + 1e-9
    high *= 1 + max(tail.values())
    for _ in range(80):  # a float has 53 bits to halve: so many steps leave nothing
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    if not filled:
        low = max(low, _any_order_s(problem, candidate))
    return low + problem.runtime.per_iteration_s


def _any_order_s(problem: Problem, candidate: Candidate) -> float:
    """What no order goes below on alike pipelines: every layer as fast as any of its choices."""
    layout, count = candidate.layout, max(candidate.layout.microbatches)
    column = [s.replicas[0] for s in layout.stages]
    rows = [
        problem.table.priced(Entry(r.device, layout.microbatch, r.tensor), choice, layout.data)
        for r in dict.fromkeys(column) for choice in _allowed(problem, candidate)
    ]  # fmt: skip
    forward, whole = (np.min(x, axis=0) for x in zip(*((a["forward_s"], a["forward_s"] + a["backward_s"]) for a in rows), strict=True))
    inputs = np.min([a["backward_s"] - a["weights_s"] for a in rows], axis=0)
    tail = np.min([tail_s(problem, layout.data, column, a["update_s"], a["wire_bytes"]) for a in rows], axis=0)
    return max(path_s(forward, inputs, count), work_s(forward, whole, len(column), count) + float(tail.sum()) / len(column))


def _allowed(problem: Problem, candidate: Candidate) -> list[LayerChoice]:
    """The choices of its family."""
    inner = {0, *(c.tensor for c in candidate.choices)}
    return [c._replace(tensor=t) for c in problem.choices_of(candidate) for t in sorted(inner)]


def _stage_numbers(problem: Problem, candidate: Candidate) -> tuple[float, dict[Replica, float], dict[Replica, float], float]:
    """(work of all layers, least seconds of a unit of it per kind of replica, least tail per second, one message between stages)."""
    replicas = list(dict.fromkeys(r for s in candidate.layout.stages for r in s.replicas))
    least: dict[Replica, F64] = {}
    late: dict[Replica, F64] = {}
    hop = float("inf")
    layout = candidate.layout
    allowed = _allowed(problem, candidate)
    for r in replicas:
        entry = Entry(r.device, layout.microbatch, r.tensor)
        arrays = [problem.table.priced(entry, c, layout.data) for c in allowed]
        time = np.min([a["forward_s"] + a["backward_s"] for a in arrays], axis=0)
        ring = least_ring(problem, layout.data, replicas)
        after = np.min([a["update_s"] + (0 if problem.runtime.overlap_gradients else ring * a["wire_bytes"]) for a in arrays], axis=0)
        least[r], late[r] = time, after
        if len(layout.stages) > 1:
            hop = min(hop, float(np.min([a["output_bytes"][:-1].min() for a in arrays])) / fastest_Bps(problem) + problem.runtime.per_message_s)
    whole = {r: float(t.sum()) for r, t in least.items()}
    share = np.min([t / whole[r] for r, t in least.items()], axis=0)  # of a layer in the work: on no kind does it take a smaller one
    tail = {r: float(np.min(late[r] / np.maximum(whole[r] * share, 1e-30))) for r in replicas}
    return float(share.sum()), whole, tail, hop if np.isfinite(hop) else 0.0


def _passes(limit: float, work_s: float, ratio: Sequence[float], tail: Sequence[float], hop: float, most: int, filled: bool) -> float:
    """Most micro-batches (a real number) that one pipeline can do in `limit` seconds, at least one or none. `filled`: in 1F1B's way."""

    def holds(m: float) -> bool:
        before, done = 0.0, 0.0
        # each stage gets all the work it can end in time; more work early only delays those behind, which the bound must allow for
        for rho, r in zip(ratio, tail, strict=True):
            x = max(0.0, (limit - before) / (m + r))
            done += x / rho
            before += x + 2 * hop if filled else 0.0
        return done >= work_s

    if not holds(1.0):
        return 0.0
    low, high = 1.0, float(most)
    if holds(high):
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
