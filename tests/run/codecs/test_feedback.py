"""Error feedback: nothing is lost between what is decoded and what is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.codec.codec import parse_codec
from meshwright.errors import NotFinite, Unsupported
from meshwright.run.codecs import At, ErrorFeedback, make_codec


@given(st.integers(1, 200), st.integers(0, 1000), st.sampled_from([0.01, 0.2, 1.0]))
def test_sent_and_kept_add_up_bit_for_bit(n: int, seed: int, density: float) -> None:
    codec = make_codec(parse_codec(f"topk:density={density}"), [(n,)])
    state = codec.new_state()
    generator = torch.Generator().manual_seed(seed)
    for step in range(3):
        x, old = torch.randn(n, generator=generator), state["residual"].clone()
        decoded = torch.empty(n)
        codec.decode(codec.encode(x, state, At(step=step)), decoded)
        assert torch.equal(decoded + state["residual"], x + old)
        assert not (decoded.bool() & state["residual"].bool()).any()


@pytest.mark.parametrize(
    "text",
    ["fp16:feedback=true", "bf16:feedback=true", "fp8", "int8", "threshold:density=0.1", "randomk:density=0.1", "efsign:block=64", "onebit",
    "terngrad:feedback=true"],
)  # fmt: skip
def test_sent_and_kept_add_up_to_one_rounding(text: str) -> None:
    codec = make_codec(parse_codec(text), [(500,)])
    state, generator = codec.new_state(), torch.Generator().manual_seed(3)
    for step in range(4):
        x, old = torch.randn(500, generator=generator), state["residual"].clone()
        decoded = torch.empty(500)
        codec.decode(codec.encode(x, state, At(step=step)), decoded)
        left = decoded.double() + state["residual"].double() - (x + old).double()
        assert float((left.abs() / (x + old).abs().maximum(decoded.abs())).max()) <= 2**-23


def test_shares_of_the_mean_leave_their_whole_error() -> None:
    """fp16 sends x / world: the residual is what is missing after `world` such shares."""
    codec = make_codec(parse_codec("fp16:feedback=true"), [(50,)])
    state, x = codec.new_state(), torch.randn(50, generator=torch.Generator().manual_seed(2))
    payload = codec.encode(x, state, At(step=0, world=3))
    assert torch.allclose(payload.summand.float() * 3 + state["residual"], x, atol=1e-7) and state["residual"].any()


def test_a_failed_exchange_is_taken_back() -> None:
    codec = make_codec(parse_codec("topk:density=0.1"), [(50,)])
    assert isinstance(codec, ErrorFeedback)
    state, x = codec.new_state(), torch.randn(50, generator=torch.Generator().manual_seed(1))
    payload = codec.encode(x, state, At(step=0))
    assert not torch.equal(state["residual"], x)
    codec.take_back(payload, state)
    assert torch.equal(state["residual"], x)


def test_a_summed_payload_cannot_be_taken_back() -> None:
    codec = make_codec(parse_codec("randomk:density=0.1"), [(50,)], name="g")
    state = codec.new_state()
    with pytest.raises(Unsupported, match="g: codec randomk sums"):
        codec.take_back(codec.encode(torch.ones(50), state, At(step=0)), state)


def test_a_sum_that_overflows() -> None:
    codec = make_codec(parse_codec("topk:density=0.5"), [(4,)], name="g")
    state = codec.new_state()
    codec.encode(torch.tensor([3e38, 1.0, 3e38, 3e38]), state, At(step=0))
    with pytest.raises(NotFinite, match="g: residual and gradient"):
        codec.encode(torch.full((4,), 3e38), state, At(step=1))
