"""Capture that leaves blocks out gives the graph that a capture of all blocks gives, call by call; where they are not alike it takes all."""

from __future__ import annotations

import functools

import msgspec
import pytest
import repeated_models

from meshwright.capture import graph as capturing
from meshwright.capture import repeats
from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.graph.graph import OpGraph
from meshwright.graph.liveness import peak_bytes

MODELS = repeated_models.__file__


@pytest.fixture(autouse=True)
def _every_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MIN_CALLS_LEFT_OUT", 1)


@functools.cache
def of_all(name: str) -> OpGraph:
    return capture(f"{MODELS}:{name}", loss="mse", scalable=False, whole=True)


def left_out(graph: OpGraph) -> bool:
    return any(note.startswith("blocks alike") for note in graph.notes)


def plain(graph: OpGraph, names: dict[str, str]) -> OpGraph:
    """With other names of joint calls, without notes."""
    def of(name: str) -> str:
        return names.get(name, name)

    joint = tuple(msgspec.structs.replace(j, name=of(j.name), inputs=tuple(map(of, j.inputs))) for j in graph.joint)
    storages = tuple(msgspec.structs.replace(s, owner=of(s.owner)) for s in graph.joint_storages)
    gradients = {p: of(g) for p, g in graph.gradients.items()}
    return msgspec.structs.replace(graph, joint=joint, joint_storages=storages, gradients=gradients, notes=(), scaling=None)


def same(few: OpGraph, whole: OpGraph) -> bool:
    names = {a.name: b.name for a, b in zip(few.joint, whole.joint, strict=True)}
    assert len({j.name for j in few.joint}) == len(few.joint) and list(few.gradients) == list(whole.gradients)
    return plain(few, names) == plain(whole, {}) and peak_bytes(few) == peak_bytes(whole)


@pytest.mark.parametrize("name", ["glue", "two_stacks", "in_turns", "long_memory", "tied_weight"])
def test_the_graph_is_that_of_all_blocks(name: str) -> None:
    few, whole = capture(f"{MODELS}:{name}", loss="mse", scalable=False), of_all(name)
    assert left_out(few) and not left_out(whole) and same(few, whole)


def test_where_backward_is_not_alike_all_blocks_are_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_all("glue")
    monkeypatch.setattr(capturing, "unfolded", lambda joint, runs: None)
    few = capture(f"{MODELS}:glue", loss="mse", scalable=False)
    assert not left_out(few) and same(few, whole)


@pytest.mark.parametrize("name", ["one_differs", "wider", "memory", "from_afar", "over_two", "run_twice"])
def test_blocks_that_are_not_alike_or_read_from_afar_are_no_run(name: str) -> None:
    assert not repeats.repeated_runs(trace_forward(f"{MODELS}:{name}", loss="mse"))


def test_it_scales_to_other_batches_as_all_blocks_do() -> None:
    few, whole = (capture(f"{MODELS}:glue", loss="mse", whole=x) for x in (False, True))
    assert left_out(few) and few.scaling is not None and few.scaling == whole.scaling


def test_small_graphs_are_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MIN_CALLS_LEFT_OUT", 300)
    assert not repeats.repeated_runs(trace_forward(f"{MODELS}:glue", loss="mse"))
