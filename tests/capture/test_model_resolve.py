"""Finding a model by name: what is refused, with which words; what is put back afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_nets import EXAMPLES, ODD
from hypothesis import given
from hypothesis import strategies as st

from meshwright.capture.losses import Objective, loss_function
from meshwright.capture.resolve import build_model, resize_batch, resolve_function, user_code
from meshwright.errors import CaptureError, MeshwrightError, UnknownName, UsageError


def test_a_file_and_a_module_are_resolved_and_nothing_is_left_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WIDTH = 6\n")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nfrom neighbour import WIDTH\n"
        "def f():\n    return nn.Linear(WIDTH, 2), (torch.randn(3, WIDTH), torch.randn(3, 2))\n"
    )
    before = list(sys.path)
    source = build_model(f"{tmp_path}/net.py:f", device="cpu")
    assert sys.path == before
    assert source.module.in_features == 6 and source.batch_size == 3
    sys.modules.pop("neighbour")
    assert resolve_function("torch.nn.functional:mse_loss", what="loss") is torch.nn.functional.mse_loss


def test_two_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    for name, width in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(f"def f():\n    return {width}\n")
    assert [resolve_function(f"{tmp_path}/{x}/net.py:f")() for x in "ab"] == [2, 3]


def test_building_is_deterministic_and_keeps_the_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a = build_model(f"{EXAMPLES}/gpt.py:tiny", device="cpu", seed=1)
    assert torch.equal(torch.rand(3), expected)
    b = build_model(f"{EXAMPLES}/gpt.py:tiny", device="cpu", seed=1)
    c = build_model(f"{EXAMPLES}/gpt.py:tiny", device="cpu", seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.module.parameters(), b.module.parameters(), strict=True))
    assert not torch.equal(a.module.tokens.weight, c.module.tokens.weight)


@pytest.mark.parametrize(
    ("name", "kind", "says", "hints"),
    [
        ("gpt", UsageError, "does not name a function", "FILE.py:function"),
        (f"{EXAMPLES}/gpt.py", UsageError, "does not name a function", "gpt.py:tiny"),
        (f"{EXAMPLES}/gpt.py:", UsageError, "does not name a function", "gpt.py:tiny"),
        (f"{EXAMPLES}/gpt.py:smal", UnknownName, "has no function 'smal'", "small"),
        (f"{EXAMPLES}/gtp.py:small", UnknownName, "there is no file", "gpt.py"),
        ("/no/such/folder/x.py:f", UnknownName, "there is no file", "FILE.py:function"),
        (f"{EXAMPLES}/gpt.py:1x", UsageError, "not a function name", "FILE.py:function"),
        (f"{ODD}:NOT_A_FUNCTION", UsageError, "is a int, not a function", "there are"),
        ("no_such_module_anywhere:f", UnknownName, "there is no module", "no_such_module_anywhere.py"),
        ("not a module!:f", UnknownName, "neither a Python file nor a module", "FILE.py:function"),
        ("torch.nn:Linea", UnknownName, "has no function 'Linea'", ""),
    ],
)
def test_wrong_names(name: str, kind: type[MeshwrightError], says: str, hints: str) -> None:
    with pytest.raises(kind) as caught:
        resolve_function(name)
    assert says in caught.value.message and hints in caught.value.hint


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("not_a_pair", "returned Linear, not a pair"),
        ("not_a_module", "is a str, not an nn.Module"),
        ("no_inputs", "neither a tuple nor a dictionary of tensors"),
        ("number_as_input", "example input 1 is a int"),
        ("scalar_as_input", "needs a batch"),
        ("unequal_batches", "has 3 rows, input 0 has 4"),
    ],
)
def test_broken_contract(function: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        build_model(f"{ODD}:{function}", device="cpu")
    assert "target last" in caught.value.hint


def test_failures_in_user_code_name_file_and_line(tmp_path: Path) -> None:
    line = next(i for i, text in enumerate(ODD.read_text().splitlines(), 1) if "no weights here" in text)
    with pytest.raises(CaptureError, match="RuntimeError: no weights here") as caught:
        build_model(f"{ODD}:raises", device="cpu")
    assert caught.value.where.endswith(f"odd_models.py:{line}")
    with pytest.raises(CaptureError, match="TypeError"):
        build_model(f"{ODD}:needs_an_argument", device="cpu")
    broken = tmp_path / "broken.py"
    broken.write_text("def f():\n    return (\n")
    with pytest.raises(CaptureError, match="SyntaxError") as caught:
        resolve_function(f"{broken}:f")
    assert "broken.py:" in caught.value.where
    missing = tmp_path / "missing.py"
    missing.write_text("import no_such_module_anywhere\n")
    with pytest.raises(CaptureError, match="no_such_module_anywhere") as caught:
        resolve_function(f"{missing}:f")
    assert caught.value.where.endswith("missing.py:1")
    with pytest.raises(CaptureError, match="missing 1 required") as caught, user_code("m"):
        torch.nn.Linear(1, 1)()
    assert "--loss output" in str(caught.value.hint)


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="must be >= 1"):
        build_model(f"{ODD}:linear", device="cpu", batch_size=0)


@given(rows=st.integers(1, 6), wanted=st.integers(1, 20))
def test_resizing_repeats_from_the_start(rows: int, wanted: int) -> None:
    x = torch.arange(rows * 2).reshape(rows, 2)
    y = resize_batch(x, wanted)
    assert y.is_contiguous() and [r.tolist() for r in y] == [x[i % rows].tolist() for i in range(wanted)]


def test_losses() -> None:
    output, target = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    expected = -torch.log_softmax(output, -1).gather(-1, target[..., None]).mean()
    cross_entropy = loss_function("cross-entropy")
    assert cross_entropy is not None and torch.allclose(cross_entropy(output, target), expected)
    one_hot = torch.nn.functional.one_hot(target, 5).float()
    assert torch.allclose(cross_entropy(output, one_hot), expected)
    mse = loss_function("mse")
    assert mse is not None and torch.allclose(mse(output, one_hot), ((output - one_hot) ** 2).mean())
    assert loss_function("output") is None
    with pytest.raises(UnknownName) as caught:
        loss_function("cross_entropy")
    assert "cross-entropy" in caught.value.hint
    with pytest.raises(UnknownName, match="has no function"):
        loss_function("torch.nn.functional:no_such_loss")


@pytest.mark.parametrize(
    ("function", "loss", "says"),
    [
        ("linear", f"{ODD}:per_row_loss", "a tensor of shape"),
        ("linear", "output", "a tensor of shape"),
        ("one_input", "mse", "one example input only"),
    ],
)
def test_losses_that_are_no_loss(function: str, loss: str, says: str) -> None:
    source = build_model(f"{ODD}:{function}", device="cpu")
    inputs = source.inputs[:1] if loss == "output" else source.inputs
    with pytest.raises(UsageError, match=says):
        Objective(source.module, loss)(*inputs)


@pytest.mark.interpreter
def test_without_torch_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from meshwright.errors import MissingExtra\n"
        "try:\n    import meshwright.capture.graph\n"
        "except MissingExtra as e:\n    print(e.message, '|', e.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert "capturing a model needs the package 'torch'" in done.stdout and "meshwright[torch]" in done.stdout
