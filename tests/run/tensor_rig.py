"""One training step of a planned layout on real processes, and the same step by plain eager training."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rig import fabric_of, forward_of, graph_of

from meshwright.capture.losses import Objective
from meshwright.capture.resolve import build_model
from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.cost import Cost, Transport
from meshwright.decide.collective import CollectiveProblem, strategy
from meshwright.decide.layout.build import build_layout
from meshwright.decide.layout.context import context_graph
from meshwright.decide.layout.data_sharding import PLAIN, DataSharding
from meshwright.decide.layout.megatron import search_regions
from meshwright.decide.layout.problem import Degrees
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.layout.unlike_devices import EVEN, Division
from meshwright.decide.memory.regions import RegionChooser
from meshwright.decide.pipeline import PipelineProblem, one_f_one_b_order
from meshwright.drive.collective.callee import bindable
from meshwright.drive.pipeline.pipelines import make_strategy
from meshwright.drive.training.schedules import actions_of, scheduled
from meshwright.drive.training.stage_steps import StageSteps
from meshwright.graph.liveness import segment_workspace
from meshwright.job import Recipe, Training
from meshwright.lower.training import lower_training
from meshwright.plan.batch_statistics import with_shared_statistics
from meshwright.plan.plan import StepEnd, TrainingLayout
from meshwright.plan.recompute import LayoutRegions
from meshwright.plan.shards import local_values
from meshwright.probe.steps.stages import StageSource
from meshwright.program.calls import inline
from meshwright.program.hash import program_hash
from meshwright.program.program import Part, Program
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.tags import TAG_WINDOW
from meshwright.run.executor.transport import TaggedTransport
from meshwright.run.steps.forward_graph import ForwardGraph
from meshwright.run.tensor.sharding import take_part
from meshwright.run.train.dropout import Draws, SerialDraws, random_places
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import TrainingWork, gradient_bytes

MODELS = "tests/run/tensor_models.py:"
SEED = 3
BUILDING = threading.Lock()  # ranks that are threads trace one after another: what torch.fx patches while it traces is the process's


@dataclass
class Case:
    """A planned step; everything a rank needs travels to it as data."""

    model: str
    loss: str
    layout: TrainingLayout
    program: Program
    comm_names: list[str]
    orders: Sequence[Any]
    graph: bytes
    batch: tuple[torch.Tensor, ...]
    step: int = 0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()


@dataclass
class Outcome:
    loss: float | None
    gradients: dict[str, torch.Tensor]
    sent: dict[str, int]
    saved_bytes: dict[str, int]


def plan_case(
    name: str, degrees: tuple[int, int, int], *, microbatch: int = 2, global_batch: int = 4, loss: str = "cross-entropy",
    options: TensorOptions = TensorOptions(), step: int = 0, recompute: str = "none", models: str = MODELS, sharding: DataSharding = PLAIN,
    schedule: tuple[str, dict[str, Any]] | None = None, division: Division = EVEN, costs: Path | None = None, end: StepEnd | None = None,
    precision: str = "fp32", context: tuple[int, str] = (1, ""),
) -> Case:  # fmt: skip
    """`context`: degree and exchange; `degrees[0]` are replicas with samples of their own."""
    model = models + name
    layout, program, flat = _lowered(
        model, degrees, microbatch, global_batch, loss, options, None, recompute, sharding, schedule, division, costs, end, precision, context
    )  # fmt: skip
    forward = forward_of(model, microbatch, loss, precision)
    module, batch = whole_case(name, global_batch, loss, models)
    assert not check_layout(layout, layout.ranks)
    assert not (wrong := check_training(flat, layout)), wrong[0].message
    return Case(
        model, loss, layout, flat, list(program.comms.name), fuse_lanes(flat), forward.to_json(), batch, step,
        {n: p.detach() for n, p in module.named_parameters()}, dict(module.named_buffers()),
        frozenset(n for n, p in module.named_parameters() if not p.requires_grad),
    )  # fmt: skip


def lowered_step(
    name: str, degrees: tuple[int, int, int], *, options: TensorOptions, layout: TrainingLayout | None = None
) -> tuple[TrainingLayout, Program]:
    """(layout, inlined program) without checks; `layout` in place of the planned one."""
    found, _, flat = _lowered(MODELS + name, degrees, 2, 4, "cross-entropy", options, layout)
    return found, flat


def _lowered(*arguments: Any, **more: Any) -> tuple[TrainingLayout, Program, Program]:
    layout, program, callees = lowered_calls(*arguments, **more)
    return layout, program, inline(program, callees).program


def lowered_calls(
    model: str, degrees: tuple[int, int, int], microbatch: int, global_batch: int, loss: str, options: TensorOptions, layout: TrainingLayout | None,
    recompute: str = "none", sharding: DataSharding = PLAIN, schedule: tuple[str, dict[str, Any]] | None = None, division: Division = EVEN,
    costs: Path | None = None, end: StepEnd | None = None, precision: str = "fp32", context: tuple[int, str] = (1, ""), shared: bool = False,
) -> tuple[TrainingLayout, Program, dict[str, Program]]:  # fmt: skip
    """(layout, program, the programs that it calls). `shared`: statistics of the batch are summed over the replicas."""
    graph = context_graph(graph_of(model, microbatch, loss, precision), *context)
    graph = with_shared_statistics(graph, graph_of(model, global_batch, loss, precision)) if shared else graph
    orders = None
    if schedule is not None:
        problem = PipelineProblem.of(degrees[2], max(division.microbatches, default=global_batch // (degrees[0] * microbatch)), data=degrees[0])
        orders = make_strategy(*schedule).plan(problem, rng=np.random.default_rng(0))
    d = Degrees(*degrees[:2], orders.stages if orders else degrees[2], microbatch, context=context[0], exchange=context[1])
    fabric = fabric_of(max(2, d.ranks))
    regions, kept = search_regions(graph)
    layout = layout or build_layout(
        graph, regions, d, global_batch, cost=Cost(), device=fabric.devices[0], border_Bps=1e9, workspace=segment_workspace, options=options,
        kept=kept, sharding=sharding, division=division,
    )  # fmt: skip
    if end is not None:
        layout = msgspec.structs.replace(layout, end=end)
    if recompute not in ("none", "steps"):
        layout = recomputed(graph, layout, recompute)
    if orders is not None:
        layout = scheduled(layout, graph, orders)
    if recompute == "steps":
        layout = planned_stages(model, layout, loss, costs, precision)
    names = [x.name for x in fabric.devices]

    @cache
    def collective(purpose: str, ranks: tuple[int, ...], size: int, op: str = "all-reduce") -> Any:
        whole = -(-size // 8) * 8
        problem = CollectiveProblem(
            fabric=fabric, op=op, ranks=tuple(names[r] for r in ranks), size_bytes=whole, seed=0, transport=Transport(), element_bytes=8
        )
        plan = strategy("ring")(unroll=True).plan(problem, rng=np.random.default_rng(0))
        return bindable(program_hash(plan.program), plan.program)

    rows = actions_of(orders) if orders is not None else ()
    return layout, *lower_training(graph, layout, one_f_one_b_order, collective, orders=rows)


def recomputed(graph: Any, layout: TrainingLayout, rule: str) -> TrainingLayout:
    """The layout with a rule (`selective`, `full`) or the leanest choice (`least`) in every region."""
    regions = LayoutRegions(graph, layout)
    device = fabric_of(2).devices[0]
    chooser = RegionChooser(regions.regions, lambda n, key: Cost().roofline(n.forward, device).time_s)
    chosen = chooser.most_saved() if rule == "least" else chooser.rule(rule)
    return regions.apply(chosen.again)


def planned_stages(
    model: str, layout: TrainingLayout, loss: str = "cross-entropy", costs: Path | None = None, precision: str = "fp32"
) -> TrainingLayout:
    """The layout with every stage run by the leanest plan of its step graph, priced by the roofline (`costs`: measured here, and kept there)."""
    device = dataclasses.replace(fabric_of(2).devices[0], kind="gpu" if costs is None else "cpu")  # a GPU: nothing can be measured here
    job = Training(model=model, global_batch=layout.global_batch, loss=loss, recipe=Recipe(precision=precision))
    source = StageSource(job=job, device=device, cost=Cost(), costs=costs)
    stages = StageSteps(layout, source, effort=200_000)
    return stages.apply(stages.saving(dict.fromkeys(range(len(layout.stages)), 1 << 60)))


def whole_case(name: str, global_batch: int, loss: str, models: str = MODELS) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    source = build_model(models + name, device="cpu", seed=SEED)
    generator = torch.Generator().manual_seed(7)
    batch = []
    for x in source.inputs:
        shape = (global_batch, *x.shape[1:])
        high = int(x.max()) + 1 if not x.is_floating_point() else 0
        batch.append(torch.randint(high, shape, generator=generator) if high else torch.randn(shape, generator=generator, dtype=x.dtype))
    return source.module, tuple(batch)


class _Fixed:
    def __init__(self, case: Case) -> None:
        self.case = case

    def microbatch(self, step: int, replica: int, microbatch: int) -> Sequence[torch.Tensor]:
        lay = self.case.layout
        first = lay.first_sample(replica, microbatch)
        return [x[first : first + lay.microbatch_size].clone() for x in self.case.batch]


class _Counting(TaggedTransport):
    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.bytes: Counter[int] = Counter()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.bytes[tag // TAG_WINDOW] += tensor.numel() * tensor.element_size()
        return super().send(tensor, peer, tag)


class _Keep:
    """An optimizer that keeps the gradients it is given."""

    def __init__(self, module: Any) -> None:
        self.module, self.kept = module, {}

    def step(self) -> None:
        self.kept = {p.name: p.tensor.grad.clone() for p in self.module.trained()}


def run_case(rank: int, group: Any, case: Case) -> Outcome:
    """On a rank: one step."""
    layout, program, graph = case.layout, case.program, ForwardGraph.from_json(case.graph)
    whole = {n: torch.nn.Parameter(p, requires_grad=n not in case.frozen) for n, p in case.parameters.items()}
    device = torch.device("cpu")
    with BUILDING:
        module = build_rank_module(graph, layout, rank, whole, case.buffers, device=device, gradient_bytes=gradient_bytes(program, rank))
    optimizer = _Keep(module)
    work = TrainingWork(program, layout, rank, module, _Fixed(case), optimizer, seed=SEED)
    memory = RankMemory(program, rank, device, local_values(layout, rank), module.gradients, layout=layout)
    transport = _Counting(group)
    executor = Executor(program, case.orders, rank, memory=memory, transport=transport, work=work)
    saved: dict[str, int] = {}
    for segment in module.segments.values():
        segment.meter = saved.__setitem__
    work.begin(case.step)
    executor.run()
    tags = program.channels.tag.tolist()
    sent: Counter[str] = Counter()
    for channel, size in transport.bytes.items():
        sent[comm_of(case, tags[channel])] += size
    return Outcome(work.loss(), optimizer.kept, dict(sent), saved)


def comm_of(case: Case, tag: int) -> str:
    return case.comm_names[tag] if tag >= 0 else "pipeline"


def predicted_sends(case: Case, rank: int) -> dict[str, int]:
    """Bytes that the plan's program sends from a rank, by communicator."""
    p = case.program
    actor = p.lanes.actor[p.lane_of_step()]
    found: Counter[str] = Counter()
    sizes = p.message_bytes()
    for step in np.flatnonzero((actor == rank) & ((p.steps.parts & Part.SEND) > 0)).tolist():
        found[comm_of(case, int(p.channels.tag[p.steps.chan_out[step]]))] += int(sizes[step])
    return dict(found)


