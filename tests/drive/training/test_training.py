"""The driver end to end on a small model: every layout is planned, checked and simulated; refusals say what and why."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from captured import captured
from meshwright.capture.graph import capture
from meshwright.check import check_plan
from meshwright.check.verdict import Finding, Verdict
from meshwright.cli import main
from meshwright.decide.collective import NAMES
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.problem import Degrees, LayoutCandidate
from meshwright.drive import plans as drive
from meshwright.drive.citations import citations
from meshwright.drive.training import context, evaluate, layout, training
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.collectives import SCOUTS, CollectivePlanner
from meshwright.drive.training.decisions import choose, context_of
from meshwright.drive.training.evaluated import Evaluated
from meshwright.drive.training.no_plan import nothing_fits
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Disconnected, Infeasible, UnknownName, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.io.fabric.name import load_fabric
from meshwright.io.plan.plan import plan_bytes, program_hash
from meshwright.job import Training
from meshwright.plan.plan import Plan
from meshwright.program.calls import called_sizes, inline
from meshwright.report.plan_text import explain_text, plan_document, plan_text
from meshwright.run.gate.gate import gate

EXAMPLES = Path(__file__).parents[3] / "examples"


@functools.cache
def graph_of(model: str) -> OpGraph:
    return captured(str(EXAMPLES / model))


def job_of(model: str, batch: int = 16) -> Training:
    return Training(model=str(EXAMPLES / model), global_batch=batch)


@functools.cache
def islands(k: int = 2) -> Fabric:
    return drive.read_fabric(f"two-islands:{k}")


def plan(model: str, degrees: tuple[int, int, int] | None = None, *wishes: object, **more: object) -> Plan:
    fixed = dict(zip(("data", "tensor", "pipeline"), degrees, strict=True)) if degrees else {}
    fabric, job = more.pop("fabric", None) or islands(), job_of(model, more.pop("batch", 16))  # type: ignore[arg-type]
    return plan_training(job, fabric, graph=graph_of(model), wishes=(LayoutWanted(**fixed, **more), *wishes))  # type: ignore[arg-type]


@functools.cache
def best_called() -> Plan:
    return plan("gpt.py:tiny", (4, 1, 1), microbatch=4)


@pytest.mark.sample(8)
@pytest.mark.parametrize("model", ["gpt.py:tiny", "gpt.py:tiny_tied"])
@pytest.mark.parametrize("degrees", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2), (1, 4, 1)])
def test_every_layout_is_checked_and_simulated(model: str, degrees: tuple[int, int, int]) -> None:
    # shared weights change what a layout sums, not how its collectives are chosen
    made = plan(model, degrees, *([CollectivesWanted("ring")] if model.endswith("tied") else []), batch=8, microbatch=2)
    assert made.layout is not None and (made.layout.data, made.layout.tensor, made.layout.pipeline) == degrees
    verdict = check_plan(made, islands())
    assert verdict.status == "ok", verdict
    assert made.prediction is not None and made.bound is not None
    assert made.prediction.time_s >= float(made.bound)
    assert sum(made.prediction.phases_s.values()) == pytest.approx(made.prediction.time_s, rel=1e-6)
    assert sum(made.prediction.evidence.values()) == pytest.approx(1.0)
    assert all(w >= p for w, p in zip(made.prediction.memory_worst_bytes, made.prediction.memory_peak_bytes, strict=True))


@pytest.mark.parametrize("model", ["convnet.py:tiny", "encoder_decoder.py:tiny"])
def test_other_kinds_of_nets_are_planned_too(model: str) -> None:
    made = plan(model, None, CollectivesWanted("ring"), microbatch=4)
    assert check_plan(made, islands()).status == "ok"
    assert made.layout is not None and made.layout.ranks == 4
    assert {n for s in made.layout.segments for n in s.nodes} == {n.name for n in graph_of(model).nodes}


def test_the_search_keeps_the_fastest_and_lists_what_lost() -> None:
    made = plan("gpt.py:tiny")
    assert made.prediction is not None
    judged = [a for a in made.alternatives if a.time_s is not None]
    assert len(judged) >= 6
    assert all(a.time_s >= made.prediction.time_s * (1 - 1e-9) for a in judged if a.time_s is not None)
    text = explain_text(made, limit=5)
    assert "runners-up" in text and "bound" in text
    assert all(len(line) <= 80 for line in plan_text(made).splitlines())
    document = plan_document(made)
    assert document["ratio"] >= 1 and json.dumps(document)


def test_equal_inputs_give_equal_bytes_and_a_plan_survives_its_file(tmp_path: Path) -> None:
    first, second = (plan("gpt.py:tiny", (2, 2, 1), microbatch=4) for _ in range(2))
    assert plan_bytes(first) == plan_bytes(second)
    drive.write_plan(tmp_path / "plan.json", first)
    again = drive.read_plan(tmp_path / "plan.json")
    assert plan_bytes(again) == plan_bytes(first)
    assert drive.simulate_plan(again).makespan_s == pytest.approx(first.prediction.time_s)  # type: ignore[union-attr]
    drive.check_plan(again)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_calls_any_collective_strategy_or_says_why_it_cannot(name: str) -> None:
    """Plans are checked as they are made; the strategy is the one that was asked for, and nothing that was tried in the winner's place is faster."""
    refused = {
        "pat": "PAT has no all-reduce", "scatter-all-gather": "has no all-reduce", "multipath": "does not do all-reduce", "nccl": "NCCL runs on GPUs",
        "bfb": "no program calls bfb",  # this fabric has a switch, over which it is the direct exchange
        "fold-tree": "no program calls fold-tree",  # only where equal bits are asked for
        "switchml": "no program calls switchml",
    }  # fmt: skip
    if name in refused:
        with pytest.raises(Infeasible, match=refused[name]):
            plan("gpt.py:tiny", (4, 1, 1), CollectivesWanted(name), microbatch=4)
        return
    made = plan("gpt.py:tiny", (4, 1, 1), CollectivesWanted(name), microbatch=4)
    assert made.decisions["collective:gradient"]["strategy"] == name and made.prediction is not None
    assert any(part == "collective:gradient" for part, _ in citations(made))
    best = best_called().prediction
    tried = {x["strategy"]: x["step_s"] for x in best_called().decisions["collective:gradient"]["tried_in_place"]}
    if name in tried:  # in the winner's step; a plan that was asked for by name may also divide its gradients otherwise
        assert best is not None and best.time_s <= tried[name] * (1 + 1e-9)


