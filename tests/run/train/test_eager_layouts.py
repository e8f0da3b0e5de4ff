"""Models with what tracing has to look at twice train by a plan as in a plain loop: losses, weights and buffers, over stages and replicas."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import in_threads, lowered, whole_model

from meshwright.capture.forward import trace_forward
from meshwright.capture.losses import Objective
from meshwright.capture.resolve import build_model
from meshwright.plan.shards import local_values
from meshwright.program.calls import inline
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.transport import TaggedTransport
from meshwright.run.steps.forward_graph import from_traced
from meshwright.run.train.data import Batches, open_data
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import TrainingWork, gradient_bytes

CPU = torch.device("cpu")
MODELS = Path(__file__).parents[2] / "capture" / "eager_models.py"
STEPS, GLOBAL, MICRO = 3, 8, 4


@cache
def plain(cause: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain loop over the same micro-batches."""
    source = build_model(f"{MODELS}:{cause}", device="cpu", batch_size=MICRO)
    objective, dataset = Objective(source.module, "mse"), open_data("synthetic", source.examples, 0)
    optimizer = torch.optim.SGD(source.module.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        samples = [dataset.sample(step * GLOBAL + i) for i in range(GLOBAL)]
        batch = [torch.stack(c) for c in zip(*samples, strict=True)]
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, GLOBAL, MICRO):
            loss = objective(*(x[first : first + MICRO] for x in batch)) * (MICRO / GLOBAL)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {n: p.detach() for n, p in source.module.named_parameters()}


CASES = [(c, d) for c in ("Experts", "OwnGradient", "InPlaceWithoutGradient", "ChangedThroughViews", "Autocast") for d in ((2, 1, 1), (1, 1, 2))]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("cause", "degrees"), [*CASES, ("Checkpointed", (1, 2, 1))])  # the last: a linear right after one that sums its parts
def test_a_plan_trains_what_a_plain_loop_trains(cause: str, degrees: tuple[int, int, int]) -> None:
    model = f"{MODELS}:{cause}"
    layout, program, callees = lowered(model, degrees, microbatch=MICRO, global_batch=GLOBAL, loss="mse")
    flat = inline(program, callees).program
    graph = from_traced(trace_forward(model, loss="mse", batch_size=MICRO, device="cpu"))
    _, parameters, buffers = whole_model(model)
    dataset = open_data("synthetic", build_model(model, device="cpu").examples, 0)

    def body(rank: int, group: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        module = build_rank_module(graph, layout, rank, parameters, buffers, device=CPU, gradient_bytes=gradient_bytes(flat, rank))
        optimizer = make_optimizer("sgd", [(p.name, p.tensor) for p in module.trained()], 0.05)
        work = TrainingWork(flat, layout, rank, module, Batches(dataset, layout, graph.inputs, CPU), optimizer)
        memory = RankMemory(flat, rank, CPU, local_values(layout, rank), module.gradients, layout=layout)
        executor = Executor(flat, fuse_lanes(flat), rank, memory=memory, transport=TaggedTransport(group), work=work)
        losses = []
        for step in range(STEPS):
            work.begin(step)
            executor.run()
            losses.append(work.loss())
        return losses, {p.name: p.tensor.detach().clone() for p in module.parameters.values() if p.shard is None}

    results = in_threads(layout.ranks, body)
    last = [x for r, (x, _) in enumerate(results) if layout.coordinates(r)[0] == layout.pipeline - 1 and layout.coordinates(r)[2] == 0]
    losses, weights = plain(cause)
    assert [sum(c) / len(c) for c in zip(*last, strict=True)] == pytest.approx(losses, rel=1e-5)
    held = {n for _, parts in results for n in parts} | {s.param for s in layout.shards}
    assert held == set(weights)
    for _, parts in results:
        for name, tensor in parts.items():
            assert torch.allclose(tensor, weights[name], rtol=1e-5, atol=1e-7), name
