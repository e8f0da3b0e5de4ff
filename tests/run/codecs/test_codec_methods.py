"""What makes each published codec that codec: against plain formulas, and PowerSGD against torch's own hook."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from meshwright.codec.codec import parse_codec
from meshwright.errors import NotFinite
from meshwright.kernels.counter_random import key_of, permuted
from meshwright.kernels.orthonormal import orthonormalise
from meshwright.run.codecs import At, make_codec


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def decoded(text: str, x: torch.Tensor, at: At = At(step=0)) -> torch.Tensor:
    codec = make_codec(parse_codec(text), [tuple(x.shape)])
    out = torch.empty_like(x)
    codec.decode(codec.encode(x, codec.new_state(), at), out)
    return out


def test_signs_and_means() -> None:
    x = noise(150)
    parts = x.split(64)
    assert torch.allclose(decoded("efsign:block=64", x), torch.cat([p.abs().mean() * torch.where(p < 0, -1.0, 1.0) for p in parts]))
    means = torch.cat([torch.where(p < 0, p[p < 0].mean(), p[p >= 0].mean()) for p in parts])
    assert torch.allclose(decoded("onebit:block=64", x), means)
    assert torch.allclose(decoded("onebit:block=8", torch.ones(16)), torch.ones(16))


def test_majority_and_signum() -> None:
    codec = make_codec(parse_codec("signsgd"), [(11,)])
    votes, total = [noise(11, s) for s in range(3)], torch.zeros(11)
    for x in votes:
        codec.decode(codec.unpack(codec.encode(x, {}, At(step=0)).wire), total, accumulate=True)
    codec.finish(total, 3)
    assert torch.equal(total, torch.sign(sum(torch.sign(x) for x in votes)))
    tied = torch.tensor([2.0, 0.0, -2.0])
    make_codec(parse_codec("signsgd"), [(3,)]).finish(tied, 2)
    assert tied.tolist() == [1, 0, -1]
    momentum, signum = torch.zeros(11), make_codec(parse_codec("signum:momentum=0.5"), [(11,)])
    state, out = signum.new_state(), torch.empty(11)
    for step in range(3):
        x = noise(11, step)
        momentum = 0.5 * momentum + 0.5 * x
        signum.decode(signum.encode(x, state, At(step=step)), out)
        assert torch.equal(out, torch.where(momentum < 0, -1.0, 1.0))


def test_levels_are_levels() -> None:
    x = noise(700)
    for text, levels, scale in (
        ("terngrad:block=64", 1, "max"), ("qsgd:block=64", 7, "max"), ("qsgd:block=64,norm=2", 7, "norm"), ("int8:block=64,feedback=false", 127,
        "max"),
    ):  # fmt: skip
        out = decoded(text, x)
        for p, q in zip(x.split(64), out.split(64), strict=True):
            unit = (p.abs().max() if scale == "max" else p.norm()) / levels
            steps = q / unit
            assert torch.allclose(steps, steps.round(), atol=1e-3) and (q - p).abs().max() <= unit * 1.0001
            assert steps.abs().max() <= levels + 1e-3


def test_int8_is_the_nearest() -> None:
    x = noise(256)
    unit = x.abs().max() / 127
    assert torch.allclose(decoded("int8:feedback=false", x), (x / unit).round() * unit, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_is_torchs_cast_of_the_scaled_block(name: str, dtype: torch.dtype) -> None:
    x = noise(300) * torch.logspace(-6, 2, 300)
    expected = []
    for p in x.split(64):
        scale = p.abs().max() / torch.finfo(dtype).max
        expected.append((p * (1 / scale)).to(dtype).float() * scale)
    assert torch.equal(decoded(f"fp8:format={name},block=64,feedback=false", x), torch.cat(expected))


@pytest.mark.parametrize("text", ["fp8", "int8", "terngrad", "qsgd"])
def test_blocks_too_small_to_scale(text: str) -> None:
    x = torch.zeros(1024)
    x[:256], x[256:512] = 1e-42, noise(256)
    out = decoded(f"{text}:block=256" + ("" if text in ("terngrad", "qsgd") else ",feedback=false"), x)
    assert torch.isfinite(out).all() and out[256:512].any() and not out[512:].any() and out[:256].abs().max() <= 1e-38


def test_random_elements_are_shared_and_change() -> None:
    x, codec = noise(1000), make_codec(parse_codec("randomk:density=0.1,feedback=false"), [(1000,)], name="g")
    picked = {}
    for step in (0, 1):
        for rank in (0, 1):
            out = torch.empty(1000)
            codec.decode(codec.encode(x, {}, At(step=step, rank=rank, world=2)), out)
            assert torch.equal(out[out != 0], x[out != 0]) and int((out != 0).sum()) == 100
            picked[step, rank] = set(torch.nonzero(out).flatten().tolist())
    assert picked[0, 0] == picked[0, 1] and picked[1, 0] == picked[1, 1] and len(picked[0, 0] & picked[1, 0]) < 40
    assert torch.equal(decoded("randomk:density=0.5,scaled=true,feedback=false", torch.ones(10)).unique(), torch.tensor([0.0, 2.0]))


@given(st.integers(1, 3000), st.integers(0, 100))
def test_permuted_is_a_permutation(n: int, seed: int) -> None:
    order = permuted(n, n, key_of(seed))
    assert np.array_equal(np.sort(order), np.arange(n)) and np.array_equal(permuted(n, n // 2, key_of(seed)), order[: n // 2])


def test_permuted_is_uniform() -> None:
    """Chi-square of which of 50 elements come first, 20,000 keys: 49 degrees of freedom, mean 49, deviation 9.9; 100 is beyond 5 sigma."""
    first = np.bincount([permuted(50, 1, key_of(3, i))[0] for i in range(20_000)], minlength=50)
    assert ((first - 400) ** 2 / 400).sum() < 100


def test_threshold_is_reused_adapted_and_capped() -> None:
    codec = make_codec(parse_codec("threshold:density=0.1,every=4,feedback=false"), [(1000,)])
    state = codec.new_state()
    x = noise(1000)
    exact = codec.encode(x, state, At(step=0))
    assert exact.size_bytes == 800 and torch.equal(decoded("topk:density=0.1", x).bool(), decoded("threshold:density=0.1", x).bool())
    kth = float(state["threshold"][0])
    assert kth == float(x.abs().topk(100).values[-1])
    assert codec.encode(x, state, At(step=1)).size_bytes == 792, "the k-th itself is not above it"
    codec.encode(x * 1.1, state, At(step=2))
    grown = codec.encode(x * 100, state, At(step=3))
    assert grown.size_bytes == 1600 and float(state["threshold"][0]) > kth
    before = float(state["threshold"][0])
    assert codec.encode(x * 1e-3, state, At(step=5)).size_bytes == 0 and float(state["threshold"][0]) < before
    assert codec.encode(x * 1e-3, state, At(step=8)).size_bytes == 800, "an exact step"


def test_dgc_by_its_formulas() -> None:
    """Momentum correction, masking of both memories, clipping at clip / sqrt(ranks), warm-up."""
    codec = make_codec(parse_codec("dgc:density=0.1,momentum=0.9,clip=4,warmup=4"), [(200,)])
    state, u, v = codec.new_state(), torch.zeros(200), torch.zeros(200)
    for step, count in enumerate([50, 20, 20, 20, 20, 20]):
        x = noise(200, step)
        u = 0.9 * u + x * min(1.0, 4 / 2 / float(x.norm()))
        v = v + u
        keep = torch.zeros(200, dtype=torch.bool)
        keep[v.abs().topk(count).indices] = True
        out = torch.empty(200)
        codec.decode(codec.encode(x, state, At(step=step, world=4)), out)
        assert torch.allclose(out, torch.where(keep, v, 0.0), atol=1e-6)
        u[keep] = v[keep] = 0
        assert torch.allclose(state["velocity"], u, atol=1e-6) and torch.allclose(state["residual"], v, atol=1e-6)
    payload = codec.encode(noise(200, 9), state, At(step=9))
    left = state["residual"].clone()
    codec.take_back(payload, state)
    assert int((state["residual"] != left).sum()) == 20
    big = make_codec(parse_codec("dgc:density=0.5"), [(2,)], name="g")
    with pytest.raises(NotFinite, match="g: residual and gradient"):
        big.encode(torch.tensor([3e38, 3e38]), {"velocity": torch.full((2,), 3e38), "residual": torch.zeros(2)}, At(step=2))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_orthonormal_columns(rows: int, columns: int, seed: int) -> None:
    x = noise(rows * columns, seed).view(rows, columns)
    if seed % 3 == 0 and columns > 1:
        x[:, -1] = x[:, 0] * 2
    q = x.clone()
    orthonormalise(q.numpy())
    gram = q.double().t() @ q.double()
    assert torch.allclose(gram, torch.diag(gram.diagonal().round()), atol=1e-5)
    assert int(gram.diagonal().round().sum()) == torch.linalg.matrix_rank(x.double(), rtol=1e-4)
    assert torch.allclose(q.double() @ (q.double().t() @ x.double()), x.double(), atol=1e-3)


def test_powersgd_finds_a_low_rank_matrix_and_comes_back_from_zero() -> None:
    left, right = noise(60).view(30, 2), noise(80, 1).view(2, 40)
    codec = make_codec(parse_codec("powersgd:rank=3"), [(30, 40)])
    state, out = codec.new_state(), torch.empty(1200)
    for step in range(4):
        x = torch.zeros(1200) if step < 2 else (left @ right).reshape(-1)
        payload = codec.encode(x, state, At(step=step))
        while (following := codec.advance(payload, state, At(step=step))) is not None:
            payload = following
        codec.decode(payload, out)
        assert torch.allclose(out, x, atol=1e-4)
    with pytest.raises(ValueError, match="first round"):
        codec.decode(codec.encode(x, state, At(step=9)), out)


def test_powersgd_loses_nothing_over_all_ranks() -> None:
    """Per rank: own factors + residual = gradient + old residual; summed over ranks, what is decoded and the residuals are all there was."""
    codec = make_codec(parse_codec("powersgd:rank=2"), [(20, 30), (7,)])
    states, total_in, total_out = [codec.new_state() for _ in range(3)], torch.zeros(607), torch.zeros(607)
    for step in range(3):
        xs = [noise(607, 10 * step + r) for r in range(3)]
        payloads = [codec.encode(x, s, At(step=step, rank=r, world=3)) for r, (x, s) in enumerate(zip(xs, states, strict=True))]
        for _ in range(2):
            summed = torch.stack([p.summand for p in payloads]).sum(0)
            last = payloads
            for p in payloads:
                p.summand.copy_(summed)
            payloads = [codec.advance(p, s, At(step=step, rank=r, world=3)) for r, (p, s) in enumerate(zip(payloads, states, strict=True))]
        assert payloads == [None] * 3
        out = torch.empty(607)
        codec.decode(last[0], out)
        total_in += sum(xs)
        total_out += out
    assert torch.allclose(total_out + sum(s["residual"] for s in states), total_in, atol=1e-4)
    assert torch.equal(states[0]["q"], states[2]["q"])


class Bucket:
    """What torch's hook asks of a bucket."""

    def __init__(self, flat: torch.Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.flat, self.shapes = flat, shapes

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([int(np.prod(s)) for s in self.shapes])
        return [p.view(s) for p, s in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_powersgd_is_torchs_hook(tmp_path: Path) -> None:
    """A world of one, error feedback, warm start: from the state after torch's first compressed step, equal updates and residuals, to rounding."""
    shapes: list[tuple[int, ...]] = [(16,), (16, 40), (40,), (40, 4, 6), (3, 3)]
    n = sum(int(np.prod(s)) for s in shapes)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        theirs = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        codec = make_codec(parse_codec("powersgd:rank=2"), shapes)
        state = codec.new_state()
        for step in range(7):
            x = noise(n, step)
            expected = powerSGD_hook(theirs, Bucket(x.clone(), shapes)).wait()
            if step > 2:
                payload = codec.encode(x, state, At(step=step))
                while (following := codec.advance(payload, state, At(step=step))) is not None:
                    payload = following
                out = torch.empty(n)
                codec.decode(payload, out)
                assert torch.allclose(out, expected, rtol=1e-3, atol=1e-4) and not torch.allclose(out, x, atol=0.1)
                assert torch.allclose(state["residual"], theirs.error_dict[0], rtol=1e-3, atol=1e-4)
            elif step == 2:
                state["q"].copy_(theirs.q_memory_dict[0])
                state["residual"].copy_(theirs.error_dict[0])
    finally:
        dist.destroy_process_group()
