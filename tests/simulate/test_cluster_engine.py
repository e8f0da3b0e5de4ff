"""Clusters in virtual time: against sums by hand and a plain loop; resizing, moving, failures, rounds, placements without rounds."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from meshwright.cluster import Part, Queue, QueuedJob, Sensitivity, Server, Servers
from meshwright.cluster.allocation import floor_of, speed_of
from meshwright.cluster.generate import synthetic
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import random_failures, simulate_queue, speeds
from meshwright.errors import UsageError
from meshwright.simulate.cluster import Costs, Failure, measures, simulate_cluster

FLAT = Sensitivity(name="flat", cores=(1.0,), memory_bytes=(1,), speed=((1.0,),))
RISING = Sensitivity(name="rising", cores=(1.0, 2.0, 3.0), memory_bytes=(1,), speed=((0.5,), (1.0,), (1.5,)))


def cluster(count: int, gpus: int = 2, cores: int = 4) -> Servers:
    made = [Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(gpus)), cores=cores, memory_bytes=6000) for n in range(count)]
    return Servers(servers=tuple(made))


def queue_of(*rows: tuple[float, float], gpus: int = 1, profile: str = "flat") -> Queue:
    return Queue(profiles=(FLAT, RISING), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=gpus, profile=profile, arrival_s=a, duration_s=d) for i, (a, d) in enumerate(rows)
    ))  # fmt: skip


class Script:
    """Answers that are written down: moment's (why, job or server) -> changes."""

    moments: ClassVar[frozenset[str]] = frozenset({"arrival", "end", "failure", "repair", "round"})

    def __init__(self, answers, round_s=0.0):
        self.answers, self.round_s, self.asked = answers, round_s, []

    def decide(self, state, moment):
        self.asked.append((moment.why, moment.now_s))
        return self.answers.get((moment.why, max(moment.job, moment.server) if moment.why != "round" else moment.now_s), {})


def ran(servers, queue, answers, *, round_s=0.0, **options):
    script = Script(answers, round_s)
    return simulate_cluster(servers, queue, script, speed=speeds(servers, queue, speed_of), floor=speeds(servers, queue, floor_of), **options), script


def test_placements_arrive_resize_migrate_and_depart():
    servers, queue = cluster(2), queue_of((0, 100), (10, 100), profile="rising")
    here, wide, there = Part(0, (0,), 2, 3), Part(0, (0,), 3, 3), Part(1, (1,), 2, 3)
    found, _ = ran(servers, queue, {("arrival", 0): {0: (here,)}, ("arrival", 1): {0: (wide,), 1: (there,)}}, record=True)
    # 10 s at speed 1, then 90 of work left at 1.5: 10 + 60.
    assert found.end_s.tolist() == pytest.approx([70, 110]) and found.resizes.tolist() == [1, 0] and found.moves.tolist() == [0, 0]
    timeline = found.timeline()
    assert timeline.makespan_s == pytest.approx(110) and len(timeline.spans) == 3 and list(timeline.spans.name) == ["j0", "j0", "j1"]
    moved, _ = ran(servers, queue, {("arrival", 0): {0: (here,)}, ("arrival", 1): {0: (there,)}}, costs=Costs(move_s=5), last=1)
    assert moved.end_s[0] == pytest.approx(105) and moved.moves[0] == 1  # stands still for 5 s


def test_preempted_jobs_wait_and_keep_their_work():
    servers, queue = cluster(1), queue_of((0, 100), (10, 20))
    one = (Part(0, (0,), 2, 3),)
    found, _ = ran(servers, queue, {("arrival", 0): {0: one}, ("arrival", 1): {0: (), 1: one}, ("end", 1): {0: one}})
    assert found.end_s.tolist() == pytest.approx([120, 30]) and found.moves.tolist() == [1, 0]
    counted = measures(found)
    assert counted.mean_s == pytest.approx((120 + 20) / 2) and counted.makespan_s == pytest.approx(120)
    assert counted.gpu_utilisation == pytest.approx(0.5)


@pytest.mark.parametrize(("checkpoint_s", "lost"), [(0.0, 47), (10.0, 7)])
def test_failures_lose_work_since_the_last_checkpoint(checkpoint_s, lost):
    servers, queue = cluster(2), queue_of((0, 100))
    one, other = (Part(0, (0,), 2, 3),), (Part(1, (0,), 2, 3),)
    costs, down = Costs(checkpoint_s=checkpoint_s), [Failure(0, 47.0, 1000.0)]
    found, _ = ran(servers, queue, {("arrival", 0): {0: one}, ("failure", 0): {0: other}}, failures=down, costs=costs)
    assert found.lost_s[0] == pytest.approx(lost) and found.end_s[0] == pytest.approx(100 + lost)
    with pytest.raises(UsageError, match="does not have"):  # it is away
        ran(servers, queue, {("arrival", 0): {0: one}, ("failure", 0): {0: one}}, failures=down, costs=costs)


