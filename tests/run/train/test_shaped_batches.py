"""Which shape a step's samples get: those of the rank's replica and no others, the smallest that holds them, filled up with what the data says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from meshwright.errors import UsageError
from meshwright.plan.plan import TrainingLayout
from meshwright.run.steps.forward_graph import TensorInfo
from meshwright.run.train.padding import Together
from meshwright.run.train.shaped_batches import ShapedBatches

LAYOUT = TrainingLayout(data=2, tensor=1, pipeline=1, microbatch_size=2, microbatches=3, global_batch=12)
SHAPES = [[TensorInfo((2, n), "int64"), TensorInfo((2,), "int64")] for n in (8, 4, 2)]  # the largest first


def batches(lengths: Any, rank: int, *, layout: TrainingLayout = LAYOUT, pad: bool = True, **more: Any) -> tuple[ShapedBatches, list[int]]:
    """Sample i holds i, `lengths(i)` times; and what was asked for."""
    asked: list[int] = []

    def sample(i: int) -> tuple[torch.Tensor, ...]:
        asked.append(i)
        return torch.full((lengths(i),), i), torch.tensor(i)

    data = SimpleNamespace(sample=sample, name="made", padding=Together((-1.0, 0.0), "made") if pad else None)
    found = ShapedBatches(data, layout, rank, SHAPES, torch.device("cpu"), reads=True, group=None)  # type: ignore[arg-type]
    for name, value in more.items():
        setattr(found, name, value)
    return found, asked


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
def test_a_replica_reads_its_samples(rank: int, step: int) -> None:
    found, asked = batches(lambda _: 3, rank)
    first = 12 * step + 6 * rank
    assert found.fetch(step) == [True, True, False] and asked == [*range(first, first + 6)]
    assert found.choose(step) == 1
    of = found.of(LAYOUT)
    for m in range(3):
        x, target = of.microbatch(step, rank, m)
        assert target.tolist() == [first + 2 * m, first + 2 * m + 1]
        assert x.tolist() == [[i, i, i, -1] for i in target.tolist()], "filled up to the shape with the data's value"


def test_replicas_of_unlike_numbers_of_micro_batches() -> None:
    layout = msgspec.structs.replace(LAYOUT, replica_microbatches=(1, 3), global_batch=8)
    for rank, samples in ((0, [8, 9]), (1, [10, 11, 12, 13, 14, 15])):
        found, asked = batches(lambda _: 2, rank, layout=layout)
        assert found.choose(1) == 2 and asked == samples


def test_the_longest_sample_decides_and_a_rank_that_reads_nothing_agrees() -> None:
    assert batches(lambda i: 7 if i == 5 else 1, 0)[0].choose(0) == 0
    found, asked = batches(lambda _: 9, 0, reads=False)
    assert found.fetch(0) == [True] * 3 and found.choose(0) == 2 and not asked
    exact, _ = batches(lambda _: 4, 0, pad=False)
    assert exact.fetch(0) == [False, True, False] and exact.choose(0) == 1 and exact.values is None


def test_what_no_shape_holds_and_other_types_are_refused() -> None:
    found, _ = batches(lambda _: 9, 1)
    with pytest.raises(UsageError, match=r"no shape of the plan holds the batch of step 2: this rank has \(6, 9\), \(6,\), the plan") as caught:
        found.choose(2)
    assert caught.value.data == {"step": 2} and caught.value.hint == "plan with a larger one (--shapes)"
    with pytest.raises(UsageError, match="no shape of the plan") as caught:
        batches(lambda _: 3, 1, pad=False)[0].choose(0)
    assert "?pad=" in caught.value.hint
    found.shapes = [[TensorInfo((2, 9), "float32"), TensorInfo((2,), "int64")]]
    with pytest.raises(UsageError, match="the batch from sample 18 on has tensors of int64, int64, the model takes float32, int64"):
        found.fetch(1)
