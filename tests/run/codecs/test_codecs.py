"""Every codec against what it states: bytes, bias, variance, contraction, determinism, input left alone, odd inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from meshwright.codec.codec import CodecSpec, parse_codec
from meshwright.codec.kinds import CODECS
from meshwright.codec.terms import CodecKind
from meshwright.errors import NotFinite, RunError, Unsupported
from meshwright.run.codecs import IMPLEMENTED, At, Codec, ErrorFeedback, Payload, State, make_codec

SHAPES = [(40, 30), (30,), (7, 3, 5), ()]
N = 40 * 30 + 30 + 105 + 1
VARIANTS = [
    "none", "fp16", "bf16", "fp8:block=64", "fp8:format=e5m2", "int8", "int8:block=64,stochastic=true,feedback=false", "topk:density=0.05",
    "topk:density=0.3", "threshold:density=0.1,every=2", "randomk:density=0.1", "randomk:density=0.25,scaled=true,feedback=false",
    "dgc:density=0.05,warmup=8", "dgc:clip=0.5", "efsign:block=64", "onebit:block=64", "signsgd", "signum", "terngrad:block=64", "qsgd:block=64",
    "qsgd:bits=2,norm=2", "qsgd:bits=8,norm=2", "qsgd:bits=2", "powersgd:rank=2", "powersgd:rank=1,warm=false",
]  # fmt: skip


def inner(spec: CodecSpec) -> Codec:
    codec = make_codec(spec, SHAPES, name="layer1")
    return codec.codec if isinstance(codec, ErrorFeedback) else codec


def gradient(seed: int, n: int = N) -> torch.Tensor:
    """Skewed magnitudes, both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.exp(2 * torch.randn(n, generator=generator))


def all_rounds(codec: Codec, x: torch.Tensor, state: State, at: At) -> tuple[list[Payload], torch.Tensor]:
    """The payloads of a world of one, and what comes out."""
    payloads = [codec.encode(x, state, at)]
    sent = [payloads[0].wire.clone()]
    while (following := codec.advance(payloads[-1], state, at)) is not None:
        payloads.append(following)
        sent.append(following.wire.clone())
    out = torch.full_like(x, 7.0, dtype=torch.float32)
    codec.decode(payloads[-1], out)
    codec.finish(out, 1)
    return [Payload(wire, ()) for wire in sent], out


