"""The policy of real engines: nobody is moved or squeezed, gangs are not passed over for ever, and on single GPUs it is list scheduling."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from effort import few
from meshwright.cluster import Queue, QueuedJob, Sensitivity, Server, Servers
from meshwright.cluster.allocation import floor_of, speed_of
from meshwright.cluster.generate import UNPROFILED, published_profiles
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import Rounds, speeds
from meshwright.drive.cluster_kept import Kept
from meshwright.simulate.cluster import simulate_cluster


def servers_with(sizes, cores=6):
    return Servers(servers=tuple(
        Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(g)), cores=cores * g // 2, memory_bytes=g * 62_500_000_000)
        for n, g in enumerate(sizes)
    ))  # fmt: skip


def kept(servers, queue, first="fifo", strategy="proportional", **options):
    return Kept(servers=servers, queue=queue, order=order(first)(), allocation=allocation(strategy)(), **options)


def jobs_of(rng, count, sizes, profiles=(UNPROFILED,)):
    return Queue(profiles=tuple(profiles), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=int(rng.choice(sizes)), profile=profiles[int(rng.integers(len(profiles)))].name,
                  arrival_s=float(a), duration_s=float(rng.integers(1, 50))) for i, a in enumerate(np.sort(rng.integers(0, 60, count)))
    ))  # fmt: skip


@pytest.mark.parametrize("seed", range(few(10)))
def test_single_gpus_under_fifo_are_list_scheduling(seed):
    """The oracle: a heap of the times at which GPUs are free."""
    rng = np.random.default_rng(seed)
    queue, servers = jobs_of(rng, 25, [1]), servers_with([2, 3, 1])
    run = simulate_cluster(servers, queue, kept(servers, queue), speed=lambda job, parts: 1.0)
    free = [0.0] * 6
    for n, job in enumerate(queue.jobs):
        start = max(job.arrival_s, heapq.heappop(free))
        assert run.start_s[n] == pytest.approx(start)
        heapq.heappush(free, start + job.duration_s)


@pytest.mark.parametrize("strategy", ["proportional", "tune", "priced"])
@pytest.mark.parametrize("first", ["fifo", "srtf"])
def test_nobody_is_moved_resized_or_below_their_share(first, strategy):
    rng = np.random.default_rng(5)
    servers = servers_with([4, 4, 2])
    queue = jobs_of(rng, 30, [1, 2, 4, 6], published_profiles())
    policy = kept(servers, queue, first, strategy)
    run = simulate_cluster(servers, queue, policy, speed=speeds(servers, queue, speed_of), floor=speeds(servers, queue, floor_of))
    assert np.isfinite(run.end_s).all() and not run.moves.any() and not run.resizes.any() and not run.slow.any()
    assert policy.asked >= 30


def test_a_gang_waits_for_so_many_starts_at_most():
    """A gang of all GPUs among a stream of single ones that never lets them all be free at once."""
    servers = servers_with([4])
    small = [QueuedJob(name=f"s{i}", gpus=1, profile="unprofiled", arrival_s=i * 2.0, duration_s=7.0) for i in range(200)]
    gang = QueuedJob(name="gang", gpus=4, profile="unprofiled", arrival_s=4.5, duration_s=1.0)
    queue = Queue(profiles=(UNPROFILED,), jobs=(*small, gang))
    for most in (3, 16):
        run = simulate_cluster(servers, queue, kept(servers, queue, most_passed=most), speed=lambda job, parts: 1.0)
        later = sum(4.5 < s < run.start_s[200] for s in run.start_s[:200].tolist())
        assert most <= later <= most + 3
    run = simulate_cluster(servers, queue, kept(servers, queue, most_passed=0), speed=lambda job, parts: 1.0)
    assert run.start_s[200] > 390


def test_where_nothing_changes_in_place_cores_change_only_if_that_pays():
    """Two jobs share a server; a third comes, whose share they must give up, and goes. Growing again pays where a new start costs nothing."""
    servers = Servers(servers=(Server(name="s", gpus=("a", "b", "c", "d"), cores=16, memory_bytes=1 << 36),))
    profile = Sensitivity(name="any", cores=(1.0, 4.0, 6.0), memory_bytes=(1,), speed=((0.5,), (1.0,), (1.5,)))
    queue = Queue(profiles=(profile,), jobs=tuple(
        QueuedJob(name=f"j{n}", gpus=g, profile="any", arrival_s=at_s, duration_s=d) for n, (g, at_s, d) in enumerate(
            ((1, 0.0, 4000.0), (1, 0.0, 4000.0), (2, 500.0, 500.0)))
    ))  # fmt: skip

    def resizes(move_s, in_place):
        policy = Rounds(servers=servers, queue=queue, order=order("fifo")(), allocation=allocation("priced")(), move_s=move_s, resizes=in_place)
        run = simulate_cluster(servers, queue, policy, speed=speeds(servers, queue, speed_of))
        assert np.isfinite(run.end_s).all()
        return run.resizes.tolist()

    assert resizes(0.0, True)[:2] == [2, 2] == resizes(0.0, False)[:2]
    assert resizes(299.0, False)[:2] == [1, 1], "they give way, and stay so"
