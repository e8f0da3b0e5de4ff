"""Plans whose stages are planned as whole steps: they fit, are proved, beat rules by regions, say what the least is; what the checker refuses."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from captured import captured
from meshwright.check import check_plan
from meshwright.check.training.segment_step import check_segment_steps
from meshwright.cli import main
from meshwright.cost import Cost, Priced
from meshwright.drive import plans as drive
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.memory import MemoryWanted
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.stage_steps import peaks_in_flight
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible, UsageError
from meshwright.explain.explanation import explain_plan
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.io.export.layout import export_layout
from meshwright.io.model.graph import write_graph
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.plan.plan import Plan, Recompute, SegmentStep, TrainingLayout
from meshwright.probe.costs.node_prices import segment_prices
from meshwright.probe.steps.stages import StageSource
from meshwright.report.plan_text import plan_text

MODEL = str(Path(__file__).parents[3] / "examples" / "gpt.py:tiny")
JOB = Training(model=MODEL, global_batch=32)
DEGREES = {"data": 1, "tensor": 1, "pipeline": 2, "microbatch": 8}
MEMORY = 4_400_000
swap = msgspec.structs.replace


@pytest.fixture(autouse=True, scope="module")
def little_effort():
    """What is shown here holds of any schedule that fits; how good the search's are is `tests/decide/memory`'s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.drive.training.stage_steps.EFFORT_PER_NODE", 2_000)
        yield


@functools.cache
def graph() -> OpGraph:
    return captured(MODEL)


@functools.cache
def source() -> StageSource:
    device = replace(fabric(0).devices[0], kind="gpu")  # priced by the roofline: nothing is measured
    return StageSource(job=JOB, device=device, cost=Cost())


def fabric(memory_bytes: int) -> Fabric:
    plain = drive.read_fabric("laptop:2")
    return replace(plain, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in plain.devices))


@functools.cache
def plan(recompute: str, memory_bytes: int = MEMORY, steps: bool = True) -> Plan:
    return plan_training(
        JOB, fabric(memory_bytes), graph=graph(),
        wishes=(LayoutWanted(**DEGREES), RecomputeWanted(recompute), MemoryWanted(source() if steps else None)),
    )  # fmt: skip


def test_stages_over_their_memory_run_planned_steps_and_fit():
    made = plan("steps")
    assert made.layout is not None and made.prediction is not None
    assert all(s.step is not None for s in made.layout.segments)
    assert [s.step.graph.in_flight for s in made.layout.segments if s.step] == [2, 1]
    assert max(made.prediction.memory_worst_bytes) <= MEMORY and check_plan(made).ok
    again = plan_from_bytes(plan_bytes(made))
    assert again.layout == made.layout and plan_bytes(again) == plan_bytes(made)
    assert made.decisions["recompute"]["strategy"] == "steps" and "steps: stage 0" in plan_text(made)
    assert all(s.recompute_s > 0 for s in explain_plan(made, quick=True).breakdown.stages)
    assert any("run again" in line for line in export_layout(made, "megatron").not_expressed)


def test_the_plan_says_how_far_it_is_from_the_best_of_its_layout():
    for memory in (MEMORY, 3_600_000):
        made = plan("steps", memory)
        said = made.decisions["recompute"]["options"]
        assert all(0 < s["bound_s"] <= s["time_s"] for s in said["stages"])
        assert sum(s["time_s"] for s in said["stages"]) > 0 and said["least_step_s"] <= made.prediction.time_s
        assert said["least_step_s"] > float(made.bound)
        text = " ".join(plan_text(made).split())
        assert "(at least" in text and f"make the step shorter than {said['least_step_s'] * 1e3:.4g} ms" in text
    less, more = (plan("steps", m).decisions["recompute"]["options"]["least_step_s"] for m in (3_600_000, MEMORY))
    assert less > more


def test_stages_of_several_segments_hold_less_and_have_a_bound():
    """Segments of a tensor-parallel stage add up in what they hold, whatever the peak of each alone."""
    degrees = {"data": 1, "tensor": 2, "pipeline": 1, "microbatch": 8}
    asked = LayoutWanted(**degrees), CollectivesWanted("ring")
    whole = plan_training(JOB, fabric(1 << 30), graph=graph(), wishes=(*asked, RecomputeWanted("none")))
    limit = max(whole.prediction.memory_worst_bytes) * 7 // 10
    made = plan_training(JOB, fabric(limit), graph=graph(), wishes=(*asked, RecomputeWanted("steps"), MemoryWanted(source())))
    (stage,) = made.decisions["recompute"]["options"]["stages"]
    assert max(made.prediction.memory_worst_bytes) <= limit and check_plan(made).ok
    assert 0 < stage["bound_s"] <= stage["time_s"]


def test_operators_measured_here_price_what_runs_again():
    layout = plan("steps").layout
    nodes = {n.name: (Priced(1.0), Priced(2.0)) for n in graph().nodes}
    again = segment_prices(nodes, layout.microbatch_size, layout)
    once = segment_prices(nodes, layout.microbatch_size, swap(layout, segments=tuple(swap(s, step=None) for s in layout.segments)))
    for s in layout.segments:
        share = s.step.again_s() / s.step.forward_s()
        assert share > 0 and again[f"{s.key}|B"].time_s == pytest.approx(once[f"{s.key}|B"].time_s + share * once[f"{s.key}|F"].time_s)


