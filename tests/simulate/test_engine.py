"""Textbook times, metamorphic laws, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_programs import random_case

from meshwright.check.program.memory import worst_order_memory
from meshwright.check.program.races import check_races
from meshwright.cost import Cost, Priced, Transport
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.errors import CheckFailed, Deadlock, Disconnected, MeshwrightError, UnknownName, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.graph.graph import Work
from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.program import Program, Unit
from meshwright.simulate import simulate_program
from meshwright.simulate.network import unpinned
from meshwright.timeline import Timeline
from order_peak import order_peak

US = 1e-6


def line(n: int, *, rate: int = 10**9, latency: float = 0.0, ring: bool = False, **kw: int) -> Fabric:
    links = []
    for i in range(n if ring else n - 1):
        a, b = f"d{i}", f"d{(i + 1) % n}"
        links += [Link(src=a, dst=b, rate_Bps=rate, latency_s=latency, **kw), Link(src=b, dst=a, rate_Bps=rate, latency_s=latency, **kw)]
    return Fabric(name="line", devices=tuple(Device(name=f"d{i}") for i in range(n)), links=tuple(links))


def star(n: int, *, rate: int = 10**9, latency: float = 0.0) -> Fabric:
    links = [x for i in range(n) for x in (Link(src=f"d{i}", dst="sw", rate_Bps=rate, latency_s=latency), Link(src="sw", dst=f"d{i}", rate_Bps=rate))]
    return Fabric(name="star", devices=tuple(Device(name=f"d{i}") for i in range(n)), switches=(Switch(name="sw"),), links=tuple(links))


def names(n: int) -> list[str]:
    return [f"d{i}" for i in range(n)]


def one_way(pairs: list[tuple[int, int]], ranks: int, size_bytes: int) -> Program:
    b = ProgramBuilder(ranks, name="one-way")
    for src, dst in pairs:
        x, y = b.buffer(src, chunks=1, chunk_bytes=size_bytes, role="input"), b.buffer(dst, chunks=1, chunk_bytes=size_bytes)
        c = b.channel(src, dst)
        b.lane(src).send(c, x, 0)
        b.lane(dst).recv(c, y, 0)
    return b.build()


def ring_all_reduce(n: int, chunk_bytes: int) -> Program:
    b = ProgramBuilder(n, name="ring")
    data = [b.buffer(r, chunks=n, chunk_bytes=chunk_bytes, role="input") for r in range(n)]
    channels = [b.channel(r, (r + 1) % n, depth=2) for r in range(n)]
    for r in range(n):
        sends, receives = b.lane(r), b.lane(r)
        got: StepRef | None = None
        for k in range(2 * (n - 1)):
            sends.send(channels[r], data[r], (r - k) % n, after=[got] if got else [])
            got = (receives.recv_add if k < n - 1 else receives.recv)(channels[r - 1], data[r], (r - k - 1) % n)
    return b.build()


def pipeline(stages: int, orders: list[list[tuple[str, int]]]) -> Program:
    """Compute lanes in the given orders; boundary messages of 0 bytes in lanes of their own."""
    b = ProgramBuilder(stages, name="pipeline")
    ops = {"F": b.op("F", graph="x"), "B": b.op("B", graph="x")}
    data = [b.buffer(s, chunks=1, chunk_bytes=0) for s in range(stages)]
    done: dict[tuple[str, int, int], StepRef] = {}
    receive: dict[tuple[str, int, int], StepRef] = {}
    for phase in "FB":
        for s in range(stages):
            peer = s - 1 if phase == "F" else s + 1
            if 0 <= peer < stages:
                c, lane = b.channel(peer, s, depth=1000), b.lane(s)
                sender = b.lane(peer)
                for i in [i for p, i in orders[peer] if p == phase]:
                    receive[phase, s, i] = lane.recv(c, data[s], 0)
                    sender.send(c, data[peer], 0, after=[StepRef(2 * 2 * (stages - 1) + peer, orders[peer].index((phase, i)))])
    for s in range(stages):
        lane = b.lane(s, unit=Unit.COMPUTE)
        for phase, i in orders[s]:
            done[phase, s, i] = lane.compute(ops[phase], after=[receive[phase, s, i]] if (phase, s, i) in receive else [])
    return b.build()


# ---- textbook ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["fair", "exclusive"])
def test_one_message(mode: str) -> None:
    timeline = simulate_program(one_way([(0, 2)], 3, 10**6), line(3, latency=5 * US), names(3), network=mode)  # type: ignore[arg-type]
    assert timeline.makespan_s == pytest.approx(1e-3 + 10 * US)  # cut-through: the size counts once, the latency per hop
    assert timeline.link_busy_s == pytest.approx({"d0->d1": 1e-3, "d1->d2": 1e-3})


def test_shared_link_by_hand() -> None:
    """Three messages out of one port: fair, all end after 3 s; exclusive, one after the other; with another's port at 2/3 rate."""
    p = one_way([(0, 1), (0, 2), (0, 3)], 4, 10**9)
    fair = simulate_program(p, star(4), names(4), network="fair")
    assert fair.spans.end_s[[0, 2, 4]].tolist() == pytest.approx([3, 3, 3])
    exclusive = simulate_program(p, star(4), names(4), network="exclusive")
    assert exclusive.spans.end_s[[0, 2, 4]].tolist() == pytest.approx([1, 2, 3])
    # rates are worked out twice, when all begin and when all end: for the port and its three flows, and for nothing
    assert fair.attributes["rate_instants"] == 2 and fair.attributes["rate_work"] == 1 + 3
    assert exclusive.attributes["rate_instants"] == exclusive.attributes["rate_work"] == 0


