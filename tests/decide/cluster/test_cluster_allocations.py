"""Divisions, allocations and bounds against brute force; wrong allocations are refused and named."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from effort import few
from meshwright.check.cluster import check_allocation
from meshwright.cluster import Given, Queue, QueuedJob, Sensitivity, Server, Servers
from meshwright.cluster.generate import published_profiles, synthetic
from meshwright.decide.cluster import AllocationProblem, Book, allocation, order
from meshwright.decide.cluster.bound import groups_of, lp_prices, upper_bound
from meshwright.decide.cluster.fillings import fillings_bound
from meshwright.decide.cluster.opt import Opt
from meshwright.decide.cluster.problem import admitted, require_possible
from meshwright.drive.cluster import plan_allocation
from meshwright.errors import CheckFailed, Infeasible, MeshwrightError, Unsupported, UsageError

GB = 10**9


def servers(*shapes: tuple[int, int, int, str]) -> Servers:
    return Servers(servers=tuple(
        Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(g)), cores=c, memory_bytes=m * GB, type=t) for n, (g, c, m, t) in enumerate(shapes)
    ))  # fmt: skip


def profiles(r: np.random.Generator, count: int) -> tuple[Sensitivity, ...]:
    """Rising matrices with 2 cores and 3 GB per GPU as share."""
    found = []
    for n in range(count):
        table = np.cumsum(np.cumsum(r.integers(0, 4, (4, 3)), 0), 1) + 1.0
        table /= table[1, 1]
        found.append(Sensitivity(name=f"p{n}", cores=(1, 2, 3, 5), memory_bytes=(1 * GB, 3 * GB, 5 * GB), speed=tuple(map(tuple, table))))
    return tuple(found)


def queue_of(r: np.random.Generator, sizes: list[int], kinds: int = 3) -> Queue:
    made = profiles(r, kinds)
    jobs = [QueuedJob(name=f"j{i}", gpus=g, profile=f"p{r.integers(kinds)}", arrival_s=i, duration_s=60) for i, g in enumerate(sizes)]
    return Queue(profiles=made, jobs=tuple(jobs))


def every(book: Book, cluster: Servers, queue: Queue) -> float:
    """The best sum over all placements of whole jobs and all whole cores and steps, by trying them all."""
    best = -np.inf
    kinds = cluster.kind.tolist()
    for places in itertools.product(range(len(cluster)), repeat=len(queue.jobs)):
        if any(sum(j.gpus for j, p in zip(queue.jobs, places, strict=True) if p == s) > cluster.gpus[s] for s in range(len(cluster))):
            continue
        total = 0.0
        for s in range(len(cluster)):
            kind = book.kinds[kinds[s]]
            options = []
            for j, p in zip(queue.jobs, places, strict=True):
                if p == s:
                    profile = queue.profiles[queue.profile_of[j.profile]]
                    share = kind.share(j.gpus)
                    floor = profile.on(kind.type) * profile.at(share[0] / j.gpus, kind.bytes_of(share[1]) / j.gpus)
                    options.append([
                        (c, u, j.gpus * w) for c in range(1, kind.cores + 1) for u in range(1, kind.steps + 1)
                        if (w := profile.on(kind.type) * profile.at(c / j.gpus, kind.bytes_of(u) / j.gpus)) >= floor - 1e-9
                    ])  # fmt: skip
            total += max(
                (sum(o[2] for o in chosen) for chosen in itertools.product(*options)
                 if sum(o[0] for o in chosen) <= kind.cores and sum(o[1] for o in chosen) <= kind.steps),
                default=-np.inf,
            )  # fmt: skip
        best = max(best, total)
    return best


def problem_of(cluster: Servers, queue: Queue) -> AllocationProblem:
    return AllocationProblem(servers=cluster, queue=queue, book=Book(cluster, queue.profiles), running=tuple(range(len(queue.jobs))))


def speed_of(problem: AllocationProblem, name: str) -> float:
    from meshwright.cluster.allocation import speed_of as read

    parts = allocation(name)().plan(problem, rng=np.random.default_rng(0)).parts
    queue = problem.queue
    return sum(queue.jobs[j].gpus * read(problem.servers, queue.jobs[j], queue.profiles[queue.profile[j]], p) for j, p in parts.items())


@pytest.mark.parametrize("seed", range(few(6)))
def test_priced_is_near_the_best_of_all_and_bounds_are_above_it(seed):
    r = np.random.default_rng(seed)
    cluster = servers((2, 4, 6, "gpu"), (2, 4, 6, "gpu"))
    queue = queue_of(r, [1, 1, 1, 1] if seed % 2 else [2, 1, 1])
    problem = problem_of(cluster, queue)
    best = every(problem.book, cluster, queue)
    found = speed_of(problem, "priced")
    assert 0.999 * best <= found <= best * (1 + 1e-9)
    assert all(speed_of(problem, name) <= best * (1 + 1e-9) for name in ("tune", "opt", "proportional"))
    fillings, prices = float(fillings_bound(problem)), lp_prices(problem.book, groups_of(problem, problem.running)).value
    assert best * (1 - 1e-9) <= fillings <= prices * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(few(4)))
def test_a_server_is_divided_as_well_as_can_be(seed):
    r = np.random.default_rng(100 + seed)
    cluster, queue = servers((4, 9, 12, "gpu")), queue_of(r, [1, 2, 1], 2)
    book = Book(cluster, queue.profiles)
    classes = tuple(sorted(book.class_of(int(queue.profile[j]), queue.jobs[j].gpus, 0) for j in range(3)))
    found = book.divide(0, classes)
    assert found.gain == pytest.approx(every(book, cluster, queue))
    picked = [(book.options(k), o) for k, o in zip(classes, found.picked, strict=True)]
    assert sum(x.cores[o] for x, o in picked) <= 9 and sum(x.steps[o] for x, o in picked) <= 12
    assert sum(x.gain[o] for x, o in picked) == pytest.approx(found.gain)


def test_any_prices_prove_a_bound():
    cluster, queue = servers((2, 4, 6, "gpu"), (2, 6, 6, "fast")), queue_of(np.random.default_rng(5), [1, 1, 1])
    problem = problem_of(cluster, queue)
    groups, best = groups_of(problem, problem.running), every(problem.book, cluster, queue)
    pairs = [(g, t) for g in groups for t in range(2)]
    for seed in range(5):
        r = np.random.default_rng(seed)
        gpu, core, gb = (r.random(2).tolist() for _ in range(3))
        assert upper_bound(problem.book, groups, gpu, core, gb, {p: float(r.random()) for p in pairs}) >= best - 1e-9


def test_published_mixes_are_near_the_bound_of_whole_servers():
    """128 GPUs: priced reaches 0.97 of the tighter bound in both mixes, and more than TUNE."""
    cluster = servers(*[(8, 24, 500, "gpu")] * 16)
    for split, bound in (((20, 70, 10), "fillings"), ((33, 33, 33), "prices")):
        queue = synthetic(200, per_hour=20, split=split, seed=1)
        priced, tune = (plan_allocation(cluster, queue, order("fifo")(), allocation(name)(), bound=how)[0] for name, how in (
            ("priced", bound), ("tune", "prices"),
        ))  # fmt: skip
        assert priced.speed >= (0.97 if bound == "fillings" else 0.9) * float(priced.bound) and priced.speed > 1.04 * tune.speed


def test_types_gangs_and_togetherness():
    cluster = servers((4, 12, 250, "old"), (4, 12, 250, "new"), (2, 6, 125, "new"))
    fast = msgspec.structs.replace(published_profiles()[0], types={"new": 2.0})
    jobs = [
        QueuedJob(name="wide", gpus=5, profile="alexnet", arrival_s=0, duration_s=1), QueuedJob(name="old", gpus=1, profile="alexnet", arrival_s=1,
        duration_s=1, types=("old",)), QueuedJob(name="one", gpus=3, profile="alexnet", arrival_s=2, duration_s=1, together=True),
    ]  # fmt: skip
    queue = Queue(profiles=(fast,), jobs=tuple(jobs))
    for name in ("priced", "tune", "proportional", "greedy"):
        found, _ = plan_allocation(cluster, queue, order("fifo")(), allocation(name)())
        has = {j: [g for g in found.given if g.job == j] for j in found.order}
        assert len(has["wide"]) > 1 and sum(len(g.gpus) for g in has["wide"]) == 5
        assert "old" not in has or [g.server for g in has["old"]] == ["s0"]
        assert "one" not in has or len(has["one"]) == 1
    with pytest.raises(Unsupported, match="kinds of servers"):
        plan_allocation(cluster, queue, order("fifo")(), Opt())
    with pytest.raises(Unsupported, match="several servers"):
        plan_allocation(servers((4, 12, 250, "x"), (4, 12, 250, "x")), msgspec.structs.replace(queue, jobs=(jobs[0],)), order("fifo")(),
                        allocation("priced")(), bound="fillings")  # fmt: skip


def test_opt_places_whole_jobs_by_an_integer_programme_too():
    cluster, queue = servers(*[(8, 24, 500, "gpu")] * 3), synthetic(30, per_hour=20, split=(33, 33, 33), seed=2)
    by_lp, by_ilp = (plan_allocation(cluster, queue, order("fifo")(), Opt(whole=whole)) for whole in (0, 50))
    assert by_ilp[1].notes["fractional"] <= by_lp[1].notes["fractional"]


def test_gangs_that_nothing_can_hold_are_refused_with_the_fragments():
    cluster, profile = servers((4, 12, 250, "a"), (2, 6, 125, "b")), published_profiles()[0]
    for job in (
        QueuedJob(name="big", gpus=7, profile="alexnet", arrival_s=0, duration_s=1), QueuedJob(name="big", gpus=5, profile="alexnet", arrival_s=0,
        duration_s=1, together=True), QueuedJob(name="big", gpus=3, profile="alexnet", arrival_s=0, duration_s=1, types=("b",)),
    ):  # fmt: skip
        with pytest.raises(Infeasible, match="no set of servers") as refused:
            require_possible(cluster, Queue(profiles=(profile,), jobs=(job,)))
        assert refused.value.exit_code == 3 and refused.value.data["job"] == "big" and refused.value.data["fragments"]


def test_a_profile_without_a_proportional_point_is_refused():
    few_cores = servers((8, 4, 500, "gpu"))
    with pytest.raises(UsageError, match="no speed at the proportional share"):
        plan_allocation(few_cores, synthetic(5, per_hour=1), order("fifo")(), allocation("priced")())


def test_passed_over_jobs_go_first():
    cluster, queue = servers((4, 12, 250, "gpu")), Queue(profiles=published_profiles(), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=g, profile="gnmt", arrival_s=i, duration_s=1) for i, g in enumerate([2, 4, 2])
    ))  # fmt: skip
    assert admitted(cluster, queue, np.arange(3)) == [0, 2] and admitted(cluster, queue, np.arange(3), [1]) == [1]


def wrong_ones(found, cluster):
    first, last = found.given[0], found.given[-1]
    other = next(g for g in found.given if g.server != first.server)
    replace = msgspec.structs.replace

    def given(*changed: Given):
        return replace(found, given=(*changed, *found.given[1:]))

    yield "below its floor", given(replace(first, cores=1, memory_bytes=first.memory_bytes)) if first.cores > 1 else given()
    yield "has 24 cores", given(replace(first, cores=25))
    yield "bytes of memory", given(replace(first, memory_bytes=501 * GB))
    yield "wants", given(replace(first, gpus=first.gpus[1:]))
    yield "does not exist", given(replace(first, gpus=(*first.gpus[1:], "s99g0")))
    yield "there is no server", given(replace(first, server="nowhere"))
    yield "there is no job", replace(found, order=("nobody", *found.order))
    yield "listed 2 times", replace(found, order=(*found.order, found.order[0]))
    yield "not said to run", replace(found, order=tuple(x for x in found.order if x != first.job))
    yield "add up to", replace(found, speed=found.speed + 0.01)
    yield "does not exist", given(replace(first, server=other.server))
    yield "claimed is", replace(found, bound=replace(found.bound, value=str(int(found.speed) + 1)))
    yield "two parts on one server", replace(found, given=(*found.given, last))


def test_wrong_allocations_are_named():
    cluster, queue = servers(*[(8, 24, 500, "gpu")] * 2), synthetic(20, per_hour=20, split=(60, 20, 20), seed=4)
    for bound in ("prices", "fillings"):
        found, _ = plan_allocation(cluster, queue, order("fifo")(), allocation("proportional")(), bound=bound)
        assert check_allocation(found, cluster, queue).ok
        for says, wrong in wrong_ones(found, cluster):
            verdict = check_allocation(wrong, cluster, queue)
            assert any(says in f.message for f in verdict.findings), (says, [f.message for f in verdict.findings])
            with pytest.raises(CheckFailed):
                verdict.raise_if_wrong()


@pytest.mark.parametrize("change", [
    {"kinds": []}, {"gpu": [-1.0]}, {"core": ["x"]}, {"gb": [float("nan")]}, {"floors": [["p"]]},
    {"gpu": [0.0], "core": [0.0], "gb": [0.0], "floors": []},
])  # fmt: skip
def test_mangled_certificates_prove_nothing(change):
    cluster, queue = servers((8, 24, 500, "gpu"), (8, 24, 500, "gpu")), synthetic(20, per_hour=20, split=(60, 20, 20), seed=4)
    found, _ = plan_allocation(cluster, queue, order("fifo")(), allocation("priced")())
    certificate = msgspec.structs.replace(found.bound.certificate, data=found.bound.certificate.data | change)
    wrong = msgspec.structs.replace(found, bound=msgspec.structs.replace(found.bound, certificate=certificate))
    assert not check_allocation(wrong, cluster, queue).ok


def test_unknown_strategies_are_refused():
    with pytest.raises(MeshwrightError, match="no allocation 'fifo'"):
        allocation("fifo")
    with pytest.raises(MeshwrightError, match="no order 'tune'"):
        order("tune")
