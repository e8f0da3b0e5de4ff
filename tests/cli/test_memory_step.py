"""`memory plan --model` and `memory explain`: a whole step in a budget, the largest batch, minima, and modules that cannot be captured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from meshwright.capture.forward import build_objective
from meshwright.check.training.step_memory import check_step_plan
from meshwright.cli import main
from meshwright.decide.memory.auto import auto_plan, best_plan
from meshwright.decide.memory.fusionaware.frontier import frontier_of, least_bytes
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.step import keep_everything, least_bound_bytes
from meshwright.errors import Infeasible, RunError, UnknownName, UsageError
from meshwright.graph.step_graph import StepGraph, StepPlan
from meshwright.probe.steps.fit import budget_bytes, largest_batch, planned, refusal
from meshwright.probe.steps.measured import MeasuredStep, measured_step
from meshwright.probe.steps.module_checkpoints import checkpointed, measured_step_bytes, module_uses, plan_modules

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(torch.sigmoid(torch.tanh(self.second(torch.relu(torch.sin(self.first(x)))))))

class Branching(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x) if x.sum().item() > -1e9 else x
        return self.head(x)

def small():
    return Net(), (torch.randn(64, 16), torch.randint(0, 4, (64,)))

class Overwritten(Net):
    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.head(self.second(y.add_(1)) + y.mul_(2))

def overwritten():
    return Overwritten(), (torch.randn(8, 16), torch.randint(0, 4, (8,)))

def misfit():
    return Net(), (torch.randn(8, 15), torch.randint(0, 4, (8,)))

def branching():
    return Branching(), (torch.randn(512, 16), torch.randint(0, 4, (512,)))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step")
    (path / "net.py").write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return f"{folder / 'net.py'}:small"


@pytest.fixture(scope="module")
def measured_at(folder: Path, model: str) -> Callable[[int], MeasuredStep]:
    """The step of so many rows with other implementations, each measured once for all tests."""
    return cache(lambda rows: measured_step(model, batch_size=rows, costs=folder / "costs.json", implementations="exact"))


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["memory", *words, "--costs", str(folder / "costs.json"), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_is_written_checked_and_measured(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    full = asked(folder, capsys, "plan", "--model", model, "--budget", "100%", "--strategy", "keep", "--measure", "--optimizer", "adam")
    assert full["peak_bytes"] == full["keep_peak_bytes"] == full["budget_bytes"]
    kinds = full["bytes_by_kind"]
    assert isinstance(kinds, dict) and kinds["optimizer state"] == 2 * kinds["parameters"] == 8 * (16 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4)
    assert isinstance(full["measured_peak_bytes"], int) and isinstance(full["peak_bytes"], int)
    assert abs(full["measured_peak_bytes"] - full["peak_bytes"]) <= 0.01 * full["peak_bytes"]
    out = folder / "plan.json"
    least = asked(folder, capsys, "plan", "--model", model, "--strategy", "monet", "-o", str(out))
    document = json.loads(out.read_text())
    graph, plan = msgspec.convert(document["graph"], StepGraph), msgspec.convert(document["plan"], StepPlan)
    assert check_step_plan(graph, plan).ok and plan.peak_bytes == least["peak_bytes"] < keep_everything(graph).peak_bytes
    assert least_bound_bytes(graph) <= plan.peak_bytes and least["check"] == "ok"
    picture = str(folder / "step.svg")
    assert main(["memory", "plan", "--model", model, "--costs", str(folder / "costs.json"), "--strategy", "keep", "--svg", picture]) == 0
    said = capsys.readouterr().out
    assert "100.0 % of the" in said and "proved the fastest" in said and said.endswith(f"drawn into {picture}\n")
    assert "memory over the step, keep" in Path(picture).read_text()
    assert main(["memory", "plan", "--model", model, "--svg", str(folder / "no" / "step.svg")]) == 2
    assert main(["memory", "plan", "graph.json", "--budget", "1GB", "--svg", picture]) == 2
    error = capsys.readouterr().err
    assert "--svg: no directory" in error and "give --model" in error


def test_below_the_minimum(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "plan", "--model", model, "--costs", str(folder / "costs.json"), "--optimizer", "adam", "--json"]
    assert main([*words, "--budget", "1%"]) == 3
    error = json.loads(capsys.readouterr().err)
    assert error["data"]["bound_bytes"] > error["data"]["budget_bytes"] and "no plan at all needs less" in error["message"]
    assert "an optimizer without state saves 44,064 B" in error["hint"] and "a batch below 64" in error["hint"]


def test_the_largest_batch(measured_at: Callable[[int], MeasuredStep]) -> None:
    """Against trying every batch; what is proved follows from the bound of one more row."""
    at = {b: replace(measured_at(b), graph=measured_at(b).plain, implementations="plain") for b in range(1, 6)}
    every = {b: (step,) for b, step in at.items()}
    full = keep_everything(at[3].graph).peak_bytes
    found = largest_batch(every.__getitem__, full, "keep")
    assert found.batch_size == max(b for b in at if keep_everything(at[b].graph).peak_bytes <= full) >= 3
    assert found.plan.peak_bytes <= full and found.proved == (least_bytes(lifetimes_of(at[found.batch_size + 1].graph)) > full)
    order = ({"bound_bytes": 5, "order_bound_bytes": 11}, "operators in the graph's order")
    for bounds, scope in (({"bound_bytes": 11}, "any plan"), order, ({}, "")):
        assert refusal(3, Infeasible("too many", data=bounds), 10)[0] == scope
    assert "unproven" in refusal(3, Infeasible("too many"), 10)[1]
    with pytest.raises(Infeasible):
        largest_batch(every.__getitem__, least_bound_bytes(at[1].graph) - 1, "keep")
    lean = largest_batch(every.__getitem__, planned(at[2], None, "monet")[0].peak_bytes, "monet")
    assert lean.batch_size >= 2
    if lean.proved:
        assert lean.refuted == lean.batch_size + 1
    tight = largest_batch(every.__getitem__, frontier_of(at[2].graph, 100_000).entries[-1].peak_bytes, "fusionaware")
    bound = least_bytes(lifetimes_of(at[tight.batch_size + 1].graph))
    assert tight.proved == (bound > tight.plan.budget_bytes) and (not tight.proved or tight.scope == "operators in the graph's order")


def test_the_largest_batch_by_all_strategies_together(measured_at: Callable[[int], MeasuredStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a batch fits takes little effort where it does; the largest gets all of it."""
    asked_of: list[StepGraph] = []
    full: list[StepPlan] = []

    def counted(graph: StepGraph, budget: int | None, *, rng: np.random.Generator) -> tuple[StepPlan, dict[str, str]]:
        plan, others = auto_plan(graph, budget, rng=rng)
        asked_of.append(graph)
        full.append(plan)
        return plan, others

    monkeypatch.setattr("meshwright.probe.steps.fit.auto_plan", counted)
    budget = (keep_everything(measured_at(3).plain).peak_bytes + keep_everything(measured_at(4).plain).peak_bytes) // 2
    found = largest_batch(lambda rows: (measured_at(rows),), budget)
    assert found.batch_size >= 3 and found.plan.peak_bytes <= budget
    (graph,) = asked_of
    assert graph is found.measured.graph and found.measured is measured_at(found.batch_size)
    assert found.plan.time_s <= full[0].time_s * (1 + 1e-9)
    assert planned(found.measured, budget, any_will_do=True)[0].peak_bytes <= budget
    with pytest.raises(Infeasible):
        planned(found.measured, measured_at(1).graph.fixed_bytes(), any_will_do=True)


