"""One rank of a layout run: under `layout run`, or `python -m meshwright.run.dtensor.worker FOLDER`, started once per rank with torchrun's variables.

Reads plans and `request.json` from the folder, trains, leaves `rank-<r>.json` there. Works in the lab, under torchrun and on several machines
alike; gloo on processors, NCCL on CUDA devices.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ...plan.sharding import ShardingPlan
from ..machine.process import CALIBRATING, STATE, STEP, TRAINING
from ..ranks.worker import RankLink, Seat

__all__ = ["RankReport", "WorkRequest", "layout_rank", "run_rank"]


class WorkRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What ranks are asked to do. `verify`: compare loss and gradients of the first step with a serial run on rank 0. `plans`: file names in the
    folder; several take turns step by step, so that they are measured under the same conditions."""

    plans: list[str]
    steps: int = 10
    warmup: int = 2
    seed: int = 0
    learning_rate: float = 1e-2
    device: str = "cpu"
    dtype: str = ""
    verify: bool = False
    timeout_s: float = 120.0


class PlanReport(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    plan: str
    step_s: list[float]
    losses: list[float]
    sent_bytes: dict[str, int]  # of one step
    planned_bytes: dict[str, int]  # in the precision of the run
    messages: int
    kept_bytes: int
    loss_apart: float | None = None  # |loss - serial| / |serial|
    gradients_apart: float | None = None  # largest difference over the largest entry of the serial gradient, over parameters
    gradients_where: str = ""


class RankReport(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rank: int
    plans: list[PlanReport]


def preload() -> None:
    """What ranks need beside the imports of this module."""
    from ..launch import rank

    rank.preload()
    from . import work  # noqa: F401


def layout_rank(seat: Seat) -> RankReport:
    """A rank that our launcher started."""
    return run_rank(seat.folder, seat.link(seat.options["timeout_s"]))


def run_rank(folder: Path, link: RankLink | None = None) -> RankReport:
    """Train as the folder's request says. Raises: PlanMismatch (another model or another number of ranks), Unsupported, RunError."""
    import torch
    import torch.distributed as dist

    from ...errors import PlanMismatch
    from ..executor.transport import own_device, own_transport

    link = link or RankLink()
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=WorkRequest)
    plans = [msgspec.json.decode((folder / name).read_bytes(), type=ShardingPlan) for name in request.plans]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for plan in plans:
        if len(plan.devices) != world:
            raise PlanMismatch(f"the plan is for {len(plan.devices)} ranks, there are {world}", hint="start as many ranks as the plan has devices")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = own_device(request.device, rank)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=request.timeout_s))
    try:
        transport = own_transport(rank, device)
        trainers = [_Trainer(plan, request, rank, device, transport, name) for plan, name in zip(plans, request.plans, strict=True)]
        link.go()
        link.progress[STATE] = CALIBRATING
        if request.verify:
            for trainer in trainers:
                trainer.verify()
        link.progress[STATE] = TRAINING
        for step in range(request.warmup + request.steps):
            link.progress[STEP] = step
            for trainer in trainers:
                trainer.step(step, timed=step >= request.warmup)
        report = RankReport(rank=rank, plans=[t.report for t in trainers])
    finally:
        dist.destroy_process_group()
    return report


