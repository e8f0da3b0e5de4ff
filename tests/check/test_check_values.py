"""What collectives deliver and what training steps add up: each way to be wrong, named."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from check_programs import (
    Training,
    chain_broadcast,
    direct_exchange,
    ring_all_gather,
    ring_all_reduce,
    training_layout,
    tree_all_reduce,
    two_groups,
    windowed_reduce,
)

from meshwright.check import check_program
from meshwright.check.program import values as values_module
from meshwright.check.program.values import check_collective
from meshwright.check.training.step import check_training
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.program.builder import ProgramBuilder
from meshwright.program.calls import inline
from meshwright.program.program import Contract, Program
from meshwright.testing.interpreter import collective_is_right
from meshwright.testing.mutate_order import edge_list, rearranged, with_edges


def claim(p: Program, **changes: object) -> Program:
    assert p.contract is not None
    return replace(p, contracts=(replace(p.contract, **changes),))  # type: ignore[arg-type]


def test_a_contract_that_is_not_kept_names_rank_chunk_and_missing_ranks() -> None:
    """A reduce-scatter sold as an all-reduce: cut the second half off the ring."""
    b = ProgramBuilder(ranks=2, name="half")
    x = [b.buffer(r, chunks=2, chunk_bytes=4, role="input", name=f"x{r}") for r in range(2)]
    ch = [b.channel(0, 1), b.channel(1, 0)]
    for r in range(2):
        sent = b.lane(r).send(ch[r], x[r], 1 - r)
        b.lane(r).recv_add(ch[1 - r], x[r], r, after=[sent])
    whole = tuple((k, 0, 2) for k in x)
    b.contract = Contract(op="all-reduce", inputs=whole, outputs=whole)
    found = check_collective(b.build())
    assert [(f.witness["rank"], f.witness["chunk"], f.witness["missing_ranks"]) for f in found] == [(0, 1, [1]), (1, 0, [0])]
    assert check_program(claim(b.build(), op="reduce-scatter", outputs=((x[0], 0, 1), (x[1], 1, 1)))).ok


def test_a_contribution_added_twice_names_the_step_that_did_it() -> None:
    b = ProgramBuilder(ranks=2, name="twice")
    x = [b.buffer(r, chunks=1, chunk_bytes=4, role="input", name=f"x{r}") for r in range(2)]
    c = b.channel(0, 1)
    send, recv = b.lane(0), b.lane(1)
    for _ in range(2):
        send.send(c, x[0], 0)
        recv.recv_add(c, x[1], 0)
    whole = tuple((k, 0, 1) for k in x)
    b.contract = Contract(op="reduce", inputs=whole, outputs=whole, root=1)
    found = check_collective(b.build())
    assert len(found) == 1 and "is spoilt" in found[0].message and found[0].witness["step"] == 3


@pytest.mark.parametrize(
    ("outputs", "words"),
    [((0, 0, 4), "another chunk's data"), ((0, 0, 3), "has 3 chunks, a whole all-reduce has 4")],
)
def test_wrong_places_and_sizes(outputs: tuple[int, int, int], words: str) -> None:
    p = ring_all_reduce(4)
    assert p.contract is not None
    if words.startswith("another"):  # rank 0 also swaps two finished chunks
        assert "another chunk" in check_collective(swapped_output())[0].message
    else:
        found = check_collective(claim(p, outputs=(outputs, *p.contract.outputs[1:])))
        assert words in found[0].message


def swapped_output() -> Program:
    b = ProgramBuilder(ranks=1, name="swapped")
    x = b.buffer(0, chunks=2, chunk_bytes=4, role="input")
    y = b.buffer(0, chunks=2, chunk_bytes=4, role="output")
    lane = b.lane(0)
    lane.copy((x, 0), (y, 1))
    lane.copy((x, 1), (y, 0))
    b.contract = Contract(op="all-reduce", inputs=((x, 0, 2),), outputs=((y, 0, 2),))
    return b.build()


def test_what_was_never_written_is_said() -> None:
    b = ProgramBuilder(ranks=1)
    x, y = b.buffer(0, chunks=1, chunk_bytes=4), b.buffer(0, chunks=1, chunk_bytes=4)
    b.contract = Contract(op="all-gather", inputs=((x, 0, 1),), outputs=((y, 0, 1),))
    found = check_collective(b.build())
    assert "is never written" in found[0].message and found[0].witness["rank"] == 0


def test_half_chunks_are_followed() -> None:
    """A copy in other units than the chunks: the halves of a chunk may not change places."""
    for right in (True, False):
        b = ProgramBuilder(ranks=1)
        x, y = b.buffer(0, chunks=1, chunk_bytes=8), b.buffer(0, chunks=1, chunk_bytes=8)
        x2 = b.buffer(0, chunks=2, chunk_bytes=4, alias_of=x)
        y2 = b.buffer(0, chunks=2, chunk_bytes=4, alias_of=y)
        lane = b.lane(0)
        lane.copy((x2, 0), (y2, 0 if right else 1))
        lane.copy((x2, 1), (y2, 1 if right else 0))
        b.contract = Contract(op="all-reduce", inputs=((x, 0, 1),), outputs=((y, 0, 1),))
        assert check_program(b.build()).ok is right


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce"])
def test_planned_collectives_are_proved_and_replayed(op: str) -> None:
    from meshwright.decide.collective import CollectiveProblem, ForestColl, Ring

    links = tuple(Link(src=f"d{i}", dst=f"d{j}", rate_Bps=1 + (i + j) % 2) for i in range(3) for j in range(3) if i != j)
    fabric = Fabric(name="triangle", devices=tuple(Device(name=f"d{i}") for i in range(3)), links=links)
    problem = CollectiveProblem.on(fabric, op, 96)
    for strategy in (Ring(), Ring(bidirectional=True), ForestColl()):
        p = strategy.plan(problem, rng=np.random.default_rng(0)).program
        assert check_program(p).ok
        assert all(collective_is_right(p, seed) for seed in range(3))
        assert not check_program(claim(p, op="all-gather" if op == "all-reduce" else "all-reduce")).ok


def test_too_much_to_follow_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "MAX_CELLS", 3)
    verdict = check_program(tree_all_reduce(3))
    assert verdict.status == "unknown" and not verdict.ok and "too many chunks" in verdict.findings[0].message
    verdict.raise_if_wrong()  # unknown is not wrong, but it is no pass either


@pytest.mark.parametrize("op", ["scatter", "gather"])
def test_buffers_of_which_nothing_is_said_cost_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has a buffer as large as the job, but only the root's holds data or gets it."""
    ranks = 40

    def star(swapped: int) -> Program:
        """The root at rank 0 sends (gets) chunk i to (from) rank i; of ranks 1 and 2 the wrong ones where `swapped`."""
        b = ProgramBuilder(ranks=ranks)
        large = [b.buffer(r, chunks=ranks, chunk_bytes=8) for r in range(ranks)]
        small = [b.buffer(r, chunks=1, chunk_bytes=8) for r in range(ranks)]
        lanes = [b.lane(r) for r in range(ranks)]
        lanes[0].copy(*(((large[0], 0), (small[0], 0)) if op == "scatter" else ((small[0], 0), (large[0], 0))))
        for r in range(1, ranks):
            chunk = 3 - r if swapped and r < 3 else r
            if op == "scatter":
                channel = b.channel(0, r)
                lanes[0].send(channel, large[0], chunk)
                lanes[r].recv(channel, small[r], 0)
            else:
                channel = b.channel(r, 0)
                lanes[r].send(channel, small[r], 0)
                lanes[0].recv(channel, large[0], chunk)
        whole, parts = tuple((x, 0, ranks) for x in large), tuple((x, 0, 1) for x in small)
        inputs, outputs = (whole, parts) if op == "scatter" else (parts, whole)
        b.contract = Contract(op=op, inputs=inputs, outputs=outputs, root=0)
        return b.build()

    monkeypatch.setattr(values_module, "MAX_CELLS", 5 * ranks)  # held and moved; all buffers together have 8 times as many
    assert check_program(star(0)).ok
    wrong = check_program(star(1))
    assert wrong.status == "wrong" and "holds another chunk's data" in wrong.findings[0].message


