"""Training runs on processes whose ranks divide positions: losses and weights after several steps are a plain loop's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rig import make_plan

from meshwright.capture.losses import Objective
from meshwright.capture.resolve import build_model
from meshwright.job import Training
from meshwright.run.checkpoint.export import whole_tensors
from meshwright.run.checkpoint.index import checkpoint_folder
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from meshwright.run.train.data import open_data

STEPS = 4
pytestmark = pytest.mark.real


def evaluated(module: torch.nn.Module, job: Training, batches: int) -> float:
    """The owner's module in evaluation mode on so many batches of the job's data, all at once."""
    examples = build_model(job.model, device="cpu", seed=job.seed, batch_size=job.global_batch).examples
    data = open_data("synthetic", examples, job.seed, job.global_batch)
    rows = [data.sample(i) for i in range(batches * job.global_batch)]
    with torch.no_grad():
        loss = float(Objective(module.eval(), job.loss)(*(torch.stack(column) for column in zip(*rows, strict=True))))
    module.train()
    return loss


def plain_loop(job: Training, steps: int) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """(losses, weights, evaluations after every second step) of AdamW on whole batches, with torch alone."""
    source = build_model(job.model, device="cpu", seed=job.seed, batch_size=job.global_batch)
    objective, data = Objective(source.module, job.loss, calling=source.calling), open_data("synthetic", source.examples, job.seed, job.global_batch)
    optimizer = torch.optim.AdamW(source.module.parameters(), lr=job.learning_rate)
    losses, evaluations = [], []
    for step in range(steps):
        rows = [data.sample(step * job.global_batch + i) for i in range(job.global_batch)]
        loss = objective(*(torch.stack(column) for column in zip(*rows, strict=True)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        evaluations += [evaluated(source.module, job, 2)] if step % 2 else []
    return losses, {n: p.detach() for n, p in source.module.named_parameters()}, evaluations


def as_plain(model: str, degrees: tuple[int, int, int], context: tuple[int, str], folder: Path) -> float:
    """The largest difference of a weight, relative to its tensor's largest, after a run on processes. Losses and evaluations are compared here."""
    plan = make_plan(degrees, model=model, context=context, element_bytes=8, optimizer="adamw")
    job = Training(model=model, global_batch=8, optimizer="adamw")
    beside = {"evaluate_every": 2, "evaluation_data": "synthetic", "evaluation_batches": 2}
    found = train_run(plan, RunRequest(out=folder, steps=STEPS, data="synthetic", calibrate=False, **beside)).document
    losses, weights, evaluations = plain_loop(job, STEPS)
    assert found is not None and found.losses == pytest.approx(losses, rel=1e-9)
    assert [x for _, x in found.evaluation["losses"]] == pytest.approx(evaluations, rel=1e-9)
    _, names, reader, _ = whole_tensors(checkpoint_folder(folder / "checkpoint", STEPS))
    error = 0.0
    for name, weight in weights.items():
        error = max(error, float((reader.read(names[name]) - weight).abs().max() / weight.abs().max()))
    return error


def test_weights_are_a_plain_loops(tmp_path: Path) -> None:
    """Two ranks of positions, each on two ranks of columns."""
    assert as_plain("tests/run/context_models.py:llama", (1, 2, 1), (2, "ring"), tmp_path / "run") < 1e-9


def test_dropout_is_left_out_of_evaluations(tmp_path: Path) -> None:
    """Its ranks' calls are others than those that were planned. Heads travel here."""
    model = "tests/run/context_models.py:gpt"
    plan = make_plan((1, 1, 1), model=model, context=(2, "ulysses"), element_bytes=8, optimizer="adamw")
    asked = {"evaluate_every": 1, "evaluation_data": "synthetic", "evaluation_batches": 1}
    found = train_run(plan, RunRequest(out=tmp_path / "run", steps=1, data="synthetic", calibrate=False, **asked)).document
    job = Training(model=model, global_batch=8, optimizer="adamw")
    _, names, reader, _ = whole_tensors(checkpoint_folder(tmp_path / "run" / "checkpoint", 1))
    module = build_model(model, device="cpu", seed=job.seed, batch_size=8).module
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(reader.read(names[name]))
    assert found is not None and [x for _, x in found.evaluation["losses"]] == pytest.approx([evaluated(module, job, 1)], rel=1e-9)
