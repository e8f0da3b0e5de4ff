"""Samples of changing shape: padded to the plan's, or refused with the shapes."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gate_models import CLASSES, LENGTH
from gate_rig import MODELS, plan_of
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from meshwright.capture.resolve import build_model
from meshwright.errors import UsageError
from meshwright.job import Training
from meshwright.plan.plan import TrainingLayout
from meshwright.run.gate.gate import gate
from meshwright.run.gate.planned import planned_step
from meshwright.run.launch.outcome import forward_graph
from meshwright.run.steps.forward_graph import TensorInfo
from meshwright.run.train.data import Batches, open_data

HERE = "tests/run/train/test_padding.py"
INPUTS = [TensorInfo((2, LENGTH), "int64"), TensorInfo((2, LENGTH), "int64")]
EXAMPLES = [torch.zeros(2, LENGTH, dtype=torch.int64)] * 2


class Sentences(torch.utils.data.Dataset):
    """From one to LENGTH + `longer` tokens."""

    def __init__(self, longer: int = 0) -> None:
        self.longest = LENGTH + longer

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        length = 1 + i % self.longest
        return tuple(torch.randint(CLASSES, (length,), generator=generator) for _ in range(2))  # type: ignore[return-value]


class Stream(IterableDataset):
    def __iter__(self):
        return (Sentences()[i] for i in range(24))


def sentences() -> Sentences:
    return Sentences()


def too_long() -> Sentences:
    return Sentences(longer=2)


def loader() -> DataLoader:
    return DataLoader(Sentences(), batch_size=4)


def stream() -> Stream:
    return Stream()


def words() -> list[dict[str, int]]:
    return [{"a": 1}]


def batches(data: str) -> Batches:
    layout = TrainingLayout(data=1, tensor=1, pipeline=1, microbatch_size=2, microbatches=1, global_batch=2)
    return Batches(open_data(f"{HERE}:{data}", EXAMPLES, 0, 2), layout, INPUTS, torch.device("cpu"))


@pytest.mark.parametrize("data", ["sentences", "loader", "stream"])
def test_every_kind_of_data_is_filled_up_at_the_end(data: str) -> None:
    for step in range(4):
        ids, targets = batches(f"{data}?pad=3,-100").microbatch(step, 0, 0)
        for row in range(2):
            own, target = Sentences()[2 * step + row]
            assert ids[row].tolist() == own.tolist() + [3] * (LENGTH - len(own))
            assert targets[row].tolist() == target.tolist() + [-100] * (LENGTH - len(own))


def test_a_plan_trains_on_them_as_a_loop_without_padding() -> None:
    """Two replicas with unlike numbers of tokens; the mean is over all tokens of the batch."""
    plan = plan_of("language", (2, 1, 1), loss="cross-entropy")
    data = f"{HERE}:sentences?pad=0,-100"
    assert "gradients" in gate(plan, data=data).compared
    assert plan.layout is not None
    job, source = msgspec.convert(plan.job["training"], Training), build_model(MODELS + "language", device="cpu", seed=0)
    graph = forward_graph(plan, plan.layout)
    source_of = Batches(open_data(data, source.examples, 0, 8), plan.layout, graph.inputs, torch.device("cpu"))
    planned = planned_step(
        plan.main, plan.layout, graph, job, parameters=dict(source.module.named_parameters()), buffers={}, data=source_of, seed=0, dtype=torch.float32
    )
    sums = [(F.cross_entropy(source.module(x[None])[0], y, reduction="sum"), len(y)) for x, y in map(Sentences().__getitem__, range(8))]
    loss = sum(s for s, _ in sums) / sum(n for _, n in sums)
    loss.backward()
    assert sum(x.loss for x in planned) / 2 == pytest.approx(float(loss.detach()), rel=1e-5)
    for held in planned[1].gradients:
        torch.testing.assert_close(held.values, source.module.get_parameter(held.name).grad.flatten(), rtol=1e-4, atol=1e-6)


def test_longer_samples_are_refused_with_the_shapes() -> None:
    with pytest.raises(UsageError, match=rf"tensor 0 of sample {LENGTH} is \({LENGTH + 1},\) torch.int64, the model takes \({LENGTH},\)") as found:
        for step in range(6):
            batches("too_long?pad=0,-100").microbatch(step, 0, 0)
    assert "longest sample" in found.value.hint


@pytest.mark.parametrize(("data", "says"), [
    ("sentences?pad=0", "1 values to pad with, the model takes 2"), ("sentences?pad=0,x", "'0,x' is no list of numbers"),
    ("sentences?pad=0,0.5", "0.5 does not fit a tensor of torch.int64"), ("words?pad=0,-100", "an item is a dict"),
])  # fmt: skip
def test_values_and_items_that_cannot_be_padded(data: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as found:
        batches(data).microbatch(0, 0, 0)
    assert found.value.hint