def serial_step(case: Case, name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of the unmodified module in one process: micro-batch by micro-batch as a mean of means; losses of the module's own, which may
    count targets, of the whole batch at once."""
    module, batch = whole_case(name, case.layout.global_batch, case.loss, case.model.rpartition(":")[0] + ":")
    objective = Objective(module, case.loss)
    places = list(random_places(ForwardGraph.from_json(case.graph)).values())
    rows, total = case.layout.global_batch if case.loss == "output" else case.layout.microbatch_size, 0.0
    count = case.layout.global_batch // rows
    for i in range(count):
        draws = Draws(seed=SEED, step=case.step, first=case.step * case.layout.global_batch + i * rows, samples=rows)
        with SerialDraws(draws, places):
            loss = objective(*(x[i * rows : (i + 1) * rows] for x in batch)) / count
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in module.named_parameters() if p.requires_grad}


def as_serial(pool: Any, name: str, degrees: tuple[int, int, int], **options: Any) -> tuple[Case, list[Outcome]]:
    """A step of a model on the pool's processes, compared with the serial one."""
    case = plan_case(name, degrees, **options)
    outcomes = pool.run(run_case, case.layout.ranks, case)
    compare(case, outcomes, serial_step(case, name))
    return case, outcomes


def compare(case: Case, outcomes: Sequence[Outcome], expected: tuple[float, dict[str, torch.Tensor]], tolerance: float = 1e-9) -> None:
    """Losses and every gradient equal within `tolerance` of the largest entry; bytes sent equal the plan's exactly.

    A gradient that is zero but for rounding (a key bias) is measured against a millionth of the model's largest.
    """
    loss, gradients = expected
    lay = case.layout
    shards = {s.param: s for s in lay.shards}
    heard = [o.loss for o in outcomes if o.loss is not None]
    assert heard
    by_replica: dict[tuple[int, int], list[float]] = {}  # and by copy of the last stage
    for rank, o in enumerate(outcomes):
        if o.loss is not None:
            p, d, _ = lay.coordinates(rank)
            by_replica.setdefault((p, d), []).append(o.loss)
    for same in by_replica.values():
        assert max(same) - min(same) <= tolerance * abs(max(same)), "the ranks of a tensor-parallel group disagree"
    mean = sum(x[0] for x in by_replica.values()) / len(by_replica)
    assert abs(mean - loss) <= tolerance * abs(loss), (mean, loss)
    seen: set[str] = set()
    floor = 1e-6 * max(float(g.abs().max()) for g in gradients.values())
    for rank, o in enumerate(outcomes):
        part = lay.coordinates(rank)[2]
        for name, gradient in o.gradients.items():
            whole = gradients[name]
            own = take_part(whole, shards[name].axis, shards[name], part, lay.tensor) if name in shards else whole
            assert gradient.shape == own.shape, name
            scale = max(float(whole.abs().max()), floor)
            error = float((gradient - own).abs().max()) / scale
            assert error <= tolerance, f"rank {rank}: gradient of {name} is off by {error:.3g}"
            seen.add(name)
        assert o.sent == predicted_sends(case, rank)
    assert seen == set(gradients)
