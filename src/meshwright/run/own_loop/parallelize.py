"""`parallelize`: the owner's module and optimizer under a plan, on the ranks of torch.distributed.

Rank r of the world is the plan's rank r. Rank 0 checks the plan, traces the module and works out the order of every rank's steps; the others read it
from the store that torch.distributed came up with. Messages go over a process group of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...capture.live import copied, standing
from ...capture.live_job import live_again
from ...capture.regions import REGION
from ...drive.plans import check_plan, read_plan
from ...errors import PlanMismatch, UsageError
from ...plan.plan import Plan, TrainingLayout
from ...program.calls import inline
from ..executor.executor import Executor
from ..executor.transport import TaggedTransport, Transport, own_transport
from ..launch.outcome import forward_graph, opaque_function, walk_orders
from ..launch.rank import orders_from, orders_to
from ..recording.recording import plan_identity
from ..steps.forward_graph import OPAQUE, ForwardGraph
from ..train.count_exchange import count_exchange
from ..train.masters import Masters
from ..train.rank_builder import RankBuilder
from .batches import OwnBatches
from .evaluation import OwnEvaluation
from .first_rank import FirstRank
from .owned import OwnOptimizer, Reached, equal_weights, release_others, require_plain
from .recipe import own_groups, own_update
from .step import ParallelStep

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path, *, loss: Callable[..., Any] | None = None, batch: Any = None
) -> ParallelStep:
    """The plan's training step of `model`, updated by `optimizer`. See `meshwright.torch.parallelize`, which this is."""
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    layout = plan.layout
    if plan.kind != "training" or layout is None:
        raise UsageError(f"the plan is of a {plan.kind}", where="plan", hint="a plan of meshwright.plan or `meshwright train plan`")
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        given = model if not isinstance(model, nn.Module) else optimizer
        raise UsageError(f"a {type(given).__name__} was given", where="parallelize", hint="parallelize(nn.Module, torch.optim.Optimizer, plan)")
    device = _device(model)
    world = _world(layout, device)
    rank = dist.get_rank() if world else 0
    require_plain(model, optimizer, layout)
    live = live_again(model, plan.job, loss, batch)
    own_groups(live.job, model, optimizer)
    group = dist.new_group(backend="gloo") if world else None
    if world:
        _same_plan(plan, group)
    with standing(live.stands_for):
        first_rank = FirstRank(rank, group)
        graph, orders = _setup(plan, layout, first_rank)
        opaque = opaque_function(live.job, graph, layout, str(device))
    if world:
        equal_weights(model, group)
    watched = any(n.target in (OPAQUE, REGION) for n in graph.nodes)
    evaluation = OwnEvaluation(plan, live, rank, graph, device, first_rank)
    if watched:
        evaluation.trace()
    else:
        evaluation.live = live_again(copied(model, torch.device("meta")), plan.job, loss, batch)
    program = inline(plan.main, plan.programs).program
    built = RankBuilder(program=program, layout=layout, graph=graph, job=live.job, rank=rank, device=device, seed=plan.seed, opaque=opaque)
    module = built.module(dict(model.named_parameters()), dict(model.named_buffers()), adopt=True)
    own = OwnOptimizer(optimizer, model, module, Masters(), Reached(module, _holders(layout, rank)) if watched else None)
    update = own_update(live.job, own)
    batches = OwnBatches(layout, rank, live.batch.form, graph.inputs, device, frozenset(i for s in module.segments.values() for i in s.inputs))
    exchange = count_exchange(graph, layout, rank) if world else None
    work, memory = built.work(module, update, batches, exchange=exchange)
    executor = Executor(program, orders, rank, memory=memory, transport=_transport(rank, device, group), work=work)
    release_others(model, module, layout)
    return ParallelStep(
        plan=plan, rank=rank, model=model, optimizer=own, update=update, module=module, executor=executor, work=work, batches=batches, group=group,
        evaluation=evaluation,
    )  # fmt: skip


def _device(model: nn.Module) -> torch.device:
    """Where the model lies. Raises: UsageError for one that lies in several places, or nowhere."""
    found = {p.device for p in model.parameters()}
    if len(found) != 1:
        places = ", ".join(sorted(map(str, found))) or "no device: it has no parameters"
        raise UsageError(f"the model lies on {places}", where="model", hint="move it to this rank's device first")
    return found.pop()


def _world(layout: TrainingLayout, device: torch.device) -> bool:
    """Whether there are others; torch.distributed is initialised then. Raises: UsageError without a world, PlanMismatch for one of another size."""
    if not dist.is_initialized() and "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if not dist.is_initialized():
        if layout.ranks == 1:
            return False
        raise UsageError(
            f"the plan is for {layout.ranks} ranks, and this process is alone", where="torch.distributed",
            hint=f"start it with torchrun --nproc-per-node {layout.ranks}, or call torch.distributed.init_process_group first",
        )  # fmt: skip
    if dist.get_world_size() != layout.ranks:
        raise PlanMismatch(
            f"the world has {dist.get_world_size()} ranks, the plan was made for {layout.ranks}", where="plan",
            hint=f"start {layout.ranks} ranks, or plan for a fabric of {dist.get_world_size()} devices",
            data={"world": dist.get_world_size(), "planned": layout.ranks},
        )  # fmt: skip
    return True


def _same_plan(plan: Plan, group: Any) -> None:
    mine = torch.frombuffer(bytearray(bytes.fromhex(plan_identity(plan))), dtype=torch.uint8)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group)
    others = [r for r, x in enumerate(found) if not torch.equal(x, found[0])]
    if others:
        raise PlanMismatch(
            f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))} and rank 0 have different plans", where="plan",
            hint="plan once, write_plan, and read_plan on every rank", data={"ranks": others},
        )  # fmt: skip


def _setup(plan: Plan, layout: TrainingLayout, first_rank: FirstRank) -> tuple[ForwardGraph, Any]:
    """The traced model and all ranks' orders. Raises: on rank 0 what is wrong with plan or model; RunError with the same words on the others."""

    def traced() -> bytes:
        check_plan(plan)
        found: bytes = forward_graph(plan, layout).to_json()
        return found

    graph = ForwardGraph.from_json(first_rank.gives("graph", traced))
    return graph, orders_from(first_rank.gives("orders", lambda: orders_to(walk_orders(plan))))


def _holders(layout: TrainingLayout, rank: int) -> Any:
    """The process group of the ranks that hold what this one holds; None where it is alone. All ranks call this."""
    found = None
    for pipeline in range(layout.pipeline) if layout.ranks > 1 else ():
        ranks = [r for r in range(layout.ranks) if layout.coordinates(r)[0] == pipeline]
        group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        found = group if rank in ranks else found
    return found


def _transport(rank: int, device: torch.device, group: Any) -> Transport:
    return TaggedTransport(group) if device.type == "cpu" else own_transport(rank, device)
