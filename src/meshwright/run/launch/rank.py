"""One rank of a training run, from the plan to its recording. The same for ranks that our launcher started and for ranks under torchrun."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import record_function

from ...capture.resolve import build_model
from ...io.plan.plan import read_plan
from ...io.plan.run_names import PLAN
from ...job import Training
from ...plan.plan import Plan, TrainingLayout
from ...plan.shapes import plans_of_shapes
from ...program.calls import inline
from ...program.program import Program
from ..calibrate.calibrate import time_rank
from ..checkpoint.checkpoint import commit_index, keep_latest, load_rank, make_index, save_rank
from ..checkpoint.index import CheckpointIndex, SavedRank, checkpoint_folder
from ..checkpoint.restore import Restored, agree_on_shards, device_folder
from ..executor.device_time import device_time
from ..executor.executor import Executor
from ..executor.memory import RankMemory
from ..executor.transport import Transport, own_device, own_transport
from ..machine.pacing import PacedClock, Pacing
from ..machine.process import CALIBRATING, DONE, POSITION, STATE, STEP, TRAINING, blob_get, blob_put, peak_rss_bytes
from ..ranks.worker import RankLink, Seat
from ..recording.module_clock import ModuleClock
from ..recording.recording import RankRecording, RestartBytes, StepRecord, numbers
from ..recording.tracer import StepTracer
from ..steps.forward_graph import ForwardGraph
from ..steps.storage_peak import peak_of
from ..train.count_exchange import count_exchange
from ..train.data import Batches, Synthetic, open_data
from ..train.evaluation import Evaluation, batches_of
from ..train.loader import seeded
from ..train.metrics import Metrics
from ..train.optimizer_trial import refuse_optimizer
from ..train.rank_builder import RankBuilder
from ..train.segments import RankModule
from ..train.update import Update
from ..train.utilisation import utilisation_of
from ..train.work import TrainingWork
from .outcome import opaque_function
from .setup import Setup, fetch_setup
from .shaped_steps import ShapedStep, ShapedSteps, shaped_batches

__all__ = ["RankOptions", "run_rank", "training_rank"]

MAX_RECORDED_ROWS = 1 << 16  # numbers of rows that are kept of a layer, an expert and a step each
MAX_RECORDED_STEPS = 64  # training steps whose program steps are kept one by one; losses and times are kept of all


class RankOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a run is told, the same for all its ranks. Nothing has a default here: `RunRequest` has them."""

    data: str
    steps: int  # train until this many steps are done, counted from the first run
    out: str  # folder that checkpoints go to
    device: str
    checkpoint_every: int  # 0: only at the end
    resume_from: str  # a checkpoint's folder
    local_shards: str  # folder of the own device's shards, with {device} for its name; "": all ranks share `out`
    resume_local: bool
    drop_residual: bool  # what the checkpoint's codecs had not sent may be lost
    also_shared: bool  # with local shards: checkpoints go to `out` too
    timeout_s: float
    pacing: str
    share: float
    calibrate: bool
    module_spans: bool  # record when which module runs
    traces: str  # folder that a torch.profiler trace of a few steps goes to; "": none
    tensorboard: bool
    evaluate_every: int  # steps; 0: never
    evaluation_data: str
    evaluation_batches: int  # global batches; 0: all of data with a length


def preload() -> None:
    """What ranks need beside the imports of this module: torch loads it at first use."""
    import safetensors.torch  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def training_rank(seat: Seat) -> RankRecording:
    """A rank that our launcher started."""
    options = msgspec.convert(seat.options, RankOptions)
    plan = read_plan(seat.folder / PLAN)
    link = seat.join(options.device, options.timeout_s)
    return run_rank(plan, fetch_setup(link.store, 1 + len(plan.shapes)), seat.rank, options, link)


