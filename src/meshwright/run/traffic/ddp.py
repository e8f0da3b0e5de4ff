"""A traffic plan under torch's DistributedDataParallel, unmodified: `ddp.register_comm_hook(PlannedTraffic(ddp, plan), traffic_hook)`.

DDP asks its hook for the mean of whole buckets, and rebuilds buckets after the first step. The plan's groups are other sets of tensors, so they
are filled by hooks of our own, one per parameter, which fire before DDP's: when the last gradient of a group is there and all earlier groups are
under way, it is encoded on the thread of the backward and handed to the communication thread. When backward ends the groups are decoded in order,
DDP's buckets are filled from them and the futures that DDP waits for are done. What DDP does beside (broadcasting buffers, finding unused
parameters, `no_sync`, gradients as views of buckets) stays as it is. The exchange uses a process group of its own.

Left open by the paper: a gradient that does not come. Our answer: it counts as zero once backward has ended; the order of the groups is the
same on all ranks whatever is unused where. Gradients that were accumulated under `no_sync` are exchanged as their sum, as DDP does.
A failed exchange raises in `backward`, on every rank that survives, within the deadline; what was encoded is back in the residual.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ...codec.codec import parse_codec
from ...errors import GroupFailed, MeshwrightError, PlanMismatch, RunError, Unsupported, UsageError
from ...traffic import TrafficPlan, TrafficTime
from ..codecs import At
from ..codecs.base import RESIDUAL, NonFinite
from ..codecs.saved import Group, load_packed, packed
from .agreement import agree, digest
from .group import GroupExchange

__all__ = ["PlannedTraffic"]

MAX_WAIT_S = 300.0  # for the other ranks in one exchange, unless the caller says otherwise


class PlannedTraffic:
    """The state of `hook.traffic_hook`. Make it on all ranks; `close` it, or let it go, when training is over.

    Of the last step: `measured` (each group's times), `ready_ns` (each gradient's), `backward_end_ns`, all from the start of its forward, which was
    at `began_s` by `time.monotonic`.

    deadline_s: how long an exchange may take. nonfinite: "refuse" raises NotFinite, "pass" sends NaN on, for loss scaling.
    Raises: PlanMismatch when the plan is for other tensors, another number of ranks, or differs between ranks; Unsupported for parameters that are
    not dense and on the CPU.
    """

    def __init__(
        self, ddp: nn.parallel.DistributedDataParallel, plan: TrafficPlan, *, deadline_s: float = MAX_WAIT_S, nonfinite: NonFinite = "refuse"
    ) -> None:
        self.deadline_s, self._nonfinite = deadline_s, nonfinite
        self.rank, self.world = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
        self._parameters = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._name = {id(p): name for name, p in self._parameters.items()}
        _require(plan, self._parameters, self.world)
        ranks = dist.get_process_group_ranks(ddp.process_group)
        self.group = dist.new_group(ranks, timeout=timedelta(seconds=deadline_s), backend="gloo", use_local_synchronization=True)
        self.step = 0
        agree(digest(plan), self.group, self.rank)
        self.measured: list[TrafficTime] = []
        self.ready_ns: dict[str, int] = {}
        self.began_s, self.backward_end_ns = 0.0, 0
        self._exchange = _Thread(self.group)
        self._begin()
        self._synchronises = False
        self._ddp_group = ddp.process_group
        self._handles = [ddp.register_forward_pre_hook(_forwards(weakref.ref(self), ddp))]
        self._arrivals: list[Any] = []
        self._owed: dict[str, torch.Tensor] = {}  # of an older plan, to be added to the next gradients
        self._take(plan, self._grouped(plan))
        weakref.finalize(self, self._exchange.close)

    def _grouped(self, plan: TrafficPlan) -> list[GroupExchange]:
        groups: list[GroupExchange] = []
        for index, g in enumerate(plan.groups if not plan.leave else ()):
            names = [t.name for t in plan.profile.tensors[g.first : g.last]]
            inside = [self._parameters[n] for n in names]
            dtype = inside[0].dtype
            for p in inside[1:]:
                dtype = torch.promote_types(dtype, p.dtype)
            groups.append(GroupExchange(index, parse_codec(g.codec), names, [tuple(p.shape) for p in inside], dtype, self._nonfinite))
        return groups

    def _take(self, plan: TrafficPlan, groups: list[GroupExchange]) -> None:
        """From here on these groups, and hooks on parameters where there are any."""
        self.plan, self.groups = plan, groups
        self._place = {id(self._parameters[name]): (g.index, position) for g in groups for position, name in enumerate(g.names)}
        while self._arrivals:
            self._arrivals.pop().remove()
        if groups:
            self._arrivals += [p.register_post_accumulate_grad_hook(_arrives(weakref.ref(self))) for p in self._parameters.values()]

    def use(self, plan: TrafficPlan, *, drop_residual: bool = False, send_residual: bool = False) -> None:
        """Go on with another plan of this model from the next step on, on all ranks; what was not sent goes over to its groups.

        A tensor whose new codec keeps nothing has no place for its residual: with `send_residual` it is added to the tensor's next gradient.
        Raises on every rank: PlanMismatch (another model, number of ranks, or plan than the other ranks'; a residual without a place, unless
        `drop_residual` or `send_residual`). The old plan then stays.
        """
        _require(plan, self._parameters, self.world)
        agree(digest(plan), self.group, self.rank)
        groups, refused = self._grouped(plan), None
        try:
            self._restored(groups, self.state_dict(), drop_residual or send_residual)
        except UsageError as error:
            refused = PlanMismatch(error.message, where=error.where, hint=error.hint)
        anywhere = torch.tensor([refused is not None], dtype=torch.int32)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
        if anywhere.item():
            raise refused or PlanMismatch("another rank's residual has no place in this plan", where="traffic state", hint="see that rank's message")
        self._owed = self._without_place(groups) if send_residual else {}
        self._take(plan, groups)

    def _without_place(self, groups: Sequence[GroupExchange]) -> dict[str, torch.Tensor]:
        """What was not sent of tensors whose group among these keeps nothing."""
        kept = {name for g in groups if RESIDUAL in g.state for name in g.names}
        owed = dict(self._owed)
        for g in self.groups:
            if RESIDUAL in g.state:
                pieces = g.state[RESIDUAL].split([torch.Size(s).numel() for s in g.shapes])
                owed |= {name: piece.clone().view(s) for name, piece, s in zip(g.names, pieces, g.shapes, strict=True)}
        return {name: piece for name, piece in owed.items() if name not in kept}

    def _send_owed(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        if self._owed:
            for name, gradient in zip(names, gradients, strict=True):
                if (owed := self._owed.pop(name, None)) is not None:
                    gradient.add_(owed.view_as(gradient))

    def _begin(self) -> None:
        self._next, self._waiting = 0, False
        self._buckets: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor, list[tuple[torch.Tensor, tuple[int, int]]]]] = []
        self._spans: list[list[float]] = []
        self._arrived: dict[str, float] = {}
        self._began = time.monotonic()

    def forward(self, synchronises: bool) -> None:
        """A forward begins, whose backward exchanges gradients or, under `no_sync`, does not."""
        if self._waiting:  # the last backward was given up half-way
            for group in self.groups:
                group.give_up()
        self._synchronises = synchronises
        self._begin()

    def arrive(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete."""
        if not self._synchronises:
            return
        if not self._waiting:
            self._waiting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        index, position = self._place[id(parameter)]
        if index < self._next:
            name = self.groups[index].names[position]
            raise Unsupported(
                f"a second gradient of {name} came after the first was sent", where="traffic hook",
                hint="checkpointing with use_reentrant=True or a second backward does this; use use_reentrant=False, or accumulate under no_sync",
            )  # fmt: skip
        gradient = parameter.grad
        assert gradient is not None
        self.groups[index].put(position, gradient)
        self._arrived[self.groups[index].names[position]] = time.monotonic()
        while self._next < len(self.groups) and self.groups[self._next].complete:
            self._launch()

    def _launch(self) -> None:
        group, at = self.groups[self._next], At(step=self.step, rank=self.rank, world=self.world)
        self._send_owed(group.names, group.parts)
        start = time.monotonic()
        group.encode(at)
        self._spans.append([start, time.monotonic()])
        self._exchange.put(group, at)
        self._next += 1

    def bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's bucket is full: a future that holds its mean once backward has ended; or at once, where gradients are left to DDP."""
        if self.plan.leave:
            self._send_owed([self._name[id(p)] for p in bucket.parameters()], bucket.gradients())
            return allreduce_hook(self._ddp_group, bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        places = [self._place[id(p)] for p in bucket.parameters()]
        self._buckets.append((done, bucket.buffer(), list(zip(bucket.gradients(), places, strict=True))))
        return done

    def _finish(self) -> None:
        """Backward is over: send what is left, decode in order, fill DDP's buckets."""
        ended = time.monotonic()
        try:
            for group in self.groups[self._next :]:
                group.leave_out()
                self._launch()
            rows = []
            for group, (start, encoded) in zip(self.groups, self._spans, strict=True):
                sent, arrived = self._exchange.wait(group.index)
                at = time.monotonic()
                group.decode(self.world)
                rows.append((start, encoded, sent, arrived, at, time.monotonic()))
        except (MeshwrightError, RuntimeError) as error:
            raise self._failed(error) from error
        for done, buffer, views in self._buckets:
            for view, (index, position) in views:
                view.copy_(self.groups[index].parts[position])
            done.set_result(buffer)
        for group in self.groups:
            group.begin()
        fields = TrafficTime.__struct_fields__
        self.measured = [TrafficTime(**{f: self._since(t) for f, t in zip(fields, row, strict=True)}) for row in rows]
        self.ready_ns = {name: self._since(t) for name, t in self._arrived.items()}
        self.began_s, self.backward_end_ns = self._began, self._since(ended)
        self._buckets = []  # views of DDP's memory
        self._synchronises = self._waiting = False
        self.step += 1

    def _since(self, at_s: float) -> int:
        return int((at_s - self._began) * 1e9)

    def _failed(self, error: Exception) -> MeshwrightError:
        self._exchange.close()
        at = next((g for g in self.groups if g.payload is not None), self.groups[-1])
        for group in self.groups:
            group.give_up()
        self._synchronises = self._waiting = False
        if isinstance(error, MeshwrightError):
            return error
        text = str(error).splitlines()[0][:200]
        timed_out = "imed out" in text
        return GroupFailed(
            f"the exchange of {at.codec.name} in step {self.step} {'took too long' if timed_out else 'broke off'}: {text}", where=f"rank {self.rank}",
            hint="a rank has died or hangs: look at the other ranks' output; residuals are as in the last checkpoint plus what was not sent",
            data={
                "rank": self.rank, "step": self.step, "group": at.index, "kind": "timeout" if timed_out else "closed", "deadline_s": self.deadline_s,
            },
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank must hold beside model and optimiser: codec states as `codecs.saved.packed` has them."""
        groups = {str(g.index): g for g in self.groups}
        described, states = {n: g.described() for n, g in groups.items()}, {n: g.state for n, g in groups.items()}
        if self._owed:  # a group whose codec keeps a residual and nothing else
            described["owed"] = Group(codec="topk", tensors=tuple((n, tuple(t.shape)) for n, t in self._owed.items()))
            states["owed"] = {RESIDUAL: torch.cat([t.flatten() for t in self._owed.values()])}
        return packed(described, states, step=self.step, rank=self.rank, world=self.world)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, drop_residual: bool = False) -> None:
        """Go on from a checkpoint: this rank's state, or the states of all ranks of a run with another number of ranks.

        Raises: FormatError for what is no such state; UsageError when something unsent has no place under this plan and `drop_residual` is not said.
        """
        self.step = self._restored(self.groups, saved, drop_residual)

    def _restored(self, groups: Sequence[GroupExchange], saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], drop_residual: bool) -> int:
        """Fill these groups' states; gives the step to go on with."""
        described = {str(g.index): g.described() for g in groups}
        step, found = load_packed(saved, described, rank=self.rank, world=self.world, drop_residual=drop_residual)
        for g in groups:
            for key, value in found[str(g.index)].items():
                g.state[key].copy_(value)
        return step

    def close(self) -> None:
        """Take the hooks away and end the communication thread."""
        for handle in (*self._handles, *self._arrivals):
            handle.remove()
        self._exchange.close()
        self._buckets = []


def _forwards(state: weakref.ref[PlannedTraffic], ddp: nn.parallel.DistributedDataParallel) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        if (found := state()) is not None and torch.is_grad_enabled():
            found.forward(ddp.require_backward_grad_sync)

    return hook


def _arrives(state: weakref.ref[PlannedTraffic]) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        if (found := state()) is not None:
            found.arrive(parameter)

    return hook


def _require(plan: TrafficPlan, parameters: Mapping[str, nn.Parameter], world: int) -> None:
    if plan.profile.ranks != world:
        raise PlanMismatch(f"the plan is for {plan.profile.ranks} ranks, there are {world}", where="traffic plan", hint="plan again")
    planned = {t.name: t for t in plan.profile.tensors}
    if odd := sorted(planned.keys() ^ parameters.keys()):
        where = "the model" if odd[0] in planned else "the plan"
        raise PlanMismatch(f"{where} has no parameter {odd[0]!r}", where="traffic plan", hint="plan for this model", data={"differ": odd[:16]})
    for name, p in parameters.items():
        if tuple(p.shape) != planned[name].shape:
            raise PlanMismatch(f"{name} has shape {tuple(p.shape)}, the plan says {planned[name].shape}", where="traffic plan", hint="plan again")
        if p.device.type != "cpu" or not p.dtype.is_floating_point:
            raise Unsupported(f"{name} is {p.dtype} on {p.device}", where="traffic hook", hint="codecs take floating-point parameters on the CPU")


class _Thread:
    """Exchanges groups one after the other; a failure ends it, and everybody who waits hears of it."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.work: queue.SimpleQueue[tuple[GroupExchange, At] | None] = queue.SimpleQueue()
        self.done: dict[int, tuple[float, float]] = {}
        self.error: Exception | None = None
        self.changed = threading.Condition()
        self.process_group = process_group
        self.thread = threading.Thread(target=self._run, name="meshwright-traffic", daemon=True)
        self.thread.start()

    def put(self, group: GroupExchange, at: At) -> None:
        self.work.put((group, at))

    def wait(self, index: int) -> tuple[float, float]:
        """(start, end) of the exchange. Raises: what it raised."""
        with self.changed:
            self.changed.wait_for(lambda: index in self.done or self.error is not None or not self.thread.is_alive())
            if index in self.done:
                return self.done.pop(index)
        raise self.error or RunError("the communication thread has ended", where="traffic hook", hint="this traffic state was closed")

    def _run(self) -> None:
        while (task := self.work.get()) is not None:
            group, at = task
            start = time.monotonic()
            try:
                group.exchange(at, self.process_group)
            except Exception as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.done[group.index] = (start, time.monotonic())
                self.changed.notify_all()

    def close(self) -> None:
        """End after what is under way; a thread that hangs in an exchange ends with the process group's deadline."""
        self.work.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=1.0)
