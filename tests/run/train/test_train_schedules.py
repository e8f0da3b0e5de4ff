"""Every pipeline schedule as a training step on real processes: loss and gradients against the serial run."""

from __future__ import annotations

import pytest
import torch
from levels_rig import same_as_serial, serial, train
from tensor_rig import as_serial, plan_case

from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.tensor_shares import TensorOptions

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
MODELS, TENSOR = "tests/run/schedule_models.py:", "tests/run/tensor_models.py:"


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "options", "degrees", "microbatches"),
    [
        ("gpipe", {}, (1, 1, 2), 3), ("1f1b", {}, (2, 1, 2), 3), ("interleaved", {"chunks": 2}, (1, 1, 2), 4),
        ("interleaved", {"chunks": 3, "group": 3}, (2, 1, 2), 3), ("breadth-first", {"chunks": 2}, (1, 2, 2), 3),
        ("zb1p", {"tries": 50}, (2, 1, 2), 3), ("zb2p", {"tries": 50}, (1, 1, 4), 5), ("zbv", {"tries": 50}, (1, 2, 2), 3),
        ("v-half", {"tries": 50}, (1, 1, 4), 5), ("v-min", {"tries": 50}, (2, 1, 2), 3), ("dualpipe-v", {}, (1, 1, 2), 4),
        ("chimera", {}, (1, 1, 4), 5), ("chimera", {"pipes": 2, "mode": "double"}, (1, 1, 4), 8), ("chimera", {"split": True}, (2, 1, 2), 3),
        ("search", {"placement": "vee", "tries": 100}, (1, 1, 2), 3),
    ],
)  # fmt: skip
def test_a_step_equals_the_serial_one(pool, name, options, degrees, microbatches):
    case, outcomes = as_serial(
        pool, "net", degrees, models=MODELS, microbatch=1, global_batch=degrees[0] * microbatches, schedule=(name, options)
    )
    assert case.layout.schedule == name
    held = {}
    for outcome in outcomes:
        for parameter, gradient in outcome.gradients.items():
            if degrees[1] == 1:
                assert torch.equal(held.setdefault(parameter, gradient), gradient), f"copies of {parameter} differ"


@pytest.mark.parametrize(("name", "options", "level"), [("zbv", {"tries": 20}, 3), ("breadth-first", {"chunks": 2}, 2)])
def test_sharded_steps_equal_the_serial_run(pool, name, options, level):
    """Two steps of the optimizer, gradients summed during backward; a parameter that two stages of a rank use, gathered and divided once."""
    case = plan_case(
        "net", (2, 1, 2), models=MODELS, microbatch=1, global_batch=6, schedule=(name, options), sharding=DataSharding(level, True, 900)
    )
    found = pool.run(train, 4, case, 2)
    same_as_serial(case, found, serial(case, "net", 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "models", "degrees", "microbatches", "schedule", "rule", "along"),
    [
        ("net", MODELS, (1, 1, 2), 4, ("zbv", {"tries": 20}), "full", False), ("even", TENSOR, (1, 2, 2), 3, ("zb2p", {"tries": 20}), "full", True),
        ("odd_tied", TENSOR, (1, 2, 2), 3, ("zb1p", {"tries": 20}), "none", True),
        ("even", TENSOR, (1, 1, 2), 3, ("chimera", {"split": True}), "selective", False),
    ],
)  # fmt: skip
def test_backward_in_two_parts_with_recomputation_and_values_gathered_again(pool, name, models, degrees, microbatches, schedule, rule, along):
    case, _ = as_serial(
        pool, name, degrees, models=models, microbatch=1, global_batch=microbatches, schedule=schedule, recompute=rule,
        options=TensorOptions(sequence=along),
    )  # fmt: skip
    assert case.layout.split_backward and case.layout.sequence == along
    assert any(s.recompute for s in case.layout.segments) == (rule != "none")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "microbatches", "options", "level", "overlap"),
    [((1, 1, 4), 5, {}, 0, True), ((2, 1, 2), 3, {}, 1, True), ((2, 1, 2), 3, {"split": True}, 2, False), ((2, 1, 2), 3, {}, 3, True)],
)  # fmt: skip
def test_copies_with_early_sums_and_sharding_levels(pool, degrees, microbatches, options, level, overlap):
    """Two steps of the optimizer; a tied table whose gradients come from stages of one rank or of several; copies stay equal bit by bit."""
    case = plan_case(
        "net", degrees, models=MODELS, microbatch=1, global_batch=degrees[0] * microbatches, schedule=("chimera", options),
        sharding=DataSharding(level, overlap, 900, True),
    )  # fmt: skip
    found = pool.run(train, case.layout.ranks, case, 2)
    same_as_serial(case, found, serial(case, "net", 2))
    held: dict[tuple[str, int, int], torch.Tensor] = {}
    for rank in found:
        for name, first, values in rank.weights:
            assert torch.equal(held.setdefault((name, first, values.numel()), values), values), f"copies of {name} differ"
    copies = [len(case.layout.mates(p)) for p in range(degrees[2])]
    assert min(copies) == 2 and case.layout.zero_level == level and case.layout.overlap == overlap
