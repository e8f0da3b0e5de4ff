"""Random masks that do not depend on who draws them: the same element gets the same bit in every layout, and again when recomputed.

A bit is a hash of (seed, number of the random call in the model, global sample, element within the sample): a counter-based generator, after
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC '11); the mixing function is splitmix64's (Steele et al., OOPSLA '14).
So a rank of a tensor-parallel group draws its slice of a split tensor and all ranks draw equal masks for whole ones, a data replica or a pipeline
stage draws the masks of its samples, and a backward pass that computes a segment again finds the masks it had. In traced segments drawing is one
operator, `meshwright::keep_mask`, a function of the tensor that `Draws.tensor` gives.
Left open by Megatron-LM (which keeps one generator per purpose and rank, so that a run differs from the serial one): equality with the
serial run. Here `SerialDraws` gives plain eager training the same bits.
Invariant: dimension 0 of a tensor that depends on the job's inputs counts samples, or samples times something.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import Unsupported
from ..steps.forward_graph import ForwardGraph, ForwardNode

__all__ = [
    "Draws", "PlacesUnknown", "RandomPlace", "SerialDraws", "draw_function", "draws_bits", "keep_mask", "random_places", "traced_mask",
]  # fmt: skip

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
MAX_ELEMENTS_AT_ONCE = 1 << 20  # elements hashed at a time: temporaries are eight bytes each
_FAMILY = ("dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@dataclass
class Draws:
    """What is being computed: set before a segment runs. `samples`: first global sample of the micro-batch and how many it has.

    `traced`: while a segment is traced, what stands for `tensor()`.
    """

    seed: int = 0
    step: int = 0
    first: int = 0
    samples: int = 1
    traced: torch.Tensor | None = field(default=None, compare=False)

    def tensor(self) -> torch.Tensor:
        """The four numbers, for `traced_mask`."""
        return torch.tensor([self.seed, self.step, self.first, self.samples])


@dataclass(frozen=True)
class RandomPlace:
    """A random call: its number among those of the model, and whether what it draws for depends on the job's inputs."""

    number: int
    batched: bool


