"""Losses of the whole batch in an own loop, on real ranks: training and evaluation equal a plain loop over all samples."""

from __future__ import annotations

import pytest
import torch
from loop_rig import world
from whole_batch_models import biased, clip

import meshwright as mw
from meshwright.job import Recipe


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    """Rank 0 traces while the others wait: longer than a busy machine needs for that."""
    monkeypatch.setattr(pool, "timeout_s", 200.0)


pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
MODELS, STEPS = {"clip": clip, "biased": biased}, 4


def made(name):
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module = module.double()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2), [x.shape[1:] for x in inputs]


def batch_of(shapes, step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, *shape, dtype=torch.float64, generator=generator) for shape in shapes)


def trained(rank, group, ranks, store, plan, name):
    with world(rank, ranks, store):
        model, optimizer, shapes = made(name)
        step = mw.torch.parallelize(model, optimizer, plan)
        losses = [float(step(batch_of(shapes, i))) for i in range(STEPS)]
        return losses, float(step.evaluate(batch_of(shapes, 99))), step.state_dict(full=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "degrees"), [("biased", {"data": 2, "pipeline": 2}), ("clip", {"data": 2, "pipeline": 1})])
def test_training_and_evaluation_are_of_the_whole_batch(name, degrees, pool, tmp_path):
    model, optimizer, shapes = made(name)
    ranks = degrees["data"] * degrees["pipeline"]
    plan = mw.plan(
        model, batch_of(shapes, 0), loss="output", fabric=f"laptop:{ranks}", tensor=1, microbatch=4, recipe=Recipe(batch_statistics="global"),
        **degrees,
    )  # fmt: skip
    losses = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch_of(shapes, i))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {n: x.clone() for n, x in model.state_dict().items()}
    evaluated = float(model.eval()(*batch_of(shapes, 99)).detach())
    for found, after, whole in pool.run(trained, ranks, ranks, str(tmp_path / "store"), plan, name):
        assert found == pytest.approx(losses, rel=1e-9) and after == pytest.approx(evaluated, rel=1e-9)
        assert not {n: (whole[n], x) for n, x in state.items() if not torch.allclose(whole[n], x, rtol=1e-8, atol=1e-8)}
