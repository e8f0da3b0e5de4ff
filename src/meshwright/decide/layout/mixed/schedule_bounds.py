"""What no pipeline schedule on given degrees goes below, whatever its orders: the least seconds of a step, and whether anything can fit.

With f and i seconds of a layer's forward and input's gradient (the whole backward is i and the weights' gradient), m micro-batches, p stages:
path: the stage that holds a layer does its f and i m times; not before the first micro-batch came forward through the layers before it, and the last
    one's gradient still goes back through them. So sum over the layers before of (f + i), and m (f + i). This is what counts where m is small.
work: stages begin with different layers, so the stage that is j-th to begin has at least j layers before it, and waits for their forward; then
    it does its own work, gradients and update. Over all stages that is all the work there is, so p T is at least the sum.
pieces: both for every stage and piece of a layout that is cut already. With whole backwards the last thing that a stage does is its first piece's
    backward, after which that gradient goes back through all pieces before it.
Messages between stages are left out. Cost: O(layers), as numpy.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ....profile.layer_profile import Entry
from ....profile.network import Replica
from .candidate import Candidate, Problem

__all__ = ["cannot_fit", "fastest_Bps", "least_ring", "least_time_s", "path_s", "pieces_time_s", "tail_s", "work_s"]

F64 = NDArray[np.float64]


def path_s(forward_s: F64, input_s: F64, microbatches: int) -> float:
    each = forward_s + input_s
    return float((_before(each) + microbatches * each).max())


def work_s(forward_s: F64, whole_s: F64, stages: int, microbatches: int) -> float:
    """`whole_s`: forward and backward. On alike stages; of one, in the mean."""
    return float(microbatches * whole_s.sum() + _before(forward_s)[:stages].sum()) / stages


def least_time_s(problem: Problem, c: Candidate) -> float:
    """No schedule of these degrees and choices takes less, however the layers are divided over the stages."""
    layout, count = c.layout, max(c.layout.microbatches)
    column = [s.replicas[0] for s in layout.stages]
    priced = {r: problem.table.priced_each(Entry(r.device, layout.microbatch, r.tensor), c.choices, layout.data) for r in dict.fromkeys(column)}
    forward = np.min([a["forward_s"] for a in priced.values()], axis=0)
    inputs = np.min([a["backward_s"] - a["weights_s"] for a in priced.values()], axis=0)
    if len(priced) == 1:
        (a,) = priced.values()
        tail = float(tail_s(problem, layout.data, priced, a["update_s"], a["wire_bytes"]).sum()) / len(column)
        work = work_s(forward, forward + a["backward_s"], len(column), count) + tail
    else:
        each = {r: float(a["forward_s"].sum() + a["backward_s"].sum()) for r, a in priced.items()}
        work = count / sum(1 / each[r] for r in column)
    return max(path_s(forward, inputs, count), work) + problem.runtime.per_iteration_s


def pieces_time_s(problem: Problem, c: Candidate, *, split: bool) -> float:
    """No order of these pieces takes less. `split`: the backward is, into the gradients of input and weights."""
    layout, count, each_s = c.layout, max(c.layout.microbatches), problem.runtime.per_action_s
    stage_of, a = problem.by_piece(c)
    forward, whole = a["forward_s"] + each_s, a["backward_s"] + each_s
    inputs = whole - a["weights_s"] if split else whole
    alike = dict.fromkeys(s.replicas[0] for s in layout.stages)
    tail = np.bincount(stage_of, tail_s(problem, layout.data, alike, a["update_s"], a["wire_bytes"]))
    busy = count * np.bincount(stage_of, forward + whole, len(tail))
    first = np.array([int(np.argmax(stage_of == s)) for s in range(len(tail))])
    wait, back = _before(forward)[first], _before(inputs)[first]
    found = max(path_s(forward, inputs, count) + tail[stage_of[0]], float((wait + busy + tail).max()))
    if not split:
        found = max(found, float((wait + busy + back).max() + tail[stage_of[0]]))
    return float(found + problem.runtime.per_iteration_s)


def cannot_fit(problem: Problem, c: Candidate) -> bool:
    """Whether state alone is too much; of a layout cut into pieces, with one micro-batch of the largest piece."""
    layout = c.layout
    limits = np.array([problem.pool(s.replicas[0]).memory_bytes for s in layout.stages], dtype=np.float64)
    if not limits.all():
        return False
    limits -= [problem.runtime.constant_memory_bytes.get(s.replicas[0].device, 0) for s in layout.stages]
    if layout.schedule is None:
        entries = {Entry(s.replicas[0].device, layout.microbatch, s.replicas[0].tensor) for s in layout.stages}
        least = min(float(problem.table.priced_each(e, c.choices, layout.data)["state_bytes"].sum()) for e in entries)
        return least > float(limits.sum())
    stage_of, a = problem.by_piece(c)
    need = np.bincount(stage_of, a["state_bytes"], len(limits))
    most = np.zeros(len(limits))
    np.maximum.at(most, stage_of, a["kept_bytes"])
    return bool((need + most > limits + 1).any())


def least_ring(problem: Problem, data: int, replicas: Collection[Replica]) -> float:
    """Seconds per wire byte that no gradient ring over `data` of these replicas beats: over the fastest NIC where no server holds all of them."""
    if data == 1:
        return 0.0
    least = min(r.tensor for r in replicas)
    kinds = [problem.pool(r).kind for r in replicas]
    apart = data * least > max(k.gpus for k in kinds)
    return 2 * (data - 1) / data / (max(k.nic_Bps for k in kinds) if apart else fastest_Bps(problem))


def fastest_Bps(problem: Problem) -> float:
    """Of the fastest way between two stages or replicas; infinite where none is known."""
    rates = [c.peak_Bps for c in problem.network.inside.values()] + [c.peak_Bps for c in problem.network.between.values()]
    return max(rates, default=float("inf"))


def tail_s(problem: Problem, data: int, replicas: Collection[Replica], update_s: F64, wire_bytes: F64) -> F64:
    """Gradients, where they do not go while others are computed, and update."""
    ring = 0.0 if problem.runtime.overlap_gradients else least_ring(problem, data, replicas)
    return (update_s if problem.runtime.update == "layer" else 0.0) + ring * wire_bytes


def _before(seconds: F64) -> F64:
    """Of every entry, the sum of those before it."""
    return np.concatenate(([0.0], np.cumsum(seconds)[:-1]))
