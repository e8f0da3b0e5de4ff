"""A found layout's plan has the precision that the search priced: sizes of values, messages and state are not those of the captured graph."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from captured import captured
from meshwright import check
from meshwright.cli import main
from meshwright.cost import assumed_cost
from meshwright.decide.layout.mixed.search import Judged
from meshwright.drive.layout.search import LayoutFindings, find_layouts
from meshwright.drive.plans import check_plan, read_plan, write_plan
from meshwright.drive.training.found_layout import not_runnable, plan_found
from meshwright.explain.explanation import explain_plan
from meshwright.graph.graph import OpGraph
from meshwright.graph.scale import at_batch
from meshwright.io.fabric.name import load_fabric
from meshwright.io.model.graph import write_graph
from meshwright.job import Training
from meshwright.plan.narrowed import in_precision, with_optimizer
from meshwright.plan.plan import Plan, TrainingLayout
from meshwright.plan.precision import FULL, MIXED, Precision
from meshwright.profile.frameworks import framework
from meshwright.profile.layer_profile import Entry
from meshwright.program.program import BUFFER_ROLES

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'gpt.py'}:tiny"
ODD = f"{Path(__file__).parent / 'odd_net.py'}:odd"
NET = load_fabric("laptop:4")
WIDE_SUMS = msgspec.structs.replace(MIXED, state=framework("torchtitan").state)  # gradients travel in float32


def searched(graph: OpGraph, precision: Precision, level: int = 0, microbatch: int = 2, **more: object) -> LayoutFindings:
    return find_layouts(
        lambda batch: at_batch(graph, batch), NET, assumed_cost(NET), global_batch=8, precision=precision, microbatches=(microbatch,), simulated=30,
        refine=0, schedules=("1f1b",), levels=(level,), recompute=("none",), **more,  # type: ignore[arg-type]
    )  # fmt: skip


def of_degrees(found: LayoutFindings, degrees: tuple[int, int, int]) -> Judged:
    """The best found with these data, tensor and pipeline degrees."""
    for j in found.found.ranked:
        layout = j.candidate.layout
        if (layout.data, layout.stages[0].replicas[0].tensor, len(layout.stages)) == degrees and not not_runnable(found, j):
            return j
    raise AssertionError(f"no layout of {degrees} was found")


def planned(graph: OpGraph, precision: Precision, degrees: tuple[int, int, int], level: int = 0, **more: int) -> tuple[LayoutFindings, Judged, Plan]:
    found = searched(graph, precision, level, **more)
    chosen = of_degrees(found, degrees)
    plan = plan_found(found, chosen, Training(model=graph.model, global_batch=8), NET, assumed_cost(NET), graph, collective="ring")
    assert check_plan(plan).ok
    return found, chosen, plan


def layout_of(plan: Plan) -> TrainingLayout:
    assert plan.layout is not None
    return plan.layout


def held_bytes(plan: Plan) -> Counter[tuple[int, str]]:
    """What a rank keeps from step to step, by rank and role."""
    b, found = plan.main.buffers, Counter[tuple[int, str]]()
    for i in range(len(b)):
        if b.persistent[i] and b.alias_of[i] < 0:
            found[int(b.actor[i]), BUFFER_ROLES[int(b.role[i])]] += int(b.chunks[i]) * int(b.chunk_bytes[i])
    return found


@pytest.mark.parametrize(
    ("precision", "level"), [(MIXED, 0), (MIXED, 1), (MIXED, 3), (WIDE_SUMS, 2), (FULL, 1)], ids=["mixed 0", "mixed 1", "mixed 3", "wide 2", "full 1"]
)
def test_state_messages_and_borders_are_those_that_were_priced(precision: Precision, level: int) -> None:
    """Weights, gradients and state to the last byte; a border's values; what replicas add up. Computation's own buffers come on top, in the plan."""
    found, chosen, plan = planned(captured(EXAMPLE), precision, (2, 1, 2), level)
    layout, mine = layout_of(plan), chosen.candidate
    priced = found.problem.table.priced_each(Entry(mine.layout.stages[0].replicas[0].device, 2, 1), mine.choices, 2)
    rows, cut = found.problem.table.rows[Entry("cpu", 2, 1)], mine.layout.stages[0].layers
    held, state = held_bytes(plan), precision.state
    for rank in range(4):
        p = layout.coordinates(rank)[0]
        layers = slice(0, cut) if p == 0 else slice(cut, None)
        assert sum(held[rank, role] for role in ("weight", "gradient", "state")) == round(sum(priced["state_bytes"][layers]))
        count = sum(r.parameters for r in rows[layers])
        assert held[rank, "weight"] == count * state.weight / (2 if level == 3 else 1)
        assert held[rank, "gradient"] == count * state.message / (2 if level > 1 else 1), "gradients are as wide as their messages"
    values = {v.name: v for v in layout.values}
    assert sum(values[v].size_bytes for v in layout.stages[0].sends) == rows[cut - 1].output_bytes
    assert {values[v].dtype for v in layout.stages[0].sends} == {"float32" if precision is FULL else "bfloat16"}
    sent = plan.main.message_bytes()[plan.main.steps.chan_out >= 0]
    assert {*sent.tolist()} == {values[v].size_bytes for v in layout.stages[0].sends}, "what stages send each other is what the border holds"
    assert plan.prediction is not None
    for s, peak in enumerate(chosen.prediction.memory_peak_bytes if chosen.prediction is not None else ()):
        over = plan.prediction.memory_peak_bytes[layout.rank(s, 0, 0)] - peak
        assert 0 <= over <= 0.15 * peak, "buckets, and what single operators need, are not in the price"


def test_tensor_parallel_sums_are_of_the_precision() -> None:
    graph = captured(EXAMPLE)
    full, mixed = (layout_of(planned(graph, p, (1, 2, 2))[2]) for p in (FULL, MIXED))
    summed = {v for s in full.segments for v in (*s.sum_writes, *s.sum_grads)}
    wide, narrow = ({v.name: v for v in x.values} for x in (full, mixed))
    common = [v for v in summed & narrow.keys() if "/" not in v]
    assert common and all(narrow[v].size_bytes * 2 == wide[v].size_bytes and narrow[v].dtype == "bfloat16" for v in common)


def test_a_fp32_search_says_nothing_of_precision() -> None:
    graph = captured(EXAMPLE)
    _, _, plan = planned(graph, FULL, (2, 1, 2))
    assert not layout_of(plan).precision and plan.job["training"]["dtype"] == "float32"
    assert plan.job["graph_fingerprint"] == graph.fingerprint()


def test_odd_numbers_of_elements_keep_whole_elements() -> None:
    """Chunks are whole multiples of 4 bytes where there are several; a message of one chunk has its value's own bytes."""
    graph = captured(ODD)
    for precision in (MIXED, WIDE_SUMS):
        for degrees, level in (((2, 1, 2), 0), ((4, 1, 1), 1), ((4, 1, 1), 3)):
            _, _, plan = planned(graph, precision, degrees, level, microbatch=1)
            layout, held, b = layout_of(plan), held_bytes(plan), plan.main.buffers
            values = {v.name: v for v in layout.values}
            assert all(values[v].size_bytes % 4 == 2 for v in layout.stages[0].sends), "5 elements of 2 bytes"
            assert not any(int(b.chunk_bytes[i]) % 2 for i in range(len(b)) if b.name[i].startswith(("act", "grad", "weights", "shard")))
            parameters = sum(p.size_bytes for p in graph.parameters if p.name in layout.held(0).params) // 4
            parts = layout.data if level else 1
            assert held[0, "state"] >= parameters / parts * precision.state.optimizer
            assert held[0, "gradient"] >= parameters * precision.state.message / (layout.data if level > 1 else 1)


