"""Optimizers tried on parts of a model: what looks beyond an element, a parameter, a stage is found; what does not, passes."""

from __future__ import annotations

import pytest
import torch
from gate_rig import MODELS, plan_of

from meshwright.capture.resolve import build_model
from meshwright.errors import Unsupported
from meshwright.plan.plan import TrainingLayout
from meshwright.run.train.optimizer_trial import looks_beyond, refuse_optimizer

PARAMETERS = dict(build_model(MODELS + "attending", device="cpu").module.named_parameters())


def layout(degrees: tuple[int, int, int], zero: int = 0) -> TrainingLayout:
    found = plan_of("attending", degrees, loss="cross-entropy", zero=zero).layout
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("optimizer", "stages", "shards", "pieces"),
    [("momentum", "", "", ""), ("elementwise", "", "", ""), ("clipping", "--pp 1", "--tp 1", "--zero 0"), ("lars", "", "--tp 1", "--zero 0"),
     ("rows", "", "--tp 1", "--zero 0"), ("orthogonal", "", "--tp 1", "--zero 0")],
)  # fmt: skip
def test_what_an_optimizer_looks_at(optimizer: str, stages: str, shards: str, pieces: str) -> None:
    for degrees, zero, expected in (((1, 1, 2), 0, stages), ((1, 2, 1), 0, shards), ((2, 1, 1), 3, pieces), ((2, 1, 1), 0, "")):
        beyond = looks_beyond(MODELS + optimizer, PARAMETERS, 0.1, layout(degrees, zero))
        assert (beyond.degree if beyond else "") == expected, degrees


def test_known_optimizers_are_not_tried_and_nothing_trained_needs_no_trial() -> None:
    assert looks_beyond("adamw", PARAMETERS, 0.1, layout((1, 2, 1))) is None
    assert looks_beyond(MODELS + "lars", {"w": torch.zeros(3)}, 0.1, layout((1, 2, 1))) is None


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(Unsupported, match="looks beyond a shard of a parameter") as caught:
        refuse_optimizer(MODELS + "lars", PARAMETERS, 0.1, layout((1, 2, 1)))
    assert caught.value.hint == "plan with --tp 1, so that a rank gives it the whole" and caught.value.data["cause"] == "optimizer"
