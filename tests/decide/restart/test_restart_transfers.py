"""Every byte of a restart against element-wise masks, placements against brute force, times against bounds, and what is lost is named."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from meshwright.cost import Cost
from meshwright.decide.restart import RestartProblem, estimate_restart, plan_transfers, require_complete, reuse_bytes, reuse_placement, with_storage
from meshwright.decide.restart.problem import STORAGE
from meshwright.drive.plans import read_fabric
from meshwright.errors import Infeasible, UsageError
from meshwright.plan.regions import TensorSpec, minus, place, region_along, whole_region
from meshwright.testing.restarts import SHAPES, TENSORS, problems


def mask(name, region):
    found = np.zeros(SHAPES[name], bool)
    for box in region:
        found[tuple(slice(a, b) for a, b in box)] = True
    return found


@given(problems())
def test_pieces_are_what_is_needed_from_those_who_have_it(problem):
    found = plan_transfers(problem)
    for rank, needs in enumerate(problem.needs):
        for name in SHAPES:
            count = np.zeros(SHAPES[name], int)
            for piece in found.pieces:
                if (piece.rank, piece.tensor) == (rank, name):
                    part = mask(name, [piece.box])
                    assert not np.any(part & ~mask(name, problem.files[piece.file][name])), "the file does not hold that"
                    if piece.source == STORAGE:
                        assert piece.file in problem.stored
                    else:
                        assert problem.placement[piece.source] in problem.homes[piece.file]
                    count += part
            lost = np.zeros(SHAPES[name], int)
            for x in found.lost:
                if (x.rank, x.tensor) == (rank, name):
                    lost += mask(name, [x.box])
            assert np.array_equal(count + lost, mask(name, needs.get(name, ())).astype(int)), "each needed element once"
            here = [f for f, where in problem.homes.items() if set(where) & set(problem.placement)] + list(problem.stored)
            reach = sum((mask(name, problem.files[f].get(name, ())).astype(int) for f in here), np.zeros(SHAPES[name], int)) > 0
            assert not np.any(lost[reach]), "lost although somebody has it"
            own = [f for f, where in problem.homes.items() if problem.placement[rank] in where]
            local = sum((mask(name, problem.files[f].get(name, ())).astype(int) for f in own), np.zeros(SHAPES[name], int)) > 0
            moved = [p for p in found.pieces if (p.rank, p.tensor) == (rank, name) and p.source != rank]
            assert not any(np.any(local & mask(name, [p.box])) for p in moved), "moved although it is in place"
    assert sum(found.received_bytes) == sum(found.sent_bytes)
    assert sum(found.links.values()) == found.moved_bytes
    lost = sum(problem.size_bytes(x.tensor, x.box) for x in found.lost)
    assert sum(found.needed_bytes) == sum(found.reused_bytes) + found.moved_bytes + lost


@given(problems())
def test_the_placement_keeps_most_bytes_in_place(problem):
    on = [[f for f, where in problem.homes.items() if d in where] for d in ("d0", "d1", "d2", "d3")]
    reuse = reuse_bytes(TENSORS, problem.needs, [[problem.files[f] for f in files] for files in on])
    for i, needs in enumerate(problem.needs):
        for j, files in enumerate(on):
            here = {n: sum((mask(n, problem.files[f].get(n, ())) for f in files), np.zeros(SHAPES[n], int)) > 0 for n in needs}
            assert reuse[i, j] == sum(int((mask(n, r) & here[n]).sum()) * TENSORS[n].item_bytes for n, r in needs.items())
    found = reuse_placement(reuse)
    assert -found.cost == max(sum(int(reuse[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(4), len(problem.needs)))
    allowed = np.array([[i % 2 == j % 2 for j in range(4)] for i in range(len(problem.needs))])
    assert all(allowed[i, j] for i, j in enumerate(reuse_placement(reuse, allowed).column))


@given(problems())
def test_no_restart_beats_its_bound(problem):
    fabric = read_fabric("laptop:4")
    names = dict(zip(("d0", "d1", "d2", "d3"), (d.name for d in fabric.devices), strict=True))
    moved = RestartProblem(
        tensors=TENSORS, needs=problem.needs, files=problem.files, homes={f: tuple(names[d] for d in w) for f, w in problem.homes.items()},
        placement=tuple(names[d] for d in problem.placement), stored=problem.stored,
    )  # fmt: skip
    found = plan_transfers(moved)
    if found.lost:
        return
    estimate = estimate_restart(moved, found, fabric, Cost(), 10**6)
    assert estimate.time_s >= float(estimate.bound_s) * (1 - 1e-9)
    assert (estimate.program is None) == (found.moved_bytes == 0)
    stored = sum(found.stored_bytes)
    if stored and not sum(found.received_bytes):
        assert estimate.time_s >= stored / 10**6


def test_storage_gives_each_lost_byte_at_its_rate():
    shape = (1000,)
    tensors = {"param:a": TensorSpec(shape, 4)}
    fabric = read_fabric("laptop:2")
    problem = RestartProblem(
        tensors=tensors, needs=({"param:a": whole_region(shape)},), files={"f0": {"param:a": whole_region(shape)}}, homes={},
        placement=(fabric.devices[0].name,), stored=frozenset({"f0"}),
    )  # fmt: skip
    estimate = estimate_restart(problem, plan_transfers(problem), fabric, Cost(), 4000)
    assert estimate.bound_s == Fraction(1) and estimate.bound_where == "what only storage holds"
    assert estimate.time_s == pytest.approx(1.0, rel=0.01)
    with pytest.raises(UsageError, match="at least 1 byte"):
        with_storage(fabric, 0)
    with pytest.raises(UsageError, match="actor called"):
        with_storage(with_storage(fabric, 1), 1)


def test_a_server_sends_to_its_own_and_senders_take_turns():
    shape = (8,)
    tensors = {f"param:{x}": TensorSpec(shape, 4) for x in "abcd"}
    everything = {n: whole_region(shape) for n in tensors}
    problem = RestartProblem(
        tensors=tensors, needs=(everything, everything, everything, {}), files={"f0": everything, "f1": everything, "f3": everything},
        homes={"f0": ("d0",), "f1": ("d1",), "f3": ("d3",)}, placement=("d0", "d1", "d2", "d3"), servers=("s", "s", "s", "t"),
    )  # fmt: skip
    found = plan_transfers(problem)
    assert found.links == {(0, 2): 64, (1, 2): 64}  # two tensors from each in the server, none from outside


def test_lost_shards_are_named_with_their_replicas():
    half = {"param:a": region_along((6, 4), 0, [(0, 3)])}
    problem = RestartProblem(
        tensors=TENSORS, needs=({"param:a": whole_region((6, 4))},), files={"f0": half, "f1": {"param:a": region_along((6, 4), 0, [(3, 6)])}},
        homes={"f0": ("d0",), "f1": ("d9",)}, placement=("d0",),
    )  # fmt: skip
    found = plan_transfers(problem)
    with pytest.raises(Infeasible, match=r"48 bytes of 1 tensors are lost: param:a; only rank 1 \(d9\) had them") as caught:
        require_complete(problem, found, {"f1": "rank 1 (d9)"})
    assert caught.value.data["lost"] == [{"tensor": "param:a", "range": [[3, 6], [0, 4]], "size_bytes": 48, "replicas": ["rank 1 (d9)"]}]
    assert caught.value.exit_code == 3
    gone = RestartProblem(tensors=TENSORS, needs=problem.needs, files={}, homes={}, placement=("d0",))
    with pytest.raises(Infeasible, match="no file has them"):
        require_complete(gone, plan_transfers(gone), {})


def test_places_in_the_local_tensor():
    region = region_along((8, 2), 0, [(0, 2), (5, 8)])
    assert place(region, ((6, 8), (0, 1))) == ((3, 5), (0, 1))
    assert place(((),), ()) == ()
    with pytest.raises(UsageError, match="is in no box"):
        place(region, ((2, 3), (0, 1)))
    assert minus(region, ((0, 8), (0, 1))) == [((0, 2), (1, 2)), ((5, 8), (1, 2))]
