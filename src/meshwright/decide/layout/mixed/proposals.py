"""Candidates from the two dynamic programmes: pipelines of unlike stages (Alpa), and a choice per layer (Galvatron).

Both work on one pool of alike servers; what they propose is judged like every other candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....cite import Cite
from ....plan.orders import peak_in_flight
from ....profile.layer_profile import Entry
from ....profile.layer_table import LayerChoice
from ....profile.network import ProfiledLayout, ProfiledStage, Replica
from . import interop, perlayer
from .candidate import Candidate, Demands, Judged, LayersStrategy, Pool, Problem
from .interop import inter_operator
from .perlayer import best_choices
from .split import split_layers

__all__ = ["InterOperator", "PerLayer", "alpa_candidates", "per_layer_choices", "with_best_choices"]

# Blocks of about equal time that the inter-operator programme divides: its work grows with their square.
MAX_BLOCKS = 20
# Stages of one pipeline that it considers.
MAX_STAGES = 16
# Steps that a device's memory is divided into by the per-layer programme; sizes are rounded up to them.
MEMORY_STEPS = 256
F64 = NDArray[np.float64]


def alpa_candidates(problem: Problem, pool: Pool, devices: int) -> Iterator[Candidate]:
    """The best pipeline of each (data degree, micro-batch, uniform choice), stages of unlike tensor degrees allowed."""
    kind = pool.kind
    degrees = problem.tensors(kind.name)
    for data in (d for d in range(1, devices + 1) if devices % d == 0 and devices // d <= MAX_STAGES * max(degrees)):
        for microbatch in problem.microbatches:
            count, rest = divmod(problem.global_batch, data * microbatch)
            if rest or count < 1:
                continue
            for choice in problem.choices:
                if choice.tensor or choice.sharding != (1 if data > 1 else 0):  # the others do not change which split is best
                    continue
                found = _alpa(problem, pool, devices // data, data, microbatch, count, choice)
                if found is not None:
                    yield found
                    break  # choices come from the fastest to the smallest


def _alpa(problem: Problem, pool: Pool, devices: int, data: int, microbatch: int, count: int, choice: LayerChoice) -> Candidate | None:
    kind, layers = pool.kind, problem.table.layers
    degrees = [t for t in problem.tensors(kind.name) if t <= devices and Entry(kind.name, microbatch, t) in problem.table.rows]
    if not degrees:
        return None
    arrays = [problem.table.priced(Entry(kind.name, microbatch, t), choice, data) for t in degrees]
    first = arrays[0]["forward_s"] + arrays[0]["backward_s"]
    sizes = split_layers([first] * min(MAX_BLOCKS, layers))
    starts = [0, *accumulate(sizes)]
    n = len(sizes)
    cost = np.full((len(degrees), n + 1, n + 1), np.inf)
    state, kept, working = (np.zeros_like(cost) for _ in range(3))
    for k, a in enumerate(arrays):
        for i in range(n):
            for j in range(i + 1, n + 1):
                part = slice(starts[i], starts[j])
                cost[k, i, j] = a["forward_s"][part].sum() + a["backward_s"][part].sum()
                state[k, i, j], kept[k, i, j] = a["state_bytes"][part].sum(), a["kept_bytes"][part].sum()
                working[k, i, j] = a["working_bytes"][part].max()
    limit = pool.memory_bytes - problem.runtime.constant_memory_bytes.get(kind.name, 0) if pool.memory_bytes else np.inf
    longest = min(MAX_STAGES, n, devices // min(degrees))
    # in 1F1B a stage with s stages left, itself included, holds at most s micro-batches
    fits = [state + kept * min(count, s) + working <= limit for s in range(1, longest + 1)]
    found = inter_operator(cost, fits, degrees, devices, count)
    if found is None:
        return None
    made, at = [], 0
    for blocks, tensor in found[1]:
        replica = Replica(device=kind.name, tensor=tensor, zone=kind.zone)
        made.append(ProfiledStage(layers=starts[at + blocks] - starts[at], replicas=(replica,) * data))
        at += blocks
    name = f"dp{data} tp{'/'.join(str(t) for t in dict.fromkeys(t for _, t in found[1]))} pp{len(made)} mb{microbatch}"
    layout = ProfiledLayout(stages=tuple(made), microbatch=microbatch, microbatches=(count,) * data, name=name)
    return Candidate(layout, (choice,) * layers, InterOperator.name)


def per_layer_choices(problem: Problem, layout: ProfiledLayout, stage: int, choices: Sequence[LayerChoice]) -> list[LayerChoice] | None:
    """The fastest choices of a stage's layers that fit its tightest device; None where none fit."""
    part, n, data = layout.layers_of(stage), layout.stages[stage].layers, layout.data
    held_at_once = problem.in_flight(layout, stage)
    time, memory, working = (np.zeros((n, len(choices))) for _ in range(3))
    limit = np.inf
    counts = layout.microbatches
    for replica in dict.fromkeys(layout.stages[stage].replicas):
        entry = Entry(replica.device, layout.microbatch, replica.tensor)
        count = max(m for r, m in zip(layout.stages[stage].replicas, counts, strict=True) if r == replica)
        pool = problem.pool(replica)
        if pool.memory_bytes:
            # one choice per layer for all replicas: the tightest device and the slowest one decide
            limit = min(limit, pool.memory_bytes - problem.runtime.constant_memory_bytes.get(replica.device, 0))
        rate = pool.kind.device_nic_Bps or float("inf")
        for k, choice in enumerate(choices):
            a = problem.table.priced(entry, choice, data)
            seconds = count * (a["forward_s"] + a["backward_s"]) + a["update_s"] + 2 * (data - 1) / data * a["wire_bytes"] / rate
            time[:, k] = np.maximum(time[:, k], seconds[part])
            kept, left = held_at_once if held_at_once is not None else (peak_in_flight(len(layout.stages), count, stage), 0.0)
            held = a["state_bytes"][part] + a["kept_bytes"][part] * kept + a["left_bytes"][part] * left
            memory[:, k] = np.maximum(memory[:, k], held)
            working[:, k] = np.maximum(working[:, k], a["working_bytes"][part])
    if not np.isfinite(limit):
        limit = float(memory.max() * n + working.max()) + 1
    moves = _transforms(problem, layout, stage, choices)
    found = best_choices(time, memory, working, np.broadcast_to(moves, (n, *moves.shape)), limit, max(1.0, limit / MEMORY_STEPS))
    return [choices[i] for i in found[1]] if found is not None else None