def test_max_min_by_hand() -> None:
    """Flows a: d0->d1, b: d0->d2, c: d3->d2 with port d0 at 1 GB/s and d2's at 3 GB/s: a = b = 0.5, c = 2.5 GB/s until a, b end at 2 s."""
    fabric = star(4)
    faster = {("d3", "sw"): 4 * 10**9, ("sw", "d2"): 3 * 10**9}
    fabric = replace(fabric, links=tuple(replace(x, rate_Bps=faster.get((x.src, x.dst), x.rate_Bps)) for x in fabric.links))
    b = ProgramBuilder(4)
    for src, dst, size in ((0, 1, 10**9), (0, 2, 10**9), (3, 2, 55 * 10**8)):
        x, y, c = b.buffer(src, chunks=1, chunk_bytes=size), b.buffer(dst, chunks=1, chunk_bytes=size), b.channel(src, dst)
        b.lane(src).send(c, x, 0)
        b.lane(dst).recv(c, y, 0)
    ends = simulate_program(b.build(), fabric, names(4), network="fair").spans.end_s
    assert ends[[0, 2, 4]].tolist() == pytest.approx([2, 2, 2 + 0.5 / 3])  # c moved 5 GB in 2 s, the rest at 3 GB/s


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("mode", ["fair", "exclusive"])
def test_ring_all_reduce_formula(n: int, mode: str) -> None:
    timeline = simulate_program(ring_all_reduce(n, 10**6), line(n, latency=3 * US, ring=n > 2), names(n), network=mode)  # type: ignore[arg-type]
    assert timeline.makespan_s == pytest.approx(2 * (n - 1) * (1e-3 + 3 * US), rel=1e-12)


@pytest.mark.parametrize(("hops", "chunks"), [(1, 4), (3, 16), (7, 64)])
def test_pipelined_chain(hops: int, chunks: int) -> None:
    """c chunks over a chain of h equal links without latency: (c + h - 1) chunk times."""
    b = ProgramBuilder(hops + 1)
    data = [b.buffer(r, chunks=1, chunk_bytes=10**6) for r in range(hops + 1)]
    channels = [b.channel(r, r + 1, depth=2) for r in range(hops)]
    b.lane(0, repeat=chunks).send(channels[0], data[0], 0)
    for r in range(1, hops):
        b.lane(r, repeat=chunks).recv_send(channels[r - 1], channels[r], data[r], 0)
    b.lane(hops, repeat=chunks).recv(channels[-1], data[hops], 0)
    timeline = simulate_program(b.build(), line(hops + 1), names(hops + 1))
    assert timeline.makespan_s == pytest.approx((chunks + hops - 1) * 1e-3)
    assert timeline.attributes["network"] == "exclusive"


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 3), (4, 8), (6, 9)])
def test_pipeline_closed_forms(stages: int, microbatches: int) -> None:
    """1F1B and GPipe with free communication both take (m + p - 1)(f + b)."""
    gpipe = [[("F", i) for i in range(microbatches)] + [("B", i) for i in range(microbatches)] for _ in range(stages)]
    for orders in (gpipe, [list(one_f_one_b_order(stages, microbatches, s)) for s in range(stages)]):
        p = pipeline(stages, orders)
        cost = Cost(table={"x|F": Priced(1.0), "x|B": Priced(2.0)})
        timeline = simulate_program(p, line(stages), names(stages), cost)
        assert timeline.makespan_s == (microbatches + stages - 1) * 3.0


