"""`import meshwright.torch` makes "meshwright" a backend of torch.distributed.

    import meshwright.torch
    torch.distributed.init_process_group("meshwright")     # instead of "gloo"

DDP, FSDP2, tensor parallelism and plain collectives run unchanged. Environment variables or `configure` say what runs: plan files, or a fabric to
plan for (`meshwright.run.group.settings` lists the variables). A collective without a plan runs on gloo. `report` counts these.

`parallelize` runs a whole training plan inside your own loop. It does not need this backend.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from .errors import MeshwrightError, PlanMismatch, RunError, UsageError
from .fabric.fabric import Fabric
from .run.executor.transport import connected
from .run.group.engine import Engine
from .run.group.group import MeshwrightGroup
from .run.group.health import refuse
from .run.group.reproducible import ReproducibleGroup
from .run.group.settings import Settings, configure, current_settings
from .run.group.streams import DeviceRunner, GroupedMessages

if TYPE_CHECKING:
    from .plan.plan import Plan
    from .run.gate.gate import GateReport
    from .run.own_loop.step import ParallelStep

__all__ = [
    "MeshwrightGroup", "compare_step", "compress_fsdp", "configure", "measured_traffic", "memory_budget", "parallelize", "planned_traffic", "probe",
    "report", "traffic_in_training",
]  # fmt: skip

PROBE = "probe"  # as a fabric's name

_groups: weakref.WeakSet[MeshwrightGroup] = weakref.WeakSet()


def _create(options: Any, _: Any = None) -> MeshwrightGroup:
    settings = current_settings()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    try:
        fabric = _fabric(settings)
        devices = _devices(settings, fabric, ranks)
    except MeshwrightError as error:  # the others wait: they must hear of it
        refuse(dist.PrefixStore("meshwright", options.store), options.group_rank, options.group_size, error)
        raise
    engine = Engine(
        settings, options.store, options.group_rank, options.group_size, options.timeout.total_seconds(), global_ranks=ranks, devices=devices,
        fabric=fabric, world=dist.get_world_size() if dist.is_initialized() else options.group_size,
    )  # fmt: skip
    try:
        own = dist.PrefixStore("builtin", options.store)
        builtin = dist.ProcessGroupGloo(own, options.group_rank, options.group_size, options.timeout)
    except RuntimeError as error:
        found = engine.lost_builtin("closed")
        engine.close()
        raise found from error
    if settings.fabric == PROBE and fabric is None and len(ranks) > 1:
        engine.plans.find_fabric = lambda: _probe_for(ranks)
    kind = ReproducibleGroup if settings.reproducible in ("tree", "exact") or settings.record_bits else MeshwrightGroup
    group = kind(engine, builtin)
    if torch.cuda.is_available() and dist.is_nccl_available():
        _add_nccl(group, engine, options)
    _groups.add(group)
    return group


def _add_nccl(group: MeshwrightGroup, engine: Engine, options: Any) -> None:
    """Programs on CUDA tensors run over NCCL's point-to-point calls, on a communicator of their own; what has none runs on NCCL."""
    made: list[Any] = [
        dist.ProcessGroupNCCL(dist.PrefixStore(name, options.store), options.group_rank, options.group_size) for name in ("nccl", "nccl/messages")
    ]

    def connect(device: torch.device) -> None:
        connected(made[1], device)

    for one in made:
        engine.attend_device(one)
    group.add_builtin("cuda", dist.ProcessGroup.BackendType.NCCL, made[0])
    group.add_runner("cuda", DeviceRunner("cuda", GroupedMessages(made[1]), options.group_size, connect, engine.over))


def _fabric(settings: Settings) -> Fabric | None:
    if not settings.fabric:
        return None
    if settings.fabric == PROBE:
        return _probed
    from .drive.plans import read_fabric

    return read_fabric(settings.fabric)


