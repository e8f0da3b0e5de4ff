"""Trees of one root as images of few, stored folded with the root's server staying where it is: as good as the optimum, the same as written out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.check.folded.fabric import folded_link_time
from meshwright.check.folded.program import check_folded
from meshwright.check.program.links import link_time
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, ForestColl
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll import one_root, strategy
from meshwright.decide.collective.forestcoll.one_root import one_root_forest
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.errors import FormatError, Unsupported
from meshwright.fabric.edit import without
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.io.plan.program import program_bytes, program_from_bytes
from meshwright.kernels.effort import NEVER
from meshwright.program.fold import expand, image, representative
from meshwright.program.program import Part, Program
from meshwright.program.validate import validate


def planned(op: str, fabric: str | Fabric = "dgx-a100:4", root: int = 3, **options: object) -> tuple[CollectiveProblem, CollectivePlan]:
    of = CollectiveProblem.on(load_fabric(fabric) if isinstance(fabric, str) else fabric, op, 3 << 16, root=root)
    return of, ForestColl(fold=True, **options).plan(of, rng=np.random.default_rng(0))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few_ranks_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "MAX_FEW_RANKS", 4)


@pytest.mark.parametrize("fabric", ["dgx-h100:3", "dgx-a100:4", "dgx-a100:4?net=spine", "dgx-h100:3?net=rails"])
@pytest.mark.parametrize("turned", [False, True])
def test_trees_reach_the_optimum_whatever_server_the_root_is_in(fabric: str, turned: bool) -> None:
    of = load_fabric(fabric)
    graph = rate_graph(of, tuple(d.name for d in of.devices))
    graph = graph.reversed() if turned else graph
    for root in (0, 13, graph.ranks - 1):
        weight = [int(r == root) for r in range(graph.ranks)]
        optimum = worst_cut(graph, weight).ratio
        found = one_root_forest(graph, weight, trees=None, max_trees=8, deadline=NEVER)
        assert found is not None and found.optimum == optimum and found.ratio >= 0.99 and found.symmetry is not None
        # Loads counted tree by tree, images written out, are those that the symmetry says.
        counted: dict[tuple[int, int], int] = {}
        for tree in found.every_tree():
            for path in tree.paths:
                for arc in pairwise(path):
                    counted[arc] = counted.get(arc, 0) + tree.units
        assert counted == found.load
        assert all(used <= found.stretch * graph.arcs[arc] for arc, used in counted.items())


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@pytest.mark.parametrize("root", [0, 11, 31])
@pytest.mark.parametrize("window", [None, 1, 2])
def test_folded_is_right_and_as_fast_as_written_out(op: str, root: int, window: int | None) -> None:
    of, plan = planned(op, root=root, pieces=2, window=window)
    folded = plan.program
    assert folded.fold is not None and folded.fold.fixed == tuple(range(root // 8 * 8, root // 8 * 8 + 8)) and folded.fold.members == 3
    assert check_folded(folded) == []
    whole = expand(folded)
    assert check_program(whole).ok and check_program(folded).ok
    time_s = simulated_time_s(folded, of.fabric, of.ranks, None)
    assert simulated_time_s(whole, of.fabric, of.ranks, None) == pytest.approx(time_s, rel=1e-9)
    loads, found = folded_link_time(folded, {}, of.fabric, of.ranks)
    assert not found and loads == link_time(whole, of.fabric, of.ranks)[0]
    again = ForestColl(**plan.options).plan(of, rng=np.random.default_rng(1))
    assert program_bytes(again.program) == program_bytes(folded)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_mistakes_are_found_on_the_stored_lanes(op: str) -> None:
    """Random damage to one stored step or channel: what the whole form shows wrong is not called right."""
    folded = planned(op, pieces=1)[1].program
    s, rng, wrong = folded.steps, np.random.default_rng(0), 0
    for turn in range(24):
        step = int(rng.integers(len(s)))
        column = "dst_chunk" if s.dst_buffer[step] >= 0 else "src_chunk"
        moved, parts, dst = getattr(s, column).copy(), s.parts.copy(), folded.channels.dst.copy()
        moved[step] = (moved[step] + 1) % int(folded.buffers.chunks[0])
        parts[step] ^= int(Part.STORE)
        dst[int(rng.integers(len(dst)))] = int(rng.integers(folded.ranks))
        mutant = [
            replace(folded, steps=replace(s, **{column: moved})), replace(folded, steps=replace(s, parts=parts)),
            replace(folded, channels=replace(folded.channels, dst=dst)),
        ][turn % 3]  # fmt: skip
        try:
            whole = check_program(expand(mutant))
        except (FormatError, Unsupported):
            continue
        try:
            proved = not check_folded(mutant)
        except Unsupported:
            proved = False
        assert not proved or whole.ok, (turn, step, whole.findings)
        wrong += not whole.ok
    assert wrong > 8


def test_lanes_of_a_rank_that_stays_must_keep_to_chunks_of_their_own() -> None:
    """The root's server passes on each image's part; a lane that touched another's would race with its own image."""
    folded = planned("broadcast", pieces=1)[1].program
    assert folded.fold is not None
    s, shift = folded.steps, int(folded.fold.buffer_shift[0, 0])
    stays = np.isin(folded.lanes.actor[folded.lane_of_step()], folded.fold.fixed)
    step = int(np.flatnonzero(stays & ((s.parts & Part.RECV) != 0))[0])
    moved = s.dst_chunk.copy()
    moved[step] = (moved[step] + shift) % int(folded.buffers.chunks[0])
    with pytest.raises(Unsupported, match="touch the same chunks"):
        check_folded(replace(folded, steps=replace(s, dst_chunk=moved)))


