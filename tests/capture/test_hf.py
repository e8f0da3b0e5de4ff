"""Models by a configuration: names taken apart, bad files refused; built and captured where transformers is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.capture.forward import trace_forward
from meshwright.capture.hf import DEFAULT_LENGTH, MAX_CONFIG_BYTES, build_hf, config_of, example_inputs
from meshwright.capture.resolve import build_model
from meshwright.cli import main
from meshwright.errors import FormatError, MissingExtra, UnknownName, UsageError
from meshwright.graph.model_names import hf_name, with_dtype, with_length

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "attention_dropout": 0.0,
}  # fmt: skip
with_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


def written(folder: Path, fields: Any = LLAMA) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_video_has_frames_before_channels() -> None:
    for frames, shape in ((0, (2, 3, 8, 8)), (4, (2, 4, 3, 8, 8))):  # timesformer, vivit, videomae
        module = SimpleNamespace(main_input_name="pixel_values")
        config = SimpleNamespace(image_size=8, num_channels=3, num_labels=5, **({"num_frames": frames} if frames else {}))
        kind = type("SomeForImageClassification", (SimpleNamespace,), {})
        assert example_inputs(kind(**vars(module)), config, 0)["pixel_values"].shape == shape


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
    for name in ("hf:Qwen/Qwen2.5-7B", "hf:meta-llama/Llama-3.1-8B@4096"):  # as the hub has them
        with pytest.raises(UnknownName, match="no file") as caught:
            hf_name(name)
        hub = name.removeprefix("hf:").partition("@")[0]
        assert f"`hf download {hub} config.json --local-dir {hub.partition('/')[2]}`" in caught.value.hint
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
    assert main(["train", "plan", "--model", str(tmp_path), "--fabric", "laptop:2", "--global-batch", "4"]) == 2
    assert "meshwright[hf]" in capsys.readouterr().err


@pytest.mark.interpreter
def test_a_wrong_name_is_refused_without_torch(tmp_path: Path) -> None:
    code = "import sys; from meshwright.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
    argv = ["train", "plan", "--model", "hf:nobody/has-this", "--fabric", "laptop:2", "--global-batch", "4"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout.strip() == "False" and "hf download nobody/has-this" in done.stderr


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


def test_dtypes_in_names(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for text, length, dtype in (("8,bfloat16", 8, "bfloat16"), ("float64", 0, "float64"), ("float16,3", 3, "float16")):
        parts = hf_name(f"hf:{folder}@{text}")
        assert parts is not None and (parts.length, parts.dtype) == (length, dtype)
    assert with_dtype(str(folder), "bfloat16") == f"hf:{folder}@bfloat16" and with_dtype(f"hf:{folder}@8", "float64") == f"hf:{folder}@8,float64"
    assert with_length(f"hf:{folder}@float64", 8) == f"hf:{folder}@float64,8" and with_dtype("examples/gpt.py:tiny", "") == "examples/gpt.py:tiny"
    for text in ("8,8", "float64,float64", "int8", "8,"):
        with pytest.raises(UsageError, match="is not a length or a dtype"):
            hf_name(f"hf:{folder}@{text}")
    for name in (f"hf:{folder}@float64", "examples/gpt.py:tiny"):
        with pytest.raises(UsageError, match="dtype"):
            with_dtype(name, "float32")


@with_transformers
def test_the_dtype_is_the_configurations_where_there_are_weights(tmp_path: Path) -> None:
    written(tmp_path, LLAMA | {"dtype": "bfloat16"})

    def dtypes(name: str, **how: Any) -> tuple[set[torch.dtype], set[torch.dtype]]:
        source = build_model(name, **{"device": "cpu", **how})
        return {p.dtype for p in source.module.parameters()}, {b.dtype for b in source.module.buffers()}

    assert dtypes(f"hf:{tmp_path}") == ({torch.float32}, {torch.float32}) and dtypes(f"hf:{tmp_path}@float64")[0] == {torch.float64}
    build_model(f"hf:{tmp_path}@bfloat16", device="cpu").module.save_pretrained(tmp_path)
    for name, dtype in ((f"hf:{tmp_path}", torch.bfloat16), (f"hf:{tmp_path}@float32", torch.float32)):
        found = dtypes(name)
        assert found == dtypes(name, device="meta") == dtypes(name, lazy=True) and found[0] == {dtype}


FAMILIES: tuple[dict[str, Any], ...] = (
    LLAMA, LLAMA | {"tie_word_embeddings": True},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
)  # fmt: skip


@with_transformers
@pytest.mark.parametrize("fields", FAMILIES, ids=lambda x: f"{x['model_type']} {x.get('tie_word_embeddings', '')}")
def test_weights_left_in_files_are_those_that_transformers_loads(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Several files, cast to another dtype."""
    written(tmp_path, fields)
    build_model(f"hf:{tmp_path}", device="cpu", seed=1).module.save_pretrained(tmp_path, max_shard_size="20KB")
    name = f"hf:{tmp_path}@bfloat16"
    whole, lazy = build_model(name, device="cpu", seed=2), build_model(name, device="cpu", seed=2, lazy=True)
    assert lazy.weights is not None and whole.weights is None
    for (n, p), (m, q) in zip(whole.module.named_parameters(), lazy.module.named_parameters(), strict=True):
        assert n == m and q.is_meta and torch.equal(p, lazy.weights.part(n, q.dtype))
    for (n, p), (m, q) in zip(whole.module.named_buffers(), lazy.module.named_buffers(), strict=True):
        assert n == m and torch.equal(p, lazy.weights.part(n, q.dtype) if n in lazy.weights.known_as else q)
    assert all(torch.equal(a, b) for a, b in zip(whole.inputs, lazy.inputs, strict=True))


@with_transformers
def test_a_folder_that_lacks_weights_of_its_own_class_is_refused(tmp_path: Path) -> None:
    """Another class may have a head that its folder does not: it is initialised, in the whole model."""
    written(tmp_path)
    module = build_model(f"hf:{tmp_path}", device="cpu", seed=1).module
    kept = {n: x for n, x in module.state_dict().items() if n != "model.norm.weight"}
    module.save_pretrained(tmp_path, state_dict=kept)
    for lazy in (False, True):
        with pytest.raises(FormatError, match=r"no file has tensor 'model.norm.weight'") as found:
            build_model(f"hf:{tmp_path}", device="cpu", lazy=lazy)
        assert found.value.where == str(tmp_path)
    assert build_model(f"hf:{tmp_path}:LlamaForSequenceClassification", device="cpu", lazy=True).weights is None


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