def test_max_batch_on_the_command_line(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = asked(folder, capsys, "plan", "--model", model, "--max-batch", "--budget", "50kB", "--strategy", "keep")
    assert isinstance(document["peak_bytes"], int) and document["peak_bytes"] <= 50_000 and document["batch_size"] == document["max_batch"]
    for more, said in ((["--budget", "50%"], "must be bytes with --max-batch"), ([], "needs --budget")):
        assert main(["memory", "plan", "--model", model, "--max-batch", *more]) == 2
        assert said in capsys.readouterr().err


def test_explain_names_the_tensors_at_the_peak(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = asked(folder, capsys, "explain", "--model", model)
    rows, always = document["alive"], document["always"]
    assert isinstance(rows, list) and isinstance(always, dict) and len(rows) == min(10, document["alive_count"]) >= 7
    assert document["alive_bytes"] + sum(always.values()) + document["workspace_bytes"] == document["peak_bytes"]  # type: ignore[operator]
    sizes = [r["size_bytes"] for r in rows]
    assert sizes == sorted(sizes, reverse=True) and {"first", "second", "loss"} & {r["module"] for r in rows}
    asked(folder, capsys, "explain", "--model", model, "--budget", "90%")
    assert main(["memory", "explain", "--model", model, "--costs", str(folder / "costs.json")]) == 0
    assert "the largest:" in capsys.readouterr().out
    assert main(["memory", "explain"]) == 2 and main(["memory", "plan"]) == 2


def test_what_cannot_be_captured_is_planned_by_modules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = f"{folder / 'net.py'}:branching"
    document = asked(folder, capsys, "plan", "--model", odd, "--budget", "90%")
    assert document["schema"] == "meshwright.memory.modules" and "_local_scalar_dense" in str(document["refusal"])
    assert document["checkpoint"] and isinstance(document["checkpoint"], list) and document["checkpoint"][0].startswith("blocks.")
    objective, source, _ = build_objective(odd, loss="cross-entropy", batch_size=None, seed=0, device="cpu")
    uses, outside = module_uses(objective, source.inputs)
    kept = set[int]()

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.add(x.untyped_storage().data_ptr())
        alive.append(x)
        return x

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        objective(*source.inputs)
    fixed = {t.untyped_storage().data_ptr() for t in (*objective.parameters(), *source.inputs)}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
    assert outside + sum(u.kept_bytes for u in uses) == sum(v for k, v in sizes.items() if k not in fixed)
    measured, budget = document["measured_peak_bytes"], document["budget_bytes"]
    assert isinstance(measured, int) and isinstance(budget, int) and measured <= budget
    assert measured_step_bytes(objective, source.inputs, document["checkpoint"]) == measured
    assert measured_step_bytes(objective, source.inputs, ()) == document["measured_keep_peak_bytes"] > measured
    objective(*source.inputs).backward()
    plain = [p.grad for p in objective.parameters()]
    objective.zero_grad()
    with checkpointed(objective.model, document["checkpoint"]):
        objective(*source.inputs).backward()
    assert all(torch.equal(a, b) for a, b in zip(plain, (p.grad for p in objective.parameters()), strict=True) if a is not None and b is not None)
    assert all("forward" not in m.__dict__ for m in objective.model.modules())
    with_adam = asked(folder, capsys, "plan", "--model", odd, "--optimizer", "adam")
    assert with_adam["measured_peak_bytes"] >= document["measured_keep_peak_bytes"] + 2 * sum(  # type: ignore[operator]
        p.numel() * 4 for p in objective.parameters() if p.grad is not None
    )  # fmt: skip
    with pytest.raises(UnknownName, match="no module 'body'"), checkpointed(objective.model, ["body"]):
        pass
    with pytest.raises(Infeasible, match="with a checkpoint around every child"):
        plan_modules(odd, loss="cross-entropy", batch_size=None, budget="1kB", refusal="x", seed=0)


def test_a_model_that_fails_by_itself_is_the_models_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("overwritten", "modified by an inplace operation"), ("misfit", "shapes cannot be multiplied")):
        assert main(["memory", "plan", "--model", f"{folder / 'net.py'}:{name}", "--budget", "60%"]) == 1
        told = capsys.readouterr().err
        assert f"net.py:{name}: a training step of the model fails: RuntimeError: " in told and said in told and "bug in meshwright" not in told
    objective, source, _ = build_objective(f"{folder / 'net.py'}:overwritten", loss="cross-entropy", batch_size=None, seed=0, device="cpu")
    with pytest.raises(RunError, match="fails with checkpoints around head: RuntimeError"):
        measured_step_bytes(objective, source.inputs, ["head"])


def test_budgets_and_names() -> None:
    assert [budget_bytes(t, 1000) for t in ("25%", "0.5", "1", "2kB", "15000000")] == [250, 500, 1000, 2000, 15_000_000]
    for text in ("120%", "-3%", "4.5", "much"):
        with pytest.raises(UsageError):
            budget_bytes(text, 1000)


def test_wrong_names(folder: Path, model: str) -> None:
    with pytest.raises(UnknownName, match="no optimizer"):
        measured_step(model, optimizer="lion")
    step = measured_step(model, costs=folder / "costs.json")
    with pytest.raises(UnknownName, match="no strategy"):
        planned(step, None, "best")
    with pytest.raises(Infeasible, match="nothing fits"):
        best_plan(step.graph, 1, ["keep"], rng=np.random.default_rng(0))


def test_other_implementations_are_chosen_and_run(folder: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    # 85 %: so that plain operators have to run one more again. Every operator takes the same time, so that this is slower than writing in place.
    measured_step(model, costs=tmp_path / "costs.json", implementations="exact")
    costs = json.loads((tmp_path / "costs.json").read_text())
    for cost in costs["costs"].values():
        cost["time_s"] = 1e-5
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    found = asked(tmp_path, capsys, "plan", "--model", model, "--budget", "85%", "--measure")
    assert found["implementations"] and found["strategy"] == "monet"
    assert abs(float(str(found["measured_peak_bytes"])) / float(str(found["peak_bytes"])) - 1) < 0.02
    plain = asked(tmp_path, capsys, "plan", "--model", model, "--budget", "85%", "--implementations", "plain")
    assert plain["implementations"] == {} and plain["keep_peak_bytes"] == found["keep_peak_bytes"]
    rotor = asked(folder, capsys, "plan", "--model", model, "--budget", "95%", "--strategy", "rotor")
    assert rotor["implementations"] == {}  # published strategies run operators as they are


def test_kinds_of_implementations_are_looked_at(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kinds, said in (("fp4", "there is no kind 'fp4'"), ("plain,exact", "plain means no other")):
        assert main(["memory", "plan", "--model", model, "--budget", "50%", "--implementations", kinds]) == 2
        assert said in capsys.readouterr().err


def test_a_kept_plan_is_numbered_like_its_graph(folder: Path, model: str) -> None:
    """Where other implementations were looked at and none is left to choose, the graph still has nodes that the plain one has not."""
    step = measured_step(model, costs=folder / "costs.json", implementations="exact")
    chosen = msgspec.structs.replace(step.graph, nodes=tuple(msgspec.structs.replace(n, alternatives=()) for n in step.graph.nodes))
    assert len(chosen.nodes) > len(step.plain.nodes)
    left = replace(step, graph=chosen)
    plan, _ = planned(left, keep_everything(chosen).peak_bytes)
    assert plan.strategy == "keep" and check_step_plan(chosen, plan).ok
