"""Profiles, queues and servers: interpolation against a plain loop, what is refused, generators."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cluster import Queue, QueuedJob, Sensitivity, Server, Servers, servers_of
from meshwright.cluster.generate import CLASSES, published_profiles, reprofiled, synthetic
from meshwright.errors import UsageError
from meshwright.fabric.fabric import Device, Fabric
from meshwright.io.fabric.name import load_fabric

PLAIN = {"name": "p", "cores": (1, 2, 4), "memory_bytes": (10, 30), "speed": ((0.5, 0.6), (0.8, 1.0), (0.9, 2.0))}


def test_speed_is_linear_between_points():
    p = Sensitivity(**PLAIN)
    for c, m in np.random.default_rng(0).uniform((1, 10), (5, 40), (50, 2)).tolist():
        rows = [np.interp(m, p.memory_bytes, row) for row in p.speed]
        assert p.at(c, m) == pytest.approx(np.interp(c, p.cores, rows))
    assert p.at(0.9, 30) == 0 and p.at(4, 9) == 0 and p.at(100, 100) == 2.0 and p.on("x") == 1.0
    assert p.at(np.array([1, 4]), 30).tolist() == [0.6, 2.0]


@pytest.mark.parametrize(("change", "says"), [
    ({"cores": (1, 2)}, "matrix of that shape"), ({"cores": (2, 1, 4)}, "grow"), ({"memory_bytes": (0, 30)}, "above 0"),
    ({"speed": ((0.5, 0.6), (0.4, 1.0), (0.9, 2.0))}, "falls as cores grow"), ({"speed": ((0.5, 0.4), (0.8, 1.0), (0.9, 2.0))},
        "falls as memory_bytes"),
    ({"speed": ((0.5, 0.6), (0.8, 1.0), (0.9, float("inf")))}, "finite"), ({"types": {"x": 0.0}}, "factor"),
])  # fmt: skip
def test_profiles_that_are_refused(change, says):
    with pytest.raises(UsageError, match=says):
        Sensitivity(**PLAIN | change)


@pytest.mark.parametrize(("change", "says"), [
    ({"gpus": 0}, "0 GPUs"), ({"profile": "q"}, "no profile"), ({"arrival_s": -1.0}, "time of"), ({"duration_s": 0.0}, "time of"),
    ({"duration_s": float("nan")}, "time of"), ({"name": ""}, "empty or taken"),
])  # fmt: skip
def test_jobs_that_are_refused(change, says):
    job = {"name": "j", "gpus": 1, "profile": "p", "arrival_s": 0.0, "duration_s": 1.0}
    with pytest.raises(UsageError, match=says):
        Queue(profiles=(Sensitivity(**PLAIN),), jobs=(QueuedJob(**job | change),))
    with pytest.raises(UsageError, match="taken"):
        Queue(profiles=(Sensitivity(**PLAIN),), jobs=(QueuedJob(**job), QueuedJob(**job)))
    with pytest.raises(UsageError, match="same name"):
        Queue(profiles=(Sensitivity(**PLAIN),) * 2)


def test_servers_are_groups_of_a_fabric():
    found = servers_of(load_fabric("dgx1-v100:2"), cores=24, memory_bytes=500 * 10**9)
    assert len(found) == 2 and found.total_gpus == 16 and len(found.kinds) == 1
    kind = found.kinds[0]
    assert kind.share(1) == (3, 3) and kind.bytes_of(3) == 62_500_000_000 and kind.steps == 24
    with pytest.raises(UsageError, match="no GPUs in servers"):
        servers_of(load_fabric("laptop:2"), cores=1, memory_bytes=10**9)
    mixed = Fabric(name="m", devices=(Device(name="a", group="s", sm=80), Device(name="b", group="s", sm=90)), links=())
    with pytest.raises(UsageError, match="of one type"):
        servers_of(mixed, cores=1, memory_bytes=10**9)
    with pytest.raises(UsageError, match="needs GPUs"):
        Server(name="s", gpus=(), cores=1, memory_bytes=100)
    with pytest.raises(UsageError, match="names of their own"):
        Servers(servers=())


def test_generated_queues_are_those_of_the_card():
    queue = synthetic(4000, per_hour=20, split=(20, 70, 10), seed=3)
    assert queue == synthetic(4000, per_hour=20, split=(20, 70, 10), seed=3) != synthetic(4000, per_hour=20, split=(20, 70, 10), seed=4)
    shares = [np.mean([j.gpus == g for j in queue.jobs]) for g in (1, 2, 4, 8)]
    assert shares == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.03)
    assert np.mean([j.profile in CLASSES["language"] for j in queue.jobs]) == pytest.approx(0.7, abs=0.03)
    assert float((queue.gpus * queue.duration_s).mean()) / 3600 == pytest.approx(31.9, rel=0.1)  # GPU hours of a job, as the card derives
    assert np.diff(queue.arrival_s).mean() == pytest.approx(180, rel=0.1)
    assert all(p.at(3, 62.5e9) == 1.0 for p in published_profiles())
    again = reprofiled(queue, (0, 100, 0), seed=1)
    assert all(j.profile in CLASSES["language"] for j in again.jobs) and (again.arrival_s == queue.arrival_s).all()
    for wrong in ({"jobs": 0, "per_hour": 1}, {"jobs": 1, "per_hour": 0}, {"jobs": 1, "per_hour": 1, "split": (1, 2)}):
        with pytest.raises(UsageError):
            synthetic(**wrong)
