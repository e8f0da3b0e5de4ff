"""`capture`: the operator graph of a model with its loss, for planning.

Route: the module is built on the meta device, its tensors become fakes on the processor (shapes and storages, no memory), torch.export
(non-strict) gives the forward graph, AOTAutograd on its result the joint graph. If that fails: AOTAutograd on the module itself,
make_fx, and last the module as one opaque operator that is run for real and measured. `OpGraph.notes` say why a fallback was taken.
With a fallback the forward graph is one node, `model`: it can be planned data-parallel, not be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from meshwright.errors import CaptureError, MeshwrightError, UnknownName, Unsupported, UsageError
from meshwright.graph.graph import GraphValue, JointNode, OpGraph, OpNode, Parameter, Scaling, Work
from meshwright.graph.scale import NOT_SCALED, at_batch, first_other_call, rows_compared, scaling_between
from meshwright.kernels.garbage import few_collections
from meshwright.kernels.stages import stage

from .as_before import as_before
from .diagnose import module_in
from .exporting import line_of, places_noted
from .forward import MAX_REAL_BYTES, TracedForward, build_objective, built_and_traced, trace_forward, trace_objective
from .joint import Joint, joint_by_aot, joint_by_make_fx
from .nodes import StorageTable, forward_nodes, json_argument, operands, target_name, value_of
from .opaque import made_for_another_batch, measured_work, refuse_changes, refuse_left
from .regions import counts_held
from .repeats import cut, repeated_runs
from .resolve import user_location
from .torch_private import uncompiled_graphs
from .unfolding import unfolded
from .work import tensors_in

__all__ = ["METHODS", "capture", "capture_and_trace", "executed_graph"]

Method = Literal["export", "aot", "make_fx", "opaque"]
METHODS: tuple[Method, ...] = ("export", "aot", "make_fx", "opaque")
_ALIKE = "blocks alike in every call"


def capture(
    model: str,
    *,
    loss: str = "cross-entropy",
    batch_size: int | None = None,
    seed: int = 0,
    methods: Sequence[str] = METHODS,
    scalable: bool = True,
    sizes: Sequence[Sequence[int]] = (),
    whole: bool = False,
    dtype: str = "float32",
) -> OpGraph:
    """Captures the model named `model` (`FILE.py:function` or `module:function`) with its loss at `batch_size` rows.

    `batch_size` defaults to that of the example inputs, `sizes` of a sample to theirs. `methods` are tried in the order of METHODS. With
    `scalable`, the model is captured a second time at twice the batch (and a third time where rows are compared with rows), so that
    `graph.scale.at_batch` can give other batch sizes. Where an example has one row and torch lays a single row out otherwise, sizes are learned
    from 2 and 4. Where many blocks are alike in forward, backward is traced through a few of them (`repeats`); with `whole` through all.
    Raises UsageError, UnknownName (names, contract) and CaptureError (no method works: names the operator, the file and line, the module).
    """
    for method in methods:
        if method not in METHODS:
            raise UnknownName(f"there is no capture method {method!r}", where=model, hint=f"there are: {', '.join(METHODS)}")
    with counts_held():
        return _captured(model, loss, batch_size, seed, methods, scalable, sizes, whole, dtype)


def _captured(
    model: str, loss: str, batch_size: int | None, seed: int, methods: Sequence[str], scalable: bool, sizes: Sequence[Sequence[int]], whole: bool,
    dtype: str,
) -> OpGraph:  # fmt: skip
    with stage(f"capturing {model}"), few_collections(), uncompiled_graphs():
        graph, _ = _once(model, loss, batch_size, seed, methods, sizes, whole, dtype)
    if not scalable:
        return graph
    asked = partial(_once, model, loss, seed=seed, methods=(graph.method,), sizes=sizes, whole=whole, dtype=dtype)
    scaling, other = _scaling(graph, asked)
    if isinstance(scaling, str) and other is not None:
        if _blocks_left_out(graph) != _blocks_left_out(other):
            return _captured(model, loss, batch_size, seed, methods, scalable, sizes, True, dtype)
        if graph.batch_size == 1 and batch_size is None:
            further, _ = _scaling(other, asked)
            if not isinstance(further, str):
                note = f"sizes at batch 1 are those of larger batches: {scaling}"
                return msgspec.structs.replace(at_batch(msgspec.structs.replace(other, scaling=further), 1), notes=(*other.notes, note))
    if isinstance(scaling, str):
        return msgspec.structs.replace(graph, notes=(*graph.notes, f"{NOT_SCALED}{scaling}{_line_of_other(graph, other, asked)}"))
    return msgspec.structs.replace(graph, scaling=scaling)


def _scaling(graph: OpGraph, asked: Callable[..., tuple[OpGraph, TracedForward]]) -> tuple[Scaling | str, OpGraph | None]:
    """(how sizes change with the batch, or why that is not known; the graph at twice the batch). `asked`: `_once` at a batch size."""
    rows = graph.batch_size
    try:
        with stage(f"capturing {graph.model} at batch {2 * rows}"), few_collections(), uncompiled_graphs():
            other, _ = asked(batch_size=2 * rows)
            quadratic = rows_compared(graph, other) and not rows_compared(graph, other, 2)
            third = asked(batch_size=3 * rows)[0] if quadratic else None
        return scaling_between(graph, other, third), other
    except MeshwrightError as error:
        return f"capturing it at batch {2 * rows} failed: {error.message}", None


def _line_of_other(graph: OpGraph, other: OpGraph | None, asked: Callable[..., tuple[OpGraph, TracedForward]]) -> str:
    """` (file:line)` of the first call that the batch's size makes more or less often; "" where all are the same, or nobody's."""
    operator, module = first_other_call(graph, other) if other is not None else ("", "")
    if not operator or graph.method != "export":
        return ""
    with few_collections(), uncompiled_graphs(), places_noted():
        traced = asked(batch_size=graph.batch_size)[1]
    calls = (n for n in traced.graph_module.graph.nodes if n.op == "call_function" and target_name(n.target) == operator)
    line = next((line_of(n.meta) for n in calls if traced.module_paths[n.name] == module), "")
    return f" ({line})" if line else ""


def _blocks_left_out(graph: OpGraph) -> bool:
    return any(note.startswith(_ALIKE) for note in graph.notes)


def capture_and_trace(
    model: str, *, loss: str, batch_size: int, seed: int = 0, sizes: Sequence[Sequence[int]] = (), dtype: str = "float32"
) -> tuple[OpGraph, TracedForward]:
    """The graph at one batch size, as `capture` gives it, and the trace that it was made of: for what is planned and run in one process."""
    with few_collections(), uncompiled_graphs():
        return _once(model, loss, batch_size, seed, METHODS, sizes, True, dtype)


def executed_graph(traced: TracedForward) -> OpGraph:
    """What a trace executes, without work and storages: the same fingerprint and outline as the model's captured graph, at no cost."""
    calls = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    nodes = tuple(
        OpNode(
            name=n.name, target=target_name(n.target), module=traced.module_paths[n.name], inputs=operands(n),
            args=[json_argument(a) for a in n.args], kwargs={k: json_argument(v) for k, v in n.kwargs.items()},
            outputs=tuple(_shape_of(x) for x in tensors_in(n.meta.get("val"))),
        )
        for n in calls
    )  # fmt: skip
    return OpGraph(
        model=traced.model, method="export" if traced.method == "export" else "opaque", batch_size=traced.batch_size, loss=traced.loss,
        inputs=tuple(_shape_of(x) for x in traced.inputs), buffers=tuple(_parameter(n, b, ()) for n, b in traced.buffers.items()),
        parameters=tuple(_parameter(n, p, traced.aliases.get(n, ())) for n, p in traced.parameters.items()), nodes=nodes,
    )  # fmt: skip


