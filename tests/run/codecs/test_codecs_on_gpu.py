"""Whole codecs with the GPU's kernels, in Triton's interpreter, against the processor's. Needs `triton` beside torch; skipped without it."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from meshwright.codec.codec import parse_codec
from meshwright.errors import NotFinite, Unsupported
from meshwright.run.codecs import IMPLEMENTED, At, devices, make_codec, on_cpu

SHAPES = [(40, 30), (50,), (1,), (9, 8)]
ROUNDED = {"efsign", "onebit", "powersgd"}  # sums in another order
SPECS = [*IMPLEMENTED, "topk:density=1", "qsgd:bits=8", "qsgd:norm=2", "int8:stochastic=true", "fp8:format=e5m2", "threshold:every=2", "dgc:clip=0.5"]


def gradient(step: int) -> torch.Tensor:
    x = torch.randn(sum(torch.Size(s).numel() for s in SHAPES), generator=torch.Generator().manual_seed(step))
    x[::7] = 0
    x[5:300:6] = x[4:299:6]  # ties
    return x


def steps(text: str) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """(first payload, what is decoded, state) of three steps."""
    codec, found = make_codec(parse_codec(text), SHAPES, name="g"), []
    state = codec.new_state(torch.device("cpu"))
    for step in range(3):
        at = At(step=step, rank=1, world=2)
        first = payload = codec.encode(gradient(step), state, at)
        sent = first.wire.clone()
        while (following := codec.advance(payload, state, at)) is not None:
            payload = following
        out = torch.ones_like(gradient(step))
        codec.decode(payload, out)
        codec.decode(payload, out, accumulate=True)
        codec.finish(out, 2)
        found.append((sent, out, {k: v.clone() for k, v in state.items()}))
    return found


@pytest.fixture
def on_gpu(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed: GPU kernels unchecked (pip install triton)")
    found = importlib.import_module("meshwright.run.codecs.on_gpu")
    monkeypatch.setattr(devices, "on_cpu", found)
    return found


def test_both_modules_have_the_same_functions():
    text = (importlib.resources.files("meshwright.run.codecs") / "on_gpu.py").read_text()
    assert all(f"\ndef {name}(" in text for name in on_cpu.__all__)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy: divisions by zero warn
@pytest.mark.parametrize("text", SPECS)
def test_payloads_means_and_states_are_the_processors(text, request):
    expected = steps(text)
    request.getfixturevalue("on_gpu")
    near = text.partition(":")[0] in ROUNDED or "norm=2" in text
    for (sent, out, state), (theirs, other, after) in zip(expected, steps(text), strict=True):
        assert sent.numel() == theirs.numel() and (near or torch.equal(sent, theirs))
        for a, b in ((out, other), *((state[k], after[k]) for k in state)):
            assert torch.allclose(a, b, atol=1e-5, rtol=1e-5) if near else torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("text", ["topk", "int8", "powersgd", "fp16"])
def test_what_is_not_finite_is_refused_there_too(text, on_gpu):
    x = gradient(0)
    x[17] = float("nan")
    codec = make_codec(parse_codec(text), SHAPES)
    state = codec.new_state()
    with pytest.raises(NotFinite, match="element 17"):
        codec.encode(x, state, At(step=0))
    assert not any(v.isnan().any() for v in state.values())


def test_other_devices_are_refused_by_name():
    codec = make_codec(parse_codec("topk"), [(8,)])
    with pytest.raises(Unsupported, match="not on meta"):
        codec.encode(torch.empty(8, device="meta"), codec.new_state(), At(step=0))


def test_a_gpu_without_triton_is_refused(monkeypatch):
    class Gpu:
        device = torch.device("cuda")

    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Unsupported, match="need triton"):
        devices.require_device(Gpu(), "g")
