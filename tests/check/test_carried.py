"""The auditor: honest books show no difference; every kind of lie is found and named."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from effort import few
from meshwright.check.carried import Carried, check_carried
from meshwright.cluster import Given, Server, Servers
from meshwright.cluster.placed import placed, shapes

SERVERS = Servers(servers=tuple(Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(4)), cores=8, memory_bytes=1 << 34) for n in range(3)))


def honest(seed, *, name="j0", attempt=1, at=100.0):
    rng = np.random.default_rng(seed)
    given = tuple(
        Given(job=name, server=f"s{n}", gpus=tuple(sorted(f"s{n}g{k}" for k in rng.choice(4, int(rng.integers(1, 4)), replace=False))),
              cores=int(rng.integers(1, 8)), memory_bytes=int(rng.integers(1, 8)) << 30)
        for n in sorted(rng.choice(3, int(rng.integers(1, 4)), replace=False).tolist())
    )  # fmt: skip
    order = [g for x in given for g in x.gpus]
    rng.shuffle(order)
    made = placed(SERVERS, name, given, number=0, attempt=attempt, order=order)
    ranks = {g.server: tuple(n for n, r in enumerate(made.ranks) if r.server == g.server) for g in given}
    seen = {g.server: tuple(map(str, range(len(g.gpus)))) for g in given}
    return Carried(placed=made, given=given, ranks=ranks, host_gpus=seen, released=0, started_s=at, ended_s=at + 5, over=True, good=True)


def kinds(jobs, picks=True):
    return set(check_carried(jobs, picks_gpus=picks).facts["kinds"])


@pytest.mark.parametrize("seed", range(few(20)))
def test_honest_books_show_no_difference(seed):
    verdict = check_carried([honest(seed), honest(seed + 100, name="j1", at=200.0)], picks_gpus=True)
    assert verdict.ok and verdict.facts["differences"] == 0 and verdict.facts["jobs"] == 2


def lies(job):
    first = job.given[0]
    rest = job.given[1:]
    free = next(s for s in ("s0", "s1", "s2", "elsewhere") if s not in {g.server for g in job.given})
    other = tuple(g for g in (f"{first.server}g{k}" for k in range(4)) if g not in first.gpus)

    def with_first(**facts):
        return dataclasses.replace(job, given=(msgspec.structs.replace(first, **facts), *rest))

    yield "server", with_first(server=free)
    yield "server", dataclasses.replace(job, given=(*job.given, Given(job="j0", server=free, gpus=(), cores=1, memory_bytes=1)))
    yield "GPUs", with_first(gpus=first.gpus[1:])
    yield "GPUs", with_first(gpus=(*first.gpus[1:], other[0]))
    yield "cores", with_first(cores=first.cores + 1)
    yield "cores", with_first(cores=0)
    yield "memory", with_first(memory_bytes=first.memory_bytes + (2 << 20))
    yield "memory", with_first(memory_bytes=0)
    yield "ranks", dataclasses.replace(job, ranks={**job.ranks, first.server: tuple(n + 1 for n in job.ranks[first.server])})
    yield "ranks", dataclasses.replace(job, ranks={s: r for s, r in job.ranks.items() if s != first.server})
    yield "GPUs seen", dataclasses.replace(job, host_gpus={first.server: ()})
    yield "never started", dataclasses.replace(job, started_s=0.0)


@pytest.mark.parametrize("seed", range(few(8)))
def test_every_lie_is_found_and_named(seed):
    for what, job in lies(honest(seed)):
        found = check_carried([job], picks_gpus=True)
        assert what in found.facts["kinds"] and "job j0, attempt 1" in found.findings[0].message, what


def test_an_engine_that_picks_gpus_is_asked_how_many_only():
    job = honest(1)
    first = job.given[0]
    other = dataclasses.replace(job, given=(msgspec.structs.replace(first, gpus=tuple(f"x{k}" for k in range(len(first.gpus)))), *job.given[1:]))
    assert kinds([other], picks=False) == set() and kinds([other]) == {"GPUs"}


def test_twice_shared_and_unseen():
    one, again = honest(3), honest(3, attempt=2, at=103.0)
    assert kinds([one, again]) == {"twice", "shared"}  # it ended well twice, and the second began while the first ran
    lost = dataclasses.replace(one, good=False)
    assert kinds([lost, honest(3, attempt=2, at=200.0)]) == set()
    assert kinds([one, honest(3, name="j1", at=101.0)]) == {"shared"}
    unseen = dataclasses.replace(one, given=())
    assert check_carried([unseen], picks_gpus=True).facts["unseen"] == 1 and kinds([unseen]) == set()


def test_parts_of_one_kind_are_one_shape():
    given = [Given(job="j", server=s, gpus=(f"{s}g0",) * n, cores=n, memory_bytes=n) for s, n in (("a", 2), ("b", 1), ("c", 2))]
    assert [(s.servers, s.gpus) for s in shapes(given)] == [(("a", "c"), 2), (("b",), 1)]