def _shape_of(x: torch.Tensor) -> GraphValue:
    return GraphValue(shape=tuple(int(d) for d in x.shape), dtype=str(x.dtype).removeprefix("torch."), storage=-1)


def _once(
    model: str, loss: str, batch_size: int | None, seed: int, methods: Sequence[str], sizes: Sequence[Sequence[int]] = (), whole: bool = False,
    dtype: str = "float32",
) -> tuple[OpGraph, TracedForward]:
    build = partial(build_objective, model, loss=loss, batch_size=batch_size, seed=seed, device="fake", sizes=sizes, dtype=dtype)
    objective, source, mode, traced = built_and_traced(build, loss=loss, opaque="export" not in methods)
    notes: list[str] = list(traced.notes)
    if traced.method == "export":
        nodes, table = _forward(traced)
        joint = _joint(traced, lambda: trace_objective(objective, source, loss=loss, mode=mode), notes, whole=whole)
        if joint is not None:
            return _graph(traced, "export", nodes, table, joint, notes), traced
        traced = trace_objective(objective, source, loss=loss, mode=mode, opaque=True)
    refuse_changes(traced)
    routes: tuple[tuple[Method, str, Callable[[], Joint]], ...] = (
        ("aot", "AOTAutograd on the module itself", lambda: joint_by_aot(traced)),
        ("make_fx", "make_fx", lambda: joint_by_make_fx(traced)),
    )
    for method, what, route in routes:
        if method not in methods:
            continue
        with as_before(objective.model, objective.code):
            joint = _attempt(what, route, notes)
            if joint is not None:
                nodes, table = _forward(traced)
                return _graph(traced, method, nodes, table, joint, notes), traced
    return _run_for_real(traced, model, loss, batch_size, seed, methods, notes)


