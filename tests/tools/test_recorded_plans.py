"""`tools/recorded_plans` finds a plan whose bytes changed: against its record, and against another checkout."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "recorded_plans"
WORDS = "pipeline: --microbatches 8 --strategy zb"  # three plans
ZB1P, ZB2P = (f"pipeline plan --stages 4 --microbatches 8 --strategy {x} --time-limit 100000" for x in ("zb1p --p2p-latency-s 0.1", "zb2p"))


def said(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(TOOL / "__main__.py"), *words], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def written(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.real
def test_a_plan_that_is_not_as_recorded_is_found(tmp_path: Path) -> None:
    here = tmp_path / "here.json"
    shutil.copy(TOOL / "recorded.json", here)
    document = json.loads(here.read_text())
    code, text = said("--only", WORDS, "--file", str(here))
    if "prove nothing" in text:  # recorded with other versions of numpy and the like: what is made here is the record
        assert code == 0
    else:
        assert code == 0 and "4 of 4 plans as recorded, 0 differ, 0 failed" in text, text

    entries = {e["command"]: e for e in document["plans"]}
    entries[ZB2P]["sha256"] = "0" * 64
    old = {**document, "versions": {**document["versions"], "numpy": "0.1"}}
    code, text = said("--only", "pipeline: zb2p", "--file", written(tmp_path / "old.json", old))
    assert code == 0 and "DIFFERS" in text and "numpy 0.1, here" in text and "prove nothing" in text, text

    lacking = {**document, "plans": [e for e in document["plans"] if e["command"] != ZB1P]}
    code, text = said("--only", WORDS, "--file", written(tmp_path / "lacking.json", lacking))
    verdicts = {line.split("pipeline plan")[-1]: line.split()[0] for line in text.splitlines() if "pipeline plan" in line}
    assert code == 1 and "not recorded yet" in text
    assert verdicts[ZB1P.removeprefix("pipeline plan")] == "FAILED" and verdicts[ZB2P.removeprefix("pipeline plan")] == "DIFFERS"


@pytest.mark.real
def test_a_checkout_that_makes_another_plan_is_found_by_path(tmp_path: Path) -> None:
    other = tmp_path / "other"
    package = other / "src" / "meshwright" / "__init__.py"  # the modules are those of this checkout, so that no kernel is compiled again
    package.parent.mkdir(parents=True)
    real = ROOT / "src" / "meshwright"
    first = "from importlib import"
    package.write_text((real / "__init__.py").read_text().replace(first, f"__path__.append({str(real)!r})\n{first}", 1))
    code, text = said("--only", "pipeline: zb2p", "--against", str(other))
    assert code == 0 and "1 of 1 plans equal, byte for byte" in text, text
    package.write_text(package.read_text().replace('__version__ = "', '__version__ = "9.'))
    code, text = said("--only", "pipeline: zb2p", "--against", str(other / "src"))
    assert code == 1 and "0 of 1 plans equal, byte for byte; 1 differ" in text
    assert '$.versions.meshwright: "0.1.0" here, "9.0.1.0" there' in text or ".meshwright: " in text
    code, text = said("--only", "pipeline: zb2p", "--against", str(tmp_path))
    assert code == 1 and "no checkout of meshwright" in text


def test_words_that_nothing_has_and_a_record_that_is_not_there(tmp_path: Path) -> None:
    assert said("--only", "no such words")[0] == 2
    code, text = said("--only", "pipeline: zb2p", "--file", str(tmp_path / "none.json"))
    assert code == 1 and "cannot read the record" in text


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the tool."""
    spec = importlib.util.spec_from_file_location(name, TOOL / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_set_holds_what_pages_show_and_enough_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_set = loaded("plan_set", monkeypatch)
    cases = plan_set.plan_set()
    recorded = [e["command"] for e in json.loads((TOOL / "recorded.json").read_text())["plans"]]
    assert recorded == [str(c) for c in cases], "python tools/recorded_plans record"
    counts = {kind: sum(c.kind == kind for c in cases) for kind in ("pages", *plan_set.KINDS)}
    least = {"pages": 35, "collective": 20, "pipeline": 10, "layout": 10, "memory": 10, "traffic": 5}
    assert all(counts[kind] >= n for kind, n in least.items()), counts


def test_a_page_brings_its_plans_with_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_set = loaded("plan_set", monkeypatch)
    lines = ["train capture -m a.py:f -o graph.json", "memory plan graph.json --measure --budget 1MB", "train run p.json", "pipeline plan --stages 2"]
    first, second = plan_set.of_page("a.md", lines, [], [])
    assert str(first) == "train capture -m a.py:f -o graph.json; memory plan graph.json --budget 1MB --json"
    assert str(second) == "pipeline plan --stages 2 --time-limit 100000" and second.chain[-1].out == "pipeline.json"
    assert [c.chain[-1].verb for c in plan_set.of_page("a.md", lines, [], ["memory plan graph.json"])] == [("pipeline", "plan")]
    with pytest.raises(plan_set.SetError, match="no longer shows"):
        plan_set.of_page("a.md", lines, [], ["memory plan other.json"])
    with pytest.raises(plan_set.SetError, match="makes no plan"):
        plan_set.case("memory", ["train run plan.json"])


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ('{"a": [1, 2]}', '{"a": [1, 2]}', ""), ('{"a": [1, {"b": 2.5}]}', '{"a": [1, {"b": 2.0}]}', "$.a[1].b: 2.5 here, 2.0 there"),
        ('{"a": 1}', '{"a": 1, "c": 2}', "$.c: only there"), ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "$: order of keys"),
        ("[1, 2]", "[1]", "$: 2 items here, 1 there"), ("[1]", "[1.0]", "$[0]: 1 here, 1.0 there"), ("[1]", "[ 1]", "byte 1: "),
        ("id,1", "id,2", "byte 3: "),
    ],
)  # fmt: skip
def test_the_first_difference(here: str, there: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loaded("compare", monkeypatch).difference(here.encode(), there.encode())
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("here", "but", "said"),
    [
        ('{"a": {"x": {"b": 1, "c": 2}}}', ["$.a.*.b"], ""), ('{"a": {"x": {"b": 1, "c": 3}}}', ["$.a.*.b"], "$.a.x.c: 3 here, 2 there"),
        ('{"a": {"x": {"c": 2}}, "d": 1}', ["$.d", "$.a.*.b"], ""), ('{"a": {"x": {"c": 2}}, "d": 1}', ["$.d.e"], "$.d: only here"),
    ],
)  # fmt: skip
def test_paths_that_may_differ(here: str, but: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded("compare", monkeypatch).difference(here.encode(), b'{"a": {"x": {"c": 2}}}', but) == said
