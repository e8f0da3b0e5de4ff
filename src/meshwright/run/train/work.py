"""What the compute steps of a training program do on one rank: `F`, `R` and `B` (or `I` and `W`) of segments, `encode`, `advance`, `decode`,
`optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch

from ...errors import RunError, Unsupported
from ...plan.context import filled_rows
from ...plan.forward_again import AGAIN, remade_values
from ...plan.plan import TrainingLayout
from ...program.program import Program
from ..executor.memory import RankMemory
from .checks import BatchChecks
from .compressed import STEPS, CompressedGroups
from .count_exchange import CountExchange
from .folds import GradientFolds
from .loss_counts import LossCounts
from .norm import GradientNorm
from .segments import RankModule, SegmentModule, random_seed
from .sharded_state import ParameterGroup, referring
from .update import Update

__all__ = ["BatchSource", "TrainingWork", "gradient_bytes", "optimizer_update"]


class BatchSource(Protocol):
    """Micro-batches by what they are, not by who asks: `inputs` of (step, replica, micro-batch), one tensor per example input."""

    def microbatch(self, step: int, replica: int, microbatch: int) -> Sequence[torch.Tensor]: ...


WITH_SIZES = ("gradients", "gradshard", "folds", "sum", "norm:")  # buffers whose tensors are made here, in the plan's sizes


@dataclass
class TrainingWork:
    """State of the compute steps. Set `step` before every pass; `losses` then holds the loss of every micro-batch (last stage only)."""

    program: Program
    layout: TrainingLayout
    rank: int
    module: RankModule
    data: BatchSource
    optimizer: Any  # torch.optim.Optimizer
    seed: int = 0
    alone: bool = False  # messages are left out: the steps are only timed
    step: int = 0
    checks: BatchChecks | None = None
    exchange: CountExchange | None = None  # where a rank has the samples of its own replica only
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    _batches: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)  # what this rank reads, by the number of the input
    _before: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers of `RankModule.once` when the step began
    _shares: dict[int, float] = field(default_factory=dict)  # of micro-batches whose losses count for unlike much
    compressed: CompressedGroups = field(init=False)

    def __post_init__(self) -> None:
        self.compressed = CompressedGroups(self.layout, self.rank, self.module, alone=self.alone)

    def begin(self, step: int) -> None:
        """Start training step `step`: fetch what this rank reads of its micro-batches, forget the last one's."""
        self.step = self.compressed.step = step
        self.losses.clear()
        self._batches.clear()
        mine = (b for key, names in self.module.once.items() if key in self.module.segments for b in names)
        self._before = {b: self.module.buffers[b].detach().clone() for b in mine}
        lay, (pipeline, replica, _) = self.layout, self.layout.coordinates(self.rank)
        own = cache(partial(self.data.microbatch, step, replica))  # a sample is fetched once
        if self.module.counts is not None:
            self._count(self.module.counts, step, replica, own)
        if not any(s.inputs for s in self.module.segments.values()):
            return
        read: dict[int, set[int]] = {}  # by copy of the stages
        for stage, copy in lay.hosted(pipeline):
            read.setdefault(copy, set()).update(i for key in lay.stages[stage].segments for i in self.module.segments[key].inputs)
        for mb in range(lay.microbatches_of(replica)):
            if wanted := read.get(lay.copy(mb), set()):
                found = own(mb)
                if self.checks is not None:
                    self.checks(found)
                self._batches[mb] = {i: found[i] for i in wanted}

    def _count(self, counts: LossCounts, step: int, replica: int, own: Callable[[int], Sequence[torch.Tensor]]) -> None:
        """What the loss is divided by in this step: counts of all replicas' micro-batches, from the ranks that have them, or else from the data."""
        lay = self.layout
        mine = range(lay.microbatches_of(replica))
        counts.awaited.settle()
        if self.exchange is not None:
            sums = self.exchange.begin(counts, map(own, mine))
        else:
            others = [] if self.alone else [(d, mb) for d in range(lay.data) if d != replica for mb in range(lay.microbatches_of(d))]
            batches = [*map(own, mine), *(self.data.microbatch(step, d, mb) for d, mb in others)]
            found = {v: x * lay.all_microbatches / len(batches) for v, x in counts.sums(batches).items()}
            sums = lambda: found  # noqa: E731

        def fill() -> None:  # members of a context group have the same samples, so each of their targets was counted by all of them
            counts.fill({v: x / lay.context for v, x in sums().items()}, lay.all_microbatches)

        if self.exchange is not None and not self.module.weighted:
            counts.awaited.pending = fill  # the first call that divides waits for the others' counts
            return
        fill()
        if self.module.weighted:
            self._shares.update({mb: counts.weight(own(mb), lay.all_microbatches) for mb in mine})

    def loss(self) -> float | None:
        """This rank's part of the mean loss of the current step, so that the mean over ranks that compute some is it; None where none is computed.

        With a replica of its own whole share, that is the mean loss of its micro-batches.
        """
        if not self.losses:
            return None
        shares = len(set(self.layout.copy_of)) or 1
        return sum(float(x) for x in self.losses.values()) * shares / (self.layout.all_microbatches / self.layout.data)

    def said(self) -> dict[str, float]:
        """What is known of the step that is over, beside its loss."""
        found = {}
        if self.layout.step_end.norm and self.norm.total is not None:
            found["gradient_norm"] = float(self.norm.total)
        if isinstance(self.optimizer, Update) and self.optimizer.scaler is not None:
            found["loss_scale"] = self.optimizer.scaler.scale
        return found

    def compile(self, op: int, memory: RankMemory) -> Callable[[], None]:
        ops = self.program.ops
        name = ops.name[op]
        if name == "norm":
            return self.norm.compile(op)
        if name == "optimizer":
            return self._optimizer(op)
        if name in STEPS:
            return self.compressed.compile(name, ops.graph[op], memory)
        segment = self.module.segments.get(ops.graph[op])
        actions = {"F": self._forward, "R": self._forward_again, "B": self._backward, "I": self._backward, "W": self._weights}
        if segment is None or name not in actions:
            raise Unsupported(
                f"rank {self.rank} cannot execute {name!r} of {ops.graph[op]!r}",
                hint="program and layout of the plan are of different plans: make it again",
            )  # fmt: skip
        microbatch = int(ops.microbatch[op])
        action = actions[name](segment, microbatch, memory)
        action = self._with_whole(op, memory, action) if self.module.groups else action
        return self.folds.after(op, action) if self.layout.step_end.folded and not self.layout.in_turn else action

    @cached_property
    def folds(self) -> GradientFolds:
        own = self.layout.microbatches_of(self.layout.coordinates(self.rank)[1])
        return GradientFolds(self.program, self.rank, self.module.gradients, own)

    def _with_whole(self, op: int, memory: RankMemory, action: Callable[[], None]) -> Callable[[], None]:
        """The action with gathered weights attached, and whole gradients to add to."""
        ops, names = self.program.ops, self.program.buffers.name

        def groups(triples: Sequence[int], kind: str) -> list[tuple[ParameterGroup, int]]:
            buffers = [b for b in triples[::3] if names[b].startswith(f"{kind}:")]
            return [(self.module.groups[memory.info(b).value], b) for b in buffers]

        gathered, full = groups(ops.reads[op].tolist(), "gathered"), groups(ops.writes[op].tolist(), "gradfull")
        if not gathered and not full:
            return action
        attached = [g for g, _ in gathered]
        segment = self.module.segments[ops.graph[op]]

        def act() -> None:
            for g, buffer in gathered:
                g.attach(memory.make(buffer))
            for g, buffer in full:
                g.collect(memory.make(buffer, zero=True))
            segment.refer = referring(attached)
            action()
            for g, _ in full:
                g.let_go()
            for g in attached:
                g.detach()

        return act

    @cached_property
    def _remade(self) -> Mapping[str, frozenset[str]]:
        return remade_values(self.layout)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        """Values that say how many of experts' rows are filled."""
        return frozenset(filled_rows(self.layout).values())

    @cached_property
    def _own_storages(self) -> frozenset[int]:
        """Where the module's buffers lie."""
        return frozenset(b.untyped_storage().data_ptr() for b in self.module.buffers.values() if b.numel())

    @cached_property
    def norm(self) -> GradientNorm:
        return GradientNorm(self.program, self.layout, self.rank, self.module.updated(), self.module.norms)

    def _optimizer(self, op: int) -> Callable[[], None]:
        if not isinstance(self.optimizer, Update):
            return optimizer_update(self.optimizer.step, self.module)
        if (self.optimizer.clip_norm or self.optimizer.scaler) and not self.layout.step_end.norm:
            raise Unsupported("the job asks for the norm of gradients, and the plan's layout does not", hint="make the plan again")
        norm = self.norm.final(op) if self.layout.step_end.norm else None
        weights = [t for _, t, _ in self.module.updated()]
        return optimizer_update(partial(self.optimizer.clipped_step, weights, norm), self.module)

    def _forward_again(self, segment: SegmentModule, microbatch: int, memory: RankMemory) -> Callable[[], None]:
        return self._forward(segment, microbatch, memory, second=True)

    def _forward(self, segment: SegmentModule, microbatch: int, memory: RankMemory, *, second: bool = False) -> Callable[[], None]:
        """`second`: of a segment that runs forward again before backward, and keeps what backward needs then only."""
        read, batches, losses, put, loss_name = memory.read, self._batches, self.losses, memory.put, self.module.loss
        remade = self._remade.get(segment.key, frozenset()) if second else frozenset()
        part, whole, summed = AGAIN.values() if second else AGAIN
        reads = [
            self._buffer(
                memory,
                f"{whole}:{v}:{segment.key}:{microbatch}" if v in segment.gathers else f"{part if v in remade else 'act'}:{v}:{microbatch}",
            )
            for v in segment.reads
        ]  # fmt: skip
        sums = [memory.by_name.get(f"{summed}:{v}:{microbatch}", -1) for v in segment.writes]
        writes = [(v, b if b >= 0 else memory.by_name.get(f"{part}:{v}:{microbatch}", -1)) for v, b in zip(segment.writes, sums, strict=True)]
        kept = {v: self._buffer(memory, f"act:{v}:{microbatch}") for v, b in writes if second and v in self._numbers}
        again = frozenset(i for i, v in enumerate(segment.reads) if f"actagain:{v}:{segment.key}:{microbatch}" in memory.by_name)
        missing = [v for v, b in writes if b < 0 and v != loss_name and (not second or v in remade)]
        if missing:
            raise Unsupported(f"the program has no buffer for {missing[0]!r}, which segment {segment.key!r} writes")
        replica, tensor = self.layout.coordinates(self.rank)[1:]
        if self.layout.step_end.folded:  # by its number in the step, whose replica does not matter
            place_of = (0, self.layout.first_sample(replica, microbatch) // self.layout.microbatch_size)
        else:
            place_of = (replica, microbatch)
        place = (*place_of, segment.key, *((tensor,) if segment.split else ()))
        lay, draws = self.layout, self.module.draws
        sample, weights, values = lay.first_sample(replica, microbatch), self._shares, memory.values
        once = self.module.once.get(segment.key, ())
        own, keeps = self._own_storages, second or segment.key not in self._remade

        def forward() -> None:
            for name in once:
                self.module.buffers[name].detach().copy_(self._before[name])
            draws.seed, draws.step, draws.first, draws.samples = self.seed, self.step, self.step * lay.global_batch + sample, lay.microbatch_size
            if segment.random:
                torch.manual_seed(random_seed(self.seed, self.step, *place))
            batch = batches.get(microbatch, {})
            given = [read(b) for b in reads], [batch[i] for i in segment.inputs]
            outputs = segment.forward(microbatch, *given, again) if keeps else segment.forward_only(*given)
            for (value, buffer), output in zip(writes, outputs, strict=True):
                if value in kept and not torch.equal(output, values[kept[value]]):
                    text = f"segment {segment.key!r} sent other numbers of rows to experts when it ran forward again before its backward"
                    raise RunError(text, where=f"rank {self.rank}, step {self.step}", hint="choose deterministic kernels")
                if value == loss_name:
                    losses[microbatch] = output if microbatch not in weights else output * (weights[microbatch] * lay.all_microbatches)
                if buffer >= 0:  # what lies in a buffer of the module is copied: the next micro-batch changes it, perhaps before it is sent
                    put(buffer, output.clone() if output.untyped_storage().data_ptr() in own else output)

        return forward

    def _backward(self, segment: SegmentModule, microbatch: int, memory: RankMemory) -> Callable[[], None]:
        values, put, names, loss_name = memory.values, memory.put, memory.by_name, self.module.loss
        exact = 1.0 / self.layout.all_microbatches
        share = torch.tensor(exact, dtype=torch.float64, device=memory.device)  # autograd gives it the loss's own precision
        gathered = [names.get(f"gradall:{v}:{microbatch}", names.get(f"grad:{v}:{microbatch}", -1)) for v in segment.writes]
        incoming = [-1 if v == loss_name else b for v, b in zip(segment.writes, gathered, strict=True)]
        seeds = [share if v == loss_name else None for v in segment.writes]
        again = {i: b for i, v in enumerate(segment.reads) if (b := names.get(f"actagain:{v}:{segment.key}:{microbatch}", -1)) >= 0}
        read, outgoing = memory.read, dict[int, int]()
        for i, v in enumerate(segment.reads):
            if segment.differentiable[i]:
                part = names.get(f"gradpart:{v}:{segment.key}:{microbatch}", -1)
                outgoing[i] = part if part >= 0 else self._buffer(memory, f"grad:{v}:{microbatch}")

        scaler = self.optimizer.scaler if isinstance(self.optimizer, Update) else None
        weights = self._shares
        split = self.layout.split_backward
        run = segment.backward_input if split else segment.backward

        def backward() -> None:
            if microbatch in weights:
                share.fill_(weights[microbatch])
            factor = 1.0 if scaler is None else scaler.scale
            gradients = [read(b) if b >= 0 else seed if seed is None else seed * factor for b, seed in zip(incoming, seeds, strict=True)]
            seen = {_storage(g) for g in gradients if g is not None}
            for i, gradient in run(microbatch, gradients, {i: read(b) for i, b in again.items()}).items():
                buffer = outgoing[i]
                before = values[buffer]
                if before is not None:
                    put(buffer, before + gradient)
                else:
                    storage = _storage(gradient)
                    put(buffer, gradient, shared=split or storage in seen)  # what is left of a split backward holds gradients too
                    seen.add(storage)

        return backward

    def _weights(self, segment: SegmentModule, microbatch: int, memory: RankMemory) -> Callable[[], None]:
        return partial(segment.backward_weight, microbatch)

    def _buffer(self, memory: RankMemory, name: str) -> int:
        if name not in memory.by_name:
            raise Unsupported(
                f"the program has no buffer {name!r} on rank {self.rank}",
                hint="program and layout of the plan are of different plans: make it again",
            )  # fmt: skip
        return memory.by_name[name]


def optimizer_update(step: Callable[[], object], module: RankModule) -> Callable[[], None]:
    """The optimizer's step, then zero gradients for the next."""
    flats = list(module.gradients.values())

    def update() -> None:
        step()
        for flat in flats:
            flat.zero_()

    return update


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def gradient_bytes(program: Program, rank: int) -> Mapping[str, int]:
    """Sizes of the gradient buffers of `rank` that live between steps, of the sums of their encoded forms, and of what the ranks' parts of their norm
    are gathered in, padding included, by name."""
    b = program.buffers
    mine = (b.actor == rank).nonzero()[0].tolist()
    return {b.name[i]: int(b.chunks[i]) * int(b.chunk_bytes[i]) for i in mine if b.name and b.name[i].startswith(WITH_SIZES)}