def test_strategies_that_layouts_are_not_judged_with_can_win_in_place() -> None:
    chosen = best_called().decisions["collective:gradient"]
    tried = {x["strategy"]: x["step_s"] for x in chosen["tried_in_place"]}
    assert {k.name for k in SCOUTS} < {*tried} and chosen["strategy"] == min(tried, key=tried.__getitem__) not in {k.name for k in SCOUTS}
    level = ShardingWanted(level=1)
    with pytest.raises(Infeasible, match="joint packing is for all-reduce, not"):
        plan("gpt.py:tiny", (2, 2, 1), CollectivesWanted("joint"), level, microbatch=2)


def test_a_collective_strategy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownName, match="no collective strategy 'rign'"):
        plan("gpt.py:tiny", (4, 1, 1), CollectivesWanted("rign"))


def test_a_job_that_cannot_fit_names_the_smallest_violated_limit() -> None:
    two, ring = drive.read_fabric("laptop:2"), CollectivesWanted("ring")  # nearest changes are looked for on up to 16 devices
    small = replace(two, devices=tuple(replace(d, memory_bytes=4_200_000) for d in two.devices))
    with pytest.raises(Infeasible, match="does not fit: rank") as error:
        plan("gpt.py:tiny", (2, 1, 1), ShardingWanted(level=0), ring, fabric=small, microbatch=4)
    assert max(plan("gpt.py:tiny", (2, 1, 1), ring, fabric=small).prediction.memory_worst_bytes) <= 4_200_000, "divided among replicas it fits"
    data = error.value.data
    assert data["needed_bytes"] > data["limit_bytes"] == 4_200_000
    enough = replace(small, devices=tuple(replace(d, memory_bytes=data["needed_bytes"]) for d in small.devices))
    assert plan("gpt.py:tiny", (2, 1, 1), ring, fabric=enough).layout is not None


def test_a_job_whose_state_alone_does_not_fit_is_refused_before_anything_is_lowered() -> None:
    two = drive.read_fabric("laptop:2")
    small = replace(two, devices=tuple(replace(d, memory_bytes=100_000) for d in two.devices))
    with pytest.raises(Infeasible, match=r"optimi[sz]er state alone need") as error:
        plan("gpt.py:tiny", None, CollectivesWanted("ring"), fabric=small, microbatch=8)
    assert error.value.data["needed_bytes"] > 100_000 and "bytes" in error.value.hint


