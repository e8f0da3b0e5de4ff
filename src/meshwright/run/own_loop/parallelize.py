"""`parallelize`: the owner's module and optimizer under a plan, on the ranks of torch.distributed.

Rank r of the world is the plan's rank r. Rank 0 checks the plan, traces the module and works out the order of every rank's steps; the others read it
from the store that torch.distributed came up with. Messages go over a process group of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ...capture.live import standing
from ...capture.live_job import live_again
from ...capture.regions import REGION
from ...drive.plans import check_plan, read_plan
from ...errors import MeshwrightError, PlanMismatch, RunError, Unsupported, UsageError
from ...job import Recipe, Training
from ...plan.plan import Plan, TrainingLayout
from ...plan.shards import local_values
from ...program.calls import inline
from ..executor.executor import Executor
from ..executor.memory import RankMemory
from ..executor.transport import TaggedTransport, Transport, own_transport
from ..launch.outcome import forward_graph, opaque_function, walk_orders
from ..launch.rank import fetch_setup, put_setup
from ..machine.process import blob_get, blob_put
from ..recording.recording import plan_identity
from ..steps.forward_graph import OPAQUE, ForwardGraph
from ..train.count_exchange import count_exchange
from ..train.segments import build_rank_module
from ..train.work import TrainingWork, gradient_bytes
from .batches import OwnBatches
from .owned import OwnOptimizer, Reached, equal_weights, release_others, require_plain
from .step import ParallelStep

__all__ = ["parallelize"]

_made = count()  # calls so far: rank 0's number names the keys of a call in the store


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
    _require_no_recipe(live.job)
    group = dist.new_group(backend="gloo") if world else None
    if world:
        _same_plan(plan, group)
    with standing(live.stands_for):
        graph, orders = _setup(plan, layout, rank, group)
        opaque = opaque_function(live.job, graph, layout, str(device))
    if world:
        equal_weights(model, group)
    program = inline(plan.main, plan.programs).program
    module = build_rank_module(
        graph, layout, rank, dict(model.named_parameters()), dict(model.named_buffers()), device=device,
        gradient_bytes=gradient_bytes(program, rank), opaque=opaque, adopt=True,
    )  # fmt: skip
    watched = any(n.target in (OPAQUE, REGION) for n in graph.nodes)
    own = OwnOptimizer(optimizer, model, module, layout, rank, Reached(module, _holders(layout, rank)) if watched else None)
    release_others(model, module, layout)
    batches = OwnBatches(layout, rank, live.batch.form, graph.inputs, device, frozenset(i for s in module.segments.values() for i in s.inputs))
    exchange = count_exchange(graph, layout, rank) if world else None
    work = TrainingWork(program, layout, rank, module, batches, own, seed=plan.seed, exchange=exchange)
    memory = RankMemory(program, rank, device, local_values(layout, rank), module.flats, layout=layout)
    executor = Executor(program, orders, rank, memory=memory, transport=_transport(rank, device, group), work=work)
    return ParallelStep(
        plan=plan, rank=rank, model=model, optimizer=own, module=module, executor=executor, work=work, batches=batches, group=group,
    )  # fmt: skip


def _require_no_recipe(job: Training) -> None:
    """Raises: Unsupported for what a plan asks of training that the owner's own loop would have to do."""
    if extra := [f for f in Recipe.__struct_fields__ if getattr(job.asked, f) != getattr(Recipe(), f)]:
        raise Unsupported(
            f"the plan asks for {', '.join(extra)}, which a step in a loop of one's own does not do yet", where="plan",
            hint="plan without, and keep schedules and groups in your optimizer; or train with `meshwright train run`", data={"asked": extra},
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


def _setup(plan: Plan, layout: TrainingLayout, rank: int, group: Any) -> tuple[ForwardGraph, Any]:
    """The traced model and all ranks' orders. Raises: on rank 0 what is wrong with plan or model; RunError with the same words on the others."""
    number = torch.tensor([next(_made)])
    if group is not None:
        dist.broadcast(number, 0, group)
    whole = dist.HashStore() if group is None else dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"meshwright/parallelize/{int(number)}", whole)
    if rank:
        if told := blob_get(store, "failed"):
            error = msgspec.json.decode(told, type=dict[str, str])
            raise RunError(f"rank 0 refused: {error['message']}", where=error["where"], hint=error["hint"], data={"code": error["code"]})
        return fetch_setup(store)
    try:
        check_plan(plan)
        graph, orders = forward_graph(plan, layout), walk_orders(plan)
        put_setup(store, graph, orders)
    except BaseException as error:
        own = error if isinstance(error, MeshwrightError) else RunError(f"{type(error).__name__}: {error}")
        blob_put(store, "failed", msgspec.json.encode({"code": own.code, "message": own.message, "where": own.where, "hint": own.hint}))
        raise
    blob_put(store, "failed", b"")
    return graph, orders


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