def test_token_bucket() -> None:
    """1 MB through a full bucket of 0.25 MB: only 0.75 MB wait for the rate; the next one finds it empty."""
    p = one_way([(0, 1)], 2, 10**6)
    for mode in ("fair", "exclusive"):
        timeline = simulate_program(p, line(2, burst_bytes=250_000), names(2), network=mode)  # type: ignore[arg-type]
        assert timeline.makespan_s == pytest.approx(0.75e-3)
    b = ProgramBuilder(2)
    x, y, c = b.buffer(0, chunks=1, chunk_bytes=10**6), b.buffer(1, chunks=1, chunk_bytes=10**6), b.channel(0, 1)
    b.lane(0, repeat=2).send(c, x, 0)
    b.lane(1, repeat=2).recv(c, y, 0)
    for mode in ("fair", "exclusive"):
        timeline = simulate_program(b.build(), line(2, burst_bytes=250_000), names(2), network=mode)  # type: ignore[arg-type]
        assert timeline.makespan_s == pytest.approx(1.75e-3)


def test_prices_of_messages_and_library_latency() -> None:
    fabric = line(2, latency=1 * US)
    fabric = replace(fabric, links=tuple(replace(x, library_latency_s=7 * US) for x in fabric.links))
    cost = Cost(transport=Transport(per_message_s=10 * US, per_byte_s=1e-9, per_step_s=2 * US))
    timeline = simulate_program(one_way([(0, 1)], 2, 1000), fabric, names(2), cost)
    # both ends: 10 us + 1 us + 2 us each; link 1 us; wire 1 us; library 7 us
    assert timeline.makespan_s == pytest.approx((13 + 1 + 1 + 7 + 13) * US)


def test_segments_take_turns() -> None:
    """Two messages into one port in segments: both end near the fair time; whole, the first ends after half of it."""
    p = one_way([(0, 2), (1, 2)], 3, 64 * 10**6)
    whole = simulate_program(p, star(3), names(3), network="exclusive").spans.end_s[[1, 3]]
    cut = simulate_program(p, star(3), names(3), segment_bytes=10**6)
    fair = simulate_program(p, star(3), names(3), network="fair").spans.end_s[[1, 3]]
    assert sorted(whole.tolist()) == pytest.approx([0.064, 0.128])
    assert cut.attributes["network"] == "exclusive"
    assert cut.spans.end_s[[1, 3]].tolist() == pytest.approx(fair.tolist(), rel=0.02)


# ---- metamorphic ---------------------------------------------------------------------------------------------------
def simulate_case(seed: int, mode: str, **changes: object) -> Timeline:
    case = random_case(seed)
    fabric = changes.get("fabric", case.fabric)
    arguments = {"durations_s": case.durations_s, "network": mode, **{k: v for k, v in changes.items() if k != "fabric"}}
    try:
        return simulate_program(case.program, fabric, case.placement, **arguments)  # type: ignore[arg-type]
    except Deadlock:
        assume(False)
        raise


SEEDS, MODES = st.integers(0, 10**6), st.sampled_from(["exclusive", "fair"])


@settings(max_examples=60, deadline=None)
@given(SEEDS, MODES)
def test_doubling_everything_halves_time(seed: int, mode: str) -> None:
    """All rates doubled, latencies and durations halved, exactly: powers of two keep the bits."""
    case = random_case(seed)
    fast = [
        replace(x, rate_Bps=2 * x.rate_Bps, latency_s=x.latency_s / 2, library_latency_s=x.library_latency_s / 2) for x in case.fabric.links
    ]  # fmt: skip
    slow = simulate_case(seed, mode)
    quick = simulate_case(seed, mode, fabric=replace(case.fabric, links=tuple(fast)), durations_s=case.durations_s / 2)
    assert quick.makespan_s == slow.makespan_s / 2
    assert np.array_equal(quick.spans.end_s, slow.spans.end_s / 2)


