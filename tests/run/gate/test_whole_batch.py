"""Losses that look at the whole batch, over data replicas: steps equal to one process that has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gate_rig import gated, plan_of
from tensor_rig import graph_of

from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.cli import main
from meshwright.errors import DifferentTraining, Unsupported
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.plan.whole_batch import shared_calls, with_shared_batch
from meshwright.run.gate.gate import Stated
from meshwright.run.tensor.whole_batch import place, share

MODELS = "tests/run/whole_batch_models.py:"
DEGREES: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((2, 1, 1), {}), ((4, 1, 1), {"microbatch": 2}), ((2, 1, 2), {}), ((2, 2, 1), {}), ((2, 1, 1), {"zero": 3}), ((2, 1, 1), {"recompute": "full"}),
)  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "how"), DEGREES)
def test_a_step_is_that_of_the_whole_batch(degrees: tuple[int, int, int], how: dict[str, Any]) -> None:
    for model in ("clip", "views", "skips", "centred", "labelled", "twins", "spread", "hardest", "switch", "biased"):
        report = gated(model, degrees, loss="output", optimizer="adamw", shared=True, models=MODELS, **{"microbatch": 4, **how})
        assert report.against == "the whole batch at once" and not report.stated and report.precision == "float64"
        assert report.largest_error < 1e-9, model


def test_losses_beside_the_model_too() -> None:
    for model, loss in (("batch_norm", "contrast"), ("mlp", "balance"), ("mlp", "by_the_root"), ("mlp", "summed_contrast")):
        assert gated(model, (2, 1, 1), loss=loss, microbatch=4, shared=True).largest_error < 1e-9
        with pytest.raises(DifferentTraining) as caught:
            gated(model, (2, 1, 1), loss=loss, microbatch=4)
        assert "--batch-statistics global" in caught.value.hint
        assert gated(model, (2, 1, 1), loss=loss, microbatch=4, stated=Stated(batch_statistics="local")).stated == ("batch statistics local",)


def calls(model: str) -> dict[str, str]:
    graph, whole = graph_of(MODELS + model, 4, "output"), graph_of(MODELS + model, 8, "output")
    return {c.name: c.role for c in shared_calls(graph.nodes, whole.nodes, graph.inputs, whole.inputs, graph.outputs[0])}


def test_what_travels_is_as_little_as_the_loss_asks() -> None:
    """Both towers' results of a contrast; of experts two numbers each, and no token; each replica's own mean stays its own."""
    roles = [*calls("clip").values()]
    assert roles.count("place") == 2 and roles.count("share") == 0
    roles = [*calls("switch").values()]
    assert roles.count("place") == 0 and roles.count("share") == 4
    found = calls("views")
    assert [*found.values()].count("place") == 1 and found["linear_2"] == "own"  # the head is of each view by itself
    graph = with_shared_batch(graph_of(MODELS + "switch", 4, "output"), graph_of(MODELS + "switch", 8, "output"))
    assert {n.outputs[0].shape for n in graph.nodes if n.name.endswith("/share")} == {(3,)}


def test_parts_are_put_in_their_places() -> None:
    x = torch.arange(24.0).reshape(2, 12)
    parts = [x.reshape(2, 2, 2, 3)[:, :, r].reshape(2, 6) for r in range(2)]  # twice all samples, of which each has one, three rows each
    found = sum(place(p, dim=1, outer=2, replica=r, replicas=2, dtype=torch.float32) for r, p in enumerate(parts))
    assert torch.equal(found, x)
    assert torch.equal(share(x.bool(), replicas=1, dtype=torch.int64), x.bool().long())
    assert torch.equal(share(x, replicas=4, dtype=torch.float32), x / 4)


def test_what_cannot_be_of_the_whole_batch_is_refused() -> None:
    small, whole = (graph_of(MODELS + "clip", n, "output") for n in (4, 8))
    other = graph_of(MODELS + "twins", 8, "output")
    with pytest.raises(Unsupported, match="makes other calls on the whole batch"):
        with_shared_batch(small, other)
    with pytest.raises(Unsupported, match="keeps other values on the whole batch"):
        with_shared_batch(small, msgspec.structs.replace(whole, joint=()))
    nodes = [msgspec.structs.replace(n, random=n.name == "t") if n.target.startswith("aten.matmul") else n for n in small.nodes]
    nodes = [msgspec.structs.replace(n, random=True) if n.target == "aten.matmul.default" else n for n in nodes]
    with pytest.raises(Unsupported, match="draws random numbers for the whole batch"):
        with_shared_batch(msgspec.structs.replace(small, nodes=tuple(nodes)), whole)


def test_a_layout_that_does_not_sum_them_is_found() -> None:
    plan = plan_of("switch", (2, 1, 1), loss="output", microbatch=4, shared=True, models=MODELS)
    layout, but = plan.layout, msgspec.structs.replace
    assert layout is not None and not check_layout(layout, 2) and not check_training(plan.main, layout)
    assert plan_from_bytes(plan_bytes(plan)).layout == layout
    first, *others = layout.segments
    for wrong in (but(layout, batch_sums=msgspec.UNSET), but(layout, segments=(but(first, sum_writes=()), *others))):
        assert check_layout(wrong, 2)


def test_the_command_plans_runs_and_evaluates_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of two ranks has the losses of one that has all samples; evaluation is of the whole batch too."""
    losses = []
    for degrees in ("2", "1"):
        plan, out = str(tmp_path / f"plan{degrees}.json"), tmp_path / f"run{degrees}"
        words = ["train", "plan", "--model", f"{MODELS}labelled", "--loss", "output", "--fabric", f"laptop:{degrees}", "--global-batch", "8"]
        shared = ["--batch-statistics", "global"] if degrees == "2" else []
        assert main([*words, "--dp", degrees, *shared, "--out", plan, "--optimizer", "sgd", "--learning-rate", "0.3"]) == 0
        data = ["--data", "synthetic", "--evaluate-every", "3", "--evaluation-data", "synthetic"]
        assert main(["train", "run", plan, "--steps", "3", *data, "--out", str(out), "--no-calibration"]) == 0
        document = msgspec.json.decode((out / "run.json").read_bytes())
        losses.append([*document["losses"], *(x for _, x in document["evaluation"]["losses"])])
    capsys.readouterr()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 4
    assert main([*words, "--dp", "2", "--batch-statistics", "global", "--microbatch", "2", "--fabric", "laptop:2"]) == 3
    assert "one micro-batch in each replica" in capsys.readouterr().err
