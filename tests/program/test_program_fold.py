"""Folded programs: their plain form, finding folds, and simulating them without expanding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from megatron_step import DURATIONS_S, Shape, boxes, build, ring

from meshwright.check import check_program
from meshwright.cost import Cost, Priced
from meshwright.errors import FormatError, MeshwrightError, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.calls import inline
from meshwright.program.fold import expand, generators, image, members, representative
from meshwright.program.fold_calls import inline_folded
from meshwright.program.fold_find import fold
from meshwright.program.program import Contract, Fold, FoldAxis, Program, Unit
from meshwright.simulate import folded as folded_simulation
from meshwright.simulate import simulate_folded, simulate_program
from meshwright.simulate.folded import fold_network

COST = Cost(table={key: Priced(value) for key, value in DURATIONS_S.items()})


def star(n: int, *, rates: int = 10**9, latency: float = 1e-6) -> Fabric:
    links = [Link(src=a, dst=b, rate_Bps=rates, latency_s=latency) for i in range(n) for a, b in ((f"d{i}", "hub"), ("hub", f"d{i}"))]
    return Fabric(name="star", devices=tuple(Device(name=f"d{i}") for i in range(n)), switches=(Switch(name="hub"),), links=tuple(links))


def names(n: int) -> list[str]:
    return [f"d{i}" for i in range(n)]


def plain_ring(n: int, chunk_bytes: int) -> Program:
    """A ring all-reduce written out, a send lane and a receive lane per rank."""
    b = ProgramBuilder(n, name="ring")
    data = [b.buffer(r, chunks=n, chunk_bytes=chunk_bytes, role="input") for r in range(n)]
    channels = [b.channel(r, (r + 1) % n, depth=2) for r in range(n)]
    for r in range(n):
        sends, receives = b.lane(r), b.lane(r)
        got: StepRef | None = None
        for k in range(2 * (n - 1)):
            sends.send(channels[r], data[r], (r - k) % n, after=[got] if got else [])
            got = (receives.recv_add if k < n - 1 else receives.recv)(channels[r - 1], data[r], (r - k - 1) % n)
    whole = tuple((data[r], 0, n) for r in range(n))
    b.contract = Contract(op="all-reduce", inputs=whole, outputs=whole)
    return b.build()


def doubling(n: int, size_bytes: int) -> Program:
    """Recursive doubling: rank r exchanges everything with r xor 1, 2, 4, ... and adds what it gets."""
    b = ProgramBuilder(n, name="doubling")
    data = [b.buffer(r, chunks=1, chunk_bytes=size_bytes, role="input") for r in range(n)]
    got = [b.buffer(r, chunks=n.bit_length() - 1, chunk_bytes=size_bytes) for r in range(n)]
    bits = [1 << k for k in range(n.bit_length() - 1)]
    channel = {(r, bit): b.channel(r, r ^ bit) for r in range(n) for bit in bits}
    for r in range(n):
        lane, sender = b.lane(r), b.lane(r)
        added: list[StepRef] = []
        for k, bit in enumerate(bits):
            sent = sender.send(channel[r, bit], data[r], 0, after=added)
            lane.recv(channel[r ^ bit, bit], got[r], k)
            added = [lane.copy((got[r], k), (data[r], 0), add=True, after=[sent])]
    return b.build()


# ---- the plain form ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_expanded_ring_is_an_all_reduce(n: int) -> None:
    """The checker proves the values: every rank ends with every chunk's sum, so chunk shifts and channels are right."""
    plain = expand(ring(n, 64))
    whole = tuple((buffer, 0, n) for buffer in np.argsort(plain.buffers.actor).tolist())
    verdict = check_program(replace(plain, contracts=(Contract(op="all-reduce", inputs=whole, outputs=whole),)))
    assert verdict.ok, verdict.findings
    assert len(plain.steps) == n * (2 * n - 1)


def test_expand_leaves_plain_programs_alone() -> None:
    p = plain_ring(3, 8)
    assert expand(p) is p