def _transforms(problem: Problem, layout: ProfiledLayout, stage: int, choices: Sequence[LayerChoice]) -> F64:
    """Seconds, over a step, of handing activations on between layers of unlike tensor degree in one group."""
    moves = np.zeros((len(choices), len(choices)))
    replica = layout.stages[stage].replicas[0]
    kind = problem.pool(replica).kind
    if kind.gpus == 1:
        return moves
    whole = float(problem.table.priced(Entry(replica.device, layout.microbatch, replica.tensor), choices[0], layout.data)["output_bytes"].max())
    rate = problem.network.inside_curve(kind.name, kind.gpus).peak_Bps
    for i, a in enumerate(choices):
        for j, b in enumerate(choices):
            if (a.tensor or replica.tensor) != (b.tensor or replica.tensor):
                moves[i, j] = 2 * max(layout.microbatches) * whole / rate
    return moves


def with_best_choices(problem: Problem, candidate: Candidate, choices: Sequence[LayerChoice], source: str) -> Candidate | None:
    """The candidate with every stage's layers chosen anew; None where a stage cannot fit."""
    found = dict[int, LayerChoice]()
    for s in range(len(candidate.layout.stages)):
        mine = per_layer_choices(problem, candidate.layout, s, choices)
        if mine is None:
            return None
        found |= zip(candidate.layout.layers_of(s), mine, strict=True)
    each = tuple(found[layer] for layer in range(len(found)))
    return replace(candidate, choices=each, source=source, layout=msgspec.structs.replace(candidate.layout))


@dataclass(frozen=True, kw_only=True)
class InterOperator(LayersStrategy):
    """Stages of unlike size and tensor degree, by dynamic programming. No options."""

    name: ClassVar[str] = "inter-operator"
    cite: ClassVar[Cite] = interop.CITE

    def plan(self, problem: Problem, demands: Demands, judged: Sequence[Judged] = ()) -> Iterable[Candidate]:
        for pool in problem.pools:
            yield from alpa_candidates(problem, pool, pool.kind.devices)


@dataclass(frozen=True, kw_only=True)
class PerLayer(LayersStrategy):
    """The best choice of every layer, by dynamic programming. Options. chosen: degrees and splits, most promising first, whose layers are chosen
    one by one; with_tensor: of these, whose layers may also choose half the tensor degree."""

    name: ClassVar[str] = "per-layer"
    cite: ClassVar[Cite] = perlayer.CITE
    refines: ClassVar[bool] = True

    chosen: int = 24
    with_tensor: int = 12

    def plan(self, problem: Problem, demands: Demands, judged: Sequence[Judged] = ()) -> Iterable[Candidate]:
        """For the most promising degrees, whether they fit or not: the best choice of every layer."""
        best: dict[tuple[object, ...], Judged] = {}
        for j in judged:
            layout = j.candidate.layout
            key = (tuple((s.layers, s.replicas[0]) for s in layout.stages), layout.microbatch, layout.microbatches, layout.context)
            if key not in best or j.estimate.time_s < best[key].estimate.time_s:
                best[key] = j
        for number, j in enumerate(sorted(best.values(), key=lambda j: j.estimate.time_s)[: self.chosen]):
            choices = problem.choices_of(j.candidate, also=(1,) if j.candidate.layout.data > 1 else ())
            if number < self.with_tensor:
                choices += _half_degrees(problem, j.candidate)
            made = with_best_choices(problem, j.candidate, choices, self.name)
            if made is not None:
                yield made


def _half_degrees(problem: Problem, c: Candidate) -> list[LayerChoice]:
    """Half the tensor degree inside each group of ranks, the micro-batch's samples divided in two, where table and samples allow it everywhere."""
    layout = c.layout
    replicas = {r for s in layout.stages for r in s.replicas}
    halves = {Entry(r.device, layout.microbatch // 2, r.tensor // 2) for r in replicas}
    degrees = {r.tensor for r in replicas}
    if layout.context > 1 or layout.microbatch % 2 or len(degrees) > 1 or max(degrees) < 2 or any(e not in problem.table.rows for e in halves):
        return []
    levels = {x.sharding for x in c.choices}
    return [LayerChoice(x.recompute, x.sharding, max(degrees) // 2) for x in problem.choices if x.sharding in levels and not x.tensor]