def test_degrees_and_batches_that_do_not_divide_are_refused() -> None:
    for more, message in (
        ({"data": 3}, "data 3 does not divide the fabric's 4 devices"),
        ({"data": 2, "tensor": 4}, "data 2 x tensor 4 do not divide the fabric's 4 devices"),
        ({"data": 1, "tensor": 2, "pipeline": 1}, "data 1 x tensor 2 x pipeline 1 do not multiply to the fabric's 4 devices"),
        ({"data": 4, "microbatch": 3}, "is not a multiple of what 4 replicas take with micro-batches of 3"),
    ):
        with pytest.raises(UsageError, match=message):
            plan("gpt.py:tiny", **more)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="global batch 6 is not a multiple of data degree 4"):
        plan_training(job_of("gpt.py:tiny", 6), islands(), graph=graph_of("gpt.py:tiny"), wishes=(LayoutWanted(data=4),))
    with pytest.raises(UsageError, match="must be >= 1"):
        plan_training(job_of("gpt.py:tiny", 0), islands(), graph=graph_of("gpt.py:tiny"))


def test_tensor_degrees_that_the_model_does_not_have_are_explained() -> None:
    for wanted in ((), (CollectivesWanted("classic"),)):
        with pytest.raises(Infeasible, match="no part of the model can be split 4 ways") as error:
            plan("convnet.py:tiny", (1, 4, 1), *wanted)
        assert "nearest changes: without --dp 1 and --tp 4" in error.value.hint  # whatever is asked of collectives


def test_a_disconnected_fabric_is_refused_with_the_cut() -> None:
    fabric = islands()
    apart = replace(fabric, links=tuple(x for x in fabric.links if not (x.src.endswith("switch") and x.dst.endswith("switch"))))
    with pytest.raises(Disconnected, match="not connected") as error:
        plan("gpt.py:tiny", fabric=apart)
    assert error.value.data["from"] and error.value.data["to"]


def test_simulating_on_a_smaller_fabric_is_refused() -> None:
    made = plan("gpt.py:tiny", (4, 1, 1), microbatch=4)
    with pytest.raises(UsageError, match="needs 4 devices"):
        drive.simulate_plan(made, drive.read_fabric("laptop:2"))