@pytest.mark.parametrize("n", [2, 4, 6])
def test_expand_undoes_fold(n: int) -> None:
    p = plain_ring(n, 64)
    folded = fold(p)
    assert folded is not None and folded.fold is not None
    assert [tuple(a) for a in folded.fold.axes] == [("axis0", n, 1, "shift")]
    assert len(folded.steps) * n == len(p.steps) and folded.fold.members == n == len(members(folded.fold))
    assert folded.fold.buffer_shift.tolist() == [[1]]
    verdict = check_program(expand(folded))  # its contract came along
    assert verdict.ok, verdict.findings
    one = simulate_program(p, star(n), names(n))
    other = simulate_program(expand(folded), star(n), names(n))
    assert one.makespan_s == other.makespan_s and np.array_equal(np.sort(one.spans.end_s), np.sort(other.spans.end_s))


def test_exchanges_by_xor_fold_to_one_body() -> None:
    p = doubling(8, 1000)
    folded = fold(p)
    assert folded is not None and folded.fold is not None
    assert [(a.size, a.stride, a.kind) for a in folded.fold.axes] == [(2, 1, "shift"), (2, 2, "shift"), (2, 4, "shift")]
    assert len(folded.steps) * 8 == len(p.steps)
    # the same body with one axis of kind xor
    xor = replace(folded, fold=Fold((FoldAxis("cube", 8, 1, "xor"),), np.zeros((1, len(folded.buffers)), np.int32)))
    times = {simulate_program(x, star(8), names(8), network="fair").makespan_s for x in (p, expand(folded), expand(xor))}
    times |= {simulate_folded(x, star(8), names(8), network="fair").makespan_s for x in (folded, xor)}
    assert len(times) == 1


def _broken(p: Program, what: str) -> Program:
    if what == "a chunk":
        column = p.steps.src_chunk.copy()
        step = int(np.flatnonzero(p.steps.src_buffer >= 0)[3])
        column[step] = (column[step] + 1) % p.buffers.chunks[p.steps.src_buffer[step]]
        return replace(p, steps=replace(p.steps, src_chunk=column))
    if what == "a depth":
        return replace(p, channels=replace(p.channels, depth=np.where(np.arange(len(p.channels)) == 2, 5, p.channels.depth).astype(np.int32)))
    if what == "a size":
        return replace(p, buffers=replace(p.buffers, chunk_bytes=np.where(np.arange(len(p.buffers)) == 1, 9, p.buffers.chunk_bytes)))
    unit = p.lanes.unit.copy()
    unit[1] = 1
    return replace(p, lanes=replace(p.lanes, unit=unit))


@pytest.mark.parametrize("what", ["a chunk", "a depth", "a size", "a unit"])
def test_one_member_that_differs_breaks_the_fold(what: str) -> None:
    p = plain_ring(5, 64)
    assert fold(p) is not None
    assert fold(_broken(p, what)) is None


def test_fold_of_a_training_step_keeps_the_pipeline_axis() -> None:
    shape = Shape(pipeline=2, tensor=2, data=2, microbatches=3, layers=2)
    plain, rings = build(shape, folded=False)
    whole = inline(plain, {name: expand(r) for name, r in rings.items()}).program
    for p in (plain, whole):
        folded = fold(p)
        assert folded is not None and folded.fold is not None
        assert [(a.size, a.stride, a.kind) for a in folded.fold.axes] == [(2, 1, "shift"), (2, 2, "shift"), (2, 4, "plain")]
        assert len(folded.steps) * 4 == len(p.steps)
    fabric, devices = boxes(8)
    one = simulate_folded(fold(plain), fabric, devices, COST, programs=rings)  # type: ignore[arg-type]
    other = simulate_program(whole, fabric, devices, COST, network="fair")
    assert one.makespan_s == pytest.approx(other.makespan_s, rel=1e-9)


def test_tensor_parts_move_with_the_member() -> None:
    b = ProgramBuilder(2)
    for rank in range(2):
        x = b.buffer(rank, chunks=1, chunk_bytes=8)
        b.lane(rank, unit=Unit.COMPUTE).compute(b.op("F", graph="g", part=rank, parts=2, writes=[(x, 0, 1)]))
    folded = fold(b.build())
    assert folded is not None and folded.fold is not None and folded.fold.axes[0].name == "tensor"
    assert expand(folded).ops.part.tolist() == [0, 1]


