"""What the compute steps of a pipeline program do on one rank: F, B, or I and W, of the stages it holds; O and R, copies to the host and back.

Names are those of `decide.pipeline.lower`. A doubled forward runs its micro-batches one after the other: their backwards come one by one, so what
each keeps must be its own. The loss of a micro-batch counts 1 / (micro-batches x replicas), so gradients summed over micro-batches, copies
and replicas are those of the mean loss, each micro-batch once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import Unsupported
from ...program.program import Program
from ..executor.executor import Action
from ..executor.memory import RankMemory
from ..steps.stand_in import as_they_are
from ..train.segment_module import SegmentModule
from .host import WaitingTensors
from .memory import PipelineMemory
from .second_order import StageKFAC

__all__ = ["StageWork", "gradient_flats", "stage_segment"]

Key = tuple[int, int]  # (copy, stage)


def stage_segment(stage: int, module: nn.Module, loss: Callable[..., torch.Tensor] | None, *, differentiable: bool) -> SegmentModule:
    """A stage as a segment: one border tensor in, one out; the last stage takes the target too and gives the loss."""
    last = loss is not None

    def run(x: torch.Tensor, *target: torch.Tensor) -> tuple[torch.Tensor]:
        y = module(x)
        return (loss(y, *target),) if loss is not None else (y,)

    return SegmentModule(
        key=f"stage{stage}", function=run, reads=("in",), writes=("loss" if last else "out",), inputs=(), constants=(),
        differentiable=(differentiable,), random=False, split=False,
    )  # fmt: skip


def gradient_flats(program: Program, rank: int, modules: Mapping[Key, nn.Module], copies: int, *, summed: bool) -> dict[str, torch.Tensor]:
    """Flat gradient buffers by name; every parameter's `.grad` becomes a view of its place in its stage's. `summed`: others hold the stages too.

    Raises: Unsupported when a stage's parameters have several dtypes, or more bytes than the program sums over the ranks that hold the stage.
    """
    b, found = program.buffers, {}
    sizes = {b.name[i]: int(b.chunks[i]) * int(b.chunk_bytes[i]) for i in (b.actor == rank).nonzero()[0].tolist()}
    for (copy, stage), module in modules.items():
        name = f"gradients:{stage}" + (f":c{copy}" if copies > 1 else "")
        trained = [p for p in module.parameters() if p.requires_grad]
        dtypes = {p.dtype for p in trained} or {torch.float32}
        if len(dtypes) > 1:
            raise Unsupported(f"its parameters have {sorted(map(str, dtypes))}", where=f"stage {stage}", hint="give a stage's parameters one dtype")
        (dtype,) = dtypes
        needed = sum(p.numel() for p in trained)
        if summed and needed * dtype.itemsize > sizes[name]:
            raise Unsupported(
                f"has {needed * dtype.itemsize} bytes of gradients, the plan sums {sizes[name]} over the ranks that hold it", where=f"stage {stage}",
                hint="plan with --gradient-bytes of the largest device share",
            )  # fmt: skip
        flat = torch.zeros(max(needed, -(-sizes[name] // dtype.itemsize)), dtype=dtype, device=trained[0].device if trained else "cpu")
        offset = 0
        for p in trained:
            p.grad = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        found[name] = flat
    return found


class StageWork:
    """`segments`: of the stages this rank holds. `inputs`, `targets`: of this replica's micro-batches. `losses`: of the last pass.

    `fill_s`: see `times.fill_seconds`. `kfac`: does the work in idle time for real. `modules`: of the stages, where what some save waits elsewhere.
    """

    def __init__(
        self, program: Program, segments: Mapping[Key, SegmentModule], inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *,
        stages: int, share: float,
        fill_s: Mapping[str, float] | None = None, kfac: StageKFAC | None = None, modules: Mapping[Key, nn.Module] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.segments, self.inputs, self.targets = program, segments, inputs, targets
        self.top, self.share = stages - 1, share
        self.fill_s, self.kfac = fill_s or {}, kfac
        self.losses: dict[int, torch.Tensor] = {}
        o = program.ops
        away = {(int(o.copy[i]), int(o.stage[i]), int(o.microbatch[i])) for i, name in enumerate(o.name) if name == "O"}
        self.waiting = {(s, m): WaitingTensors(modules[c, s]) for c, s, m in away if modules and (c, s) in modules}

    def compile(self, op: int, memory: RankMemory) -> Action:
        o = self.program.ops
        kind, copy, stage, first = o.name[op], int(o.copy[op]), int(o.stage[op]), int(o.microbatch[op])
        if o.graph[op].startswith("fill:"):  # work in idle time: as long as planned, where it is not done for real
            if self.kfac is not None:
                return self.kfac.action(o.graph[op])  # its messages only say that something is done
            return partial(time.sleep, self.fill_s[f"{o.graph[op]}|{kind}"])
        if kind in ("O", "R") and (stage, first) in self.waiting:
            moved = self.waiting[stage, first]
            return moved.leave if kind == "O" else moved.come
        last = int(o.module[op].partition("-")[2]) if o.module[op] else first
        segment = self.segments.get((copy, stage))
        make: Any = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}.get(kind)
        if segment is None or make is None:
            raise Unsupported(
                f"rank {memory.rank} cannot execute {kind!r} of stage {stage}",
                hint="the plan was made for other stages: make it again",
            )  # fmt: skip
        actions = [make(segment, stage, m, memory) for m in range(first, last + 1)]
        if len(actions) == 1:
            only: Action = actions[0]
            return only

        def one_after_the_other() -> None:
            for action in actions:
                action()

        return one_after_the_other

    def _source(self, memory: RankMemory, own: str, beside: str) -> int:
        """The buffer that comes from a neighbour: received, or written by the stage beside on this rank."""
        return memory.by_name[own] if own in memory.by_name else memory.by_name[beside]

    def _forward(self, segment: SegmentModule, stage: int, m: int, memory: PipelineMemory) -> Action:
        source = self._source(memory, f"in:{stage}:{m}", f"out:{stage - 1}:{m}") if stage else -1
        target = memory.by_name.get(f"out:{stage}:{m}", -1)
        read, put, inputs, losses = memory.read, memory.put, self.inputs, self.losses
        extra = [self.targets[m]] if stage == self.top else []
        shape = tuple(memory.borders[stage].shape) if stage < self.top else ()
        kfac, waiting = self.kfac, self.waiting.get((stage, m))

        def forward() -> None:
            if kfac is not None:
                kfac.tell(stage, m)
            x = read(source) if stage else inputs[m]
            if waiting is not None:
                waiting.begin(x, *extra)
            segment.refer = waiting.refer if waiting is not None else as_they_are
            (y,) = segment.forward(m, [x], extra)
            if target < 0:
                losses[m] = y
                return
            if tuple(y.shape) != shape:
                raise Unsupported(
                    f"stage {stage} makes {list(y.shape)} of micro-batch {m}; the schedule's messages there have {list(shape)}",
                    where=f"stage {stage}", hint="stages must give one shape for all micro-batches: pad them",
                )  # fmt: skip
            put(target, y)

        return forward

    def _gradients(self, stage: int, m: int, memory: RankMemory) -> Callable[[], list[torch.Tensor | None]]:
        if stage == self.top:
            seed = torch.tensor(self.share, dtype=torch.float64, device=memory.device)  # autograd gives it the loss's own precision
            return lambda: [seed]
        buffer = self._source(memory, f"gradin:{stage}:{m}", f"gradout:{stage + 1}:{m}")
        read = memory.read
        return lambda: [read(buffer)]

    def _backward(self, segment: SegmentModule, stage: int, m: int, memory: RankMemory) -> Action:
        return self._back(segment.backward, stage, m, memory)

    def _input(self, segment: SegmentModule, stage: int, m: int, memory: RankMemory) -> Action:
        return self._back(segment.backward_input, stage, m, memory)

    def _back(self, run: Callable[..., dict[int, torch.Tensor]], stage: int, m: int, memory: RankMemory) -> Action:
        gradients = self._gradients(stage, m, memory)
        target = memory.by_name.get(f"gradout:{stage}:{m}", -1)
        make = memory.make

        def backward() -> None:
            found = run(m, gradients())
            if target >= 0:
                if 0 in found:
                    memory.put(target, found[0], shared=True)
                else:
                    make(target, zero=True)  # nothing in the stage depends on its input

        return backward

    def _weight(self, segment: SegmentModule, stage: int, m: int, memory: RankMemory) -> Action:
        def weight() -> None:
            segment.backward_weight(m)

        return weight
