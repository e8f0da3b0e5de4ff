"""Other implementations of a step's operators, for real: packed signs, masks and argmax, in place, from the output, narrower saves,
copies on the host.

Registered in `VARIANTS` (`run.steps.step`), where the plan's alternatives are looked up: fixed ones by operator when this module is imported, the
general
ones ("operand": the plain call with other operands, unpacked first) by `register`, for the targets of one step graph.
Lossless ones give the same bits as the plain operator; "inverse" is exact up to rounding, "bf16" and "int8" are lossy.
Source: the card of MONeT, section 3.6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from ...errors import Unsupported
from ...graph.step_graph import StepGraph, plain_target, replaced_target, replacement
from ...kernels.packed import clear_unless, pack_bits, pack_offsets, pack_signs, pass_where, unpack_bits
from . import norms_apart
from .pieces import arguments, in_pieces, pool_gradient
from .step import VARIANTS, Variants

__all__ = ["BINARY", "BLOCK_ELEMENTS", "MIN_WEIGHT", "Packed", "register"]

BLOCK_ELEMENTS = 256  # elements that share one scale in int8
MIN_WEIGHT = 1e-3  # a normalisation is not inverted when one of its weights is nearer to 0

aten = torch.ops.aten


class Packed(NamedTuple):
    """Another form of a tensor of this shape and dtype. `kind`: bits, bf16, int8, or host: the same bytes outside the device's memory."""

    kind: str
    data: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def _flat(x: torch.Tensor) -> np.ndarray:
    if x.device.type != "cpu":
        hint = "plan memory with --implementations plain, or the job without --memory"
        raise Unsupported(f"values are packed on processors only, not on {x.device}", where="packed values", hint=hint)
    flat: np.ndarray = x.reshape(-1).numpy()
    return flat