def run_rank(plan: Plan, setups: Sequence[Setup], rank: int, options: RankOptions, link: RankLink) -> RankRecording:
    """Load, calibrate, train, checkpoint. `torch.distributed` is initialised; `setups`: of each of the plan's shapes. Raises what goes wrong,
    `StepFailed` inside a step."""
    layout = plan.layout
    assert layout is not None
    torch.set_num_threads(1)
    job = msgspec.convert(plan.job["training"], Training)
    device, graph, orders = own_device(options.device, rank), setups[0].graph, setups[0].orders
    program = inline(plan.main, plan.programs).program
    made = _Maker(plan, job, layout, graph, program, rank, device)
    times = device_time(device)
    marks = ModuleClock(times) if options.module_spans else None
    module, optimizer = made.module(marks)
    first = 0
    index: CheckpointIndex | None = None
    losses_before: list[float] = []
    restart: RestartBytes | None = None
    if options.resume_local:
        index, restart = _from_local_shards(plan, rank, options, link, module, optimizer)
        first, losses_before = index.step, numbers(index.losses)
    elif options.resume_from:
        index = msgspec.json.decode((Path(options.resume_from) / "index.json").read_bytes(), type=CheckpointIndex)
        restart = load_rank(Path(options.resume_from), index, rank, module, optimizer, plan)
        first, losses_before = index.step, numbers(index.losses)
    if index is not None:
        optimizer.resume(index.scalars, index.step)
    shaped = shaped_batches(plan, setups, rank, module, options.data, made.examples, device)
    source = Synthetic(made.examples, job.seed) if shaped else open_data(options.data, made.examples, job.seed, job.global_batch)
    data = Batches(source, layout, graph.inputs, device)
    pacing = Pacing(mode=options.pacing, share=options.share)  # type: ignore[arg-type]
    exchange = count_exchange(graph, layout, rank) if layout.ranks > 1 else None
    work, memory = made.builder.work(module, optimizer, data if shaped is None else shaped.of(layout), exchange=exchange)
    if index is not None:
        work.compressed.load(Path(options.resume_from), index.residuals, drop_residual=options.drop_residual)
    clock = PacedClock(pacing.share).step if pacing.mode == "paced" else None
    transport = own_transport(rank, device)
    executor = Executor(
        program, orders, rank, memory=memory, transport=transport, work=work, clock=clock, progress=link.progress, times=times
    )  # fmt: skip
    steps = ShapedSteps(plan, shaped, [ShapedStep(graph, layout, work, executor)])
    for one, setup in zip(plans_of_shapes(plan)[1:], setups[1:], strict=True):
        steps.add(made.of_shape(one, setup.graph), one, setup, module, optimizer, executor)
    data.microbatch(first, 0, 0) if shaped is None else shaped.fetch(first)  # wrong data is told before anything starts
    evaluation = made.evaluation(plan, module, transport, options, link) if options.evaluate_every else None
    link.go()
    link.progress[STATE] = CALIBRATING
    if options.calibrate:

        def spoilable() -> tuple[TrainingWork, RankMemory]:
            copy, its_optimizer = made.module(ModuleClock(times) if options.module_spans else None)
            return made.builder.work(copy, its_optimizer, data, alone=True)

        costs = time_rank(program, orders, rank, spoilable, transport if layout.ranks > 1 else None, device, exchange, share=pacing.share)
        blob_put(link.store, f"costs/{rank}", msgspec.json.encode(costs))
    made.forget()
    if layout.ranks > 1:
        dist.barrier()
    link.progress[STATE] = TRAINING
    utilisation = utilisation_of(plan, options.device) if rank == 0 else None
    metrics = Metrics(link.store, rank, layout, graph.inputs, Path(options.out), first, options.tensorboard, utilisation)
    link.leave = metrics.leave
    trainer = _Trainer(steps, memory, module, optimizer, rank, layout, plan, options, link, losses_before, marks, metrics, evaluation)
    recording = trainer.train(first)
    metrics.close()
    data.close()
    if shaped is not None:
        shaped.close()
    if made.evaluation_data is not None:
        made.evaluation_data.close()
    recording.restart = restart
    link.progress[STATE] = DONE
    return recording


