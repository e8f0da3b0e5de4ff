"""A traffic profile fitted to steps of the training itself: this model, these ranks, this fabric, under the contention that they will have.

A few plans that span what can be planned (one group, a few, every tensor alone) run for some steps each, with every codec. All times of a step count
from a barrier, and are those of the last rank to get there, so that a step's parts add up to its length: with R_i, when tensor i is ready with one
group, and of every group j when its encode, its exchange and its decode are over (H_j, E_j, D_j):

    exchange = E_j - max(E_(j-1), H_j),    decode = D_j - max(D_(j-1), E_j, the last H),    finish = the step's end - the last D.

An encode lasts as long as it did on the average of the ranks. Groups of like size (within a factor 2) are one point of a curve: the mean of a step's,
then the median over steps. What messages cost the backward is two numbers, fitted last: its loss of speed while they are under way, and time of it
per message, which counts as part of the encode (waking threads and passing the interpreter's lock take as long for a short message as for a long
one). They are those with which the model's own timeline is nearest to all steps, the fast ones first.

Cite: Wang, Wu, Xu, Ng, "Cupcake", MLSys 2023, section 4 (cost functions from measurement).
Left open by the paper: contention. Our answer: everything is timed where it will run, and not alone.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ...bound import Bound, Certificate
from ...codec.codec import parse_codec
from ...decide.traffic.problem import TrafficProblem, group_times, groups_of, walked
from ...errors import CaptureError
from ...run.codecs.base import NonFinite
from ...run.traffic import PlannedTraffic, traffic_hook
from ...traffic import CodecCost, Curve, GradientTensor, TrafficGroup, TrafficPlan, TrafficProfile
from ..fabric.first_rank import first_rank_bytes
from .curves import fit_curve

__all__ = [
    "FEW_GROUPS", "MeasuredTraffic", "ProbeStep", "ProbedPlan", "StepProbe", "fit_profile", "measure_traffic", "probe_groups", "probe_plan",
    "step_times",
]  # fmt: skip

FEW_GROUPS = (1, 3, 12)  # groups of a probe plan, beside every tensor alone
WARM_STEPS, REPEATS = 1, 3  # of a probe plan: steps that warm up, steps that are timed
MAX_STEPS_S = 2.0  # for all measured steps of one plan: slow networks make fewer of them
MAX_LINE_ERROR_SHARE = 0.02  # of a time, by which a line may miss what was measured here
FIRST_STEPS = 3  # DDP orders its buckets anew after the first
FREE = Curve(sizes=(0,), times_ns=(0,))
NO_BOUND = Bound(quantity="step time", value="0", unit="s", certificate=Certificate(kind="fusion", data={}))
_MAX_LOST = (3000, 4_000_000)  # per mille of the compute's speed while messages are under way, ns of it per message

Groups = tuple[TrafficGroup, ...]


@dataclass(frozen=True, kw_only=True)
class ProbeStep:
    """Times in ns of one step with these groups, from the barrier, of the last rank to get there; `encode_ns`: of the average rank.

    `ready_ns`: when each gradient was there, in the order of the tensors.
    """

    groups: Groups
    ready_ns: tuple[int, ...]
    encode_ns: tuple[int, ...]
    encoded_ns: tuple[int, ...]
    arrived_ns: tuple[int, ...]
    decoded_ns: tuple[int, ...]
    backward_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class ProbedPlan:
    """A plan's step: the median of those measured, and what the fitted model says of it. `codec`: all that it uses, by commas."""

    codec: str
    groups: int
    measured_ns: int
    predicted_ns: int


@dataclass(frozen=True, kw_only=True)
class MeasuredTraffic:
    """`state`: registered as the communication hook of the DDP module; it leaves gradients to DDP until it is given a plan (`use`)."""

    state: PlannedTraffic
    profile: TrafficProfile
    probes: tuple[ProbedPlan, ...]
    steps: StepProbe

    def with_steps_of(self, groups: Groups, *, repeats: int = 2 * REPEATS) -> MeasuredTraffic:
        """Run these groups, too, on all ranks, and fit everything again. Raises: what the hook raises."""
        self.steps.run(groups, repeats)
        return self.steps.fitted()


