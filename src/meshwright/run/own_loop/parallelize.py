"""`parallelize`: the owner's module and optimizer under a plan, on the ranks of torch.distributed.

Rank r of the world is the plan's rank r. Rank 0 checks the plan, traces the module and works out the order of every rank's steps; the others read it
from the store that torch.distributed came up with. Messages go over a process group of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ...capture.live import copied, standing
from ...capture.live_job import LiveJob, live_again
from ...capture.regions import REGION
from ...drive.plans import check_plan, read_plan
from ...errors import PlanMismatch, UsageError, in_python
from ...plan.plan import Plan, TrainingLayout
from ...plan.shapes import plans_of_shapes
from ...program.calls import inline
from ..executor.executor import Executor
from ..executor.transport import TaggedTransport, Transport, own_transport
from ..gate.gate import Stated
from ..launch.outcome import forward_graph, opaque_function, walk_orders
from ..launch.setup import orders_from, orders_to
from ..recording.recording import plan_identity
from ..steps.forward_graph import OPAQUE, ForwardGraph
from ..train.casts import require_casts
from ..train.count_exchange import count_exchange
from ..train.masters import Masters
from ..train.rank_builder import RankBuilder
from .as_traced import AsTraced
from .batches import OwnBatches
from .compared import compare_step
from .evaluation import OwnEvaluation
from .first_rank import FirstRank
from .owned import OwnOptimizer, Reached, equal_weights, release_others, require_plain
from .recipe import own_groups, own_update
from .shapes import Pad, Shapes, StepShape
from .step import ParallelStep
from .whole_batch import tell_of_whole_batch

__all__ = ["parallelize"]

NOTHING_STATED = Stated()


@in_python
def parallelize(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path, *, loss: Callable[..., Any] | None = None, batch: Any = None,
    pad: Pad = None, compare: bool = True, stated: Stated = NOTHING_STATED,
) -> ParallelStep:  # fmt: skip
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
    plans = plans_of_shapes(plan)
    lives = [live_again(model, p.job, loss, batch) for p in plans]
    as_traced = AsTraced(model, lives[0].loss)
    require_casts(layout, lives[0].job.asked, device.type, "model")
    own_groups(lives[0].job, model, optimizer)
    group = dist.new_group(backend="gloo") if world else None
    if world:
        _same_plan(plan, group)
    first_rank = FirstRank(rank, group)

    def checked() -> bytes:
        check_plan(plan)
        return b""

    def compared() -> bytes:
        return msgspec.json.encode(compare_step(model, optimizer, plan, batch, loss=loss, stated=stated).to_json())

    first_rank.gives("checked", checked)
    report = msgspec.json.decode(first_rank.gives("compared", compared)) if compare and batch is not None else None
    traced = [_traced(p, live, first_rank, number, device) for number, (p, live) in enumerate(zip(plans, lives, strict=True))]
    if not stated.batch_statistics and rank == 0 and (report is None or report["why_not"]):
        tell_of_whole_batch(traced[0].graph, lives[0], layout)
    if world:
        equal_weights(model, group)
    watched = any(n.target in (OPAQUE, REGION) for n in traced[0].graph.nodes)
    # tensors that are no buffers are part of what is computed: a copy without memory lacks them
    plain = any(isinstance(x, torch.Tensor) for m in model.modules() for x in vars(m).values())
    bare = None if watched or plain else copied(model, torch.device("meta"))
    for one in traced:
        if bare is None:
            one.evaluation.trace()
        else:
            one.evaluation.live = live_again(bare, one.plan.job, loss, batch)
    first = traced[0].builder
    module = first.module(dict(model.named_parameters()), dict(model.named_buffers()), adopt=True)
    own = OwnOptimizer(optimizer, model, module, Masters(), Reached(module, _holders(layout, rank)) if watched else None)
    update, transport, shapes = own_update(lives[0].job, own), _transport(rank, device, group), list[StepShape]()
    for one, live in zip(traced, lives, strict=True):
        built, of_it = one.builder, module if one is traced[0] else one.builder.module_beside(module)
        batches = OwnBatches(
            built.layout, rank, live.batch.form, one.graph.inputs, device, frozenset(i for s in of_it.segments.values() for i in s.inputs)
        )  # fmt: skip
        work, memory = built.work(of_it, update, batches, exchange=count_exchange(one.graph, built.layout, rank) if world else None)
        executor = Executor(built.program, one.orders, rank, memory=memory, transport=transport, work=work)
        shapes.append(
            StepShape(plan=one.plan, graph=one.graph, module=of_it, executor=executor, work=work, batches=batches, evaluation=one.evaluation)
        )  # fmt: skip
    takes = Shapes(shapes, pad, group)
    release_others(model, module, layout)
    return ParallelStep(
        plan=plan, rank=rank, model=model, optimizer=own, update=update, module=module, shapes=takes, group=group, as_traced=as_traced,
        compared=report,
    )  # fmt: skip


@dataclass(frozen=True)
class _Traced:
    """What a rank knows of the step for one shape before anything is made."""

    plan: Plan
    graph: ForwardGraph
    orders: Any
    builder: RankBuilder
    evaluation: OwnEvaluation


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


def _traced(plan: Plan, live: LiveJob, first_rank: FirstRank, number: int, device: torch.device) -> _Traced:
    """The traced model and all ranks' orders, for batches of one shape. Raises: on rank 0 what is wrong with the model; RunError with the same words
    on the others."""
    layout = plan.layout
    assert layout is not None

    def graph_bytes() -> bytes:
        found: bytes = forward_graph(plan, layout).to_json()
        return found

    with standing(live.stands_for):
        graph = ForwardGraph.from_json(first_rank.gives(f"graph/{number}", graph_bytes))
        orders = orders_from(first_rank.gives(f"orders/{number}", lambda: orders_to(walk_orders(plan))))
        opaque = opaque_function(live.job, graph, layout, str(device))
    program = inline(plan.main, plan.programs).program
    built = RankBuilder(
        program=program, layout=layout, graph=graph, job=live.job, rank=first_rank.rank, device=device, seed=plan.seed, opaque=opaque
    )  # fmt: skip
    evaluation = OwnEvaluation(plan, live, first_rank.rank, graph, device, first_rank, f"evaluation/{number}")
    return _Traced(plan, graph, orders, built, evaluation)


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
