"""What is wrong with the arguments is said before a model is captured, which takes seconds: the models here are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli import main

TRAIN = "train plan --model nowhere.py:model --fabric two-islands --global-batch 32"
SEARCH = "layout search --model nowhere.py:model --fabric dgx-a100:2 --global-batch 32"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train plan --model nowhere.py:model --fabric two-islands --global-batch -4", "argument --global-batch: must be >= 1, got -4"),
        (f"{TRAIN} --tp 0", "argument --tp: must be >= 1, got 0"),
        (f"{TRAIN} --seed -1", "argument --seed: must be >= 0, got -1"),
        (f"{TRAIN} --pp many", "argument --pp: must be a whole number, got 'many'"),
        (f"{TRAIN} --without layuot", "there is no decision 'layuot' that can be left out"),
        (f"{TRAIN} --without layuot --cost measured", "there is no decision 'layuot' that can be left out"),
        (f"{TRAIN} --pp 1 --tp 1 --dp 3 --cost measured", "do not multiply to the fabric's 4 devices"),
        (f"{TRAIN} --dp 3 --tables assumed", "does not divide"),
        (f"{TRAIN} --global-batch 9 --dp 2 --cost measured", "global batch 9 is not a multiple of data degree 2"),
        (f"{TRAIN} --global-batch 9 --dp 2 --tables assumed", "global batch 9 is not a multiple of data degree 2"),
        (f"{TRAIN} --global-batch 9 --dp 2 --shapes 8,16", "global batch 9 is not a multiple of data degree 2"),
        (f"{TRAIN} --loss crossentropy", "there is no loss 'crossentropy'"),
        (f"{SEARCH} --loss crossentropy", "there is no loss 'crossentropy'"),
        (f"{SEARCH} --optimizer adamz", "there is no optimizer 'adamz'"),
        (f"{SEARCH} --microbatches 3", "no micro-batch divides a global batch of 32"),
        (f"{SEARCH} --recompute some", "recomputation is one of"),
        (f"{SEARCH} --schedules nine", "no schedule nine"),
        (f"{SEARCH} --methods nine", "there is no method 'nine'"),
        (f"{SEARCH} --set bucket=1", "there is no field 'bucket'"),
        (f"{SEARCH} --objective cost", "no price of a100"),
        (f"{TRAIN} --pipeline nine", "nine"),
        (f"{TRAIN} --collective nine", "nine"),
        (f"{TRAIN} --compress nine", "nine"),
        (f"{TRAIN} --out nowhere/plan.json", "no directory nowhere"),
        (f"{SEARCH} --microbatches two", "'two' is not a list of whole numbers"),
        ("graph plan rmat:9,9 --fabric laptop:2 --layers 9999", "argument --layers: must be at most 1024, got 9999"),
        (f"{SEARCH} --ep 0", "'0' is not a list of whole numbers from 1 on"),
        (f"{SEARCH} --out .", "--out: . is a folder"),
        ("pipeline plan --stages 1 --microbatches 1 --message-bytes 1e40", "--message-bytes: must be at most 9e+18 bytes, got 1e40"),
        (f"{SEARCH} --memory lots", "lots"),
        (f"{SEARCH} --price a100", "'a100' is not KIND=NUMBER"),
    ],
)
def test_refused_before_the_capture(capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.startswith("error: ") and "nowhere.py" not in captured.err


def test_degrees_are_refused_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.capture import graph
    from meshwright.drive.plans import read_fabric
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted
    from meshwright.errors import UsageError
    from meshwright.job import Training

    def never(*args: object, **options: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(graph, "capture", never)
    job, fabric = Training(model=f"{Path('nowhere.py')}:model", global_batch=30), read_fabric("laptop:4")
    for wish, message in ((LayoutWanted(data=3), "does not divide"), (LayoutWanted(data=4), "not a multiple"), (LayoutWanted(context=3), "context")):
        with pytest.raises(UsageError, match=message):
            plan_training(job, fabric, wishes=[wish])
