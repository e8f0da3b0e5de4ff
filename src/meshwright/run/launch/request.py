"""What a training run is asked for and what it leaves: request, document, result; requests that no run can fulfil are refused here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...errors import MissingExtra, TooFewDevices, UsageError
from ...job import Recipe
from ...lower.compressed import require_codecs_run
from ...plan.plan import Plan, TrainingLayout
from ..train.casts import require_casts

__all__ = ["RUN_SCHEMA", "RUN_VERSION", "RunDocument", "RunRequest", "RunResult", "check_request", "require_training_plan", "under_torchrun"]

RUN_SCHEMA, RUN_VERSION = "meshwright.run", 1


class RunDocument(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`run.json`. Losses are of all steps since the first run; `step_s` of this run's steps, each from the end of the one before (on
    the last rank to finish it): ranks that are done early wait for the others inside the next step, and that is not its time."""

    schema: str = RUN_SCHEMA
    version: int = RUN_VERSION
    plan: str  # identity of the plan
    ranks: int
    data: str
    device: str
    first_step: int
    steps: int
    losses: list[float | None]  # None: not finite
    step_s: list[float]
    profiled_steps: list[int]
    memory_peak_bytes: list[int]
    rss_peak_bytes: list[int]
    cpu_s: list[float]  # per rank, mean over steps, of the walking thread
    process_cpu_s: list[float]
    recordings: list[str]
    pacing: dict[str, Any]
    machine_use: dict[str, Any]
    machine: dict[str, Any]
    run_fabric: dict[str, Any]
    cost: dict[str, Any]
    calibration: dict[str, Any] | None
    launcher: str  # "local" | "torchrun"
    versions: dict[str, str]
    notes: list[str] = []
    modules: str = ""  # file beside this one: the module tree and the calls of the model, with their modules
    traces: list[str] = []  # torch.profiler's traces, a file per rank
    gate: dict[str, Any] = {}  # what of a step was compared with the owner's module (`run.gate`), or why it was not; empty where nobody asked
    evaluation: dict[str, Any] = {}  # data, batches, samples and, by steps done, the losses of this run's evaluations; empty without any
    restart: dict[str, Any] = {}  # bytes by rank, of a run that resumed from a checkpoint of another layout or from local shards


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run. `port` 0 lets the system choose; `timeout_s`: silence of all ranks after which the run is given up; `pacing`: see `pacing`.

    `local_shards`: checkpoints lie in this folder of each rank's own device ({device} stands for its name), not in `out`; `also_shared`: in both.
    """

    out: Path
    data: str = "python-source"
    steps: int = 20
    resume: bool = False
    port: int = 0
    device: str = "cpu"
    pacing: str = "auto"
    timeout_s: float = 60.0
    checkpoint_every: int = 0
    max_ranks: int | None = None
    calibrate: bool = True
    local_shards: str = ""
    also_shared: bool = False
    evaluate_every: int = 0  # steps; 0: never
    evaluation_data: str = ""
    evaluation_batches: int = 0  # global batches; 0: all of data with a length
    drop_residual: bool = False  # what the codecs of the checkpoint had not sent
    module_spans: bool = True
    tensorboard: bool = False  # metrics to TensorBoard's files too
    profile: bool = False  # also a torch.profiler trace of three steps, per rank
    gate: Mapping[str, Any] = field(default_factory=dict)  # for the run's document: what was compared before


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """`document` is run.json's content; None on ranks of torchrun other than 0."""

    folder: Path
    document: RunDocument | None


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return all(k in environment for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))


def require_training_plan(plan: Plan) -> TrainingLayout:
    """The layout of a training plan that this installation can execute."""
    if plan.kind != "training" or plan.layout is None:
        raise UsageError(f"this is a {plan.kind} plan, not a training plan", hint="make one with `meshwright train plan`")
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", extra="torch", needed_for="training") from None
    del torch
    return plan.layout


def check_request(plan: Plan, request: RunRequest) -> TrainingLayout:
    """The plan's layout, if this request can be carried out at all."""
    ranks = require_training_plan(plan).ranks
    assert plan.layout is not None
    if request.steps < 1:
        raise UsageError(f"steps must be at least 1, got {request.steps}", where="--steps")
    if min(request.evaluate_every, request.evaluation_batches) < 0:
        raise UsageError("steps and batches are at least 1", where="--evaluate-every" if request.evaluate_every < 0 else "--evaluation-batches")
    if bool(request.evaluate_every) != bool(request.evaluation_data) or (request.evaluation_batches and not request.evaluate_every):
        lacking = "--evaluation-data" if request.evaluate_every else "--evaluate-every"
        raise UsageError(f"an evaluation needs {lacking} too", where=lacking, hint="give both")
    if request.timeout_s <= 0:
        raise UsageError(f"the timeout must be positive, got {request.timeout_s:g}", where="--timeout")
    if request.also_shared and not request.local_shards:
        raise UsageError("is about local shards", where="--also-shared", hint="name their folder with --local-shards")
    require_codecs_run(plan.layout, local_shards=request.local_shards, device=request.device)
    if request.local_shards and "{device}" not in request.local_shards and ranks > 1 and not under_torchrun():
        raise UsageError("every device needs a folder of its own here", where="--local-shards", hint="write {device} where its name belongs")
    if request.out.exists() and not request.out.is_dir():
        raise UsageError("is a file, not a folder", where=str(request.out), hint="name another folder with --out")
    if request.max_ranks is not None and ranks > request.max_ranks:
        raise TooFewDevices(
            f"the plan needs {ranks} ranks, {request.max_ranks} are allowed", where="--max-ranks", hint="plan for a smaller fabric (--devices)",
            data={"needed": ranks, "available": request.max_ranks},
        )  # fmt: skip
    asked = msgspec.convert(dict(plan.job.get("training", {})).get("recipe", {}), Recipe)
    require_casts(plan.layout, asked, request.device, "--device")
    if request.device == "cuda":
        import torch

        available = torch.cuda.device_count()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if under_torchrun() else ranks
        if available < local:
            raise TooFewDevices(
                f"the plan needs {local} CUDA devices here, there are {available}", where="--device",
                hint="use --device cpu, or plan for fewer devices",
                data={"needed": local, "available": available},
            )  # fmt: skip
    elif request.device != "cpu":
        raise UsageError(f"unknown device {request.device!r}", where="--device", hint="cpu or cuda")
    return plan.layout
