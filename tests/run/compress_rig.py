"""Plans whose gradient sums go through codecs, on ranks that are threads, and costs of codecs that are made up, so that plans do not vary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from compress_model import samples
from rig import in_threads, whole_model
from tensor_rig import _Counting

from captured import captured
from meshwright.capture.forward import trace_forward
from meshwright.codec.codec import parse_codec
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.compress import CompressWanted
from meshwright.drive.training.pipeline import PipelineWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.job import Training
from meshwright.plan.plan import Plan
from meshwright.plan.shards import local_values
from meshwright.program.calls import inline
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.memory import RankMemory
from meshwright.run.launch.outcome import walk_orders
from meshwright.run.steps.forward_graph import from_traced
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import TrainingWork, gradient_bytes
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
def graph_of(model: str) -> OpGraph:
    return captured(model, loss="output")


@cache
def planned(
    codec: str | None, *, ranks: int = 2, link: str = "125kB/s", overlap: bool | None = True, batch: int = 8, tensor: int = 1, pipeline: int = 1,
    zero: int = 0, schedule: tuple[str, tuple[tuple[str, Any], ...]] = ("1f1b", ()), model: str = MODEL, sequence: bool | None = None,
) -> Plan:  # fmt: skip
    """`ranks`: data replicas. Micro-batches of 2 samples; buckets of 4096 bytes where sums overlap with backward."""
    job = Training(model=model, global_batch=batch, loss="output", optimizer="sgd", learning_rate=0.05)
    wanted = None if codec is None else CompressWanted(codec=codec, profile=profile)
    return plan_training(
        job, read_fabric(f"star:{ranks * tensor * pipeline}?link={link}"), graph=graph_of(model),
        wishes=(
            LayoutWanted(data=ranks, tensor=tensor, pipeline=pipeline, microbatch=2, tensor_options=TensorOptions(sequence=sequence)),
            CollectivesWanted("ring"), ShardingWanted(level=zero, overlap=overlap, bucket_bytes=4096), wanted,
            PipelineWanted(name=schedule[0], options=dict(schedule[1])),
        ),
    )  # fmt: skip


def rows(step: int, replica: int, microbatch: int, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    lay = plan.layout
    assert lay is not None
    first = step * lay.global_batch + lay.first_sample(replica, microbatch)
    x, y = zip(*(samples()[first + i] for i in range(lay.microbatch_size)), strict=True)
    return torch.stack(x), torch.stack(y)


class _Rows:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def microbatch(self, step: int, replica: int, microbatch: int) -> Sequence[torch.Tensor]:
        return rows(step, replica, microbatch, self.plan)


@cache
def forward(model: str = MODEL) -> Any:
    return from_traced(trace_forward(model, loss="output", batch_size=2))


@cache
def initial(seed: int, model: str = MODEL) -> Any:
    """The model before the first step; ranks copy it."""
    return whole_model(model, seed=seed)


def model_of(plan: Plan) -> str:
    return str(plan.job["training"]["model"])


class Rank:
    """What one rank computes with; `run` trains steps `first` up to `last`."""

    def __init__(self, plan: Plan, rank: int, group: Any, *, alone: bool = False) -> None:
        assert plan.layout is not None
        program = inline(plan.main, plan.programs).program
        _, parameters, buffers = initial(plan.seed, model_of(plan))
        sizes = gradient_bytes(program, rank)
        self.module = build_rank_module(forward(model_of(plan)), plan.layout, rank, parameters, buffers, device=CPU, gradient_bytes=sizes)
        self.optimizer = make_optimizer("sgd", [(p.name, t) for p, t, _ in self.module.updated()], 0.05)
        self.work = TrainingWork(program, plan.layout, rank, self.module, _Rows(plan), self.optimizer, alone=alone)
        memory = RankMemory(program, rank, CPU, local_values(plan.layout, rank), self.module.flats, layout=plan.layout)
        self.executor = Executor(program, walk_orders(plan), rank, memory=memory, transport=_Counting(group), work=self.work)

        self.losses: list[float | None] = []

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.work.begin(step)
            self.executor.run()
            self.losses.append(self.work.loss())

    def weights(self) -> dict[str, torch.Tensor]:
        return {p.name: p.tensor.detach().clone() for p in self.module.parameters.values()}


def prepare(plan: Plan) -> None:
    """What threads must not do at once: tracing, and drawing weights from torch's one generator."""
    forward(model_of(plan))
    initial(plan.seed, model_of(plan))


def ran(plan: Plan, steps: int) -> list[tuple[dict[str, torch.Tensor], list[float | None]]]:
    """(weights after so many steps, loss of each step where it computes one) of every rank."""
    assert plan.layout is not None

    def body(rank: int, group: Any) -> tuple[dict[str, torch.Tensor], list[float | None]]:
        made = Rank(plan, rank, group)
        made.run(0, steps)
        return made.weights(), made.losses

    prepare(plan)
    return in_threads(plan.layout.ranks, body)


def trained(plan: Plan, steps: int) -> list[dict[str, torch.Tensor]]:
    """Weights of every rank after so many steps."""
    return [weights for weights, _ in ran(plan, steps)]
