"""`train_run`: execute a training plan for real on this machine, or as one rank under torchrun, and leave a run folder behind.

The folder holds `run.json` (written last), `plan.json`, `rank-<r>.json` recordings, `checkpoint/` and `metrics.jsonl`. A run that fails leaves the
last two only; before its first checkpoint nothing (under torchrun: the metrics of the steps that ended, and nothing where none did).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...errors import Interrupted, UsageError
from ...io.atomic import write_bytes
from ...io.plan.run_names import PLAN
from ...plan.plan import Plan, TrainingLayout
from ...plan.shapes import plans_of_shapes
from ...program.calls import inline
from ..executor.rounds import compile_rounds, require_ends
from ..machine.pacing import Pacing, choose_pacing
from ..recording.recording import numbers
from .outcome import absolute, commit, make_document, write_loads, write_modules
from .request import RunRequest, RunResult, check_request, under_torchrun

__all__ = ["train_run"]


def train_run(plan: Plan, request: RunRequest, *, on_step: Callable[[int], None] | None = None) -> RunResult:
    """Train for `request.steps` steps in all. Blocks until done. `on_step`: told the number of the step that begins; under torchrun by rank 0.

    Raises: UsageError (not a training plan, no steps left, foreign folder), TooFewDevices, PortInUse, MissingExtra (torch), Unsupported (the plan
    cannot be executed), and RankDied, RankFailed, RunTimeout, Interrupted from the run itself. Nothing half-written stays behind.
    """
    layout = check_request(plan, request)
    if under_torchrun():
        from .elastic import run_as_torchrun_rank

        result: RunResult = run_as_torchrun_rank(plan, request, on_step)
        return result
    from ..checkpoint.checkpoint import find_checkpoint

    resume_from, first, before = "", 0, list[float]()
    if request.resume and request.local_shards:
        first, before = resumed_locally(plan, layout, request)
    elif request.resume:
        found, index = find_checkpoint(request.out / "checkpoint", plan, request.data)
        resume_from, first, before = str(found), index.step, numbers(index.losses)
    if first >= request.steps:
        raise UsageError(
            f"the checkpoint is at step {first}; there is nothing left of {request.steps} steps", where="--steps", hint="ask for more steps"
        )
    pacing = choose_pacing(layout.ranks, mode=request.pacing)  # type: ignore[arg-type]
    made_folder = not request.out.exists()
    request.out.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=request.out))
    try:
        _run_locally(plan, layout, request, pacing, partial, resume_from, first, before, on_step)
        return RunResult(folder=request.out, document=commit(partial, request.out))
    except BaseException:
        if made_folder and not (request.out / "checkpoint").exists():  # metrics of steps that nobody can go on from
            shutil.rmtree(request.out, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made_folder and request.out.exists() and not any(request.out.iterdir()):
            request.out.rmdir()


def resumed_locally(plan: Plan, layout: TrainingLayout, request: RunRequest) -> tuple[int, list[float]]:
    """(steps done, losses so far) of the newest checkpoint in the devices' folders, which this process sees.

    Raises: as `agree_on_shards`; UsageError for a checkpoint of another job.
    """
    from ..checkpoint.checkpoint import require_same_job
    from ..checkpoint.restore import device_folder, local_shards

    devices = plan.placement[: layout.ranks]
    index = local_shards([(d, device_folder(request.local_shards, d)) for d in devices]).index
    require_same_job(index, plan, request.data, request.local_shards)
    return index.step, numbers(index.losses)


def _run_locally(
    plan: Plan, layout: TrainingLayout, request: RunRequest, pacing: Pacing, partial: Path, resume_from: str, first: int, before: list[float],
    on_step: Callable[[int], None] | None,
) -> None:  # fmt: skip
    from ...io.plan.plan import write_plan
    from ..machine.process import blob_get
    from ..ranks.launcher import LocalRanks, listen
    from .rank import RankOptions, training_rank
    from .setup import make_setup

    if request.port:
        listen(request.port).close()  # say at once that it is taken
    setups = list[Any]()
    programs = [inline(p.main, p.programs).program for p in plans_of_shapes(plan)]

    def prepare(store: Any) -> None:
        setups.extend(make_setup(store, plan, evaluation=bool(request.evaluate_every)))
        for program, setup in zip(programs, setups, strict=True) if request.device != "cpu" else ():
            require_ends(program, compile_rounds(program, setup.orders))

    def describe(rank: int, position: int) -> str:
        """The step at that position of the rank's walk, in words."""
        if position < 0:
            return f"rank {rank} in an evaluation"
        orders = setups[0].orders if len(setups) == 1 else ()  # of several shapes nobody says which one the step has
        if rank >= len(orders) or not len(orders[rank]):
            return f"rank {rank}"
        return programs[0].describe(int(orders[rank][min(position, len(orders[rank]) - 1)]))

    write_plan(partial / PLAN, plan)
    options = RankOptions(
        data=request.data, steps=request.steps, out=str(request.out.resolve()), device=request.device, checkpoint_every=request.checkpoint_every,
        resume_from=str(Path(resume_from).resolve()) if resume_from else "", timeout_s=request.timeout_s, pacing=pacing.mode, share=pacing.share,
        calibrate=request.calibrate, local_shards=absolute(request.local_shards), resume_local=request.resume and bool(request.local_shards),
        drop_residual=request.drop_residual, tensorboard=request.tensorboard, also_shared=request.also_shared, module_spans=request.module_spans,
        traces=str(partial.resolve()) if request.profile else "", evaluate_every=request.evaluate_every, evaluation_data=request.evaluation_data,
        evaluation_batches=request.evaluation_batches,
    )  # fmt: skip
    ranks = LocalRanks(
        layout.ranks, partial.resolve(), training_rank, options, pacing=pacing, port=request.port,
        timeout_s=request.timeout_s, describe=describe, on_step=on_step,
    )  # fmt: skip
    try:
        ranks.run(prepare)
    except Interrupted as error:
        raise Interrupted(error.message, hint="checkpoints of finished intervals are kept: see --resume") from None
    recordings = [(partial / f"rank-{r:03d}.json").read_bytes() for r in range(layout.ranks)]
    costs = [blob_get(ranks.store, f"costs/{r}") for r in range(layout.ranks)] if request.calibrate else []
    write_modules(partial, plan, setups[0].graph)
    write_loads(partial, layout, recordings)
    document = make_document(plan, request, pacing, recordings, costs, ranks.machine_use, first=first, before=before, launcher="local")
    write_bytes(partial / "run.json", msgspec.json.format(msgspec.json.encode(document), indent=1))