@pytest.mark.parametrize(
    "plain",
    [
        ring_all_gather(4), ring_all_reduce(4, repeat=3), tree_all_reduce(5), two_groups(), chain_broadcast(4), windowed_reduce(4),
        *(direct_exchange(op, 4) for op in ("scatter", "gather", "all-to-all")),
    ], ids=["all-gather", "turns", "tree", "groups", "chain", "window", "scatter", "gather", "all-to-all"],
)  # fmt: skip
def test_cells_left_out_change_no_finding(plain: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in later turns, in windows, and of programs that claim something else."""
    first = plain.contracts[0]
    kinds = ("all-reduce", "all-gather", "broadcast", "gather", "reduce-scatter", "all-to-all", "scatter")
    programs = [plain, *(replace(plain, contracts=(replace(first, op=op), *plain.contracts[1:])) for op in kinds if op != first.op)]
    found = [check_collective(p) for p in programs]
    monkeypatch.setattr(values_module, "_claimed", lambda p: None)  # every cell has room
    assert found == [check_collective(p) for p in programs]
    assert not found[0] and any(found)


def test_a_crash_in_a_checker_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.check import whole

    def broken(*_: object) -> list[object]:
        raise ZeroDivisionError("oops")

    for name in ("check_wellformed", "check_deadlock", "check_races", "check_collective"):
        monkeypatch.setattr(whole, name, broken)
        verdict = check_program(ring_all_gather(3))
        assert verdict.status == "unknown" and "ZeroDivisionError: oops" in verdict.findings[0].message
        monkeypatch.undo()


# ---- training ----------------------------------------------------------------------------------------------------------
def training(**kw: int) -> tuple[Program, Training]:
    t = Training(training_layout(**kw))  # type: ignore[arg-type]
    return inline(t.program, t.programs).program, t


def test_without_names_or_with_other_ranks_nothing_is_proved() -> None:
    p, t = training(data=2)
    nameless = replace(p, buffers=replace(p.buffers, name=()))
    assert check_training(nameless, t.layout)[0].status == "unknown"
    assert check_training(replace(p, lanes=replace(p.lanes, repeat=p.lanes.repeat + 1)), t.layout)[0].status == "unknown"
    assert "has 8 ranks, the program 4" in check_training(p, training_layout(data=4))[0].message


def test_the_program_of_another_layout_is_refused() -> None:
    p, _ = training(data=2, microbatches=3)
    assert "times instead of" in check_training(p, training_layout(data=2, microbatches=4))[0].message


def edit_op(p: Program, name: str, **columns: int) -> Program:
    ops = p.ops
    k = ops.name.index(name)
    for column, value in columns.items():
        values = getattr(ops, column).copy()
        values[k] = value
        ops = replace(ops, **{column: values})
    return replace(p, ops=ops)


def test_ways_to_be_wrong_in_training() -> None:
    p, t = training(data=2, tensor=2, microbatches=2)
    assert check_training(p, t.layout) == []
    split = next(k for k in range(len(p.ops)) if p.ops.parts[k] == 2)
    parts = p.ops.part.copy()
    parts[split] = 1 - parts[split]
    found = check_training(replace(p, ops=replace(p.ops, part=parts)), t.layout)
    assert "must compute part" in found[0].message
    found = check_training(edit_op(p, "B", accumulate=0), t.layout)
    assert found == [] or "lacks" in found[0].message  # the first to add may as well overwrite
    reads = p.ops.reads
    emptied = type(reads).of([reads[i].tolist() if i != p.ops.name.index("B") else reads[i].tolist()[:3] for i in range(len(p.ops))])
    found = check_training(replace(p, ops=replace(p.ops, reads=emptied)), t.layout)
    assert any("does not read saved:" in f.message for f in found) and any("does not read grad:" in f.message for f in found)


def test_a_segment_whose_gradient_is_nowhere_is_not_proved() -> None:
    t = Training(training_layout(data=1, tensor=2, microbatches=2), untrained=("s0.2",))
    p = inline(t.program, t.programs).program
    found = check_training(p, t.layout)
    assert {f.status for f in found} == {"unknown"} and "reads no gradient of segment s0.2; are all its parameters frozen?" in found[0].message
    assert p.describe(found[0].witness["step"]) in found[0].message
    assert check_training(p, msgspec.structs.replace(t.layout, frozen=("w02",))) == []


def test_weights_may_not_change_before_they_are_used() -> None:
    """The optimizer moved to the front of its lane, waiting for nothing: it sees no gradient, and all others see new weights."""
    t = Training(training_layout(data=1))
    p = t.program
    optimizer = int(p.lanes.end[0]) - 1
    free = with_edges(p, [edge for edge in edge_list(p) if edge[0] != optimizer])
    lists = [list(range(int(a), int(b))) for a, b in zip(p.lanes.start, p.lanes.end, strict=True)]
    lists[0] = [optimizer, *lists[0][:-1]]
    verdict = check_program(rearranged(free, lists), programs=t.programs, layout=t.layout)
    assert verdict.status == "wrong"
    messages = " ".join(f.message for f in verdict.findings)
    assert "optimizer opt0" in messages and "of weights, which holds another value" in messages


EXCHANGES = {
    "all-to-all": direct_exchange("all-to-all", 3),
    "scatter": direct_exchange("scatter", 3, root=1),
    "uneven scatter": direct_exchange("scatter", 4, root=2, counts=(2, 0, 3, 1)),
    "gather": direct_exchange("gather", 3, root=2),
    "uneven gather": direct_exchange("gather", 4, root=0, counts=(1, 3, 0, 2)),
    "permute": direct_exchange("permute", 4, peers=(2, 0, -1, 3)),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_are_proved_replayed_and_told_apart(name: str) -> None:
    p = EXCHANGES[name]
    verdict = check_program(p)
    assert verdict.ok, verdict.findings
    assert all(collective_is_right(p, seed) for seed in range(5))
    c = p.contract
    assert c is not None
    wrong = {
        "all-to-all": {"outputs": (c.outputs[1], c.outputs[0], *c.outputs[2:])},
        "permute": {"peers": (0, 2, -1, 3)},
    }.get(c.op, {"root": (c.root + 1) % len(c.inputs)})
    changed = claim(p, **wrong)
    assert not check_program(changed).ok and not collective_is_right(changed, 0)


def test_groups_at_once_have_a_contract_each() -> None:
    p = two_groups()
    assert p.contract is None and len(p.contracts) == 4
    verdict = check_program(p)
    assert verdict.ok, verdict.findings
    assert collective_is_right(p, 3)
    broken = replace(p, contracts=(*p.contracts[:3], replace(p.contracts[3], ranks=(3, 1))))
    found = check_program(broken).findings
    assert found and found[0].witness == {"rank": 3}
    swapped = replace(p, contracts=(replace(p.contracts[0], op="all-gather"), *p.contracts[1:]))
    assert [f.witness["rank"] for f in check_program(swapped).findings] == [0, 1]
    assert "has 1 chunks, a whole all-gather has 2" in check_program(swapped).findings[0].message


@pytest.mark.parametrize(
    ("op", "changes", "words"),
    [
        ("scatter", {"outputs": ((3, 0, 1), (4, 0, 1), (5, 0, 0))}, "the parts have 2 chunks together, the input has 3"),
        ("all-to-all", {"inputs": ((0, 0, 2), (1, 0, 3), (2, 0, 3))}, "has 2 chunks, which are not 3 equal blocks"),
    ],
)
def test_contracts_that_are_no_whole_collective(op: str, changes: dict[str, object], words: str) -> None:
    found = check_collective(claim(direct_exchange(op, 3), **changes))
    assert any(words in f.message for f in found), found


def test_operators_inside_a_collective_are_undecided_and_named():
    b = ProgramBuilder(ranks=2, name="computes")
    x, y = (b.buffer(r, chunks=1, chunk_bytes=4, role=role) for r, role in enumerate(("input", "output")))
    channel = b.channel(0, 1)
    lane = b.lane(0)
    lane.compute(b.op("scale"))
    lane.send(channel, x, 0)
    b.lane(1).recv(channel, y, 0)
    b.contract = Contract(op="broadcast", inputs=((x, 0, 1), (y, 0, 1)), outputs=((x, 0, 1), (y, 0, 1)), root=0)
    verdict = check_program(b.build())
    assert verdict.status == "unknown" and any("step 0 computes 'scale'" in finding.message for finding in verdict.findings)


def sparse_exchange(*, forget: bool = False, name: str = "accumulate", reads: int = 2) -> ProgramBuilder:
    """Two ranks send each other their selection of their own input, whose bytes nobody knows, and add it to what they have selected."""
    b = ProgramBuilder(ranks=2, name="sparse")
    channels, sizes = [b.channel(0, 1), b.channel(1, 0)], [b.size(f"s{r}", lower=0, expected=16 + r, upper=48) for r in range(2)]
    ends = []
    for r in range(2):
        x = b.buffer(r, chunks=2, chunk_bytes=4000, role="input", name=f"x{r}")
        y = b.buffer(r, chunks=2, chunk_bytes=4000, role="output", name=f"y{r}")
        parts = b.buffer(r, chunks=4, chunk_bytes=24, name=f"parts{r}")
        work, out, into = b.lane(r, unit=0), b.lane(r), b.lane(r)
        picked = work.compute(b.op("select", reads=[(x, 0, 2)], writes=[(parts, 0, 2)]))
        out.transfer(send=channels[r], src=(parts, 0), count=2, size=sizes[r], after=[picked])
        got = into.transfer(recv=channels[1 - r], dst=(parts, 2), count=2, store=True, size=sizes[1 - r])
        work.compute(b.op(name, reads=[(parts, 0, 2 if forget else 2 * reads)], writes=[(y, 0, 2)]), after=[got])
        ends.append(((x, 0, 2), (y, 0, 2)))
    b.contract = Contract(op="all-reduce", inputs=tuple(x for x, _ in ends), outputs=tuple(y for _, y in ends))
    return b


def test_contributions_are_followed_whatever_their_size() -> None:
    assert check_program(sparse_exchange().build()).ok
    found = check_collective(sparse_exchange(forget=True).build())
    assert {tuple(f.witness["missing_ranks"]) for f in found} == {(0,), (1,)}


def added_in_place(accumulate: bool) -> ProgramBuilder:
    """Two ranks copy their input to their output and add the other's input to it with an op that adds to what it writes."""
    b = ProgramBuilder(ranks=2, name="in place")
    channels, ends = [b.channel(0, 1), b.channel(1, 0)], []
    for r in range(2):
        x = b.buffer(r, chunks=2, chunk_bytes=4, role="input", name=f"x{r}")
        y = b.buffer(r, chunks=2, chunk_bytes=4, role="output", name=f"y{r}")
        came = b.buffer(r, chunks=2, chunk_bytes=4, name=f"came{r}")
        work, out, into = b.lane(r, unit=0), b.lane(r), b.lane(r)
        work.compute(b.op("encode", reads=[(x, 0, 2)], writes=[(y, 0, 2)]))
        out.transfer(send=channels[r], src=(x, 0), count=2)
        got = into.transfer(recv=channels[1 - r], dst=(came, 0), count=2, store=True)
        work.compute(b.op("decode", reads=[(came, 0, 2)], writes=[(y, 0, 2)], accumulate=accumulate), after=[got])
        ends.append(((x, 0, 2), (y, 0, 2)))
    b.contract = Contract(op="all-reduce", inputs=tuple(x for x, _ in ends), outputs=tuple(y for _, y in ends))
    return b


def test_an_op_that_accumulates_adds_to_what_it_writes() -> None:
    assert check_collective(added_in_place(True).build()) == []
    found = check_collective(added_in_place(False).build())
    assert {tuple(f.witness["missing_ranks"]) for f in found} == {(0,), (1,)}


def test_an_op_that_nobody_knows_proves_nothing() -> None:
    verdict = check_program(sparse_exchange(name="shuffle").build())
    assert not verdict.ok and verdict.findings[0].status == "unknown" and "shuffle" in verdict.findings[0].message


def test_an_op_works_chunk_by_chunk_or_proves_nothing() -> None:
    b = ProgramBuilder(ranks=1, name="uneven")
    x, y = b.buffer(0, chunks=3, chunk_bytes=4, role="input"), b.buffer(0, chunks=3, chunk_bytes=4, role="output")
    b.lane(0, unit=0).compute(b.op("encode", reads=[(x, 0, 3)], writes=[(y, 0, 2)]))
    b.contract = Contract(op="all-reduce", inputs=((x, 0, 3),), outputs=((y, 0, 3),))
    with pytest.raises(Unsupported, match="chunk by chunk"):
        check_collective(b.build())


def test_symbols_between_views_prove_nothing() -> None:
    b = ProgramBuilder(ranks=2, name="views")
    x = [b.buffer(r, chunks=2, chunk_bytes=4, role="input") for r in range(2)]
    view = b.buffer(1, chunks=1, chunk_bytes=4, alias_of=x[1])
    size, channel = b.size("s", lower=0, expected=4, upper=4), b.channel(0, 1)
    b.lane(0).transfer(send=channel, src=(x[0], 0), size=size)
    b.lane(1).transfer(recv=channel, dst=(view, 0), store=True, size=size)
    b.contract = Contract(op="broadcast", inputs=tuple((k, 0, 1) for k in x), outputs=tuple((k, 0, 1) for k in x), root=0)
    with pytest.raises(Unsupported, match="lie in each other"):
        check_collective(b.build())
