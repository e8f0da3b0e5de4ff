"""Layouts for devices of unlike speed on real processes: unequal numbers of micro-batches, uneven stages and tensor shares, together."""

from __future__ import annotations

import msgspec
import pytest
from levels_rig import same_as_serial, serial, train
from tensor_rig import as_serial, plan_case, predicted_sends

from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.unlike_devices import Division
from meshwright.errors import Unsupported

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "degrees", "division", "batch"),
    [
        ("even", (2, 1, 1), Division(microbatches=(3, 1)), 8), ("odd_tied", (3, 1, 1), Division(microbatches=(1, 2, 4)), 14),
        ("odd_tied", (2, 1, 2), Division(microbatches=(1, 4), stage_speeds=(1.0, 0.3)), 10),
        ("even", (2, 2, 1), Division(microbatches=(3, 2), tensor_speeds=(1.0, 0.5)), 10),
        ("odd_tied", (1, 2, 2), Division(stage_speeds=(0.3, 1.0), tensor_speeds=(0.4, 1.0)), 6),
    ],
)  # fmt: skip
def test_loss_gradients_and_bytes(pool, name, degrees, division, batch):
    case, _ = as_serial(pool, name, degrees, global_batch=batch, division=division)
    assert case.layout.replica_microbatches == division.microbatches
    even = plan_case(name, degrees, global_batch=degrees[0] * 2 * max(1, batch // (2 * degrees[0]))).layout
    assert not division.stage_speeds or [s.params for s in case.layout.stages] != [s.params for s in even.stages]
    assert not division.tensor_speeds or case.layout.shards != even.shards


@pytest.mark.parametrize("schedule", [("interleaved", {"chunks": 2}), ("zb1p", {}), ("gpipe", {})])
def test_other_schedules(pool, schedule):
    """A replica with fewer micro-batches runs the order of all without the others."""
    as_serial(pool, "odd_tied", (2, 1, 2), global_batch=12, division=Division(microbatches=(4, 2)), schedule=schedule)


@pytest.mark.parametrize(("level", "overlap"), [(0, True), (1, True), (1, False)])
def test_divided_state_and_sums_during_backward(pool, level, overlap):
    case = plan_case(
        "odd_tied", (2, 1, 1), microbatch=1, global_batch=5, sharding=DataSharding(level, overlap, 1500), division=Division(microbatches=(4, 1))
    )  # fmt: skip
    found = pool.run(train, 2, case, 2, "adamw")
    same_as_serial(case, found, serial(case, "odd_tied", 2, "adamw"))
    assert all(sent == predicted_sends(case, rank) for rank, outcome in enumerate(found) for sent in outcome.sent)


def test_what_cannot_be_unequal_is_refused():
    for more, said in (
        ({"sharding": DataSharding(2, True, 1500)}, "sharding level 2"), ({"schedule": ("chimera", {})}, "copies of the stages"),
    ):  # fmt: skip
        degrees = (2, 1, 2) if "schedule" in more else (2, 1, 1)
        with pytest.raises(Unsupported, match=f"{said} with unequal numbers of micro-batches"):
            plan_case("even", degrees, global_batch=12, division=Division(microbatches=(4, 2)), **more)


def test_wrong_counts_are_found():
    """A plan that says other counts than its program runs, or counts that are not the batch."""
    case = plan_case("even", (2, 1, 1), global_batch=8, division=Division(microbatches=(3, 1)))
    swapped = msgspec.structs.replace(case.layout, replica_microbatches=(1, 3))
    assert "rank 0 runs" in check_training(case.program, swapped)[0].message
    assert not check_layout(swapped, 2)
    said_of = {(3, 2): "(3 + 2) micro-batches of 2", (3,): "not at least one for each of 2", (4, 0): "at least one", (2, 2): "3 at most"}
    for counts, said in said_of.items():
        wrong = check_layout(msgspec.structs.replace(case.layout, replica_microbatches=counts), 2)
        assert wrong and said in wrong[0].message, (counts, wrong)
