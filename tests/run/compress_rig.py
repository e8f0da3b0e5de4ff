"""Plans whose gradient sums go through codecs, on ranks that are threads, and costs of codecs that are made up, so that plans do not vary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from compress_model import samples
from rig import in_threads, whole_model
from tensor_rig import _Counting

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.codec import parse_codec
from meshwright.drive import plan_training, read_fabric
from meshwright.drive_compress import CompressWanted
from meshwright.drive_sharding import ShardingWanted
from meshwright.fabric import Fabric
from meshwright.job import Training
from meshwright.plan import Plan
from meshwright.plan_shards import local_values
from meshwright.program_calls import inline
from meshwright.run.executor import Executor
from meshwright.run.forward_graph import from_traced
from meshwright.run.memory import RankMemory
from meshwright.run.optimizers import make_optimizer
from meshwright.run.segments import build_rank_module
from meshwright.run.train import walk_orders
from meshwright.run.work import TrainingWork, gradient_bytes
from meshwright.traffic import CodecCost, Curve, GradientTensor, TrafficProfile

MODEL = "tests/run/compress_model.py:regression"
CPU = torch.device("cpu")


def profile(tensors: Sequence[GradientTensor], backward_ns: int, fabric: Fabric, codecs: Sequence[str]) -> TrafficProfile:
    """Codecs cost little, bytes what they cost on the slow links of `planned`."""
    quick = Curve(sizes=(0, 1 << 20), times_ns=(300_000, 1_300_000))
    rate = int(1e9 / float(fabric.links[0].rate_Bps))
    wire = Curve(sizes=(0, 1 << 20), times_ns=(1000, 1000 + rate * (1 << 20)))
    costs = [
        CodecCost(
            codec=parse_codec(c).text, encode=quick, exchange=wire, decode=quick,
            payload_bytes=tuple(sum(r.expected for r in parse_codec(c).rounds([t.shape])) for t in tensors),
        )
        for c in dict.fromkeys(["none", *codecs])
    ]  # fmt: skip
    return TrafficProfile(tensors=tuple(tensors), codecs=tuple(costs), ranks=len(fabric.devices), backward_ns=backward_ns)


@cache
def planned(codec: str | None, *, ranks: int = 2, link: str = "125kB/s", overlap: bool | None = True, batch: int = 8) -> Plan:
    job = Training(model=MODEL, global_batch=batch, loss="output", optimizer="sgd", learning_rate=0.05)
    wanted = None if codec is None else CompressWanted(codec=codec, profile=profile)
    return plan_training(
        job, read_fabric(f"star:{ranks}?link={link}"), graph=capture(MODEL, loss="output"), collective="ring", data=ranks, tensor=1, pipeline=1,
        microbatch=2, sharding=ShardingWanted(level=0, overlap=overlap, bucket_bytes=4096), compress=wanted,
    )  # fmt: skip


def rows(step: int, replica: int, microbatch: int, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    lay = plan.layout
    assert lay is not None
    first = step * lay.global_batch + (replica * lay.microbatches + microbatch) * lay.microbatch_size
    x, y = zip(*(samples()[first + i] for i in range(lay.microbatch_size)), strict=True)
    return torch.stack(x), torch.stack(y)


class _Rows:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def microbatch(self, step: int, replica: int, microbatch: int) -> Sequence[torch.Tensor]:
        return rows(step, replica, microbatch, self.plan)


@cache
def forward() -> Any:
    return from_traced(trace_forward(MODEL, loss="output", batch_size=2))


@cache
def initial(seed: int) -> Any:
    """The model before the first step; ranks copy it."""
    return whole_model(MODEL, seed=seed)


class Rank:
    """What one rank computes with; `run` trains steps `first` up to `last`."""

    def __init__(self, plan: Plan, rank: int, group: Any, *, alone: bool = False) -> None:
        assert plan.layout is not None
        program = inline(plan.main, plan.programs).program
        _, parameters, buffers = initial(plan.seed)
        sizes = gradient_bytes(program, rank)
        self.module = build_rank_module(forward(), plan.layout, rank, parameters, buffers, device=CPU, gradient_bytes=sizes)
        self.optimizer = make_optimizer("sgd", [(p.name, t) for p, t, _ in self.module.updated()], 0.05)
        self.work = TrainingWork(program, plan.layout, rank, self.module, _Rows(plan), self.optimizer, alone=alone)
        memory = RankMemory(program, rank, CPU, local_values(plan.layout, rank), self.module.flats, layout=plan.layout)
        self.executor = Executor(program, walk_orders(plan), rank, memory=memory, transport=_Counting(group), work=self.work)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.work.begin(step)
            self.executor.run()

    def weights(self) -> dict[str, torch.Tensor]:
        return {p.name: p.tensor.detach().clone() for p in self.module.parameters.values()}


def prepare(plan: Plan) -> None:
    """What threads must not do at once: tracing, and drawing weights from torch's one generator."""
    forward()
    initial(plan.seed)


def trained(plan: Plan, steps: int) -> list[dict[str, torch.Tensor]]:
    """Weights of every rank after so many steps."""
    assert plan.layout is not None

    def body(rank: int, group: Any) -> dict[str, torch.Tensor]:
        made = Rank(plan, rank, group)
        made.run(0, steps)
        return made.weights()

    prepare(plan)
    return in_threads(plan.layout.ranks, body)