@settings(max_examples=60, deadline=None)
@given(SEEDS, MODES, st.randoms(use_true_random=False))
def test_relabelling_devices_and_links_keeps_every_time(seed: int, mode: str, random: object) -> None:
    case = random_case(seed)
    new = {name: f"x{i}" for i, name in enumerate(sorted(case.fabric.actor_names, key=lambda _: random.random()))}  # type: ignore[attr-defined]
    renamed = replace(
        case.fabric, devices=tuple(replace(d, name=new[d.name]) for d in reversed(case.fabric.devices)),
        switches=tuple(replace(s, name=new[s.name]) for s in case.fabric.switches),
        links=tuple(replace(x, src=new[x.src], dst=new[x.dst]) for x in case.fabric.links),
    )  # fmt: skip
    one = simulate_case(seed, mode)
    other = simulate_program(case.program, renamed, [new[x] for x in case.placement], durations_s=case.durations_s, network=mode)  # type: ignore[arg-type]
    assert np.array_equal(one.spans.start_s, other.spans.start_s) and np.array_equal(one.spans.end_s, other.spans.end_s)


@settings(max_examples=60, deadline=None)
@given(SEEDS, MODES)
def test_bounds_critical_path_and_slack(seed: int, mode: str) -> None:
    case = random_case(seed)
    timeline = simulate_case(seed, mode)
    end = timeline.makespan_s
    assert all(busy <= end * (1 + 1e-9) for busy in timeline.link_busy_s.values())
    p, spans = case.program, timeline.spans
    lane_of = p.lane_of_step()
    work: dict[tuple[int, int], float] = {}
    for step in np.flatnonzero(p.steps.kind == 0):
        lane = lane_of[step]
        key = (int(p.lanes.actor[lane]), int(p.lanes.unit[lane]))
        work[key] = work.get(key, 0.0) + case.durations_s[step] * p.lanes.repeat[lane]
    assert all(total <= end * (1 + 1e-9) for (_, unit), total in work.items() if unit >= 0)
    assert np.all(spans.end_s >= spans.start_s) and spans.end_s.max(initial=0.0) == end
    if not len(spans):
        return
    at = {(int(s), int(i)): k for k, (s, i) in enumerate(zip(spans.step, spans.iteration, strict=True))}
    path = [at[x] for x in timeline.critical_path]
    assert spans.end_s[path[-1]] == end and spans.start_s[path[0]] == 0.0
    assert timeline.slack_s is not None and np.all(timeline.slack_s >= -1e-9 * max(end, 1.0))
    assert np.all(timeline.slack_s[spans.step[path]] <= 1e-9 * max(end, 1.0))
    assert np.all(timeline.slack_s[spans.step] + spans.end_s <= end * (1 + 1e-9) + 1e-12)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_slack_is_room_in_a_program_of_computes(seed: int) -> None:
    """Without shared units or links the graph is exact: a step made longer by its slack moves nothing, by more moves the makespan."""
    rng = np.random.default_rng(seed)
    b = ProgramBuilder(1)
    op, refs = b.op("F", graph="g"), []
    for _ in range(4):
        lane = b.lane(0)
        for _ in range(int(rng.integers(1, 5))):
            count = min(len(refs), int(rng.integers(0, 3)))
            refs.append(lane.compute(op, after=[refs[int(i)] for i in rng.choice(len(refs), count, replace=False)] if count else []))
    p, fabric = b.build(), line(1)
    durations = rng.integers(1, 9, len(p.steps)).astype(float)
    base = simulate_program(p, fabric, ["d0"], durations_s=durations)
    assert base.slack_s is not None
    for step, slack in enumerate(base.slack_s.tolist()):
        for extra, moved in ((slack, 0.0), (slack + 1.0, 1.0)):
            changed = durations.copy()
            changed[step] += extra
            assert simulate_program(p, fabric, ["d0"], durations_s=changed, record=False).makespan_s == base.makespan_s + moved


@settings(max_examples=30, deadline=None)
@given(SEEDS, MODES)
def test_not_recording_changes_nothing(seed: int, mode: str) -> None:
    full, bare = simulate_case(seed, mode), simulate_case(seed, mode, record=False)
    assert (full.makespan_s, full.link_busy_s, full.memory_peak_bytes) == (bare.makespan_s, bare.link_busy_s, bare.memory_peak_bytes)
    assert not len(bare.spans) and bare.slack_s is None


