"""What every strategy of resizing must do, on small demands: obey the rules, give chances that add up, and do the same again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest

from ...check.resize import check_resize_log
from ...cluster.demand import synthetic_demand
from ...cluster.resize import Rules, Tenants
from ...drive.resize import resize_simulated
from .chosen import named_and_cited, parametrized

Kind = type[Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "cluster.resize")


def _problem(seed: int) -> tuple[Tenants, Any, Rules, Any]:
    tenants, demand = synthetic_demand(5, 60, seed=seed, day_windows=20, window_s=4320.0)
    node = tuple(i % 2 for i in range(5))
    has = np.maximum(1, np.array(tenants.most) // 2)
    room = np.bincount(node, has, 2).astype(int) + 2  # both nodes are nearly full
    tenants = msgspec.structs.replace(tenants, node=node, capacity=tuple(room.tolist()), critical=(True, False, False, True, False))
    return tenants, demand, Rules(hold_windows=3 * (seed % 2), calm_windows=seed, recover_steps=2 - seed % 3), has


PROBLEMS = [_problem(seed) for seed in range(3)]


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_logs_are_proved_and_the_same_again(kind: Kind, number: int) -> None:
    tenants, demand, rules, start = PROBLEMS[number]
    found = [resize_simulated(tenants, demand, kind(), rules=rules, seed=number, start=start, record=True) for _ in range(2)]
    assert found[0].log is not None and found[0].log == found[1].log
    verdict = check_resize_log(found[0].log)
    assert verdict.ok and verdict.facts["windows"] == demand.size


def test_what_was_learned_begins_another_job(kind: Kind) -> None:
    tenants, demand, rules, start = PROBLEMS[0]
    prior = resize_simulated(tenants, demand, kind(), rules=rules, start=start).prior
    assert (prior is not None) == kind.learns
    again = resize_simulated(tenants, demand, kind(), rules=rules, start=start, prior=prior, record=True)
    assert again.log is not None and len(again.log.windows) == len(demand)


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind(**asdict(kind())) == kind()