def _devices(settings: Settings, fabric: Fabric | None, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the group's devices. Raises: PlanMismatch when there are fewer devices than ranks, UnknownName for one that the fabric lacks."""
    names = settings.devices or (tuple(d.name for d in fabric.devices) if fabric is not None else ())
    if not names:
        return ()
    if max(ranks) >= len(names):
        raise PlanMismatch(
            f"rank {max(ranks)} has no device: {len(names)} are named", where="MESHWRIGHT_DEVICES" if settings.devices else settings.fabric,
            hint="name a fabric with a device for every rank", data={"rank": max(ranks), "devices": len(names)},
        )  # fmt: skip
    if len(set(names)) < len(names):
        raise UsageError("a device is named twice", where="MESHWRIGHT_DEVICES", hint="one per rank")
    if fabric is not None:
        for name in names:
            fabric.device(name)
    return tuple(names[r] for r in ranks)


_probed: Fabric | None = None


def probe(*, budget_s: float | None = None, tolerance: float | None = None, save: str | None = None) -> Fabric:
    """Measure the job's fabric now. From here on, all groups made with MESHWRIGHT_FABRIC=probe plan for it.

    Call it on all ranks, while nothing else runs. It takes up to `budget_s` seconds. `save`: rank 0 writes the fabric there, as TOML.
    Without this call, the first collective of the whole job that is large enough to plan for measures the fabric.
    Raises: CheckFailed when no fabric explains what was measured (names the transfer), RunError, what `probe_group` raises.
    """
    global _probed
    from .io.fabric.toml import fabric_toml
    from .probe.fabric.campaign import MAX_CAMPAIGN_S
    from .probe.fabric.infer import MAX_ERROR_SHARE
    from .probe.fabric.job import probe_group

    plain = dist.new_group(backend="gloo")
    try:
        found = probe_group(plain, budget_s=budget_s or MAX_CAMPAIGN_S, tolerance=tolerance or MAX_ERROR_SHARE)
    finally:
        dist.destroy_process_group(plain)
    _probed = found.fabric
    if save is not None and dist.get_rank() == 0:
        Path(save).write_text(fabric_toml(_probed))
    for group in list(_groups):
        if group.engine.settings.fabric == PROBE:
            names = tuple(d.name for d in _probed.devices)
            group.engine.plans.use(_probed, tuple(names[r] for r in group.engine.global_ranks))
            group.forget_routes()
    return _probed


def _probe_for(ranks: tuple[int, ...]) -> None:
    """Where the whole job is in one collective, measure now. A part of it cannot, and its collectives say so."""
    if _probed is None and len(ranks) == dist.get_world_size():
        probe()


def parallelize(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path, *, loss: Callable[..., Any] | None = None, batch: Any = None,
    pad: Sequence[float] | Mapping[str, float] | None = None, compare: bool = True, batch_statistics: Literal["", "local", "global"] = "",
    dropout: Literal["serial", "local"] = "serial",
) -> ParallelStep:  # fmt: skip
    """A training step of `model` that runs the plan, for your own loop. Call it on all ranks (started by torchrun, or in a world of your own).

        step = meshwright.torch.parallelize(model, optimizer, plan)
        for batch in loader:
            loss = step(batch)          # forward, backward and the optimizer's update
            scheduler.step()            # a scheduler of the same optimizer goes on working

    model: the same module on every rank, on this rank's device. Where weights differ, those of rank 0 are used. A parameter that this rank holds
        whole is updated in place. Other parameters are emptied in the module; `step.state_dict(full=True)` has all of them.
    optimizer: made of the model's parameters. Its class, groups and options stay. The tensors in its groups become those of this rank.
    plan: made by `meshwright.plan`, or a file. It is for as many ranks as the world has. Rank r of the world is rank r of the plan.
    loss: the loss function, if the plan was made in another process. batch: an example, for a plan that was made from a model's name.
    pad: for a plan of several shapes, what shorter batches are filled up with: a number for each tensor of a batch (target last), or for each name.
        All ranks take the step of the smallest shape that takes all their batches. That padding changes no loss is tried at the first padded batch.
    compare: where `batch` is given, rank 0 first compares one step of the plan with the module and the optimizer on it (`compare_step`, some seconds;
        `step.compared` says what was found); False: not. `batch_statistics`, `dropout`: what is meant to differ, as of `compare_step`.
    The step takes the global batch, or the part of the rank's data replica, in the form of the planned batch. It does what the plan's recipe asks:
    precision, clipping, average, schedule. `step.evaluate(batch)` is the loss in evaluation mode.

    Raises: PlanMismatch (another world, different plans at different ranks), UsageError (another model, an optimizer of other parameters; one whose
    scheduler, groups or options that do not go with the plan's), Unsupported (gradient hooks; optimizers that need closures, or, where parameters
    are divided, may look beyond single elements), DifferentTraining (the plan's step is not the module's), and what capture raises; RunError on the
    other ranks for what rank 0 raises.
    """
    from .run.gate.gate import Stated
    from .run.own_loop.parallelize import parallelize as make  # imports the executor

    stated = Stated(batch_statistics=batch_statistics, dropout=dropout)
    return make(model, optimizer, plan, loss=loss, batch=batch, pad=pad, compare=compare, stated=stated)


def compare_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path, batch: Any, *, loss: Callable[..., Any] | None = None,
    batch_statistics: Literal["", "local", "global"] = "", dropout: Literal["serial", "local"] = "serial", whole: bool = False,
) -> GateReport:  # fmt: skip
    """One step of a plan beside your module and your optimizer, in one process, before `parallelize` takes them; nothing of yours is changed.

        print(meshwright.torch.compare_step(model, optimizer, plan, batch).text())

    model, optimizer, plan, loss: as of `parallelize`. batch: a global batch of samples; loss, gradients, buffers and updated parameters of the plan's
    micro-batches, replicas and shards are compared with those of the whole batch at once. What is meant to differ is stated: `batch_statistics`
    "local" (each micro-batch its own, as under DDP) or "global" (planned so), `dropout` "local". whole: compare the plan itself however large it is;
    else a large one is compared on fewer samples, and the report says so, or why nothing was compared (`why_not`).

    Raises: DifferentTraining, naming parameter, operator and cause; as `parallelize` for another model, batch or optimizer.
    """
    from .drive.plans import read_plan
    from .run.gate.gate import Stated
    from .run.own_loop.compared import compare_step as compare

    plan = read_plan(plan) if isinstance(plan, (str, Path)) else plan
    stated = Stated(batch_statistics=batch_statistics, dropout=dropout)
    return compare(model, optimizer, plan, batch, loss=loss, stated=stated, limited=not whole)