def test_a_root_that_is_moved_is_not_proved() -> None:
    folded = planned("broadcast", pieces=1)[1].program
    other = replace(folded.contracts[0], root=3 + 8 if folded.contracts[0].root < 8 else 0)
    with pytest.raises(Unsupported, match="root is moved"):
        check_folded(replace(folded, contracts=(other,)))


def found_on(fabric: Fabric, root: int) -> bool:
    graph = rate_graph(fabric, tuple(d.name for d in fabric.devices))
    weight = [int(r == root) for r in range(graph.ranks)]
    return one_root_forest(graph, weight, trees=None, max_trees=8, deadline=NEVER) is not None


def test_several_servers_that_differ_need_many_that_do_not() -> None:
    whole = load_fabric("dgx-a100:5")
    assert found_on(without(whole, ["box1/gpu2"]), 0) and found_on(without(whole, ["box1/gpu2"]), 9)
    assert found_on(without(whole, ["box1/gpu2", "box0/gpu2"]), 0)  # the root's own server may differ besides
    assert not found_on(without(whole, ["box1/gpu2", "box2/gpu2"]), 0)  # two others would pass on half as much again as they receive
    assert found_on(without(load_fabric("dgx-h100:25"), ["box1/gpu2", "box2/nic5"]), 0)
    assert not found_on(load_fabric("dgx-a100:2"), 0)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@pytest.mark.parametrize("down", [["box1/gpu2"], ["box2/nic5"], ["box1/gpu2", "box3/nic0"]])
def test_servers_with_a_part_down_stay_where_they_are(op: str, down: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_root, "MIN_SHARE", 0)
    of, plan = planned(op, without(load_fabric(f"dgx-h100:{3 + len(down)}"), down), root=3, pieces=2)
    folded = plan.program
    stays = [r for r, name in enumerate(of.ranks) if name.partition("/")[0] in {"box0", *(part.partition("/")[0] for part in down)}]
    assert folded.fold is not None and folded.fold.fixed == tuple(stays) and folded.fold.members == 2
    assert check_folded(folded) == []
    whole = expand(folded)
    assert check_program(whole).ok
    time_s = simulated_time_s(folded, of.fabric, of.ranks, None)
    assert simulated_time_s(whole, of.fabric, of.ranks, None) == pytest.approx(time_s, rel=1e-9)
    assert folded_link_time(folded, {}, of.fabric, of.ranks)[0] == link_time(whole, of.fabric, of.ranks)[0]


def test_a_fold_with_ranks_that_stay_is_written_and_read() -> None:
    folded = planned("reduce", root=9, pieces=2)[1].program
    read = program_from_bytes(program_bytes(folded))
    assert read.fold is not None and read.fold.fixed == tuple(range(8, 16)) and program_bytes(read) == program_bytes(folded)
    assert read.fold.plain_buffers(read.buffers.actor) == folded.ranks == len(expand(read).buffers)


def test_ranks_that_stay_are_where_they_are() -> None:
    fold = planned("broadcast", root=9, pieces=1)[1].program.fold
    assert fold is not None
    ranks = np.arange(32)
    for member in range(3):
        moved = image(fold, ranks, (member,))
        assert sorted(moved.tolist()) == list(range(32)) and moved[8:16].tolist() == list(range(8, 16))
    assert image(fold, ranks, (1,)).tolist() == [*range(16, 24), *range(8, 16), *range(24, 32), *range(8)]
    assert representative(fold, ranks).tolist() == [*range(8), *range(8, 16), *range(8), *range(8)]


@pytest.mark.parametrize(("fixed", "text"), [((3, 1), "rising"), ((40,), "rising"), ((1,), "of which 1 stay")])
def test_ranks_that_stay_must_be_some_of_the_ranks(fixed: tuple[int, ...], text: str) -> None:
    folded = planned("broadcast", pieces=1)[1].program
    assert folded.fold is not None
    with pytest.raises(FormatError, match=text):
        validate(replace(folded, fold=replace(folded.fold, fixed=fixed)))


def test_only_transfers_between_whole_buffers_have_ranks_that_stay() -> None:
    folded = planned("broadcast", pieces=1)[1].program
    alias = folded.buffers.alias_of.copy()
    alias[1] = 0
    mutant: Program = replace(folded, buffers=replace(folded.buffers, alias_of=alias))
    with pytest.raises(Unsupported, match="ranks that stay"):
        expand(mutant)
