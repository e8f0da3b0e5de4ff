"""What every strategy that says where machines go must do, on small traces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from ...check.vms import check_vm_placement
from ...cluster.generate_vms import synthetic_vms
from ...cluster.vms import Resize, VmHosts, VmTrace
from ...decide.cluster.vms import forecast
from ...drive.vms import place_vms
from .chosen import named_and_cited, parametrized

Kind = type[Any]
HOSTS = VmHosts.of([6])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "cluster.vms")


def _trace(seed: int) -> VmTrace:
    """Small machines that come, leave and are resized; with the second seed more than there is room for."""
    made = synthetic_vms(6, days=2, before_days=1, load=0.5 + 0.4 * seed, owners=20, warm_days=0.5, low=0.2, seed=seed)
    there = np.flatnonzero((made.end_s - made.arrival_s > 7200) & (made.arrival_s > 0))[:3].tolist()
    resizes = tuple(Resize(float(made.arrival_s[v]) + 600.0, v, n % len(made.shapes)) for n, v in enumerate(there))
    return VmTrace(**{name: getattr(made, name) for name in made.__dataclass_fields__ if name != "resizes"}, resizes=resizes)


@pytest.mark.parametrize("predictor", ["perfect", "kaplan-meier", "shuffled"])
@pytest.mark.parametrize("seed", [0, 1])
def test_placements_are_proved_and_repeat(kind: Kind, seed: int, predictor: str) -> None:
    if predictor != "perfect" and not kind.forecasts:
        return
    trace = _trace(seed)
    predicted = forecast(predictor, trace, at_s=0.0, seed=seed)
    made, run = place_vms(trace, HOSTS, kind(), predicted, from_s=43_200.0)
    verdict = check_vm_placement(made, trace, HOSTS)
    assert verdict.ok and made.bound is not None and float(made.bound) <= made.used_host_s
    assert verdict.facts["empty_share"] == pytest.approx(run.measures.empty_share, abs=1e-9)
    assert place_vms(trace, HOSTS, kind(), predicted, from_s=43_200.0)[0] == made


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind(**asdict(kind())) == kind()