def test_a_plan_keeps_its_precision_when_read_explained_and_extended(tmp_path: Path) -> None:
    graph = captured(EXAMPLE)
    _, _, plan = planned(graph, MIXED, (2, 1, 2))
    write_plan(tmp_path / "plan.json", plan)
    again = read_plan(tmp_path / "plan.json")
    assert layout_of(again).precision == MIXED and again.job["training"]["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "plan.json").read_text())["layout"]["precision"]["state"] == [2.0, 4.0, 12.0, 2.0]
    assert again.job["graph_fingerprint"] == in_precision(graph, MIXED).fingerprint() != graph.fingerprint()
    write_graph(tmp_path / "graph.json", graph)
    told = explain_plan(again, graph_path=tmp_path / "graph.json")
    assert told.rivals and not any("another model" in n or "has changed" in n for n in told.notes)


def test_a_graph_in_its_own_precision_stays() -> None:
    graph = captured(EXAMPLE)
    narrow = in_precision(graph, MIXED)
    assert in_precision(narrow, MIXED) is narrow and in_precision(graph, FULL) is graph and in_precision(graph, None) is graph
    assert sum(p.size_bytes for p in narrow.parameters) * 2 == sum(p.size_bytes for p in graph.parameters)
    assert narrow.saved_bytes < 0.6 * graph.saved_bytes and narrow.inputs == graph.inputs
    assert with_optimizer(MIXED, "sgd").state.optimizer == 4.0


def with_sizes(plan: Plan, name: str, times: int, of: int) -> Plan:
    """The plan with the buffers of this name (or the first that begins so) `times` / `of` as wide."""
    b = plan.main.buffers
    chosen = next(x for x in b.name if x == name or (name.endswith(":") and x.startswith(name)))
    wide = np.array([int(c) * times // of if n == chosen else int(c) for n, c in zip(b.name, b.chunk_bytes, strict=True)])
    main = replace(plan.main, buffers=replace(b, chunk_bytes=wide))
    return replace(plan, programs={**plan.programs, plan.cycle[0].program: main})


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_check_compares_buffers_with_the_layouts_precision(level: int) -> None:
    """What is as wide as float32 under a layout of bfloat16 is refused by name: values, gradients, state; and all of a plan of float32."""
    graph = captured(EXAMPLE)
    plan = planned(graph, MIXED, (2, 1, 2), level)[2]
    wide = with_sizes(plan, "act:", 2, 1)
    gradient = "gradients@0" if level in (0, 1) and layout_of(plan).buckets else "gradients" if level < 2 else "gradshard@0"
    for bad in (wide, with_sizes(plan, gradient, 2, 1), with_sizes(plan, "state", 1, 2)):
        found = check.check_plan(bad).findings
        assert found and all(f.message.startswith("precision: the layout trains in bfloat16, and ") for f in found), found
    full = planned(graph, FULL, (2, 1, 2), level)[2]
    said = replace(full, layout=msgspec.structs.replace(layout_of(full), precision=MIXED))
    assert "its values are float32" in " ".join(f.message for f in check.check_plan(said).findings)


def test_a_value_takes_no_more_than_its_dtype() -> None:
    plan = planned(captured(EXAMPLE), MIXED, (2, 1, 2))[2]
    layout = layout_of(plan)
    first = msgspec.structs.replace(layout.values[0], size_bytes=2 * layout.values[0].size_bytes)
    bad = replace(plan, layout=msgspec.structs.replace(layout, values=(first, *layout.values[1:])))
    assert any(f"{first.name!r} of {first.dtype}" in f.message for f in check.check_plan(bad).findings)


@pytest.mark.parametrize("captured_first", [False, True])
def test_a_plan_may_be_asked_for_in_mixed_weights(captured_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `layout search` has it: bfloat16 weights and messages, float32 masters among the optimizer's state."""
    graph, out = tmp_path / "graph.json", tmp_path / "plan.json"
    write_graph(graph, captured(EXAMPLE))
    of = ["--graph", str(graph)] if captured_first else ["--model", EXAMPLE]
    words = ["--fabric", "laptop:2", "--dp", "2", "--tp", "1", "--pp", "1", "--zero", "0", "--microbatch", "2", "--global-batch", "4"]
    assert main(["train", "plan", *of, *words, "--optimizer", "sgd", "--precision", "mixed", "--out", str(out)]) == 0
    assert "precision    bf16" in capsys.readouterr().out
    plan = read_plan(out)
    assert check_plan(plan).ok and layout_of(plan).precision == with_optimizer(MIXED, "sgd") and plan.job["training"]["dtype"] == "bfloat16"
    count, held = plan.job["parameters"], held_bytes(plan)
    assert held[0, "weight"] == 2 * count and held[0, "state"] >= 4 * count
    assert main(["train", "explain", str(out), "--quick"]) == 0


def test_operators_that_are_measured_are_not_in_mixed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "plan", "--model", EXAMPLE, "--fabric", "laptop:2", "--global-batch", "4", "--precision", "mixed", "--cost", "measured"]
    assert main(words) == 2
    assert "operators are measured in float32" in capsys.readouterr().err
