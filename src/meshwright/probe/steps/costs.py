"""Seconds and inner workspaces of a step's operators, measured here and kept on disk: fills `time_s` and `workspace_bytes` of a `StepGraph`.

Every distinct call (operator, shapes, strides, dtypes, other arguments) is run alone on tensors of its shapes: floats are random, integers random
indices in range where the operator is known, else zeros. Rounds go through all calls in turn, with other data read in between, so that caches are
cold; freed memory stays with the process (`kept_memory`). The time is the median of the thread's CPU time with one thread (on a GPU, of events). The
workspace is the most that the allocator gave during the call beyond what the call left behind, with the threads of this process. Results are as large
as the kernel makes them, which can be more than their shape (a mean over a large scratch). Views cost nothing. Needs the memory of one call at a
time, not of the step; where there is room for that, `step_in_place` says how much faster or slower operators are there.

The file (JSON, `meshwright.step-costs`) is for one device, torch, processor and number of threads; another environment's is not used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import fx

from ...capture.torch_private import storage_key
from ...capture.work import tensors_in
from ...errors import FormatError, RunError, UsageError
from ...graph.step_graph import StepGraph
from ...io.atomic import write_bytes
from ...kernels.garbage import kept_memory
from ...kernels.kept import user_cache
from ...run.calibrate.operator_times import call_key, environment
from ...run.calibrate.operators import quiet_single_thread
from ...run.steps.storage_peak import quiet_profile

__all__ = [
    "Job", "StepCost", "StepCosts", "call_of", "costs_file", "fakes_of", "keys_of", "measure_missing", "measure_step", "measured_jobs", "real_tensor",
]  # fmt: skip

SCHEMA = "meshwright.step-costs"
VERSION = 1
TIMED = "cold, memory kept, orders compared"  # how; times taken in another way are others
MAX_FILE_BYTES = 64 * 2**20
COST_ROUNDS = 5  # timings of an operator
COLD_BYTES = 8 << 20  # read and written before every call that is timed: more than a core's own caches hold


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    time_s: Annotated[float, msgspec.Meta(ge=0)]
    workspace_bytes: Annotated[int, msgspec.Meta(ge=0)]
    made_bytes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()  # storages of its result that are no operand's; kernels differ from fakes
    same_bits: bool = False  # of another implementation: as the plain operator's, on the same operands
    same_order: bool = True  # of dimensions in memory: whoever reads it may look at it as at the plain operator's result


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured. `ready`: makes tensors and gives what is run on them; `call`: the plain call, if it is one; `plain`: as `ready`, of the plain
    operator on the same tensors, if results are to be compared; `fakes`: what the result's order of dimensions is compared with, else."""

    name: str
    ready: Callable[[], Callable[[], Any]]
    call: fx.Node | None = None
    plain: Callable[[], Callable[[], Any]] | None = None
    fakes: Any = None


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION
    environment: dict[str, str]
    costs: dict[str, StepCost]


def costs_file() -> Path | None:
    """Where costs are kept by default: the user's cache folder; None where there is none, or it cannot be written."""
    folder = user_cache("meshwright")
    return None if folder is None else folder / "step-costs.json"


class StepCosts:
    """Costs by call, in memory and, with a path, in a file that `save` writes. Raises: FormatError when the file is not one of ours."""

    def __init__(self, path: Path | None = None, *, device: str = "cpu") -> None:
        self.path, self.environment = path, environment() | {"device": device, "workspace_threads": str(torch.get_num_threads()), "timed": TIMED}
        self.costs: dict[str, StepCost] = {}
        if path is not None and path.exists():
            self.costs = self._load(path)

    def _load(self, path: Path) -> dict[str, StepCost]:
        hint = "delete it; it will be made anew"
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FormatError(f"larger than {MAX_FILE_BYTES} bytes", where=str(path), hint=hint)
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not a file of step costs: {error}", where=str(path), hint=hint) from error
        if file.schema != SCHEMA or file.version != VERSION:
            raise FormatError(f"schema {file.schema!r} version {file.version}, expected {SCHEMA!r} version {VERSION}", where=str(path), hint=hint)
        return file.costs if file.environment == self.environment else {}

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, msgspec.json.encode(_File(environment=self.environment, costs=self.costs), order="deterministic"))


