"""Gangs as fast as their program is where they are: closed forms of a ring of two, equal places simulated once, whole queues, refusals."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from meshwright.cluster import Part, Queue, QueuedJob, servers_of
from meshwright.cluster.generate import UNPROFILED
from meshwright.decide.cluster import allocation, order
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.drive.cluster import simulate_queue
from meshwright.drive.cluster_programs import ProgramSpeeds
from meshwright.drive.collective.job import plan_collective
from meshwright.drive.plans import write_plan
from meshwright.errors import UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch


def fabric_of(servers: int, gpus: int) -> Fabric:
    """GPUs of a server 10 GB/s from each other, servers 1 GB/s from a switch."""
    names = [[f"s{s}g{g}" for g in range(gpus)] for s in range(servers)]
    links = [Link(src=a, dst=b, rate_Bps=10**10) for group in names for a in group for b in group if a != b]
    links += [x for group in names for a in group for x in (Link(src=a, dst="net", rate_Bps=10**9), Link(src="net", dst=a, rate_Bps=10**9))]
    devices = tuple(Device(name=a, group=f"s{s}") for s, group in enumerate(names) for a in group)
    return Fabric(name=f"{servers}x{gpus}", devices=devices, links=tuple(links), switches=(Switch(name="net"),))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A plan of an all-reduce of 2 MB between two GPUs of a server: 0.2 ms; between servers ten times as long."""
    path = tmp_path_factory.mktemp("plan") / "pair.json"
    write_plan(path, plan_collective(CollectiveProblem.on(fabric_of(1, 2), "all-reduce", 2_000_000), candidates=[Ring()])[0])
    return str(path)


def queue_of(plan: str, *sizes: int) -> Queue:
    any_job = QueuedJob(name="", gpus=1, profile="unprofiled", arrival_s=0.0, duration_s=600.0)
    jobs = [msgspec.structs.replace(any_job, name=f"j{n}", gpus=g, plan=plan if g == 2 else "") for n, g in enumerate(sizes)]
    return Queue(profiles=(UNPROFILED,), jobs=tuple(jobs))


def test_where_a_gang_is_decides_how_fast_it_is(pair):
    fabric = fabric_of(3, 4)
    servers, queue = servers_of(fabric, cores=8, memory_bytes=1 << 36), queue_of(pair, 2, 1)
    found = ProgramSpeeds(servers=servers, queue=queue, fabric=fabric)
    together, apart = (Part(0, (0, 1), 1, 3),), (Part(0, (0,), 1, 3), Part(1, (2,), 1, 3))
    assert found.factor(0, together) == pytest.approx(1.0) and found.factor(0, apart) == pytest.approx(0.1)
    for other in ((Part(2, (1, 3), 1, 3),), (Part(1, (3,), 1, 3), Part(2, (0,), 1, 3))):
        found.factor(0, other)
    assert found.simulated == 2  # equal places: their links are alike
    assert found.factor(1, (Part(2, (0,), 1, 3),)) == 1.0 and found.times(lambda job, parts: 3.0)(0, apart) == pytest.approx(0.3)


@pytest.mark.parametrize(("servers", "gpus", "times"), [(1, 2, 1.0), (2, 1, 10.0)])
def test_a_queue_takes_as_long_as_its_programs_do(pair, servers, gpus, times):
    fabric = fabric_of(servers, gpus)
    hosts, queue = servers_of(fabric, cores=8, memory_bytes=1 << 36), queue_of(pair, 2)
    programs = ProgramSpeeds(servers=hosts, queue=queue, fabric=fabric)
    found = simulate_queue(hosts, queue, order("fifo")(), allocation("proportional")(), programs=programs)
    assert found.run.end_s == pytest.approx(np.array([600.0 * times])) and found.measures.below_floor == 0


def test_plans_for_other_numbers_of_gpus_are_refused(pair):
    fabric = fabric_of(2, 2)
    queue = queue_of(pair, 2)
    wrong = msgspec.structs.replace(queue, jobs=(msgspec.structs.replace(queue.jobs[0], gpus=3),))
    with pytest.raises(UsageError, match="has 3 GPUs, its plan is for 2 devices"):
        ProgramSpeeds(servers=servers_of(fabric, cores=8, memory_bytes=1 << 36), queue=wrong, fabric=fabric)
