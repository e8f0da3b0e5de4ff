"""Random problems of gradient traffic, for tests and benchmarks of strategies."""

from __future__ import annotations

import random

import numpy as np

from ..traffic import CodecCost, Curve, GradientTensor, TrafficProfile

__all__ = ["traffic_profile"]

NAMES = ("none", "topk", "fp16", "bf16")


def traffic_profile(rng: random.Random, tensors: int, codecs: int = 1, interference_permille: int = 0, *, knee: bool = False) -> TrafficProfile:
    """Backward, encode and exchange of like size, so that there is something to decide; `knee`: times that are not linear in the size."""
    sizes = [int(10 ** rng.uniform(1, 5)) for _ in range(tensors)]
    ready = np.cumsum([int(rng.uniform(0, 2e6)) for _ in range(tensors)]).tolist()
    per_element = (ready[-1] + 1) / sum(sizes)

    def curve(base: float, slope: float) -> Curve:
        start, middle, far = int(base), int(base + slope * 10**4), int(base + slope * 10**6)
        return Curve(sizes=(0, 10**4, 10**6), times_ns=(start, start, far)) if knee else Curve(sizes=(0, 10**4, 10**6), times_ns=(start, middle, far))

    costs = []
    for name in NAMES[:codecs]:
        ratio = 1.0 if name == "none" else rng.uniform(0.02, 0.6)
        busy = float(name != "none" or codecs == 1)
        costs.append(
            CodecCost(
                codec=name, encode=curve(busy * rng.uniform(1e4, 1e6), busy * rng.uniform(0, 0.3) * per_element),
                exchange=curve(rng.uniform(1e5, 2e6), per_element * rng.uniform(0.1, 1.0)),
                decode=curve(busy * rng.uniform(1e4, 1e6), busy * rng.uniform(0, 0.3) * per_element),
                payload_bytes=tuple(int(4 * s * ratio) for s in sizes),
            )
        )  # fmt: skip
    named = tuple(GradientTensor(name=f"w{i}", shape=(s,), ready_ns=r) for i, (s, r) in enumerate(zip(sizes, ready, strict=True)))
    return TrafficProfile(tensors=named, codecs=tuple(costs), ranks=8, interference_permille=interference_permille)
