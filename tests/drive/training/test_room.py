"""What no layout needs less than: below it, a large job is refused before anything is built, with what would help at least."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from captured import captured
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.grid import Grid
from meshwright.decide.layout.least_memory import least_memory
from meshwright.decide.layout.problem import Degrees
from meshwright.drive.plans import read_fabric
from meshwright.drive.training import room
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.context import Context
from meshwright.drive.training.decisions import context_of
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.room import least_of, require_room
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted, PrecisionWanted
from meshwright.errors import Infeasible
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.graph.scale import at_batch
from meshwright.job import Training
from meshwright.plan.narrowed import in_precision
from meshwright.plan.precision import MIXED

MODEL = "examples/gpt.py:tiny"
ROOMY = 1 << 40


@cache
def graph(model: str = MODEL) -> OpGraph:
    return captured(model)


def fabric(memory_bytes: int, devices: int = 2) -> Fabric:
    plain = read_fabric(f"laptop:{devices}")
    return replace(plain, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in plain.devices))


def asked(on: Fabric, *wishes: object, model: str = MODEL, batch: int = 4, optimizer: str = "adamw") -> Context:
    job = Training(model=model, global_batch=batch, optimizer=optimizer)
    return context_of(job, on, graph=graph(model), wishes=(*wishes, CollectivesWanted("ring")))


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", ["none", "full", "layers"])
@pytest.mark.parametrize(("model", "devices", "expert", "optimizer", "mixed"), [
    (MODEL, 2, 1, "adamw", False), (MODEL, 2, 1, "sgd", True), ("examples/experts.py:tiny", 4, None, "adamw", False),
    ("examples/convnet.py:tiny", 2, 1, "sgd", False), ("examples/llama.py:tiny", 2, 1, "adamw", True),
])  # fmt: skip
def test_no_layout_needs_less(model: str, devices: int, expert: int | None, optimizer: str, mixed: bool, recompute: str) -> None:
    """Every layout, at every sharding level, with all that recomputation saves. Its simulated peak is at most what a plan must have room for."""
    precision = MIXED if mixed else None
    wishes = (LayoutWanted(expert=expert, microbatch=1), RecomputeWanted(recompute), PrecisionWanted(precision))
    context = asked(fabric(ROOMY, devices), *wishes, model=model, optimizer=optimizer)
    grid, seen = context.grid(), 0
    bound = least_memory(in_precision(at_batch(graph(model), 1), precision), grid.end, precision)
    for candidate in grid.plan(context.problem):
        for level in (0, 1, 2, 3) if candidate.layout is not None and candidate.degrees.replicas > 1 else (0,):
            made = grid.sharded(context.problem, candidate.degrees, DataSharding(level, level > 0), candidate.division)
            if candidate.layout is None or made.layout is None:
                continue
            name, placement = next(context.placements(made.layout))
            needs = [e.peak_bytes for e in context.judge(made, placement, name) if e.timeline is not None]
            assert all(bound.bytes(made.degrees, level) <= need for need in needs), (made.what, needs)
            seen += len(needs)
    assert seen >= 3


def test_the_bound_is_near_what_recomputing_everything_needs() -> None:
    context = asked(fabric(ROOMY, 4), LayoutWanted(data=4, tensor=1, pipeline=1, microbatch=1), RecomputeWanted("layers"))
    candidate = next(c for c in context.grid().plan(context.problem) if c.layout is not None)
    name, placement = next(context.placements(candidate.layout))  # type: ignore[arg-type]
    need = context.judge(candidate, placement, name)[-1].peak_bytes
    assert 0.9 * need < least_memory(at_batch(graph(), 1)).bytes(candidate.degrees, 0) <= need


def test_state_is_divided_as_the_level_says() -> None:
    bound = least_memory(graph("examples/experts.py:tiny"))
    whole = bound.weight + bound.gradient + bound.optimizer
    assert 0 < bound.experts < 1 and bound.operator > 0 and bound.with_weights >= bound.operator
    assert bound.state_bytes(Degrees(1, 1, 1, 1), 0) == pytest.approx(whole)
    assert bound.state_bytes(Degrees(4, 1, 1, 1), 3) == pytest.approx(whole / 4)
    assert bound.state_bytes(Degrees(2, 2, 2, 1), 1) == pytest.approx((whole - bound.optimizer / 2) / 4)
    assert bound.state_bytes(Degrees(2, 1, 1, 1, expert=2), 0) == pytest.approx(whole * (1 - bound.experts / 2))
    assert bound.least(Degrees(4, 1, 1, 1)) == min(bound.bytes(Degrees(4, 1, 1, 1), level) for level in range(4))


def test_a_large_job_that_cannot_fit_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    least = least_of(asked(fabric(ROOMY)))
    monkeypatch.setattr(room, "MAX_SMALL_OPERATORS", 0)
    built: list[object] = []
    monkeypatch.setattr(Grid, "plan", lambda *how: built.append(how))
    with pytest.raises(Infeasible, match=f"no layout needs less than {least} bytes on some device, and devices have {least - 1}") as caught:
        plan_training(Training(model=MODEL, global_batch=4), fabric(least - 1), graph=graph(), wishes=(CollectivesWanted("ring"),))
    assert not built and caught.value.exit_code == 3 and caught.value.data["needed_bytes"] == least
    assert f"devices with {least} bytes or more" in caught.value.hint
    require_room(asked(fabric(least)))  # at the bound it may fit: the search says
    require_room(asked(fabric(0)))  # devices do not say what they have


def test_what_would_help_is_what_lowers_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_SMALL_OPERATORS", 0)
    whole = ShardingWanted(level=0, overlap=False)
    least, free = least_of(asked(fabric(ROOMY), LayoutWanted(data=2), whole)), least_of(asked(fabric(ROOMY)))
    assert free < least
    with pytest.raises(Infeasible) as caught:
        require_room(asked(fabric(least - 1), LayoutWanted(data=2), whole))
    assert f"without --dp 2, --zero 0 (at least {free} bytes then)" in caught.value.hint and "devices like these" not in caught.value.hint
    with pytest.raises(Infeasible) as caught:
        require_room(asked(fabric(free - 1)))
    assert "4 devices like these or more" in caught.value.hint and least_of(asked(fabric(ROOMY, 4))) < free


def test_a_plan_that_fits_is_never_refused() -> None:
    plan = plan_training(Training(model=MODEL, global_batch=4), fabric(ROOMY), graph=graph(), wishes=(CollectivesWanted("ring"),))
    assert plan.prediction is not None and least_of(asked(fabric(ROOMY))) <= max(plan.prediction.memory_peak_bytes)
