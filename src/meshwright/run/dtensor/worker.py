"""One rank of a layout run: under `layout run`, or `python -m meshwright.run.dtensor.worker FOLDER`, started once per rank with torchrun's variables.

Reads plans and `request.json` from the folder, trains, leaves `rank-<r>.json` there. Works in the lab, under torchrun and on several machines
alike; gloo on processors, NCCL on CUDA devices.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ...decide.layout.autoddl.problem import ShardingPlan
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
    from . import step  # noqa: F401


def layout_rank(seat: Seat) -> RankReport:
    """A rank that our launcher started."""
    return run_rank(seat.folder, seat.link(seat.options["timeout_s"]))


def run_rank(folder: Path, link: RankLink | None = None) -> RankReport:
    """Train as the folder's request says. Raises: PlanMismatch (another model or another number of ranks), Unsupported, RunError."""
    import torch
    import torch.distributed as dist

    from ...errors import PlanMismatch

    link = link or RankLink()
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=WorkRequest)
    plans = [msgspec.json.decode((folder / name).read_bytes(), type=ShardingPlan) for name in request.plans]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for plan in plans:
        if len(plan.devices) != world:
            raise PlanMismatch(f"the plan is for {len(plan.devices)} ranks, there are {world}", hint="start as many ranks as the plan has devices")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = request.device
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(seconds=request.timeout_s))
    try:
        trainers = [_Trainer(plan, request, rank, device, name) for plan, name in zip(plans, request.plans, strict=True)]
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
    """A plan's step on this rank, its optimiser, its report."""

    def __init__(self, plan: ShardingPlan, request: WorkRequest, rank: int, device: str, name: str) -> None:
        import torch

        from ...capture.forward import trace_forward
        from ...capture.graph import executed_graph
        from ...errors import PlanMismatch
        from .step import ShardedStep

        self.plan, self.request, self.rank = plan, request, rank
        self.place = mesh_place(plan.mesh, rank, device)
        self.traced = trace_forward(plan.model, loss=plan.loss, batch_size=plan.batch, seed=request.seed, device="cpu")
        found = executed_graph(self.traced).fingerprint()
        if found != plan.fingerprint:
            raise PlanMismatch(f"the model {plan.model!r} is not the planned one: {found}, planned {plan.fingerprint}", hint="make the plan again")
        self.dtype = getattr(torch, request.dtype) if request.dtype else None
        self.sharded = ShardedStep(plan, self.traced, self.place, dtype=self.dtype, device=device)
        parameters = list(self.sharded.parameters.values())
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[plan.optimizer]
        self.optimizer = kind(parameters, lr=request.learning_rate) if parameters else None
        self.planned_bytes = {k: v for k, v in msgspec.structs.asdict(plan.bytes_sent[rank]).items() if v}
        own = next((p.element_size() for p in self.traced.parameters.values() if p.is_floating_point()), 4)
        self.more_bytes = (self.dtype.itemsize if self.dtype else own) - (plan.item_bytes or own)  # per float than planned
        self.report = PlanReport(
            plan=name, step_s=[], losses=[], sent_bytes={}, planned_bytes={}, messages=0, kept_bytes=self.sharded.kept_bytes()
        )

    def step(self, number: int, *, timed: bool) -> None:
        """One training step on the example batch; all ranks start together."""
        import torch
        import torch.distributed as dist

        from .local import Step

        counters = self.place.wires.counters
        dist.barrier()
        counters.clear()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = self.sharded.forward(self.sharded.load(self.traced.inputs), Step(self.request.seed, number))
        self.sharded.backward(loss)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.sharded.device.startswith("cuda"):
            torch.cuda.synchronize()
        lasted = time.perf_counter() - start
        self.report.sent_bytes, self.report.messages = dict(counters.sent_bytes), counters.messages
        floats = counters.float_elements
        self.report.planned_bytes = {why: planned + floats.get(why, 0) * self.more_bytes for why, planned in self.planned_bytes.items()}
        if timed:
            self.report.step_s.append(lasted)
        self.report.losses.append(self.sharded.whole_loss(loss))

    def verify(self) -> None:
        """Loss and gradients of one step beside the module's own, run whole on every rank."""
        from .local import Step

        serial, gradients = serial_step(self.traced, self.dtype)
        loss = self.sharded.forward(self.sharded.load(self.traced.inputs), Step(self.request.seed, 0))
        self.sharded.backward(loss)
        self.report.loss_apart = abs(self.sharded.whole_loss(loss) - serial) / max(abs(serial), 1e-300)
        worst = 0.0
        largest = max((float(g.abs().max()) for g in gradients.values()), default=0.0)
        for name, found in self.sharded.whole_parameters(gradients=True).items():
            want = gradients[name].to(found.device)
            # a bias before batch norm has no gradient but rounding: such are measured against the largest gradient of all
            apart = float((found - want).abs().max()) / max(float(want.abs().max()), 1e-6 * largest, 1e-300)
            if apart >= worst:
                worst, self.report.gradients_where = apart, name
        self.report.gradients_apart = worst
        for name, piece in self.sharded.pieces.items():  # batch norm's buffers have moved
            if name.startswith("buffer:"):
                piece.copy_(_fresh(self.traced, name, self))


def _fresh(traced: Any, name: str, trainer: _Trainer) -> Any:
    from .redistribute import cut

    value = traced.value(name)
    if trainer.dtype is not None and value.is_floating_point():
        value = value.to(trainer.dtype)
    return cut(value, trainer.plan.sources[name], trainer.place)


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


def mesh_place(sizes: Sequence[int], rank: int, device: str) -> Any:
    """This rank's place on a `DeviceMesh` of the process group, with one process group per axis."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ...decide.layout.autoddl.sbp import coordinates
    from .exchange import AxisGroup, Wires
    from .redistribute import Place

    mesh = init_device_mesh(device.partition(":")[0], tuple(sizes))
    axes = []
    for axis in range(len(sizes)):
        group = mesh.get_group(axis)
        members = tuple(dist.get_process_group_ranks(group))
        axes.append(AxisGroup(members, members.index(rank), group))
    return Place(tuple(sizes), list(coordinates(sizes))[rank], Wires(axes))


def main() -> None:
    from ...errors import MeshwrightError

    folder = Path(sys.argv[1])
    try:
        report = run_rank(folder)
        (folder / f"rank-{report.rank:03d}.json").write_bytes(msgspec.json.encode(report))
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