@settings(max_examples=40, deadline=None)
@given(SEEDS, MODES)
def test_deeper_channels_never_deadlock_a_live_program(seed: int, mode: str) -> None:
    """Every step still runs as often. It may end later, where a link or unit that is shared goes to another first; where none is, it never does."""
    case = random_case(seed)

    def ran(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
        """(step, iteration) and (start, end) of every span, in the order of the former."""
        spans = timeline.spans
        order = np.lexsort((spans.iteration, spans.step))
        return np.stack([spans.step, spans.iteration])[:, order], np.stack([spans.start_s, spans.end_s])[:, order]

    assert np.array_equal(ran(simulate_case(seed, mode))[0], ran(simulate_case(seed, mode, depth=1000))[0])
    # transfers take their latency alone, and what shares a unit takes no time
    alone = case.program.lanes.unit[case.program.lane_of_step()] < 0
    changes = {
        "fabric": replace(case.fabric, links=tuple(replace(x, rate_Bps=2**60, burst_bytes=0) for x in case.fabric.links)),
        "durations_s": np.where(alone, case.durations_s, 0.0),
    }
    shallow, deep = ran(simulate_case(seed, mode, **changes))[1], ran(simulate_case(seed, mode, depth=1000, **changes))[1]
    assert np.all(deep <= shallow + 1e-9)


# ---- errors --------------------------------------------------------------------------------------------------------
def test_deadlock_names_the_steps() -> None:
    b = ProgramBuilder(2, name="crossed")
    x, y = b.buffer(0, chunks=1, chunk_bytes=1), b.buffer(1, chunks=1, chunk_bytes=1)
    there, back = b.channel(0, 1), b.channel(1, 0)
    for lane, out, incoming, buffer in ((b.lane(0), there, back, x), (b.lane(1), back, there, y)):
        lane.recv(incoming, buffer, 0)
        lane.send(out, buffer, 0)
    with pytest.raises(Deadlock) as error:
        simulate_program(b.build(), line(2), names(2))
    blocked = error.value.data["blocked"]
    assert [item["step_id"] for item in blocked] == [0, 2]
    assert "a message on channel 1 from rank 1" in blocked[0]["waits_for"]


def test_credit_deadlock_is_cured_by_depth() -> None:
    b = ProgramBuilder(2)
    x, y = b.buffer(0, chunks=1, chunk_bytes=1), b.buffer(1, chunks=1, chunk_bytes=1)
    first, second = b.channel(0, 1), b.channel(0, 1)
    lane = b.lane(0)
    for c in (first, first, second):
        lane.send(c, x, 0)
    lane = b.lane(1)
    for c in (second, first, first):
        lane.recv(c, y, 0)
    p = b.build()
    with pytest.raises(Deadlock, match="credit of channel 0"):
        simulate_program(p, line(2), names(2))
    assert simulate_program(p, line(2), names(2), depth={0: 2}).makespan_s > 0


def test_undelivered_and_shared_channel_ends() -> None:
    b = ProgramBuilder(2)
    x, c = b.buffer(0, chunks=1, chunk_bytes=1), b.channel(0, 1)
    b.lane(0).send(c, x, 0)
    with pytest.raises(CheckFailed, match="never received"):
        simulate_program(b.build(), line(2), names(2))
    b.lane(0).send(c, x, 0)
    with pytest.raises(CheckFailed, match="lane 0 and lane 1"):
        simulate_program(b.build(), line(2), names(2))


def test_symbolic_sizes() -> None:
    b = ProgramBuilder(2)
    size = b.size("k", lower=0, expected=10**6, upper=2 * 10**6)
    x, y, c = b.buffer(0, chunks=1, chunk_bytes=1), b.buffer(1, chunks=1, chunk_bytes=1), b.channel(0, 1)
    b.lane(0).transfer(send=c, src=(x, 0), size=size)
    b.lane(1).transfer(recv=c, dst=(y, 0), store=True, size=size)
    p = b.build()
    assert simulate_program(p, line(2), names(2)).makespan_s == pytest.approx(1e-3)
    assert simulate_program(p, line(2), names(2), sizes={"k": 2 * 10**6}).makespan_s == pytest.approx(2e-3)
    assert simulate_program(p, line(2), names(2), sizes="lower").makespan_s == pytest.approx(p.sizes.lower[0] / 1e9)
    assert simulate_program(p, line(2), names(2), sizes="upper").makespan_s == pytest.approx(p.sizes.upper[0] / 1e9)
    for sizes, words in (({"k": 3 * 10**6}, "must be 0..2000000"), ({"q": 1}, "no size .q."), ("middle", "no set of sizes")):
        with pytest.raises(UsageError, match=words):
            simulate_program(p, line(2), names(2), sizes=sizes)


def test_pinned_route() -> None:
    b = ProgramBuilder(3)
    x, y = b.buffer(0, chunks=1, chunk_bytes=10**6), b.buffer(2, chunks=1, chunk_bytes=10**6)
    c = b.channel(0, 2, route=("d0", "d1", "d2"))
    b.lane(0).send(c, x, 0)
    b.lane(2).recv(c, y, 0)
    p = b.build()
    assert set(simulate_program(p, line(3, ring=True), names(3)).link_busy_s) == {"d0->d1", "d1->d2"}
    with pytest.raises(Disconnected, match="no link d0 -> d1"):
        simulate_program(p, replace(line(3, ring=True), links=line(3, ring=True).links[2:]), names(3))
    with pytest.raises(UsageError, match="its ends are on"):
        simulate_program(p, line(3, ring=True), ["d1", "d0", "d2"])
    assert set(simulate_program(unpinned(p), line(3, ring=True), names(3)).link_busy_s) == {"d0->d2"}, "the fabric's own route"


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"network": "magic"}, UnknownName, "no network model"),
        ({"segment_bytes": 0}, UsageError, ">= 1 byte"),
        ({"segment_bytes": 8, "network": "fair"}, UsageError, "exclusive links"),
        ({"durations_s": [1.0]}, UsageError, "1 durations for 2 steps"),
        ({"durations_s": [1.0, -1.0]}, UsageError, "finite and >= 0"),
        ({"depth": 0}, UsageError, ">= 1 message"),
        ({"depth": {7: 1}}, UsageError, "no channel 7"),
        ({"segment_bytes": 1, "depth": 1, "big": True}, UsageError, "may be in flight"),
    ],
)
def test_refuses(changes: dict, kind: type[MeshwrightError], words: str) -> None:
    p = one_way([(0, 1)], 2, 10**9 if changes.pop("big", False) else 1)
    with pytest.raises(kind, match=words):
        simulate_program(p, line(2), names(2), **changes)


