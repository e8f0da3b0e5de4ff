"""Before and after the ranks of a training run: its model traced again, the orders of steps, and the document and files that it leaves."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ... import __version__
from ...cost import Cost
from ...errors import FormatError, Unsupported, UsageError
from ...io.costs.expert_loads import write_expert_loads
from ...io.fabric.document import fabric_document
from ...io.plan.run_names import EXPERT_LOADS, MODULES, PLAN, trace_name
from ...io.trace.module_tree import write_module_tree
from ...job import Training
from ...plan.batch_statistics import shares_batch
from ...plan.plan import Plan, TrainingLayout
from ...plan.routing import Routing
from ...plan.vocabulary import base_node
from ...program.calls import inline
from ...program.tables import I32
from ...trace.module_tree import CapturedOperator, ModuleTree
from ..machine.pacing import Pacing, machine_facts
from ..recording.recording import RankRecording, expert_loads, numbers, plan_identity
from .request import RunDocument, RunRequest

__all__ = [
    "absolute", "at_whole_batch", "commit", "evaluation_graph_of", "forward_graph", "make_document", "opaque_function", "restart_of", "versions",
    "walk_orders", "write_loads", "write_modules",
]  # fmt: skip


def evaluation_graph_of(plan: Plan, layout: TrainingLayout, planned: Any) -> Any:
    """The traced model in evaluation mode, by the names of the planned graph. Raises: Unsupported where the plan cannot run it."""
    from ...capture.precision import trace_job
    from ..steps.forward_graph import OPAQUE, from_traced
    from ..train.evaluation_graph import evaluation_graph, evaluation_layout

    job = msgspec.convert(plan.job["training"], Training)
    opaque = any(n.target == OPAQUE for n in planned.nodes)
    options = {"batch_size": layout.microbatch_size, "evaluation": True, "opaque": opaque}
    traced = trace_job(job, **options)
    if traced.method == "opaque" and not opaque:
        why = "; ".join(traced.notes)
        raise Unsupported(f"the model cannot be traced in evaluation mode: {why}", where=job.model, hint="leave --evaluate-every out")
    try:
        graph = from_traced(traced)
    except Unsupported:
        graph = from_traced(trace_job(job, device="cpu", **options))
    if shares_batch(layout):
        graph = at_whole_batch(graph, job, layout.global_batch, options)
    graph = evaluation_graph(planned, graph)
    if layout.context == 1:  # ranks of a part of the positions look for themselves: it is theirs that their segments compute
        evaluation_layout(layout, graph)
    return graph


def forward_graph(plan: Plan, layout: TrainingLayout, traced: Any = None) -> Any:
    """The traced model, checked against the plan's layout. `traced`: its trace where this process has made one, of the layout's micro-batch."""
    from ...capture.precision import trace_job
    from ..steps.forward_graph import from_traced

    job = msgspec.convert(plan.job["training"], Training)
    traced = traced or trace_job(job, batch_size=layout.microbatch_size)
    if traced.method == "opaque" and {n for s in layout.segments for n in s.nodes} != set(traced.nodes):
        raise Unsupported(f"the model cannot be traced here: {'; '.join(traced.notes)}", where=job.model)
    _refuse_changed_model(plan, job.model, traced)
    try:
        graph = from_traced(traced)
    except Unsupported:
        graph = from_traced(trace_job(job, batch_size=layout.microbatch_size, device="cpu"))
    planned = {base_node(n) for s in layout.segments for n in s.nodes}
    found = {n.name for n in graph.nodes}
    if planned != found:
        odd = sorted(planned ^ found)
        raise UsageError(
            f"the model {job.model!r} is not the one that was planned: {len(odd)} operators differ, e.g. {odd[0]!r}", where=job.model,
            hint="make the plan again",
        )  # fmt: skip
    return at_whole_batch(graph, job, layout.global_batch, {}) if shares_batch(layout) else graph


def at_whole_batch(graph: Any, job: Training, batch: int, options: Mapping[str, Any]) -> Any:
    """`graph` with its calls as they are at the whole batch (`plan.whole_batch`). Raises: Unsupported where they are others."""
    from ...capture.precision import trace_job
    from ..steps.forward_graph import from_traced
    from ..tensor.whole_batch import calls_of

    options = {**options, "batch_size": batch}
    try:
        whole = from_traced(trace_job(job, **options))
    except Unsupported:
        whole = from_traced(trace_job(job, device="cpu", **options))
    if whole.constants != graph.constants:
        raise Unsupported("the model holds other constants for the whole batch than for a part of it", where="--batch-statistics global")
    graph = msgspec.structs.replace(graph, whole=whole.nodes, whole_inputs=whole.inputs)
    calls_of(graph)
    return graph


def opaque_function(job: Training, graph: Any, layout: TrainingLayout, device: str, *, evaluation: bool = False) -> Any:
    """What the one node of a model that could not be traced calls; None for a graph of operators. Modules of it that are kept whole are known in
    this process afterwards."""
    from ...capture.precision import trace_job
    from ...capture.regions import REGION
    from ..steps.forward_graph import OPAQUE

    targets = {n.target for n in graph.nodes}
    if OPAQUE not in targets and REGION not in targets:
        return None
    traced = trace_job(job, batch_size=layout.microbatch_size, device=device, opaque=OPAQUE in targets, evaluation=evaluation)
    if OPAQUE not in targets:
        return None
    return next(n.target for n in traced.graph_module.graph.nodes if n.op == "call_function")


def _refuse_changed_model(plan: Plan, model: str, traced: Any) -> None:
    """The plan holds the fingerprint of the graph it was made for, whatever its batch size. Plans without one pass."""
    from ...capture.graph import executed_graph

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
    from ...drive.plans import cost_of, works_of
    from ...simulate import simulate_program
    from ...simulate.network import unpinned
    from ..calibrate.transport import laptop_shape
    from ..executor.lanes import fuse_lanes

    program = inline(plan.main, plan.programs).program
    fabric = laptop_shape(max(2, program.ranks))
    placement = [d.name for d in fabric.devices[: program.ranks]]
    timeline = simulate_program(unpinned(program), fabric, placement, cost or cost_of(plan), works=works_of(plan))
    start, end = np.zeros(len(program.steps)), np.zeros(len(program.steps))
    known = timeline.spans.step >= 0
    start[timeline.spans.step[known]], end[timeline.spans.step[known]] = timeline.spans.start_s[known], timeline.spans.end_s[known]
    return fuse_lanes(program, start, end, late_receives=True)


def make_document(
    plan: Plan, request: RunRequest, pacing: Pacing, recordings: Sequence[bytes], costs: Sequence[bytes], use: Mapping[str, Any], *,
    first: int, before: Sequence[float], launcher: str,
) -> RunDocument:  # fmt: skip
    """Everything about a finished run, from what its ranks left."""
    from ...drive.plans import cost_of
    from ..calibrate.calibrate import RankCosts, cost_of_ranks

    layout = plan.layout
    assert layout is not None
    ranks = [msgspec.json.decode(r, type=RankRecording) for r in recordings]
    measured = [msgspec.json.decode(c, type=RankCosts) for c in costs]
    fabric, cost, calibration = cost_of_ranks(cost_of(plan), measured, pacing)
    columns = [numbers(r.losses) for r in ranks if r.losses and layout.coordinates(r.rank)[2] == 0]
    ends = [max(r.steps[i].end_s for r in ranks) for i in range(len(ranks[0].steps))]
    starts = [min(r.steps[i].start_s for r in ranks) for i in range(len(ranks[0].steps))]
    over = [max([e, *(s for r in ranks if (s := r.steps[i].evaluated_s) is not None)]) for i, e in enumerate(ends)]  # evaluations too
    facts = machine_facts()
    notes = []
    if use.get("disturbed"):
        notes.append(f"other programs used {100 * use['others']:.0f} % of the machine; times are disturbed")
    notes += dropped_notes([r for r in ranks if layout.coordinates(r.rank)[2] == 0])
    evaluation: dict[str, Any] = {}
    if request.evaluate_every:
        parts = [r.evaluations for r in ranks if r.evaluations and layout.coordinates(r.rank)[2] == 0]
        evaluation = {
            "data": request.evaluation_data, "batches": ranks[0].evaluation_batches, "samples": ranks[0].evaluation_batches * layout.global_batch,
            "losses": [[at[0][0], sum(numbers(x for _, x in at)) / len(at)] for at in zip(*parts, strict=True)],
        }  # fmt: skip
    return RunDocument(
        plan=plan_identity(plan), ranks=len(ranks), data=request.data, device=request.device, first_step=first, steps=len(ends),
        losses=[*before, *(sum(c) / len(c) for c in zip(*columns, strict=True))],
        step_s=[b - a for a, b in zip([starts[0], *over[:-1]], ends, strict=True)], evaluation=evaluation,
        profiled_steps=[s.step for s in ranks[0].steps if s.profiled], memory_peak_bytes=[r.memory_peak_bytes for r in ranks],
        rss_peak_bytes=[r.rss_peak_bytes for r in ranks], cpu_s=[_mean([s.cpu_s for s in r.steps]) for r in ranks],
        process_cpu_s=[_mean([s.process_cpu_s for s in r.steps]) for r in ranks], recordings=[f"rank-{r.rank:03d}.json" for r in ranks],
        pacing={"mode": pacing.mode, "share": pacing.share, "why": pacing.why}, machine_use=dict(use),
        machine={"cores": facts.cores, "cpu_model": facts.cpu_model, "memory_bytes": facts.memory_bytes},
        run_fabric=fabric_document(fabric), cost=msgspec.to_builtins(cost), calibration=calibration.to_json() if calibration else None,
        launcher=launcher, versions=versions(), notes=notes, gate=dict(request.gate), restart=restart_of(plan, ranks), modules=MODULES,
        traces=[trace_name(r.rank) for r in ranks] if request.profile else [],
    )  # fmt: skip


def write_modules(folder: Path, plan: Plan, graph: Any) -> None:
    """`modules.json`: the model's modules, and its captured calls in order by the names that a trace gives them. Calls of the loss are left out."""
    number = {m.path: i for i, m in enumerate(graph.tree)}
    calls = ((n.target.split("."), number.get(graph.modules.get(n.name, ""))) for n in graph.nodes)
    operators = (CapturedOperator(name="::".join(t[:2]), module=module) for t, module in calls if len(t) == 3 and module is not None)
    tree = ModuleTree(model=plan.job["training"]["model"], modules=tuple(graph.tree), operators=tuple(operators))
    write_module_tree(folder / MODULES, tree)