@pytest.mark.parametrize("text", [v for v in VARIANTS if parse_codec(v).bias == "unbiased"])
@pytest.mark.parametrize("spiky", [False, True])
def test_no_bias_and_no_more_variance_than_stated(text: str, spiky: bool) -> None:
    """Errors projected on 20 random directions are t-tested against 0 at 5 sigma (600 draws: false alarm below 1e-4 for all together); their mean
    square against the stated variance, with 5 standard errors to spare. Spiky: one large element and many small ones, the worst case for
    codecs that scale by the maximum."""
    spec, codec = parse_codec(text), inner(parse_codec(text))
    x = gradient(3)
    if spiky:
        x = torch.full((N,), 0.01)
        x[::64] = 1.0
    directions = torch.randint(0, 2, (20, N), generator=torch.Generator().manual_seed(9)).double() * 2 - 1
    projected, squares = [], []
    for draw in range(600):
        _, out = all_rounds(codec, x, {}, At(step=draw // 2, rank=draw % 2 if spec.aggregation == "all-gather" else 0))
        error = out.double() - x.double()
        projected.append(directions @ error)
        squares.append(float(error.square().sum()))
    p = torch.stack(projected)
    assert float((p.mean(0) / (p.std(0) / len(p) ** 0.5)).abs().max()) < 5
    stated = spec.variance(N)
    assert stated is not None
    limit = stated * float(x.double().square().sum())
    assert 0 < np.mean(squares) <= limit + 5 * np.std(squares) / len(squares) ** 0.5


@pytest.mark.parametrize("kind", CODECS, ids=lambda k: k.name)
def test_bias_is_stated_with_its_measure(kind: CodecKind) -> None:
    spec = CodecSpec.of(kind.name)
    if spec.bias == "unbiased":
        assert spec.variance(1000) is not None and not spec.feedback
    elif spec.bias == "biased" and kind.keeps_loss and kind.aggregation == "all-gather":
        assert spec.feedback or kind.own_memory


def test_every_kind_is_here() -> None:
    assert [k.name for k in CODECS] == list(IMPLEMENTED) and {v.partition(":")[0] for v in VARIANTS} == set(IMPLEMENTED)


@pytest.mark.parametrize("text", VARIANTS)
def test_bytes_are_as_stated(text: str) -> None:
    spec = parse_codec(text)
    payloads, _ = all_rounds(inner(spec), gradient(1), inner(spec).new_state(), At(step=3))
    stated = spec.rounds(SHAPES, step=3)
    assert len(stated) == len(payloads)
    for payload, round_ in zip(payloads, stated, strict=True):
        assert round_.lower <= payload.size_bytes <= round_.upper and round_.lower <= round_.expected <= round_.upper
        assert payload.wire.dtype == torch.uint8 and payload.wire.is_contiguous()


@pytest.mark.parametrize("text", VARIANTS)
def test_contraction_holds(text: str) -> None:
    """Of every input for codecs without random numbers; of the mean over many draws for the others, with 4 % to spare."""
    spec, codec = parse_codec(text), inner(parse_codec(text))
    delta = spec.contraction(N)
    if delta is None:
        return
    assert 0 < delta <= 1
    for seed in range(10):
        x = gradient(seed) * (10.0 ** (seed - 5))
        left = []
        for draw in range(60 if spec.kind.random else 1):
            _, out = all_rounds(codec, x, codec.new_state(), At(step=draw))
            left.append(float((x.double() - out.double()).square().sum()))
        assert np.mean(left) <= (1 - delta) * float(x.double().square().sum()) * (1 + 1e-6 if len(left) == 1 else 1.04)


@pytest.mark.parametrize("text", VARIANTS)
def test_equal_input_gives_equal_bits_and_is_left_alone(text: str) -> None:
    codec, x = make_codec(parse_codec(text), SHAPES), gradient(2)
    kept, runs = x.clone(), []
    for _ in range(2):
        state = codec.new_state()
        runs.append([all_rounds(codec, x, state, At(step=s))[0] for s in range(3)])
    assert torch.equal(x, kept)
    for a, b in zip(*runs, strict=True):
        assert all(torch.equal(p.wire, q.wire) for p, q in zip(a, b, strict=True))


@pytest.mark.sample(60)
@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("shapes", [[], [(0,)], [(1,)], [(1, 1)], [(3,), (0, 4)], [(17, 2)]], ids=str)
def test_empty_and_tiny_groups(text: str, shapes: list[tuple[int, ...]]) -> None:
    spec, n = parse_codec(text), sum(math.prod(s) for s in shapes)
    codec, x = make_codec(spec, shapes), gradient(4, n)
    state = codec.new_state()
    total = torch.zeros(n)
    for step in range(3):
        payloads, out = all_rounds(codec, x, state, At(step=step))
        assert [r.lower <= p.size_bytes <= r.upper for p, r in zip(payloads, spec.rounds(shapes, step=step), strict=True)]
        assert torch.isfinite(out).all()
        total += out
    if isinstance(codec, ErrorFeedback):
        assert torch.allclose(total + state["residual"], 3 * x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(text: str, bad: float) -> None:
    """Refused with the group's name; or passed so that somebody sees it, with the state as it was."""
    x = gradient(5)
    x[77] = bad
    codec = make_codec(parse_codec(text), SHAPES, name="layer1")
    with pytest.raises(NotFinite, match=r"layer1.*element 77"):
        codec.encode(x, codec.new_state(), At(step=0))
    codec = make_codec(parse_codec(text), SHAPES, name="layer1", nonfinite="pass")
    state = codec.new_state()
    if text in ("signsgd", "signum"):  # one bit cannot say it
        with pytest.raises(NotFinite, match=r"layer1.*element 77"):
            codec.encode(x, state, At(step=0))
        return
    all_rounds(codec, gradient(6), state, At(step=0))
    before = {k: v.clone() for k, v in state.items()}
    _, out = all_rounds(codec, x, state, At(step=1))
    assert not torch.isfinite(out).all()
    assert all(torch.equal(v, before[k]) for k, v in state.items())


@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_and_strides(text: str, dtype: torch.dtype) -> None:
    """As the float32 gradient of the same values; results in the type asked for."""
    codec = make_codec(parse_codec(text), SHAPES)
    x = gradient(7, 2 * N).clamp(-1000, 1000).to(dtype)[::2]
    assert not x.is_contiguous()
    first, second = codec.new_state(), codec.new_state()
    _, plain = all_rounds(codec, x.float().contiguous(), first, At(step=0))
    payload = codec.encode(x, second, At(step=0))
    while (following := codec.advance(payload, second, At(step=0))) is not None:
        payload = following
    out = torch.ones(N, dtype=dtype)
    codec.decode(payload, out, accumulate=True)
    assert torch.allclose(out.double(), (plain.double() + 1).to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_what_no_codec_takes() -> None:
    codec = make_codec(parse_codec("topk"), [(4,)], name="g")
    for x in (torch.zeros(4, dtype=torch.int64), torch.zeros(3), torch.zeros(4).to_sparse()):
        with pytest.raises(Unsupported, match="g: codec topk"):
            codec.encode(x, codec.new_state(), At(step=0))
    with pytest.raises(Unsupported, match="decodes 4 elements"):
        codec.decode(codec.encode(torch.ones(4), codec.new_state(), At(step=0)), torch.zeros(5))
    with pytest.raises(Unsupported, match="never unpacks"):
        make_codec(parse_codec("fp16"), [(4,)]).unpack(torch.zeros(8, dtype=torch.uint8))


def test_half_precision_sums_to_the_mean() -> None:
    x = gradient(8)
    codec = make_codec(parse_codec("fp16"), SHAPES)
    payload = codec.encode(x, {}, At(step=0, world=4))
    assert torch.equal(payload.summand, (x / 4).half())
    for text, most in (("fp16", 65519.0), ("bf16", 3.3961e38)):
        codec = make_codec(parse_codec(text), [(2,)])
        assert torch.isfinite(codec.encode(torch.tensor([1.0, most]), {}, At(step=0)).summand).all()
        with pytest.raises(NotFinite, match=rf"element 1 .* beyond {text} .*the gradient itself is finite"):
            codec.encode(torch.tensor([1.0, most * 1.0001]), {}, At(step=0))
        assert torch.isfinite(codec.encode(torch.tensor([1.0, most]), {}, At(step=0, world=2)).summand).all()


def test_sparse_payloads_of_others_are_checked() -> None:
    codec = make_codec(parse_codec("topk:density=0.5"), [(8,)])
    wire = codec.encode(torch.arange(8.0), codec.new_state(), At(step=0)).wire
    out = torch.zeros(8)
    codec.decode(codec.unpack(wire), out)
    assert out.tolist() == [0, 0, 0, 0, 4, 5, 6, 7]
    shifted = torch.empty(wire.numel() + 1, dtype=torch.uint8)[1:]
    shifted.copy_(wire)
    codec.decode(codec.unpack(shifted), out)
    assert out[7] == 7
    with pytest.raises(RunError, match="no list of 8-byte entries"):
        codec.unpack(wire[:-1])
    codec.unpack(wire).parts[1][0] = 8
    with pytest.raises(RunError, match="outside the 8 elements"):
        codec.unpack(wire)


def test_indices_beyond_what_floats_can_count() -> None:
    """2^24 + 1 is no float32; neighbours far beyond it come back at their places."""
    n = (1 << 24) + 1000
    x = torch.zeros(n)
    places = [5, (1 << 24) - 1, (1 << 24) + 1, (1 << 24) + 2, n - 1]
    x[places] = torch.arange(1.0, 6.0)
    codec = make_codec(parse_codec(f"topk:density={5.5 / n},feedback=false"), [(n,)])
    payload = codec.unpack(codec.encode(x, {}, At(step=0)).wire)
    assert payload.parts[1].dtype == torch.int32 and payload.parts[1].tolist() == places
    out = torch.empty(n)
    codec.decode(payload, out)
    assert torch.equal(out, x)


def test_indices_beyond_int32() -> None:
    codec = make_codec(parse_codec("topk:feedback=false"), [(1 << 31,)])
    wire = torch.cat([torch.tensor([7, (1 << 31) - 1]).view(torch.uint8), torch.tensor([1.0, 2.0]).view(torch.uint8)])
    assert [p.tolist() for p in codec.unpack(wire).parts] == [[7, (1 << 31) - 1], [1.0, 2.0]]
    wire.view(torch.int32)[3] = 1
    with pytest.raises(RunError, match="outside the 2147483648 elements"):
        codec.unpack(wire)
