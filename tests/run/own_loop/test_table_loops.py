"""Models whose embedding tables lie on several ranks equal the owner's own loop: losses and weights after 20 steps."""

from __future__ import annotations

import pytest
import torch
from table_loops import CLIP, plain, plan_for, trained

import meshwright as mw


@pytest.fixture(autouse=True)
def patience(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 200.0)


pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LAYOUTS = {
    "two": {"expert": 2, "fabric": "laptop:2"}, "two of four parts, zero 1": {"expert": 2, "parts": 4, "fabric": "laptop:2", "zero": 1},
    "two, copied": {"expert": 2, "data": 4, "fabric": "laptop:4", "microbatch": 1, "zero": 2},
    "two stages": {"expert": 2, "pipeline": 2, "fabric": "laptop:4"},
    "two, clipped, zero 3": {"expert": 2, "fabric": "laptop:2", "zero": 3, "recipe": mw.Recipe(clip_norm=CLIP)},
    "whole": {"expert": 1, "parts": 2, "fabric": "laptop:2"},
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_after_20_steps_are_the_owners(layout, pool, tmp_path):
    options = LAYOUTS[layout]
    plan, parts = plan_for(tuple(sorted(options.items()))), options.get("parts", options["expert"])
    assert {x.kind for x in plan.layout.exchanges or ()} == ({"all-to-all"} if options["expert"] > 1 else set())
    losses, state = plain(CLIP if "clipped" in layout else 0.0)
    for found in pool.run(trained, plan.layout.ranks, plan.layout.ranks, str(tmp_path / "store"), plan, parts):
        assert found["losses"] == pytest.approx(losses, rel=1e-9, abs=0)
        assert set(found["state"]) == set(state)
        for name, x in state.items():
            assert torch.allclose(found["state"][name], x, rtol=1e-9, atol=1e-9 * float(x.abs().max())), name
        assert plan.layout.zero_level == 3 or found["held"].get("placed_tables.pack", (parts // options["expert"],))[0] == parts // options["expert"]