def _joint(traced: TracedForward, again: Callable[[], TracedForward], notes: list[str], *, whole: bool) -> Joint | None:
    """`again`: the trace once more; it is cut where blocks are left out, and what was cut in vain is of no use."""
    runs = () if whole else repeated_runs(traced)
    if runs:
        cut(traced, runs)
        joint = _attempt("AOTAutograd on a few blocks", lambda: unfolded(joint_by_aot(traced), runs), [])
        if joint is not None:
            notes += [
                f"{_ALIKE}: {len(r.calls) * r.period} of {r.modules}; backward was traced through {len(r.kept) * r.period} of them" for r in runs
            ]
            return joint
        traced = again()
    return _attempt("AOTAutograd on the exported graph", lambda: joint_by_aot(traced), notes)


def _attempt(what: str, route: Callable[[], Joint | None], notes: list[str]) -> Joint | None:
    try:
        return route()
    except MeshwrightError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        notes.append(f"{what} failed: {type(error).__name__}: {lines[0] if lines else 'no message'}")
        return None


def _forward(traced: TracedForward) -> tuple[tuple[OpNode, ...], StorageTable]:
    table = StorageTable()
    return forward_nodes(traced, table), table


def _graph(traced: TracedForward, method: Method, nodes: tuple[OpNode, ...], table: StorageTable, joint: Joint, notes: list[str]) -> OpGraph:
    work: dict[tuple[str, str], Work] = {}
    for n in joint.nodes:
        work[n.node, n.phase] = work.get((n.node, n.phase), Work()) + n.work
    nodes = tuple(
        msgspec.structs.replace(n, forward=work.get((n.name, "forward"), Work()), backward=work.get((n.name, "backward"), Work())) for n in nodes
    )
    if method == "export":
        notes.append(f"module paths: torch gave {100 * joint.direct_share:.1f} % of the joint calls theirs, sums of gradients have their consumer's")
    if joint.without_formula:
        notes.append(f"no flop formula (counted as 0): {', '.join(joint.without_formula)}")
    unreached = [n for n, p in traced.parameters.items() if p.requires_grad and n not in joint.gradients]
    if unreached:
        notes.append(f"parameters without a gradient: {', '.join(unreached[:8])}{' ...' if len(unreached) > 8 else ''}")
    return _assemble(traced, method, nodes, table, notes, joint=joint)


