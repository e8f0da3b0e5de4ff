"""A GPU's autocast on processors, against torch's own lists and against its kernels on fake tensors that say that they lie on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from meshwright.capture import gpu_casts as room
from meshwright.capture.gpu_casts import FLOAT32, FLOAT32_RESULT, NARROW, NORMS, WIDEST, gpu_casts
from meshwright.capture.precision import cast_as, casting
from meshwright.capture.torch_private import FakeTensorMode
from meshwright.drive.plans import read_fabric
from meshwright.errors import UnknownName
from meshwright.job import Recipe, Training

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
KINDS = (torch.float32, torch.bfloat16, torch.float64)


def listed(macro: str) -> set[str]:
    """Operators of a list in torch's header."""
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text())
    assert body is not None
    return {f"{name}.{overload}" if overload else name for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])}


def test_the_lists_are_those_of_this_torch():
    assert {*NARROW} == listed("LOWER_PRECISION_FP") and {*FLOAT32} == listed("FP32")
    assert {*FLOAT32_RESULT} == listed("FP32_SET_OPT_DTYPE") and {*WIDEST} == listed("PROMOTE")
    assert {*NORMS} == {*re.findall(r'"(norm\.\w+)"', HEADER.read_text())}


def matrix(x):
    return x.new_ones(6, 8)


CALLS = {
    "linear": lambda x: F.linear(x, x), "matmul": lambda x: x @ matrix(x).T, "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv": lambda x: F.conv1d(x[None], x[:, :, None].transpose(0, 1).repeat(1, 1, 1)[:, :6]), "addmm": lambda x: torch.addmm(x[:, :6], x, x.T),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "layer_norm": lambda x: F.layer_norm(x, (8,)), "rms_norm": lambda x: F.rms_norm(x, (8,)), "exp": torch.exp, "pow": lambda x: x**2,
    "softplus": F.softplus, "rsqrt": torch.rsqrt, "l1": lambda x: F.l1_loss(x, matrix(x)), "cosine": lambda x: F.cosine_similarity(x, matrix(x)),
    "entropy": lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.int64, device=x.device)), "cdist": lambda x: torch.cdist(x, x),
    "softmax": lambda x: x.softmax(-1), "softmax, typed": lambda x: x.softmax(-1, dtype=torch.bfloat16), "sum": lambda x: x.sum(),
    "sum over": lambda x: x.sum(-1), "cumsum": lambda x: x.cumsum(0), "prod": lambda x: x.prod(),
    "vector norm": lambda x: torch.linalg.vector_norm(x),
    "norm": lambda x: torch.norm(x, 2), "norm over": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1], False), "dot": lambda x: x[0] @ x[1],
    "addcmul": lambda x: torch.addcmul(x, matrix(x), matrix(x).float()), "atan2": lambda x: torch.atan2(x, matrix(x).bfloat16()),
    "gelu": F.gelu, "relu": F.relu, "add": lambda x: x + matrix(x).float(), "mean": lambda x: x.mean(), "batch norm": lambda x: F.batch_norm(
        x, torch.zeros(8, device=x.device), torch.ones(8, device=x.device), training=True),
    "bilinear": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"), "cat": lambda x: torch.cat([x, matrix(x).float()]),
    "prelu": lambda x: F.prelu(x, x.new_ones(1)), "log_softmax": lambda x: x.log_softmax(0), "mse": lambda x: F.mse_loss(x, matrix(x)),
}  # fmt: skip


def kinds_of(x):
    """By call; of a few there is no trial without a GPU, and two go with no double precision."""
    found = {}
    for name, call in CALLS.items():
        try:
            found[name] = call(x).dtype
        except RuntimeError as error:
            assert "not linked with support for cuda" in str(error) or x.dtype is torch.float64, (name, error)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_types_are_those_of_torch_on_a_gpu(kind):
    """torch's kernels for GPUs are in every build; without a GPU they run on fake tensors."""
    with FakeTensorMode():
        here, there = torch.empty(6, 8, dtype=kind), torch.empty(6, 8, dtype=kind, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            expected = kinds_of(there)
        finally:
            torch.set_autocast_enabled("cuda", False)
        with gpu_casts(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = kinds_of(here)
        plain = kinds_of(here)
    assert {n: found[n] for n in expected} == expected and len(expected) >= len(CALLS) - 6
    assert kind is torch.float64 or found != plain


def test_afterwards_and_elsewhere_processors_cast_as_before():
    x = torch.randn(4, 8).bfloat16()

    def kinds():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.layer_norm(x, (8,)).dtype, x.softmax(-1).dtype, (x.float() @ x.float().T).dtype

    before = kinds()
    with gpu_casts():
        inside = kinds()
        with gpu_casts():
            assert kinds() == inside
        assert kinds() == inside
        assert F.layer_norm(x, (8,)).dtype is torch.bfloat16, "without autocast nothing is cast"
    assert kinds() == before != inside and inside == (torch.float32, torch.float32, torch.bfloat16)
    assert not room._libraries


def test_what_a_gpu_refuses_is_refused():
    with gpu_casts(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(torch.rand(3), torch.rand(3))


def test_gradients_go_through():
    x = torch.randn(4, 8, requires_grad=True)
    with casting("bf16-autocast:cuda"):
        y = F.layer_norm(x @ torch.eye(8), (8,)).square().sum()
    y.backward()
    assert y.dtype is torch.float32 and x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_plans_for_gpus_are_made_with_their_list():
    job = Training(model="m", global_batch=4, recipe=Recipe(precision="bf16-autocast"))
    assert cast_as(job, read_fabric("dgx-h100:1")).asked.autocast == "bf16-autocast:cuda"
    assert cast_as(job, read_fabric("laptop:2")) == job and job.asked.autocast == "bf16-autocast"
    plain = Training(model="m", global_batch=4)
    assert cast_as(plain, read_fabric("dgx-h100:1")) == plain
    with pytest.raises(UnknownName, match="no list of casts 'tpu'"):
        casting("bf16-autocast:tpu")
