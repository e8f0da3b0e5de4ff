"""`train_run`: execute a training plan for real on this machine, or as one rank under torchrun, and leave a run folder behind.

The folder holds `run.json` (written last), `plan.json`, `rank-<r>.json` recordings and `checkpoint/`. A run that fails leaves only the last.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .. import __version__
from ..cost import Cost
from ..errors import FormatError, MissingExtra, TooFewDevices, Unsupported, UsageError
from ..graph_vocabulary import base_node
from ..io.atomic import write_bytes
from ..io.fabric_document import fabric_document
from ..io.module_tree_file import write_module_tree
from ..io.run_names import MODULES, PLAN, trace_name
from ..job import Training
from ..lowering_compressed import require_codecs_run
from ..module_tree import CapturedOperator, ModuleTree
from ..plan import Plan, TrainingLayout
from ..program import I32
from ..program_calls import inline
from .pacing import Pacing, choose_pacing, machine_facts
from .recording import RankRecording, plan_identity

__all__ = ["RUN_SCHEMA", "RunDocument", "RunRequest", "RunResult", "train_run", "under_torchrun"]

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
    losses: list[float]
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
    drop_residual: bool = False  # what the codecs of the checkpoint had not sent
    module_spans: bool = True
    profile: bool = False  # also a torch.profiler trace of three steps, per rank


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """`document` is run.json's content; None on ranks of torchrun other than 0."""

    folder: Path
    document: RunDocument | None


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return all(k in environment for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))


def train_run(plan: Plan, request: RunRequest, *, on_step: Callable[[int], None] | None = None) -> RunResult:
    """Train for `request.steps` steps in all. Blocks until done.

    Raises: UsageError (not a training plan, no steps left, foreign folder), TooFewDevices, PortInUse, MissingExtra (torch), Unsupported (the plan
    cannot be executed), and RankDied, RankFailed, RunTimeout, Interrupted from the run itself. Nothing half-written stays behind.
    """
    layout = check_request(plan, request)
    if under_torchrun():
        from .elastic import run_as_torchrun_rank

        result: RunResult = run_as_torchrun_rank(plan, request)
        return result
    from .checkpoint import find_checkpoint

    resume_from, first, before = "", 0, list[float]()
    if request.resume and request.local_shards:
        first, before = resumed_locally(plan, layout, request)
    elif request.resume:
        found, index = find_checkpoint(request.out / "checkpoint", plan, request.data)
        resume_from, first, before = str(found), index.step, index.losses
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
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made_folder and not any(request.out.iterdir()):
            request.out.rmdir()


def resumed_locally(plan: Plan, layout: TrainingLayout, request: RunRequest) -> tuple[int, list[float]]:
    """(steps done, losses so far) of the newest checkpoint in the devices' folders, which this process sees.

    Raises: as `agree_on_shards`; UsageError for a checkpoint of another job.
    """
    from .checkpoint import require_same_job
    from .restore import device_folder, local_shards

    devices = plan.placement[: layout.ranks]
    index = local_shards([(d, device_folder(request.local_shards, d)) for d in devices]).index
    require_same_job(index, plan, request.data, request.local_shards)
    return index.step, index.losses


def check_request(plan: Plan, request: RunRequest) -> TrainingLayout:
    """The plan's layout, if this request can be carried out at all."""
    if plan.kind != "training" or plan.layout is None:
        raise UsageError(f"this is a {plan.kind} plan, not a training plan", hint="make one with `meshwright train plan`")
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", extra="torch", needed_for="training") from None
    ranks = plan.layout.ranks
    if request.steps < 1:
        raise UsageError(f"steps must be at least 1, got {request.steps}", where="--steps")
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
    if request.device == "cuda":
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


def forward_graph(plan: Plan, layout: TrainingLayout) -> Any:
    """The traced model, checked against the plan's layout."""
    from ..capture.forward import trace_forward
    from .forward_graph import from_traced

    job = msgspec.convert(plan.job["training"], Training)
    traced = trace_forward(job.model, loss=job.loss, batch_size=layout.microbatch_size, seed=job.seed)
    if traced.method == "opaque" and {n for s in layout.segments for n in s.nodes} != set(traced.nodes):
        raise Unsupported(f"the model cannot be traced here: {'; '.join(traced.notes)}", where=job.model)
    _refuse_changed_model(plan, job.model, traced)
    try:
        graph = from_traced(traced)
    except Unsupported:
        graph = from_traced(trace_forward(job.model, loss=job.loss, batch_size=layout.microbatch_size, seed=job.seed, device="cpu"))
    planned = {base_node(n) for s in layout.segments for n in s.nodes}
    found = {n.name for n in graph.nodes}
    if planned != found:
        odd = sorted(planned ^ found)
        raise UsageError(
            f"the model {job.model!r} is not the one that was planned: {len(odd)} operators differ, e.g. {odd[0]!r}", where=job.model,
            hint="make the plan again",
        )  # fmt: skip
    return graph


