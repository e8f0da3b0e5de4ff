"""Plans for the tests of the page: small, quick to make, of every kind; a run made up from a prediction; and a reader of the page's data.

The reader is its own: it shares no code with `meshwright.report.page.packed`.
"""

from __future__ import annotations

import base64
import functools
import json
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.decide.collective import strategy
from meshwright.decide.collective.problem import CollectiveProblem
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive import plans as drive
from meshwright.drive.collective.job import plan_collective
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.io.fabric.document import fabric_document
from meshwright.job import Training
from meshwright.plan.plan import Plan
from meshwright.report.compare import compare
from meshwright.report.page.content import PageContent, RunFacts
from meshwright.report.page.gather import gather
from meshwright.run.recording.link_times import with_link_times
from meshwright.timeline import Timeline
from meshwright.trace.measured import Measured

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \"q\" 'a' <!-- \u202eevil\x07 ]]>"


@functools.cache
def pipeline_plan(stages: int = 4, microbatches: int = 8) -> Plan:
    problem = PipelineProblem.of(stages, microbatches, message_bytes=1000, p2p_rate_Bps=10_000, p2p_latency_s=0.01, activation_bytes=10)
    return plan_pipeline(problem, "1f1b")


@functools.cache
def collective_plan(op: str = "all-gather", spec: str = "dgx-a100:1", by: str = "ring") -> Plan:
    fabric = drive.read_fabric(spec)
    problem = CollectiveProblem(fabric=fabric, op=op, ranks=tuple(d.name for d in fabric.devices), size_bytes=1 << 20)
    return plan_collective(problem, candidates=[strategy(by)()])[0]


@functools.cache
def training_plan() -> Plan:
    model = str(Path(__file__).parents[2] / "examples" / "gpt.py:tiny")
    job = Training(model=model, global_batch=16)
    return plan_training(
        job, drive.read_fabric("two-islands"), wishes=(LayoutWanted(data=2, tensor=1, pipeline=2, microbatch=4), CollectivesWanted("ring")),
    )  # fmt: skip


@functools.cache
def content(kind: str) -> PageContent:
    """`pipeline`, `collective`, `training`, or `run`: a training plan with a run."""
    if kind == "pipeline":
        return gather(pipeline_plan(), plan_file="plan.json")
    if kind == "shared":  # messages share links
        return gather(collective_plan("all-to-all", "two-islands", "direct"), plan_file="plan.json")
    if kind == "collective":
        return gather(collective_plan(), plan_file="plan.json")
    page = gather(training_plan(), plan_file="plan.json")
    return replace(page, run=run_of(page)) if kind == "run" else page


def slower(timeline: Timeline, times: float) -> Timeline:
    """What a run could have measured: every span of the prediction later and longer, and nothing but times."""
    s = timeline.spans
    spans = replace(s, start_s=s.start_s * times, end_s=s.end_s * times, phase=())
    return Timeline(origin="measured", run_fabric=timeline.run_fabric, spans=spans, makespan_s=timeline.makespan_s * times,
                    attributes={"training_step": 5})  # fmt: skip


