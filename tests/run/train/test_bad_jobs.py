"""What owners bring that no plan fits: right, or refused by one sentence that names the line of their code."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from meshwright.capture.forward import trace_forward
from meshwright.capture.graph import capture
from meshwright.cli import main
from meshwright.errors import CaptureError, Unsupported, UsageError
from meshwright.plan.plan import TrainingLayout
from meshwright.run.checkpoint.checkpoint import require_same_job
from meshwright.run.checkpoint.index import CheckpointIndex, SavedRank
from meshwright.run.recording.recording import numbers
from meshwright.run.steps.forward_graph import TensorInfo
from meshwright.run.train.data import Batches, open_data
from meshwright.run.train.optimizers import make_optimizer

HERE = "tests/run/bad_models.py"


def line(marked: str) -> str:
    """`file:line` of the line that ends with this comment."""
    lines = Path(HERE).read_text().splitlines()
    return f"{HERE}:{1 + next(i for i, text in enumerate(lines) if text.endswith(f'# {marked}'))}"


@pytest.mark.parametrize(
    ("model", "loss", "error", "says", "where"),
    [
        ("changing_global", "mse", Unsupported, "changes global CALLS every time", "changed: global"),
        ("changing_entry", "mse", Unsupported, r"changes global STATE\['seen'\] every time", "changed: entry"),
        ("changing_attribute", "mse", Unsupported, "changes attribute calls every time", "changed: attribute"),
        ("changing_list", "mse", Unsupported, "changes attribute part.seen every time", "changed: list"),
        ("changing_dictionary", "mse", Unsupported, "changes attribute counts every time", "changed: dict"),
        ("changing_global_list", "mse", Unsupported, "changes global COLLECTED every time", "changed: global list"),
        ("nothing", "mse", UsageError, "forward returns None", "nothing"),
        ("nothing_as_loss", "output", UsageError, "forward returns None", "nothing"),
        ("two_losses", "output", UsageError, "forward returns 2 losses", "two"),
        ("losses_by_name", "output", UsageError, "forward returns 2 losses", "by name"),
        ("two_nets", "mse", UsageError, "the first of the pair is a tuple", ""),
        ("rows", f"{HERE}:counted_loss", Unsupported, "the loss changes global CALLS every time", "loss: global"),
        ("rows", f"{HERE}:loss_with_variable", Unsupported, "the loss changes its own calls every time", "loss: variable around it"),
        ("rows", f"{HERE}:loss_of_an_object", Unsupported, "the loss changes its own seen every time", "loss: attribute"),
        ("rows", f"{HERE}:trained_loss", Unsupported, "the loss has a parameter 'temperature' to train", "loss: parameter"),
        ("rows", f"{HERE}:loss_of_rows", UsageError, r"a tensor of shape \(4,\)", "loss: rows"),
        ("which_loss", "output", UsageError, r"which is the loss .* 1 or 2 of a tuple \(0: \(4, 4\), 1: \(\), 2: \(\)\)", "forward of forms"),
        ("which_name", "output", UsageError, "which is the loss .* a or b of a dict", "forward of forms"),
        ("no_loss", "output", UsageError, r"a tuple \(0: \(4, 4\), 1: NoneType\), not a floating", "forward of forms"),
    ],
)
def test_models_that_are_refused(model: str, loss: str, error: type[Exception], says: str, where: str) -> None:
    with pytest.raises(error, match=says) as found:
        capture(f"{HERE}:{model}", loss=loss, scalable=False)
    assert found.value.where == (line(where) if where else f"{HERE}:{model}") and found.value.hint


@pytest.mark.parametrize("form", ["logits_first", "loss_first", "other_name"])
def test_a_loss_among_what_forward_returns(form: str) -> None:
    """The only scalar: `(logits, loss)`, as in nanoGPT."""
    traced = trace_forward(f"{HERE}:{form}", loss="output", device="cpu")
    x, targets = traced.inputs
    expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, *traced.parameters.values()), targets)
    assert traced.method == "export" and torch.equal(traced.graph_module(*map(traced.value, traced.placeholders))[0], expected)


def test_a_loss_with_frozen_parameters_is_computed_with_them() -> None:
    traced = trace_forward(f"{HERE}:rows", loss=f"{HERE}:frozen_loss", device="cpu")
    assert traced.method == "export" and {*traced.parameters} == {"weight", "bias"}


def test_what_cannot_be_traced_in_a_loss_is_told_with_its_line() -> None:
    """It is kept whole by itself."""
    graph = capture(f"{HERE}:rows", loss=f"{HERE}:picking_loss", scalable=False)
    assert f"kept whole as one operator each: loss (picking_loss): a shape depends on values ({line('loss: picks')})" in graph.notes


@pytest.mark.parametrize(("model", "says"), [("frozen", "no parameter of the model is trainable"), ("detached", "no gradient for any parameter")])
def test_a_model_without_anything_to_train_is_refused(model: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "plan", "--model", f"{HERE}:{model}", "--loss", "mse", "--fabric", "laptop:2", "--global-batch", "8"]
    assert main([*asked, "-o", str(tmp_path / "plan.json")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "plan.json").exists()


def test_models_that_are_taken() -> None:
    """A cache changes once; a file is read by the module itself, which is kept whole; what is printed is said; a number to look at is no loss."""
    cache, reads, prints, looked = (
        capture(f"{HERE}:{name}", loss="output" if name == "looked" else "mse", scalable=False) for name in ("cache", "reads", "prints", "looked")
    )
    assert {g.method for g in (cache, reads, prints, looked)} == {"export"}
    (region,) = [n for n in reads.nodes if n.target == "meshwright.region.default"]
    assert region.module == "file" and any(f"the file that is read at {line('read')}" in note for note in reads.notes)
    assert any(f"what forward prints ({line('printed')}) is printed while" in note for note in prints.notes)


@pytest.mark.parametrize(
    ("name", "says", "where"),
    [
        ("two_optimizers", "returned a tuple, not a torch.optim.Optimizer", ""), ("with_closure", "Again evaluates the loss again", "again"),
        ("lbfgs", "LBFGS", ""), ("only_parameters", "called with the named parameters, the rate and its options: too many positional", ""),
        ("broken", "Invalid learning rate", "broken"),
    ],
)  # fmt: skip
def test_optimizers_that_are_refused(name: str, says: str, where: str) -> None:
    named = [("a", torch.nn.Parameter(torch.zeros(2))), ("b", torch.nn.Parameter(torch.zeros(2)))]
    with pytest.raises((CaptureError, Unsupported, UsageError), match=says) as found:
        make_optimizer(f"{HERE}:{name}", named, 0.1)
    assert found.value.where == (line(where) if where else f"{HERE}:{name}") and found.value.hint


def batches(function: str) -> Batches:
    layout = TrainingLayout(data=1, tensor=1, pipeline=1, microbatch_size=4, microbatches=1, global_batch=4)
    inputs = [TensorInfo((4, 4), "float32"), TensorInfo((4, 4), "float32")]
    return Batches(open_data(f"{HERE}:{function}", (), 0, 4), layout, inputs, torch.device("cpu"))


def test_samples_of_unlike_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tensor 0 of sample 1 is \(5,\) torch.float32, the model takes \(4,\)") as found:
        batches("unlike").microbatch(0, 0, 0)
    assert found.value.where == line("unlike") and "pad to it" in found.value.hint
    with pytest.raises(UsageError, match=r"samples of one batch have different shapes, among them \(4,\), \(5,\)") as found:
        batches("unlike_loader").microbatch(0, 0, 0)
    assert "collate_fn" in found.value.hint


def test_random_samples_are_those_of_their_number() -> None:
    """Ranks that share a sample each ask for it, after other draws of their own; in the next epoch it is another."""
    data = open_data(f"{HERE}:augmented", (), 3, 4)
    torch.manual_seed(1)
    first, state = data.sample(2), torch.get_rng_state()
    torch.rand(5)
    again, later = open_data(f"{HERE}:augmented", (), 3, 4).sample(2), data.sample(10)
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, later))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # whoever asks draws as before


def test_a_batch_smaller_than_the_split_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "plan", "--model", f"{HERE}:cache", "--loss", "mse", "--fabric", "laptop:4", "--global-batch", "2", "--dp", "4"]
    assert main([*asked, "-o", str(tmp_path / "plan.json")]) == 2
    assert "global batch 2 is not a multiple of data degree 4" in capsys.readouterr().err


def test_losses_that_are_not_finite_come_back_from_files() -> None:
    """A run whose first loss is no number goes on, as its owner's loop would, and leaves documents that can be read."""
    saved = SavedRank(digest="", parts={}, losses=[math.nan, 2.0], scalars={})
    again = msgspec.json.decode(msgspec.json.encode(saved), type=SavedRank)
    first, second = numbers(again.losses)
    assert math.isnan(first) and second == 2.0


def test_a_checkpoint_of_another_class_is_refused() -> None:
    from rig import make_plan

    plan = make_plan((1, 1, 1))
    index = CheckpointIndex(plan="other", model="another class", step=1, data="d", seed=0, losses=[], files={}, parts={}, scalars={})
    with pytest.raises(UsageError, match="belongs to another plan or model"):
        require_same_job(index, plan, "d", "run/checkpoint")
