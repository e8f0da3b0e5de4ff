"""Models by a configuration: names taken apart, bad files refused; built and captured where transformers is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.capture.forward import trace_forward
from meshwright.capture.hf import DEFAULT_LENGTH, MAX_CONFIG_BYTES, build_hf, config_of, hf_name, with_length
from meshwright.capture.resolve import build_model
from meshwright.cli import main
from meshwright.errors import FormatError, MissingExtra, UnknownName, UsageError

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "attention_dropout": 0.0,
}  # fmt: skip
with_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


def written(folder: Path, fields: Any = LLAMA) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_names(tmp_path: Path) -> None:
    folder = written(tmp_path)
    file = folder / "config.json"
    for name, kind, length in ((f"hf:{file}", "", 0), (f"hf:{file}:Model", "Model", 0), (f"hf:{file}@8", "", 8), (f"hf:{file}:A@8", "A", 8)):
        parts = hf_name(name)
        assert parts is not None and (parts.config, parts.folder, parts.kind, parts.length) == (file, None, kind, length)
    for name in (str(folder), f"hf:{folder}", f"hf:{folder}:LlamaModel@3"):
        parts = hf_name(name)
        assert parts is not None and (parts.config, parts.folder) == (file, folder)
    assert hf_name("examples/gpt.py:tiny") is None and hf_name("package.module:function") is None
    assert with_length(str(folder), 8) == f"hf:{folder}@8" and with_length(str(folder), None) == f"hf:{folder}"
    assert with_length(None, 8) is None and with_length("examples/gpt.py:tiny", None) == "examples/gpt.py:tiny"


def test_wrong_names(tmp_path: Path) -> None:
    file = written(tmp_path) / "config.json"
    (tmp_path / "empty").mkdir()
    for name, error, says in (
        (f"hf:{file}@x", UsageError, "not a length"), (f"hf:{file}@0", UsageError, "not a length"), (f"hf:{file}:a b", UsageError, "name of a class"),
        ("hf:/no/such.json", UnknownName, "no file"), (f"hf:{tmp_path / 'empty'}", UnknownName, "no config.json"),
    ):  # fmt: skip
        with pytest.raises(error, match=says) as caught:
            hf_name(name)
        assert "hf:CONFIG.json" in caught.value.hint
    for name, length in ((f"hf:{file}@4", 8), (f"hf:{file}", 0), ("examples/gpt.py:tiny", 8)):
        with pytest.raises(UsageError, match="length"):
            with_length(name, length)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "no JSON"), (b"[" * 10**5, "no JSON"), (b"\xff", "no JSON"), (b"[]", "JSON object"), (b'{"model_type": 3}', "JSON object"),
        (b'{"model_type": "x", "architectures": "A"}', "not a list"), (b'{"model_type": "x", "auto_map": {"AutoModel": "m.M"}}', "code of its own"),
        (b" " * (MAX_CONFIG_BYTES + 1), "no configuration"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        config_of(data, "config.json")


ANY_JSON = st.recursive(st.none() | st.text(max_size=4), lambda x: st.dictionaries(st.text(), x))


@given(st.binary(max_size=64) | ANY_JSON.map(lambda x: json.dumps(x).encode()))
def test_any_bytes_are_a_configuration_or_refused(data: bytes) -> None:
    try:
        assert isinstance(config_of(data, "here")["model_type"], str)
    except FormatError as error:
        assert error.where == "here"


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    parts = hf_name(str(written(tmp_path)))
    assert parts is not None
    with pytest.raises(MissingExtra, match="transformers") as caught:
        build_hf(parts)
    assert "meshwright[hf]" in caught.value.hint
    assert main(["train", "capture", "--model", str(tmp_path), "--seq-len", "4", "-o", str(tmp_path / "g.json")]) == 2
    assert "meshwright[hf]" in capsys.readouterr().err


@with_transformers
def test_a_class_of_transformers_is_traced_as_it_runs(tmp_path: Path) -> None:
    written(tmp_path)
    for kind, loss in (("", "cross-entropy"), (":LlamaForCausalLM", "output"), (":LlamaModel", "mse")):
        traced = trace_forward(f"hf:{tmp_path}{kind}@6", loss=loss, device="cpu")
        assert traced.method == "export" and traced.inputs[0].shape == (2, 6)
        expected = torch.autograd.grad(traced.objective(*traced.inputs), list(traced.parameters.values()), allow_unused=True)
        (ours,) = traced.graph_module(*(traced.value(v) for v in traced.placeholders))
        found = torch.autograd.grad(ours, list(traced.parameters.values()), allow_unused=True)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert build_model(f"hf:{tmp_path}", device="meta").inputs[0].shape == (2, min(DEFAULT_LENGTH, 32))


@with_transformers
def test_weights_are_loaded_where_the_model_is_real(tmp_path: Path) -> None:
    written(tmp_path)
    module = build_model(f"hf:{tmp_path}@6", device="cpu", seed=1).module
    module.save_pretrained(tmp_path, safe_serialization=True)
    again = build_model(f"hf:{tmp_path}@6", device="cpu", seed=2).module
    assert again.training
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True))
    assert next(build_model(f"hf:{tmp_path}@6", device="meta").module.parameters()).device.type == "meta"


@with_transformers
def test_what_transformers_does_not_have_is_said(tmp_path: Path) -> None:
    wrong = (({"model_type": "no such"}, "", "no model type"), (LLAMA, ":NoSuchClass", "no model class"), (LLAMA, ":LlamaConfig", "no model class"))
    for fields, kind, says in wrong:
        with pytest.raises(UnknownName, match=says):
            build_model(f"hf:{written(tmp_path, fields)}{kind}", device="meta")