def run_of(page: PageContent, times: float = 1.25) -> RunFacts:
    n, t = page.ranks, page.timeline
    peaks = [int(b * 1.02) for b in t.memory_peak_bytes]
    step = with_link_times(slower(t, times), page.inlined.program, page.fabric, page.plan.placement)
    measured = Measured(
        steps=[step] * 4, step_s=[t.makespan_s * times] * 4, losses=[2.0, 1.5, 1.25, 1.0], memory_peak_bytes=peaks,
        rss_peak_bytes=[9 * b for b in peaks], cpu_s=[0.1] * n, run_fabric="laptop:4", pacing="quota", others_share=0.0,
        notes=["a note of the run"],
    )  # fmt: skip
    made = compare(page.plan, page.inlined, t, measured, evidence={"measured": 0.75, "assumed": 0.25}, cpu_s=[0.09] * n)
    document = {
        "ranks": n, "device": "cpu", "data": "synthetic", "launcher": "local", "machine": {"cores": 2.0, "cpu_model": "a processor"},
        "machine_use": {"others": 0.03}, "pacing": {"mode": "quota", "why": "fewer cores than ranks"}, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return RunFacts(folder="run", comparison=made, inlined=page.inlined, document=document)


def renamed(plan: Plan, name: str) -> Plan:
    """The plan on a fabric whose first device has another name."""
    old = plan.placement[0]
    fabric = drive.fabric_of(plan)
    devices = tuple(replace(d, name=name, group=name) if d.name == old else d for d in fabric.devices)
    links = tuple(replace(x, src=name if x.src == old else x.src, dst=name if x.dst == old else x.dst) for x in fabric.links)
    made = replace(fabric, devices=devices, links=links, name=name)
    return replace(plan, placement=(name, *plan.placement[1:]), target_fabric=fabric_document(made))


# ---- reading a page -----------------------------------------------------------------------------------------------------
class Elements(HTMLParser):
    """Every element with its attributes and the text right inside it; ids, texts, and what never ended."""

    VOID = frozenset({"meta", "input", "br", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.mismatched: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in self.VOID:
            self.open.append(len(self.found) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.found[self.open[-1]][0] != tag:
            self.mismatched.append(tag)
            return
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[self.open[-1]][2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]

    def ids(self) -> list[str]:
        return [str(a["id"]) for _, a, _ in self.found if "id" in a]

    def data(self, id: str) -> Any:
        return json.loads(next(text for attributes, text in self.all("script") if attributes.get("id") == id))


def unpacked(block: dict[str, Any]) -> dict[str, Any]:
    """Columns as lists of numbers and texts as lists, decoded byte by byte from what `packed`'s docstring says."""
    raw = zlib.decompress(base64.b64decode(block["data"]), wbits=31)
    assert len(raw) == block["bytes"]
    out: dict[str, Any] = {}
    for column in block["columns"]:
        n, at = column["length"], column["at"]
        if column["kind"] == "f8":
            out[column["name"]] = list(struct.unpack(f"<{n}d", raw[at : at + 8 * n]))
            continue
        value, values = 0, []
        for i in range(n):
            value = (value + sum(raw[at + plane * n + i] << 8 * plane for plane in range(4))) % (1 << 32)
            values.append(value - (1 << 32) if value >= 1 << 31 else value)
        out[column["name"]] = values
    for text in block["texts"]:
        lines = raw[text["at"] : text["at"] + text["bytes"]].decode().split("\n")
        assert lines.pop() == "" and len(lines) == text["length"]
        out[text["name"]] = lines
    return out


def spans_of(data: dict[str, Any]) -> dict[tuple[str, str, int, int], tuple[float, float]]:
    """(who, origin, step, iteration) -> (start, end) in seconds of the spans of ranks on the page; `who` numbers the group."""
    columns, found = unpacked(data["packed"]), {}
    for group, origin, _, role, first, last in data["rows"]:
        if role in ("path", "link"):
            continue
        who = data["groups"][group].split(" on ")[0]
        for i in range(first, last):
            start = columns["start"][i] * data["tick_s"]
            found[who, origin, columns["step"][i], columns["iteration"][i]] = (start, start + columns["duration"][i] * data["tick_s"])
    return found


def expected_spans(timeline: Timeline, origin: str) -> dict[tuple[str, str, int, int], tuple[float, float]]:
    s = timeline.spans
    zero = float(np.min(s.start_s))
    rows = zip(s.rank.tolist(), s.step.tolist(), s.iteration.tolist(), s.start_s.tolist(), s.end_s.tolist(), strict=True)
    return {(f"rank {rank}", origin, step, turn): (start - zero, end - zero) for rank, step, turn, start, end in rows}