def measure_step(
    module: fx.GraphModule, graph: StepGraph, *, costs: StepCosts | None = None, rounds: int = COST_ROUNDS, device: str = "cpu"
) -> StepGraph:
    """`graph` with measured times and workspaces; `module`: the joint graph it was made from, whose nodes carry fakes in `meta["val"]`.

    What `costs` does not know yet is measured, and saved. Optional nodes and alternatives keep what they say.
    Raises: UsageError for fewer than one round; RunError when an operator fails on tensors of its shapes, naming the node.
    """
    if rounds < 1:
        raise UsageError(f"must be at least 1, got {rounds}", where="rounds")
    costs = StepCosts(device=device) if costs is None else costs
    calls = {n.name: n for n in module.graph.nodes if n.op == "call_function"}
    keys = keys_of(module, graph)
    missing = {key: calls[name] for name, key in reversed(keys.items()) if key not in costs.costs}
    if missing:
        jobs = {key: Job(name=c.name, ready=partial(_ready, c, device), call=c) for key, c in missing.items()}
        costs.costs.update(measured_jobs(jobs, rounds, device))
        costs.save()
    nodes, storages = [], list(graph.storages)
    for node in graph.nodes:
        if node.name in keys:
            cost = costs.costs[keys[node.name]]
            if len(cost.made_bytes) == len(node.makes):
                for s, size in zip(node.makes, cost.made_bytes, strict=True):
                    storages[s] = msgspec.structs.replace(storages[s], size_bytes=size)
            node = msgspec.structs.replace(node, time_s=cost.time_s, workspace_bytes=cost.workspace_bytes)
        nodes.append(node)
    evidence = f"measured here: every call alone, median of {rounds} or more, CPU time of one thread" if device == "cpu" else f"measured on {device}"
    return msgspec.structs.replace(graph, nodes=tuple(nodes), storages=tuple(storages), evidence=evidence)


def keys_of(module: fx.GraphModule, graph: StepGraph) -> dict[str, str]:
    """Call keys of the nodes that cost anything, by name."""
    costly = {n.name for n in graph.nodes if n.makes or n.writes}
    return {n.name: call_key(str(n.target), *fakes_of(n)) for n in module.graph.nodes if n.op == "call_function" and n.name in costly}


def fakes_of(call: fx.Node) -> tuple[Any, Any]:
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: n.meta.get("val"))
    return args, kwargs


