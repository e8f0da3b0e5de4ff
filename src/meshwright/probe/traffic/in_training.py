"""Gradient traffic planned while a job trains: every measured step is a step of the training, and none is made for measuring alone.

The first steps go through plans that are there to be timed (`schedule`). Their gradients are those of the job: what a codec holds back is sent in
later steps, also where the next plan's codec keeps nothing. Then costs are fitted, the plan is made and used from the next step on. What remains
of the steps times that plan itself; if it is not what the costs, fitted again, would choose, the next one takes its place.

Cite: Wang, Wu, Xu, Ng, "Cupcake", MLSys 2023, section 4 (cost functions from measurement).
Left open by the paper: what measuring costs the job. Our answer: no step, and the planning itself, which the first rank does between two steps.
Deviations: a step's end is when the optimizer begins (any of `torch.optim`); without one it is the end of backward, and DDP's own way is no choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...codec.codec import parse_codec
from ...decide.traffic.problem import groups_of
from ...drive.traffic import with_groups
from ...errors import CaptureError, UsageError
from ...run.codecs import At, make_codec
from ...run.codecs.base import NonFinite
from ...run.traffic import PlannedTraffic, traffic_hook
from ...traffic import GradientTensor, TrafficPlan, TrafficProfile
from ..fabric.first_rank import first_rank_bytes
from .settled_plan import planned
from .steps import Groups, ProbeStep, fit_profile, probe_plan, step_times

__all__ = ["FIRST_STEPS", "TrafficInTraining", "schedule"]

FIRST_STEPS = 4  # two in one group (DDP orders its buckets anew after the first), two left to DDP
SETTLING_STEPS = 2  # kept for the plan itself
MAX_SHARES = 8  # groups of a probe step whose sizes halve
_WARM_SHAPE = (64, 64)  # of the gradient on which a codec's kernels are loaded before the first step


def schedule(tensors: Sequence[GradientTensor], codecs: Sequence[str], steps: int) -> list[Groups]:
    """Which groups go through which codec in each of `steps` steps: of every codec groups of halving sizes and all in one, in turns.

    One step with groups of eight sizes says as much of a codec's times as eight steps with one.
    """
    n, left = len(tensors), sum(t.elements for t in tensors)
    ends, held = list[int](), 0
    for i, t in enumerate(tensors[:-1], 1):
        held += t.elements
        if 2 * held >= left and len(ends) < MAX_SHARES - 1:  # each has half of what the ones before it left
            ends, held, left = [*ends, i], 0, left - held
    turns = [([*ends, n], [n])[turn % 2] for turn in range(-(-steps // len(codecs)))]
    return [groups_of(groups, codec) for groups in turns for codec in codecs][:steps]


class TrafficInTraining:
    """Registers the hook; train as always. `done`: the plan in use (`plan`) is settled; `state`: as of `planned_traffic`; `profile`: what was fitted.

    Make it on all ranks. Every step, all ranks' next forward that exchanges gradients looks at the step before: a barrier and a few numbers while
    measuring, nothing afterwards.
    """

    def __init__(
        self, ddp: nn.parallel.DistributedDataParallel, codecs: Sequence[str], *, steps: int = 20, deadline_s: float = 300.0,
        nonfinite: NonFinite = "refuse",
    ) -> None:  # fmt: skip
        """`steps`: of training, until the plan is settled. Raises: UsageError (too few of them for these codecs), CaptureError (no parameter has a
        gradient), UnknownName (codec), what `PlannedTraffic` raises."""
        self.codecs = tuple(dict.fromkeys(parse_codec(c).text for c in ("none", *codecs)))
        least = FIRST_STEPS + len(self.codecs) + SETTLING_STEPS
        if steps < least:
            raise UsageError(f"{steps} steps are too few to time {len(self.codecs)} codecs", where="steps", hint=f"give at least {least}")
        tensors = tuple(GradientTensor(name=n, shape=tuple(p.shape), ready_ns=0) for n, p in ddp.module.named_parameters() if p.requires_grad)[::-1]
        if not tensors:
            raise CaptureError("no parameter gets a gradient", where=type(ddp.module).__name__, hint="does the loss depend on the parameters?")
        for codec in self.codecs:
            _warm(codec)
        self.steps, self.ranks = steps, ddp.process_group
        self.tensors, self.plan, self.profile, self.done = tensors, None, None, False
        self.plain: list[int] = []
        self.found: dict[Groups, list[ProbeStep]] = {}
        self.tried: list[Groups] = []
        self.made = 0  # steps that are over
        whole = groups_of([len(tensors)], "none")
        self.state = PlannedTraffic(ddp, probe_plan(tensors, whole, dist.get_world_size(self.ranks)), deadline_s=deadline_s, nonfinite=nonfinite)
        ddp.register_comm_hook(self.state, traffic_hook)
        self._ahead: list[Groups] = []
        self._start, self._end = 0.0, 0.0
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._before_forward(ddp), prepend=True), register_optimizer_step_pre_hook(self._before_optimizer),
        ]  # fmt: skip

    plan: TrafficPlan | None
    profile: TrafficProfile | None

    def _before_optimizer(self, *_: object) -> None:
        if not self._end:
            self._end = time.monotonic()

    def _before_forward(self, ddp: nn.parallel.DistributedDataParallel) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled() and ddp.require_backward_grad_sync and not self.done:
                if self._start:
                    self._step_is_over()
                if not self.done:
                    dist.barrier(self.ranks)
                    self._start, self._end = time.monotonic(), 0.0

        return hook

    # ---- between two steps, on all ranks alike
    def _step_is_over(self) -> None:
        last = int(((self._end or self.state.began_s + self.state.backward_end_ns / 1e9) - self._start) * 1e9)
        if self.state.plan.leave:
            slowest = torch.tensor([last if self._end else 0])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.ranks)
            self.plain.append(int(slowest))
        else:
            step = step_times(self.state, self._start, last, self.ranks)
            if self.made:  # not the first: DDP makes its buckets then
                self.found.setdefault(step.groups, []).append(step)
        self.made += 1
        whole = groups_of([len(self.tensors)], "none")
        if self.made == 1:
            return
        if self.made == 2:
            (step,) = self.found.pop(whole)
            order = sorted(range(len(self.tensors)), key=lambda i: step.ready_ns[i])  # equal on all ranks, as the times are
            self.tensors = tuple(self.tensors[i] for i in order)
            self.found[whole] = [replace(step, ready_ns=tuple(step.ready_ns[i] for i in order))]
            self._ahead = schedule(self.tensors, self.codecs, self.steps - FIRST_STEPS - SETTLING_STEPS)
            self._use(msgspec.structs.replace(probe_plan(self.tensors, whole, self.state.world), leave=True))
        elif self.made >= FIRST_STEPS and self._ahead:
            self._use(probe_plan(self.tensors, self._ahead.pop(0), self.state.world))
        elif self.made >= FIRST_STEPS:
            self._settle()

    def _use(self, plan: TrafficPlan) -> None:
        self.state.use(plan, send_residual=True)

    def _settle(self) -> None:
        """Fit, plan, and use the plan; done once it is one that has run, or no step is left."""
        names, plain_ns = self.codecs, int(median(self.plain)) if all(self.plain) else 0
        fit = b""
        if self.state.rank == 0:
            profile, _ = fit_profile(self.tensors, names, list(self.found.values()), self.state.world)
            fit = msgspec.json.encode(msgspec.structs.replace(profile, plain_ns=plain_ns))
        self.profile = msgspec.json.decode(first_rank_bytes(fit, self.ranks), type=TrafficProfile)
        self.plan = planned(self.profile, self.state.rank, self.ranks)
        ran = [g for g in self.tried if g in self.found]
        self.done = self.made >= self.steps or self.plan.leave or self.plan.groups in self.found
        if self.made >= self.steps and not self.plan.leave and self.plan.groups not in self.found and ran:
            self.plan = with_groups(self.plan, min(ran, key=lambda g: median(s.end_ns for s in self.found[g])))
        self.tried.append(self.plan.groups)
        self._use(self.plan)
        if self.done:
            for handle in self._handles:
                handle.remove()


def _warm(codec: str) -> None:
    """Load a codec's kernels: the first step would count that."""
    made = make_codec(parse_codec(codec), [_WARM_SHAPE], name="warming")
    state, x = made.new_state(), torch.randn(_WARM_SHAPE).flatten()
    payload, at = made.encode(x, state, At(step=0)), At(step=0)
    if made.spec.aggregation == "all-reduce":
        while (following := made.advance(payload, state, at)) is not None:
            payload = following
    made.decode(payload, torch.zeros_like(x))
