"""`layout plan`, `layout run`, `layout compare` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main

NETS = Path(__file__).parents[1] / "decide" / "layout" / "autoddl" / "sharding_problems.py"
MODEL = f"{NETS}:fc"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_prints_result_bound_and_states(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "layout.json"
    code, text, _ = said(capsys, "layout", "plan", MODEL, "--fabric", "star:4?link=100Mbit/s", "--out", str(out))
    assert code == 0 and "bound" in text and "x the least" in text and "0.weight" in text and "megatron" in text
    code, text, _ = said(capsys, "layout", "plan", MODEL, "--fabric", "star:4", "--strategy", "data", "--out", str(out), "--json")
    document = json.loads(text)
    assert code == 0 and document["schema"] == "meshwright.layout" and document["ratio"] >= 1 and document["bound"]["time_s"] > 0
    assert document["strategy"] == "data" and json.loads(out.read_text())["mesh"] == [4]


def test_operators_kept_whole_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("layout", "plan", f"{NETS}:branches", "--fabric", "star:2", "--out", str(tmp_path / "a.json"))
    code, text, _ = said(capsys, *words)
    assert code == 0 and "warning: kept whole on every device, no split is known: sort" in text
    code, text, _ = said(capsys, *words, "--pytorch-rules", "--memory", "0")
    assert code == 0


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (("--strategy", "magic"), 2, "there is no strategy"), (("--mesh", "2by2"), 2, "is no mesh"), (("--mesh", "3x2"), 2, "is not 4 devices"),
        (("--memory", "12 parsecs"), 2, "--memory"), (("--memory", "1kB"), 3, "no layout fits"),
        (("--out", "/nowhere/at/all.json"), 2, "no directory"),
        (("--strategy", "data", "--mesh", "2x2"), 2, "no plan here"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], code: int, what: str) -> None:
    out = () if "--out" in words else ("--out", str(tmp_path / "a.json"))
    found, _, err = said(capsys, "layout", "plan", MODEL, "--fabric", "star:4", *out, *words)
    assert found == code and what in err


def test_compare_lists_the_templates(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = said(capsys, "layout", "compare", MODEL, "--fabric", "star:4?link=100Mbit/s")
    assert code == 0 and all(name in text for name in ("autoddl", "data", "megatron", "conv-dp+fc-tp", "data+megatron", "bound"))


@pytest.mark.real
@pytest.mark.timeout(200)
def test_run_verifies_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    plan = ("layout", "plan", MODEL, "--fabric", "star:2", "--strategy", "data", "--dtype", "float64", "--out", str(out))
    assert said(capsys, *plan)[0] == 0
    code, text, err = said(capsys, "layout", "run", str(out), "--steps", "1", "--verify", "--dtype", "float64", "--json")
    assert code == 0, err
    (row,) = json.loads(text)["runs"]
    assert row["bytes_equal"] and row["loss_apart"] < 1e-9 and row["gradients_apart"] < 1e-9 and row["time_s"] > 0
    assert said(capsys, *[w for w in plan if w not in ("--dtype", "float64")])[0] == 0  # planned in the model's own precision, verified in another
    code, text, err = said(capsys, "layout", "run", str(out), "--steps", "1", "--verify", "--dtype", "float64", "--json")
    assert code == 0 and json.loads(text)["runs"][0]["bytes_equal"], err
    code, _, err = said(capsys, "layout", "run", str(tmp_path / "none.json"))
    assert code == 2 and "cannot read" in err


def test_a_run_that_sends_other_bytes_or_differs_fails() -> None:
    from meshwright.cli.layout_run import good
    from meshwright.run.dtensor.run import LayoutResult

    def result(**facts: object) -> LayoutResult:
        given = {"bytes_equal": True, "loss_apart": 1e-12, "gradients_apart": 1e-12} | facts
        return LayoutResult(
            plan="a", strategy="data", mesh=(2,), predicted_s=1.0, step_s=(1.0,), losses=(1.0,), sent_bytes=({},), kept_bytes=(1,), **given
        )  # type: ignore[arg-type]

    assert good(result(), "float64") and good(result(loss_apart=None, gradients_apart=None), "float64")
    assert not good(result(bytes_equal=False), "float64")
    assert not good(result(gradients_apart=1e-6), "float64") and good(result(gradients_apart=1e-6), "float32")
    assert not good(result(loss_apart=1e-2), "")
