"""Programs written as MSCCL files: every strategy's schedules replay in the interpreter of the executor's rules, or a limit is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msccl_executor_twin import hangs, replays
from msccl_files import FILES, ring_all_reduce

from meshwright.check import check_program
from meshwright.decide.collective import NAMES, OPERATIONS, CollectiveProblem, ForestColl, Ring
from meshwright.drive.handover import msccl
from meshwright.drive.handover.msccl import export_msccl, original_msccl, plan_of_msccl
from meshwright.drive.handover.verdicts import check_msccl
from meshwright.errors import CheckFailed, FormatError, Infeasible, MeshwrightError, TimeLimit, Unsupported
from meshwright.interop import to_msccl
from meshwright.interop.from_msccl import import_msccl
from meshwright.interop.msccl import ExecutorLimits, MscclAlgo
from meshwright.interop.to_msccl import MscclOptions, lower_to_msccl
from meshwright.interop.to_msccl_blocks import Pool
from meshwright.interop.to_msccl_buffers import moves_of
from meshwright.io.fabric.name import load_fabric
from meshwright.io.msccl import xml
from meshwright.io.msccl.xml import msccl_text, parse_msccl
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Contract, Program
from meshwright.program.tables import Csr
from meshwright.testing.fabrics import fabrics


def program_of(strategy: Any, op: str, fabric: str = "two-islands", size: int = 1 << 14, **more: Any) -> Program:
    return strategy.plan(CollectiveProblem.on(load_fabric(fabric), op, size, **more), rng=np.random.default_rng(0)).program


def right(algo: MscclAlgo, *, seeds: int = 3) -> None:
    text = msccl_text(algo)
    assert parse_msccl(text.encode()) == algo
    verdict = check_msccl(algo)
    assert verdict.ok
    depth = verdict.facts["smallest_fifo"]
    for held in {depth, 2}:  # what is printed suffices, and what the executor has
        replays(text, seeds=seeds, depth=held)
    assert depth == 1 or hangs(text, depth - 1)


@pytest.mark.sample(60)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_is_handed_over(name: str, op: str) -> None:
    if name == "taccl" and op not in ("all-gather", "all-to-all"):
        pytest.skip("its other operations are made of these, and its solver takes long")
    try:
        program = program_of(NAMES[name](), op)
    except (Unsupported, TimeLimit):
        return
    if op == "permute":
        with pytest.raises(Unsupported, match="MSCCL XML has no permute"):
            export_msccl(program)
        return
    done = export_msccl(program)
    right(done.algo)
    assert done.verdict.facts["smallest_fifo"] <= 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fabrics(min_devices=2, max_devices=6), st.sampled_from(OPERATIONS[:5]), st.integers(1, 4), st.data())
def test_schedules_on_random_fabrics_replay(fabric: Any, op: str, pieces: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, len(fabric.devices) - 1))
    strategy = data.draw(st.sampled_from([Ring(slices=pieces), ForestColl(pieces=pieces), ForestColl(pieces=pieces, trees=1, unroll=False)]))
    place = data.draw(st.sampled_from(["auto", "in", "out", "both"]))
    try:
        program = strategy.plan(CollectiveProblem.on(fabric, op, 1 << 12, root=root), rng=np.random.default_rng(0)).program
        algo = export_msccl(program, MscclOptions(blocks=128), place=place).algo
    except (Unsupported, Infeasible) as error:
        assert not isinstance(error, Unsupported) or error.data.get("limit", "blocks") in ("blocks", "channels", "steps", "nodes")
        return
    assert place in ("auto", "both") or (algo.in_place, algo.out_of_place) == ((1, 0) if place == "in" else (0, 1))
    right(algo, seeds=2)


def test_rings_are_written_as_vendors_write_them() -> None:
    """One block per rank: s, rrs ..., rrcs, rcs ..., r; in and out of place, no copies, no scratch."""
    algo = export_msccl(program_of(Ring(), "all-reduce")).algo
    kinds = [s.type for s in algo.gpus[1].blocks[0].steps]
    assert kinds == ["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"]
    assert (algo.channels, algo.in_place, algo.out_of_place) == (1, 1, 1) and all(g.s_chunks == 0 and len(g.blocks) == 1 for g in algo.gpus)
    ours, theirs = parse_msccl(msccl_text(algo).encode()), ring_all_reduce(4)
    assert [[s.type for s in g.blocks[0].steps] for g in ours.gpus] == [[s.type for s in g.blocks[0].steps] for g in theirs.gpus]


def test_halving_doubling_needs_two_messages() -> None:
    """Its fused steps receive from the partner that waits for what they send."""
    algo = export_msccl(program_of(NAMES["halving-doubling"](), "all-reduce")).algo
    assert check_msccl(algo).facts["smallest_fifo"] == 2
    right(algo)


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce"])
@pytest.mark.parametrize("place", ["in", "out", "both"])
def test_places(op: str, place: str) -> None:
    algo = export_msccl(program_of(ForestColl(), op), place=place).algo
    assert (algo.in_place, algo.out_of_place) == {"in": (1, 0), "out": (0, 1), "both": (1, 1)}[place]
    right(algo)
    if place != "in":
        assert not any("D" in s.parts and s.dst_buffer == "i" for _, _, s in algo.steps())


def test_separate_buffers_cannot_be_written_in_place() -> None:
    program = program_of(NAMES["direct"](), "all-to-all")
    with pytest.raises(Unsupported, match="do not coincide as those of an in-place all-to-all"):
        export_msccl(program, place="in")
    assert export_msccl(program).options.place == "out"


@pytest.mark.parametrize("repeats", [True, False])
def test_repeated_lanes_are_written_once(repeats: bool) -> None:
    program = program_of(ForestColl(pieces=6, unroll=not repeats), "all-gather")
    algo = export_msccl(program).algo
    right(algo)
    assert max(len(b.steps) for g in algo.gpus for b in g.blocks) == (1 if repeats else 6)


def test_long_blocks_are_cut_into_stretches() -> None:
    """A ring of 24 slices has 144 messages; stretches of them take other channels, one after another."""
    program = program_of(Ring(slices=24), "all-reduce")
    algo = export_msccl(program).algo
    assert max(len(b.steps) for g in algo.gpus for b in g.blocks) <= 64 and algo.channels > 1
    right(algo, seeds=2)
    whole = export_msccl(program, MscclOptions(limits=ExecutorLimits(steps=400))).algo
    assert whole.channels == 1


def refusal(program: Program, **options: Any) -> dict[str, Any]:
    with pytest.raises(Unsupported) as caught:
        export_msccl(program, MscclOptions(**options))
    assert str(caught.value.data["most"]) in caught.value.message and caught.value.hint
    return caught.value.data


def test_files_of_too_many_steps_are_refused_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_msccl, "MAX_WRITTEN_STEPS", 10)
    data = refusal(program_of(ForestColl(pieces=1), "all-gather"))
    assert data["limit"] == "written" and data["needed"] > data["most"] == 10


def test_more_peers_than_thread_blocks_are_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msccl, "lower_to_msccl", lambda *args: pytest.fail("written"))
    data = refusal(program_of(NAMES["direct"](), "all-gather", "laptop:5"), blocks=3)
    assert data == {"limit": "blocks", "needed": 4, "most": 3}  # a block sends to one peer only


def test_refusals_name_the_limit() -> None:
    trees = program_of(ForestColl(pieces=1), "all-gather")
    assert refusal(trees, blocks=1)["limit"] == "blocks"
    right(export_msccl(trees, MscclOptions(limits=ExecutorLimits(channels=1))).algo, seeds=1)  # all messages between two ranks share one
    assert refusal(trees, limits=ExecutorLimits(channels=1, steps=1))["limit"] == "channels"
    assert refusal(program_of(NAMES["direct"](), "all-gather"), limits=ExecutorLimits(blocks_per_channel=1, channels=2))["limit"] == "channels"
    long = program_of(Ring(slices=7), "all-reduce")
    assert refusal(long, stretch=1 << 30, limits=ExecutorLimits(steps=40))["limit"] == "steps"
    assert refusal(long, limits=ExecutorLimits(nodes=40, steps=400))["limit"] == "nodes"
    assert refusal(long, limits=ExecutorLimits(offset=20))["limit"] == "offset"
    waits = program_of(Ring(), "all-reduce")
    with pytest.raises(Unsupported) as caught:
        lower_to_msccl(waits, MscclOptions(merge=False, limits=ExecutorLimits(dependable_block=0)))
    assert caught.value.data["limit"] == "depid"


def sized(sizes: tuple[int, ...]) -> Program:
    """A broadcast from 0 of unequal parts, as an all-gather with only one contributor's worth of data per rank."""
    b = ProgramBuilder(ranks=2)
    data = [b.buffer(r, chunks=sum(sizes), chunk_bytes=4, role="input") for r in range(2)]
    there, back = b.channel(0, 1), b.channel(1, 0)
    b.lane(0).send(there, data[0], 0, sizes[0])
    b.lane(1).recv(there, data[1], 0, sizes[0])
    b.lane(1).send(back, data[1], sizes[0], sizes[1])
    b.lane(0).recv(back, data[0], sizes[0], sizes[1])
    starts = (0, sizes[0])
    b.contract = Contract(
        op="all-gather", inputs=tuple((data[r], starts[r], sizes[r]) for r in range(2)), outputs=tuple((d, 0, sum(sizes)) for d in data)
    )
    return b.build()


