"""Plans and ranks for the tests of `meshwright.run`: real programs, executed by threads of one process over gloo."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from captured import shared
from meshwright.capture.forward import trace_forward
from meshwright.capture.precision import casting
from meshwright.cost import Cost, Transport
from meshwright.decide.collective import CollectiveProblem, strategy
from meshwright.decide.layout.build import build_layout
from meshwright.decide.layout.context import context_graph
from meshwright.decide.layout.megatron import find_regions
from meshwright.decide.layout.problem import Degrees
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.drive.collective.callee import bindable
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.io.fabric.document import fabric_document
from meshwright.job import Training
from meshwright.lower.training import lower_training, training_works
from meshwright.plan.plan import CycleEntry, Plan, StepEnd, TrainingLayout
from meshwright.program.hash import program_hash
from meshwright.program.program import Program
from meshwright.run.calibrate.transport import laptop_shape
from meshwright.run.executor.transport import GroupedTransport
from meshwright.run.steps.forward_graph import ForwardGraph, from_traced
from traced import captured_with_trace, kept

TINY = "examples/gpt.py:tiny"


def graph_of(model: str, batch: int, loss: str = "cross-entropy", precision: str = "fp32") -> OpGraph:
    """Captured once, whether a caller names the defaults or not."""
    return kept_graph_of(model, batch, loss, precision)


@cache
def kept_graph_of(model: str, batch: int, loss: str, precision: str) -> OpGraph:
    """What capturing traces on its way is kept for `forward_of`, which would trace the same again. Of several workers one captures."""

    def made() -> tuple[OpGraph, ForwardGraph | None]:
        with casting(precision):
            graph, traced = captured_with_trace(model, loss, batch)
        with suppress(Unsupported):  # `forward_of` says so when it is asked
            return graph, from_traced(traced) if graph.method == "export" else None
        return graph, None

    key = f"{Path.cwd()} {model} {batch} {loss} {precision}"
    found = shared(key, lambda path: path.write_bytes(msgspec.msgpack.encode(made())) and None) if kept(model, loss) else None
    graph, forward = made() if found is None else msgspec.msgpack.decode(found.read_bytes(), type=tuple[OpGraph, ForwardGraph | None])
    if forward is not None:
        traced_on_the_way[model, batch, loss, precision] = forward
    return graph


traced_on_the_way: dict[tuple[str, int, str, str], ForwardGraph] = {}


def forward_of(model: str, batch: int, loss: str = "cross-entropy", precision: str = "fp32") -> ForwardGraph:
    return _forward_of(model, batch, loss, precision)


@cache
def _forward_of(model: str, batch: int, loss: str, precision: str) -> ForwardGraph:
    if found := traced_on_the_way.get((model, batch, loss, precision)):
        return found
    with casting(precision):
        return from_traced(trace_forward(model, loss=loss, batch_size=batch))


def fabric_of(ranks: int) -> Fabric:
    return laptop_shape(ranks)


def lowered(
    model: str, degrees: tuple[int, int, int], *, microbatch: int, global_batch: int, collective: str = "ring", loss: str = "cross-entropy",
    end: StepEnd | None = None, context: tuple[int, str] = (1, ""), element_bytes: int = 4,
) -> tuple[TrainingLayout, Program, dict[str, Program]]:  # fmt: skip
    """(layout, program, callees) for (data, tensor, pipeline) degrees; `context`: degree and exchange; `element_bytes`: of parameters."""
    graph = context_graph(graph_of(model, microbatch, loss), *context)
    d = Degrees(*degrees, microbatch, context=context[0], exchange=context[1])
    fabric = fabric_of(d.ranks) if d.ranks > 1 else laptop_shape(2)
    layout = build_layout(
        graph, find_regions(graph), d, global_batch, cost=Cost(), device=fabric.devices[0], border_Bps=1e9, workspace=lambda g, n: (0, 0)
    )

    layout = msgspec.structs.replace(layout, end=end) if end is not None else layout

    @cache
    def all_reduce(purpose: str, ranks: tuple[int, ...], size: int, op: str = "all-reduce") -> Any:
        names = tuple(fabric.devices[r].name for r in ranks)
        whole = -(-size // element_bytes) * element_bytes
        problem = CollectiveProblem(fabric=fabric, op=op, ranks=names, size_bytes=whole, seed=0, transport=Transport(), element_bytes=element_bytes)
        plan = strategy(collective)(unroll=True).plan(problem, rng=np.random.default_rng(0))
        return bindable(program_hash(plan.program), plan.program)

    program, callees = lower_training(graph, layout, one_f_one_b_order, all_reduce)
    return layout, program, callees


def make_plan(
    degrees: tuple[int, int, int], *, model: str = TINY, microbatch: int = 2, global_batch: int = 8, seed: int = 0, end: StepEnd | None = None,
    context: tuple[int, str] = (1, ""), element_bytes: int = 4, **job: Any,
) -> Plan:  # fmt: skip
    """A training plan with exactly these (data, tensor, pipeline) degrees, without a search. `job`: more of it (optimizer, recipe)."""
    layout, program, callees = lowered(
        model, degrees, microbatch=microbatch, global_batch=global_batch, end=end, context=context, element_bytes=element_bytes
    )
    works = training_works(context_graph(graph_of(model, microbatch), *context), layout)
    main = program_hash(program)
    fabric = fabric_of(max(2, layout.ranks))
    builtins = msgspec.to_builtins
    return Plan(
        kind="training",
        job={
            "training": builtins(Training(model=model, global_batch=global_batch, seed=seed, **job)), "graph_fingerprint": "",
            "cost": builtins(Cost()),
            "works": {k: builtins(w) for k, w in works.items()},
        },
        target_fabric=fabric_document(fabric), placement=tuple(d.name for d in fabric.devices[: layout.ranks]), programs={main: program, **callees},
        cycle=(CycleEntry(program=main),), decisions={}, layout=layout, seed=seed,
    )  # fmt: skip


def in_threads(ranks: int, body: Callable[[int, Any], Any], *, timeout_s: float = 60) -> list[Any]:
    """`body(rank, gloo group)` on every rank, each in a thread of this process. Raises the first rank's exception."""
    store = dist.HashStore()
    prefix = dist.PrefixStore(uuid.uuid4().hex, store)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(prefix, rank, ranks, timedelta(seconds=timeout_s))
            results[rank] = body(rank, group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout_s)
    for error in errors:
        if error is not None:
            raise error
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return results


