"""A transformer described by its numbers instead of captured from a module: what the formulas need, and nothing else.

    model = described("layers=48,hidden=6144,heads=64,sequence=2048,vocabulary=51200")

What the kernels keep differs between implementations, so the kernels are part of the description: the defaults are those of the
paper (eager attention, one-byte dropout masks, 16-bit activations, GeLU of 4 hidden, statistics of norms in float32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from ..errors import UsageError

__all__ = ["SplitLayout", "Transformer", "described", "layout_described"]

Activation = Literal["gelu", "relu", "swiglu", "swiglu-fused"]
Attention = Literal["eager", "flash"]
Norm = Literal["layernorm", "rmsnorm", "rmsnorm-composite"]
Recompute = Literal["none", "selective", "full", "uniform", "block"]
_MAX_NUMBER = 1 << 40  # of any number in a description; more is a mistake
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class Transformer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder of `layers` pre-norm blocks; lengths in elements.

    Args:
        hidden: h; heads: a; kv_heads: heads of K and V (0: as many as `heads`); head_width: of one head (0: hidden / heads).
        ffn: width inside the MLP (0: 4 hidden); sequence: s; vocabulary: v.
        attention: `eager` keeps the scores' softmax, `flash` the log-sum-exp only.
        activation: `gelu` and `relu` as one call; `swiglu` eager (silu, then product) or fused.
        norm: `layernorm` and `rmsnorm` as fused kernels; `rmsnorm-composite` as torch runs it where it has no fused kernel: in float32 at
            least, keeping a wide copy of its input and the normalised values.
        dropout: after attention probabilities, attention and MLP (and the embedding); False: none anywhere.
        element_bytes: of an activation; mask_bytes: of a dropout mask's element (1: bool; the element's size where dropout multiplies by noise, as
            F.dropout does on processors); statistics_bytes: of a norm's mean or reciprocal deviation.
        positions: `learned` adds sequence x hidden parameters.
        tied: the head's weight is the embedding's; bias: linears have one.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    head_width: int = 0
    ffn: int = 0
    attention: Attention = "eager"
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    dropout: bool = True
    element_bytes: int = 2
    mask_bytes: int = 1
    statistics_bytes: int = 4
    positions: Literal["learned", "rope", "none"] = "learned"
    tied: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "element_bytes", "mask_bytes", "statistics_bytes"):
            _count(name, getattr(self, name), 1)
        for name in ("kv_heads", "head_width", "ffn"):
            _count(name, getattr(self, name), 0)
        if not self.head_width and self.hidden % self.heads:
            raise UsageError(f"hidden {self.hidden} is not a multiple of {self.heads} heads", where="transformer", hint="state head_width")
        if self.heads % self.key_heads:
            raise UsageError(f"{self.heads} heads do not divide by {self.key_heads} heads of K and V", where="transformer.kv_heads")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Of one head."""
        return self.head_width or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width inside the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def gated(self) -> bool:
        return self.activation.startswith("swiglu")


class SplitLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a described transformer is spread and run; `microbatches` is per replica and step.

    `recompute`: `selective` redoes the core attention of every layer; `full` every layer (uniform with `every` = 1); `uniform` checkpoints every
    `every` layers; `block` redoes the first `every` layers of each stage and keeps the others whole. `distributed_optimizer`: its state is
    spread over the replicas. `deallocate_outputs`: a stage frees the data of what it sent. `stage_layers`: layers of each stage.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    interleave: int = 1
    microbatch_size: int = 1
    microbatches: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    every: int = 1
    distributed_optimizer: bool = False
    deallocate_outputs: bool = True
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "interleave", "microbatch_size", "microbatches", "every"):
            _count(name, getattr(self, name), 1)
        if self.stage_layers and len(self.stage_layers) != self.pipeline:
            raise UsageError(f"stage_layers names {len(self.stage_layers)} stages, the pipeline has {self.pipeline}", where="layout.stage_layers")
        if any(n < 0 for n in self.stage_layers):
            raise UsageError("a stage cannot have fewer than 0 layers", where="layout.stage_layers")
        if self.sequence_parallel and self.tensor == 1:
            raise UsageError("sequence parallelism is over the tensor-parallel ranks, and there is one", where="layout", hint="tensor >= 2")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        return self.data * self.microbatches * self.microbatch_size

    def layers_of(self, model: Transformer) -> tuple[int, ...]:
        """Layers of each stage; a remainder goes to the later stages, which keep fewer micro-batches. Raises: UsageError."""
        if self.stage_layers:
            if sum(self.stage_layers) != model.layers:
                said = f"stage_layers add up to {sum(self.stage_layers)}, the model has {model.layers} layers"
                raise UsageError(said, where="layout.stage_layers")
            return self.stage_layers
        if self.pipeline > model.layers:
            raise UsageError(f"{model.layers} layers cannot fill {self.pipeline} stages", where="layout.pipeline", hint=f"at most {model.layers}")
        each, more = divmod(model.layers, self.pipeline)
        return tuple(each + (i >= self.pipeline - more) for i in range(self.pipeline))


def _count(name: str, value: int, least: int) -> None:
    if not least <= value < _MAX_NUMBER:
        raise UsageError(f"must be at least {least}, got {value}", where=name)


def described(text: str, **changes: Any) -> Transformer:
    """A transformer from `name=value,...`; `changes` win. Raises: UsageError for unknown, missing or wrong fields."""
    return _struct(Transformer, {**_pairs(text, "transformer"), **changes}, "transformer")


def layout_described(fields: Mapping[str, Any]) -> SplitLayout:
    """Raises: UsageError."""
    return _struct(SplitLayout, fields, "layout")


def _pairs(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or name in found:
            raise UsageError(f"{item[:64]!r} is not a new name=value", where=where, hint="e.g. layers=48,hidden=6144,heads=64")
        found[name] = value.strip()
    return found


def _struct(kind: type[_Kind], fields: Mapping[str, Any], where: str) -> _Kind:
    hint = f"fields: {', '.join(f.name for f in msgspec.structs.fields(kind))}"
    if unknown := [name for name in fields if name not in {f.name for f in msgspec.structs.fields(kind)}]:
        raise UsageError(f"there is no field {unknown[0][:64]!r}", where=where, hint=hint)
    if missing := [f.name for f in msgspec.structs.fields(kind) if f.required and f.name not in fields]:
        raise UsageError(f"{', '.join(missing)}: not given", where=where, hint=hint)
    try:
        return msgspec.convert(dict(fields), kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, name = str(error).partition(" - at `$.")
        where = f"{where}: {name.rstrip('`')}" if name else where
        raise UsageError("must be a whole number" if what.startswith("Expected `int`, got") else what, where=where, hint=hint) from None
