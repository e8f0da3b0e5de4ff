"""What every strategy that feeds training must do, on generated rates."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from ...check.input_plan import check_input_plan
from ...decide.data import FeedProblem, FeedStrategy
from ...profile.input_plan import Place
from ...profile.input_rates import InputRates
from .chosen import named_and_cited, parametrized

Kind = type[FeedStrategy]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "data")


def _problem(seed: int) -> FeedProblem:
    r = random.Random(seed)
    m = InputRates(
        items=r.choice([8, 1000]), total_bytes=r.randrange(10**5, 10**9), workers=r.randrange(5), cores=r.choice([0.5, 2, 16]),
        device_s=r.choice([0, 0.003]), prepare_s=r.uniform(1e-3, 0.02), cpu_s=r.uniform(1e-4, 1e-3), miss_s=r.uniform(1e-3, 0.1),
        hit_s=r.uniform(1e-6, 1e-3), storage_Bps=r.uniform(1e6, 1e9), sampled=10, rounds=1, held=r.choice([1.0, 0.2]),
        batch_bytes=r.choice([0, 10**5, 10**8]),
    )  # fmt: skip
    place = Place(memory_bytes=r.randrange(0, 2 * m.total_bytes), jobs=r.randint(1, 4), nodes=r.randint(1, 3), network_Bps=r.choice([1e6, 1e9]),
                  shared_bytes=r.choice([0, 10**7, 10**10]))  # fmt: skip
    return FeedProblem(rates=m, place=place, seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_is_right_and_equal_for_equal_rates(kind: Kind, seed: int) -> None:
    problem = _problem(seed)
    found = kind().plan(problem, rng=np.random.default_rng(0))
    verdict = check_input_plan(found)
    assert verdict.ok, verdict.findings
    assert found.bound is not None and float(found.bound) <= found.epoch_s * (1 + 1e-9)
    assert kind().plan(problem, rng=np.random.default_rng(0)) == found


def test_everything_twice_as_fast_takes_half_the_time(kind: Kind) -> None:
    problem = _problem(5)
    m, place = problem.rates, problem.place
    halved: dict[str, Any] = {name: getattr(m, name) / 2 for name in ("device_s", "prepare_s", "cpu_s", "miss_s", "hit_s")}
    faster = replace(m, **halved, storage_Bps=2 * m.storage_Bps)
    plans = [kind().plan(FeedProblem(rates=r, place=p), rng=np.random.default_rng(0))
             for r, p in ((m, place), (faster, replace(place, network_Bps=2 * place.network_Bps)))]  # fmt: skip
    assert plans[1].epoch_s == pytest.approx(plans[0].epoch_s / 2) and plans[1].words == plans[0].words


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind(**asdict(kind())) == kind()  # type: ignore[call-overload]
