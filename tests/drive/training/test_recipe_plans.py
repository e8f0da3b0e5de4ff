"""Recipes in plans: what the program, the memory and the text show of them; what is refused before anything is searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from captured import captured
from meshwright.check import check_plan
from meshwright.cli.frame import main
from meshwright.cost import assumed_cost
from meshwright.drive import plans as drive
from meshwright.drive.training.step_end import at_peak_of
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible, UnknownName, Unsupported, UsageError
from meshwright.io.model.graph import write_graph
from meshwright.io.plan.plan import plan_bytes, read_plan, write_plan
from meshwright.job import Recipe, Training
from meshwright.report.plan_text import plan_text

MODEL = str(Path(__file__).parents[3] / "examples" / "gpt.py:tiny")


def planned(*, optimizer="adamw", devices=2, wish=None, graph=True, **recipe):
    job = Training(model=MODEL, global_batch=8, optimizer=optimizer, **({"recipe": Recipe(**recipe)} if recipe else {}))
    fabric = drive.read_fabric(f"laptop:{devices}")
    return plan_training(job, fabric, graph=captured(MODEL) if graph else None, wishes=(wish or LayoutWanted(data=devices, microbatch=2),))


def state_bytes(plan):
    b = plan.main.buffers
    return [int(b.chunks[i]) * int(b.chunk_bytes[i]) for i, name in enumerate(b.name) if name == "state"]


def test_a_recipe_is_in_the_plan_and_its_file(tmp_path):
    plain, made = planned(), planned(optimizer="adamw:betas=0.9,0.95", no_decay=("bias",), schedule="cosine:steps=10", ema=0.99, clip_norm=1.0)
    assert check_plan(made).ok and made.layout.step_end.norm and made.layout.step_end.state_copies == 3
    assert [b / a for a, b in zip(state_bytes(plain), state_bytes(made), strict=True)] == [1.5] * len(state_bytes(plain))
    assert made.prediction.time_s > plain.prediction.time_s
    write_plan(tmp_path / "plan.json", made)
    again = read_plan(tmp_path / "plan.json")
    assert again.layout == made.layout and plan_bytes(again) == plan_bytes(made)
    text = " ".join(plan_text(made).split())
    assert "adamw:betas=0.9,0.95" in text and "no decay of bias, schedule cosine:steps=10, average 0.99, norm at most 1.0" in text
    assert b'"end":{' in plan_bytes(made) and b'"end":{' not in plan_bytes(plain) and b'"recipe"' not in plan_bytes(plain)


def test_optimizers_that_need_parameters_whole_are_not_split():
    with pytest.raises(Infeasible, match=r"muon needs parameters whole.*--tp 1, where --zero lets replicas divide whole parameters"):
        planned(optimizer="muon", wish=LayoutWanted(tensor=2))
    assert planned(optimizer="adafactor", wish=LayoutWanted(microbatch=2)).layout.tensor == 1


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"optimizer": "adamz"}, UnknownName, "no optimizer"),
        ({"optimizer": "lbfgs"}, Unsupported, "several times"),
        ({"optimizer": "own.py:make", "no_decay": ("bias",)}, UsageError, "its own groups"),
        ({"no_decay": ("nothing",)}, UsageError, "no parameter fits 'nothing'"),
        ({"ema": 1.0}, UsageError, "at least 0 and below 1"),
        ({"clip_norm": -1.0}, UsageError, "a positive number"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, UsageError, "by norm or by value"),
        ({"precision": "bf16-autocast"}, UsageError, "captured in another precision"),
    ],
)
def test_recipes_that_no_run_could_follow_are_refused(more, error, message):
    with pytest.raises(error, match=message):
        planned(**more)


def test_autocast_is_captured_and_priced_in_its_precision():
    made = planned(graph=False, wish=LayoutWanted(tensor=2, microbatch=2), precision="bf16-autocast")
    assert check_plan(made).ok and "bfloat16" in {v.dtype for v in made.layout.values}
    job = Training(model=MODEL, global_batch=8, recipe=Recipe(precision="bf16-autocast"))
    fabric = drive.read_fabric("dgx-a100:1")
    assert at_peak_of(assumed_cost(fabric), job, fabric).dtype == "bf16"
    older = replace(fabric, devices=tuple(replace(d, flops={"fp32": 10**13}) for d in fabric.devices))
    assert at_peak_of(assumed_cost(older), job, older).dtype == "fp32"
    with pytest.raises(UnknownName, match="no precision 'int4'"):
        planned(graph=False, precision="int4")


def test_what_the_command_refuses(tmp_path, capsys):
    write_graph(tmp_path / "g.json", captured(MODEL))
    common = ["train", "plan", "--fabric", "laptop:2", "--global-batch", "8", "-o", str(tmp_path / "p.json")]
    for flags, message in (
        (["--model", MODEL, "--optimizer", "adamw:momentum=1"], "no option 'momentum'"),
        (["--model", MODEL, "--schedule", "cosine:warm=1"], "no option 'warm'"),
        (["--model", MODEL, "--precision", "bf16-autocast", "--cost", "measured"], "operators are measured in float32"),
        (["--graph", str(tmp_path / "g.json"), "--precision", "bf16-autocast"], "a captured graph has the precision"),
    ):
        assert main([*common, *flags]) == 2
        assert message in capsys.readouterr().err
