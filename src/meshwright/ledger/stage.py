"""Bytes of one rank of every pipeline stage: weights, gradients, optimiser state, activations in flight, what recomputing needs at once.

Cite: Korthikanti et al., MLSys 2023, sections 4.2 and 5 and appendices B and C; Narayanan et al., SC 2021 (interleaved 1F1B).
Stage i of p keeps min(N, p - i) micro-batches; with m chunks per stage the number of (micro-batch, chunk) pairs in flight is
2(p - i - 1) + (m - 1)p + 1, at most N·m: on stage 0 that is L(1 + (p-1)/(pm)) layers, the paper's factor.
State: bf16 weight 2 + fp32 gradient 4 + fp32 weight and two moments 12 bytes a parameter; 6 + 12/d with a distributed optimizer.
Left out, and said: allocator fragmentation, contexts and libraries of the device, temporaries of single operators.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

from .layer import Kept, embedding_ledger, head_ledger, layer_ledger, total_bytes
from .transformer import SplitLayout, Transformer

__all__ = ["StageMemory", "in_flight", "kept_per_layer", "parameters", "stage_memory", "stage_parameters"]

WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 12  # per parameter: bf16; fp32; fp32 weight and two moments


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank, bytes. `in_flight` counts micro-batches (a fraction with interleaving); `activations_bytes` is all of them."""

    stage: int
    layers: int
    in_flight: float
    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    layers_bytes: int  # layers' activations of all micro-batches in flight
    extras_bytes: int  # embedding, final norm, head and loss
    outputs_bytes: int  # sent outputs that are not deallocated
    recompute_bytes: int  # what one recomputed region holds besides, while its backward runs

    @property
    def activations_bytes(self) -> int:
        return self.layers_bytes + self.extras_bytes + self.outputs_bytes

    @property
    def state_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activations_bytes + self.recompute_bytes


def in_flight(layout: SplitLayout, stage: int) -> Fraction:
    """Micro-batches whose activations stage `stage` keeps at once, whole stages' worth."""
    p, m, n = layout.pipeline, layout.interleave, layout.microbatches
    if m == 1:
        return Fraction(min(n, p - stage))
    return Fraction(min(n * m, 2 * (p - stage - 1) + (m - 1) * p + 1), m)


def kept_per_layer(model: Transformer, layout: SplitLayout) -> tuple[int, int]:
    """(bytes kept per layer and micro-batch under `layout.recompute`, bytes that recomputing holds besides).

    For `uniform` the first is the average over `every` layers, rounded up; for `block` it is that of a layer that is kept whole.
    """
    ledger = layer_ledger(model, layout)
    whole = total_bytes(ledger)
    boundary = total_bytes(tuple(k for k in ledger if k.operator == "norm1" and k.what == "input"))
    if model.norm == "rmsnorm-composite":  # its wide copy is not the layer's input
        boundary = boundary * model.element_bytes // max(model.element_bytes, 4)
    core = total_bytes(tuple(k for k in ledger if k.core))
    if layout.recompute == "selective":
        return whole - core, core
    if layout.recompute in ("full", "uniform"):
        every = 1 if layout.recompute == "full" else layout.every
        return -(-boundary // every), every * whole - boundary
    if layout.recompute == "block":
        return whole, whole - boundary
    return whole, 0


def _layers_bytes(model: Transformer, layout: SplitLayout, layers: int) -> int:
    """A stage's layers for one micro-batch."""
    each, _ = kept_per_layer(model, layout)
    if layout.recompute == "uniform":
        boundary, _ = kept_per_layer(model, msgspec.structs.replace(layout, recompute="full"))
        return boundary * -(-layers // layout.every)
    if layout.recompute == "block":
        boundary, _ = kept_per_layer(model, msgspec.structs.replace(layout, recompute="full"))
        redone = min(layout.every, layers)
        return boundary * redone + each * (layers - redone)
    return each * layers


def parameters(model: Transformer, layout: SplitLayout) -> tuple[int, int, int]:
    """(of one layer, of the embedding, of the final norm and an untied head) on one rank."""
    t, h, d = layout.tensor, model.hidden, model.width
    heads, keys = -(-model.heads // t), -(-model.key_heads // t)
    inner, vocabulary = -(-model.inner // t), -(-model.vocabulary // t)
    norm = h * (2 if model.norm == "layernorm" else 1)
    first = 2 if model.gated else 1
    layer = h * (heads + 2 * keys) * d + heads * d * h + (first + 1) * h * inner + 2 * norm
    if model.bias:
        layer += (heads + 2 * keys) * d + h + first * inner + h
    embedding = vocabulary * h + (model.sequence * h if model.positions == "learned" else 0)
    return layer, embedding, norm + (0 if model.tied else vocabulary * h)


def stage_parameters(model: Transformer, layout: SplitLayout) -> tuple[int, ...]:
    """Of one rank of each stage; a tied head on another stage than the embedding is a second copy."""
    layer, embedding, head = parameters(model, layout)
    counts = [layer * n for n in layout.layers_of(model)]
    counts[0] += embedding
    counts[-1] += head
    if model.tied and layout.pipeline > 1:
        counts[-1] += -(-model.vocabulary // layout.tensor) * model.hidden
    return tuple(counts)


def stage_memory(model: Transformer, layout: SplitLayout) -> tuple[StageMemory, ...]:
    """One record per stage. Raises: UsageError when layers and stages do not fit together."""
    counts, layers = stage_parameters(model, layout), layout.layers_of(model)
    state = Fraction(STATE_BYTES, layout.data if layout.distributed_optimizer else 1)
    _, redo = kept_per_layer(model, layout)
    found = []
    for i, (params, n) in enumerate(zip(counts, layers, strict=True)):
        flight = in_flight(layout, i)
        extras = 0
        if i == 0:
            extras += _ceil(total_bytes(embedding_ledger(model, layout)) * flight)
        if i == layout.pipeline - 1:
            extras += total_bytes(head_ledger(model, layout))
        outputs = 0
        if not layout.deallocate_outputs and i < layout.pipeline - 1:
            outputs = _ceil(flight * layout.interleave * _boundary(model, layout))
        found.append(
            StageMemory(
                stage=i, layers=n, in_flight=float(flight), parameters=params, weights_bytes=WEIGHT_BYTES * params,
                gradients_bytes=GRADIENT_BYTES * params, optimizer_bytes=_ceil(state * params),
                layers_bytes=_ceil(flight * _layers_bytes(model, layout, n)), extras_bytes=extras, outputs_bytes=outputs,
                recompute_bytes=redo if n else 0,
            )
        )  # fmt: skip
    return tuple(found)


def _boundary(model: Transformer, layout: SplitLayout) -> int:
    plain = msgspec.structs.replace(model, norm="layernorm")
    ledger: tuple[Kept, ...] = layer_ledger(plain, layout)
    return next(k.size_bytes for k in ledger if k.operator == "norm1" and k.what == "input")


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
