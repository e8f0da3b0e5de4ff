"""Ranks that leave a barrier apart begin together all the same, where they share a clock."""

from __future__ import annotations

import threading

import pytest

from meshwright.bench.together import MAX_DROPPED, Start, clock_number

LATENCY_S = 0.005


class Rank:
    """One rank with a clock of its own that no waiting moves but what it is told: `late_s` after the last one it leaves an exchange."""

    def __init__(self, number: int, world: World, late_s: float, clock_is: float) -> None:
        self.number, self.world, self.late_s, self.now_s = number, world, late_s, 100.0 * number + 7.0
        self.start = Start(self.most, clock=lambda: self.now_s, sleep=self.sleep, clock_is=clock_is)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def most(self, values: list[float]) -> list[float]:
        rows, latest_s = self.world.meet(self.number, values, self.now_s)
        self.now_s = latest_s + self.late_s
        return [max(column) for column in zip(*rows, strict=True)]


class World:
    """Ranks are threads that meet."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.said = threading.Barrier(ranks, timeout=20), [([0.0], 0.0)] * ranks

    def meet(self, number: int, values: list[float], now_s: float) -> tuple[list[list[float]], float]:
        self.said[number] = (values, now_s)
        self.barrier.wait()
        found = [list(v) for v, _ in self.said], max(s for _, s in self.said)
        self.barrier.wait()
        return found


def run(late_s: list[float], clocks: list[float], *, iterations: int = 3, lasts_s: float = 0.01) -> tuple[list[list[float]], int]:
    """(when each rank began, of every iteration that counts; how many did not count)."""
    world, began, dropped = World(len(late_s)), [[0.0] * len(late_s) for _ in range(iterations)], [0] * len(late_s)

    def one(number: int) -> None:
        rank, made = Rank(number, world, late_s[number], clocks[number]), 0
        while made < iterations:
            rank.start.begin()
            began[made][number] = rank.start.began_s
            counts, longest = rank.start.counts(lasts_s * (1 + number))
            assert longest == lasts_s * len(late_s), "the slowest rank's"
            made += counts
            dropped[number] += not counts

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(late_s))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(dropped)) == 1, "all ranks decide alike"
    return began, dropped[0]


def test_ranks_that_leave_a_barrier_apart_begin_at_one_moment() -> None:
    began, dropped = run([0.0, LATENCY_S, 2 * LATENCY_S], [1.0, 1.0, 1.0])
    assert dropped == 1
    for row in began:
        assert max(row) - min(row) == pytest.approx(0, abs=1e-9)


def test_ranks_that_are_close_or_share_no_clock_are_left_alone() -> None:
    assert run([0.0, 1e-4], [1.0, 1.0])[1] == 0
    began, dropped = run([0.0, LATENCY_S], [1.0, 2.0])
    assert dropped == 0 and max(began[0]) - min(began[0]) == pytest.approx(LATENCY_S)
    assert run([0.0, LATENCY_S], [1.0, 1.0], lasts_s=1.0)[1] == 0, "5 ms of two seconds"


def test_ranks_that_never_begin_together_are_timed_all_the_same() -> None:
    world = World(2)
    ranks: list[int] = []

    def one(number: int) -> None:
        rank = Rank(number, world, 0.0, 1.0)
        while True:
            rank.start.begin()
            rank.start.began_s += 10.0 * number * (1 + len(ranks))  # held up, longer every time
            if rank.start.counts(0.01)[0]:
                break
        ranks.append(rank.start.dropped)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ranks == [MAX_DROPPED, MAX_DROPPED]


def test_a_clock_is_known_by_its_boot() -> None:
    assert clock_number() == clock_number() > 0