def measured_jobs(jobs: Mapping[str, Job], rounds: int, device: str = "cpu") -> dict[str, StepCost]:
    """Raises: RunError when one fails, by its name."""
    times: dict[str, list[float]] = {key: [] for key in jobs}
    kept = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            workspaces = _workspaces(jobs, device)  # with the threads of this process: kernels' scratch depends on them
            same = {key: _compared(job) for key, job in jobs.items()}
        with quiet_single_thread(), kept_memory(), torch.no_grad():
            others = torch.zeros(COLD_BYTES // 4) if device == "cpu" else torch.empty(0)
            for _ in range(rounds):
                for key, job in jobs.items():
                    run = job.ready()
                    others += 1
                    times[key].append(_timed(run, device))
    finally:
        torch.set_rng_state(kept)
    return {key: StepCost(statistics.median(times[key]), *workspaces[key], *same[key]) for key in jobs}


def measure_missing(costs: StepCosts, jobs: Mapping[str, Job], rounds: int) -> None:
    """Measures what `costs` does not hold, and keeps it. Raises: RunError as `measured_jobs`."""
    missing = {key: job for key, job in jobs.items() if key not in costs.costs}
    if missing:
        costs.costs.update(measured_jobs(missing, rounds))
        costs.save()


def _compared(job: Job) -> tuple[bool, bool]:
    """(the bits, the order of dimensions) of the plain operator."""
    if job.plain is None and job.fakes is None:
        return False, True
    torch.manual_seed(1)
    expected = [*tensors_in(job.fakes if job.plain is None else job.plain()())]
    torch.manual_seed(1)
    found = [*tensors_in(job.ready()())]
    order = all(a.dim() != b.dim() or _order(a) == _order(b) for a, b in zip(expected, found, strict=False))
    alike = len(expected) == len(found) and all(a.shape == b.shape for a, b in zip(expected, found, strict=True))
    if job.plain is None or not alike:
        return False, order
    return all(torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(expected, found, strict=True)), order


def _order(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def _ready(call: fx.Node, device: str) -> Callable[[], Any]:
    return call_of(call, device)[0]


def call_of(call: fx.Node, device: str) -> tuple[Callable[[], Any], dict[fx.Node, Any]]:
    """The call on tensors of its own, and these."""
    made: dict[fx.Node, Any] = {}

    def tensor(n: fx.Node) -> Any:
        if n not in made:
            made[n] = real_tensor(n.meta.get("val"), call, device)
        return made[n]

    args, kwargs = fx.node.map_arg((call.args, call.kwargs), tensor)
    function: Any = call.target
    return lambda: function(*args, **kwargs), made


def _made_bytes(call: fx.Node | None, result: Any) -> tuple[int, ...]:
    """Sizes of the storages that the plain call made: results lie in operands' storages exactly if the fakes' do."""
    if call is None:
        return ()
    given = {storage_key(x) for x in tensors_in(fakes_of(call))}
    fakes, real = list(tensors_in(call.meta.get("val"))), list(tensors_in(result))
    if len(fakes) != len(real):
        return ()
    sizes = {storage_key(f): int(r.untyped_storage().nbytes()) for f, r in zip(fakes, real, strict=True) if storage_key(f) not in given}
    return (*sizes.values(),)


def _timed(run: Callable[[], Any], device: str) -> float:
    if device != "cpu":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.thread_time()
    result = run()
    end_s = time.thread_time()
    del result
    return end_s - start


def _workspaces(jobs: Mapping[str, Job], device: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Most bytes allocated inside a call beyond what is left after it, and what it made."""
    if device != "cpu":
        return {key: _on_gpu(job) for key, job in jobs.items()}
    keys = list(jobs)
    made: dict[str, tuple[int, ...]] = {}
    with quiet_profile() as profile:
        for i, key in enumerate(keys):
            run = jobs[key].ready()
            with torch.profiler.record_function(f"step-cost:{i}"):
                result = _run_named(run, jobs[key])
            made[key] = _made_bytes(jobs[key].call, result)
            del run, result
    events = list(profile.profiler.kineto_results.events())
    memory = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0])
    spans = {int(e.name().partition(":")[2]): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith("step-cost:")}
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    at = 0
    for i, key in enumerate(keys):
        begin, end = spans[i]
        while at < len(memory) and memory[at][0] < begin:
            at += 1
        live = peak = 0
        while at < len(memory) and memory[at][0] <= end:
            live += memory[at][1]
            peak = max(peak, live)
            at += 1
        found[key] = max(0, peak - max(0, live)), made[key]
    return found


def _run_named(run: Callable[[], Any], job: Job) -> Any:
    try:
        return run()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        what = job.name if job.call is None else str(job.call.target)
        raise RunError(f"{what} cannot be measured alone: {type(error).__name__}: {error}", where=job.name) from error


def _on_gpu(job: Job) -> tuple[int, tuple[int, ...]]:
    run = job.ready()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = _run_named(run, job)
    torch.cuda.synchronize()
    workspace = max(0, int(torch.cuda.max_memory_allocated()) - int(torch.cuda.memory_allocated()))
    return workspace, _made_bytes(job.call, result)


def real_tensor(value: Any, call: fx.Node, device: str) -> Any:
    """A tensor of the fake's shape, strides and dtype, with values that the operator takes."""
    if isinstance(value, (list, tuple)):
        return type(value)(real_tensor(v, call, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    # Strides may be those of an expanded or overlapping view: fill the storage, then look at it in the fake's way.
    reach = 1 + sum((d - 1) * s for d, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    shape, stride = tuple(value.shape), tuple(value.stride())
    flat: torch.Tensor
    if value.dtype.is_floating_point or value.dtype.is_complex:
        flat = torch.randn(reach, dtype=value.dtype, device=device) if reach else torch.empty(0, dtype=value.dtype, device=device)
    elif value.dtype == torch.bool:
        flat = torch.rand(reach, device=device) < 0.5
    else:
        flat = torch.randint(0, max(1, _range(call)), (reach,), device=device).to(value.dtype)
    return flat.as_strided(shape, stride)


def _range(call: fx.Node) -> int:
    """Integers below this are right for every integer operand of the call; 1 where that is not known."""
    name = str(call.target)
    shapes: Sequence[Any] = [getattr(a.meta.get("val"), "shape", ()) if isinstance(a, fx.Node) else a for a in call.args]
    if name.startswith("aten.embedding.") and shapes[0]:
        return int(shapes[0][0])
    if name.startswith("aten.embedding_dense_backward."):
        return int(shapes[2])
    if name.startswith(("aten.nll_loss_forward.", "aten.nll_loss2d_forward.")):
        return int(shapes[0][1] if len(shapes[0]) > 1 else shapes[0][0])
    if name.startswith(("aten.nll_loss_backward.", "aten.nll_loss2d_backward.")):
        return int(shapes[1][1] if len(shapes[1]) > 1 else shapes[1][0])
    if name.startswith("aten.max_pool2d_with_indices_backward."):
        return int(shapes[1][-1] * shapes[1][-2])
    return 1
