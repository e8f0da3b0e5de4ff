"""Optimizers tried on parts of a model: what looks beyond an element, a parameter, a stage is found; what does not, passes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from gate_rig import MODELS, plan_of

from meshwright.capture.resolve import build_model, resolve_function
from meshwright.errors import Unsupported
from meshwright.plan.plan import TrainingLayout
from meshwright.run.train.optimizer_trial import looks_beyond, own_looks_beyond, refuse_optimizer

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
    model = build_model(MODELS + "attending", device="cpu").module
    own = resolve_function(MODELS + optimizer, what="optimizer")(list(model.named_parameters()), 0.1)
    torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0)  # which wraps the step of this very optimizer
    before = [p.detach().clone() for p in model.parameters()]
    whole = msgspec.structs.replace(layout((2, 1, 1), 3), whole_parameters=True)
    cases = [(layout((1, 1, 2)), stages), (layout((1, 2, 1)), shards), (layout((2, 1, 1), 3), pieces), (layout((2, 1, 1)), "")]
    for lay, expected in [*cases, (whole, pieces if optimizer == "clipping" else "")]:
        for beyond in (looks_beyond(MODELS + optimizer, PARAMETERS, 0.1, lay), own_looks_beyond(own, dict(model.named_parameters()), lay)):
            assert (beyond.degree.said("command") if beyond else "") == expected, lay
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) and not own.state


def test_an_optimizer_of_which_no_copy_can_be_tried_is_taken_to_look_at_all() -> None:
    model = build_model(MODELS + "attending", device="cpu").module
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    own.file = Path(__file__).open()  # noqa: SIM115  an open file has no copy
    found = own_looks_beyond(own, dict(model.named_parameters()), layout((1, 2, 1)))
    own.file.close()
    assert found is not None and found.degree.said("command") == "--tp 1" and "a copy of it" in found.what


def test_known_optimizers_are_not_tried_and_nothing_trained_needs_no_trial() -> None:
    assert looks_beyond("adamw", PARAMETERS, 0.1, layout((1, 2, 1))) is None
    assert looks_beyond(MODELS + "lars", {"w": torch.zeros(3)}, 0.1, layout((1, 2, 1))) is None


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(Unsupported, match="looks beyond a shard of a parameter") as caught:
        refuse_optimizer(MODELS + "lars", PARAMETERS, 0.1, layout((1, 2, 1)))
    assert caught.value.hint == "plan with --tp 1, so that a rank gives it the whole" and caught.value.data["cause"] == "optimizer"