def dropped_notes(ranks: Sequence[RankRecording]) -> list[str]:
    """What expert layers dropped is said: the sum, and the layer that dropped most."""
    found: dict[str, int] = {}
    for r in ranks:
        for layer, n in r.expert_dropped.items():
            found[layer] = found.get(layer, 0) + n
    if not found:
        return []
    most = max(found, key=lambda layer: (found[layer], layer))
    return [f"{sum(found.values())} choices of tokens found no place in the buffers of their experts, most in {most!r} ({found[most]}); "
            "convert_experts(capacity_factor=0) drops none"]  # fmt: skip


class _Rows(msgspec.Struct):
    """Of a recording, what counts here."""

    rank: int
    expert_rows: dict[str, list[list[int]]] = {}


def write_loads(folder: Path, layout: TrainingLayout, recordings: Sequence[bytes]) -> None:
    """`expert-loads.json`: rows that every expert of every layer got, in the mean over the recorded steps. Nothing without such layers."""
    loads = expert_loads([msgspec.json.decode(r, type=_Rows) for r in recordings], layout)
    measured = tuple((layer, tuple(round(sum(x) / len(steps)) for x in zip(*steps, strict=True))) for layer, steps in loads.items() if steps)
    if measured:
        write_expert_loads(folder / EXPERT_LOADS, Routing(measured=measured))


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


def commit(partial: Path, out: Path) -> RunDocument:
    """Move recordings, the plan, then run.json, into the run folder."""
    document = msgspec.json.decode((partial / "run.json").read_bytes(), type=RunDocument)
    (out / "run.json").unlink(missing_ok=True)  # of an earlier run; its recordings are about to be replaced
    # ranks under torchrun write their traces themselves
    here = [document.modules, EXPERT_LOADS, *(t for t in document.traces if not (partial / t).exists())]
    for old in (*out.glob("rank-*.json"), *(t for t in out.glob("trace-rank-*.json.gz") if t.name not in here)):
        old.unlink()
    (out / EXPERT_LOADS).unlink(missing_ok=True)
    for name in (*document.recordings, *document.traces, document.modules, EXPERT_LOADS, PLAN, "run.json"):
        if name not in here or (partial / name).exists():
            (partial / name).replace(out / name)
    return document


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def versions() -> dict[str, str]:
    import torch

    return {
        "meshwright": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{sys.platform} {platform.machine()}",
    }
