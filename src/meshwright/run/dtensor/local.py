"""One operator on one rank's pieces: the captured call with its constants divided, or a call of our own where the pieces must talk to each other.

A call whose pieces talk to each other is a generator: it yields what is to be added up over a mesh axis (`Summand`) and is sent the sum; the
exchanges are those of `lower.sharding.inside`, which the program makes.

Own calls: means and losses (scaled to the whole's count), cross-entropy over a split vocabulary, batch norm over a split batch, embeddings by rows of
the table, dropout (the mask of the whole tensor, drawn from a generator seeded by (seed, step, node), cut to the piece: the same mask whatever the
layout). Other random operators run under such a seed too, whole.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...graph.graph import operator_name
from ...plan.sbp import local_slices, split_of
from ..steps.forward_graph import argument_of
from .pieces import Place

__all__ = ["LocalCall", "Slot", "Step", "Summand", "run_local"]

Shape = tuple[int, ...]
State = tuple[str, ...]


@dataclass(frozen=True)
class LocalCall:
    """A node of the traced graph with everything about its pieces. `letters`: per axis the dimension the plan splits, for exchanges inside."""

    name: str
    target: Any
    target_name: str
    args: tuple[Any, ...]  # tensor operands are `Slot(i)`
    kwargs: dict[str, Any]
    shapes: tuple[Shape, ...]  # of the whole operands
    outputs: tuple[Shape, ...]
    inputs: tuple[State, ...]
    output: State
    random: bool
    mutates_buffer: bool

    @cached_property
    def operator(self) -> str:
        return operator_name(self.target_name)

    @cached_property
    def function(self) -> Any:
        """What computes it. Raises: Unsupported for an in-place operator without a twin."""
        return self.target if self.mutates_buffer else _out_of_place(self.target)

    @cached_property
    def filled(self) -> Callable[[Sequence[Any]], Any]:
        """(args, kwargs) with operands in their slots."""
        both = (self.args, self.kwargs)
        return _filler(both) or (lambda operands: both)

    def argument(self, name: str) -> Any:
        return argument_of(self.target, self.args, self.kwargs, name)

    def split_axes(self, operand: int, dim: int, place: Place) -> tuple[int, ...]:
        """Mesh axes of several devices that split dimension `dim` of an operand."""
        found = [(axis, split_of(kind)) for axis, kind in enumerate(self.inputs[operand])]
        return tuple(axis for axis, split in found if split is not None and split[0] == dim and place.sizes[axis] > 1)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor operand in an argument list."""

    index: int


@dataclass(frozen=True)
class Summand:
    """What is to be added up (or combined by maximum) over a mesh axis."""

    x: Tensor
    axis: int


Talk = Generator[Summand, Tensor, Tensor]


@dataclass
class Step:
    """What random draws depend on."""

    seed: int
    step: int

    def generator(self, name: str, device: Any) -> torch.Generator:
        number = (self.seed * 1_000_003 + self.step) * 4_294_967_311 + zlib.crc32(name.encode())
        return torch.Generator(device=device).manual_seed(number % (1 << 63))


