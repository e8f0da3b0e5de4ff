"""Rows of any number per expert: every way to multiply beside padding to the longest, a loop, torch's grouped_mm and a dense MLP of as many rows.

Run: `python benchmarks/experts_dropless.py` (one minute). T = 4,096, H = 256, F = 512, 16 experts of two matrices, k = 1; forward and backward;
routing by Zipf 1.0, 1.2, 1.5. Processor seconds of one thread, median of 5 after 1. `auto`: the way that lines fitted to the steps choose.
Raw output: results/experts_dropless.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from torch.nn import functional

from meshwright.decide.experts.megablocks import FittedWays
from meshwright.kernels.experts import decode, encode, route
from meshwright.kernels.experts.dropless import first_rows
from meshwright.nn import FeedForward

T, H, F, E, K = 4096, 256, 512, 16, 1
BLOCK = 128
ROUNDS, WARM = 5, 1
ASKED_SHARE_OF_RATIO, ASKED_OF_GROUPED, ASKED_OF_DENSE = 0.9, 1.05, 0.85


def zipf_scores(exponent: float, seed: int) -> torch.Tensor:
    """Scores [T, E] by which expert e is first with a probability in proportion to 1 / (e + 1)^exponent."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, E + 1, dtype=torch.float32) ** -exponent
    chosen = torch.multinomial(weights.expand(T, E), 1, generator=g)
    return torch.softmax(torch.zeros(T, E).scatter_(1, chosen, 5.0) + 0.01 * torch.rand(T, E, generator=g), 1)


def median_s(step: Callable[[], None]) -> float:
    found = []
    for _ in range(ROUNDS + WARM):
        began = time.process_time()
        step()
        found.append(time.process_time() - began)
    return statistics.median(found[WARM:])


def measured(dtype: torch.dtype, exponent: float) -> dict[str, Any]:
    torch.manual_seed(0)
    form = FeedForward(H, F, bias=False, activation=functional.gelu)
    each = [form.initial(None) for _ in range(E)]
    params = {n: torch.stack([e[n] for e in each]).to(dtype).requires_grad_() for n in each[0]}
    x = torch.randn(T, H, dtype=dtype, requires_grad=True)
    routing = route(zipf_scores(exponent, 1), K)
    slots = first_rows(routing.counts)[routing.experts] + routing.locations
    counts = routing.counts
    leaves = [x, *params.values()]

    def way(name: str) -> Callable[[], None]:
        def step() -> None:
            rows = encode(x, slots, T * K)
            y = decode(form.run_rows(rows, counts, params, name, BLOCK), slots, routing.gates.to(dtype))
            torch.autograd.grad(y.sum(), leaves)

        return step

    def dense() -> None:
        y = functional.gelu(x @ params["w1"][0].t()) @ params["w2"][0]
        torch.autograd.grad(y.sum(), [x, params["w1"], params["w2"]])

    def only_grouped() -> None:
        """grouped_mm itself, with the same permutation by torch's own indexing."""
        order = torch.argsort(routing.experts[:, 0], stable=True)
        offsets = torch.cumsum(counts, 0).int()
        h = functional.gelu(functional.grouped_mm(x[order], params["w1"].transpose(1, 2).contiguous(), offs=offsets))
        y = functional.grouped_mm(h, params["w2"], offs=offsets) * routing.gates[order].to(dtype)
        torch.autograd.grad(torch.zeros_like(x).index_copy(0, order, y).sum(), leaves)

    times = {name: median_s(way(name)) for name in ("loop", "padded", "grouped", "sparse")}
    ways = FittedWays(tuple(times), BLOCK)
    for name, time_s in times.items():
        for _ in range(2):
            ways.record(name, counts.tolist(), time_s)
    chosen = ways.choose(counts.tolist())
    return {
        "dtype": str(dtype), "zipf": exponent, "counts": counts.tolist(), **times, "auto": chosen, "auto_s": times[chosen],
        "grouped_mm": median_s(only_grouped), "dense": median_s(dense), "bound_of_padding": E * int(counts.max()) / int(counts.sum()),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    raw = [measured(dtype, z) for dtype in (torch.float32, torch.bfloat16) for z in (1.0, 1.2, 1.5)]
    rows = []
    for r in raw:
        name = f"{r['dtype'].split('.')[1]} Zipf {r['zipf']}"
        asked = ASKED_SHARE_OF_RATIO * r["bound_of_padding"]
        rows += [
            {"what": f"{name}: padding to the longest takes so many times as long as auto ({r['auto']})", "value": r["padded"] / r["auto_s"],
             "unit": "", "asked": asked, "reached": r["padded"] / r["auto_s"] >= asked},
            {"what": f"{name}: auto beside the loop", "value": r["auto_s"], "unit": "s", "peer": r["loop"]},
            {"what": f"{name}: auto beside grouped_mm with the same permutation", "value": r["auto_s"], "unit": "s", "peer": r["grouped_mm"],
             "asked_ratio": ASKED_OF_GROUPED},
            {"what": f"{name}: auto beside a dense MLP of as many rows", "value": r["auto_s"], "unit": "s", "peer": r["dense"],
             "asked_rate": ASKED_OF_DENSE, "rate": r["dense"] / r["auto_s"]},
            {"what": f"{name}: block-sparse beside the loop", "value": r["sparse"], "unit": "s", "peer": r["loop"]},
        ]  # fmt: skip
    for row in rows:
        print(f"{row['what']:<85} {row['value']:.4f} {row['unit']}" + (f" beside {row['peer']:.4f}: {row['value'] / row['peer']:.2f}" if "peer" in row
                                                                       else f" (asked {row['asked']:.2f})"))  # fmt: skip
    machine.record("experts_dropless", rows, raw=raw)


if __name__ == "__main__":
    main()