def _refuse_changed_model(plan: Plan, model: str, traced: Any) -> None:
    """The plan holds the fingerprint of the graph it was made for, whatever its batch size. Plans without one pass."""
    from ..capture.graph import executed_graph

    planned = plan.job.get("graph_fingerprint")
    if not planned:
        return
    found = executed_graph(traced)
    if found.fingerprint() == planned:
        return
    try:
        then = msgspec.convert(plan.job.get("graph_outline", []), list[str])
    except msgspec.ValidationError as error:
        raise FormatError(str(error), where="plan.job.graph_outline") from None
    message = f"the model {model!r} is not the one that was planned: its graph is {found.fingerprint()}, the plan was made for {planned!s:.32}"
    pairs = zip_longest(then, found.outline(), fillvalue="nothing")
    first = next(((a, b) for a, b in pairs if a != b), None) if then else None
    if first is not None:
        message += f"; first difference: planned `{first[0][:160]}`, found `{first[1][:160]}`"
    data = {"planned": str(planned)[:64], "found": found.fingerprint()} | ({"first_difference": list(first)} if first else {})
    raise UsageError(message, where=model, hint="make the plan again", data=data)


def walk_orders(plan: Plan, cost: Cost | None = None) -> list[I32]:
    """The order in which every rank walks its steps: by simulation on this machine's shape."""
    from ..drive import cost_of, works_of
    from ..probe.transport import laptop_shape
    from ..simulate import simulate_program
    from .lanes import fuse_lanes

    program = inline(plan.main, plan.programs).program
    fabric = laptop_shape(max(2, program.ranks))
    placement = [d.name for d in fabric.devices[: program.ranks]]
    timeline = simulate_program(program, fabric, placement, cost or cost_of(plan), works=works_of(plan))
    start, end = np.zeros(len(program.steps)), np.zeros(len(program.steps))
    known = timeline.spans.step >= 0
    start[timeline.spans.step[known]], end[timeline.spans.step[known]] = timeline.spans.start_s[known], timeline.spans.end_s[known]
    return fuse_lanes(program, start, end, late_receives=True)


def _run_locally(
    plan: Plan, layout: TrainingLayout, request: RunRequest, pacing: Pacing, partial: Path, resume_from: str, first: int, before: list[float],
    on_step: Callable[[int], None] | None,
) -> None:  # fmt: skip
    from ..io.plan_file import write_plan
    from .launcher import LocalRanks, listen
    from .rank import RankOptions

    if request.port:
        listen(request.port).close()  # say at once that it is taken
    orders, graphs = list[I32](), list[Any]()
    program = inline(plan.main, plan.programs).program

    def prepare() -> tuple[Any, list[I32]]:
        orders.extend(walk_orders(plan))
        graphs.append(forward_graph(plan, layout))
        return graphs[0], orders

    def describe(rank: int, position: int) -> str:
        """The step at that position of the rank's walk, in words."""
        if rank >= len(orders) or not len(orders[rank]):
            return f"rank {rank}"
        return program.describe(int(orders[rank][min(position, len(orders[rank]) - 1)]))

    write_plan(partial / PLAN, plan)
    options = RankOptions(
        data=request.data, steps=request.steps, out=str(request.out.resolve()), device=request.device, checkpoint_every=request.checkpoint_every,
        resume_from=str(Path(resume_from).resolve()) if resume_from else "", timeout_s=request.timeout_s, pacing=pacing.mode, share=pacing.share,
        calibrate=request.calibrate, local_shards=absolute(request.local_shards), resume_local=request.resume and bool(request.local_shards),
        drop_residual=request.drop_residual, also_shared=request.also_shared, module_spans=request.module_spans,
        traces=str(partial.resolve()) if request.profile else "",
    )  # fmt: skip
    ranks = LocalRanks(
        layout.ranks, partial.resolve(), (partial / PLAN).resolve(), msgspec.to_builtins(options), pacing=pacing, port=request.port,
        timeout_s=request.timeout_s, describe=describe, on_step=on_step,
    )  # fmt: skip
    ranks.run(prepare)
    recordings = [(partial / f"rank-{r:03d}.json").read_bytes() for r in range(layout.ranks)]
    write_modules(partial, plan, graphs[0])
    document = make_document(plan, request, pacing, recordings, ranks.costs, ranks.machine_use, first=first, before=before, launcher="local")
    write_bytes(partial / "run.json", msgspec.json.format(msgspec.json.encode(document), indent=1))