def _from_local_shards(
    plan: Plan, rank: int, options: RankOptions, link: RankLink, module: RankModule, optimizer: Any
) -> tuple[CheckpointIndex, RestartBytes]:
    """The newest checkpoint of which the devices have parts; storage supplies, of the same checkpoint, what no device has."""
    assert plan.layout is not None
    own = device_folder(options.local_shards, plan.placement[rank])
    found = agree_on_shards(link.store, rank, plan.layout.ranks, plan.placement[rank], own)
    shared = checkpoint_folder(Path(options.out) / "checkpoint", found.index.step)
    made = Restored(
        plan=plan, rank=rank, index=found.index, shared=shared if shared.is_dir() else None, own=checkpoint_folder(own, found.index.step),
        homes=found.homes,
    )  # fmt: skip
    return found.index, made.run(module, optimizer)


class _Maker:
    """Builds rank modules from the model function. Weights that lie in files are read by parts; others are drawn by parts, as one process draws them
    from the same seed, where its making can be put off (`capture.drawn`)."""

    def __init__(
        self, plan: Plan, job: Training, layout: TrainingLayout, graph: ForwardGraph, program: Program, rank: int, device: torch.device
    ) -> None:
        self.job, self.layout, self.rank, self.device = job, layout, rank, device
        source = build_model(
            job.model, device="cpu", seed=job.seed, batch_size=layout.microbatch_size, lazy=True, sizes=job.sizes or (), dtype=job.dtype
        )
        self.examples = source.examples
        self.parameters = dict(source.module.named_parameters())
        self.buffers, self.values = dict(source.module.named_buffers()), source.weights
        for name, buffer in self.buffers.items():
            if self.values is not None and name in self.values.known_as:
                buffer.copy_(self.values.part(name, buffer.dtype))
        self.seed = plan.seed
        self.builder = self._builder(job, layout, graph, program)
        self.evaluation_data: Batches | None = None

    def _builder(self, job: Training, layout: TrainingLayout, graph: ForwardGraph, program: Program) -> RankBuilder:
        return RankBuilder(
            program=program, layout=layout, graph=graph, job=job, rank=self.rank, device=self.device, seed=self.seed,
            opaque=opaque_function(job, graph, layout, str(self.device)),
        )  # fmt: skip

    def of_shape(self, plan: Plan, graph: ForwardGraph) -> RankBuilder:
        """For the step of another shape; `plan`: of it alone."""
        assert plan.layout is not None
        job = msgspec.convert(plan.job["training"], Training)
        return self._builder(job, plan.layout, graph, inline(plan.main, plan.programs).program)

    def module(self, clock: ModuleClock | None = None) -> tuple[RankModule, Update]:
        module = self.builder.module(self.parameters, self.buffers, clock=clock, values=self.values)
        if self.rank == 0 and self.parameters:
            refuse_optimizer(self.job.optimizer, self.parameters, self.job.learning_rate, self.layout)
        return module, self.builder.update(module, self.parameters)

    def evaluation(self, plan: Plan, module: RankModule, transport: Transport, options: RankOptions, link: RankLink) -> Evaluation:
        """On the rank's own weights. Nothing that making it draws at random is missed by training."""
        graph = ForwardGraph.from_json(blob_get(link.store, "setup/evaluation"))
        with seeded(self.job.seed, "evaluation"):
            opened = open_data(options.evaluation_data, self.examples, self.job.seed, self.layout.global_batch)
        batches = batches_of(opened, options.evaluation_batches, self.layout.global_batch, options.evaluation_data)
        data = self.evaluation_data = Batches(opened, self.layout, graph.inputs, self.device)
        with seeded(self.job.seed, "evaluation"):
            data.microbatch(0, 0, 0)  # wrong data is told before anything starts
        return Evaluation(
            plan, graph, self.rank, module, data, batches, transport, precision=self.job.asked.autocast,
            opaque=opaque_function(self.job, graph, self.layout, str(self.device), evaluation=True),
            exchange=count_exchange(graph, self.layout, self.rank) if self.layout.ranks > 1 else None, progress=link.progress,
        )  # fmt: skip

    def forget(self) -> None:
        self.parameters, self.buffers, self.values = {}, {}, None


