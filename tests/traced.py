"""A model of ours that was captured or traced once in a process is not traced again: tests of many features run the same few nets, and half of what a
gate or a small run costs is torch.export of the same module at the same batch.

`capture` and the tracing before a run give what they gave the first time, where nothing that they depend on can be another: the model lies in this
repository, one trace is made (no module is kept whole, which would be noted elsewhere too), and no part of the capture has been replaced by a test.
Tests of the capture itself (tests/capture) do without.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from meshwright.capture import exporting, flatten, forward, gpu_casts, joint, regions
from meshwright.capture import graph as capturing
from meshwright.capture import precision as of_jobs
from meshwright.capture.forward import TracedForward
from meshwright.graph.graph import OpGraph

__all__ = ["captured_with_trace", "forget", "install", "kept", "remember"]

ROOT = Path(__file__).parents[1].resolve()
MOST_KEPT = 64  # of each kind, the newest
_real_once, _real_trace_job = capturing._once, of_jobs.trace_job
_rooms = (capturing, exporting, flatten, forward, joint, regions)
_parts = [(room, name, x) for room in _rooms for name, x in vars(room).items() if callable(x) and name != "_once"]
_parts += [(exporting, "_once", exporting._once), (of_jobs, "casting", of_jobs.casting)]
_captures: dict[tuple[Any, ...], tuple[OpGraph, TracedForward]] = {}
_traces: dict[tuple[Any, ...], TracedForward] = {}
_on = False


def install() -> None:
    """Also in modules that have imported `trace_job` before: a worker is the fork of a process that has imported all tests."""
    capturing._once = _once
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("trace_job") is _real_trace_job:
            module.trace_job = _trace_job  # type: ignore[attr-defined]


def remember(on: bool) -> None:
    """Whether what is kept is used from now on."""
    global _on
    _on = on


def forget() -> None:
    """For tests that count captures or look into them."""
    _captures.clear()
    _traces.clear()


def kept(model: str, loss: str) -> bool:
    """Whether a model and its loss are of this repository, whose files stay as they are while tests run."""
    if not _on or ".py:" not in model or any(getattr(module, name, None) is not part for module, name, part in _parts):
        return False  # a test has replaced a part of the capture
    return all(Path(x.partition(":")[0]).resolve().is_relative_to(ROOT) for x in (model, loss) if ".py:" in x)


def _casting() -> tuple[bool, str, bool]:
    return torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu")), bool(gpu_casts._libraries)


def _key(model: str, loss: str, batch_size: int | None, seed: int, sizes: Any = (), dtype: str = "float32") -> tuple[Any, ...]:
    """One for each file and function, however a caller writes the file; a name that says more may mean other files in another folder."""
    file, _, function = model.partition(".py:")
    name = f"{Path(file).resolve()}.py:{function}" if function.isidentifier() else f"{model} in {Path.cwd()}"
    return name, loss, batch_size, seed, str(sizes), dtype, _casting()


def _named(traced: TracedForward, model: str) -> TracedForward:
    return traced if traced.model == model else dataclasses.replace(traced, model=model)


def _once(
    model: str, loss: str, batch_size: int | None, seed: int, methods: Any, sizes: Any = (), whole: bool = False, dtype: str = "float32"
) -> tuple[OpGraph, TracedForward]:
    if not kept(model, loss):
        return _real_once(model, loss, batch_size, seed, methods, sizes, whole, dtype)
    key = (*_key(model, loss, batch_size, seed, sizes, dtype), whole)
    if "export" in methods and key in _captures:
        graph, traced = _captures[key]
        return graph if graph.model == model else msgspec.structs.replace(graph, model=model), _named(traced, model)
    graph, traced = found = _real_once(model, loss, batch_size, seed, methods, sizes, whole, dtype)
    if graph.method == "export" and _plain(traced):
        at_batch = _key(model, loss, graph.batch_size, seed, sizes, dtype)  # the model's own batch may be asked for by its number next
        _put(_captures, key, found)
        _put(_captures, (*at_batch, whole), found)
        _put(_traces, at_batch, traced)
    return found


def _trace_job(job: Any, **options: Any) -> Any:
    """Only what a run asks for: the model on fakes at a batch size."""
    if set(options) != {"batch_size"} or not kept(job.model, job.loss):
        return _real_trace_job(job, **options)
    with of_jobs.casting(job.asked.precision):
        key = _key(job.model, job.loss, options["batch_size"], job.seed, job.sizes or (), job.dtype)
    if key in _traces:
        return _named(_traces[key], job.model)
    traced = _real_trace_job(job, **options)
    if traced.method == "export" and _plain(traced):
        _put(_traces, key, traced)
    return traced


def captured_with_trace(model: str, loss: str, batch_size: int) -> tuple[OpGraph, TracedForward]:
    """As `capture` gives it at one batch size, with the trace that it was made of."""
    with capturing.few_collections(), capturing.uncompiled_graphs():
        return capturing._once(model, loss, batch_size, 0, ("export", "opaque"))


def _plain(traced: TracedForward) -> bool:
    return all("meshwright" not in str(n.target) for n in traced.graph_module.graph.nodes if n.op == "call_function")


def _put(where: dict[tuple[Any, ...], Any], key: tuple[Any, ...], what: Any) -> None:
    where[key] = what
    while len(where) > MOST_KEPT:
        del where[next(iter(where))]