def memory_budget(*, budget_bytes: int | None = None, share: float | None = None) -> contextlib.AbstractContextManager[Any]:
    """In this context, graphs that `torch.compile` compiles stay within a memory budget: bytes of one graph, or a share (0 to 1) of its plain peak.

    Yields the partitioner. Its `made` lists the graphs that were cut, with the predicted peak (see `meshwright.run.steps.partitioner`).
    Raises: UsageError for a wrong budget; while compiling, Infeasible below the least peak found.
    """
    from .run.steps.partitioner import memory_budget as budget  # imports Inductor

    return budget(budget_bytes=budget_bytes, share=share)


def planned_traffic(ddp: Any, plan: str | Path, *, deadline_s: float = 300.0, nonfinite: Literal["refuse", "pass"] = "refuse") -> Any:
    """State for `ddp.register_comm_hook(state, meshwright.torch.traffic_hook)` from a file of `meshwright traffic plan`. Call it on all ranks.

    Put `state.state_dict()` into checkpoints, and load it with `load_state_dict`: it holds what was not sent yet. See `meshwright.run.traffic.ddp`.
    Raises: UsageError (no such file), FormatError, CheckFailed (a changed file), PlanMismatch (other model, ranks, or plans differ), Unsupported.
    """
    from .drive.traffic import load_traffic_plan
    from .run.traffic import PlannedTraffic

    return PlannedTraffic(ddp, load_traffic_plan(plan), deadline_s=deadline_s, nonfinite=nonfinite)