class _Trainer:
    """A plan's program on this rank, its optimiser, its report."""

    def __init__(self, plan: ShardingPlan, request: WorkRequest, rank: int, device: Any, transport: Any, name: str) -> None:
        import torch

        from ...capture.forward import trace_forward
        from ...capture.graph import executed_graph
        from ...errors import PlanMismatch
        from ...lower.sharding import lower_sharding
        from ...program.calls import inline
        from ..executor.executor import Executor
        from ..executor.lanes import fuse_lanes
        from ..executor.memory import RankMemory
        from .redistribute import CountedMessages
        from .work import ShardedWork

        self.plan, self.request, self.device = plan, request, device
        self.traced = trace_forward(plan.model, loss=plan.loss, batch_size=plan.batch, seed=request.seed, device="cpu")
        graph = executed_graph(self.traced)
        if graph.fingerprint() != plan.fingerprint:
            text = f"the model {plan.model!r} is not the planned one: {graph.fingerprint()}, planned {plan.fingerprint}"
            raise PlanMismatch(text, hint="make the plan again")
        self.dtype = getattr(torch, request.dtype) if request.dtype else None
        lowered = lower_sharding(plan, graph, dtype=request.dtype)
        program = inline(lowered.program, lowered.callees).program
        self.work = ShardedWork(plan, self.traced, lowered, program, rank, dtype=self.dtype, device=str(device))
        self.counted = CountedMessages(transport, program)
        memory = RankMemory(program, rank, device, lowered.values[rank], {})
        self.executor = Executor(program, fuse_lanes(program), rank, memory=memory, transport=self.counted, work=self.work)
        parameters = list(self.work.parameters.values())
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[plan.optimizer]
        self.optimizer = kind(parameters, lr=request.learning_rate) if parameters else None
        self.planned_bytes = {k: v for k, v in msgspec.structs.asdict(plan.bytes_sent[rank]).items() if v}
        own = next((p.element_size() for p in self.traced.parameters.values() if p.is_floating_point()), 4)
        self.more_bytes = (self.dtype.itemsize if self.dtype else own) - (plan.item_bytes or own)  # per float than planned
        kept = sum(p.numel() * p.element_size() for p in self.work.pieces.values())
        self.report = PlanReport(plan=name, step_s=[], losses=[], sent_bytes={}, planned_bytes={}, messages=0, kept_bytes=kept)

    def _run(self, number: int) -> None:
        from .local import Step

        self.work.begin(self.traced.inputs, Step(self.request.seed, number))
        self.executor.run()

    def step(self, number: int, *, timed: bool) -> None:
        """One training step on the example batch; all ranks start together."""
        import torch
        import torch.distributed as dist

        self.work.optimizer = self.optimizer
        dist.barrier()
        self.counted.clear()
        start = time.perf_counter()
        self._run(number)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        lasted = time.perf_counter() - start
        report, floats = self.report, self.counted.float_elements
        report.sent_bytes, report.messages = dict(self.counted.sent_bytes), self.counted.messages
        report.planned_bytes = {why: planned + floats.get(why, 0) * self.more_bytes for why, planned in self.planned_bytes.items()}
        if timed:
            report.step_s.append(lasted)
        report.losses.append(self._whole_loss())

    def _whole(self, name: str, piece: Any) -> Any:
        """The tensor whose pieces the ranks hold, on every rank, gathered outside of the program."""
        import torch.distributed as dist

        from .pieces import whole_of

        pieces: list[Any] = [None] * len(self.plan.devices)
        dist.all_gather_object(pieces, piece.detach().cpu())
        state = self.plan.sources[name] if ":" in name else self.plan.ops[name].output
        return whole_of(pieces, self.work.shapes[name], state, self.work.places)

    def _whole_loss(self) -> float:
        return float(self._whole(self.work.loss, self.work.values[self.work.loss]))

    def verify(self) -> None:
        """Loss and gradients of one step beside the module's own, run whole on every rank."""
        serial, gradients = serial_step(self.traced, self.dtype)
        self._run(0)
        self.report.loss_apart = abs(self._whole_loss() - serial) / max(abs(serial), 1e-300)
        worst = 0.0
        largest = max((float(g.abs().max()) for g in gradients.values()), default=0.0)
        for name, piece in self.work.parameters.items():
            want = gradients[name]
            # a bias before batch norm has no gradient but rounding: such are measured against the largest gradient of all
            apart = float((self._whole(f"param:{name}", piece.grad) - want).abs().max()) / max(float(want.abs().max()), 1e-6 * largest, 1e-300)
            if apart >= worst:
                worst, self.report.gradients_where = apart, name
        self.report.gradients_apart = worst
        for name, piece in self.work.pieces.items():  # batch norm's buffers have moved
            if name.startswith("buffer:"):
                piece.copy_(self.work.piece(name, self.traced.value(name)))


def serial_step(traced: Any, dtype: Any = None) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the module itself on its example inputs; the traced module is left as it was."""
    import copy

    whole = copy.deepcopy(traced.objective)
    if dtype is not None:
        whole = whole.to(dtype)
    inputs = [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in traced.inputs]
    loss = whole(*inputs)
    loss.backward()
    found = {}
    for name, p in whole.named_parameters():
        if p.requires_grad:
            found[name.removeprefix("model.")] = p.grad if p.grad is not None else p.detach() * 0
    return float(loss.detach()), found


def main() -> None:
    from ...errors import MeshwrightError
    from ..executor.executor import StepFailed

    folder = Path(sys.argv[1])
    try:
        report = run_rank(folder)
        (folder / f"rank-{report.rank:03d}.json").write_bytes(msgspec.json.encode(report))
    except (MeshwrightError, StepFailed) as failed:
        error = failed.__cause__ if isinstance(failed, StepFailed) else failed
        if not isinstance(error, MeshwrightError):
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
