"""A training step's decisions: order, what is left out, how one more is added, and how a search ends: by counted work, or by the clock."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from captured import captured
from meshwright.cite import Cite
from meshwright.cli import main
from meshwright.drive.citations import citations
from meshwright.drive.plans import read_fabric
from meshwright.drive.training import context as contexts
from meshwright.drive.training import decisions
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.compress import CompressWanted
from meshwright.drive.training.context import Context, Decision, Found, SearchBudget
from meshwright.drive.training.decisions import DECISIONS, choose, context_of, refine
from meshwright.drive.training.evaluate import Evaluator
from meshwright.drive.training.training import plan_of, plan_training
from meshwright.drive.training.wishes import LayoutWanted, Wishes
from meshwright.errors import CheckFailed, TimeLimit, UsageError
from meshwright.explain.explanation import explain_plan
from meshwright.graph.graph import OpGraph
from meshwright.io.model.graph import write_graph
from meshwright.io.plan.plan import plan_bytes
from meshwright.job import Training
from meshwright.kernels import effort
from meshwright.plan.plan import Plan
from meshwright.report.explain_text import explain_text

MODEL = str(Path(__file__).parents[3] / "examples" / "gpt.py:tiny")
JOB = Training(model=MODEL, global_batch=8)
CITE = Cite(key="toy2026", title="A toy", year=2026, venue="here")


@functools.cache
def graph() -> OpGraph:
    return captured(MODEL)


def planned(*wishes: object, **more: Any) -> Plan:
    return plan_training(JOB, read_fabric("two-islands"), graph=graph(), wishes=(CollectivesWanted("ring"), *wishes), **more)


@functools.cache
def plain() -> Plan:
    return planned()


def names(plan: Plan) -> list[str]:
    return [made["decision"] for made in plan.decisions["layout"]["made"]]


def gains(plan: Plan) -> dict[str, list[str]]:
    """Rows of what `train explain` says that decisions gained and took."""
    lines = explain_text(plan, explain_plan(plan, quick=True), limit=3).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("decision "))
    return {row.split()[0]: row.split() for row in lines[start + 1 : start + 1 + len(plan.decisions["layout"]["made"])]}


# ---- one more decision -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ToyWanted:
    stages: int = 2


@dataclass(frozen=True)
class Toy(Decision):
    """Of the layouts that fit, the fastest with so many stages."""

    name = "toy"

    def choose(self, found: Found, context: Context) -> Found:
        stages = context.wish(ToyWanted).stages
        best = min((e for e in found.judged if e.fits and e.layout.pipeline == stages), key=lambda e: e.time_s, default=found.best)
        return replace(found, best=best)

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        options = {"stages": context.wish(ToyWanted).stages}
        return {"toy": {"strategy": "toy", "options": options, "why": "stages are wanted", "cite": [CITE.key]}}

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        return [(key, CITE)] if key == "toy" else []


def test_one_more_decision_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides, says so in the plan, is cited and can be left out; nothing else is edited."""
    usual = plain()
    monkeypatch.setattr(decisions, "DECISIONS", (*DECISIONS[:3], Toy(), *DECISIONS[3:]))
    made, flat = planned(), planned(ToyWanted(stages=1))
    assert usual.layout is not None and made.layout is not None and flat.layout is not None
    assert usual.layout.pipeline == 4 and made.layout.pipeline == 2 and flat.layout.pipeline == 1
    assert made.decisions["toy"]["options"] == {"stages": 2} and ("toy", CITE) in citations(made)
    without = planned(without=["toy"])
    assert without.layout == usual.layout and [m["decision"] for m in without.decisions["layout"]["made"]] == names(usual)
    assert names(made) == [*names(usual)[:3], "toy", *names(usual)[3:]] and "toy" in gains(made)


def test_a_decision_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Toy):
        def choose(self, found: Found, context: Context) -> Found:
            best = found.winner
            return replace(found, best=replace(best, placement=(best.placement[0],) * len(best.placement)))

    monkeypatch.setattr(decisions, "DECISIONS", (*DECISIONS[:3], Wrong(), *DECISIONS[3:]))
    with pytest.raises(CheckFailed, match="after the decision toy: ranks share a device") as caught:
        planned()
    assert caught.value.data["decision"] == "toy"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: {"placement": e.placement[:1]}, "degrees on 1 devices"),
        (lambda e: {"placement": ("nobody", *e.placement[1:])}, "on one that the fabric has not"),
        (lambda e: {"timeline": None}, "was not simulated"), (lambda e: {"excess_bytes": 1}, "does not fit"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_no_winner(change: Any, said: str) -> None:
    context = context_of(JOB, read_fabric("two-islands"), graph=graph(), wishes=(LayoutWanted(data=4), CollectivesWanted("ring")))
    found = choose(context, ("layout",))
    assert not decisions._wrong(found, context)
    assert said in decisions._wrong(replace(found, best=replace(found.winner, **change(found.winner))), context)
    other = replace(context, job=Training(model=MODEL, global_batch=16))
    assert "are not 16 samples" in decisions._wrong(found, other)


# ---- left out --------------------------------------------------------------------------------------------------------
def test_decisions_are_left_out_by_name() -> None:
    both = planned(LayoutWanted(data=4)), planned(LayoutWanted(data=4), without=["sharding"])
    said = [p.decisions["sharding"]["why"] for p in both]
    assert ";" in said[0] and ";" not in said[1], "sums during backward were tried by the decision on sharding only"
    for name, said in (("layout", "no decision 'layout' that can be left out"), ("sharing", "no decision 'sharing'")):
        with pytest.raises(UsageError, match=said):
            planned(without=[name])


def test_two_wishes_of_a_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="LayoutWanted is given twice"):
        planned(LayoutWanted(data=4), LayoutWanted(tensor=2))
    assert Wishes.these([None, LayoutWanted(data=4)]).of(LayoutWanted).data == 4