def measured_traffic(
    ddp: Any, step: Callable[[], object], *, codecs: Sequence[str] = ("fp16", "topk:density=0.01", "powersgd:rank=1", "powersgd:rank=4"),
    save: str | Path | None = None, deadline_s: float = 300.0, nonfinite: Literal["refuse", "pass"] = "refuse",
) -> Any:  # fmt: skip
    """Measure what gradients cost in this job, plan their traffic, and use the plan. Registers the hook and returns its state.

    `step` runs forward and backward once, without the optimizer. It is called some dozens of times on all ranks. The plan is also run, and costs are
    fitted again with its steps, before it is used. If no plan is at least 5 % faster than DDP alone, DDP sends the gradients.
    `save`: rank 0 writes the plan there, for `planned_traffic`.
    Raises: what `probe.traffic.steps.measure_traffic` and `drive.traffic.plan_traffic` raise, RunError on the other ranks when rank 0 could not plan.
    """
    from .io.plan.traffic import write_traffic_plan
    from .probe.fabric.first_rank import first_rank_bytes
    from .probe.traffic.settled_plan import settled_plan
    from .probe.traffic.steps import measure_traffic

    found, plan = settled_plan(measure_traffic(ddp, step, codecs, deadline_s=deadline_s, nonfinite=nonfinite))
    failed: MeshwrightError | None = None
    if found.state.rank == 0 and save is not None:
        try:
            write_traffic_plan(save, plan)
        except MeshwrightError as error:  # the others wait: they must hear of it
            failed = error
    if not first_rank_bytes(b"" if failed else b"written", ddp.process_group):
        raise failed or RunError("rank 0 could not write the plan", where="measured_traffic", hint="see its message")
    found.state.use(plan)
    return found.state


def traffic_in_training(
    ddp: Any, *, codecs: Sequence[str] = ("fp16", "topk:density=0.01", "powersgd:rank=1", "powersgd:rank=4"), steps: int = 20,
    deadline_s: float = 300.0, nonfinite: Literal["refuse", "pass"] = "refuse",
) -> Any:  # fmt: skip
    """As `measured_traffic`, but in the job's own first steps: train as always, and after `steps` steps the plan is in use.

    Every one of these steps is a step of the training; what a codec holds back is sent in later ones. Call it on all ranks, before the first step.
    Returns the planner: `done`, `plan`, `profile`, and the hook's `state`, whose `state_dict()` belongs into checkpoints.
    Raises: UsageError (too few steps for the codecs), and as `measured_traffic`.
    """
    from .probe.traffic.in_training import TrafficInTraining

    return TrafficInTraining(ddp, codecs, steps=steps, deadline_s=deadline_s, nonfinite=nonfinite)


def compress_fsdp(model: torch.nn.Module, codec: str, *, nonfinite: Literal["refuse", "pass"] = "refuse") -> list[Any]:
    """Send the gradients of all FSDP2 modules in `model` with `codec`. Returns the object that holds their states. See `meshwright.run.traffic.fsdp`.

    Raises: UnknownName, UsageError (codec), Unsupported (a codec of several rounds, a model that is not sharded).
    """
    from .run.traffic.fsdp import compress_fsdp as compress

    return list(compress(model, codec, nonfinite=nonfinite))


def __getattr__(name: str) -> Any:
    if name == "traffic_hook":  # loads the codecs' kernels, which only compressed training needs
        from .run.traffic import traffic_hook

        return traffic_hook
    if name == "PlannedTrainer":  # these need the packages that they are for
        from .run.own_loop.transformers_trainer import PlannedTrainer

        return PlannedTrainer
    if name == "accelerated":
        from .run.own_loop.accelerated import accelerated

        return accelerated
    if name in ("PlannedStrategy", "TrainingStep"):
        from .run.own_loop import lightning_strategy

        return getattr(lightning_strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def report(group: Any = None) -> Mapping[str, Any]:
    """How the collectives of a group ran, or of all groups that are alive: `planned` counts by operation and strategy, `builtin` by operation and
    reason."""
    groups = [group] if group is not None else list(_groups)
    planned: dict[str, dict[str, int]] = {}
    builtin: dict[str, dict[str, int]] = {}
    for one in groups:
        for table, counts in ((planned, one.tally.planned), (builtin, one.tally.builtin)):
            for (op, what), count in counts.items():
                row = table.setdefault(op, {})
                row[what] = row.get(what, 0) + count
    return {"schema": "meshwright.group-report", "version": 1, "planned": planned, "builtin": builtin}


def _offer_monitored_barrier() -> None:
    """torch (2.13) refuses `monitored_barrier` for every backend but gloo, before the group is asked: groups of ours are asked."""
    usual = dist.monitored_barrier

    @functools.wraps(usual)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, MeshwrightGroup):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            usual(group, timeout, wait_all_ranks)

    for module in (dist, dist.distributed_c10d):
        module.monitored_barrier = monitored_barrier


if "meshwright" not in dist.Backend.backend_list:
    _offer_monitored_barrier()
    dist.Backend.register_backend("meshwright", _create, extended_api=True, devices=["cpu", "cuda"])
