"""What codecs cost here: encode and decode of growing parts of a model's own tensors, timed in one process as the hook runs them.

The exchange is left to a function of the caller, and a rank decodes as many payloads as there would be ranks. `traffic_steps` times real ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...codec.codec import CodecSpec
from ...errors import RunError
from ...run.codecs import At
from ...run.traffic.group import GroupExchange
from ...traffic import CodecCost, GradientTensor
from .curves import fit_curve

__all__ = ["CodecTimes", "codec_cost", "time_codec"]

REPEATS = 5  # steps that are timed for each part, after one that warms up
MAX_SIZES = 7  # of parts that are timed: three tensors alone, then ever longer beginnings of the gradients
Tensors = Sequence[GradientTensor]


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """One fused part: its size, what a rank sends, and the seconds of the three parts of its way."""

    elements: int
    payload_bytes: int
    encode_s: float
    exchange_s: float
    decode_s: float


def parts_of(tensors: Tensors, parts: int = MAX_SIZES) -> list[Tensors]:
    """The smallest, a middling and the largest tensor alone, then ever longer beginnings up to all of them."""
    by_size = sorted(tensors, key=lambda t: t.elements)
    found = [[by_size[0]], [by_size[len(by_size) // 2]], [by_size[-1]]]
    share = 1.0
    while len(found) < parts:
        found.append(list(tensors[: max(1, round(share * len(tensors)))]))
        share /= 2.5
    return [list(group) for group in {tuple(t.name for t in f): f for f in found}.values()]


def time_codec(spec: CodecSpec, tensors: Tensors, world: int, *, repeats: int = REPEATS) -> list[CodecTimes]:
    """Medians over `repeats` steps after one that warms up, of each part. Raises: RunError when a codec refuses its own test."""
    found = []
    for part in parts_of(tensors):
        made = GroupExchange(0, spec, [t.name for t in part], [t.shape for t in part], torch.float32, "refuse")
        rows = []
        for step in range(1 + repeats):
            made.flat.copy_(torch.randn(made.flat.numel(), generator=torch.Generator().manual_seed(step)))
            made.missing.clear()
            rows.append(_one(made, step, world))
        encode_s, exchange_s, decode_s = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        size = sum(r.expected for r in spec.rounds(made.shapes))
        found.append(CodecTimes(elements=made.flat.numel(), payload_bytes=size, encode_s=encode_s, exchange_s=exchange_s, decode_s=decode_s))
    return found


def _one(made: GroupExchange, step: int, world: int) -> tuple[float, float, float]:
    start = time.perf_counter()
    made.encode(At(step=step, world=world))
    encoded = time.perf_counter()
    made.exchange(At(step=step), None)
    arrived = time.perf_counter()
    if isinstance(made.received, list):
        made.received = made.received * world
    begin = time.perf_counter()
    made.decode(world)
    decoded = time.perf_counter()
    made.begin()
    return encoded - start, arrived - encoded, decoded - begin


def codec_cost(spec: CodecSpec, tensors: Tensors, times: Sequence[CodecTimes], network_s: Callable[[str, int], float]) -> CodecCost:
    """Curves through the times; `network_s(operation, bytes of one rank)` is added to the exchange.

    Raises: RunError when there are no times.
    """
    if not times:
        raise RunError(f"codec {spec.text} was not timed", hint="give at least one tensor")
    sizes, payloads = [t.elements for t in times], [t.payload_bytes for t in times]
    exchange = [t.exchange_s + network_s(spec.aggregation, t.payload_bytes) for t in times]
    return CodecCost(
        codec=spec.text, encode=fit_curve(sizes, [t.encode_s for t in times]), exchange=fit_curve(payloads, exchange),
        decode=fit_curve(sizes, [t.decode_s for t in times]),
        payload_bytes=tuple(sum(r.expected for r in spec.rounds([t.shape])) for t in tensors), evidence="assumed",
    )  # fmt: skip
