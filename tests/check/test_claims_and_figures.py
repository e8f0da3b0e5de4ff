"""What a plan claims beside its steps: figures of pipeline bounds, promised trees, bounds of other kinds, latencies that cannot be added up."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from meshwright.bound import Bound, Certificate
from meshwright.check import check_program
from meshwright.check.bounds import delay
from meshwright.check.bounds.certificate import check_bound
from meshwright.check.pipeline.figures import figures_of
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.decide.collective.classic.fold_tree import FoldTree
from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.bound import any_bound, schedule_bound
from meshwright.drive.pipeline.pipelines import plan_pipeline, schedule_of_plan
from meshwright.fabric.fabric import Device, Fabric, Link

KINDS = {
    "hosts": "check.vms", "fusion": "check.traffic", "tables": "check.tables", "placement": "check.placement", "halo": "check.halo",
    "prices": "check.cluster", "fillings": "check.cluster",
}  # fmt: skip


def joined(latencies: list[tuple[float, float]]) -> Fabric:
    """As many devices, each with a way to the next; of its latency and that of a library."""
    n = len(latencies)
    links = tuple(
        Link(src=f"d{a}", dst=f"d{b}", rate_Bps=10**9, latency_s=x, library_latency_s=y)
        for i, (x, y) in enumerate(latencies) for a, b in ((i, (i + 1) % n), ((i + 1) % n, i))
    )  # fmt: skip
    return Fabric(name="joined", devices=tuple(Device(name=f"d{i}") for i in range(n)), links=links)


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_of_other_checkers_are_open(kind: str) -> None:
    (finding,) = check_bound(Bound(quantity="time", value="1", unit="s", certificate=Certificate(kind=kind, data={})), joined([(0.0, 0.0)] * 2))
    assert finding.status == "unknown" and KINDS[kind] in finding.message


def test_latencies_need_a_common_unit() -> None:
    """Counted in the least of them, which here is far below the others."""
    found = delay._Links(joined([(0.5, 0.25), (1e-6, 1e-6)]), False)
    assert found.wire.tolist() == [500_000, 500_000, 1, 1] and found.library.tolist() == [250_000, 250_000, 1, 1]
    with pytest.raises(delay.DelayOpen, match="common unit"):
        delay._Links(joined([(0.5, 0.5), (1e-25, 1e-25)]), False)


def test_a_promised_tree_is_held() -> None:
    problem = CollectiveProblem.on(joined([(0.0, 0.0)] * 4), "all-reduce", 4096)
    ring = Ring().plan(problem, rng=np.random.default_rng(0)).program
    assert check_program(ring).ok and ring.contract is not None
    promised = replace(ring, contracts=tuple(replace(c, reproducible="tree") for c in ring.contracts))
    assert check_program(promised).status == "wrong", "round a ring every chunk is added in another order"
    tree = FoldTree().plan(replace(problem, reproducible="tree"), rng=np.random.default_rng(0)).program
    assert tree.contract is not None and tree.contract.reproducible == "tree" and check_program(tree).ok


PROBLEMS = {
    "plain": PipelineProblem.of(4, 8, forward_s=[1, 2, 1, 2], backward_s=3, p2p_latency_s=0.25, message_bytes=2, p2p_rate_Bps=8, activation_bytes=3),
    "capped": PipelineProblem.of(2, 6, forward_s=1, backward_s=2, activation_bytes=5, memory_cap_bytes=20, weight_bytes=4),
    "overlapped": PipelineProblem.of(4, 8, forward_s=2, backward_s=4, pair_overlap=0.5),
    "paired": PipelineProblem.of(4, 8, forward_s=2, backward_s=4, exchange_s=0.5),
}  # fmt: skip


def raised(value: Any, by: Fraction) -> Any:
    """Numbers in a certificate, larger by a share; lists of them, the first."""
    if isinstance(value, list):
        return [raised(value[0], by), *value[1:]] if value else value
    if isinstance(value, dict):
        return {k: raised(v, by) for k, v in value.items()}
    return str(Fraction(value) * by)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("strategy", ["1f1b", "interleaved", "zb1p", "dualpipe"])
def test_a_certificate_of_a_pipeline_rests_on_the_plan_s_figures(name: str, strategy: str) -> None:
    problem = PROBLEMS[name]
    if name == "capped" and strategy in ("dualpipe", "interleaved"):
        pytest.skip("does not exist for it")
    plan = plan_pipeline(problem, strategy)
    bound = schedule_bound(problem, schedule_of_plan(plan))
    data = bound.certificate.data
    assert not [*figures_of(plan, data)]
    more, less = Fraction(11, 10), Fraction(9, 10)
    for kind, rows in data["seconds"].items():
        if any(Fraction(x) for row in rows for x in row[:1]):
            lie = {**copy.deepcopy(data), "seconds": {**data["seconds"], kind: raised(rows, more)}}
            assert any(f"{kind} of stage 0 takes" in x for x in figures_of(plan, lie)), kind
            assert not [*figures_of(plan, {**data, "seconds": {**data["seconds"], kind: raised(rows, less)}})], "it proves less"
    for key, says in (("up_s", "message over border 0"), ("down_s", "message over border 0")):
        rows = [["100", *row[1:]] for row in data[key]]
        assert any(says in x for x in figures_of(plan, {**data, key: rows}))
    for key, value in (
        ("devices", data["devices"] + 1), ("stages", data["stages"] * 2), ("split", not data["split"]), ("microbatches", [99]),
        ("placement", [[*row[::-1]] for row in data["placement"][::-1]] if strategy == "1f1b" else [[0]]),
        ("activation_bytes", [x + 1 for x in data["activation_bytes"]]),
    ):  # fmt: skip
        assert [f"its {key}" in x for x in figures_of(plan, {**data, key: value})] == [True], key


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_certificate_of_any_schedule_rests_on_the_problem(name: str) -> None:
    problem = PROBLEMS[name]
    plan, data = plan_pipeline(problem, "1f1b"), any_bound(problem).certificate.data
    assert not [*figures_of(plan, data)]
    for lie in ({"speeds": ["2", *data["speeds"][1:]]}, {"microbatches": data["microbatches"] + 1}):
        assert [*figures_of(plan, {**data, **lie, "work_s": "1000"})] == ["its speeds or micro-batches are not the problem's"]
    for key in ("work_s", "path_s"):
        (said,) = figures_of(plan, {**data, key: raised(data[key], Fraction(1001, 1000))})
        assert said.startswith(f"its {key} is")
        assert not [*figures_of(plan, {**data, key: raised(data[key], Fraction(1, 2))})]


def test_bytes_that_a_device_has_for_activations() -> None:
    problem = PROBLEMS["capped"]
    plan = plan_pipeline(problem, "1f1b")
    schedule = schedule_of_plan(plan)
    tight = schedule_bound(problem, schedule, cap_bytes=(16, 16))
    data = {**tight.certificate.data, "form": "memory", "device": 1, "cap_bytes": 16}
    assert not [*figures_of(plan, data)]
    (said,) = figures_of(plan, {**data, "cap_bytes": 15})
    assert "device 1 has 16 bytes for activations, it says 15" in said
    assert not [*figures_of(plan, {**data, "form": "counts", "cap_bytes": [16, 0]})]
    (said,) = figures_of(plan, {**data, "form": "counts", "cap_bytes": [0, 10]})
    assert "device 1 has 16 bytes" in said
    free = plan_pipeline(replace(problem, memory_cap_bytes=()), "1f1b")
    (said,) = figures_of(free, data)
    assert "unlimited bytes" in said
