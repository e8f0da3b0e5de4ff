"""One rank's walk through an expert layer's programs: forward, and backward by autograd, with the tensors of each step kept apart.

The program says what is sent when, and what waits for what; here are the tensors behind its buffers and the experts behind its compute steps. A pair
of compiled programs belongs to one step from its forward pass to the end of its backward pass, and is used again afterwards.
Invariant: outputs and gradients are those of the layer in one process, whatever the choice, but for the order of sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ...cost import assumed_cost
from ...decide.experts import Choice, ExpertShape
from ...drive.experts import LayerPrograms
from ...errors import GroupFailed
from ...program.calls import inline
from ...program.program import Program
from ...program.tables import I32
from ...simulate import simulate_program
from ..executor.executor import Executor, StepFailed
from ..executor.held_groups import holds_group
from ..executor.lanes import fuse_lanes
from ..executor.memory import RankMemory
from ..executor.transport import TaggedTransport
from ..group.messages import end_waits
from .ragged import END_TAG
from .weights import WeightLayout

__all__ = ["ExchangeRunner", "Held"]

MAX_KEPT = 16  # programs of a layer that stay compiled; each has buffers for one step
Run = Callable[[torch.Tensor, dict[str, torch.Tensor], float], torch.Tensor]


@dataclass
class Held:
    """Two compiled programs of a step. `keep`: gradients are wanted; `leaves`: of every chunk its rows and what they became; `params`: gathered."""

    key: tuple[Any, ...]
    passes: dict[bool, _Pass] = field(default_factory=dict)  # backward?
    keep: bool = False
    leaves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Pass:
    tensors: dict[str, torch.Tensor]
    executor: Executor


class ExchangeRunner:
    """Args: group: of torch.distributed, on whose tags nothing else runs; run: the experts' function (`nn.ExpertForm.run`).

    on_time: told (choice, capacity, seconds, pass) after every pass: "forward" or "backward" of a training step, or "inference".
    """

    def __init__(
        self, group: Any, rank: int, programs: LayerPrograms, layout: WeightLayout, run: Run, on_time: Callable[[Choice, int, float, str], None],
    ) -> None:  # fmt: skip
        self.group, self.rank, self.programs, self.layout, self.run_experts, self.on_time = group, rank, programs, layout, run, on_time
        holds_group(self)
        self.shape: ExpertShape = programs.shape
        self._programs = {programs.shape.element_bytes: programs}  # by bytes of an element
        self._free: dict[tuple[Any, ...], list[Held]] = defaultdict(list)
        self._forms: dict[tuple[Choice, int, bool, int], tuple[Program, list[I32]]] = {}

    def run(self, encoded: torch.Tensor, slices: torch.Tensor, whole: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Experts' buffers [E, C, H] through the experts, [E, C, output]; gradients of all three arguments. Raises: UsageError, GroupFailed."""
        shape, capacity = self.shape, encoded.shape[1]
        self.shape.require(choice, capacity)
        if not choice.degree:
            done = _Step.apply(encoded.reshape(1, -1), slices, whole, self, choice, capacity)
            return done.view(shape.experts, capacity, shape.output)
        r, d, homes = choice.degree, choice.chunks, shape.experts // shape.local
        copies, rows = shape.shares // r, shape.block_rows(choice, capacity)
        cut = encoded.view(homes, shape.local, 1, copies, d, rows, shape.model).expand(-1, -1, r, -1, -1, -1, -1)
        blocks = cut.permute(4, 0, 2, 3, 1, 5, 6).reshape(d, -1)
        done = _Step.apply(blocks, slices, whole, self, choice, capacity).view(d, homes, r, copies, shape.local, rows, shape.output)
        total = done.sum(2) if r > 1 else done[:, :, 0]
        out: torch.Tensor = total.permute(1, 3, 2, 0, 4, 5).reshape(shape.experts, capacity, shape.output)
        return out

    # ---- passes ------------------------------------------------------------------------------------------------
    def forward(self, blocks: torch.Tensor, slices: torch.Tensor, whole: torch.Tensor, choice: Choice, capacity: int, keep: bool) -> Any:
        began = perf_counter()
        held = self._take(choice, capacity, blocks.dtype)
        tensors = held.passes[False].tensors
        for i in range(len(blocks)):
            tensors[f"tokens:{i}"].copy_(blocks[i])
        held.leaves.clear()
        held.params = []
        for name, own in (("slices", slices), ("whole", whole)):
            if (gathered := tensors.get(name)) is not None:
                gathered.view(-1, own.numel())[self._place(name, choice)].copy_(own)
        held.keep = keep
        self._walk(held.passes[False], choice, "forward")
        out = torch.stack([tensors[f"returned:{i}"] for i in range(len(blocks))])
        if not keep:
            self._give(held)
        self.on_time(choice, capacity, perf_counter() - began, "forward" if keep else "inference")
        return out, held

    def backward(self, held: Held, grad: torch.Tensor, choice: Choice, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        began = perf_counter()
        if True not in held.passes:
            held.passes[True] = self._compile(held, choice, capacity, grad.dtype, backward=True)
        made = held.passes[True]
        for i in range(len(grad)):
            made.tensors[f"tokens:{i}"].copy_(grad[i])
        for name in ("slices", "whole"):
            if name in made.tensors:
                made.tensors[name].zero_()
        self._walk(made, choice, "backward")
        of_blocks = torch.stack([made.tensors[f"returned:{i}"] for i in range(len(grad))])
        own = []
        for name, size in (("slices", self.layout.slice_elements), ("whole", self.layout.whole_part)):
            gathered = made.tensors.get(name)
            own.append(gathered.view(-1, size)[self._place(name, choice)].clone() if gathered is not None else grad.new_zeros(size))
        self._give(held)
        self.on_time(choice, capacity, perf_counter() - began, "backward")
        return of_blocks, own[0], own[1]

    def _place(self, name: str, choice: Choice) -> int:
        """Where among the gathered parts this rank's lie."""
        size = self.shape.group(choice.degree) if name == "slices" else self.shape.whole_group(choice.degree)
        return self.rank % size

    def _walk(self, made: _Pass, choice: Choice, name: str) -> None:
        try:
            made.executor.run()
        except StepFailed as error:
            end_waits(self.group, self.rank, self.shape.ranks, END_TAG)  # so that no other rank waits for this one
            if not isinstance(error.__cause__, RuntimeError):
                raise error.__cause__ or error from error
            peer = error.waiting_for - 1
            waiting = f", waiting for rank {peer}" if peer >= 0 else ""
            text = f"rank {self.rank} gave up in the {name} pass of an expert layer ({choice.text}){waiting}"
            raise GroupFailed(
                f"{text}: {str(error.__cause__)[:200]}", where="experts", hint="start again from a checkpoint; it loads on fewer ranks too",
                data={"rank": self.rank, "peer": peer, "step": error.step, "error": str(error.__cause__)[:300]},
            ) from error  # fmt: skip

    # ---- experts -----------------------------------------------------------------------------------------------
    def parameters(self, held: Held, choice: Choice) -> dict[str, torch.Tensor]:
        """Parameters of the experts that this rank has gathered, with gradients towards `held.params`."""
        experts = self.shape.local if choice.degree else self.shape.experts
        if not held.params:
            for name in ("slices", "whole"):
                gathered = held.passes[False].tensors.get(name)
                held.params.append(gathered.detach().requires_grad_(held.keep) if gathered is not None else torch.zeros(0))
        found = self.layout.sliced_of(held.params[0], experts) if self.layout.sliced else {}
        return found | (self.layout.whole_of(held.params[1], experts) if self.layout.whole else {})

    def compute(self, held: Held, choice: Choice, capacity: int, i: int) -> None:
        """Chunk i through the experts."""
        tensors = held.passes[False].tensors
        rows = _by_expert(tensors.get(f"arrived:{i}", tensors[f"tokens:{i}"]), self._form(choice, capacity, self.shape.model))
        x = rows.detach().requires_grad_(held.keep)
        with torch.set_grad_enabled(held.keep):
            y = self.run_experts(x, self.parameters(held, choice), 1.0 / max(choice.degree, 1))
        if held.keep:
            held.leaves.append((x, y))
        into = tensors.get(f"computed:{i}", tensors[f"returned:{i}"])
        into.copy_(_by_source(y.detach(), self._form(choice, capacity, self.shape.output)))

    def compute_backward(self, held: Held, tensors: dict[str, torch.Tensor], choice: Choice, capacity: int, i: int) -> None:
        x, y = held.leaves[i]
        grad = _by_expert(tensors.get(f"arrived:{i}", tensors[f"tokens:{i}"]), self._form(choice, capacity, self.shape.output))
        wanted = [x, *(p for p in held.params if p.numel())]
        found = torch.autograd.grad([y], wanted, [grad], allow_unused=True)
        for name, part in zip([n for n, p in zip(("slices", "whole"), held.params, strict=True) if p.numel()], found[1:], strict=True):
            if part is not None:
                tensors[name].add_(part.view(-1))
        of_x = found[0] if found[0] is not None else torch.zeros_like(x)
        tensors.get(f"computed:{i}", tensors[f"returned:{i}"]).copy_(_by_source(of_x, self._form(choice, capacity, self.shape.model)))

    def _form(self, choice: Choice, capacity: int, width: int) -> tuple[int, int, int, int]:
        """(sources, experts, rows from each, width) of a chunk at the experts."""
        if not choice.degree:
            return 1, self.shape.experts, capacity, width
        return self.shape.ranks, self.shape.local, self.shape.block_rows(choice, capacity), width

    # ---- compiled programs -------------------------------------------------------------------------------------
    def _take(self, choice: Choice, capacity: int, dtype: torch.dtype) -> Held:
        key = (choice, capacity, dtype)
        if self._free[key]:
            return self._free[key].pop()
        held = Held(key)
        held.passes[False] = self._compile(held, choice, capacity, dtype, backward=False)
        return held

    def _give(self, held: Held) -> None:
        held.leaves, held.params = [], []
        if sum(map(len, self._free.values())) >= MAX_KEPT:
            self._free.clear()
        self._free[held.key].append(held)

    def _compile(self, held: Held, choice: Choice, capacity: int, dtype: torch.dtype, *, backward: bool) -> _Pass:
        program, orders = self._ordered(choice, capacity, backward, dtype.itemsize)
        b, tensors = program.buffers, {}
        for buffer in np.flatnonzero(b.actor == self.rank).tolist():
            name = b.name[buffer]
            if name:
                tensors[name] = torch.empty(int(b.chunks[buffer]) * int(b.chunk_bytes[buffer]) // dtype.itemsize, dtype=dtype)
        memory = RankMemory(program, self.rank, torch.device("cpu"), {}, tensors, dtype=dtype)
        work = _Work(self, held, choice, capacity, backward, tensors, program)
        executor = Executor(program, orders, self.rank, memory=memory, transport=TaggedTransport(self.group), work=work)
        return _Pass(tensors, executor)

    def _of_size(self, itemsize: int) -> LayerPrograms:
        if itemsize not in self._programs:
            shape = replace(self.shape, element_bytes=itemsize)
            self._programs[itemsize] = LayerPrograms(self.programs.fabric, self.programs.ranks, shape)
        return self._programs[itemsize]

    def _ordered(self, choice: Choice, capacity: int, backward: bool, itemsize: int) -> tuple[Program, list[I32]]:
        """The inlined program with every rank's order, by the times of a simulation: the same on all ranks."""
        key = (choice, capacity, backward, itemsize)
        if key not in self._forms:
            if len(self._forms) >= MAX_KEPT:
                self._forms.clear()
            programs = self._of_size(itemsize)
            made, works = programs.step(choice, capacity, backward=backward)
            flat = inline(made, programs.callees).program
            fabric = self.programs.fabric
            timeline = simulate_program(flat, fabric, self.programs.ranks, assumed_cost(fabric), works=works, memory=False)
            start, end = np.zeros(len(flat.steps)), np.zeros(len(flat.steps))
            spans = timeline.spans
            known = spans.step >= 0
            start[spans.step[known]], end[spans.step[known]] = spans.start_s[known], spans.end_s[known]
            self._forms[key] = flat, fuse_lanes(flat, start, end, late_receives=True)
        return self._forms[key]


@dataclass
class _Work:
    """`executor.ComputeWork` of one pass."""

    runner: ExchangeRunner
    held: Held
    choice: Choice
    capacity: int
    backward: bool
    tensors: dict[str, torch.Tensor]
    program: Program

    def compile(self, op: int, memory: RankMemory) -> Callable[[], None]:
        i, runner = int(self.program.ops.microbatch[op]), self.runner
        if self.backward:
            return lambda: runner.compute_backward(self.held, self.tensors, self.choice, self.capacity, i)
        return lambda: runner.compute(self.held, self.choice, self.capacity, i)


class _Step(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, blocks: torch.Tensor, slices: torch.Tensor, whole: torch.Tensor, runner: ExchangeRunner, choice: Choice, capacity: int
    ) -> torch.Tensor:
        keep = any(ctx.needs_input_grad[:3])
        out, held = runner.forward(blocks, slices, whole, choice, capacity, keep)
        ctx.runner, ctx.held, ctx.choice, ctx.capacity = runner, held, choice, capacity
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        held, ctx.held = ctx.held, None
        of_blocks, of_slices, of_whole = ctx.runner.backward(held, grad, ctx.choice, ctx.capacity)
        return of_blocks, of_slices, of_whole, None, None, None


def _by_expert(flat: torch.Tensor, form: tuple[int, int, int, int]) -> torch.Tensor:
    """What came from every source, as rows of every expert: [E, sources · rows, width]."""
    sources, experts, rows, width = form
    return flat.view(sources, experts, rows, width).transpose(0, 1).reshape(experts, sources * rows, width)


def _by_source(rows: torch.Tensor, form: tuple[int, int, int, int]) -> torch.Tensor:
    """The inverse, flat."""
    sources, experts, each, width = form
    return rows.view(experts, sources, each, width).transpose(0, 1).reshape(-1)