def test_commands_plan_explain_and_cite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.io.model.graph import write_graph

    graph, out = tmp_path / "graph.json", tmp_path / "plan.json"
    write_graph(graph, graph_of("gpt.py:tiny"))
    words = ["train", "plan", "--graph", str(graph), "--fabric", "two-islands", "--global-batch", "16", "--dp", "4", "--microbatch", "4"]
    assert main([*words, "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.train.plan" and document["layout"]["data"] == 4
    assert main(["train", "explain", str(out), "--quick", "--svg", str(tmp_path / "plan.svg")]) == 0
    text = capsys.readouterr().out
    assert "collective:g" in text and text.endswith(f"drawn into {tmp_path / 'plan.svg'}\n") and "<svg" in (tmp_path / "plan.svg").read_text()
    assert main(["cite", str(out)]) == 0
    assert "Megatron" in capsys.readouterr().out
    for more, code in ((["--model", "x.py:y"], 2), (["--out", str(tmp_path / "no" / "plan.json")], 2), (["--global-batch", "7"], 2)):
        assert main([*words, *more]) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and len(error.splitlines()) <= 2


def test_a_plan_that_was_edited_by_hand_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan("gpt.py:tiny", (2, 1, 2), microbatch=2)
    assert made.layout is not None
    wrong = replace(made, layout=msgspec.structs.replace(made.layout, microbatches=made.layout.microbatches - 1))
    drive.write_plan(tmp_path / "plan.json", wrong)
    assert main(["train", "run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "run")]) == 4
    assert "global batch" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


ONE_SAMPLE = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        mask = torch.ones(1, 6)
        if x.shape[0] > 1:  # as masks in real models: one sample has nothing to expand, so it has another graph
            mask = mask.repeat(x.shape[0], 1)
        return self.down(self.up(x * mask).relu())


def masked():
    return Masked(), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
"""


@pytest.mark.parametrize("microbatch", [1, 2])
def test_micro_batches_of_one_sample_are_planned_from_their_own_graph(microbatch: int, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ONE_SAMPLE)
    job = Training(model=f"{tmp_path}/own.py:masked", global_batch=4)
    plan = plan_training(job, load_fabric("laptop:2"), wishes=(LayoutWanted(data=2, tensor=1, pipeline=1, microbatch=microbatch),))
    assert plan.layout is not None and plan.layout.microbatch_size == microbatch
    alone, several = (capture(job.model, loss=job.loss, batch_size=b, scalable=False).fingerprint() for b in (1, 4))
    assert alone != several and plan.job["graph_fingerprint"] == (alone if microbatch == 1 else several)
    assert "loss" in gate(plan, data="synthetic").compared


def test_scouts_find_the_layout_that_all_ranks_and_micro_batches_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every program taken for a large one: judged by one rank of every stage, and written out at the end."""
    whole = plan("gpt.py:tiny", None, CollectivesWanted("ring"), pipeline=1)
    folded = []
    for module in (evaluate, context):
        monkeypatch.setattr(module, "MAX_SMALL_STEPS", 0)
    run = evaluate.folded_step
    monkeypatch.setattr(evaluate, "folded_step", lambda *a, **k: (folded.append(1), run(*a, **k))[1])
    scouted = plan("gpt.py:tiny", None, CollectivesWanted("ring"), pipeline=1)
    assert folded and scouted.layout == whole.layout and program_hash(scouted.main) == program_hash(whole.main)
    assert scouted.prediction == whole.prediction and scouted.main.fold is None
    assert check_plan(scouted, islands()).status == "ok"


def test_collectives_of_large_steps_have_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written out is bounded: first the purpose that brings most gets rings in rank order, then the layout is refused by its size."""
    server, degrees = drive.read_fabric("dgx-h100:1", "0-3"), LayoutWanted(data=2, tensor=2, pipeline=1, microbatch=4)
    asked_for = context_of(job_of("gpt.py:tiny"), server, graph=graph_of("gpt.py:tiny"), wishes=(degrees,))
    many = choose(asked_for, ("layout",)).winner
    assert many.program is not None
    inlined = inline(many.program, many.callees).program
    assert len(inlined.steps) <= called_sizes(many.program, many.callees)[0] <= len(inlined.steps) + len(inlined.steps.after_step)
    plain, asked = CollectivePlanner.for_placement, list[set[str]]()
    monkeypatch.setattr(CollectivePlanner, "for_placement", lambda self, at, short=(): asked.append(set(short)) or plain(self, at, short))
    monkeypatch.setattr(evaluate, "MAX_WRITTEN_OUT", 1)
    refused = choose(asked_for, ("layout",))
    told = nothing_fits(refused.judged, server).message
    assert refused.best is None and re.search(r"not simulated: its collectives stand for [\d,]+ steps and edges, at most 1\b", told)
    assert asked[:3] == [set(), {"tensor"}, {"tensor", "gradient"}]  # a micro-batch has many of the one, a step few of the other


def test_why_nothing_fits_is_said_of_the_level_asked_for() -> None:
    """Level 0, which every search begins with, lacks more memory and is not what was asked for."""
    asked_for = context_of(job_of("gpt.py:tiny"), islands(), graph=graph_of("gpt.py:tiny"), wishes=(ShardingWanted(level=3),))
    whole, divided = (LayoutCandidate(degrees=Degrees(2, 1, 2, 1), sharding=DataSharding(level, True, 0)) for level in (0, 3))
    judged = [Evaluated(candidate=whole, why="too many bytes", excess_bytes=5), Evaluated(candidate=divided, why="too many steps")]
    told = nothing_fits(judged, islands(), asked_for)
    assert told.data["reasons"] == [f"{divided.what}: too many steps"] and "ZeRO 3" in told.message and not told.data["needed_bytes"]
    assert nothing_fits(judged, islands()).data["reasons"][0] == f"{whole.what}: too many bytes"


def test_smaller_micro_batches_of_large_models_are_tried_where_larger_ones_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_SMALL_OPERATORS", 0)
    monkeypatch.setattr(layout, "MAX_SIZES_PER_DEGREES", 1)
    wishes = RecomputeWanted("none"), ShardingWanted(level=0, overlap=False)
    fits = plan("gpt.py:tiny", (4, 1, 1), *wishes, microbatch=1)
    need = max(fits.prediction.memory_worst_bytes) * 11 // 10  # other collectives than the plan's may need a little more
    small = replace(islands(), devices=tuple(replace(d, memory_bytes=need) for d in islands().devices))
    degrees = LayoutWanted(data=4, tensor=1, pipeline=1)
    made = plan_training(job_of("gpt.py:tiny"), small, graph=graph_of("gpt.py:tiny"), wishes=(degrees, *wishes), without={"memory"})
    assert made.layout.microbatch_size == 1


def test_a_plan_that_cannot_be_proved_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = CollectivesWanted("ring")
    best, check = plan("gpt.py:tiny", (2, 2, 1), ring), training.check_plan
    unknown = Verdict(findings=(Finding(check="memory", message="too many joins", status="unknown"),))
    monkeypatch.setattr(training, "check_plan", lambda p: unknown if p.layout == best.layout else check(p))
    other = plan("gpt.py:tiny", (2, 2, 1), ring)
    assert other.layout != best.layout and check(other).ok and other.prediction.time_s >= best.prediction.time_s
    assert re.fullmatch(r"data 2 x tensor 2 .*: its program is too large to be proved \(too many joins\); larger .*", other.job["undecided"][0])
    monkeypatch.setattr(training, "check_plan", lambda _: unknown)
    kept = plan("gpt.py:tiny", (2, 2, 1), ring)
    assert kept.layout == best.layout and len(kept.job["undecided"]) == training.MAX_LAYOUTS_PROVED