class _Trainer:
    def __init__(
        self, steps: ShapedSteps, memory: RankMemory, module: RankModule, optimizer: Any, rank: int, layout: TrainingLayout,
        plan: Plan, options: RankOptions, link: RankLink, losses_before: list[float], marks: ModuleClock | None,
        metrics: Metrics, evaluation: Evaluation | None,
    ) -> None:  # fmt: skip
        self.marks, self.metrics, self.evaluation = marks, metrics, evaluation
        self.steps, self.memory, self.module, self.optimizer = steps, memory, module, optimizer
        self.executor, self.work = steps.of[0].executor, steps.of[0].work
        self.rank, self.layout, self.plan, self.options, self.link = rank, layout, plan, options, link
        self.losses_before = losses_before
        runs = marks.runs if marks else []
        self.recording = RankRecording(rank=rank, host=socket.gethostname(), order=list(self.executor.order), steps=[], module_runs=runs)
        self.zero = self._common_zero()

    def _common_zero(self) -> float:
        """Ranks of one machine share its clock; others start theirs here, right after a barrier."""
        key, mine = _machine(), f"{time.perf_counter()}"
        self.recording.clock = hashlib.sha256(key.encode()).hexdigest()[:16]
        if self.rank == 0:
            self.link.store.set("clock", f"{key} {mine}")
        machine, _, zero = self.link.store.get("clock").decode().partition(" ")
        return float(zero) if machine == key else float(mine)

    def train(self, first: int) -> RankRecording:
        r, options = self.recording, self.options
        profiled = min(first + 1, options.steps - 1)  # optimizer state exists by then; not among the steps that are compared unless there is one only
        tracer = StepTracer(options.traces, self.rank, self.executor.memory.device, first + 2, options.steps, self.marks) if options.traces else None
        for step in range(first, options.steps):
            self.link.progress[STEP], self.link.progress[POSITION] = step, 0
            if self.link.on_step is not None:
                self.link.on_step(step)
            if tracer is not None and step in tracer.steps:
                with tracer.step(step):
                    self.one(step, traced=True)
            elif step == profiled:
                r.memory_peak_bytes = peak_of(lambda s=step: self.one(s, profiled=True), self.resident())  # type: ignore[misc]
            else:
                self.one(step)
            if self.evaluation is not None and ((step + 1) % options.evaluate_every == 0 or step + 1 == options.steps):
                self.evaluate(self.evaluation, step)
            every = options.checkpoint_every
            if step + 1 == options.steps or (every and (step + 1) % every == 0):
                self.checkpoint(step + 1)
        r.rss_peak_bytes = peak_rss_bytes()
        r.parameters_bytes = sum(t.numel() * t.element_size() for _, t, _ in self.module.kept())
        return r

    def one(self, step: int, *, profiled: bool = False, traced: bool = False) -> None:
        zero = self.zero
        rate = next((float(g["lr"]) for g in self.optimizer.param_groups), 0.0)
        cpu, process, start = time.thread_time(), time.process_time(), time.perf_counter()
        with record_function("load data") if traced else nullcontext():
            now = self.steps.begin(step)
        loaded, executor = time.perf_counter(), now.executor
        executor.run()
        end = time.perf_counter()
        record = StepRecord(
            step=step, start_s=_rounded(start - zero), end_s=_rounded(end - zero), cpu_s=time.thread_time() - cpu,
            process_cpu_s=time.process_time() - process, profiled=profiled, traced=traced, data_end_s=_rounded(loaded - zero),
            shape=self.steps.number,
        )  # fmt: skip
        loss = now.work.loss()
        if loss is not None:
            self.recording.losses.append(loss)
        self.steps.tell(self.metrics)
        self.metrics.step(step, loss, end - start, learning_rate=rate, **now.work.said())
        marks = self.marks.take(zero) if self.marks else ([], [])
        self._count_rows()
        if len(self.recording.steps) < MAX_RECORDED_STEPS and now is self.steps.of[0]:  # of others lengths and losses alone
            record.marks, record.marks_s = marks
            record.starts_s = np.round(np.asarray(executor.starts) - zero, 7).tolist()
            record.ends_s = np.round(np.asarray(executor.ends) - zero, 7).tolist()
        self.recording.steps.append(record)

    def _count_rows(self) -> None:
        """Rows of experts in the step that is over, as long as there is room."""
        for layer, (rows, dropped) in self.marks.take_rows().items() if self.marks else ():
            if dropped:
                self.recording.expert_dropped[layer] = self.recording.expert_dropped.get(layer, 0) + dropped
            kept = self.recording.expert_rows.setdefault(layer, [])
            if (len(kept) + 1) * len(rows) <= MAX_RECORDED_ROWS:
                kept.append(rows)

    def evaluate(self, evaluation: Evaluation, step: int) -> None:
        loss = evaluation.run()
        self.recording.evaluation_batches = evaluation.batches
        if loss is not None:
            self.recording.evaluations.append((step + 1, loss))
        self.metrics.evaluated(step, loss)
        self.recording.steps[-1].evaluated_s = _rounded(time.perf_counter() - self.zero)

    def resident(self) -> list[torch.Tensor]:
        """Tensors that live between steps."""
        found: list[torch.Tensor] = [p.tensor for p in self.module.parameters.values() if p.tensor.numel()]
        found += [*self.module.buffers.values(), *self.module.flats.values()]
        found += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        found += [t for free in self.memory.staging.free.values() for t in free]
        found += [f for f in self.memory.flats if f is not None]
        found += self.work.compressed.tensors()
        return found + [t for s in self.module.segments.values() for t in s.constants]

    def checkpoint(self, step: int) -> None:
        """Every rank writes its part; rank 0 commits when all have. With local shards every device gets the index too."""
        store, root, options = self.link.store, Path(self.options.out) / "checkpoint", self.options
        self.metrics.write()  # what a run that resumes here will not say again
        local = device_folder(options.local_shards, self.plan.placement[self.rank]) if options.local_shards else None
        shared = local is None or options.also_shared
        folders = ([checkpoint_folder(local, step)] if local is not None else []) + ([checkpoint_folder(root, step)] if shared else [])
        for folder in folders:
            saved = save_rank(folder, self.rank, self.module, self.optimizer, self.layout, self.recording.losses)
            saved.residual = self.work.compressed.save(folder, step)
        blob_put(store, f"saved/{step}/{self.rank}", msgspec.json.encode(saved))
        if self.rank == 0:
            ranks = [msgspec.json.decode(blob_get(store, f"saved/{step}/{r}"), type=SavedRank) for r in range(self.layout.ranks)]
            columns = [numbers(x.losses) for r, x in enumerate(ranks) if x.losses and self.layout.coordinates(r)[2] == 0]
            losses = self.losses_before + [sum(c) / len(c) for c in zip(*columns, strict=True)]
            index = make_index(self.plan, step, self.options.data, losses, ranks)
            if shared:
                commit_index(checkpoint_folder(root, step), index)
                keep_latest(root)
            blob_put(store, f"committed/{step}", msgspec.json.encode(index))
        index = msgspec.json.decode(blob_get(store, f"committed/{step}"), type=CheckpointIndex)
        if local is not None:
            commit_index(checkpoint_folder(local, step), index)
            keep_latest(local)


def _rounded(seconds: float) -> float:
    return round(seconds, 7)


def _machine() -> str:
    """Names the machine whose clock this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
