"""Flops and bytes of single operators against torch's counter, real aliasing and hand-made cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.flops import attention_backward_flops, attention_flops, flops_of, is_causal, lacks_formula
from meshwright.capture.torch_private import DispatchRecorder
from meshwright.capture.work import work_of
from meshwright.graph.graph import Work

aten = torch.ops.aten


def works(function) -> list[tuple[str, Work]]:
    found = []
    with DispatchRecorder(lambda f, a, k, r: found.append((str(f), work_of(f, a, k, r)))):
        function()
    return found


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3), channels=st.integers(1, 3), out=st.integers(1, 4), size=st.integers(3, 7), kernel=st.integers(1, 3),
    stride=st.integers(1, 2), groups=st.sampled_from([1, 2]),
)  # fmt: skip
def test_convolution_and_matrix_products_equal_torchs_counter(batch, channels, out, size, kernel, stride, groups) -> None:
    conv = torch.nn.Conv2d(channels * groups, out * groups, kernel, stride=stride, groups=groups)
    x = torch.randn(batch, channels * groups, size, size, requires_grad=True)

    def step() -> None:
        y = conv(x).flatten(1)
        (y @ torch.ones(y.shape[1], 2)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    x.grad = None
    assert sum(w.flops for _, w in works(step)) == counter.get_total_flops() > 0


@given(b=st.integers(1, 3), heads=st.integers(1, 3), rows=st.integers(1, 5), columns=st.integers(1, 5), d=st.integers(1, 4), dv=st.integers(1, 4))
def test_attention_is_the_sum_of_its_matrix_products(b, heads, rows, columns, d, dv) -> None:
    q, k, v = torch.ones(b, heads, rows, d), torch.ones(b, heads, columns, d), torch.ones(b, heads, columns, dv)
    for x in (q, k, v):
        x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        scores = q @ k.transpose(-1, -2)
        out = scores @ v
    forward = counter.get_total_flops()
    assert attention_flops(q.shape, k.shape, v.shape) == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    again = 2 * b * heads * rows * columns * d  # the fused kernel does not keep the scores
    assert attention_backward_flops(q.shape, k.shape, v.shape) == counter.get_total_flops() + again


def test_the_processors_attention_is_counted_and_its_mask_noted() -> None:
    q = torch.randn(2, 3, 8, 4, requires_grad=True)
    seen = []
    with DispatchRecorder(lambda f, a, k, r: seen.append((f, a, k, flops_of(f, a, k, r)))):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    attention = {str(f): (flops, is_causal(f, a, k)) for f, a, k, flops in seen if "flash_attention" in str(f)}
    assert attention == {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": (2 * 6 * 64 * 8, True),
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (2 * 6 * 64 * 20, True),
    }
    assert not is_causal(aten.add.Tensor, (q, q), {}) and not is_causal(len, (), {})


def test_views_cost_nothing_and_operands_count_by_storage() -> None:
    x, row = torch.ones(4, 8), torch.ones(8)
    size = 4 * 4 * 8
    for view in (lambda: x.t(), lambda: x.view(8, 4), lambda: x[1:3], lambda: x.expand(2, 4, 8), lambda: x.unbind(0)):
        assert {w for _, w in works(view)} <= {Work()}
    w = works(lambda: x + x)[-1][1]
    assert w == Work(bytes_read=size, bytes_written=size, calls=1)
    w = works(lambda: x[:2] + x[2:])[-1][1]
    assert (w.bytes_read, w.bytes_written) == (size, size // 2)
    assert works(lambda: x + row.expand(4, 8))[-1][1].bytes_read == size + 32
    w = works(lambda: x.add_(1.0))[-1][1]
    assert (w.bytes_read, w.bytes_written) == (size, size)
    w = works(lambda: x.zero_())[-1][1]
    assert (w.bytes_read, w.bytes_written) == (0, size)
    w = works(lambda: x.copy_(row.expand(4, 8)))[-1][1]
    assert (w.bytes_read, w.bytes_written) == (32, size)
    assert works(lambda: torch.empty(5))[-1][1] == Work(calls=1)


def test_lookups_count_touched_rows_only() -> None:
    table, index = torch.randn(1000, 16), torch.tensor([[1, 2, 2], [5, 1, 0]])
    w = next(w for name, w in works(lambda: torch.nn.functional.embedding(index, table)) if "embedding" in name)
    assert (w.bytes_read, w.bytes_written) == (6 * 64 + 48, 6 * 64)
    w = next(w for name, w in works(lambda: torch.nn.functional.embedding_bag(index, table, mode="sum")) if "embedding_bag" in name)
    assert w.flops == 6 * 16 and w.bytes_read == 6 * 64 + 48 + 16
    table.requires_grad_()
    calls = works(lambda: torch.nn.functional.embedding_bag(index, table, mode="sum", sparse=True).sum().backward())
    assert max(w.bytes_written for _, w in calls) < 1000 * 16 * 4
    assert table.grad.is_sparse


@pytest.mark.parametrize("name", ["add.Tensor", "mm.default", "native_layer_norm.default", "_softmax.default", "view.default", "clone.default"])
def test_common_operators_need_no_note(name: str) -> None:
    packet, overload = name.split(".")
    assert not lacks_formula(getattr(getattr(aten, packet), overload))


@pytest.mark.parametrize("name", ["linalg_svd.default", "_fft_r2c.default", "cholesky.default", "_cdist_forward.default"])
def test_operators_with_arithmetic_and_no_formula_are_named(name: str) -> None:
    packet, overload = name.split(".")
    target = getattr(getattr(aten, packet), overload)
    assert lacks_formula(target) and flops_of(target, (), {}, None) == 0
