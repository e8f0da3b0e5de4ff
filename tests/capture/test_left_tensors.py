"""A tensor that a run leaves and the next reads is refused with its lines; what is only written, and what is the same in every run, is not."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.capture.kept_by_shape import refuse_kept_by_shape
from meshwright.capture.live import standing
from meshwright.capture.live_job import LiveJob, live_job
from meshwright.errors import CaptureError, Unsupported

HERE = "tests/capture/left_models.py"


def line(marked: str) -> str:
    lines = Path(HERE).read_text().splitlines()
    return f"{HERE}:{1 + next(i for i, text in enumerate(lines) if text.endswith(f'# {marked}'))}"


@pytest.mark.parametrize(
    ("model", "holder", "marked"),
    [
        ("attribute", "attribute h", "attribute"), ("plain", "attribute h", "in place"), ("data", "attribute h", "data"),
        ("listed", "attribute h", "list"), ("queued", "attribute h", "deque"), ("ofbuffer", "buffer h", "buffer"),
        ("offile", "global LAST", "global"), ("bank", "global BANK", "global dict"), ("ofclass", "attribute last of class OfClass", "class"),
        ("around", "variable h around a function", "variable"), ("ofobject", "attribute h of a Memory", "object"),
        ("setfromoutside", "attribute inner.h", "inner"), ("firstbatch", "attribute mean", "first batch"),
        ("firstweights", "attribute w", "first weights"), ("drawnonce", "attribute mask", "drawn"), ("scalar", "attribute h", "whole"),
        ("ofkept", "attribute kept.h", "kept"),
    ],
)  # fmt: skip
def test_a_tensor_that_the_next_run_reads(model: str, holder: str, marked: str) -> None:
    with pytest.raises(Unsupported, match="leaves a tensor in") as found:
        capture(f"{HERE}:{model}", loss="mse", scalable=False)
    assert found.value.where == line(f"left: {marked}")
    assert found.value.data == {"holder": holder, "read": line(f"read: {marked}")} and "register_buffer" in found.value.hint


@pytest.mark.parametrize(
    ("loss", "holder", "marked"),
    [
        ("centred", "attribute c of a Centred", "loss"), ("centred_in_place", "attribute c of a CentredInPlace", "loss in place"),
        ("centred_module", "attribute loss.c", "loss module"),
    ],
)  # fmt: skip
def test_a_tensor_that_the_loss_leaves(loss: str, holder: str, marked: str) -> None:
    with pytest.raises(Unsupported, match="the loss leaves a tensor in") as found:
        capture(f"{HERE}:net", loss=f"{HERE}:{loss}", scalable=False)
    assert found.value.where == line(f"left: {marked}") and found.value.data["holder"] == holder


@pytest.mark.parametrize(
    ("model", "changed", "where"),
    [
        ("otherwisefirst", "attribute first", "otherwise"), ("smoothed", "attribute scale", "left: number"),
        ("ofcounts", "attribute kept.calls", "left: kept number"), ("twicecounts", "attribute kept.calls", "left: kept number"),
    ],
)  # fmt: skip
def test_a_run_that_computes_something_else_the_second_time(model: str, changed: str, where: str) -> None:
    with pytest.raises(Unsupported, match=f"something else the second time it runs, having changed {changed}") as found:
        capture(f"{HERE}:{model}", loss="mse", scalable=False)
    assert found.value.where == line(where) and found.value.hint


@pytest.mark.parametrize("model", ["onlywritten", "within", "table", "scratch", "running"])
def test_what_is_only_written_and_what_is_the_same_in_every_run(model: str) -> None:
    graph = capture(f"{HERE}:{model}", loss="mse", scalable=False)
    assert graph.method in ("export", "aot") and not any("not known" in note for note in graph.notes)


def test_a_module_kept_whole_begins_in_the_state_that_it_had_and_is_right_when_called_twice() -> None:
    traced = trace_forward(f"{HERE}:twicewrites", loss="mse", device="cpu")
    kept = traced.objective.model.kept
    assert sum(n.target is torch.ops.meshwright.region.default for n in traced.graph_module.graph.nodes) == 2
    assert kept.table is None and kept.calls == 0 and torch.equal(kept.h, torch.zeros(4)) and torch.equal(kept.mean, torch.zeros(4))
    eager = copy.deepcopy(traced.objective)
    values = [traced.value(v).detach().clone() for v in traced.placeholders]
    for _ in range(2):
        assert torch.equal(traced.graph_module(*values)[0], eager(*traced.inputs))
    assert torch.equal(values[traced.placeholders.index("buffer:kept.mean")], eager.model.kept.mean)


def test_hooks_that_forward_adds_are_gone_again() -> None:
    """With what notes that they are there: else the next run adds them a second time, and records everything twice."""
    traced = trace_forward(f"{HERE}:recording", loss="mse", device="cpu")
    assert not any(m._forward_hooks for m in traced.objective.model.modules())
    eager = copy.deepcopy(traced.objective)
    assert torch.equal(traced.graph_module(*(traced.value(v) for v in traced.placeholders))[0], eager(*traced.inputs))
    assert capture(f"{HERE}:recording", loss="mse").scaling is not None


def test_a_loss_that_is_a_module_keeps_no_buffer() -> None:
    with pytest.raises(Unsupported, match=r"the loss leaves a tensor in buffer registered\.c") as found:
        capture(f"{HERE}:net", loss=f"{HERE}:registered", scalable=False)
    assert "a buffer of the model" in found.value.hint


def test_the_owners_code_is_left_as_it_was() -> None:
    for model in ("offile", "bank", "ofclass"):
        with pytest.raises(Unsupported):
            capture(f"{HERE}:{model}", loss="mse", scalable=False)
    capture(f"{HERE}:table", loss="mse", scalable=False)
    (owners,) = [m for name, m in sys.modules.items() if name.startswith("meshwright_user_left_models")]
    assert owners.LAST is None and not owners.BANK and torch.equal(owners.OfClass.last, torch.zeros(4))
    assert owners.cached.cache_info().currsize == 0


class Cached(torch.nn.Module):
    """Makes a tensor in its first forward, for the batch that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = torch.nn.Linear(3, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(x.shape[0], 1)
        return self.layer(x) * self.kept


def test_a_tensor_that_was_made_for_another_batch_is_named() -> None:
    model, batch = Cached(), (torch.ones(8, 3), torch.ones(8, 3))
    model(batch[0])
    live = live_job(model, batch, "mse", optimizer="sgd", learning_rate=0.1, global_batch=None, seed=0)
    said = r"attribute kept holds a tensor of shape \(8, 1\), made for another batch than these 2 samples"
    with standing(live.stands_for), pytest.raises(CaptureError, match=said) as found:
        capture(live.job.model, loss="mse", batch_size=2, scalable=False)
    assert found.value.where.startswith("tests/capture/test_left_tensors.py:") and "before forward has run" in found.value.hint


class Kept(torch.nn.Module):
    """`make`: what is kept of the first batch; `use`: of what is computed and what was kept."""

    def __init__(self, make: Any, use: Any, *, always: bool = False) -> None:
        super().__init__()
        self.layer, self.kept, self.make, self.use, self.always = torch.nn.Linear(3, 3), None, make, use, always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.always:
            self.kept = self.make(x)  # kept by shape
        return self.use(self.layer(x), self.kept)


def shape_jobs(model: torch.nn.Module) -> list[LiveJob]:
    batches = [(torch.ones(4, n, 3), torch.ones(4, n, 3)) for n in (5, 3)]
    return [live_job(model, b, "mse", optimizer="sgd", learning_rate=0.1, global_batch=None, seed=0) for b in batches]


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda x: x.shape[1], lambda y, n: y / n), (lambda x: torch.ones(x.shape[1], 1), lambda y, w: y * w),
        (lambda x: [x.shape[1]], lambda y, n: y[:, : n[0]] / n[0]),
    ],
)  # fmt: skip
def test_what_the_first_batch_leaves_for_other_shapes_is_refused(make: Any, use: Any) -> None:
    with pytest.raises(Unsupported, match=r"forward keeps attribute kept of its first batch, .* after \(4, \d, 3\)") as found:
        refuse_kept_by_shape(shape_jobs(Kept(make, use)))
    lines = Path(__file__).read_text().splitlines()
    marked = 1 + next(i for i, x in enumerate(lines) if x.endswith("# kept by shape"))
    assert found.value.where == f"tests/capture/test_left_tensors.py:{marked}"


def test_what_is_made_for_every_batch_or_fits_all_shapes_may_be_kept() -> None:
    refuse_kept_by_shape(shape_jobs(Kept(lambda x: x.shape[1], lambda y, n: y / n, always=True)))
    refuse_kept_by_shape(shape_jobs(Kept(lambda x: torch.arange(8.0)[:, None], lambda y, w: y * w[: y.shape[1]])))
    refuse_kept_by_shape(shape_jobs(Kept(lambda x: x.dtype, lambda y, kind: y.to(kind))))
