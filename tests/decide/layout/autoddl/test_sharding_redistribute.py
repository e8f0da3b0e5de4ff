"""Redistributions: the table of bytes, nesting, shortest paths against another algorithm, and every one carried out on simulated ranks."""

from __future__ import annotations

from itertools import product
from math import prod

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_threads import QueueTransport, run_threads, spread, whole_of

from meshwright.check import check_program
from meshwright.decide.layout.autoddl.mesh import Axis, Mesh
from meshwright.decide.layout.autoddl.redistribute import Redistributor, Step, step_messages, step_sent
from meshwright.lower.sharding import Redistribution, redistribution_program
from meshwright.plan.sbp import State, coordinates, valid
from meshwright.run.dtensor.pieces import Place, cut
from meshwright.run.dtensor.pieces import whole_of as joined
from meshwright.run.dtensor.redistribute import LoneRedistribution


def mesh(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis(p, 1e-9 * (i + 1), 1e-6, 2e-6) for i, p in enumerate(sizes)), tuple(f"d{i}" for i in range(prod(sizes))))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        ("S0", "S1", lambda n, p: n * (p - 1) // p**2), ("S0", "B", lambda n, p: n * (p - 1) // p), ("P", "S0", lambda n, p: n * (p - 1) // p),
        ("P", "B", lambda n, p: 2 * n * (p - 1) // p), ("B", "S0", lambda n, p: 0), ("B", "P", lambda n, p: 0), ("S1", "P", lambda n, p: 0),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_table(p: int, source: str, target: str, share: object) -> None:
    shape = (8, 12)
    (step,) = Redistributor(mesh(p)).path(shape, 1, (source,), (target,))
    for at in coordinates((p,)):
        assert step_sent(shape, step, (p,), at) == share(96, p)  # type: ignore[operator]


def test_uneven_pieces_are_counted_as_they_are() -> None:
    gather = Step(0, ("S0",), ("B",))
    assert [step_sent((5, 3), gather, (2,), (r,)) for r in range(2)] == [9, 6]
    reduce = Step(0, ("P",), ("S0",))
    assert [step_sent((5, 3), reduce, (2,), (r,)) for r in range(2)] == [6, 9]
    assert [step_sent((5,), Step(0, ("P",), ("B",)), (4,), (r,)) for r in range(4)] == [3 + 6, 3 + 6, 4 + 3, 5]
    assert step_messages(Step(0, ("P",), ("B",)), (4,)) == 6


def test_an_outer_split_over_an_inner_one_of_the_same_dimension_is_no_local_slice() -> None:
    """OneFlow prices (B, S0) -> (S0, S0) with 0; pieces of the inner split are not where the outer one wants them."""
    r = Redistributor(mesh(2, 2))
    path = r.path((8, 8), 4, ("B", "S0"), ("S0", "S0"))
    assert any(s.name != "local" for s in path)
    assert r.cost_s((8, 8), 4, ("B", "S0"), ("S0", "S0")) > 0
    assert r.cost_s((8, 8), 4, ("S0", "B"), ("S0", "S0")) == 0


def states(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[State]:
    types = ["B", "P", *(f"S{d}" for d in range(len(shape)))]
    return [s for s in product(types, repeat=len(sizes)) if valid(shape, s, sizes)]


@pytest.mark.parametrize(("shape", "sizes"), [((8, 8), (2, 2)), ((5, 7), (2, 2)), ((4, 8, 6), (4,)), ((8, 8), (2, 2, 2))])
def test_paths_are_shortest_and_agree_with_the_table(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    r = Redistributor(mesh(*sizes))
    every = states(shape, sizes)
    graph = nx.DiGraph()
    graph.add_nodes_from(every)
    for a, b in product(every, every):
        axes = [i for i in range(len(sizes)) if a[i] != b[i]]
        if len(axes) == 1:
            i = axes[0]
            inner = {k for k in a[i + 1 :] if k[0] == "S"}
            if a[i] not in inner and b[i] not in inner:
                graph.add_edge(a, b, weight=r.step_time_s(shape, 4, Step(i, a, b)))
    table = r.table(shape, 4, every, every)
    for i, a in enumerate(every[:: max(1, len(every) // 8)]):
        lengths = nx.single_source_dijkstra_path_length(graph, a)
        row = every.index(a)
        for j, b in enumerate(every):
            assert r.cost_s(shape, 4, a, b) == pytest.approx(lengths[b], abs=1e-15), (a, b, i)
            assert table[row, j] == pytest.approx(lengths[b], abs=1e-15)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_costs_obey_the_triangle_inequality(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(4, 9), st.integers(4, 9)))
    sizes = (2, 2)
    r = Redistributor(mesh(*sizes))
    a, b, c = (data.draw(st.sampled_from(states(shape, sizes))) for _ in range(3))
    assert r.cost_s(shape, 4, a, c) <= r.cost_s(shape, 4, a, b) + r.cost_s(shape, 4, b, c) + 1e-15


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_redistribution_gives_the_same_tensor_and_sends_what_is_predicted(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(2,), (4,), (2, 2), (2, 3), (2, 2, 2)]))
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    every = states(shape, sizes)
    if data.draw(st.booleans()):
        blocked = tuple("S1/2" if i == 0 else "B" for i in range(len(sizes)))
        every = [*every, *([blocked] if valid(shape, blocked, sizes) else [])]
    a, b = data.draw(st.sampled_from(every)), data.draw(st.sampled_from(every))
    steps = Redistributor(mesh(*sizes)).path(shape, 8, a, b)
    whole = torch.randn(shape, dtype=torch.float64)
    pieces = spread(whole, a, sizes)
    way = Redistribution((shape,) * prod(sizes), a, tuple((s.axis, s.target) for s in steps), "test")
    lowered = redistribution_program(sizes, "float64", way)
    verdict = check_program(lowered.program, programs=lowered.callees)
    assert verdict.ok, verdict.findings

    def work(rank: int, transport: QueueTransport) -> tuple[torch.Tensor, int]:
        made = LoneRedistribution(sizes, rank, way, "float64", transport)
        return made.run(pieces[rank]), made.messages.sent_bytes.get("test", 0)

    found = run_threads(prod(sizes), work)
    for back in whole_of([x for x, _ in found], shape, b, sizes):
        torch.testing.assert_close(back, whole, rtol=1e-12, atol=1e-12)
    for at, (_, sent) in zip(coordinates(sizes), found, strict=True):
        assert sent == 8 * sum(step_sent(shape, s, sizes, at) for s in steps)


def test_maxima_and_splits_in_blocks() -> None:
    """Maximum instead of sum; and blocks of a dimension: each is cut alike."""
    for a, steps in ((("M", "B"), ((0, "B"),)), (("M", "M"), ((0, "S0"), (1, "B"), (0, "B"))), (("S1/2", "B"), ((0, "S0"), (0, "B")))):
        whole = torch.randint(100, (6, 8))
        pieces = spread(whole, a, (2, 2))
        way = Redistribution(((6, 8),) * 4, a, steps, "test")
        found = run_threads(4, lambda rank, wires, way=way, pieces=pieces: LoneRedistribution((2, 2), rank, way, "int64", wires).run(pieces[rank]))
        assert all(torch.equal(x, whole) for x in found)


@pytest.mark.parametrize("state", [("S0", "S1"), ("P", "S0"), ("B", "P"), ("M", "B"), ("S1/2", "B"), ("R", "R")])
def test_the_whole_of_all_pieces(state: State) -> None:
    whole = torch.randint(100, (4, 8))
    places = [Place((2, 2), at) for at in coordinates((2, 2))]
    assert torch.equal(joined(spread(whole, state, (2, 2)), (4, 8), state, places), whole)
    real = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(joined(spread(real, state, (2, 2)), (4, 8), state, places), real)


def test_pieces_are_those_of_torch_chunk() -> None:
    x = torch.arange(70).reshape(10, 7)
    found = [cut(x, ("S0", "S0"), Place((2, 2), at)) for at in coordinates((2, 2))]
    want = [piece for half in x.chunk(2) for piece in half.chunk(2)]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
