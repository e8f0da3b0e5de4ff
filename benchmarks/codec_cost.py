"""Seconds to encode and decode with every codec, fitted as base + rate * elements, beside torch's own operations for the same job.

Run: `python benchmarks/codec_cost.py` (`--quick`: small sizes, nothing is written). One thread, float32,
error feedback as each codec has it by default; the
least of several repeats. Groups of PowerSGD are matrices of 256 columns. Decoding is of one rank's payload, added to the result.
Peers: torch.topk of the magnitudes with gather (TopK), the cast and addition of the fp16 hook, powerSGD_hook's own computation (a world of one),
packbits of the signs with NumPy, a float8 cast. A peer does less: no error feedback (except PowerSGD's), no check for NaN.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from meshwright.codec.codec import parse_codec
from meshwright.codec.kinds import CODECS
from meshwright.run.codecs import At, make_codec

SIZES = [1 << p for p in (10, 13, 16, 18, 20, 22, 23)]
COLUMNS = 256
SETTLE = 64  # steps before the clock: residuals and thresholds of a training under way, not of its first step


def least_s(call: Callable[[], Any], budget_s: float) -> float:
    """Least wall time of a call, repeated for so long, at least three times."""
    call()
    best, end, runs = float("inf"), time.perf_counter() + budget_s, 0
    while runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


def shapes_of(n: int) -> list[tuple[int, ...]]:
    return [(n // COLUMNS, COLUMNS)] if n >= COLUMNS * 16 else [(n // 32, 32)]


def cost(text: str, n: int, budget_s: float) -> tuple[float, float, int]:
    """Encode and decode seconds, payload bytes."""
    codec = make_codec(parse_codec(text), shapes_of(n))
    state, x, out = codec.new_state(), torch.randn(n, generator=torch.Generator().manual_seed(1)), torch.zeros(n)
    steps = itertools.count()

    def encode() -> Any:
        at = At(step=next(steps))
        payload, size = codec.encode(x, state, at), 0
        while True:
            size += payload.size_bytes
            following = codec.advance(payload, state, at)
            if following is None:
                return payload, size
            payload = following

    for _ in range(SETTLE):
        encode()
    encode_s = least_s(encode, budget_s)
    payload, size = encode()
    return encode_s, least_s(lambda: codec.decode(payload, out, accumulate=True), budget_s), size


class Bucket:
    """What torch's PowerSGD hook asks of a bucket."""

    def __init__(self, n: int) -> None:
        self.flat, self.shapes = torch.randn(n), shapes_of(n)

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [self.flat.view(self.shapes[0])]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def peers(n: int, budget_s: float) -> dict[str, tuple[str, float]]:
    """Codec -> torch's operation and its seconds, encoding and decoding together."""
    x, out, k = torch.randn(n), torch.zeros(n), max(1, n // 100)

    def topk() -> None:
        indices = torch.topk(x.abs(), k, sorted=False).indices
        out.index_add_(0, indices, x[indices])

    def signs() -> None:
        packed = np.packbits(x.numpy() < 0)
        out.add_(torch.from_numpy(np.unpackbits(packed, count=n)))

    float8 = torch.float8_e4m3fn
    state, bucket = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), Bucket(n)
    for _ in range(3):
        powerSGD_hook(state, bucket).wait()
    return {
        "topk": ("torch.topk, gather, index_add", least_s(topk, budget_s)),
        "fp16": ("fp16 hook's casts", least_s(lambda: out.copy_(x.to(torch.float16)), budget_s)),
        "bf16": ("bf16 hook's casts", least_s(lambda: out.copy_(x.to(torch.bfloat16)), budget_s)),
        "fp8": ("float8 casts", least_s(lambda: out.copy_(x.to(float8)), budget_s)),
        "efsign": ("packbits, unpackbits", least_s(signs, budget_s)),
        "powersgd": ("powerSGD_hook", least_s(lambda: powerSGD_hook(state, bucket).wait(), budget_s)),
    }


def fitted(points: list[tuple[int, float]]) -> tuple[float, float]:
    """base_s, s_per_element by least squares of relative errors."""
    n, t = (np.array(c, float) for c in zip(*points, strict=True))
    (base, rate), *_ = np.linalg.lstsq(np.stack((1 / t, n / t), 1), np.ones(len(t)), rcond=None)
    return max(0.0, float(base)), float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    sizes, budget_s = (SIZES[:4], 0.01) if quick else (SIZES, 0.2)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        beside = peers(sizes[-1], budget_s)
        dist.destroy_process_group()
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    for kind in CODECS:
        points = [(n, *cost(kind.name, n, budget_s)) for n in sizes]
        raw.append({"codec": kind.name, "elements": sizes, "encode_s": [p[1] for p in points], "decode_s": [p[2] for p in points]})
        encode, decode = fitted([(p[0], p[1]) for p in points]), fitted([(p[0], p[2]) for p in points])
        n, encode_s, decode_s, size = points[-1]
        row: dict[str, Any] = {
            "what": f"{kind.name}: encode and decode {n} elements", "value": round((encode_s + decode_s) * 1e3, 4), "unit": "ms",
            "payload_bytes": size,
            "encode_base_us": round(encode[0] * 1e6, 2), "encode_ns_per_element": round(encode[1] * 1e9, 4),
            "decode_base_us": round(decode[0] * 1e6, 2), "decode_ns_per_element": round(decode[1] * 1e9, 4),
        }  # fmt: skip
        if kind.name in beside:
            row |= {"peer": round(beside[kind.name][1] * 1e3, 4), "peer_is": beside[kind.name][0]}
        rows.append(row)
        costs = [f"{w} {row[f'{w}_base_us']:7.1f} us + {row[f'{w}_ns_per_element']:6.3f} ns/element" for w in ("encode", "decode")]
        line = ", ".join(costs)
        print(f"{kind.name:10s} {line}" + (f"; {row['value'] / row['peer']:.2f} of {row['peer_is']}" if "peer" in row else ""), flush=True)
    if not quick:
        machine.record("codec_cost", rows, raw=raw)
    print(json.dumps({"rows": len(rows)}))


if __name__ == "__main__":
    main()