def test_what_the_format_cannot_say() -> None:
    assert check_program(sized((1, 2))).ok
    for program, message in (
        (sized((1, 2)), "inputs of different sizes cannot be said"),
        (replace(sized((1, 1)), contracts=()), "the program states no contract"),
        (replace(sized((1, 1)), contracts=sized((1, 1)).contracts * 2), "the program has several contracts"),
        (replace(sized((1, 1)), channels=replace(sized((1, 1)).channels, sets=Csr.of([[0]]))), "multicast and sums inside switches"),
    ):
        with pytest.raises(Unsupported, match=message):
            export_msccl(program)
    right(export_msccl(sized((2, 2))).algo)
    b = ProgramBuilder(ranks=1)
    b.lane(0).compute(b.op("F"))
    with pytest.raises(Unsupported, match="a program that computes"):
        export_msccl(b.build())
    b = ProgramBuilder(ranks=1)
    for repeat in (1, 2):
        x = b.buffer(0, chunks=2, chunk_bytes=4)
        b.lane(0, repeat=repeat).copy((x, 0), (x, 1))
    with pytest.raises(Unsupported, match="different numbers of slices"):
        export_msccl(b.build())
    b = ProgramBuilder(ranks=1)
    b.size("s", lower=0, expected=1, upper=2)
    with pytest.raises(Unsupported, match="sizes known only at run time"):
        export_msccl(b.build())
    part = sized((1, 1))
    part = replace(part, ranks=3, contracts=(replace(part.contracts[0], ranks=(0, 1)),))
    with pytest.raises(Unsupported, match="among some of the program's ranks only"):
        export_msccl(part)


