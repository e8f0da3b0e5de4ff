"""Drawings of schedules and memory: well-formed, true to the timeline, equal for equal inputs, safe with hostile names."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli.pictures import write_plan_svg
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.drive.plans import simulate_plan
from meshwright.plan.plan import Plan
from meshwright.program.flat import flatten
from meshwright.report import schedule_svg as module
from meshwright.report.memory_svg import memory_curves, memory_svg
from meshwright.report.schedule_svg import LEFT, RIGHT, WIDTH, schedule_svg
from meshwright.report.svg import cut, document, legend, text, ticks
from meshwright.timeline import Spans, Timeline

NS = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    problem = PipelineProblem.of(3, 4, forward_s=0.02, message_bytes=1_000_000, activation_bytes=1000)
    return plan_pipeline(problem, "1f1b", {})


def drawn(plan: Plan) -> tuple[str, Timeline]:
    timeline = simulate_plan(plan, transfers=True)
    return schedule_svg(timeline, flatten(plan.main, plan.programs).program), timeline


def bars(root: ElementTree.Element) -> list[tuple[float, float, float, str, str]]:
    """(x, y, width, colour, tooltip) of every bar that has one."""
    found = []
    for box in root.iter(f"{NS}rect"):
        tip = box.find(f"{NS}title")
        if tip is not None:
            found.append((float(box.get("x", 0)), float(box.get("y", 0)), float(box.get("width", 0)), box.get("fill", ""), tip.text or ""))
    return found


def test_every_computation_is_a_bar_where_and_as_long_as_it_is(plan: Plan) -> None:
    svg, timeline = drawn(plan)
    root = ElementTree.fromstring(svg)
    program = flatten(plan.main, plan.programs).program
    scale = (WIDTH - LEFT - RIGHT) / timeline.makespan_s
    found = {(tip.partition(":")[0], round(x, 1), round(width, 1)) for x, _, width, _, tip in bars(root)}
    s = timeline.spans
    for i in range(len(s)):
        op = int(program.steps.op[s.step[i]])
        if op >= 0:
            what = f"{program.ops.name[op]} {program.ops.graph[op]} micro-batch {int(program.ops.microbatch[op])}"
            length = (s.end_s[i] - s.start_s[i]) * scale - 0.4
            assert (what, round(LEFT + s.start_s[i] * scale, 1), round(length, 1)) in found
    numbers = [t.text for t in root.iter(f"{NS}text") if t.get("text-anchor") == "middle" and (t.text or "").isdigit()]
    assert sorted(numbers) == sorted(4 * 2 * 3 // 4 * [str(m) for m in range(4)])
    words = {t.text for t in root.iter(f"{NS}text")}
    assert {"rank 0", "rank 2", "forward", "backward", "pipeline messages"} <= words
    summary = root.find(f"{NS}desc")
    assert summary is not None and summary.text is not None and "time spent computing: rank 0 67 %" in summary.text and "memory peaks" in summary.text


def test_bars_of_a_line_do_not_overlap(plan: Plan) -> None:
    lines: dict[float, list[tuple[float, float]]] = {}
    for x, y, width, _, _ in bars(ElementTree.fromstring(drawn(plan)[0])):
        lines.setdefault(y, []).append((x, x + width))
    for intervals in lines.values():
        intervals.sort()
        assert all(a[1] <= b[0] + 0.05 for a, b in pairwise(intervals))


def test_messages_are_drawn_while_they_move(plan: Plan) -> None:
    svg, timeline = drawn(plan)
    t = timeline.transfers
    assert t is not None and len(t)
    messages = [b for b in bars(ElementTree.fromstring(svg)) if b[4].startswith("read+send")]
    assert len(messages) == len({(int(s), int(i)) for s, i in zip(t.step, t.iteration, strict=True)})
    without = schedule_svg(replace(timeline, transfers=None), flatten(plan.main, plan.programs).program)
    assert len([b for b in bars(ElementTree.fromstring(without)) if b[4].startswith("read+send")]) == len(messages)


def test_equal_plans_give_equal_drawings(plan: Plan, tmp_path: Path) -> None:
    write_plan_svg(tmp_path / "a.svg", plan)
    write_plan_svg(tmp_path / "b.svg", plan)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert drawn(plan)[0] == drawn(plan)[0]


def spans(rows: list[tuple[int, float, float, str, str]]) -> Timeline:
    columns = list(zip(*rows, strict=True)) if rows else [[], [], [], [], []]
    n = len(rows)
    s = Spans(rank=np.array(columns[0], np.int32), lane=np.zeros(n, np.int32), step=np.full(n, -1, np.int32), iteration=np.zeros(n, np.int32),
              start_s=np.array(columns[1], float), end_s=np.array(columns[2], float), phase=list(columns[3]), name=list(columns[4]))  # fmt: skip
    end = max((r[2] for r in rows), default=0.0)
    return Timeline(origin="measured", run_fabric="<f>&", spans=s, makespan_s=end)


NAMES = st.text(max_size=200) | st.sampled_from(["</svg><script>alert(1)</script>", '"onload="x', "]]>", "\x00\x1b[31m", "é" * 300])


@given(NAMES, NAMES, st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5), st.floats(0, 5)), max_size=12))
def test_any_names_and_times_give_a_well_formed_drawing(title: str, phase: str, times: list[tuple[int, float, float]]) -> None:
    timeline = spans([(rank, start, start + length, phase, title) for rank, start, length in times])
    root = ElementTree.fromstring(schedule_svg(timeline, title=title))
    assert not [e.tag for e in root.iter() if "script" in e.tag] and not [k for e in root.iter() for k in e.attrib if k.startswith("on")]
    assert all(len(t.text or "") <= 140 for t in root.iter(f"{NS}text"))


def test_many_bars_are_joined_and_many_ranks_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, k * 1e-6, (k + 1) * 1e-6, "forward", "") for k in range(20_000)]
    svg = schedule_svg(spans(rows))
    assert len(svg) < 300_000
    monkeypatch.setattr(module, "MAX_RANKS", 2)
    words = schedule_svg(spans([(r, 0.0, 1.0, "forward", "") for r in range(5)]))
    assert "3 more ranks are not drawn" in words
    many = schedule_svg(spans([(0, 0.0, 1.0 + k, "gradient", "") for k in range(9)]))
    assert "5 messages beside others are not drawn" in many


def test_messages_of_unknown_steps_say_that_they_include_waiting() -> None:
    svg = schedule_svg(spans([(0, 0.0, 1.0, "pipeline", ""), (0, 0.0, 1.0, "data loading", "")]))
    words = {t.text for t in ElementTree.fromstring(svg).iter(f"{NS}text")}
    assert {"pipeline messages, with waiting", "data loading"} <= words


def test_memory_has_one_curve_per_different_rank_with_its_peak(plan: Plan) -> None:
    timeline = simulate_plan(plan)
    root = ElementTree.fromstring(memory_svg(timeline))
    curves = memory_curves(timeline)
    assert len(list(root.iter(f"{NS}polyline"))) == len(curves)
    peaks = re.findall(r"ranks? [\d, ]+? (\d\S* [kM]?B)", (root.find(f"{NS}desc").text or ""))  # type: ignore[union-attr]
    assert len(peaks) == len(curves)
    doubled = replace(timeline, counters={f"memory of rank {r}": timeline.counters["memory of rank 0"] for r in range(6)})
    assert [whose for whose, _, _ in memory_curves(doubled)] == ["ranks 0, 1, 2, 3, ... (6)"]
    nothing = memory_svg(replace(timeline, counters={}))
    assert "no memory was recorded" in nothing and ElementTree.fromstring(nothing) is not None


def test_thinned_curves_keep_their_peak() -> None:
    value = np.zeros(100_000)
    value[77_777] = 5e9
    timeline = replace(spans([]), makespan_s=1.0, counters={"memory of rank 0": (np.linspace(0, 1, 100_000), value)})
    svg = memory_svg(timeline)
    assert "rank 0 5 GB" in svg and len(svg) < 60_000
    (curve,) = ElementTree.fromstring(svg).iter(f"{NS}polyline")
    heights = [float(p.split(",")[1]) for p in curve.get("points", "").split()]
    assert min(heights) == 44.0  # the top of the panel


@given(st.floats(1e-12, 1e15), st.integers(1, 12))
def test_ticks(highest: float, about: int) -> None:
    found = ticks(highest, about)
    assert found[0] == 0 and found[-1] <= highest * (1 + 1e-9) and 1 <= len(found) <= about + 1
    assert all(b > a for a, b in pairwise(found))


def test_the_frame() -> None:
    svg = document(10, 20, [text(1, 2, "<&\x01")], title="a<b", summary="c&d")
    root = ElementTree.fromstring(svg)
    assert [e.text for e in root if e.tag in (f"{NS}title", f"{NS}desc")] == ["a<b", "c&d"]
    assert "prefers-color-scheme: dark" in svg and "<&\N{REPLACEMENT CHARACTER}" in [e.text for e in root.iter(f"{NS}text")]
    assert cut("abcdef", 4) == "abc…" and cut("abcd", 4) == "abcd" and ticks(0.0, 3) == [0.0]
    marks, tall = legend(0, 0, [("x" * 20, "#fff")] * 3, width=200)
    assert tall == 51 and len(marks) == 6 and legend(0, 0, [], width=9) == ([], 0.0)