@pytest.mark.parametrize(("placement", "kind"), [(["d0"], UsageError), (["d0", "nowhere"], UnknownName), (["d0", "sw"], UnknownName)])
def test_refuses_placements(placement: list[str], kind: type[MeshwrightError]) -> None:
    with pytest.raises(kind):
        simulate_program(one_way([(0, 1)], 2, 1), star(2), placement)


def test_folded_program_is_sent_elsewhere() -> None:
    from meshwright.program.program import Fold, FoldAxis

    p = replace(one_way([(0, 1)], 2, 1), fold=Fold((FoldAxis("x", 2, 1, "plain"),), np.zeros((0, 2), np.int32)))
    with pytest.raises(Unsupported, match="folded"):
        simulate_program(p, line(2), names(2))


# ---- memory --------------------------------------------------------------------------------------------------------
def test_memory_by_hand() -> None:
    """weights 100 throughout; activation 10 from F to B; workspace 5 of B; a receive's buffer 7 from when it is posted."""
    b = ProgramBuilder(2)
    b.buffer(0, chunks=1, chunk_bytes=100, role="weight", persistent=True)
    act = b.buffer(0, chunks=2, chunk_bytes=5, role="activation")
    got = b.buffer(0, chunks=1, chunk_bytes=7, role="scratch")
    far = b.buffer(1, chunks=1, chunk_bytes=7, role="input")
    forward = b.op("F", graph="g", writes=[(act, 0, 2)])
    backward = b.op("B", graph="g", reads=[(act, 0, 2)], workspace_bytes=5)
    c = b.channel(1, 0)
    lane = b.lane(0, unit=Unit.COMPUTE)
    f = lane.compute(forward)
    received = b.lane(0).recv(c, got, 0, after=[f])
    last = lane.compute(backward, after=[received])
    b.dies_after(act, last)
    b.dies_after(got, received)
    b.lane(1).send(c, far, 0)
    p = b.build()
    cost = Cost(table={"g|F": Priced(1.0), "g|B": Priced(2.0)})
    timeline = simulate_program(p, line(2, rate=2), names(2), cost, works={"g|F": Work()})
    assert timeline.memory_peak_bytes == (117, 7)
    times, held = timeline.counters["memory of rank 0"]
    assert dict(zip(times.tolist(), held.tolist(), strict=True)) == {0.0: 110.0, 1.0: 117.0, 3.5: 115.0, 5.5: 0.0}
    staged = simulate_program(p, line(2, rate=2), names(2), cost, staging=True)
    assert staged.memory_peak_bytes == (117, 7)  # the message goes straight into its place


