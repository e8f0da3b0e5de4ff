"""Weights in safetensors files: found under any of a parameter's names, read by parts; damaged or foreign files are refused by tensor and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from meshwright.capture.weight_files import INDEX, MAX_INDEX_BYTES, SINGLE, WeightFiles, _index, has_weights, weight_files
from meshwright.errors import FormatError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: x.detach().clone() for n, x in module.state_dict().items() if n != "table.weight"}


def split(folder: Path, values: dict[str, torch.Tensor], **changed: Any) -> Path:
    """In two files with an index."""
    names = sorted(values)
    files = {n: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: values[n] for n in names if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files | changed}))
    return folder


def test_every_tensor_is_found_in_one_file_or_several(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Tied()
    values = tensors(module)
    (tmp_path / "one").mkdir()
    save_file(values | {"extra.weight": torch.ones(2)}, tmp_path / "one" / SINGLE)
    (tmp_path / "two").mkdir()
    for folder in (tmp_path / "one", split(tmp_path / "two", values)):
        files = weight_files(folder)
        with torch.device("meta"):
            empty = Tied()
        assert files.fit(empty) == [] and "extra.weight" not in files.known_as and "angles" not in files.known_as
        assert torch.equal(files.part("table.weight", torch.float32), module.head.weight), "by the other name"
        assert torch.equal(files.part("head.weight", torch.float64, 0, [(1, 2), (4, 6)]), module.head.weight[[1, 4, 5]].double())
        assert torch.equal(files.part("head.weight", torch.bfloat16, 1, [(2, 4)]), module.head.weight[:, 2:].bfloat16())
        assert files.part("norm.num_batches_tracked", torch.int64).shape == () and files.part("head.weight", torch.float32).is_contiguous()
        files.close()
    assert has_weights(tmp_path / "one") and has_weights(tmp_path / "two") and not has_weights(tmp_path) and not has_weights(None)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    values = tensors(Tied())
    del values["norm.bias"]
    save_file(values, tmp_path / SINGLE)
    assert weight_files(tmp_path).fit(Tied()) == ["norm.bias"]


def test_another_shape_is_refused_by_tensor_and_file(tmp_path: Path) -> None:
    save_file(tensors(Tied()) | {"norm.bias": torch.zeros(5)}, tmp_path / SINGLE)
    with pytest.raises(FormatError, match=r"tensor 'norm.bias' has the shape \(5,\), the model's is \(4,\)") as found:
        weight_files(tmp_path).fit(Tied())
    assert found.value.where == str(tmp_path / SINGLE)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = split(tmp_path, tensors(Tied()))
    first = folder / "model-00001-of-00002.safetensors"
    whole = first.read_bytes()
    for data in (whole[:-3], whole[:5], b"", b"\xff" * 64):
        first.write_bytes(data)
        with pytest.raises(FormatError, match="is no safetensors file, or cut short") as found:
            weight_files(folder)
        assert found.value.where == str(first)
    first.unlink()
    with pytest.raises(FormatError, match="is not there, and the index names it"):
        weight_files(folder)
    first.write_bytes(whole)
    with pytest.raises(FormatError, match=f"has no tensor 'norm.weight', where {INDEX} says it lies"):
        weight_files(split(tmp_path, tensors(Tied()), **{"norm.weight": "model-00001-of-00002.safetensors"})).fit(Tied())
    (tmp_path / INDEX).unlink()
    with pytest.raises(FormatError, match=f"has neither {SINGLE} nor {INDEX}"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "no JSON"), (b"[]", "an index is a JSON object"), (b'{"weight_map": {}}', "an index is"), (b'{"weight_map": {"a": 3}}', "an index is"),
        (b'{"weight_map": {"a": "../b.safetensors"}}', "outside its folder"), (b" " * (MAX_INDEX_BYTES + 1), "are no index"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_bad_index_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(FormatError, match=says):
        weight_files(tmp_path)


ANY_JSON = st.recursive(st.none() | st.text(max_size=4), lambda x: st.dictionaries(st.text(), x))


@given(st.binary(max_size=64) | ANY_JSON.map(lambda x: json.dumps(x).encode()))
def test_any_bytes_are_an_index_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.index.json"
    path.write_bytes(data)
    try:
        assert all(isinstance(x, str) for x in _index(path).values())
    except FormatError as error:
        assert error.where == str(path)


def test_files_without_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from meshwright.errors import MissingExtra

    save_file(tensors(Tied()), tmp_path / SINGLE)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtra):
        weight_files(tmp_path)
    assert WeightFiles({}).known_as == {}
