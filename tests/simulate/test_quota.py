"""Devices under a CPU quota: the exact function of what is asked for, and a real process under a real quota."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Cost, Priced, RankThread, Transport
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Program, Unit
from meshwright.run.machine.cpu_quota import PERIOD_US, CpuQuota, quota_place
from meshwright.simulate import simulate_program
from meshwright.simulate.engine import run
from meshwright.simulate.network import compile_network
from meshwright.simulate.pricing import durations, on_processors
from meshwright.simulate.tables import Processors, link_tables, make_state, program_tables


def chain(works: list[float]) -> tuple[Program, Cost]:
    """Compute steps one after the other on one rank."""
    b = ProgramBuilder(ranks=1, name="chain")
    lane = b.lane(0, unit=Unit.COMPUTE)
    for i in range(len(works)):
        lane.compute(b.op(f"F{i}", graph="g"))
    return b.build(), Cost(table={f"g|F{i}": Priced(w, "measured", w) for i, w in enumerate(works)})


def end_by_hand(work: Fraction, quota: Fraction, period: Fraction, overrun: Fraction) -> Fraction:
    """On a grid that everything is a multiple of: works until the quota is overdrawn by so much, then not before the periods have paid for it."""
    grid, now = Fraction(1, 64), Fraction(0)
    left, running = quota, True
    while work > 0:
        running = left > (-overrun if running else 0)
        if running:
            work, left = work - grid, left - grid
        now += grid
        if now % period == 0:
            left = min(quota, left + quota)
    return now


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([(1, 16), (4, 16), (15, 16), (8, 32)]), st.sampled_from([0, 1, 3, 9]))
def test_a_chain_under_a_quota_ends_when_counting_says(sixty_fourths: list[int], of: tuple[int, int], late: int) -> None:
    quota, period, overrun = (Fraction(x, 64) for x in (*of, late))
    share = quota / period
    works = [Fraction(w, 64) for w in sixty_fourths]
    program, cost = chain([float(w / share) for w in works])  # a price is wall time at the device's share
    cost = Cost(table=cost.table, table_share=float(share))
    device = Device(name="a", kind="cpu", cpu_share=float(share), cpu_period_s=float(period), cpu_overrun_s=float(overrun))
    fabric = Fabric(name="one", devices=(device,))
    found = simulate_program(program, fabric, ["a"], cost)
    lasted = sum(works, Fraction(0))
    # A step in a row of steps ends once the quota of so many periods is used: all wall time is work or waiting for quota.
    assert float(lasted) - 1e-9 <= found.makespan_s <= float(end_by_hand(lasted, quota, period, Fraction(0)) + period + overrun / share) + 1e-9
    even = float(lasted / share)
    assert abs(found.makespan_s - even) <= float(period + overrun / share) + 1e-9
    one = Processors(np.array([True]), *(np.array([float(x)]) for x in (quota, period, overrun, 0)), np.array([-1]), 0.0, 0.0, np.array([False]), 0.0)
    tables, messages = program_tables(program, np.array([float(w) for w in works]), program.message_bytes(), program.channels.depth, one)
    links = link_tables(compile_network(program, fabric, ["a"]))
    state = make_state(tables, links, messages, record=False)
    run(tables, links, state, False)
    assert float(state.step["last_end"].max()) == float(end_by_hand(lasted, quota, period, overrun)), "with a full bucket at the start, to the bit"


def test_a_burst_within_the_quota_runs_at_full_speed_and_a_longer_one_waits() -> None:
    """1.9 ms of processor time before and after a round trip, and again in the next step: the quota of 4 ms is never used up."""
    device = Device(name="a", kind="cpu", cpu_share=0.4, cpu_period_s=0.01)
    link = Link(src="a", dst="b", rate_Bps=10**9, latency_s=0.03), Link(src="b", dst="a", rate_Bps=10**9, latency_s=0.03)
    fabric = Fabric(name="two", devices=(device, Device(name="b", kind="cpu")), links=link)
    b = ProgramBuilder(ranks=2, name="there and back")
    op, data = b.op("F", graph="g"), [b.buffer(r, chunks=1, chunk_bytes=1) for r in (0, 1)]
    there, back = b.channel(0, 1), b.channel(1, 0)
    first, second = b.lane(0, unit=Unit.COMPUTE), b.lane(1)
    one = first.compute(op)
    first.send(there, data[0], 0)
    second.recv(there, data[1], 0)
    second.send(back, data[1], 0)
    answer = b.lane(0).recv(back, data[0], 0, after=[one])
    first.compute(op, after=[answer])
    cost = Cost(table={"g|F": Priced(0.0019 / 0.4, "measured")}, table_share=0.4)
    took = simulate_program(b.build(), fabric, ["a", "b"], cost).makespan_s
    assert took == pytest.approx(0.06 + 2 * 0.0019, abs=5e-6)
    long = Cost(table={"g|F": Priced(0.006 / 0.4, "measured")}, table_share=0.4)
    slower = simulate_program(b.build(), fabric, ["a", "b"], long).makespan_s
    assert 0.06 + 2 * 0.006 + 0.006 - 1e-6 <= slower <= 0.06 + 2 * 0.02, "a burst stands still, till its period's end"


def test_a_rank_of_one_thread_does_one_thing_at_a_time() -> None:
    """Copies of messages wait for compute steps and the other way round; data is fetched before both."""
    b = ProgramBuilder(ranks=2, name="side by side")
    op, data = b.op("F", graph="g"), [b.buffer(r, chunks=1, chunk_bytes=1) for r in (0, 1)]
    channel = b.channel(0, 1)
    b.lane(0, unit=Unit.COMPUTE).compute(op)
    b.lane(0).send(channel, data[0], 0)
    b.lane(1).recv(channel, data[1], 0)
    fabric = Fabric(name="two", devices=(Device(name="a"), Device(name="b")), links=(Link(src="a", dst="b", rate_Bps=10**9),))
    cost = Cost(table={"g|F": Priced(0.5)}, transport=Transport(per_message_s=0.25))
    assert simulate_program(b.build(), fabric, ["a", "b"], cost).makespan_s == pytest.approx(0.5)
    thread = Cost(table=cost.table, transport=cost.transport, thread=RankThread(begin_s=0.125, begin_wait_s=0.0625))
    timeline = simulate_program(b.build(), fabric, ["a", "b"], thread)
    assert timeline.makespan_s == pytest.approx(0.125 + 0.5, abs=1e-6), "the send goes first, at once; nobody waits for a sum"
    b = ProgramBuilder(ranks=2, name="an answer")
    op, data = b.op("F", graph="g"), [b.buffer(r, chunks=1, chunk_bytes=1) for r in (0, 1)]
    channel = b.channel(0, 1)
    b.lane(0).send(channel, data[0], 0)
    b.lane(1, unit=Unit.COMPUTE).compute(op)
    b.lane(1).recv(channel, data[1], 0)
    beside = simulate_program(b.build(), fabric, ["a", "b"], cost)
    turns = simulate_program(b.build(), fabric, ["a", "b"], Cost(table=cost.table, transport=cost.transport, thread=RankThread()))
    assert beside.makespan_s == pytest.approx(0.5, abs=1e-6) and turns.makespan_s == pytest.approx(0.75, abs=1e-6)
    assert [step for step, _ in turns.critical_path] == [1, 2]


def test_the_step_that_computes_the_loss_ends_once_the_last_rank_has_begun() -> None:
    """Both ranks' first forward of the loss waits for the sum of both; their second one and the rank without loss do not."""
    b = ProgramBuilder(ranks=3, name="loss")
    loss, other = b.op("F", graph="loss"), b.op("F", graph="other")
    for rank in range(3):
        lane = b.lane(rank, unit=Unit.COMPUTE)
        for _ in range(2):
            lane.compute(other if rank == 2 else loss)
    slow = Device(name="b", kind="cpu", cpu_share=0.5, cpu_period_s=1.0)
    fabric = Fabric(name="three", devices=(Device(name="a"), slow, Device(name="c")))
    table = {"loss|F": Priced(0.25), "other|F": Priced(0.25)}
    thread = RankThread(begin_s=0.75, begin_wait_s=0.125, waits_in=("loss|F",))
    found = simulate_program(b.build(), fabric, ["a", "b", "c"], Cost(table=table, table_share=1.0, thread=thread))
    ends = {int(step): end for step, end in zip(found.spans.step, found.spans.end_s, strict=True)}
    assert ends[4] == pytest.approx(1.0) and ends[5] == pytest.approx(1.25)
    assert ends[0] > 1.1, "rank 1 has begun when it has used 0.75 s, of which every second gives it half"
    assert ends[1] == pytest.approx(ends[0] + 0.25), "the second one waits for nothing"


