"""Budgets inside unmodified torch.compile: predicted and measured peaks of compiled steps, three budgets on two nets.

Run: `python benchmarks/memory_compiled.py [--quick]` (six compilations by Inductor's C++ backend, some minutes; --quick: one net, two budgets). Every
budget is a share of the predicted peak of the fastest plan. Measured: the allocator's own events over a step after the first; gradients are
compared with eager's, with tolerance, because kernels are fused. Asked: within 5 %, and the measured peak never rises as the budget falls.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import machine
import memory_nets

SHARES = (1.0, 0.8, 0.65)
NETS = {"swiglu": memory_nets.swiglu, "gpt, 2 layers": lambda: (memory_nets.GPT(2, dropout=0.0), memory_nets.gpt12()[1])}


def one(net: str, share: float) -> dict[str, Any]:
    import meshwright.torch
    from meshwright.run.steps.storage_peak import peak_of

    torch.manual_seed(0)
    model, (x, target) = NETS[net]()
    loss = torch.nn.functional.mse_loss if target.is_floating_point() else torch.nn.functional.cross_entropy
    eager = copy.deepcopy(model)

    def of(run: Any) -> torch.Tensor:
        y = run(x)
        return loss(y if target.is_floating_point() else y.flatten(0, -2), target if target.is_floating_point() else target.flatten())

    of(eager).backward()
    start = time.process_time()
    with meshwright.torch.memory_budget(share=share) as partitions:
        compiled = torch.compile(model, dynamic=False)
        of(compiled).backward()
    compile_s = time.process_time() - start
    (made,) = partitions.made
    near = all(torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-5) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    of(compiled).backward()
    model.zero_grad(set_to_none=True)

    def step() -> None:
        of(compiled).backward()

    measured = peak_of(step, [x, *model.parameters(), *model.buffers()])
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    row = {
        "net": net, "share": share, "predicted_bytes": made.peak_bytes, "measured_bytes": measured, "error": made.peak_bytes / measured - 1,
        "gradients_near": near, "compile_s": round(compile_s, 1),
    }  # fmt: skip
    sizes = f"predicted {made.peak_bytes:>12,} measured {measured:>12,}"
    print(f"{net:<14} {share:4.2f} {sizes} {100 * row['error']:+.2f} %, compiled in {compile_s:.0f} s", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    nets, shares = (["swiglu"], SHARES[::2]) if args.quick else ([*NETS], SHARES)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows = [one(net, share) for net in nets for share in shares]
    rises = [b["measured_bytes"] / a["measured_bytes"] - 1 for a, b in pairwise(rows) if a["net"] == b["net"]]
    summary = [
        {"what": "compiled: predicted against measured peak, worst", "value": max(abs(r["error"]) for r in rows), "unit": "share", "limit": 0.05},
        {"what": "compiled: most that the measured peak rises as the budget falls", "value": max(rises), "unit": "share", "limit": 0.0},
        {"what": "compiled: steps whose gradients are not near eager's", "value": sum(not r["gradients_near"] for r in rows), "unit": "steps"},
    ]
    if not args.quick:
        machine.record("memory_compiled", summary, steps=rows)


if __name__ == "__main__":
    main()