def _assemble(
    traced: TracedForward, method: Method, nodes: tuple[OpNode, ...], table: StorageTable, notes: list[str], *, joint: Joint | None = None
) -> OpGraph:
    joint_nodes: tuple[JointNode, ...] = joint.nodes if joint is not None else ()
    inputs = tuple(value_of(x, f"input:{i}", table) for i, x in enumerate(traced.inputs))
    return OpGraph(
        model=traced.model,
        method=method,
        batch_size=traced.batch_size,
        loss=traced.loss,
        inputs=inputs,
        parameters=tuple(_parameter(n, p, traced.aliases.get(n, ())) for n, p in traced.parameters.items()),
        buffers=tuple(_parameter(n, b, ()) for n, b in traced.buffers.items()),
        nodes=nodes,
        joint=joint_nodes,
        storages=tuple(table.storages),
        joint_storages=joint.storages if joint is not None else (),
        outputs=(nodes[-1].name if len(nodes) == 1 else _loss_value(traced),),
        gradients={n: joint.gradients[n] for n in traced.parameters if n in joint.gradients} if joint is not None else {},
        notes=tuple(notes),
    )


def _loss_value(traced: TracedForward) -> str:
    output = next(n for n in traced.graph_module.graph.nodes if n.op == "output")
    return str(output.args[0][0].name)


def _parameter(name: str, x: torch.Tensor, aliases: tuple[str, ...]) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(int(d) for d in x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        size_bytes=int(x.numel()) * x.element_size(),
        trainable=bool(x.requires_grad),
        aliases=aliases,
    )


def _run_for_real(
    fake: TracedForward, model: str, loss: str, batch_size: int | None, seed: int, methods: Sequence[str], notes: list[str]
) -> tuple[OpGraph, TracedForward]:
    """The last resort: builds the module with real memory, runs it once forward and backward and measures what it did."""
    size = sum(int(p.numel()) * p.element_size() for p in fake.parameters.values())
    reason = notes[-1] if notes else "no method was allowed"
    if fake.refusal is not None:
        reason = str(fake.refusal)
    where = fake.refusal.where if fake.refusal is not None else model
    hint = "replace the operator by one whose shapes and control flow do not depend on values"
    data = {"operator": fake.refusal.operator, "module": fake.refusal.module} if fake.refusal is not None else {}
    if "opaque" not in methods:
        raise CaptureError(f"{model} cannot be captured: {reason}", where=where, hint=hint, data=data)
    if size > MAX_REAL_BYTES:
        message = f"{model} cannot be captured: {reason}; its {size} bytes of parameters are too many to run it for real"
        raise CaptureError(message, where=where, hint=hint, data=data)
    real = trace_forward(model, loss=loss, batch_size=batch_size, seed=seed, device="cpu", opaque=True)
    try:
        refuse_left(real)
        with as_before(real.objective.model, real.objective.code, values=True):
            nodes, table = _forward(real)
            forward, backward, missing = measured_work(real)
    except (Unsupported, UsageError):
        raise
    except Exception as failure:
        error = failure.__cause__ if isinstance(failure, CaptureError) and failure.__cause__ is not None else failure
        path = module_in(real.objective, error)
        operator = f"operator {fake.refusal.operator}" if fake.refusal is not None and fake.refusal.operator else "an operator"
        lines: list[Any] = str(error).strip().splitlines() or ["no message"]
        message = f"{operator} in module {path!r} fails: {type(error).__name__}: {lines[0]}"
        place = user_location(error, model.rpartition(":")[0]) or model
        hint = "the module fails on its own example inputs"
        if held := made_for_another_batch(real, place):
            message, hint = f"{message}; {held}", "plan before forward has run, or make it anew in every forward, or for one sample"
        raise CaptureError(message, where=place, hint=hint, data=data) from error
    nodes = (msgspec.structs.replace(nodes[0], forward=forward, backward=backward, random=True),)
    notes.append("captured as one opaque operator, run for real: it can be trained data-parallel, but not be cut")
    if missing:
        notes.append(f"no flop formula (counted as 0): {', '.join(missing)}")
    return _assemble(real, "opaque", nodes, table, notes), real
