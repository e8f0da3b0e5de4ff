"""Labels of plans: each false one is refused or named by `check_claims`, `collective check` and `train check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from meshwright.bound import Bound, Certificate
from meshwright.check.verdict import Verdict
from meshwright.cli.frame import main
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import gradient_work
from meshwright.drive.claims import check_claims
from meshwright.drive.collective.job import plan_collective
from meshwright.drive.pipeline.fill import fill_plan
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.drive.plans import write_plan
from meshwright.io.fabric.name import load_fabric
from meshwright.plan.plan import Plan
from meshwright.testing.soak import soak
from meshwright.testing.soak.labels import LABELS, claims_of
from meshwright.testing.soak.run import judged

MEMORY = Bound(
    quantity="all-gather time", value="2", unit="s", certificate=Certificate(kind="memory", data={"needed_bytes": 2, "available_bytes": 1})
)


@lru_cache
def plan(op: str = "all-gather", size: int = 1 << 14, root: int = 0) -> Plan:
    return plan_collective(CollectiveProblem.on(load_fabric("two-islands"), op, size, root=root), candidates=[Ring()])[0]


@lru_cache
def pipeline() -> Plan:
    problem = PipelineProblem.of(2, 3, activation_bytes=12, message_bytes=4, p2p_rate_Bps=4, weight_bytes=64, gradient_bytes=16)
    return plan_pipeline(problem, "1f1b")


@lru_cache
def filled() -> Plan:
    return fill_plan(pipeline(), lambda problem, schedule: gradient_work(problem, schedule, "shampoo", [("a", 0.2)]), most_steps=8).plan


def said(verdict: Verdict) -> str:
    assert verdict.status == "wrong", verdict
    return " | ".join(f.message for f in verdict.findings)


def bound(made: Plan, **values: Any) -> Plan:
    assert made.bound is not None
    return replace(made, bound=msgspec.structs.replace(made.bound, **values))


def certified(made: Plan, **values: Any) -> Plan:
    assert made.bound is not None
    certificate = made.bound.certificate
    return bound(made, certificate=msgspec.structs.replace(certificate, data={**certificate.data, **values}))


def test_true_claims_are_accepted() -> None:
    for made in (plan(), plan("broadcast", root=2), pipeline(), filled()):
        verdict = check_claims(made)
        assert verdict.ok, verdict


def test_a_bound_of_another_operation_size_or_root() -> None:
    made = plan()
    assert "its demand is reduce-scatter, the job's all-gather" in said(check_claims(replace(made, bound=plan("reduce-scatter").bound)))
    assert "the bound is on 'reduce-scatter time'" in said(check_claims(replace(made, bound=plan("reduce-scatter").bound)))
    assert "its size_bytes is 8192" in said(check_claims(replace(made, bound=plan(size=1 << 13).bound)))
    assert "its root is" in said(check_claims(replace(plan("broadcast"), bound=plan("broadcast", root=2).bound)))
    devices = list(reversed(plan().job["collective"]["ranks"]))
    assert check_claims(certified(made, devices=devices)).ok, "the order of names says nothing here"
    assert "its devices is" in said(check_claims(certified(made, devices=devices[:-1], ranks=len(devices) - 1)))


@pytest.mark.parametrize(("change", "words"), [
    (lambda p: bound(p, unit="bytes"), "the bound is in bytes"),
    (lambda p: bound(p, quantity="memory"), "the bound is on 'memory'"),
    (lambda p: bound(p, value="1/2"), "claimed is 1/2"),
    (lambda p: replace(p, bound=MEMORY), "a memory certificate says"),
    (lambda p: replace(p, decisions={key: {**x, "strategy": "quicksilver"} for key, x in p.decisions.items()}), "there is no strategy"),
    (lambda p: replace(p, job={**p.job, "collective": {**p.job["collective"], "op": "reduce"}}), "the job says reduce"),
])  # fmt: skip
def test_false_labels(change: Callable[[Plan], Plan], words: str) -> None:
    assert words in said(check_claims(change(plan())))


@pytest.mark.parametrize("factor", [10.0, 1.001])
def test_a_prediction_that_the_simulator_does_not_share(factor: float) -> None:
    for made in (plan(), pipeline()):
        assert made.prediction is not None
        wrong = replace(made, prediction=msgspec.structs.replace(made.prediction, time_s=made.prediction.time_s * factor))
        assert "in the simulator" in said(check_claims(wrong))


def test_what_is_not_stated_is_named() -> None:
    verdict = check_claims(replace(plan(), bound=None, prediction=None))
    assert verdict.ok and {"the plan states no bound", "the plan states no prediction"} <= set(verdict.notes)
    mean = replace(plan(), cycle=tuple(msgspec.structs.replace(x, table={"dense": x.program}) for x in plan().cycle))
    assert any("not compared with a simulation" in note for note in check_claims(mean).notes)
    other = replace(plan(), decisions={**plan().decisions, "placement": {"strategy": "by name", "options": {}, "why": "", "cite": []}})
    assert any("not judged: placement" in note for note in check_claims(other).notes)


def test_work_in_idle_time_is_where_it_says() -> None:
    made = filled()
    doc = msgspec.to_builtins(made.job["fill"])
    doc["bound"]["value"] = "1000"
    assert "the certificate gives" in said(check_claims(replace(made, job={**made.job, "fill": doc})))
    doc = msgspec.to_builtins(made.job["fill"])
    doc["items"][0]["duration_s"] *= 2
    assert "gets" in said(check_claims(replace(made, job={**made.job, "fill": doc})))


@pytest.mark.parametrize("name", LABELS)
def test_every_kind_of_false_label_is_refused(name: str) -> None:
    """Or it leaves every claim as it was, and what it changed still proves them."""
    rng = np.random.default_rng(0)
    hit = 0
    for made in (plan(), pipeline()):
        mutant = LABELS[name](made, rng)
        if mutant is not None:
            hit += 1
            assert check_claims(mutant[0]).status == "wrong" or claims_of(mutant[0]) == claims_of(made), mutant[1]
    assert hit


# ---- commands ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["collective", "train"])
def test_commands_name_false_claims(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, plan())
    assert main([command, "check", str(path)]) == 0 and ": ok" in capsys.readouterr().out
    write_plan(path, bound(plan(), quantity="memory"))
    assert main([command, "check", str(path), "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "wrong" and document["findings"][0]["witness"]["field"] == "bound.quantity"


def test_a_soak_counts_and_tells() -> None:
    found = soak("plans", minutes=5, count=5, seed=3)
    assert found["ok"] and found["cases"] == 5 and sum(found["outcomes"].values()) == 5
    assert set(found["kinds"]) == {"arena", "collective", "filled", "memory step", "pipeline"} and found["told"] == []
    with pytest.raises(KeyError):
        soak("nothing", minutes=1)


def test_a_soak_tells_mistakes_apart() -> None:
    def broken() -> tuple[str, str]:
        raise ValueError("no")

    assert judged({"verdict": lambda: ("wrong", ""), "same": lambda: False}) == ("refused", "")
    assert judged({"verdict": lambda: ("ok", ""), "same": lambda: True})[0] == "same"
    assert judged({"verdict": lambda: ("ok", ""), "same": lambda: False})[0] == "accepted"
    assert judged({"verdict": lambda: ("unknown", "why"), "same": lambda: True}) == ("undecided", "why")
    assert judged({"verdict": broken, "same": lambda: True})[0] == "crashed"
