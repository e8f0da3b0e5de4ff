"""A rank of a run that torchrun started: on one machine or several, `meshwright train run` itself is the worker.

torchrun's agent hosts the store and sends SIGTERM to the survivors about 0.1 s after a rank has died. So a rank that fails puts
its view into the store at once (a thread does it when SIGTERM finds the main thread blocked), waits a moment for the others'
views, and the first to ask writes the one error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import MeshwrightError, RankFailed, UsageError
from ...io.atomic import write_bytes
from ...io.plan.plan import write_plan
from ...io.plan.run_names import PLAN
from ...plan.plan import Plan
from ...program.calls import inline
from ...program.tables import I32
from ..checkpoint.checkpoint import find_checkpoint, require_same_job
from ..checkpoint.restore import agree_on_shards, device_folder
from ..machine.cpu_use import MachineUseRecorder
from ..machine.pacing import CpuQuota, Pacing, choose_pacing, declared_pacing
from ..machine.process import STATE, STEP, TRAINING, WAITING_FOR, FailureReport, blob_get, blob_put
from ..machine.torchrun_worker import tell_torchrun
from ..ranks.blame import first_cause, typed
from ..ranks.worker import RankLink, TerminationWatch, report_of
from ..recording.recording import numbers
from .outcome import absolute, commit, make_document, write_loads, write_modules
from .rank import RankOptions, run_rank
from .request import RunRequest, RunResult
from .setup import fetch_setup, make_setup

__all__ = ["rank_on_device", "run_as_torchrun_rank"]

MAX_VIEWS_WAIT_S = 0.4  # that a failed rank waits for what the others saw, before it names the cause


def run_as_torchrun_rank(plan: Plan, request: RunRequest, on_step: Callable[[int], None] | None = None) -> RunResult:
    """Be the rank that the environment says. Raises as `train_run`; of several failing ranks one raises, the others end quietly (exit 1).

    Whatever ends a rank stands in its torchelastic error file too, for torchrun's own summary.
    """
    try:
        return _be_rank(plan, request, on_step)
    except MeshwrightError as error:
        tell_torchrun(error)
        raise


def _be_rank(plan: Plan, request: RunRequest, on_step: Callable[[int], None] | None) -> RunResult:
    world = int(os.environ["WORLD_SIZE"])
    assert plan.layout is not None
    if world != plan.layout.ranks:
        raise UsageError(
            f"torchrun started {world} ranks, the plan needs {plan.layout.ranks}", where="torchrun",
            hint=f"use --nnodes and --nproc-per-node whose product is {plan.layout.ranks}",
        )  # fmt: skip
    rank = rank_on_device(plan.placement[:world], os.environ)
    if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=request.timeout_s)
    found, _, _ = next(rendezvous("env://", timeout=limit))  # hosted by whom the launcher calls rank 0, whatever the plan does
    dist.init_process_group("gloo" if request.device == "cpu" else "cpu:gloo,cuda:nccl", store=found, rank=rank, world_size=world, timeout=limit)
    store = dist.PrefixStore("meshwright", dist.distributed_c10d._get_default_store())
    run = _ElasticRank(plan, request, rank, world, store, on_step if rank == 0 else None)
    try:
        return run.train()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        raise run.blame(report_of(error, rank, run.progress)) from error


def rank_on_device(placement: Sequence[str], environment: Mapping[str, str]) -> int:
    """The rank that the plan puts on this process's device, where a launcher says which (MESHWRIGHT_DEVICE) and it has one process; else RANK.

    Raises: UsageError for a device that the plan does not use: its ranks would run in places that it was not made for.
    """
    given, device = int(environment["RANK"]), environment.get("MESHWRIGHT_DEVICE", "")
    if not device or int(environment.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return given
    if device not in placement:
        shown = ", ".join(placement[:8]) + (", ..." if len(placement) > 8 else "")
        raise UsageError(
            f"the plan has no rank on this device, {device!r}: it was made for {shown}", where="MESHWRIGHT_DEVICE",
            hint="plan for this fabric (in a lab: --fabric $MESHWRIGHT_FABRIC); MESHWRIGHT_DEVICE= (empty) leaves ranks as the launcher numbers them",
            data={"device": device, "placement": list(placement[:32])},
        )  # fmt: skip
    return placement.index(device)


@dataclass
class _ElasticRank:
    plan: Plan
    request: RunRequest
    rank: int
    world: int
    store: Any
    on_step: Callable[[int], None] | None = None
    progress: Any = field(default_factory=lambda: array("q", bytes(64)))
    orders: Sequence[I32] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: RankLink = field(default_factory=RankLink)
    made_folder: bool = False

    def train(self) -> RunResult:
        plan, request = self.plan, self.request
        TerminationWatch(self.terminated)
        layout = plan.layout
        assert layout is not None
        resume_from, first, before = "", 0, list[float]()
        device = plan.placement[self.rank]
        if request.resume and request.local_shards:
            own = device_folder(request.local_shards, device)
            index = agree_on_shards(self.store, self.rank, self.world, device, own).index
            require_same_job(index, plan, request.data, request.local_shards)
            first, before = index.step, numbers(index.losses)
        elif request.resume:
            found, index = find_checkpoint(request.out / "checkpoint", plan, request.data)
            resume_from, first, before = str(found), index.step, numbers(index.losses)
        if self.rank == 0:
            self.made_folder = not request.out.exists()
            request.out.mkdir(parents=True, exist_ok=True)
            make_setup(self.store, plan, evaluation=bool(request.evaluate_every))
        setups = fetch_setup(self.store, 1 + len(plan.shapes))
        self.graph, self.orders = setups[0].graph, setups[0].orders if not plan.shapes else ()  # of several, nobody says which one a step has
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        pacing = declared_pacing(os.environ) or choose_pacing(here, mode=request.pacing)  # type: ignore[arg-type]
        options = RankOptions(
            data=request.data, steps=request.steps, out=str(request.out), device=request.device, checkpoint_every=request.checkpoint_every,
            resume_from=resume_from, timeout_s=request.timeout_s, pacing=pacing.mode, share=pacing.share, calibrate=request.calibrate,
            local_shards=absolute(request.local_shards), resume_local=request.resume and bool(request.local_shards), also_shared=request.also_shared,
            drop_residual=request.drop_residual,
            tensorboard=request.tensorboard, module_spans=request.module_spans, traces=str(request.out.resolve()) if request.profile else "",
            evaluate_every=request.evaluate_every, evaluation_data=request.evaluation_data, evaluation_batches=request.evaluation_batches,
        )  # fmt: skip
        quota = CpuQuota(pacing.share) if pacing.mode == "quota" else None
        use = MachineUseRecorder(os.getppid())

        def go() -> None:
            if quota is not None:
                quota.attach(os.getpid())
            dist.barrier()
            use.start()

        try:
            self.link = RankLink(store=self.store, progress=self.progress, go=go, on_step=self.on_step)
            recording = run_rank(plan, setups, self.rank, options, self.link)
        finally:
            if quota is not None:
                quota.close()
        return self.finish(msgspec.json.encode(recording), pacing, use.stop().to_json(), first, before)

    def finish(self, recording: bytes, pacing: Pacing, use: dict[str, Any], first: int, before: list[float]) -> RunResult:
        """Rank 0 gathers the recordings and commits the run folder."""
        blob_put(self.store, f"recording/{self.rank}", recording)
        document = None
        if self.rank == 0:
            recordings = [blob_get(self.store, f"recording/{r}") for r in range(self.world)]
            costs = [blob_get(self.store, f"costs/{r}") for r in range(self.world)] if self.request.calibrate else []
            made = make_document(self.plan, self.request, pacing, recordings, costs, use, first=first, before=before, launcher="torchrun")
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.request.out))
            try:
                for r, data in enumerate(recordings):
                    write_bytes(partial / f"rank-{r:03d}.json", data)
                write_plan(partial / PLAN, self.plan)
                write_modules(partial, self.plan, self.graph)
                if self.plan.layout is not None:
                    write_loads(partial, self.plan.layout, recordings)
                write_bytes(partial / "run.json", msgspec.json.format(msgspec.json.encode(made), indent=1))
                document = commit(partial, self.request.out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        dist.destroy_process_group()
        return RunResult(folder=self.request.out, document=document)

    # ---- failure -----------------------------------------------------------------------------------------------
    def terminated(self) -> None:
        """SIGTERM: somebody failed. The main thread may be blocked, or about to report by itself."""
        time.sleep(0.15)
        report = FailureReport(
            rank=self.rank, kind="transport", training_step=self.training_step(), program_step=-1, peer=int(self.progress[WAITING_FOR]) - 1,
            error="SIGTERM", message="was told to end", time_s=time.time(),
        )  # fmt: skip
        error = self.blame(report)
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.stderr.flush()
        os._exit(1)

    def training_step(self) -> int:
        return int(self.progress[STEP]) if self.progress[STATE] >= TRAINING else -1

    def blame(self, mine: FailureReport) -> MeshwrightError:
        """The one error, if this rank is the one that says it; else end this process."""
        with self.lock:  # main thread and SIGTERM thread: one of them speaks, the other never gets here
            try:
                error, speaks = self._blame(mine)
                self.leave()
            except Exception:  # the store is gone: say what this rank knows
                error, speaks = RankFailed(f"rank {self.rank} lost the others: {mine.message}", where=f"rank {self.rank}", data=_known(mine)), True
            tell_torchrun(error)
            if not speaks:
                os._exit(1)
            return error

    def leave(self) -> None:
        """Metrics of the steps that ended; nothing where none did."""
        with contextlib.suppress(OSError, RuntimeError):  # the store may be gone
            self.link.leave()
        if self.made_folder:
            with contextlib.suppress(OSError):  # there is something in it
                self.request.out.rmdir()

    def _blame(self, mine: FailureReport) -> tuple[MeshwrightError, bool]:
        """The first cause as far as this rank can see, and whether it is the one that says so."""
        self.store.set(f"view/{self.rank}", msgspec.json.encode(mine))
        self.store.set(f"place/{self.rank}", ",".join(str(self.progress[i]) for i in range(4)))
        deadline = time.monotonic() + MAX_VIEWS_WAIT_S
        views: dict[int, FailureReport] = {}
        while len(views) < self.world and time.monotonic() < deadline:
            for r in range(self.world):
                if r not in views and self.store.check([f"view/{r}"]):
                    views[r] = msgspec.json.decode(self.store.get(f"view/{r}"), type=FailureReport)
            time.sleep(0.02)
        speaks = self.store.add("spoken", 1) == 1
        early = [e for v in sorted(views.values(), key=lambda v: v.time_s) if (e := typed(v)) is not None]
        if early:
            return early[0], speaks
        places = []
        for r in range(self.world):
            known = self.store.get(f"place/{r}").decode() if self.store.check([f"place/{r}"]) else f"{max(mine.training_step, 0)},0,0,3"
            a, b, c, d = (int(x) for x in known.split(","))
            places.append((a, b, c, d))
        # A rank that can no longer say anything was killed, unless another one knows why it failed: then the silent still wait for that one.
        known = any(v.kind == "exception" for v in views.values())
        silent = {} if known else {r: -9 for r in range(self.world) if r not in views}
        return first_cause(silent, views, places, self.describe, {}), speaks

    def describe(self, rank: int, position: int) -> str:
        if position < 0:
            return f"rank {rank} in an evaluation"
        if rank >= len(self.orders) or not len(self.orders[rank]):
            return f"rank {rank}"
        program = inline(self.plan.main, self.plan.programs).program
        return program.describe(int(self.orders[rank][min(position, len(self.orders[rank]) - 1)]))


def _known(mine: FailureReport) -> dict[str, Any]:
    return {"rank": mine.rank, "step": mine.training_step, "peer": mine.peer}