def test_programs_that_cannot_be_folded() -> None:
    b = ProgramBuilder(2)
    b.lane(0).nop()
    assert fold(b.build()) is None  # the other rank has no lane
    b = ProgramBuilder(2, switches=1)
    for rank in range(2):
        b.lane(rank).nop()
    assert fold(b.build()) is None


# ---- simulating ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        (Shape(pipeline=2, tensor=2, data=2, microbatches=4, layers=4), 8),
        (Shape(pipeline=2, tensor=2, data=2, microbatches=4, layers=4), 4),
        (Shape(pipeline=4, tensor=2, data=2, microbatches=6, layers=4), 8),
        (Shape(pipeline=2, tensor=4, data=2, microbatches=3, layers=2), 8),
        (Shape(pipeline=1, tensor=2, data=4, microbatches=2, layers=2), 2),
        (Shape(pipeline=2, tensor=1, data=4, microbatches=3, layers=2), 1),
    ],
)
def test_folded_step_takes_the_time_of_the_plain_step(shape: Shape, box: int) -> None:
    folded, rings = build(shape, folded=True)
    plain, _ = build(shape, folded=False)
    fabric, devices = boxes(shape.ranks, box)
    one = simulate_folded(folded, fabric, devices, COST, programs=rings)
    rings_plain = {name: expand(r) for name, r in rings.items()}
    mode = one.attributes["network"]
    ways = {
        "written out": simulate_program(plain, fabric, devices, COST, programs=rings_plain, network=mode, record=False),
        "expanded": simulate_program(expand(folded), fabric, devices, COST, programs=rings_plain, network=mode, record=False),
        "inlined, then expanded": simulate_program(expand(inline_folded(folded, rings).program), fabric, devices, COST, network=mode, record=False),
    }
    for way, other in ways.items():
        assert one.makespan_s == pytest.approx(other.makespan_s, rel=1e-9), way
        assert one.memory_peak_bytes == other.memory_peak_bytes, way
        assert one.link_busy_s == pytest.approx(other.link_busy_s, rel=1e-9), way


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_random_folded_programs_on_shared_links(seed: int) -> None:
    """Random bodies on a ring of members that share a trunk: boxes of two, joined by one thin link each way."""
    rng = np.random.default_rng(seed)
    n, size = int(rng.choice([4, 6])), 4
    b = ProgramBuilder(n, name="random")
    data = b.buffer(0, chunks=size, chunk_bytes=int(rng.integers(1, 50)) * 1000, window=1)
    op = b.op("F", graph="x")
    compute, known = b.lane(0, unit=Unit.COMPUTE), []
    for offset in sorted({int(x) for x in rng.choice([2, n - 2], 2)} | {n // 2 * (n == 4)} - {0}):
        channel, send, receive = b.channel(0, offset, depth=int(rng.integers(1, 3))), b.lane(0), b.lane(0)
        for _ in range(int(rng.integers(1, 6))):
            if rng.random() < 0.7:
                known.append(compute.compute(op, after=[known[int(rng.integers(len(known)))]] if known else []))
            count = int(rng.integers(1, size + 1))
            send.send(channel, data, 0, count, after=[known[-1]] if known and rng.random() < 0.5 else [])
            known.append(receive.recv(channel, data, 0, count))
    p = b.build(validate=False)
    p = replace(p, fold=Fold((FoldAxis("ring", n, 1, "shift"),), np.zeros((1, 1), np.int32)))
    links = []
    for i in range(n):  # even ranks around one switch, odd ones around another: every channel stays at its own
        links += [Link(src=f"d{i}", dst=f"s{i % 2}", rate_Bps=10**7, latency_s=1e-6), Link(src=f"s{i % 2}", dst=f"d{i}", rate_Bps=6 * 10**6)]
    fabric = Fabric(
        name="two", devices=tuple(Device(name=x) for x in names(n)), switches=(Switch(name="s0"), Switch(name="s1")), links=tuple(links)
    )
    cost = Cost(table={"x|F": Priced(0.003)})
    plain = expand(p)
    a = simulate_folded(p, fabric, names(n), cost, network="fair", record=True)
    c = simulate_program(plain, fabric, names(n), cost, network="fair")
    assert a.makespan_s == pytest.approx(c.makespan_s, rel=1e-9)
    mine = c.spans.rank == 0
    assert a.spans.end_s == pytest.approx(c.spans.end_s[mine], rel=1e-9) and np.array_equal(a.spans.step, c.spans.step[mine])


def test_orbits_of_a_shared_trunk() -> None:
    """Eight members send through four trunk links: the orbit's rate is 4/8 of one trunk link's."""
    b = ProgramBuilder(8)
    x, channel = b.buffer(0, chunks=1, chunk_bytes=10**6), b.channel(0, 4)
    b.lane(0).send(channel, x, 0)
    b.lane(0).recv(channel, x, 0)
    p = replace(b.build(validate=False), fold=Fold((FoldAxis("ring", 8, 1, "shift"),), np.zeros((1, 1), np.int32)))
    links = []
    for i in range(8):
        links += [Link(src=f"d{i}", dst=f"s{i % 4}", rate_Bps=10**9), Link(src=f"t{i % 4}", dst=f"d{i}", rate_Bps=10**9)]
    links += [Link(src=f"s{k}", dst=f"t{k}", rate_Bps=10**8) for k in range(4)]
    switches = tuple(Switch(name=f"{side}{k}") for side in "st" for k in range(4))
    fabric = Fabric(name="trunks", devices=tuple(Device(name=x) for x in names(8)), switches=switches, links=tuple(links))
    folded = fold_network(p, fabric, names(8))
    assert folded.network.mode == "fair"
    assert sorted(len(x) for x in folded.orbits) == [4, 8, 8]
    assert sorted(folded.network.rate_Bps.tolist()) == [5e7, 1e9, 1e9]
    assert simulate_folded(p, fabric, names(8)).makespan_s == pytest.approx(0.02)
    assert simulate_program(expand(p), fabric, names(8), network="fair").makespan_s == pytest.approx(0.02)
    with pytest.raises(Unsupported, match="exclusive links shared"):
        simulate_folded(p, fabric, names(8), network="exclusive")


@pytest.mark.parametrize("kind", ["shift", "xor"])
def test_orbits_from_symmetry_are_those_of_every_route(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No route of a member is looked at, and the network is the one that all of them make."""
    p = ring(4, 1000)
    assert p.fold is not None
    p = replace(p, fold=Fold((FoldAxis("ring", 4, 1, kind),), p.fold.buffer_shift))  # type: ignore[arg-type]
    shown = fold_network(p, star(4), names(4))
    monkeypatch.setattr(folded_simulation, "_orbits_by_symmetry", lambda *_: None)
    listed = fold_network(p, star(4), names(4))
    assert shown.orbits == listed.orbits and np.array_equal(shown.network.rate_Bps, listed.network.rate_Bps)
    monkeypatch.setattr(folded_simulation, "MAX_LISTED_ROUTES", 1)
    with pytest.raises(Unsupported, match="not each other's images"):
        fold_network(p, star(4), names(4))


def test_steps_along_the_axes_generate_all_members() -> None:
    axes = (FoldAxis("a", 4, 1, "xor"), FoldAxis("b", 3, 4, "shift"), FoldAxis("c", 2, 12, "plain"), FoldAxis("d", 1, 24, "shift"))
    f = Fold(axes, np.zeros((3, 0), np.int32))
    steps = generators(f)
    assert steps == [(1, 0, 0), (2, 0, 0), (0, 1, 0)]
    for rank in (0, 12, 17):
        reached, todo = {rank}, [rank]
        for here in todo:
            fresh = {int(image(f, here, step)) for step in steps} - reached
            reached |= fresh
            todo += sorted(fresh)
        assert reached == {int(image(f, rank, m)) for m in members(f)}
        assert set(representative(f, np.array(sorted(reached))).tolist()) == {rank // 12 * 12}


def test_refuses_what_is_not_symmetric() -> None:
    p, n = ring(4, 1000), names(4)
    good = star(4)
    assert simulate_folded(p, good, n).makespan_s > 0
    slow = replace(good, links=(replace(good.links[0], rate_Bps=10**8), *good.links[1:]))
    with pytest.raises(Unsupported, match="not used like the links"):
        simulate_folded(p, slow, n)
    bucket = replace(good, links=(replace(good.links[0], burst_bytes=5), *good.links[1:]))
    with pytest.raises(Unsupported, match="token bucket"):
        simulate_folded(p, bucket, n)
    other = replace(good, devices=(replace(good.devices[0], flops={"fp32": 5}), *good.devices[1:]))
    with pytest.raises(Unsupported, match="ranks 0 and 1 share a lane body"):
        simulate_folded(p, other, n)
    line = Fabric(
        name="line", devices=good.devices, links=tuple(
            Link(src=f"d{a}", dst=f"d{b}", rate_Bps=10**9) for i in range(3) for a, b in ((i, i + 1), (i + 1, i))
        ),
    )  # fmt: skip
    with pytest.raises(Unsupported, match="different lengths"):
        simulate_folded(p, line, n)
    with pytest.raises(UsageError, match="names 2 actors"):
        simulate_folded(p, good, n[:2])
    with pytest.raises(MeshwrightError, match="no device 'hub'"):
        simulate_folded(p, good, ["hub", *n[1:]])
    with pytest.raises(UsageError, match="1 durations for 7"):
        simulate_folded(p, good, n, durations_s=np.zeros(1))
    pinned = replace(p, channels=replace(p.channels, route=np.zeros(1, np.int32), routes=(("d0", "hub", "d1"),)))
    for act in (expand, lambda x: simulate_folded(x, good, n)):
        with pytest.raises(Unsupported, match="pinned"):
            act(pinned)


def test_refuses_folds_that_do_not_fit() -> None:
    p = ring(4, 1000)
    assert p.fold is not None
    shift = p.fold.buffer_shift
    for axes, words in (
        ((FoldAxis("x", 3, 1, "shift"),), "axes hold 3 ranks"),
        ((FoldAxis("x", 4, 2, "shift"),), "does not tile"),
        ((FoldAxis("x", 2, 1, "plain"), FoldAxis("y", 2, 3, "shift")), "does not tile"),
    ):
        with pytest.raises(FormatError, match=words):
            expand(replace(p, fold=Fold(axes, shift)))
    with pytest.raises(FormatError, match="expected \\(1, 1\\)"):
        expand(replace(p, fold=Fold(p.fold.axes, np.zeros((1, 2), np.int32))))
    elsewhere = replace(p, lanes=replace(p.lanes, actor=np.array([1], np.int32)))
    with pytest.raises(FormatError, match="lane 0 is at rank 1"):
        expand(elsewhere)
    with pytest.raises(Unsupported, match="in-network"):
        expand(replace(p, switches=1))
    with pytest.raises(FormatError, match="not folded"):
        simulate_folded(plain_ring(2, 4), star(2), names(2))
    pair = replace(p, steps=replace(p.steps, count=np.full(len(p.steps), 2, np.int32)))
    with pytest.raises(Unsupported, match="wrap around"):
        expand(pair)
    sets = ProgramBuilder(2)
    x, c = sets.buffer(0, chunks=1, chunk_bytes=1), sets.channel(0, 1)
    sets.lane(0).transfer(send=sets.channel_set([c]), src=(x, 0), out_set=True)
    with pytest.raises(Unsupported, match="channel sets"):
        expand(replace(sets.build(), fold=Fold((FoldAxis("x", 2, 1, "shift"),), np.zeros((1, 1), np.int32))))


def test_inline_refuses_other_callees_and_groups() -> None:
    shape = Shape(pipeline=2, tensor=2, data=2, microbatches=2, layers=2)
    folded, rings = build(shape, folded=True)
    assert folded.fold is not None
    with pytest.raises(FormatError, match="called but not given"):
        inline_folded(folded, {"tensor-ring": rings["tensor-ring"]})
    with pytest.raises(Unsupported, match="no orbit"):
        inline_folded(folded, {**rings, "data-ring": ring(4, 64)})
    flat = replace(rings["data-ring"], fold=Fold((FoldAxis("x", 2, 1, "plain"),), np.zeros((0, 1), np.int32)))
    with pytest.raises(Unsupported, match="not one ring"):
        inline_folded(folded, {**rings, "data-ring": flat})
    without, _ = build(Shape(pipeline=2, tensor=1, data=1, microbatches=2, layers=2), folded=True)
    assert inline_folded(without, {}).program is without
