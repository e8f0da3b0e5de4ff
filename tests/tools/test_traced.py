"""What is kept of captures: the same graph and the same trace, and nothing where another capture could come out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import traced
from meshwright.capture import exporting, forward
from meshwright.capture.graph import capture
from meshwright.capture.precision import capture_job, trace_job
from meshwright.job import Recipe, Training

MODEL = "tests/run/gate_models.py:mlp"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every model that torch.export is asked for, from an empty memory. Calls are noted below what is looked at for replaced parts."""
    asked: list[str] = []
    real = exporting.torch.export.export

    def noted(*given: Any, **more: Any) -> Any:
        asked.append(type(given[0]).__name__)
        return real(*given, **more)

    traced.forget()
    monkeypatch.setattr(exporting.torch.export, "export", noted)
    yield asked
    traced.forget()


def test_a_model_of_ours_is_traced_once_per_batch_loss_and_precision(traces: list[str]) -> None:
    first = capture(MODEL, loss="mse", batch_size=2, scalable=False)
    assert len(traces) == 1
    assert capture(MODEL, loss="mse", batch_size=2, scalable=False) is first and len(traces) == 1
    job = Training(model=MODEL, global_batch=4, loss="mse")
    assert trace_job(job, batch_size=2).nodes == tuple(n.name for n in first.nodes) and len(traces) == 1
    assert capture(MODEL, loss="mse", batch_size=4, scalable=False).inputs[0].shape[0] == 4 and len(traces) == 2
    low = Training(model=MODEL, global_batch=4, loss="mse", recipe=Recipe(precision="bf16-autocast"))
    assert capture_job(low, batch_size=2, scalable=False) != first and len(traces) == 3
    trace_job(job, batch_size=2, device="cpu")
    assert len(traces) == 4, "a trace of real tensors is not one of fakes"


def test_the_own_batch_and_other_ways_to_write_the_file_are_the_same_capture(traces: list[str]) -> None:
    own = capture(MODEL, loss="mse", scalable=False)
    kept = [capture(f"{prefix}{MODEL}", loss="mse", batch_size=own.batch_size, scalable=False) for prefix in ("", f"{Path.cwd()}/")]
    assert len(traces) == 1 and [graph.model for graph in kept] == [MODEL, f"{Path.cwd()}/{MODEL}"]
    traced.forget()
    assert [capture(graph.model, loss="mse", batch_size=own.batch_size, scalable=False) for graph in kept] == kept
    assert len(traces) == 2
    job = Training(model=f"{Path.cwd()}/{MODEL}", global_batch=4, loss="mse")
    assert trace_job(job, batch_size=own.batch_size).model == job.model and len(traces) == 2


def test_models_of_other_folders_may_be_written_anew(traces: list[str], tmp_path: Path) -> None:
    (tmp_path / "gate_models.py").write_text(Path("tests/run/gate_models.py").read_text())
    for number in (1, 2):
        capture(f"{tmp_path / 'gate_models.py'}:mlp", loss="mse", batch_size=2, scalable=False)
        assert len(traces) == number


def test_a_capture_of_which_a_part_is_replaced_is_made_and_not_kept(traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    capture(MODEL, loss="mse", batch_size=2, scalable=False)
    real = forward.exported_program
    with monkeypatch.context() as patched:
        patched.setattr(forward, "exported_program", lambda *given: real(*given))
        capture(MODEL, loss="mse", batch_size=2, scalable=False)
        assert len(traces) == 2
        capture(MODEL, loss="mse", batch_size=4, scalable=False)
    capture(MODEL, loss="mse", batch_size=4, scalable=False)
    assert len(traces) == 4