def make_document(
    plan: Plan, request: RunRequest, pacing: Pacing, recordings: Sequence[bytes], costs: Sequence[bytes], use: Mapping[str, Any], *,
    first: int, before: Sequence[float], launcher: str,
) -> RunDocument:  # fmt: skip
    """Everything about a finished run, from what its ranks left."""
    from ..drive import cost_of
    from .calibrate import RankCosts, cost_of_ranks

    layout = plan.layout
    assert layout is not None
    ranks = [msgspec.json.decode(r, type=RankRecording) for r in recordings]
    measured = [msgspec.json.decode(c, type=RankCosts) for c in costs]
    fabric, cost, calibration = cost_of_ranks(cost_of(plan), measured, pacing)
    columns = [r.losses for r in ranks if r.losses and layout.coordinates(r.rank)[2] == 0]
    ends = [max(r.steps[i].end_s for r in ranks) for i in range(len(ranks[0].steps))]
    starts = [min(r.steps[i].start_s for r in ranks) for i in range(len(ranks[0].steps))]
    facts = machine_facts()
    notes = []
    if use.get("disturbed"):
        notes.append(f"other programs used {100 * use['others']:.0f} % of the machine; times are disturbed")
    return RunDocument(
        plan=plan_identity(plan), ranks=len(ranks), data=request.data, device=request.device, first_step=first, steps=len(ends),
        losses=[*before, *(sum(c) / len(c) for c in zip(*columns, strict=True))],
        step_s=[b - a for a, b in zip([starts[0], *ends[:-1]], ends, strict=True)],
        profiled_steps=[s.step for s in ranks[0].steps if s.profiled], memory_peak_bytes=[r.memory_peak_bytes for r in ranks],
        rss_peak_bytes=[r.rss_peak_bytes for r in ranks], cpu_s=[_mean([s.cpu_s for s in r.steps]) for r in ranks],
        process_cpu_s=[_mean([s.process_cpu_s for s in r.steps]) for r in ranks], recordings=[f"rank-{r.rank:03d}.json" for r in ranks],
        pacing={"mode": pacing.mode, "share": pacing.share, "why": pacing.why}, machine_use=dict(use),
        machine={"cores": facts.cores, "cpu_model": facts.cpu_model, "memory_bytes": facts.memory_bytes},
        run_fabric=fabric_document(fabric), cost=msgspec.to_builtins(cost), calibration=calibration.to_json() if calibration else None,
        launcher=launcher, versions=versions(), notes=notes, restart=restart_of(plan, ranks), modules=MODULES,
        traces=[trace_name(r.rank) for r in ranks] if request.profile else [],
    )  # fmt: skip


def write_modules(folder: Path, plan: Plan, graph: Any) -> None:
    """`modules.json`: the model's modules, and its captured calls in order by the names that a trace gives them. Calls of the loss are left out."""
    number = {m.path: i for i, m in enumerate(graph.tree)}
    calls = ((n.target.split("."), number.get(graph.modules.get(n.name, ""))) for n in graph.nodes)
    operators = (CapturedOperator(name="::".join(t[:2]), module=module) for t, module in calls if len(t) == 3 and module is not None)
    tree = ModuleTree(model=plan.job["training"]["model"], modules=tuple(graph.tree), operators=tuple(operators))
    write_module_tree(folder / MODULES, tree)


def absolute(folder: str) -> str:
    return str(Path(folder).resolve()) if folder else ""


def restart_of(plan: Plan, ranks: Sequence[RankRecording]) -> dict[str, Any]:
    """What resuming moved, per rank, beside what the plan said; empty where nothing was read in parts."""
    if any(r.restart is None for r in ranks):
        return {}
    counted = {f: [getattr(r.restart, f) for r in ranks] for f in ("needed_bytes", "reused_bytes", "received_bytes", "sent_bytes", "stored_bytes")}
    planned = {f: list(v) for f in counted if (v := plan.decisions.get("restart", {}).get(f))}
    read = [a + b + c for a, b, c in zip(counted["reused_bytes"], counted["received_bytes"], counted["stored_bytes"], strict=True)]
    shared = not any(counted["reused_bytes"]) and not any(counted["received_bytes"])  # all from storage: then only the total is planned
    return {
        **counted, "verified_bytes": [r.restart.verified_bytes for r in ranks if r.restart is not None], "planned": planned,
        "as_planned": read == planned.get("needed_bytes") if shared else {f: counted[f] for f in planned} == planned,
    }  # fmt: skip


def versions() -> dict[str, str]:
    import torch

    return {
        "meshwright": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{sys.platform} {platform.machine()}",
    }


def commit(partial: Path, out: Path) -> RunDocument:
    """Move recordings, the plan, then run.json, into the run folder."""
    document = msgspec.json.decode((partial / "run.json").read_bytes(), type=RunDocument)
    (out / "run.json").unlink(missing_ok=True)  # of an earlier run; its recordings are about to be replaced
    here = [document.modules, *(t for t in document.traces if not (partial / t).exists())]  # ranks under torchrun write their traces themselves
    for old in (*out.glob("rank-*.json"), *(t for t in out.glob("trace-rank-*.json.gz") if t.name not in here)):
        old.unlink()
    for name in (*document.recordings, *document.traces, document.modules, PLAN, "run.json"):
        if name not in here or (partial / name).exists():
            (partial / name).replace(out / name)
    return document


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