def test_most_micro_batches_at_once():
    layout = plan("steps").layout
    assert peaks_in_flight(layout) == (2, 1)
    gpipe = tuple(tuple((x, s, m) for x in "FB" for m in range(4)) for s in range(2))
    assert peaks_in_flight(layout, gpipe) == (4, 4)
    split = (tuple(("F", 0, m) for m in range(2)) + (("I", 0, 0), ("F", 0, 2), ("W", 0, 0)), (("F", 1, 0), ("I", 1, 0), ("W", 1, 0)))
    assert peaks_in_flight(swap(layout, split_backward=True), split) == (3, 1)


def test_auto_takes_the_faster_of_whole_stages_and_regions():
    best = plan("auto").prediction.time_s
    assert best <= min(plan("steps").prediction.time_s, plan("optimal", MEMORY, steps=False).prediction.time_s)


def test_every_budget_above_the_least_is_planned():
    """What a plan leaves free of its stage's bytes, the worst order of the program may need: then more is asked for."""
    with pytest.raises(Infeasible) as caught:
        plan("steps", 2_000_000)
    least = min(c["needed_bytes"] for c in caught.value.data["changes"] if c["kind"] == "memory")
    full = max(plan("none", 0, steps=False).prediction.memory_worst_bytes)
    budgets = 12 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 4
    for memory in range(least, full, (full - least) // budgets):
        assert max(plan("steps", memory).prediction.memory_worst_bytes) <= memory


def test_below_the_least_the_error_says_what_fits():
    with pytest.raises(Infeasible) as caught:
        plan("auto", 2_000_000)
    least = caught.value.data["needed_bytes"]
    assert caught.value.data["recompute"] == "recompute steps" and f"needs {least} bytes" in caught.value.message
    said = [c for c in caught.value.data["changes"] if c["kind"] == "memory"]
    assert said[0]["needed_bytes"] <= least and "changes" in caught.value.hint
    made = plan("auto", least)
    assert max(made.prediction.memory_worst_bytes) <= least


def test_whole_stages_need_their_graphs(tmp_path, capsys):
    with pytest.raises(UsageError, match="need the stages' step graphs"):
        plan("steps", MEMORY, steps=False)
    words = ["train", "plan", "--fabric", "laptop:2", "--global-batch", "8", "-o", str(tmp_path / "p.json")]
    assert main([*words, "--model", MODEL, "--memory", "much"]) == 2
    assert main([*words, "--model", MODEL, "--memory", "0B"]) == 2
    assert "--memory" in capsys.readouterr().err
    file = tmp_path / "graph.json"
    write_graph(file, graph())
    assert main([*words, "--graph", str(file), "--recompute", "steps"]) == 2
    assert "needs --model" in capsys.readouterr().err


# ---- the checker -------------------------------------------------------------------------------------------------------
def changed(**fields: object) -> TrainingLayout:
    """The planned layout with other fields in the first stage's step (or, of `segment_`, in its segment)."""
    layout = plan("steps").layout
    assert layout is not None
    first = layout.segments[0]
    own = {k.removeprefix("segment_"): v for k, v in fields.items() if k.startswith("segment_")}
    first = swap(first, step=swap(first.step, **{k: v for k, v in fields.items() if not k.startswith("segment_")}), **own)
    return swap(layout, segments=(first, *layout.segments[1:]))


def step() -> SegmentStep:
    found = plan("steps").layout.segments[0].step
    assert found is not None
    return found


def test_every_claim_about_a_planned_step_is_checked():
    assert not check_segment_steps(changed())
    saved = plan("steps").layout.segments[0]
    wrong = {
        "is split": changed(weights=step().plan.boundary),
        "recomputes by regions": changed(segment_recompute=(Recompute(starts=(0,), again=(0,)),)),
        "in its place": changed(segment_sum_writes=saved.writes, kept=saved.writes),
        "0 writes": changed(writes=()),
        "node 99999": changed(handed=99999),
        "the plan says": changed(plan=swap(step().plan, peak_bytes=1)),
        "does not cross": changed(kept=("other",)),
        "does not give away": changed(handed=0),
        "saved_bytes are": changed(segment_saved_bytes=saved.saved_bytes - 1),
        "backward_workspace_bytes are": changed(segment_backward_workspace_bytes=saved.backward_workspace_bytes - 1),
    }
    for said, layout in wrong.items():
        found = check_segment_steps(layout)
        assert found and said in found[0].message, said


def test_kept_border_values_are_checked():
    layout = plan("steps").layout
    last = layout.segments[1]
    assert last.step is not None and last.reads[0] in last.step.kept
    wrong = (({"kept": ()}, "which is not kept"), ({"gradients": (0, 0)}, "is no result"), ({"reads": last.step.writes * 2}, "is no placeholder"))
    for fields, said in wrong:
        bad = swap(layout, segments=(layout.segments[0], swap(last, step=swap(last.step, **fields))))
        found = check_segment_steps(bad)
        assert found and said in found[0].message, said
