"""DualPipe, DualPipe-V and ZBV with all-to-all exchanges of experts: step and memory, under one cap of memory.

Run: `python benchmarks/expert_pipeline.py` (a minute, one core). F, I and W compute for 1 each on every stage; so large a share of F and of I are
exchanges on top. Of a pair the exchanges of one half pass beside the computation of the other (`PipelineProblem.of(exchange_s=...)`); ZBV and the
others run one action at a time, as published. The cap is what DualPipe-V needs, counted with the weights of a stage. DualPipe has two copies of the
weights, on twice as many devices for the same depth of a stage; its table's bubble and memory are tests (`tests/decide/pipeline/test_dualpipe.py`).
Limit: a step of DualPipe-V below that of ZBV where exchanges are a fifth of a stage or more.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import machine

from meshwright.decide.pipeline import ZBV, DualPipe, DualPipeV
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.problem import PipelineProblem

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
SHAPES = ((4, 16), (8, 16), (8, 32))  # devices, micro-batches
ACTIVATION_BYTES, WEIGHT_BYTES = 1 << 20, 2 << 20  # of a device's part of the model


def main() -> None:
    rows = []
    for p, n in SHAPES:
        for share in SHARES:
            x = share / (1 - share)
            free = PipelineProblem.of(
                p, n, forward_s=1 + x, input_grad_s=1 + x, weight_grad_s=1.0, exchange_s=x, activation_bytes=ACTIVATION_BYTES,
                weight_bytes=WEIGHT_BYTES, message_bytes=0,
            )  # fmt: skip
            dual = judge(free, DualPipeV().plan(free))
            capped = replace(free, memory_cap_bytes=(max(dual.memory_bytes),) * p)
            zbv, twice = judge(capped, ZBV().plan(capped)), judge(free, DualPipe().plan(free))
            row = {
                "what": f"{p} devices, {n} micro-batches, exchanges {share:.0%} of F and I: DualPipe-V over ZBV", "value": dual.time_s / zbv.time_s,
                "unit": "ratio of steps", "limit": 1.0 if share >= 0.2 else None, "dualpipe_v_s": dual.time_s, "zbv_s": zbv.time_s,
                "dualpipe_s": twice.time_s, "dualpipe_v_bytes": max(dual.memory_bytes), "zbv_bytes": max(zbv.memory_bytes),
                "dualpipe_bytes": max(twice.memory_bytes), "cap_bytes": max(dual.memory_bytes), "zbv_fits": zbv.over_bytes <= 0,
                "dualpipe_v_bound_s": float(dual.bound), "zbv_bound_s": float(zbv.bound),
            }  # fmt: skip
            print(f"{row['what']}: {row['value']:.3f} ({dual.time_s:.4g} / {zbv.time_s:.4g}; DualPipe {twice.time_s:.4g})", flush=True)
            rows.append(row)
    machine.record("expert_pipeline", rows, activation_bytes=ACTIVATION_BYTES, weight_bytes=WEIGHT_BYTES)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