def _bits_of(flags: torch.Tensor) -> torch.Tensor:
    bits = torch.empty(-(-flags.numel() // 8), dtype=torch.uint8)
    pack_bits(_flat(flags.contiguous()).view(np.uint8), bits.numpy())
    return bits


def mask_bits(x: torch.Tensor) -> Packed:
    """A mask of bool, one bit each."""
    return Packed("bits", _bits_of(x), None, tuple(x.shape), x.dtype)


def sign_bits(y: torch.Tensor) -> torch.Tensor:
    """Where a ReLU's output (or input) lets the gradient through: not <= 0, as the plain operator asks."""
    bits = torch.empty(-(-y.numel() // 8), dtype=torch.uint8)
    pack_signs(_flat(y.contiguous()), bits.numpy())
    return bits


def bf16(x: torch.Tensor) -> Packed:
    return Packed("bf16", x.to(torch.bfloat16), None, tuple(x.shape), x.dtype)


def int8(x: torch.Tensor) -> Packed:
    """Blocks of `BLOCK_ELEMENTS` elements, each with its largest magnitude as scale."""
    n = x.numel()
    padded = torch.nn.functional.pad(x.reshape(-1), (0, -n % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    scale = padded.abs().amax(1).clamp_min_(torch.finfo(x.dtype).tiny) / 127
    data = (padded / scale.unsqueeze(1)).round_().to(torch.int8)
    return Packed("int8", data, scale, tuple(x.shape), x.dtype)


def host(x: torch.Tensor) -> Packed:
    """The same values in the host's memory: pinned for an accelerator, whose stream the copy joins; on a processor outside torch's allocator, which
    stands for the device."""
    if x.device.type == "cpu":
        data = torch.from_numpy(np.empty(x.numel() * x.element_size(), np.uint8)).view(x.dtype).view(x.shape)
        return Packed("host", data.copy_(x), None, tuple(x.shape), x.dtype)
    data = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return Packed("host", data.copy_(x, non_blocking=True), None, tuple(x.shape), x.dtype)


def unpacked(x: Any, device: torch.device | None = None) -> Any:
    """What was packed, as it was; `device`: where that is if it went to the host."""
    if not isinstance(x, Packed):
        return x
    if x.kind == "host":
        found = torch.empty(x.shape, dtype=x.dtype, device=device)
        return found.copy_(x.data, non_blocking=True)
    if x.kind == "bits":
        flags = torch.empty(x.shape, dtype=torch.bool)
        unpack_bits(x.data.numpy(), _flat(flags).view(np.uint8))
        return flags
    if x.kind == "bf16":
        return x.data.to(x.dtype)
    wide = x.data.to(x.dtype).mul_(x.scale.unsqueeze(1))  # type: ignore[union-attr]
    return wide.view(-1)[: int(np.prod(x.shape))].view(x.shape)


def operand(call: fx.Node, *inputs: Any) -> Any:
    """The plain call on these operands instead of its own, in the same order."""
    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
    given = dict(zip(call.all_input_nodes, (unpacked(x, device) for x in inputs), strict=True))
    args, kwargs = fx.node.map_arg((call.args, call.kwargs), given.__getitem__)
    function: Any = call.target
    return function(*args, **kwargs)


def relu_gradient(call: fx.Node, gradient: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    gradient = gradient.contiguous()
    out = torch.empty_like(gradient)
    pass_where(bits.numpy(), _flat(gradient), _flat(out))
    return out


def relu_over_gradient(call: fx.Node, gradient: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    clear_unless(bits.numpy(), _flat(gradient).view(np.int32 if gradient.dtype == torch.float32 else np.int64))
    return gradient


def over_operand(call: fx.Node, *inputs: torch.Tensor, function: Callable[..., torch.Tensor], position: int) -> torch.Tensor:
    """A sum, product, difference or quotient into one of its terms."""
    terms = arguments(call, inputs)[:2]
    return function(*terms, **call.kwargs, out=terms[position])


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(call: fx.Node, x: torch.Tensor) -> torch.Tensor:
        return function(x, *call.args[1:], **call.kwargs)

    return run


def _over_gradient(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(call: fx.Node, gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return function(gradient, value, *call.args[2:], **call.kwargs, grad_input=gradient)

    return run


def layer_norm_inverse(call: fx.Node, gradient: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> Any:
    """native_layer_norm_backward from the output: x = (y - bias) / weight / rstd + mean."""
    mean, rstd, weight, bias = others
    return operand(call, gradient, (y - bias).div_(_safe(weight)).div_(rstd).add_(mean), *others)


def batch_norm_inverse(call: fx.Node, gradient: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> Any:
    """native_batch_norm_backward from the output; the last operand is the bias, which the plain call does not read."""
    *rest, bias = others
    mean, rstd = rest[-2:]
    wide = [1, -1] + [1] * (y.dim() - 2)
    x = (y - bias.view(wide)).div_((_safe(weight) * rstd).view(wide)).add_(mean.view(wide))
    return operand(call, gradient, x, weight, *rest)


def group_norm_inverse(call: fx.Node, gradient: torch.Tensor, y: torch.Tensor, mean: torch.Tensor, *others: torch.Tensor) -> Any:
    rstd, weight, bias = others
    n, groups = mean.shape
    wide = [1, -1] + [1] * (y.dim() - 2)
    x = (y - bias.view(wide)).div_(_safe(weight).view(wide)).view(n, groups, -1).div_(rstd.unsqueeze(2)).add_(mean.unsqueeze(2)).view(y.shape)
    return operand(call, gradient, x, mean, rstd, weight)


def _safe(weight: torch.Tensor) -> torch.Tensor:
    """Raises: ValueError (the runner says for which node) for a weight near 0, by which the output cannot be inverted."""
    least = float(weight.abs().min())
    if least < MIN_WEIGHT:
        raise ValueError(f"a weight of magnitude {least:.3g} cannot be divided by: plan without inverse implementations")
    return weight


def _pool(target: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers in a target `meshwright.pool_argmax:...`: geometry, output size, input size."""
    numbers = np.array([int(x) for x in target.split(":")[1:]], np.int64)
    return numbers[:8], numbers[8:10], numbers[10:12]


def _pool_packer(target: str) -> Callable[..., torch.Tensor]:
    geometry, outside, inside = _pool(target)

    def pack(indices: torch.Tensor) -> torch.Tensor:
        packed = torch.empty(-(-indices.numel() // 2), dtype=torch.uint8)
        pack_offsets(_flat(indices.contiguous()), packed.numpy(), geometry, outside, inside)
        return packed

    return pack


IN_PLACE = {"aten.relu.default": torch.relu_, "aten.sigmoid.default": torch.sigmoid_, "aten.tanh.default": torch.tanh_,
            "aten.hardtanh.default": torch.nn.functional.hardtanh_}  # fmt: skip
OVER_GRADIENT = {
    "aten.threshold_backward.default": aten.threshold_backward.grad_input, "aten.sigmoid_backward.default": aten.sigmoid_backward.grad_input,
    "aten.tanh_backward.default": aten.tanh_backward.grad_input, "aten.hardtanh_backward.default": aten.hardtanh_backward.grad_input,
    "aten.gelu_backward.default": aten.gelu_backward.grad_input, "aten.silu_backward.default": aten.silu_backward.grad_input,
}  # fmt: skip
BINARY: dict[str, Callable[..., torch.Tensor]] = {  # aten's out variants: torch's own do not take a scalar first
    "aten.add.Tensor": aten.add.out, "aten.sub.Tensor": aten.sub.out, "aten.mul.Tensor": aten.mul.out, "aten.div.Tensor": aten.div.out,
}  # fmt: skip
INVERSE: dict[str, Callable[..., Any]] = {
    "aten.native_layer_norm_backward.default": layer_norm_inverse, "aten.native_batch_norm_backward.default": batch_norm_inverse,
    "aten.native_group_norm_backward.default": group_norm_inverse,
}  # fmt: skip
NARROW: dict[str, Callable[..., Any]] = {"mask_bits": mask_bits, "sign_bits": sign_bits, "bf16": bf16, "int8": int8, "host": host}

for _name, _pack in NARROW.items():
    VARIANTS.optional[f"meshwright.{_name}"] = _pack
for _target, _function in IN_PLACE.items():
    VARIANTS.alternatives[_target, "in_place"] = _in_place(_function)
for _target, _function in OVER_GRADIENT.items():
    VARIANTS.alternatives[_target, "over_gradient"] = _over_gradient(_function)
for _target, _function in INVERSE.items():
    VARIANTS.alternatives[_target, "inverse"] = _function
for _target in norms_apart.BATCH_NORMS:
    VARIANTS.alternatives[_target, norms_apart.APART] = norms_apart.statistics
    _whole = replaced_target(_target, norms_apart.APART)
    VARIANTS.joined[_whole, replaced_target("operator.getitem", norms_apart.FROM_STATISTICS)] = norms_apart.both
VARIANTS.alternatives["operator.getitem", norms_apart.FROM_STATISTICS] = norms_apart.from_statistics
VARIANTS.alternatives["aten.threshold_backward.default", "sign_bits"] = relu_gradient
VARIANTS.alternatives["aten.threshold_backward.default", "sign_bits over"] = relu_over_gradient
for _target, _function in BINARY.items():
    for _position in (0, 1):
        VARIANTS.alternatives[_target, f"over {_position}"] = partial(over_operand, function=_function, position=_position)

GENERAL = ("operand", "mask_bits", "bf16", "int8", "host")  # of any operator: its plain call on other operands, unpacked first


def register(graph: StepGraph, variants: Variants = VARIANTS) -> Variants:
    """Adds what this graph's alternatives need and no fixed table has: general ones by target, pooling by its geometry."""
    for n in graph.nodes:
        if n.optional and n.target.startswith("meshwright.pool_argmax:"):
            variants.optional[n.target] = _pool_packer(n.target)
        target = plain_target(n.target)
        for name in (*(a.name for a in n.alternatives), replacement(n.target)):
            kind = name.partition(" ")[0]
            if kind in GENERAL:
                variants.alternatives.setdefault((target, name), operand)
            elif kind.startswith("meshwright.pool_argmax:"):
                variants.alternatives[target, name] = pool_gradient
            elif (found := in_pieces(target, name)) is not None:
                variants.alternatives[target, name] = found
    return variants