def test_schedules_that_need_deep_channels_are_refused() -> None:
    """Three messages before the first receipt, both ways: legal at depth 3, and nothing that the executor can do."""
    b = ProgramBuilder(ranks=2)
    data = [b.buffer(r, chunks=6, chunk_bytes=4, role="output") for r in range(2)]
    ways = [b.channel(0, 1, depth=3), b.channel(1, 0, depth=3)]
    for r in range(2):
        lane = b.lane(r)
        for k in range(3):
            lane.send(ways[r], data[r], 3 * r + k)
        for k in range(3):
            lane.recv(ways[1 - r], data[r], 3 * (1 - r) + k)
    b.contract = Contract(op="all-gather", inputs=tuple((data[r], 3 * r, 3) for r in range(2)), outputs=tuple((d, 0, 6) for d in data))
    program = b.build()
    assert check_program(program).ok
    with pytest.raises(Unsupported) as caught:
        export_msccl(program)
    assert caught.value.data["limit"] == "depth" and "channels of depth 2" in caught.value.message


def test_a_wrong_program_is_never_written() -> None:
    program = program_of(Ring(), "all-reduce")
    broken = replace(program, steps=replace(program.steps, after_ptr=np.zeros_like(program.steps.after_ptr), after_step=program.steps.after_step[:0],
                                            after_lag=program.steps.after_lag[:0]))  # fmt: skip
    assert not check_program(broken).ok
    with pytest.raises(Unsupported, match=r"fails the (races|values) check"):
        export_msccl(broken, MscclOptions(merge=False))