class _WholeGroups:
    """A backend that makes calls as groups, over gloo with one tag: a rank that has made a group's calls does nothing else until all of them are
    over. That is NCCL at its strictest, a device that runs everything in the order in which it was issued."""

    def __init__(self, group: Any, own_tag: int) -> None:
        self.group, self.own_tag, self.calls = group, own_tag, list[tuple[Callable[..., Any], list[torch.Tensor], int]]()

    def _start_coalescing(self) -> None:
        assert not self.calls

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append((self.group.send, tensors, peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append((self.group.recv, tensors, peer))

    def _end_coalescing(self) -> Any:
        for work in [call(tensors, peer, self.own_tag) for call, tensors, peer in self.calls]:
            work.wait()
        self.calls.clear()
        return _Over()


class _Over:
    def wait(self) -> None: ...


def grouped(group: Any, communicator: int = 0) -> GroupedTransport:
    """Messages of a rank as on NCCL, on one of several communicators."""
    return GroupedTransport(_WholeGroups(group, communicator), torch.device("cpu"))


def whole_model(model: str, seed: int = 0) -> tuple[torch.nn.Module, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    from meshwright.capture.resolve import build_model

    module = build_model(model, device="cpu", seed=seed).module
    return module, dict(module.named_parameters()), dict(module.named_buffers())