@pytest.mark.parametrize("copy_s", [0.0, 1.0])
def test_what_a_copy_fills_is_empty_before_also_where_copies_cost_nothing(copy_s: float) -> None:
    """Gathered weights: each buffer is filled by a copy, sent in that instant, and over before the next one. Two never live together."""
    b = ProgramBuilder(2)
    own = b.buffer(0, chunks=2, chunk_bytes=10, role="weight", persistent=True)
    far = b.buffer(1, chunks=2, chunk_bytes=10, role="output")
    c = b.channel(0, 1)
    copies, sends, got, sent = b.lane(0), b.lane(0), b.lane(1), None
    for k in range(2):
        gathered = b.buffer(0, chunks=1, chunk_bytes=10)
        filled = copies.copy((own, k), (gathered, 0), after=[sent] if sent is not None else [])
        sent = sends.send(c, gathered, 0, after=[filled])
        got.recv(c, far, k)
        b.dies_after(gathered, sent)
    p = b.build()
    durations = np.where((p.steps.src_buffer == own) & (p.steps.dst_buffer >= 0), copy_s, 1.0)
    timeline = simulate_program(p, line(2, rate=10), names(2), durations_s=durations)
    start, end = np.empty(len(p.steps)), np.empty(len(p.steps))
    start[timeline.spans.step], end[timeline.spans.step] = timeline.spans.start_s, timeline.spans.end_s
    assert timeline.memory_peak_bytes[0] == order_peak(p, start, end)[0] == 30


@pytest.mark.parametrize(("depth", "expected"), [(1, 20), (2, 30), (3, 30)])
def test_memory_of_receives_posted_ahead(depth: int, expected: int) -> None:
    """Of three messages into places of their own, depth d are posted at once; the first place dies when the second message is there."""
    b = ProgramBuilder(2)
    c = b.channel(0, 1, depth=depth)
    x = b.buffer(0, chunks=3, chunk_bytes=10, role="input")
    places = [b.buffer(1, chunks=1, chunk_bytes=10, role="activation") for _ in range(3)]
    send, recv = b.lane(0), b.lane(1)
    for k, place in enumerate(places):
        send.send(c, x, k)
        got = recv.recv(c, place, 0)
        if k == 1:
            b.dies_after(places[0], got)
    p = b.build()
    timeline = simulate_program(p, line(2, rate=10), names(2))
    start, end = np.empty(len(p.steps)), np.empty(len(p.steps))
    start[timeline.spans.step], end[timeline.spans.step] = timeline.spans.start_s, timeline.spans.end_s
    assert timeline.memory_peak_bytes[1] == order_peak(p, start, end)[1] == expected


@pytest.mark.parametrize(("adds", "used", "expected"), [(False, False, 0), (True, False, 20), (False, True, 20)])
def test_staging_counts_where_messages_cannot_go_straight_into_place(adds: bool, used: bool, expected: int) -> None:
    b = ProgramBuilder(2)
    c = b.channel(0, 1, depth=2)
    x = b.buffer(0, chunks=1, chunk_bytes=10, role="input")
    y = b.buffer(1, chunks=1, chunk_bytes=10, role="gradient", persistent=True)
    b.lane(0).send(c, x, 0)
    before = [b.lane(1, unit=Unit.COMPUTE).compute(b.op("F", graph="g", reads=[(y, 0, 1)]))] if used else []
    lane = b.lane(1)
    (lane.recv_add if adds else lane.recv)(c, y, 0, after=before)
    p = b.build()
    plain, staged = (simulate_program(p, line(2, rate=10), names(2), durations_s=np.ones(len(p.steps)), staging=s) for s in (False, True))
    assert staged.memory_peak_bytes[1] - plain.memory_peak_bytes[1] == expected
    assert worst_order_memory(p).staging_bytes[1] == expected