def test_the_command_leaves_out_and_says_what_each_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_graph(tmp_path / "graph.json", graph())
    words = ["train", "plan", "--graph", str(tmp_path / "graph.json"), "--fabric", "two-islands", "--global-batch", "8", "--dp", "4"]
    words += ["--out", str(tmp_path / "plan.json")]
    assert main([*words, "--timings", "--without", "sharding,collectives"]) == 0
    said = [line.partition(":") for line in capsys.readouterr().err.splitlines()]
    assert [x[0] for x in said] == ["layout", "schedule", "memory", "recompute", "division", "compression"]
    assert all("candidates judged in" in x[2] and "step 0." in x[2] for x in said)
    assert main([*words, "--without", "placement"]) == 2 and "no decision 'placement'" in capsys.readouterr().err


def test_what_each_decision_gained_and_took_is_in_the_plan() -> None:
    """Every candidate that was judged is some decision's; the last step is the plan's; nothing gets slower; no seconds of the clock."""
    plan = planned(LayoutWanted(data=4), CompressWanted())
    made = plan.decisions["layout"]["made"]
    assert names(plan) == ["layout", "sharding", "schedule", "memory", "recompute", "division", "collectives", "compression"]
    assert made[0]["before_s"] is None and plan.prediction is not None and made[-1]["after_s"] == plan.prediction.time_s
    steps = [m["after_s"] for m in made]
    assert steps == sorted(steps, reverse=True) and all(m["before_s"] == before for m, before in zip(made[1:], steps, strict=False))
    simulated = sum(a.time_s is not None for a in plan.alternatives) + 1
    assert simulated <= sum(m["evaluations"] for m in made) and {*made[0]} == {"decision", "before_s", "after_s", "evaluations"}
    rows = gains(plan)
    assert rows["layout"][1:3] == ["none", "fits"] and rows["sharding"][-1] == str(made[1]["evaluations"])
    old = replace(plan, decisions={**plan.decisions, "layout": {k: v for k, v in plan.decisions["layout"].items() if k != "made"}})
    assert "candidates judged" not in explain_text(old, explain_plan(old, quick=True), limit=3)


# ---- how a search ends -----------------------------------------------------------------------------------------------
def test_the_clock_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes with a clock that runs a thousand times as fast, as long as the net does not cut."""
    now = iter(range(0, 1 << 40, 40))
    monkeypatch.setattr(effort, "monotonic", lambda: float(next(now)))
    fast = plan_bytes(planned(budget=SearchBudget(time_limit_s=1e9)))
    monkeypatch.undo()
    assert fast == plan_bytes(plain())


def test_counted_work_ends_a_search_and_the_plan_does_not_call_it_a_cut() -> None:
    made = planned(budget=SearchBudget(work_s=1e-6))
    spent = [a for a in made.alternatives if "the search's work, 1e-06 s, is done" in a.why]
    assert len(spent) > 3 and not any("work" in a.why for a in plain().alternatives)
    assert effort.cut_of(made.decisions) is None and plan_bytes(made) == plan_bytes(planned(budget=SearchBudget(work_s=1e-6)))


def test_a_cut_gives_the_best_so_far_and_says_so_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Time is up while the third candidate is judged: two were looked at, and the candidate that was cut does not count."""
    write_graph(tmp_path / "graph.json", graph())
    clock, evaluate, seen = [0.0], Evaluator.evaluate, set[object]()

    def late(self: Evaluator, candidate: Any, *rest: Any, **more: Any) -> Any:
        seen.add((candidate.degrees, candidate.layout))
        clock[0] = 1e6 if len({d for d, _ in seen}) > 2 else 0.0
        return evaluate(self, candidate, *rest, **more)

    monkeypatch.setattr(effort, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Evaluator, "evaluate", late)
    words = ["train", "plan", "--graph", str(tmp_path / "graph.json"), "--fabric", "two-islands", "--global-batch", "8", "--collective", "ring"]
    assert main([*words, "--out", str(tmp_path / "plan.json"), "--json"]) == 5
    out, err = capsys.readouterr()
    document = json.loads(out)
    cut = document["cut"]
    assert cut["looked"] == 2 < cut["of"] and (tmp_path / "plan.json").exists()
    said = f"time limit: looked at 2 of {cut['of']}"
    assert said in document["decisions"]["layout"]["why"] and said in err and document["decisions"]["layout"]["cut"] == cut
    assert 0 < sum(a["why"] == "not simulated: the time limit" for a in document["alternatives"]) <= cut["of"] - 3


def test_where_time_was_up_before_a_decision_what_stood_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(JOB, read_fabric("two-islands"), graph=graph(), wishes=(LayoutWanted(data=4), CollectivesWanted("ring")))
    found = choose(context, ("layout",))
    monkeypatch.setattr(effort, "monotonic", lambda: 1e12)
    after = refine(context, choose(context, ("sharding", "schedule"), found))
    assert after.best is found.best and {*after.cuts} == {"sharding", "schedule", "recompute", "division", "collectives", "compression"}
    entries = plan_of(after, context).decisions
    assert "time limit: the search was cut short" in entries["sharding"]["why"] and entries["layout"]["cut"] == {"looked": 0, "of": 1}


def test_looks_raise_what_is_no_cut() -> None:
    def refused() -> None:
        raise TimeLimit("a solver's own")

    with pytest.raises(TimeLimit, match="a solver's own"):
        contexts.Looks(3, 1.0).at(refused)