BURN = """
import resource, sys, time
def burn(cpu_s):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass
print(flush=True)
sys.stdin.readline()
for i in range(40):
    time.sleep(0.0237)
    before, begin = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw, time.perf_counter()
    burn(float(sys.argv[1]))
    took = time.perf_counter() - begin
    print(took, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - before, flush=True)
"""


@pytest.mark.skipif(quota_place() is None, reason="no control group can be written here")
@pytest.mark.parametrize("cpu_s", [0.0015, 0.011])
def test_a_real_process_under_a_real_quota(cpu_s: float) -> None:
    """Bursts after idle periods. One of 1.5 ms fits into the quota of 3 ms: some run through, which on an evenly slower device none would.
    One of 11 ms needs three whole quotas and more: it stands still three times at least."""
    share, period_s = 0.3, PERIOD_US / 1e6
    done = subprocess.Popen([sys.executable, "-c", BURN, str(cpu_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with CpuQuota(share) as quota:
        assert done.stdout is not None
        done.stdout.readline()  # it has started
        quota.attach(done.pid)
        said, _ = done.communicate("\n", timeout=200)
    walls, taken_away = np.array([line.split() for line in said.splitlines()], float).T
    least = served_by_hand(cpu_s, share * period_s, period_s)
    assert np.median(walls) >= 0.9 * min(least), "not faster than the bucket allows; a single one may be, as the kernel looks once a tick"
    # By the kernel's count of how often the core was taken away: the clock says how busy the machine is, and its host.
    assert taken_away.min() == 0 if cpu_s < share * period_s else np.median(taken_away) >= 3


def served_by_hand(work_s: float, quota_s: float, period_s: float) -> list[float]:
    """Wall seconds of a burst that begins with a full bucket at 20 places of a period."""
    found = []
    for begin in np.arange(20) / 20 * period_s:
        now, left, rest = begin, quota_s, work_s
        edge = period_s
        while rest > 1e-12:
            part = min(rest, left, edge - now)
            now, rest, left = now + part, rest - part, left - part
            if (left <= 1e-12 or now >= edge - 1e-12) and rest > 1e-12:
                now, left, edge = edge, quota_s, edge + period_s
        found.append(now - begin)
    return found


def two_that_meet() -> Program:
    """Twice: both compute, then each waits for the other."""
    b = ProgramBuilder(ranks=2, name="meet")
    op = b.op("F", graph="g")
    computes, sends, receives = [b.lane(r, unit=Unit.COMPUTE) for r in (0, 1)], [b.lane(r) for r in (0, 1)], [b.lane(r) for r in (0, 1)]
    heard: list[list[int]] = [[], []]
    for _ in range(2):
        channels = b.channel(0, 1), b.channel(1, 0)
        done = [computes[r].compute(op, after=heard[r]) for r in (0, 1)]
        for r in (0, 1):
            sends[r].send(channels[r], b.buffer(r, chunks=1, chunk_bytes=1), 0, after=[done[r]])
        heard = [[receives[r].recv(channels[1 - r], b.buffer(r, chunks=1, chunk_bytes=1), 0)] for r in (0, 1)]
    return b.build()


def mean_by_hand(work_s: float, quota_s: float, period_s: float, latency_s: float, phases: list[float]) -> float:
    """Of 40 steps in a row of two whose periods begin at these parts of one, without the first four."""
    left, refill, now, ends = [quota_s] * 2, [p * period_s for p in phases], 0.0, []
    for half in range(80):
        finished = []
        for r in (0, 1):
            clock, rest = now, work_s
            while True:
                while clock >= refill[r]:
                    left[r], refill[r] = min(quota_s, left[r] + quota_s), refill[r] + period_s
                part = min(left[r], refill[r] - clock, rest)
                left[r], rest, clock = left[r] - part, rest - part, clock + part
                if rest <= 1e-12:
                    break
                clock = refill[r]
            finished.append(clock)
        now = max(finished) + latency_s
        ends += [now] if half % 2 else []
    return (ends[-1] - ends[3]) / (len(ends) - 4)


@pytest.mark.parametrize(("work_s", "latency_s"), [(0.003, 0.0005), (0.0045, 0.003), (0.005, 0.0005), (0.011, 0.004), (0.002, 0.003)])
def test_a_step_under_quotas_is_as_long_as_steps_are_in_the_mean(work_s: float, latency_s: float) -> None:
    """Also where no step is: of 3 ms at a quota of 4, a step of 12.5 ms follows each of 17.5. Periods of the two begin at any times."""
    share, period_s = 0.4, 0.01
    devices = tuple(Device(name=name, kind="cpu", cpu_share=share, cpu_period_s=period_s) for name in "ab")
    links = Link(src="a", dst="b", rate_Bps=10**12, latency_s=latency_s), Link(src="b", dst="a", rate_Bps=10**12, latency_s=latency_s)
    cost = Cost(table={"g|F": Priced(work_s / share, "measured")}, table_share=share)
    found = simulate_program(two_that_meet(), Fabric(name="two", devices=devices, links=links), ["a", "b"], cost)
    phases = np.random.default_rng(0).random((50, 2)).tolist()
    mean_s = np.mean([mean_by_hand(work_s, share * period_s, period_s, latency_s, p) for p in phases])
    assert found.makespan_s == pytest.approx(mean_s, rel=0.025)


def shared_by_hand(
    works: list[list[Fraction]], gates: list[list[Fraction]], quotas: list[Fraction], period: Fraction, late: Fraction, cores: int,
    speeds: list[list[Fraction]],
) -> list[Fraction]:  # fmt: skip
    """When each rank's last piece of work ends; rank r's piece i is there from gates[r][i] on. From moment to moment at which anything may change.
    `speeds`: by rank, of a core's work while 1, 2, ... run; a quota counts the core's time."""
    ranks, now = range(len(works)), Fraction(0)
    at, rest, left, going = [0] * len(works), [w[0] for w in works], list(quotas), [True] * len(works)
    ends = [Fraction(0)] * len(works)
    while any(a < len(w) for a, w in zip(at, works, strict=True)):
        there = [at[r] < len(works[r]) and gates[r][at[r]] <= now for r in ranks]
        runs = [there[r] and left[r] > (-late if going[r] else 0) for r in ranks]
        core = min(Fraction(1), Fraction(cores, max(1, sum(runs))))
        speed = [s[min(max(1, sum(runs)), len(s)) - 1] for s in speeds]
        moments = [(now // period + 1) * period - now]
        moments += [gates[r][at[r]] - now for r in ranks if at[r] < len(works[r]) and not there[r]]
        moments += [min(rest[r] / speed[r], left[r] + (late if going[r] else 0)) / core for r in ranks if runs[r]]
        passed = min(moments)
        now += passed
        for r in ranks:
            if runs[r]:
                rest[r], left[r] = rest[r] - passed * core * speed[r], left[r] - passed * core
            going[r] = runs[r] and (rest[r] == 0 or left[r] > -late or now % period == 0)
            if now % period == 0:
                left[r] = min(quotas[r], left[r] + quotas[r])
            if runs[r] and rest[r] == 0:
                ends[r], at[r] = now, at[r] + 1
                rest[r] = works[r][at[r]] if at[r] < len(works[r]) else rest[r]
    return ends


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 40)), min_size=1, max_size=4), min_size=2, max_size=5),
    st.sampled_from([1, 2, 3]), st.sampled_from([0, 1, 4]), st.lists(st.sampled_from([2, 5, 8, 15]), min_size=5, max_size=5),
    st.sampled_from([[[4]], [[4], [4, 2]], [[4, 4, 2], [4, 2, 1]], [[4, 2, 2], [4, 4, 4], [4, 1, 1]]]),
)  # fmt: skip
def test_ranks_that_run_at_one_moment_share_the_cores(
    pieces: list[list[tuple[int, int]]], cores: int, late: int, quota: list[int], fourths: list[list[int]]
) -> None:
    """Against counting in fractions: bursts with pauses, unlike quotas, on fewer cores than ranks, which slow each other down by kind of work."""
    works = [[Fraction(w, 64) for w, _ in rank] for rank in pieces]
    gates = [[Fraction(sum(gap for _, gap in rank[: i + 1]), 64) for i in range(len(rank))] for rank in pieces]
    ranks, period = len(pieces), Fraction(16, 64)
    b = ProgramBuilder(ranks=ranks + 1, name="bursts")
    made, last = [], []  # (step, seconds); a rank's last step
    for r in range(ranks):
        op, lane = b.op(f"F{r}", graph="g"), b.lane(r, unit=Unit.COMPUTE)
        for work, gate in zip(works[r], gates[r], strict=True):
            channel, clock = b.channel(ranks, r), b.lane(ranks)
            made.append((clock.send(channel, b.buffer(ranks, chunks=1, chunk_bytes=1), 0), gate))
            heard = b.lane(r).recv(channel, b.buffer(r, chunks=1, chunk_bytes=1), 0)
            made.append((lane.compute(op, after=[heard]), work))
        last.append(made[-1][0])
    program = b.build()
    durations, number = np.zeros(len(program.steps)), {x: int(program.lanes.start[x.lane]) + x.position for x, _ in made}
    for step, seconds in made:
        durations[number[step]] = float(seconds)
    fabric = Fabric(name="one", devices=(Device(name="a"),))
    quotas = [Fraction(q, 64) for q in quota[:ranks]]
    numbers = [[*(float(q) for q in quotas), 0.0], [float(period)] * (ranks + 1), [late / 64] * (ranks + 1), [0.0] * (ranks + 1)]
    taken = np.array([True] * ranks + [False])
    rows = np.array([r % len(fourths) for r in range(ranks + 1)])
    most = max(map(len, fourths))
    table = np.array([[*x, *[x[-1]] * (most - len(x))] for x in fourths]) / 4
    actor = program.lanes.actor[program.lane_of_step()]
    curve = table, rows[actor], rows
    of = Processors(taken, *(np.array(x) for x in numbers), np.full(ranks + 1, -1), 0.0, 0.0, taken, float(cores), *curve)
    tables, messages = program_tables(program, durations, program.message_bytes(), program.channels.depth, of)
    network = link_tables(compile_network(program, fabric, ["a"] * (ranks + 1)))
    state = make_state(tables, network, messages, record=False)
    run(tables, network, state, False)
    speeds = [[Fraction(x, 4) for x in fourths[r % len(fourths)]] for r in range(ranks)]
    expected = shared_by_hand(works, gates, quotas, period, Fraction(late, 64), cores, speeds)
    assert state.step["last_end"][[number[x] for x in last]].tolist() == pytest.approx([float(x) for x in expected], abs=1e-9)