class StepProbe:
    """Steps of a DDP module with one set of groups after the other. Make and use it on all ranks alike.

    `step` runs forward and backward, without the optimizer. `tensors` stand in the order in which their gradients become ready.
    Raises: CaptureError when no parameter has a gradient; UnknownName, UsageError (codec); what `PlannedTraffic` and its hook raise.
    """

    def __init__(
        self, ddp: nn.parallel.DistributedDataParallel, step: Callable[[], object], codecs: Sequence[str], *, repeats: int, deadline_s: float,
        nonfinite: NonFinite,
    ) -> None:  # fmt: skip
        self.ddp, self.step, self.ranks = ddp, step, dist.get_world_size(ddp.process_group)
        tensors = tuple(GradientTensor(name=n, shape=tuple(p.shape), ready_ns=0) for n, p in ddp.module.named_parameters() if p.requires_grad)[::-1]
        if not tensors:
            raise CaptureError("no parameter gets a gradient", where=type(ddp.module).__name__, hint="does the loss depend on the parameters?")
        self.names = tuple(dict.fromkeys(parse_codec(c).text for c in ("none", *codecs)))
        self.found: list[list[ProbeStep]] = []
        whole = groups_of([len(tensors)], "none")
        self.state = PlannedTraffic(ddp, probe_plan(tensors, whole, self.ranks), deadline_s=deadline_s, nonfinite=nonfinite)
        ddp.register_comm_hook(self.state, traffic_hook)
        first = [self._measured() for _ in range(FIRST_STEPS)][1:]
        ready = [median(s.ready_ns[i] for s in first) for i in range(len(tensors))]
        self.tensors = tuple(tensors[i] for i in sorted(range(len(tensors)), key=lambda i: ready[i]))  # equal on all ranks, as the times are
        self._leave = msgspec.structs.replace(probe_plan(self.tensors, whole, self.ranks), leave=True)
        self.state.use(self._leave, drop_residual=True)
        self.plain_ns = int(median([self._timed() for _ in range(WARM_STEPS + 2 * repeats)][WARM_STEPS:]))

    def run(self, groups: Groups, repeats: int) -> None:
        """Measure `repeats` steps with these groups, or two where they take long; gradients are left to DDP and zeroed behind it."""
        self.state.use(probe_plan(self.tensors, groups, self.ranks), drop_residual=True)
        warm = [self._measured() for _ in range(WARM_STEPS)]
        fitting = int(MAX_STEPS_S * 1e9) // max(1, warm[-1].end_ns)  # equal on all ranks, as the times are
        self.found.append([self._measured() for _ in range(min(repeats, max(2, fitting)))])
        for p in self.ddp.module.parameters():
            p.grad = None
        self.state.use(self._leave, drop_residual=True)

    def fitted(self) -> MeasuredTraffic:
        """The profile fitted to all steps so far, by the first rank for all."""
        fit = msgspec.json.encode(fit_profile(self.tensors, self.names, self.found, self.ranks)) if self.state.rank == 0 else b""
        made = first_rank_bytes(fit, self.ddp.process_group)
        profile, probes = msgspec.json.decode(made, type=tuple[TrafficProfile, tuple[ProbedPlan, ...]])
        profile = msgspec.structs.replace(profile, plain_ns=self.plain_ns)
        return MeasuredTraffic(state=self.state, profile=profile, probes=probes, steps=self)

    def _begun(self) -> tuple[float, int]:
        """(start by `time.monotonic`, duration in ns) of one step behind a barrier."""
        for p in self.ddp.module.parameters():
            p.grad = None
        dist.barrier(self.ddp.process_group)
        start = time.monotonic()
        self.step()
        return start, int((time.monotonic() - start) * 1e9)

    def _timed(self) -> int:
        """ns of one step at its slowest rank."""
        took = torch.tensor([self._begun()[1]])
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=self.ddp.process_group)
        return int(took)

    def _measured(self) -> ProbeStep:
        return step_times(self.state, *self._begun(), self.ddp.process_group)


