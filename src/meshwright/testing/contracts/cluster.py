"""What every order and every allocation of the cluster decision must do, on small queues."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from ...check.cluster import check_allocation
from ...cluster.generate import synthetic
from ...cluster.servers import Server, Servers
from ...decide.cluster import AllocationProblem, Book, Waiting
from ...decide.cluster.orders import Fifo
from ...decide.cluster.problem import admitted, ranking
from ...drive.cluster import plan_allocation
from ...errors import MeshwrightError, UsageError
from .chosen import named_and_cited, parametrized

Kind = type[Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "cluster")


def _servers(seed: int) -> Servers:
    kinds = [(4, 12, 250), (8, 24, 500)] if seed % 2 else [(8, 24, 500)]
    made = [kinds[n % len(kinds)] for n in range(2 + seed)]
    return Servers(servers=tuple(
        Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(g)), cores=c, memory_bytes=m * 10**9) for n, (g, c, m) in enumerate(made)
    ))  # fmt: skip


PROBLEMS = [
    (_servers(seed), synthetic(10 + 8 * seed, per_hour=20, split=(40, 30, 30), seed=seed, most_gpus=4 if seed % 2 else 8)) for seed in range(3)
]


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_orders_rank_all_and_allocations_are_proved(kind: Kind, number: int) -> None:
    servers, queue = PROBLEMS[number]
    jobs = np.arange(len(queue.jobs))
    if kind.answers == "order":
        waiting = Waiting(
            servers=servers, queue=queue, book=Book(servers, queue.profiles), now_s=1e6, jobs=jobs, left_s=queue.duration_s,
            attained_s=jobs.astype(np.float64),
            contention=2.0,
        )  # fmt: skip
        assert sorted(ranking(kind(), waiting).tolist()) == jobs.tolist()
        return
    try:
        found, _ = plan_allocation(servers, queue, Fifo(), kind())
    except MeshwrightError as refused:
        assert not isinstance(refused, UsageError) or refused.hint, "a refusal says why and what to do"
        return
    assert check_allocation(found, servers, queue).ok and found.bound is not None and found.speed <= float(found.bound)
    assert plan_allocation(servers, queue, Fifo(), kind())[0] == found


def test_everyone_whom_the_order_admits_runs(kind: Kind) -> None:
    servers, queue = PROBLEMS[0]
    if kind.answers == "order" or kind.admits:
        return
    running = tuple(admitted(servers, queue, np.arange(len(queue.jobs))))
    problem = AllocationProblem(servers=servers, queue=queue, book=Book(servers, queue.profiles), running=running)
    assert set(kind().plan(problem, rng=np.random.default_rng(0)).parts) == set(running)


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind(**asdict(kind())) == kind()