def shared_ends(works: list[float], cores: float) -> list[float]:
    """Each gets min(1, cores / how many still work)."""
    left, ends, now = dict(enumerate(works)), [0.0] * len(works), 0.0
    while left:
        rate, (first, work) = min(1.0, cores / len(left)), min(left.items(), key=lambda x: x[1])
        now += work / rate
        left = {i: w - work for i, w in left.items() if i != first}
        ends[first] = now
    return ends


@pytest.mark.parametrize("cores", [0.0, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("works", [[0.25, 0.25], [0.125, 0.375, 0.25], [0.5, 0.0625, 0.25, 0.125]])
def test_devices_of_one_machine_share_its_cores(cores: float, works: list[float]) -> None:
    """Bursts within their quotas; a device without this figure, or without a quota, has a core of its own."""
    share, n = 0.5, len(works)
    b = ProgramBuilder(ranks=n + 2, name="bursts")
    for rank in range(n + 2):
        b.lane(rank, unit=Unit.COMPUTE).compute(b.op(f"F{rank}", graph="g"))
    all_works = [*works, 0.5, 0.75]
    prices = {f"g|F{i}": Priced(w / share, "measured", w / share) for i, w in enumerate(all_works)}
    cost = Cost(table=prices, table_share=share)
    quota = {"cpu_share": share, "cpu_period_s": 2.0}
    devices = [Device(name=f"d{i}", kind="cpu", cpu_cores=cores, **quota) for i in range(n)]
    devices += [Device(name="own", kind="cpu", **quota), Device(name="free", kind="cpu", cpu_cores=cores)]
    program, names = b.build(), [d.name for d in devices]
    fabric = Fabric(name="machine", devices=tuple(devices))
    time_s, processors = on_processors(program, cost, fabric, names, durations(program, cost, fabric, names))
    assert processors is not None
    tables, messages = program_tables(program, time_s, program.message_bytes(), program.channels.depth, processors)
    links = link_tables(compile_network(program, fabric, names))
    state = make_state(tables, links, messages, record=False)
    run(tables, links, state, False)  # with a full bucket at the start
    wanted = [*shared_ends(works, cores or float(n)), 0.5, 0.75]  # without a quota as long as its processor works
    assert state.step["last_end"].tolist() == pytest.approx(wanted, abs=1e-9)