@pytest.mark.parametrize("parts", [
    {0: (Part(0, (0,), 1, 1),), 1: (Part(0, (0,), 1, 1),)}, {0: (Part(0, (0,), 5, 1),)}, {0: (Part(0, (0,), 1, 7),)}, {0: (Part(0, (2,), 1, 1),)},
])  # fmt: skip
def test_policies_cannot_give_what_is_not_there(parts):
    with pytest.raises(UsageError, match="does not have"):
        ran(cluster(1), queue_of((0, 1), (0, 1)), {("arrival", 1): parts})


def test_a_job_that_is_not_there_cannot_run_and_nothing_counted_is_refused():
    with pytest.raises(UsageError, match="is not there"):
        ran(cluster(1), queue_of((0, 1), (5, 1)), {("arrival", 0): {1: (Part(0, (0,), 1, 1),)}})
    idle, _ = ran(cluster(1), queue_of((0, 1)), {})
    with pytest.raises(UsageError, match="no job that is counted"):
        measures(idle)


def by_hand(queue: Queue, gpus: int, round_s: float) -> list[float]:
    """FIFO in rounds on one pool of GPUs at speed 1: a plain loop."""
    left, end, now = list(queue.duration_s), [np.inf] * len(queue.jobs), 0.0
    while any(x == np.inf for x in end):
        free, running = gpus, []
        for i, job in enumerate(queue.jobs):
            if job.arrival_s <= now and end[i] == np.inf and job.gpus <= free:
                running.append(i)
                free -= job.gpus
        for i in running:
            if left[i] <= round_s:
                end[i] = now + left[i]
            left[i] -= round_s
        now += round_s
    return end


def test_rounds_are_those_of_a_plain_loop():
    r = np.random.default_rng(3)
    queue = Queue(profiles=(FLAT,), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=int(r.choice([1, 2, 4])), profile="flat", arrival_s=float(a), duration_s=float(r.integers(50, 4000)))
        for i, a in enumerate(np.cumsum(r.exponential(300, 40)))
    ))  # fmt: skip
    servers = cluster(2, gpus=4, cores=8)
    for name in ("proportional", "tune", "priced", "greedy"):
        found = simulate_queue(servers, queue, order("fifo")(), allocation(name)(), age_rounds=0)
        assert found.run.end_s.tolist() == pytest.approx(by_hand(queue, 8, 300.0)), name
        assert found.measures.below_floor == 0


def test_orders_differ_as_they_should():
    servers = cluster(1, gpus=1, cores=2)
    queue = queue_of((0, 3000), (100, 600), (200, 300))
    ends = {
        name: simulate_queue(servers, queue, order(name)(), allocation("proportional")()).run.end_s.tolist()
        for name in ("fifo", "srtf", "las", "ftf")
    }
    assert np.argsort(ends["fifo"]).tolist() == [0, 1, 2] and np.argsort(ends["srtf"]).tolist() == [2, 1, 0]
    assert ends["las"][0] == max(ends["las"]) and np.argsort(ends["ftf"])[0] == 2


def test_gangs_that_are_passed_over_age():
    servers = cluster(1, gpus=2)
    rows = [("wide", 2, 0.0, 10_000.0), ("long", 1, 0.0, 60_000.0), *((f"short{i}", 1, 900.0 * i, 800.0) for i in range(60))]
    queue = Queue(profiles=(FLAT,), jobs=tuple(
        QueuedJob(name=name, gpus=gpus, profile="flat", arrival_s=at_s, duration_s=took_s) for name, gpus, at_s, took_s in rows
    ))  # fmt: skip
    never, aged = (simulate_queue(servers, queue, order("srtf")(), allocation("proportional")(), age_rounds=n) for n in (0, 5))
    assert aged.run.end_s[0] < 0.9 * never.run.end_s[0] and aged.run.start_s[0] < never.run.start_s[0]


def test_queues_survive_failures_and_equal_seeds_are_equal():
    servers, queue = cluster(2, gpus=8, cores=24), synthetic(14, per_hour=20, split=(33, 33, 33), seed=1)
    queue = Queue(name=queue.name, profiles=tuple(
        Sensitivity(name=p.name, cores=p.cores, memory_bytes=tuple(b // 10**8 for b in p.memory_bytes), speed=p.speed) for p in queue.profiles
    ), jobs=queue.jobs)  # fmt: skip
    down = random_failures(servers, every_s=20_000, repair_s=5_000, until_s=10**6, seed=2)
    costs = Costs(move_s=30, checkpoint_s=600)
    runs = [simulate_queue(servers, queue, order("las")(), allocation("priced")(), failures=down, costs=costs) for _ in range(2)]
    assert np.isfinite(runs[0].run.end_s).all() and runs[0].measures == runs[1].measures and runs[0].measures.lost_s > 0
    calm = simulate_queue(servers, queue, order("las")(), allocation("priced")(), costs=Costs(move_s=30, checkpoint_s=600))
    assert calm.measures.mean_s < runs[0].measures.mean_s and calm.measures.below_floor == 0