def _base(*words: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little", signed=True)


def keep_mask(
    draws: Draws, place: RandomPlace, keep: float, whole: Sequence[int], ranges: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> torch.Tensor:
    """Bits that are True with probability `keep`, for the elements of `ranges` (one list of [start, stop) per dimension) of a tensor of
    shape `whole`."""
    rank = len(whole)
    own = [torch.cat([torch.arange(a, b, device=device) for a, b in parts]) for parts in ranges]
    strides = [math.prod(whole[d + 1 :]) for d in range(rank)]
    batched = place.batched and rank > 0 and whole[0] % draws.samples == 0
    if batched:
        per = whole[0] // draws.samples
        bases = [_base(draws.seed, place.number, draws.first + i) for i in range(draws.samples)]
        # A number for each sample of the whole run, not of this batch: whoever has the sample, in whatever micro-batch, draws the same bits.
        first = torch.tensor(bases, device=device)[own[0] // per] + (own[0] % per) * strides[0] * GOLDEN
    else:
        base = _base(draws.seed, place.number, -1, draws.step)
        first = torch.full([len(own[0])] if rank else [], base, device=device)
        if rank:
            first = first + own[0] * strides[0] * GOLDEN
    shape = [len(o) for o in own]
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    rows = max(1, MAX_ELEMENTS_AT_ONCE // max(1, math.prod(shape[1:])))
    # The low 32 bits are uniform, so this share of them lies below the limit: an element is kept with probability `keep` to 2^-33.
    limit = round((1.0 - keep) * (1 << 32))
    for at in range(0, shape[0] if rank else 1, rows):
        part = slice(at, at + rows) if rank else ...
        x = first[part].reshape([-1, *[1] * (rank - 1)] if rank else [])
        for d in range(1, rank):
            # Sums wrap at 64 bits, which is the hash's arithmetic: index times the odd constant, whatever part of the tensor is asked for.
            x = x + (own[d] * strides[d] * GOLDEN).reshape([-1 if i == d else 1 for i in range(rank)])
        mask[part] = (_mixed(x) & 0xFFFFFFFF) >= limit
    return mask


def traced_mask(
    draws: torch.Tensor, place: RandomPlace, keep: float, whole: Sequence[int], ranges: Sequence[Sequence[tuple[int, int]]]
) -> torch.Tensor:
    """As `keep_mask`, as one operator that tracing sees; `draws`: of `Draws.tensor`."""
    counts, ends = [len(parts) for parts in ranges], [end for parts in ranges for pair in parts for end in pair]
    mask: torch.Tensor = _mask_operator(draws, place.number, place.batched, keep, list(whole), counts, ends)
    return mask


@torch.library.custom_op("meshwright::keep_mask", mutates_args=())  # type: ignore[untyped-decorator]
def _mask_operator(
    draws: torch.Tensor, number: int, batched: bool, keep: float, whole: Sequence[int], counts: Sequence[int], ends: Sequence[int]
) -> torch.Tensor:
    """`counts`: ranges per dimension; `ends`: start and stop of all, one after the other."""
    seed, step, first, samples = draws.tolist()
    said = Draws(seed=seed, step=step, first=first, samples=max(1, samples))  # zeros where it is measured
    return keep_mask(said, RandomPlace(number, batched), keep, whole, _ranges(counts, ends), draws.device)


@_mask_operator.register_fake  # type: ignore[untyped-decorator]
def _(
    draws: torch.Tensor, number: int, batched: bool, keep: float, whole: Sequence[int], counts: Sequence[int], ends: Sequence[int]
) -> torch.Tensor:
    return draws.new_empty([sum(b - a for a, b in parts) for parts in _ranges(counts, ends)], dtype=torch.bool)


def _ranges(counts: Sequence[int], ends: Sequence[int]) -> list[list[tuple[int, int]]]:
    pairs = iter(zip(ends[::2], ends[1::2], strict=True))
    return [[next(pairs) for _ in range(n)] for n in counts]


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; shifts of int64 carry the sign, which is masked away."""
    # SplitMix64's finaliser. torch shifts signed numbers with their sign, so the bits that come in from above are masked off.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


# ---- calls of a graph ----------------------------------------------------------------------------------------------
def draws_bits(node: ForwardNode) -> bool:
    """The call draws Bernoulli variables: dropout in any form, attention with dropout."""
    name = node.target.split(".")[1] if node.target.startswith("aten.") else ""
    if name in _FAMILY:
        return _probability(node) > 0
    return name == "scaled_dot_product_attention" and _attention_probability(node) > 0


def _probability(node: ForwardNode) -> float:
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return float(node.args[1]) if train is None or train else 0.0


def _attention_probability(node: ForwardNode) -> float:
    return float(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))


def random_places(graph: ForwardGraph) -> dict[str, RandomPlace]:
    """The random calls of a model by node name, numbered in order of execution."""
    from_input: set[str] = set()
    found: dict[str, RandomPlace] = {}
    for n in graph.nodes:
        batched = any(v.startswith("input:") or v in from_input for v in n.inputs)
        if batched:
            from_input.add(n.name)
        if draws_bits(n):
            found[n.name] = RandomPlace(len(found), batched)
    return found


Ranges = Callable[[Sequence[int]], Sequence[Sequence[tuple[int, int]]]]
Mask = Callable[..., torch.Tensor]  # as `keep_mask`


def draw_function(
    node: ForwardNode, call: Callable[..., Any], place: RandomPlace, draws: Draws, whole: Sequence[int], ranges: Ranges, mask_of: Mask = keep_mask
) -> Any:
    """What to execute instead of a random call. `whole`: the shape of its first operand on all ranks together; `ranges(shape)`: the part of a
    tensor of that shape that this rank has (attention weights are split as the queries are); `mask_of` draws the bits."""
    name = node.target.split(".")[1]
    if name == "dropout":

        def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
            return x * _scaled(mask_of(draws, place, 1 - p, whole, ranges(whole), x.device), p, x.dtype)

        return dropout
    if name == "native_dropout":

        def native(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
            mask = mask_of(draws, place, 1 - p, whole, ranges(whole), x.device)
            return x * _scaled(mask, p, x.dtype), mask

        return native
    if name == "scaled_dot_product_attention":
        return _attention(draws, place, whole, ranges, mask_of)

    def other(*args: Any, **kwargs: Any) -> Any:
        with _Intercept(lambda shape, keep, device: mask_of(draws, place, keep, shape, [[(0, d)] for d in shape], device)):
            return call(*args, **kwargs)

    return other


def _scaled(mask: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    return mask.to(dtype).div_(1 - p) if p < 1 else torch.zeros_like(mask, dtype=dtype)


def _attention(draws: Draws, place: RandomPlace, whole: Sequence[int], ranges: Ranges, mask_of: Mask) -> Callable[..., torch.Tensor]:
    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        *, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """torch.nn.functional.scaled_dot_product_attention as its reference states it, with these bits for its dropout."""
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * (scale if scale is not None else q.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
        weights = scores.softmax(-1)
        shape = (*whole[:-1], k.shape[-2])
        mask = mask_of(draws, place, 1 - dropout_p, shape, ranges(shape), q.device)
        return (weights * _scaled(mask, dropout_p, weights.dtype)) @ v

    return attention


# ---- plain eager training ------------------------------------------------------------------------------------------
class _Intercept(TorchDispatchMode):  # type: ignore[misc]
    """Replaces what `Tensor.bernoulli_` (which every kind of dropout draws with) and native dropout would draw."""

    def __init__(self, bits: Callable[[Sequence[int], float, torch.device], torch.Tensor]) -> None:
        super().__init__()
        self.bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            keep = float(args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5))
            return args[0].copy_(self.bits(tuple(args[0].shape), keep, args[0].device))
        if func is torch.ops.aten.native_dropout.default and args[2] is not False:
            mask = self.bits(tuple(args[0].shape), 1 - args[1], args[0].device)
            return args[0] * _scaled(mask, args[1], args[0].dtype), mask
        return func(*args, **(kwargs or {}))


class PlacesUnknown(Exception):
    """A model draws random bits, and its random calls have not been numbered."""


class SerialDraws(_Intercept):
    """Gives eager training the masks of a planned run: enter it around the forward and the backward pass, with `draws` set. How many were drawn is
    told by the seed of torch's own generator, which grows by one: an activation checkpoint puts it back before it computes again in backward.

    `places`: the model's random calls in order (`random_places`). Raises, inside: PlacesUnknown at the first draw if they are None;
    Unsupported where the model draws more often than they say.
    """

    def __init__(self, draws: Draws, places: Sequence[RandomPlace] | None) -> None:
        super().__init__(self.draw)
        self.draws, self.places, self.first = draws, places, 0

    def __enter__(self) -> SerialDraws:
        self.first = torch.default_generator.initial_seed()
        super().__enter__()
        return self

    def draw(self, shape: Sequence[int], keep: float, device: torch.device) -> torch.Tensor:
        if self.places is None:
            raise PlacesUnknown
        count = torch.default_generator.initial_seed() - self.first
        if not 0 <= count < len(self.places):
            raise Unsupported(
                "the model draws random bits where its traced calls do not",
                hint="draw them with torch.nn.functional.dropout, in a module that is not kept whole",
            )
        place = self.places[count]
        torch.default_generator.manual_seed(self.first + count + 1)
        return keep_mask(self.draws, place, keep, shape, [[(0, d)] for d in shape], device)
