"""Runs of plans with several shapes: batches of changing length, padded to the smallest that holds them, equal a plain loop that pads nothing;
killed and resumed, in another layout too."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

import meshwright as mw
from meshwright.capture.live_job import sizes_of
from meshwright.capture.resolve import build_model
from meshwright.check import check_plan
from meshwright.errors import DifferentTraining, MeshwrightError, RunError, UsageError
from meshwright.plan.plan import Plan
from meshwright.run.gate.shapes import gate_shapes
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from meshwright.run.train.data import open_data

pytestmark = [pytest.mark.real, pytest.mark.timeout(590)]
MODELS = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KILL = Path(__file__).with_name("kill")

class Causal(nn.Module):
    def __init__(self, looks=False):
        super().__init__()
        self.tokens, self.qkv, self.head, self.looks = nn.Embedding(24, 16), nn.Linear(16, 48), nn.Linear(16, 24), looks
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=not self.looks)[:, 0]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def causal(looks=False):
    tokens = torch.randint(24, (2, 12))
    return Causal(looks), (tokens, tokens)

def looking():
    return causal(True)

class Sentences(Dataset):
    def __init__(self, longer=0):
        self.fetched, self.longest = 0, 12 + longer

    def __len__(self):
        return 30

    def __getitem__(self, i):
        self.fetched += 1
        if self.fetched == 40 and KILL.exists():
            KILL.unlink()
            os._exit(9)
        row = torch.randint(24, (2 + i % (self.longest - 1) if i // 8 != 1 else 3,), generator=torch.Generator().manual_seed(i))
        return row[:-1], row[1:]

def sentences():
    return Sentences()

def loader():
    return DataLoader(Sentences(), batch_size=8, shuffle=True, generator=torch.Generator())

def with_workers():
    return DataLoader(Sentences(), batch_size=8, shuffle=True, generator=torch.Generator(), num_workers=1)

def too_long():
    return Sentences(3)
"""
PAD = "?pad=0,-100"
LENGTHS = (8, 4, 12)  # the first for some plans alone
LAYOUTS = {"dp2": {"data": 2}, "pp2": {"pipeline": 2}, "tp2": {"tensor": 2}, "zero3": {"data": 2, "zero": 3}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    file = tmp_path_factory.mktemp("shapes") / "models.py"
    file.write_text(MODELS)
    return file


@cache
def planned(model: str, layout: str) -> Plan:
    """Of three shapes, or of two where that says as much."""
    options = {"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 2} | LAYOUTS[layout]
    lengths = LENGTHS[layout != "dp2" :]
    return mw.plan(model, global_batch=8, fabric="laptop:2", shapes=lengths, collective="ring", without=("division",), **options)


def request(out, models, data="sentences", steps=6, **more):
    return RunRequest(out=out, data=f"{models}:{data}{PAD}", steps=steps, calibrate=False, module_spans=False, **more)


def plain_losses(models, data: str, steps: int) -> list[float]:
    """At every sample's own length, one by one; the mean over all targets of a batch."""
    module = build_model(f"{models}:causal", device="cpu", seed=0).module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    samples, found = open_data(f"{models}:{data}", (), 0, 8), []
    for step in range(steps):
        rows = [samples.sample(step * 8 + i) for i in range(8)]
        loss = sum(torch.nn.functional.cross_entropy(module(x[None])[0], y, reduction="sum") for x, y in rows) / sum(len(y) for _, y in rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_take_the_smallest_shape_and_equal_a_plain_loop(layout, models, tmp_path):
    plan = planned(f"{models}:causal", layout)
    assert check_plan(plan).status == "ok"
    found = train_run(plan, request(tmp_path / "run", models)).document
    assert found.losses == pytest.approx(plain_losses(models, "sentences", 6), rel=1e-5)
    steps = [json.loads((tmp_path / "run" / f"rank-{r:03d}.json").read_text())["steps"] for r in range(2)]
    shapes = [[s.get("shape", 0) for s in x] for x in steps]
    assert shapes[0] == shapes[1] and shapes[0][1] == len(plan.shapes) and 0 in shapes[0]  # the second batch is of short samples alone
    said = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lengths = sorted(LENGTHS[layout != "dp2" :], reverse=True)
    assert [round(x["tokens_per_s"] / x["samples_per_s"]) for x in said] == [lengths[n] for n in shapes[0]]


def test_a_killed_and_resumed_run_has_the_bits_of_an_uninterrupted_one(models, tmp_path):
    """Also with a worker that fetches ahead; another layout goes on with the same samples."""
    plan, kill = planned(f"{models}:causal", "dp2"), models.with_name("kill")
    options = {"data": "loader", "steps": 14, "checkpoint_every": 3}
    whole = train_run(plan, request(tmp_path / "whole", models, **options)).document
    kill.touch()
    with pytest.raises(RunError):
        train_run(plan, request(tmp_path / "cut", models, **options))
    assert not kill.exists()
    again = train_run(plan, request(tmp_path / "cut", models, resume=True, **options)).document
    assert again.losses == whole.losses and 0 < again.first_step < 14
    files = [json.loads(next((tmp_path / n / "checkpoint").glob("step-*/index.json")).read_text())["files"] for n in ("whole", "cut")]
    assert files[0] == files[1]
    part = train_run(plan, request(tmp_path / "other", models, **{**options, "data": "with_workers", "steps": 5})).document
    assert part.losses == whole.losses[:5]
    other = planned(f"{models}:causal", "pp2")
    found = train_run(other, request(tmp_path / "other", models, resume=True, **{**options, "data": "with_workers", "steps": 9})).document
    assert found.first_step == 5 and found.losses == pytest.approx(whole.losses[:9], rel=1e-5)


@pytest.mark.parametrize(("data", "text"), [("too_long?pad=0,-100", "no shape of the plan holds"), ("sentences", "of the same batch")])
def test_batches_that_no_shape_holds_are_refused(data, text, models, tmp_path):
    plan = planned(f"{models}:causal", "dp2")
    with pytest.raises(MeshwrightError, match=text) as found:
        train_run(plan, RunRequest(out=tmp_path / "run", data=f"{models}:{data}", steps=6, calibrate=False, module_spans=False))
    assert found.value.hint and not (tmp_path / "run").exists()


def test_the_gate_compares_every_shape_and_tries_padding(models):
    report = gate_shapes(planned(f"{models}:causal", "dp2"), data=f"{models}:sentences{PAD}")
    assert not report.why_not and report.largest_error < 1e-9
    assert "steps of shapes 8, 4 were compared on drawn samples" in report.notes and "padding changes no loss of 4 shorter samples" in report.notes
    looking = planned(f"{models}:looking", "dp2")
    with pytest.raises(DifferentTraining, match="padding changes the loss"):
        gate_shapes(looking, data=f"{models}:sentences{PAD}")
    assert gate_shapes(looking, data="synthetic").largest_error < 1e-9  # nothing is padded


@pytest.mark.parametrize(("text", "own", "sizes"), [
    ("64", ((128,), (128,)), ((64,), (64,))), ("64", ((128, 16), (128,), (5,)), ((64, 16), (64,), (5,))),
    ("3x8x8", ((3, 16, 16), ()), ((3, 8, 8), ())), ("3x8x4", ((3, 16, 16), ()), ((3, 8, 4), ())),
])  # fmt: skip
def test_what_a_shape_says_of_all_inputs(text, own, sizes):
    assert sizes_of(text, own) == sizes


@pytest.mark.parametrize("text", ["", "0", "-3", "4x4", "a"])
def test_what_is_no_shape(text):
    with pytest.raises(UsageError, match="no shape of the first input"):
        sizes_of(text, ((128,), (128,)))


def test_an_input_that_could_follow_either_of_two_dimensions():
    with pytest.raises(UsageError, match="makes them unlike"):
        sizes_of("8x4", ((16, 16), (16,)))