def run_local(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    """The rank's piece of the result, or a generator that gives it. Raises: Unsupported where pieces cannot be computed as planned."""
    name = call.operator
    own = _OWN.get(name)
    if own is not None:
        found = own(call, operands, place, draws)
        if found is not NotImplemented:
            return found
    if name in _SHAPED:
        return operands[0].reshape(place.local(call.outputs[0], call.output))
    if name == "expand":
        return operands[0].expand(place.local(call.outputs[0], call.output))
    if name in ("split", "split_with_sizes"):
        dim = int(call.argument("dim")) % len(call.shapes[0])
        return torch.split(operands[0], [place.local(o, call.output)[dim] for o in call.outputs], dim)
    args, kwargs = call.filled(operands)
    if call.random:
        return _seeded(call.function, args, kwargs, operands, draws, call.name)
    return call.function(*args, **kwargs)


_SHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")


def _filler(args: Any) -> Callable[[Sequence[Any]], Any] | None:
    """Makes arguments of operands; None where they hold none."""
    if isinstance(args, Slot):
        return operator.itemgetter(args.index)
    if not isinstance(args, (list, tuple, dict)):
        return None
    places = [(i, made) for i, x in (args.items() if isinstance(args, dict) else enumerate(args)) if (made := _filler(x)) is not None]
    kind, open_ = type(args), dict if isinstance(args, dict) else list

    def fill(operands: Sequence[Any]) -> Any:
        found: Any = open_(args)
        for i, made in places:
            found[i] = made(operands)
        return kind(found)

    return fill if places else None


def _out_of_place(target: Any) -> Any:
    """`aten.relu_.default` -> `aten.relu.default`: pieces may be shared with the value they came from."""
    schema = getattr(target, "_schema", None)
    if target is operator.getitem or schema is None or not schema.is_mutable:
        return target
    packet = getattr(torch.ops.aten, schema.name.partition("::")[2].rstrip("_"), None)
    if packet is None or target._overloadname not in packet.overloads():
        raise Unsupported(f"the in-place operator {target} has no twin out of place", hint="write it out of place in the model")
    return getattr(packet, target._overloadname)


def _seeded(target: Any, args: Any, kwargs: Any, operands: Sequence[Any], draws: Step, name: str) -> Any:
    devices = sorted({x.device.index or 0 for x in operands if isinstance(x, Tensor) and x.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(draws.generator(name, "cpu").initial_seed())
        return target(*args, **kwargs)


# ---- own calls -------------------------------------------------------------------------------------------------------
def _mean(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    args, kwargs = call.filled(operands)
    found = call.target(*args, **kwargs)
    local = place.local(call.shapes[0], call.inputs[0]), place.local(call.outputs[0], call.output)
    have = prod(local[0]) * prod(call.outputs[0])
    want = prod(call.shapes[0]) * prod(local[1])
    return found if have == want else found * (have / want)


def _mean_loss(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    """mse, l1, ...: a mean over all entries."""
    args, kwargs = call.filled(operands)
    found = call.target(*args, **kwargs)
    if call.outputs[0] != () or call.argument("reduction") != 1:
        return found
    have, want = prod(place.local(call.shapes[0], call.inputs[0])), prod(call.shapes[0])
    return found if have == want else found * (have / want)


_MEAN_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


def _dropout(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    x, p = operands[0], float(call.argument("p"))
    if not call.argument("train") or p == 0.0:
        return x
    whole = torch.rand(call.outputs[0], generator=draws.generator(call.name, x.device), device=x.device, dtype=torch.float32)
    keep = whole >= p
    for dim, runs in enumerate(local_slices(call.outputs[0], call.output, place.sizes, place.at)):
        keep = torch.cat([keep.narrow(dim, a, b - a) for a, b in runs], dim)
    return x * (keep.to(x.dtype) / (1.0 - p)) if p < 1.0 else x * keep.to(x.dtype)


def _embedding(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    axes = call.split_axes(0, 0, place)
    if not axes:
        return NotImplemented
    weight, ids = operands
    (run,) = local_slices(call.shapes[0], call.inputs[0], place.sizes, place.at)[0]
    padding = int(call.argument("padding_idx"))
    outside = (ids < run[0]) | (ids >= run[1])
    inside = (ids - run[0]).clamp(0, run[1] - run[0] - 1)
    here = padding - run[0] if run[0] <= padding < run[1] else -1
    return torch.ops.aten.embedding.default(weight, inside, here).masked_fill(outside.unsqueeze(-1), 0.0)


def _batch_norm(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    axes = call.split_axes(0, 0, place)
    if not axes or not call.argument("training"):
        return NotImplemented
    return _talking_batch_norm(call, operands, axes)


def _talking_batch_norm(call: LocalCall, operands: Sequence[Any], axes: Sequence[int]) -> Talk:
    args, _ = call.filled(operands)
    x, weight, bias, running_mean, running_var = args[:5]
    momentum, eps = float(call.argument("momentum")), float(call.argument("eps"))
    over = [0, *range(2, x.dim())]
    count = prod(call.shapes[0]) // call.shapes[0][1]
    view = (1, -1) + (1,) * (x.dim() - 2)
    mean = (yield from _summed(x.sum(over), axes)) / count
    centred = x - mean.view(view)
    var = (yield from _summed((centred * centred).sum(over), axes)) / count
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.detach(), alpha=momentum)
            running_var.mul_(1 - momentum).add_(var.detach(), alpha=momentum * count / max(1, count - 1))
    found = centred * torch.rsqrt(var + eps).view(view)
    if weight is not None:
        found = found * weight.view(view)
    return found + bias.view(view) if bias is not None else found


def _summed(x: Tensor, axes: Sequence[int]) -> Talk:
    for axis in axes:
        x = yield Summand(x, axis)
    return x


class _VocabularyLoss(torch.autograd.Function):  # type: ignore[misc]
    """Sum over rows of the cross-entropy, the classes split over mesh axes, from the maxima of all rows and their sums over all classes."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, top: Tensor, sums: Sequence[Tensor], index: Tensor, here: Tensor, counts: Tensor, classes: int, smoothing: float
    ) -> Tensor:  # fmt: skip
        total, own, *rest = sums
        rows = total.log() - (1 - smoothing) * own - (smoothing / classes * rest[0] if smoothing else 0.0)
        ctx.save_for_backward((logits - top[:, None]).exp() / total[:, None], index, here, counts)
        ctx.smoothing, ctx.classes = smoothing, classes
        return torch.where(counts, rows, rows.new_zeros(())).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        softmax, index, here, counts = ctx.saved_tensors
        found = softmax - ctx.smoothing / ctx.classes if ctx.smoothing else softmax.clone()
        found.scatter_add_(1, index[:, None], -(1 - ctx.smoothing) * here.to(found.dtype)[:, None])
        return (found * counts.to(found.dtype)[:, None] * gradient, *(None,) * 7)


def _vocabulary_loss(call: LocalCall, logits: Tensor, target: Tensor, counts: Tensor, smoothing: float, place: Place) -> Talk:
    """Maxima are exchanged, then two numbers per row, or three with smoothing."""
    axes = call.split_axes(0, 1, place)
    (run,) = local_slices(call.shapes[0], call.inputs[0], place.sizes, place.at)[1]
    known = logits.detach()
    top = yield from _summed(known.max(dim=1).values, axes)
    shifted = known - top[:, None]
    here = (target >= run[0]) & (target < run[1])
    index = (target - run[0]).clamp(0, logits.shape[1] - 1)
    own = torch.where(here, shifted.gather(1, index[:, None]).squeeze(1), shifted.new_zeros(()))
    sums = [shifted.exp().sum(1), own, *([shifted.sum(1)] if smoothing else [])]
    packed = yield from _summed(torch.cat(sums), axes)
    loss: Tensor = _VocabularyLoss.apply(logits, top, packed.chunk(len(sums)), index, here, counts, call.shapes[0][1], smoothing)
    return loss


def _cross_entropy(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    logits, target = operands
    if not call.split_axes(0, 0, place) and not call.split_axes(0, 1, place):
        return NotImplemented
    smoothing = float(call.argument("label_smoothing"))
    if target.is_floating_point():
        loss = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
        return loss / call.shapes[0][0] if int(call.argument("reduction")) == 1 else loss
    return _talking_cross_entropy(call, logits, target, smoothing, place)


def _talking_cross_entropy(call: LocalCall, logits: Tensor, target: Tensor, smoothing: float, place: Place) -> Talk:
    ignore = int(call.argument("ignore_index"))
    counts = target != ignore
    if call.split_axes(0, 1, place):
        loss = yield from _vocabulary_loss(call, logits, target, counts, smoothing, place)
    else:
        loss = F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore, label_smoothing=smoothing)
    if int(call.argument("reduction")) == 2:
        return loss
    count = yield from _summed(counts.sum().reshape(1), call.split_axes(0, 0, place))
    return loss / count.to(loss.dtype).squeeze()


def _attention(call: LocalCall, operands: Sequence[Any], place: Place, draws: Step) -> Any:
    """Rows of a causal mask by their own numbers; keys behind the last of them are not looked at."""
    dim = len(call.shapes[0]) - 2
    if not call.argument("is_causal") or not call.split_axes(0, dim, place):
        return NotImplemented
    query, key, value = operands
    runs = local_slices(call.shapes[0], call.inputs[0], place.sizes, place.at)[dim]
    rows = torch.cat([torch.arange(a, b, device=query.device) for a, b in runs])
    seen = max((b for _, b in runs), default=0)
    mask = torch.arange(seen, device=query.device) <= rows[:, None]
    return F.scaled_dot_product_attention(
        query, key.narrow(dim, 0, seen), value.narrow(dim, 0, seen), mask, scale=call.argument("scale"),
        enable_gqa=bool(call.argument("enable_gqa")),
    )  # fmt: skip


_OWN = {
    "scaled_dot_product_attention": _attention,
    "mean": _mean, "dropout": _dropout, "embedding": _embedding, "batch_norm": _batch_norm, "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(_MEAN_LOSSES, _mean_loss),
}  # fmt: skip