def random_memory_program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    b = ProgramBuilder(2)
    roles = ("input", "weight", "activation", "gradient", "scratch")
    buffers, root = [], []
    for rank in range(2):
        row: list[int] = []
        for _ in range(int(rng.integers(2, 6))):
            inside = int(rng.choice(row)) if row and rng.random() < 0.2 else -1
            size = int(rng.integers(1, 50))
            root.append(root[inside] if inside >= 0 else len(root))
            row.append(b.buffer(rank, chunks=2, chunk_bytes=size, role=str(rng.choice(roles)), persistent=bool(rng.random() < 0.2), alias_of=inside))
        buffers.append(row)
    lanes = [[b.lane(rank, unit=0), b.lane(rank)] for rank in range(2)]
    channels = [b.channel(0, 1, depth=9), b.channel(1, 0, depth=9)]
    steps: list[list[StepRef]] = [[], []]

    users: dict[int, list[StepRef]] = {}

    def some(rank: int) -> list[tuple[int, int, int]]:
        return [(int(x), 0, 2) for x in rng.choice(buffers[rank], int(rng.integers(0, 3)))]

    def used(step: StepRef, ranges: list[tuple[int, int, int]]) -> StepRef:
        for buffer, _, _ in ranges:
            users.setdefault(root[buffer], []).append(step)
        return step

    for _ in range(int(rng.integers(3, 14))):
        rank = int(rng.integers(2))
        known = steps[rank]
        after = [known[int(rng.integers(len(known)))]] if known and rng.random() < 0.5 else []
        if rng.random() < 0.6:
            reads, writes = some(rank), some(rank)
            op = b.op("F", graph="g", reads=reads, writes=writes, workspace_bytes=int(rng.choice([0, 0, 13])))
            known.append(used(lanes[rank][0].compute(op, after=after), reads + writes))
        else:
            src, dst = int(rng.choice(buffers[rank])), int(rng.choice(buffers[1 - rank]))
            known.append(used(lanes[rank][1].send(channels[rank], src, 0, after=after), [(src, 0, 1)]))
            steps[1 - rank].append(used(lanes[1 - rank][1].recv(channels[rank], dst, 0), [(dst, 0, 1)]))
    for buffer, last in users.items():
        if rng.random() < 0.7:
            b.dies_after(buffer, *last)
    return b.build()


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_memory_peak_against_the_checkers(seed: int) -> None:
    """The checker works the peak of one order out by itself, from its own lifetimes."""
    p = random_memory_program(seed)
    assume(not check_races(p))  # who is first would depend on the order
    durations = np.random.default_rng(seed).integers(1, 5, len(p.steps)).astype(float)
    timeline = simulate_program(p, line(2, rate=7), names(2), durations_s=durations)
    start, end = np.empty(len(p.steps)), np.empty(len(p.steps))
    start[timeline.spans.step], end[timeline.spans.step] = timeline.spans.start_s, timeline.spans.end_s
    assert timeline.memory_peak_bytes == tuple(order_peak(p, start, end))[:2]


def test_memory_windows_and_views() -> None:
    """A ring of 2 slots counts twice, a buffer of its own slices once per iteration, a view not at all."""
    b = ProgramBuilder(1)
    ring = b.buffer(0, chunks=1, chunk_bytes=3, window=2)
    own = b.buffer(0, chunks=1, chunk_bytes=10)
    view = b.buffer(0, chunks=1, chunk_bytes=5, alias_of=own)
    b.lane(0, repeat=4).copy((ring, 0), (own, 0))
    b.lane(0, repeat=4).copy((ring, 0), (view, 0))
    timeline = simulate_program(b.build(), line(1), ["d0"], durations_s=[1.0, 1.0])
    assert timeline.memory_peak_bytes == (46,)


def test_memory_counts_buffers_of_symbolic_size_at_their_upper_bound() -> None:
    b = ProgramBuilder(1)
    size = b.size("k", lower=0, expected=10, upper=200)
    sized, plain = b.buffer(0, chunks=2, chunk_bytes=7, size=size), b.buffer(0, chunks=3, chunk_bytes=7)
    b.lane(0).copy((sized, 0), (plain, 0))
    for sizes in ("lower", "expected", "upper"):
        assert simulate_program(b.build(), line(1), ["d0"], durations_s=[1.0], sizes=sizes).memory_peak_bytes == (2 * 200 + 3 * 7,)
