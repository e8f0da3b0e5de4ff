"""What notebooks show: every noun, small, static, escaped; nothing is loaded before it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.bound import Bound, Certificate
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.drive.plans import simulate_plan
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.graph import OpGraph, Parameter
from meshwright.interop.chakra import ChakraSet, ChakraTrace
from meshwright.io.fabric.name import load_fabric
from meshwright.io.trace.read import read_trace
from meshwright.plan.plan import Plan
from meshwright.report.notebook import html_of

EVIL = '</td><script>alert("x")</script>\'"&<img src=x onerror=y>'


class Reader(HTMLParser):
    """Tags and texts; a tag that ends without having begun is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(noun: object) -> Reader:
    html = noun._repr_html_()  # type: ignore[attr-defined]
    assert html == noun._repr_html_() == html_of(noun) and len(html) < 200_000  # type: ignore[attr-defined]
    found = Reader()
    found.feed(html)
    assert not found.open and "script" not in found.tags and "img" not in found.tags
    assert not {a for a in found.attributes if a.startswith("on")}
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_pipeline(PipelineProblem.of(2, 2, forward_s=0.02, message_bytes=1000), "1f1b", {})


def test_nouns_show_their_figures(plan: Plan) -> None:
    assert {"svg"} <= read(load_fabric("two-islands")).tags and "svg" not in read(load_fabric("dgx-h100:8")).tags
    shown = read(plan).text
    assert "pipeline plan" in shown and "1f1b" in shown and "predicted" in shown and "bound" in shown
    assert "2 ranks" in read(plan.main).text
    timeline = simulate_plan(plan)
    assert "simulated on" in read(timeline).text and "svg" in read(timeline).tags
    assert plan.bound is not None
    assert "lower bound of" in read(plan.bound).text
    assert "nodes" in read(ChakraSet(traces=(ChakraTrace(),))).text


def test_hostile_names_are_texts(plan: Plan) -> None:
    fabric = Fabric(name=EVIL, devices=(Device(name=EVIL, group=EVIL), Device(name="b")), links=(Link(src=EVIL, dst="b", rate_Bps=5, kind=EVIL),))
    evil_plan = replace(plan, kind=EVIL, target_fabric={**plan.target_fabric, "name": EVIL}, decisions={EVIL: {"strategy": EVIL}})
    bound = Bound(quantity=EVIL, value="1/3", unit="s/byte", certificate=Certificate(kind="cut", data={EVIL: EVIL}))
    parameters = (Parameter(name=EVIL, shape=(2, 3), dtype="float32", size_bytes=24),)
    graph = OpGraph(model=EVIL, method="export", batch_size=1, loss=EVIL, inputs=(), parameters=parameters, nodes=())
    timeline = replace(simulate_plan(plan), run_fabric=EVIL, link_busy_s={EVIL: 1.0})
    for noun in (fabric, evil_plan, replace(plan.main, name=EVIL), bound, graph, timeline):
        assert "<script>" in read(noun).text
    assert html_of(EVIL).count("<script") == 0


def test_traces_show_what_is_in_them(tmp_path: Path) -> None:
    def slice_of(name: str, start: int, thread: int) -> dict[str, object]:
        return {"ph": "X", "cat": EVIL, "name": name, "pid": EVIL, "tid": thread, "ts": start, "dur": 5}

    events = [slice_of("a", 0, 1), slice_of("b", 10, 1), slice_of("c", 95, 2), {"ph": "X", "name": "no time"}]
    (tmp_path / "t.json").write_text(json.dumps({"distributedInfo": {"rank": 1, "world_size": 4}, "traceEvents": events}))
    shown = read(read_trace(tmp_path / "t.json")).text
    assert "3 on 2 threads and streams" in shown and "100 us" in shown and "1 of 4" in shown and "2 slices" in shown and "<script>" in shown
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    assert "0 on 0 threads" in read(read_trace(tmp_path / "empty.json")).text


def test_long_lists_and_names_are_cut(plan: Plan) -> None:
    many = replace(plan, decisions={f"d{k}": {"strategy": "x" * 500} for k in range(40)})
    shown = read(many).text
    assert "more" in shown and "x" * 121 not in shown and "…" in shown


@pytest.mark.interpreter
def test_nothing_is_drawn_before_it_is_asked_for() -> None:
    code = "import sys; from meshwright.fabric import Fabric; assert hasattr(Fabric, '_repr_html_'); print(any('report' in m for m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert out.stdout.strip() == "False"