def step_times(state: PlannedTraffic, start: float, last: int, ranks: dist.ProcessGroup | None) -> ProbeStep:
    """Times of the step that `state` has just made, which began at `start` (`time.monotonic`) and took `last` ns; of the slowest of the ranks."""
    before = int((state.began_s - start) * 1e9)
    times, n, m = state.measured, len(state.plan.profile.tensors), len(state.groups)
    encodes = [t.encode_end_ns - t.encode_start_ns for t in times]
    while_backward = sum(e for e, t in zip(encodes, times, strict=True) if t.encode_end_ns <= state.backward_end_ns)
    own = [
        *(before + state.ready_ns.get(t.name, state.backward_end_ns) for t in state.plan.profile.tensors),
        *(before + t.encode_end_ns for t in times), *(before + t.exchange_end_ns for t in times), *(before + t.decode_end_ns for t in times),
        before + state.backward_end_ns - while_backward, last,
    ]  # fmt: skip
    slowest, mean = torch.tensor(own), torch.tensor(encodes)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=ranks)
    dist.all_reduce(mean, group=ranks)
    parts = slowest.split([n, m, m, m, 2])
    ready, encoded, arrived, decoded, ends = (tuple(int(x) for x in p.tolist()) for p in parts)
    return ProbeStep(
        groups=state.plan.groups, ready_ns=ready, encode_ns=tuple(int(x) // state.world for x in mean.tolist()), encoded_ns=encoded,
        arrived_ns=arrived, decoded_ns=decoded, backward_ns=ends[0], end_ns=ends[1],
    )  # fmt: skip


def measure_traffic(
    ddp: nn.parallel.DistributedDataParallel, step: Callable[[], object], codecs: Sequence[str], *, repeats: int = REPEATS,
    few: Sequence[int] = FEW_GROUPS, deadline_s: float = 300.0, nonfinite: NonFinite = "refuse",
) -> MeasuredTraffic:  # fmt: skip
    """Run `step` (forward and backward, no optimizer) some dozens of times on all ranks; gradients are as zeroed afterwards.

    `ddp` must have no communication hook yet. Costs of `none` and `codecs`; equal on all ranks. `few`: how many groups the probe plans have, beside
    every tensor alone; those of up to three run twice as often.
    Raises: what `StepProbe` raises.
    """
    probe = StepProbe(ddp, step, codecs, repeats=repeats, deadline_s=deadline_s, nonfinite=nonfinite)
    for name in probe.names:
        for groups in probe_groups(probe.tensors, name, few):
            probe.run(groups, repeats * (2 if len(groups) <= 3 else 1))
    return probe.fitted()


def probe_plan(tensors: tuple[GradientTensor, ...], groups: Groups, ranks: int) -> TrafficPlan:
    """A plan that claims nothing: it only says what is sent together."""
    codec = groups[0].codec
    cost = CodecCost(codec=codec, encode=FREE, exchange=FREE, decode=FREE, payload_bytes=(0,) * len(tensors))
    return TrafficPlan(
        profile=TrafficProfile(tensors=tensors, codecs=(cost,), ranks=ranks), groups=groups, strategy="probe", options={}, codecs=(codec,), step_ns=0,
        payload_bytes=0, bound=NO_BOUND, uncompressed=NO_BOUND,
    )  # fmt: skip


def probe_groups(tensors: Sequence[GradientTensor], codec: str, few: Sequence[int] = FEW_GROUPS) -> Iterator[Groups]:
    """About equal shares of the elements, then every tensor alone."""
    n, total = len(tensors), max(1, sum(t.elements for t in tensors))
    for count in few:
        ends: list[int] = []
        held = 0
        for i, t in enumerate(tensors, 1):
            held += t.elements
            if i == n or held * count >= total * (len(ends) + 1):
                ends.append(i)
        if count < n:
            yield groups_of(ends, codec)
    yield groups_of(list(range(1, n + 1)), codec)


def fit_profile(
    tensors: Sequence[GradientTensor], codecs: Sequence[str], found: Sequence[Sequence[ProbeStep]], ranks: int
) -> tuple[TrafficProfile, tuple[ProbedPlan, ...]]:
    """(profile of these codecs, how it fits) from the steps of every plan that ran; one at least has one group."""
    every = [s for steps in found for s in steps]
    alone = [s for s in every if len(s.groups) == 1]
    ready = [int(median(s.ready_ns[i] for s in alone)) for i in range(len(tensors))]
    ready = [max(ready[: i + 1]) for i in range(len(ready))]
    timed = tuple(msgspec.structs.replace(t, ready_ns=r) for t, r in zip(tensors, ready, strict=True))
    profile = TrafficProfile(
        tensors=timed, codecs=tuple(_cost(name, timed, every) for name in codecs), ranks=ranks,
        backward_ns=int(median(s.backward_ns for s in alone)), finish_ns=int(median(max(0, s.end_ns - s.decoded_ns[-1]) for s in every)),
        source="measured in training steps",
    )  # fmt: skip
    problem = TrafficProblem.of(profile)
    runs = [_Run(steps[0].groups, group_times(problem, steps[0].groups), int(median(s.end_ns for s in steps))) for steps in found]
    overlap = any(len(run.groups) > 1 for run in runs)

    def misfit(lost: tuple[int, int]) -> float:
        return _misfit(_fits(runs, *lost, profile.finish_ns))

    lost, width = (0, 0), _MAX_LOST
    while width[0] >= 10 and overlap:
        near = [[min(most, max(0, x + k * w // 2)) for k in range(-2, 3)] for x, w, most in zip(lost, width, _MAX_LOST, strict=True)]
        lost = min(sorted({(permille, overhead) for permille in near[0] for overhead in near[1]}), key=misfit)
        width = (width[0] // 2, width[1] // 2)
    shifted = tuple(msgspec.structs.replace(c, encode=_later(c.encode, lost[1])) for c in profile.codecs)
    return msgspec.structs.replace(profile, codecs=shifted, interference_permille=lost[0]), _fits(runs, *lost, profile.finish_ns)


def _later(curve: Curve, by_ns: int) -> Curve:
    return msgspec.structs.replace(curve, times_ns=tuple(t + by_ns for t in curve.times_ns))


class _Run(NamedTuple):
    groups: Groups
    times: list[tuple[int, int, int, int]]
    measured_ns: int


def _misfit(fits: Sequence[ProbedPlan]) -> float:
    """Plans count by how near they are to the fastest: there the planner chooses."""
    least = min(r.measured_ns for r in fits)
    return sum(least / r.measured_ns * math.log(r.measured_ns / r.predicted_ns) ** 2 for r in fits)


def _fits(runs: Iterable[_Run], permille: int, overhead_ns: int, finish_ns: int) -> tuple[ProbedPlan, ...]:
    return tuple(
        ProbedPlan(
            codec=",".join(dict.fromkeys(g.codec for g in run.groups)), groups=len(run.groups), measured_ns=run.measured_ns,
            predicted_ns=max(1, walked([(w, e + overhead_ns, x, d) for w, e, x, d in run.times], permille)[0] + finish_ns),
        )
        for run in runs
    )  # fmt: skip


def _cost(codec: str, tensors: Sequence[GradientTensor], steps: Sequence[ProbeStep]) -> CodecCost:
    """From the groups that went through this codec, in all steps."""
    spec = parse_codec(codec)
    payloads = [sum(r.expected for r in spec.rounds([t.shape])) for t in tensors]
    rows: list[list[tuple[int, float, int]]] = [[], [], []]
    for step in steps:
        mine = [i for i, g in enumerate(step.groups) if g.codec == codec]
        spans = [(g.first, g.last) for g in (step.groups[i] for i in mine)]
        elements = [sum(t.elements for t in tensors[a:b]) for a, b in spans]
        sent = [sum(payloads[a:b]) for a, b in spans]
        for into, sizes, times in zip(rows, (elements, sent, elements), _parts(step), strict=True):
            into += _means(sizes, [times[i] for i in mine])
    encode, exchange, decode = (_curve(r) for r in rows)
    return CodecCost(codec=codec, encode=encode, exchange=exchange, decode=decode, payload_bytes=tuple(payloads))


def _parts(step: ProbeStep) -> tuple[list[float], list[float], list[float]]:
    """Seconds of every group's encode, exchange and decode."""
    arrivals, decodes = (0, *step.arrived_ns), (step.encoded_ns[-1], *step.decoded_ns)
    exchange = [max(0, e - max(before, h)) / 1e9 for (before, e), h in zip(pairwise(arrivals), step.encoded_ns, strict=True)]
    decode = [max(0, d - max(before, e)) / 1e9 for (before, d), e in zip(pairwise(decodes), step.arrived_ns, strict=True)]
    return [e / 1e9 for e in step.encode_ns], exchange, decode


def _means(sizes: Sequence[int], times: Sequence[float]) -> list[tuple[int, float, int]]:
    """(mean size, mean time, how many) of the groups whose sizes lie between the same powers of 2."""
    alike: dict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        alike[size.bit_length()].append(i)
    return [(round(fmean(sizes[i] for i in of)), fmean(times[i] for i in of), len(of)) for of in alike.values()]


def _curve(rows: Sequence[tuple[int, float, int]]) -> Curve:
    """Through the medians over steps, again by powers of 2: plans that share a size share its point."""
    alike: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
    for row in rows:
        alike[row[0].bit_length()].append(row)
    points = [(round(fmean(s for s, _, _ in of)), median(t for _, t, _ in of), sum(n for _, _, n in of)) for of in alike.values()]
    sizes, times, counts = zip(*points, strict=True)
    return fit_curve(sizes, times, counts, MAX_LINE_ERROR_SHARE)
