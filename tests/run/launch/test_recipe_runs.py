"""Runs with a whole recipe: shuffled DataLoader, groups, schedule, average and clipping; killed and resumed, with the same bits."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from rig import TINY, make_plan, whole_model

from meshwright.capture.resolve import build_model
from meshwright.errors import RunError
from meshwright.job import Recipe
from meshwright.plan.plan import StepEnd
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from meshwright.run.train.data import open_data

pytestmark = [pytest.mark.real, pytest.mark.timeout(590)]
RECIPE = Recipe(no_decay=("bias", "1d"), schedule="cosine:steps=8,warmup=2", ema=0.9, clip_norm=0.1)
LOADER = '''
import os
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset

KILL = Path(r"{kill}")

class Windows(Dataset):
    """The process that has fetched 14 windows is gone, where a file says so, once."""

    def __init__(self):
        self.text = torch.randint(0, {vocabulary}, (4096,), generator=torch.Generator().manual_seed(1))
        self.fetched = 0

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.fetched += 1
        if self.fetched == 14 and KILL.exists():
            KILL.unlink()
            os._exit(9)
        window = self.text[i * 60 : i * 60 + {length} + 1]
        return window[:-1], window[1:]

def loader():
    return DataLoader(Windows(), batch_size=8, shuffle=True)

def held_out():
    text = torch.randint(0, {vocabulary}, (4096,), generator=torch.Generator().manual_seed(2))
    return [(w[:-1], w[1:]) for w in (text[i * 60 : i * 60 + {length} + 1] for i in range(20))]

def with_workers():
    return DataLoader(Windows(), batch_size=8, shuffle=True, num_workers=1)
'''


@pytest.fixture
def data(tmp_path):
    tokens = build_model(TINY, device="cpu").inputs[0]
    file = tmp_path / "windows.py"
    file.write_text(LOADER.format(kill=tmp_path / "kill", vocabulary=int(tokens.max()) + 1, length=tokens.shape[1]))
    return file


def plan_of(degrees):
    return make_plan(degrees, end=StepEnd(state_copies=3, norm=True), optimizer="adamw:weight_decay=0.1", recipe=RECIPE)


def request(out, data, function="loader", **more):
    return RunRequest(out=out, data=f"{data}:{function}", steps=6, calibrate=False, checkpoint_every=2, module_spans=False, **more)


def index_of(out):
    (folder,) = (out / "checkpoint").glob("step-*")
    return json.loads((folder / "index.json").read_text())


def test_a_killed_and_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, data):
    """Evaluations between its steps included, which the run that is compared last has not."""
    plan = plan_of((2, 1, 1))
    evaluated = {"evaluate_every": 3, "evaluation_data": f"{data}:held_out"}
    whole = train_run(plan, request(tmp_path / "whole", data, **evaluated))
    (tmp_path / "kill").touch()
    with pytest.raises(RunError):
        train_run(plan, request(tmp_path / "cut", data, **evaluated))
    assert not (tmp_path / "kill").exists() and index_of(tmp_path / "cut")["step"] == 2
    again = train_run(plan, request(tmp_path / "cut", data, resume=True, **evaluated))
    assert again.document.evaluation == whole.document.evaluation and whole.document.evaluation["samples"] == 16
    assert [step for step, _ in whole.document.evaluation["losses"]] == [3, 6]
    assert again.document.losses == whole.document.losses and again.document.first_step == 2
    a, b = index_of(tmp_path / "whole"), index_of(tmp_path / "cut")
    assert a["files"] == b["files"] and a["scalars"] == b["scalars"] and a["step"] == 6
    assert a["scalars"]["group:1:weight_decay"] == 0.0 and any(n.endswith(":weight_average") for n in a["parts"])
    said = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in said] == list(range(6)) and [x["loss"] for x in said] == pytest.approx(whole.document.losses)
    assert [(x["step"] + 1, x["evaluation_loss"]) for x in said if "evaluation_loss" in x] == [
        (step, pytest.approx(loss)) for step, loss in again.document.evaluation["losses"]
    ]
    assert [x["learning_rate"] for x in said[:3]] == [0.0, 0.0005, 0.001] and all(x["gradient_norm"] > 0 for x in said)
    workers = train_run(plan, request(tmp_path / "workers", data, function="with_workers"))
    assert workers.document.losses == whole.document.losses


def test_the_run_is_what_a_plain_loop_does(tmp_path, data):
    """Two stages, resumed by two replicas: losses of a loop over the same samples."""
    train_run(plan_of((1, 1, 2)), replace(request(tmp_path / "run", data), steps=3))
    found = train_run(plan_of((2, 1, 1)), request(tmp_path / "run", data, resume=True)).document.losses
    module = whole_model(TINY)[0]
    samples = open_data(f"{data}:loader", (), 0, 8)
    named = list(module.named_parameters())
    free = {n for n, p in named if "bias" in n or p.dim() <= 1}
    groups = [{"params": [p for n, p in named if n not in free]}, {"params": [p for n, p in named if n in free], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 2 if t < 2 else 0.5 * (1 + math.cos(math.pi * min(1, (t - 2) / 6))))
    expected = []
    for step in range(6):
        rows = [samples.sample(step * 8 + i) for i in range(8)]
        tokens, target = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        logits = module(tokens)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        expected.append(float(loss.detach()))
    assert found == pytest.approx(expected, rel=1e-5)
