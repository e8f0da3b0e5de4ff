"""Plans with autocast on a GPU: those made by its list of operators run; others are refused where sizes count on what processors cast, by name."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from msgspec.structs import replace

from meshwright.capture.precision import casting
from meshwright.errors import Unsupported
from meshwright.job import Recipe
from meshwright.plan.plan import Segment, SegmentStep, TrainingLayout
from meshwright.run.executor.transport import TaggedTransport, own_transport
from meshwright.run.train.casts import require_casts

BF16 = Recipe(precision="bf16-autocast")
DATA = TrainingLayout(data=4, tensor=1, pipeline=1, microbatch_size=1, microbatches=2, global_batch=8)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"pipeline": 2}, "pipeline 2"), ({"tensor": 2}, "tensor 2"), ({"context": 2}, "context 2"), ({"expert": 4}, "expert 4"),
        ({"batch_sums": ("mean",)}, "statistics of the whole batch"),
    ],
)  # fmt: skip
def test_what_counts_on_processors_types_is_refused_by_name(change, part):
    layout = replace(DATA, **change)
    with pytest.raises(Unsupported, match=f"{part}.* counts what bf16-autocast casts on processors") as refusal:
        require_casts(layout, BF16, "cuda", "--device")
    assert refusal.value.data["part"] == part
    require_casts(layout, BF16, "cpu", "--device")
    require_casts(layout, Recipe(), "cuda", "--device")
    for device in ("cpu", "cuda"):
        require_casts(layout, Recipe(precision="bf16-autocast", casts="cuda"), device, "--device")


def test_steps_planned_by_operator_are_refused():
    segment = Segment(key="s0.0", stage=0, nodes=(), reads=(), writes=(), step=cast(SegmentStep, object()))
    with pytest.raises(Unsupported, match="steps planned by operator"):
        require_casts(replace(DATA, segments=(segment,)), Recipe(precision="fp16-autocast"), "cuda", "--device")


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_data_parallelism_runs(level):
    layout = replace(DATA, zero_level=level)
    require_casts(layout, BF16, "cuda", "--device")
    with pytest.raises(Unsupported, match="pipeline 2"):  # it is the exchange that is refused, at every level
        require_casts(replace(layout, pipeline=2), BF16, "cuda", "--device")


def test_autocast_is_of_the_device(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "autocast", lambda device, dtype: seen.append((device, dtype)))
    casting("bf16-autocast", "cuda")
    casting("fp16-autocast")
    assert seen == [("cuda", torch.bfloat16), ("cpu", torch.float16)]


def test_a_device_alone_needs_no_process_group():
    assert isinstance(own_transport(0, torch.device("cuda", 0)), TaggedTransport)
