"""A synthetic Megatron-like training step: 1F1B pipeline, tensor-parallel all-reduces as ring calls, gradient all-reduce; folded or plain.

Rank = (pipeline · D + data) · T + tensor. Every layer has two blocks (attention, MLP), each followed by an all-reduce over the tensor group
in forward and in backward. Boundary activations and gradients go point to point in lanes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.builder import LaneBuilder, ProgramBuilder, StepRef
from meshwright.program.program import Fold, FoldAxis, Program, Unit


@dataclass(frozen=True, kw_only=True)
class Shape:
    pipeline: int
    tensor: int
    data: int
    microbatches: int
    layers: int
    activation_bytes: int = 48 << 20  # one micro-batch at a stage border
    gradient_bytes: int = 1 << 30  # of one rank

    @property
    def ranks(self) -> int:
        return self.pipeline * self.tensor * self.data


DURATIONS_S = {"attention|F": 1.1e-3, "mlp|F": 1.7e-3, "attention|B": 2.2e-3, "mlp|B": 3.4e-3, "all|optimizer": 9e-3}


def ring(n: int, chunk_bytes: int) -> Program:
    """All-reduce of n chunks on a ring of n, folded to one body of 2n - 1 fused steps."""
    b = ProgramBuilder(n, name=f"ring{n}")
    data = b.buffer(0, chunks=n, chunk_bytes=chunk_bytes, role="input")
    onward = b.channel(0, 1, depth=2)
    lane = b.lane(0)
    lane.send(onward, data, 0)
    for k in range(1, n):
        lane.recv_add_send(onward, onward, data, -k % n, keep=True)
    for k in range(n, 2 * n - 2):
        lane.recv_send(onward, onward, data, -k % n)
    lane.recv(onward, data, -(2 * n - 2) % n)
    return replace(b.build(validate=False), fold=Fold((FoldAxis("ring", n, 1, "shift"),), np.ones((1, 1), np.int32)))


class _Rank:
    """Lanes of one rank (or representative)."""

    def __init__(self, step: _StepBuilder, rank: int) -> None:
        x = step.shape
        self.step, self.rank = step, rank
        self.stage, rest = divmod(rank, x.data * x.tensor)
        self.data, self.tensor = divmod(rest, x.tensor)
        self.activation = step.b.buffer(rank, chunks=x.tensor, chunk_bytes=x.activation_bytes // x.tensor, role="activation", window=1)
        self.gradient = step.b.buffer(rank, chunks=x.data, chunk_bytes=x.gradient_bytes // x.data, role="gradient", window=1)

    def lanes(self) -> None:
        x, b = self.step.shape, self.step.b
        compute = b.lane(self.rank, unit=Unit.COMPUTE)
        stride = x.data * x.tensor
        ahead = {"F": self.rank - stride if self.stage else -1, "B": self.rank + stride if self.stage < x.pipeline - 1 else -1}
        onto = {"F": ahead["B"], "B": ahead["F"]}
        receives = {p: b.lane(self.rank) if ahead[p] >= 0 else None for p in "FB"}
        sends = {p: b.lane(self.rank) if onto[p] >= 0 else None for p in "FB"}
        for phase, _ in one_f_one_b_order(x.pipeline, x.microbatches, self.stage):
            wait: list[StepRef] = []
            lane = receives[phase]
            if lane is not None:
                wait = [lane.recv(self.step.channel(ahead[phase], self.rank), self.activation, 0, x.tensor)]
            done = self.blocks(compute, phase, wait)
            lane = sends[phase]
            if lane is not None:
                lane.send(self.step.channel(self.rank, onto[phase]), self.activation, 0, x.tensor, after=[done])
        if x.data > 1:
            compute.call(self.step.call(self.data_comm(), self.step.data_ring, self.gradient))
        compute.compute(self.step.ops["all|optimizer"])

    def blocks(self, lane: LaneBuilder, phase: str, wait: list[StepRef]) -> StepRef:
        x = self.step.shape
        last = None
        for _ in range(x.layers // x.pipeline):
            for block in ("attention", "mlp") if phase == "F" else ("mlp", "attention"):
                last = lane.compute(self.step.ops[f"{block}|{phase}"], after=wait)
                wait = []
                if x.tensor > 1:
                    last = lane.call(self.step.call(self.tensor_comm(), self.step.tensor_ring, self.activation))
        assert last is not None
        return last

    def tensor_comm(self) -> int:
        first = self.rank - self.tensor
        return self.step.comm(f"tp{first}", [first + i for i in range(self.step.shape.tensor)])

    def data_comm(self) -> int:
        x = self.step.shape
        first = self.rank - self.data * x.tensor
        return self.step.comm(f"dp{first}", [first + i * x.tensor for i in range(x.data)])


class _StepBuilder:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.b = ProgramBuilder(shape.ranks, name="step")
        self.ops = {key: self.b.op(key.split("|")[1], graph=key.split("|")[0]) for key in DURATIONS_S}
        self.tensor_ring, self.data_ring = "tensor-ring", "data-ring"
        self.channels: dict[tuple[int, int], int] = {}
        self.comms: dict[str, int] = {}
        self.calls: dict[tuple[int, str, int], int] = {}

    def channel(self, src: int, dst: int) -> int:
        if (src, dst) not in self.channels:
            self.channels[src, dst] = self.b.channel(src, dst, depth=2)
        return self.channels[src, dst]

    def comm(self, name: str, group: list[int]) -> int:
        if name not in self.comms:
            self.comms[name] = self.b.comm(name, group)
        return self.comms[name]

    def call(self, comm: int, callee: str, buffer: int) -> int:
        key = (comm, callee, buffer)
        if key not in self.calls:
            self.calls[key] = self.b.call(comm, callee, [(0, buffer, 0)])
        return self.calls[key]


def build(shape: Shape, *, folded: bool) -> tuple[Program, dict[str, Program]]:
    """The step and its callees (folded rings; `expand` them for the plain step)."""
    step = _StepBuilder(shape)
    stride = shape.data * shape.tensor
    for rank in range(0, shape.ranks, stride) if folded else range(shape.ranks):
        _Rank(step, rank).lanes()
    program = step.b.build(validate=False)
    sizes = {"tensor-ring": (shape.tensor, shape.activation_bytes), "data-ring": (shape.data, shape.gradient_bytes)}
    rings = {name: ring(n, size_bytes // n) for name, (n, size_bytes) in sizes.items() if n > 1}
    if folded:
        axes = (
            FoldAxis("pipeline", shape.pipeline, stride, "plain"), FoldAxis("data", shape.data, shape.tensor, "shift"),
            FoldAxis("tensor", shape.tensor, 1, "shift"),
        )  # fmt: skip
        program = replace(program, fold=Fold(axes, np.zeros((2, len(program.buffers)), np.int32)))
    return program, rings


def boxes(ranks: int, per_box: int = 8) -> tuple[Fabric, list[str]]:
    """Boxes of GPUs around a switch at 300 GB/s, one NIC of 25 GB/s per GPU to the leaf of its rail; names of the GPUs in order."""
    names = [f"b{i // per_box}g{i % per_box}" for i in range(ranks)]
    links = []
    for i, name in enumerate(names):
        for switch, rate, latency in ((f"b{i // per_box}nv", 300_000_000_000, 0.7e-6), (f"rail{i % per_box}", 25_000_000_000, 2.6e-6)):
            links += [Link(src=name, dst=switch, rate_Bps=rate, latency_s=latency), Link(src=switch, dst=name, rate_Bps=rate, latency_s=latency)]
    switches = [f"b{k}nv" for k in range(-(-ranks // per_box))] + [f"rail{k}" for k in range(per_box)]
    devices = tuple(Device(name=n, group=n.split("g")[0], memory_bytes=80_000_000_000) for n in names)
    return Fabric(name=f"boxes:{ranks}", devices=devices, switches=tuple(Switch(name=s) for s in switches), links=tuple(links)), names
