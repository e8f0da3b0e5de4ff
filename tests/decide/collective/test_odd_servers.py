"""Many alike servers and some with parts down: stored once for the alike ones, the same as written out, near the optimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.check.folded import orbits
from meshwright.check.folded.fabric import folded_link_time
from meshwright.check.folded.program import check_folded
from meshwright.check.program.links import link_time
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, ForestColl
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.classic.direct_folded import alike_servers, passes_on
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll import forest, odd_servers, strategy
from meshwright.decide.collective.forestcoll.odd_servers import odd_forest
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.errors import FormatError, Unsupported
from meshwright.fabric.edit import without
from meshwright.io.fabric.name import load_fabric
from meshwright.io.plan.program import program_bytes, program_from_bytes
from meshwright.kernels.effort import NEVER
from meshwright.program.fold import expand, image_chunks
from meshwright.program.hash import program_hash
from meshwright.program.program import Fold, FoldAxis, Part, Program
from meshwright.program.validate import validate

FABRICS = [("dgx-h100:5", "box2/gpu3"), ("dgx-a100:5", "box4/nic6"), ("dgx-h100:5?net=rails", "box0/nic1")]


@pytest.fixture(autouse=True)
def few_ranks_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "MAX_FEW_RANKS", 4)
    monkeypatch.setattr(forest, "MAX_FEW_RANKS", 4)
    monkeypatch.setattr(odd_servers, "MIN_SHARE", Fraction(1, 2))  # among few servers what one passes on is no small part


def planned(op: str, fabric: str, *down: str, size: int = 5 << 20, **options: object) -> tuple[CollectiveProblem, CollectivePlan]:
    of = CollectiveProblem.on(without(load_fabric(fabric), down), op, size)
    kind = Direct if op == "all-to-all" else ForestColl
    return of, kind(fold=True, **options).plan(of, rng=np.random.default_rng(0))  # type: ignore[arg-type]


def loads_of(found: forest.Forest) -> Iterator[tuple[tuple[int, int], int]]:
    """Arcs and units of all trees and limbs, images written out one by one."""
    shift = found.symmetry
    assert shift is not None
    for tree in (*found.trees, *(limb.tree for limb in found.limbs)):
        for path in tree.paths:
            for u, v in pairwise(path):
                for m in range(shift.members):
                    yield (shift.image(u, m), shift.image(v, m)), tree.units


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("fabric", "down", "share"), [("dgx-h100:13", "box3/nic5", 0.995), ("dgx-a100:13", "box12/gpu0", 0.995),
                                                       ("dgx-h100:13?net=rails", "box0/nic7", 0.995),
                                                       ("dgx-h100:13", "box3/nic5 box3/nic6 box9/gpu0", 0.995)])  # fmt: skip
def test_trees_reach_the_optimum_with_parts_down(fabric: str, down: str, share: float, turned: bool) -> None:
    of = without(load_fabric(fabric), down.split())
    graph = rate_graph(of, tuple(d.name for d in of.devices))
    graph = graph.reversed() if turned else graph
    found = odd_forest(graph, max_trees=8, deadline=NEVER)
    assert found is not None and found.optimum == worst_cut(graph, [1] * graph.ranks).ratio and share <= found.ratio <= 1
    counted: dict[tuple[int, int], int] = {}
    for arc, units in loads_of(found):
        counted[arc] = counted.get(arc, 0) + units
    assert counted == found.load and max(Fraction(used, graph.arcs[arc]) for arc, used in counted.items()) == found.stretch


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
@pytest.mark.parametrize(("fabric", "down"), FABRICS[:2])
def test_folded_is_right_and_as_fast_as_written_out(op: str, fabric: str, down: str) -> None:
    options = {} if op == "all-to-all" else {"pieces": 2}
    of, plan = planned(op, fabric, down, **options)
    folded, box = plan.program, int(down[3])
    odd = range(8 * box, 8 * box + 8 - ("gpu" in down))
    assert folded.fold is not None and folded.fold.by_rank and folded.fold.fixed == tuple(odd) and folded.fold.members == 4
    assert check_folded(folded) == []
    whole = expand(folded)
    assert check_program(whole).ok
    assert simulated_time_s(whole, of.fabric, of.ranks, None) == pytest.approx(simulated_time_s(folded, of.fabric, of.ranks, None), rel=1e-9)
    loads, found = folded_link_time(folded, {}, of.fabric, of.ranks)
    assert not found and loads == link_time(whole, of.fabric, of.ranks)[0]
    read = program_from_bytes(program_bytes(folded))
    assert read.fold is not None and read.fold.by_rank and program_hash(read) == program_hash(folded)


@pytest.mark.parametrize("window", [1, 2])
def test_windows_and_two_servers_that_differ(window: int) -> None:
    _, plan = planned("reduce-scatter", "dgx-h100:6", "box1/nic5", "box4/gpu0", pieces=2, window=window)
    assert plan.program.fold is not None and len(plan.program.fold.fixed) == 15
    assert check_folded(plan.program) == [] and check_program(expand(plan.program)).ok
    again = ForestColl(**plan.options).plan(planned("reduce-scatter", "dgx-h100:6", "box1/nic5", "box4/gpu0")[0], rng=np.random.default_rng(1))
    assert program_bytes(again.program) == program_bytes(plan.program)


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
def test_limbs_take_turns_as_windows_do(op: str) -> None:
    """At once, a server that differs passes on a whole piece at the end; of few pieces that was a fifth of the time on 1,024 servers."""
    of, one = planned(op, "dgx-h100:9", "box1/nic5", "box4/gpu0", pieces=3, window=7, size=64 << 20)
    _, turns = planned(op, "dgx-h100:9", "box1/nic5", "box4/gpu0", pieces=3, window=2, size=64 << 20)
    assert turns.program.fold is not None and check_folded(turns.program) == [] and check_program(expand(turns.program)).ok
    assert len(turns.program.steps) > len(one.program.steps) and len(turns.program.channels) == len(one.program.channels)
    at_once, in_turns = (simulated_time_s(x.program, of.fabric, of.ranks, None) for x in (one, turns))
    assert in_turns < 0.95 * at_once


def test_pieces_are_as_many_as_the_alike_servers_need() -> None:
    """Parts of servers that differ are a small share of a shard each: their size is no reason for few pieces."""
    of, plan = planned("all-gather", "dgx-h100:40", "box3/nic5", size=1 << 30)
    time_s = simulated_time_s(plan.program, of.fabric, of.ranks, None)
    assert plan.notes["pieces"] >= 128 and Fraction(plan.bound.value) > 0.97 * time_s


def test_blocks_go_by_the_links_that_are_left() -> None:
    """A rank that lost its link sends and receives by all the others of its server, a seventh each, so none carries much more."""
    of, plan = planned("all-to-all", "dgx-h100:13", "box3/nic5", size=13 * 8 * 84 * 4096)
    busy = folded_link_time(plan.program, {}, of.fabric, of.ranks)[0]
    index = {(x.src, x.dst): i for i, x in enumerate(of.fabric.links)}
    left = [busy[index[f"box3/nic{i}", "ib"]] for i in range(8) if i != 5]
    assert max(left) < Fraction(21, 20) * min(left) and max(left) < Fraction(101, 100) * Fraction(plan.bound.value)


def test_few_servers_pass_on_too_and_are_written_out() -> None:
    of = CollectiveProblem.on(without(load_fabric("dgx-h100:4"), ["box1/nic5"]), "all-to-all", 1 << 30)
    plan = Direct().plan(of, rng=np.random.default_rng(0))
    assert not passes_on(replace(of, size_bytes=1 << 20), alike_servers(of))  # type: ignore[arg-type]
    assert plan.program.fold is None and plan.options["fold"] is None and check_program(plan.program).ok
    other = Direct(fold=False).plan(of, rng=np.random.default_rng(0))
    assert simulated_time_s(plan.program, of.fabric, of.ranks, None) < 0.7 * simulated_time_s(other.program, of.fabric, of.ranks, None)


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-to-all"])
def test_mistakes_are_found_on_the_stored_lanes(op: str) -> None:
    """Random damage to one stored step or channel: what the whole form shows wrong is not called right."""
    folded = planned(op, *FABRICS[0], **({} if op == "all-to-all" else {"pieces": 1}))[1].program
    s, rng, wrong = folded.steps, np.random.default_rng(0), 0
    for turn in range(18):
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
    assert wrong > 3


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
def test_chunks_that_travel_together_are_followed_as_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is cut for a server that stays into as many parts as there are alike ones: 1,022, of 8,191 shards, were too many to follow."""
    folded = planned(op, "dgx-h100:13", "box2/gpu3", pieces=1)[1].program
    s = folded.steps
    monkeypatch.setattr(orbits, "MAX_MOVES", int(s.count.sum()) // 4)
    assert check_folded(folded) == []
    step = int(np.flatnonzero(s.parts & Part.STORE)[0])
    parts = s.parts.copy()
    parts[step] ^= int(Part.STORE)
    assert check_folded(replace(folded, steps=replace(s, parts=parts)))


def moved_otherwise(p: Program, shift: int) -> Program:
    assert p.fold is not None
    return replace(p, fold=replace(p.fold, buffer_shift=np.full_like(p.fold.buffer_shift, shift)))


@pytest.mark.parametrize(("op", "text"), [("all-gather", "move once round"), ("all-to-all", "not each other's images")])
def test_a_fold_that_moves_chunks_otherwise_is_not_proved(op: str, text: str) -> None:
    folded = planned(op, *FABRICS[0])[1].program
    with pytest.raises(Unsupported, match=text):
        check_folded(moved_otherwise(folded, int(folded.fold.buffer_shift.max()) * 2))  # type: ignore[union-attr]


def test_blocks_move_with_their_ranks() -> None:
    fold = Fold((FoldAxis("server", 3, 1, "shift"),), np.array([[2]], np.int32), (1,), by_rank=True)  # ranks 0 -> 2 -> 3 -> 0, 1 stays
    chunks = np.arange(24)
    goes = image_chunks(fold, 4, (1,), np.full(24, 24), np.full((1, 24), 2), chunks)
    assert goes[:6].tolist() == list(range(12, 18)) and goes[6:12].tolist() == [8, 9, 10, 11, 6, 7] and goes[18:].tolist() == list(range(6))
    assert sorted(goes.tolist()) == chunks.tolist()


def test_a_fold_by_rank_needs_a_block_for_every_rank() -> None:
    folded = planned("all-gather", *FABRICS[0])[1].program
    chunks = folded.buffers.chunks.copy()
    chunks[0] += 1
    with pytest.raises(FormatError, match="one block for each of 39 ranks"):
        validate(replace(folded, buffers=replace(folded.buffers, chunks=chunks)))


def test_servers_that_are_not_mostly_alike_have_other_trees() -> None:
    def found(fabric: str, *down: str) -> bool:
        of = load_fabric(fabric)
        of = without(of, down) if down else of
        return odd_forest(rate_graph(of, tuple(d.name for d in of.devices)), max_trees=8, deadline=NEVER) is not None

    assert not found("dgx-h100:5") and not found("dgx-h100:2", "box0/nic1")
    assert not found("dgx-h100:5", "box2/gpu5<->box2/nvswitch")  # what is left of it cannot pass on what entered elsewhere
