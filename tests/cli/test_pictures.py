"""`--trace` and `--svg` of commands with a plan: what is written, printed and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.cli.frame import main


def output(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(w) for w in words]) == code
    seen = capsys.readouterr()
    return seen.out if code == 0 else seen.err


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    output(capsys, "pipeline", "plan", "--stages", 2, "--microbatches", 2, "--strategy", "1f1b", "--message-bytes", 1000, "-o", path)
    return path


def test_traces_of_a_plan_and_of_its_file_are_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path) -> None:
    words = ("pipeline", "plan", "--stages", 2, "--microbatches", 2, "--strategy", "1f1b", "--message-bytes", 1000, "-o", plan)
    document = json.loads(output(capsys, *words, "--trace", tmp_path / "a.json", "--json"))
    assert document["trace"] == str(tmp_path / "a.json")
    assert output(capsys, "program", "show", plan, "--trace", tmp_path / "b.json").endswith(f"trace written to {tmp_path / 'b.json'}\n")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    events = json.loads((tmp_path / "a.json").read_bytes())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes >= {"rank 0 · predicted", "rank 1 · predicted", "links · predicted", "critical path · predicted"}
    assert any(e["ph"] == "C" and e["name"] == "memory" for e in events)


def test_collective_plan_writes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ring.pftrace"
    text = output(capsys, "collective", "plan", "all-gather", "--fabric", "laptop:4", "--size", "1MB", "--strategy", "ring", "--trace", path)
    assert text.endswith(f"trace written to {path}\n") and path.stat().st_size > 1000


def test_drawings(capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path) -> None:
    text = output(capsys, "program", "show", plan, "--svg", tmp_path / "a.svg", "--trace", tmp_path / "a.json")
    assert text.endswith(f"trace written to {tmp_path / 'a.json'}\ndrawn into {tmp_path / 'a.svg'}\n")
    words = [x.text for x in ElementTree.parse(tmp_path / "a.svg").getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "1f1b pipeline plan on pipeline" and "forward" in words
    document = json.loads(output(capsys, "collective", "plan", "all-gather", "--fabric", "laptop:2", "--size", "1MB", "--strategy", "ring",
                                 "--svg", tmp_path / "b.svg", "--json"))  # fmt: skip
    assert document["svg"] == str(tmp_path / "b.svg") and "ring collective plan on laptop:2" in (tmp_path / "b.svg").read_text()


def test_the_picture_on_the_pipelines_page_is_what_the_command_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = Path("docs/pipelines.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"meshwright (pipeline plan [^\n]*--svg docs/pipeline_schedule\.svg)", page)
    words = command.replace("docs/pipeline_schedule.svg", str(tmp_path / "x.svg")).split()
    output(capsys, *words, "-o", tmp_path / "plan.json")
    assert (tmp_path / "x.svg").read_bytes() == Path("docs/pipeline_schedule.svg").read_bytes()


def test_what_cannot_be_written_is_refused_before_any_work(capsys: pytest.CaptureFixture[str], tmp_path: Path, plan: Path) -> None:
    assert "a trace ends in .json" in output(capsys, "program", "show", plan, "--trace", tmp_path / "x.txt", code=2)
    assert "--trace: no directory" in output(capsys, "program", "show", plan, "--trace", tmp_path / "none" / "x.json", code=2)
    assert "--svg: no directory" in output(capsys, "program", "show", plan, "--svg", tmp_path / "none" / "x.svg", code=2)
    named = json.loads(plan.read_bytes())["cycle"][0]["program"][:8]
    assert "no fabric and no times" in output(capsys, "program", "show", plan, "--program", named, "--trace", tmp_path / "x.json", code=2)