# ---- imports -----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FILES)
def test_imports_can_be_exported_again(name: str) -> None:
    """A foreign file as a program, written anew: another file, also right."""
    algo = FILES[name]()
    for mode in algo.modes:
        made = import_msccl(algo, in_place=mode)
        assert check_program(made.program).ok
        right(export_msccl(made.program).algo, seeds=2)


def test_an_unchanged_import_is_written_as_it_was() -> None:
    algo = FILES["relay all-gather 4"]()
    text = msccl_text(algo)
    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-gather", 1 << 20)
    plan = plan_from_bytes(plan_bytes(plan_of_msccl(algo, text, problem, source="relay.xml")), where="plan.json")
    assert original_msccl(plan) == algo
    assert plan.bound is not None and plan.prediction is not None and plan.prediction.time_s >= float(plan.bound)
    other = program_of(Ring(), "all-gather")
    from meshwright.program.hash import program_hash

    changed = replace(plan, programs={program_hash(other): other}, cycle=(replace_program(plan.cycle[0], program_hash(other)),))
    assert original_msccl(changed) is None
    decision = next(iter(plan.decisions.values()))
    hostile = replace(plan, decisions={"collective:all-gather": {**decision, "notes": {"xml": "<!DOCTYPE a><a/>"}}})
    with pytest.raises(FormatError, match="DOCTYPE"):
        original_msccl(hostile)


def replace_program(entry: Any, name: str) -> Any:
    import msgspec

    return msgspec.structs.replace(entry, program=name)


def test_wrong_files_make_no_plan() -> None:
    algo = FILES["relay all-gather 4"]()
    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-gather", 1 << 20)
    for file, error, message in (
        (FILES["relay all-gather 2"](), Unsupported, "is for 2 gpus, 4 devices are given"),
        (FILES["all pairs all-reduce 4"](), Unsupported, "is a allreduce, not a all-gather"),
        (replace(algo, channels=0), CheckFailed, "nchannels is 0"),
    ):
        with pytest.raises(error, match=message):
            plan_of_msccl(file, "", problem, source="x.xml")


def test_no_error_is_untyped() -> None:
    """Whatever the program, the answer is a file that is right or a typed error."""
    from meshwright.testing.mutate import mutants

    program = program_of(Ring(), "all-gather")
    for m in mutants(program, np.random.default_rng(0), per_operator=2):
        if check_program(m.program).status == "ok":
            try:
                right(export_msccl(m.program).algo, seeds=1)
            except MeshwrightError:
                pass


@pytest.mark.parametrize("op", ["broadcast", "all-reduce"])
@pytest.mark.parametrize("pool", [False, True])
def test_large_files_say_the_same_in_fewer_bytes(op: str, pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program, how = program_of(ForestColl(), op), MscclOptions(place="in", pool=pool)
    long = lower_to_msccl(program, how)
    for module in (xml, to_msccl):
        monkeypatch.setattr(module, "MANY_STEPS", 1)
    brief = lower_to_msccl(program, how)
    text = msccl_text(brief)
    assert "\n" not in text and "> " not in text
    right(brief)
    monkeypatch.undo()
    assert len(text) < 0.95 * len(msccl_text(long))
    for (_, _, a), (_, _, b) in zip(long.steps(), brief.steps(), strict=True):  # all that the step's type, or its wait, reads
        assert (a.type, a.chunks, a.depid, a.hasdep) == (b.type, b.chunks, b.depid, b.hasdep)
        assert b.deps == (a.deps if a.depid >= 0 else 0)
        assert (b.src_offset, b.dst_offset) == tuple(o if part in a.parts else 0 for part, o in (("X", a.src_offset), ("D", a.dst_offset)))


def test_a_pool_is_dealt_out_anew_for_every_stretch() -> None:
    program = program_of(ForestColl(pieces=8), "all-gather")
    made = moves_of(program, "in", 71, 2)
    pool = Pool(*made)
    for stretch in (64, 3, 1, 64):
        fresh = Pool(*moves_of(program, "in", 71, 2)).blocks(stretch, 4)
        again = pool.blocks(stretch, 4)
        assert (again.blocks, again.connections, again.waits) == (fresh.blocks, fresh.connections, fresh.waits)
