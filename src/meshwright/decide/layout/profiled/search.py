"""Layouts of one kind of GPU ranked by simulation from a layer profile: every degree and micro-batch that was measured, stages split by time.

Cite: exhaustive 3D grids with pruning, as Megatron-LM users do by hand; the split is the exact min-max partition of a chain (dynamic programme).
Left open: which stages are uneven. Our answer: layers are divided so that the slowest stage is as fast as can be, embedding and head counted.
Invariant: a layout that is left out is slower by its compute bound than one that was simulated, or does not fit, or lacks an entry; it says which.
Cost: O(stages x layers^2) per split, one simulation per candidate that its bound does not rule out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol

from ....cite import FOLKLORE, Cite
from ....errors import Infeasible, UsageError
from ....profile.layer_profile import Entry, LayerProfile
from ....profile.network import NetworkProfile, ProfiledLayout, TrainingRuntime
from ..problem import LayoutStrategy, Question
from .predict import ProfilePrediction, compute_bound_s, in_flight_bytes, predict

__all__ = ["JudgedLayout", "ProfileProblem", "ProfileStrategy", "ProfiledGrid", "balanced_stages", "search_layouts"]


@dataclass(frozen=True)
class JudgedLayout:
    """`prediction` is None where a layout was not simulated; `why` then says why."""

    layout: ProfiledLayout
    prediction: ProfilePrediction | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ProfileProblem:
    """So many GPUs of one kind, a measured model and how messages behave. `memory_bytes` per GPU, 0 = no limit."""

    profile: LayerProfile
    network: NetworkProfile
    runtime: TrainingRuntime
    device: str
    gpus: int
    global_batch: int
    zone: str = ""
    memory_bytes: int


class ProfileStrategy(LayoutStrategy, Protocol):
    answers: ClassVar[Question] = "profile"

    def plan(self, problem: ProfileProblem) -> tuple[JudgedLayout, ...]:
        """Simulated ones first and fastest first. Raises: Infeasible when no layout fits, with the tightest limit; UnknownName, UsageError."""
        ...


@dataclass(frozen=True, kw_only=True)
class ProfiledGrid(ProfileStrategy):
    """Options. limit: simulations at most."""

    name: ClassVar[str] = "profiled-grid"
    cite: ClassVar[Cite] = FOLKLORE

    limit: int = 50

    def plan(self, problem: ProfileProblem) -> tuple[JudgedLayout, ...]:
        p = problem
        return search_layouts(
            p.profile, p.network, p.runtime, device=p.device, gpus=p.gpus, global_batch=p.global_batch, zone=p.zone, memory_bytes=p.memory_bytes,
            limit=self.limit,
        )  # fmt: skip


def balanced_stages(profile: LayerProfile, entry: Entry, stages: int) -> tuple[int, ...]:
    """Layers per stage so that the slowest stage's forward and backward is least; among equals, earlier stages get fewer layers.

    Raises: ProfileEntryMissing, UnknownName, UsageError when there are fewer layers than stages.
    """
    profile.require([entry])
    if not 1 <= stages <= profile.layers:
        raise UsageError(f"{stages} stages for {profile.layers} layers", where="stages")
    total = [0.0, *accumulate(r.forward_s + r.backward_s for r in profile.times[entry])]
    best = [[0.0] + [float("inf")] * profile.layers]  # best[s][k]: slowest of s stages over the first k layers
    cut: list[list[int]] = [[]]
    for _ in range(stages):
        before, row, where = best[-1], [float("inf")] * (profile.layers + 1), [0] * (profile.layers + 1)
        for k in range(1, profile.layers + 1):
            for j in range(k):
                slowest = max(before[j], total[k] - total[j])
                if slowest < row[k]:
                    row[k], where[k] = slowest, j
        best.append(row)
        cut.append(where)
    counts, k = [], profile.layers
    for s in range(stages, 0, -1):
        counts.append(k - cut[s][k])
        k = cut[s][k]
    return tuple(reversed(counts))


def search_layouts(
    profile: LayerProfile, network: NetworkProfile, runtime: TrainingRuntime, *, device: str, gpus: int, global_batch: int, zone: str = "",
    memory_bytes: int = 0, limit: int = 50,
) -> tuple[JudgedLayout, ...]:  # fmt: skip
    """All layouts of `gpus` GPUs, simulated ones first and fastest first. `memory_bytes` per GPU, 0 = no limit; at most `limit` simulations.

    Raises: Infeasible when no layout fits, with the tightest limit; UnknownName, UsageError.
    """
    candidates = list(_grid(profile, runtime, device, gpus, global_batch, zone))
    refused: list[JudgedLayout] = []
    open_: list[tuple[float, ProfiledLayout]] = []
    least = 0
    for layout in candidates:
        peak = max(in_flight_bytes(profile, layout, runtime, s, 0) for s in range(len(layout.stages))) + runtime.constant_memory_bytes.get(device, 0)
        if memory_bytes and peak > memory_bytes:
            least = min(least or peak, peak)
            refused.append(JudgedLayout(layout, None, f"needs {peak / 2**30:.2f} GiB"))
        else:
            open_.append((compute_bound_s(profile, layout, runtime), layout))
    if not open_:
        what = f"the smallest of {len(refused)} layouts needs {least / 2**30:.2f} GiB per GPU" if refused else "no measured degree and batch fits"
        hint = f"raise the memory to {least} bytes" if refused else "other GPU counts, a batch that divides, or more entries in the profile"
        raise Infeasible(f"{what} ({gpus} {device}, global batch {global_batch})", hint=hint, data={"least_bytes": least})
    judged = _judge(profile, network, runtime, sorted(open_, key=lambda x: x[0]), limit)
    done = sorted((j for j in judged if j.prediction is not None), key=lambda j: j.prediction.time_s if j.prediction else 0.0)
    return (*done, *(j for j in judged if j.prediction is None), *refused)


def _grid(
    profile: LayerProfile, runtime: TrainingRuntime, device: str, gpus: int, global_batch: int, zone: str
) -> Iterator[ProfiledLayout]:
    profile.require([next(iter(sorted(e for e in profile.times if e.device == device)), Entry(device, 1, 1))])
    server = runtime.gpus_per_server.get(device, gpus)
    for entry in sorted(e for e in profile.times if e.device == device and e.tensor <= server and gpus % e.tensor == 0):
        for stages in range(1, min(profile.layers, gpus // entry.tensor) + 1):
            data, rest = divmod(gpus, entry.tensor * stages)
            if rest or global_batch % (data * entry.microbatch):
                continue
            yield ProfiledLayout.uniform(
                balanced_stages(profile, entry, stages), device=device, data=data, tensor=entry.tensor, microbatch=entry.microbatch,
                microbatches=global_batch // (data * entry.microbatch), zone=zone, name=f"pp{stages} dp{data} tp{entry.tensor} mb{entry.microbatch}",
            )  # fmt: skip


def _judge(
    profile: LayerProfile, network: NetworkProfile, runtime: TrainingRuntime, ordered: Sequence[tuple[float, ProfiledLayout]], limit: int
) -> list[JudgedLayout]:
    """In order of the bound: once a bound is above the best time, no later layout can win."""
    judged: list[JudgedLayout] = []
    best = float("inf")
    for number, (bound, layout) in enumerate(ordered):
        if bound >= best:
            judged.append(JudgedLayout(layout, None, f"no schedule of it is below {bound:.6g} s"))
        elif number >= limit:
            judged.append(JudgedLayout(layout, None, f"not simulated: {limit} were; its bound is {bound:.6g} s"))
        else:
            found = predict(profile, layout, network, runtime, bars=False)
            best = min(best, found.time_s)
            judged.append(JudgedLayout(layout, found))
    return judged
