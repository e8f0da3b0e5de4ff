"""The reader's trace: two steps of examples/encoder_decoder.py:small."""

import os
import sys
from pathlib import Path

os.environ["KINETO_LOG_LEVEL"] = "6"
import torch

sys.path.insert(0, "examples")
from encoder_decoder import small


def export(profiler: torch.profiler.profile) -> None:
    profiler.export_chrome_trace("trace.json")


Path("run").mkdir(exist_ok=True)
model, batch = small()
*inputs, target = batch.values() if isinstance(batch, dict) else batch
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.profiler.schedule(wait=0, warmup=1, active=2)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, on_trace_ready=export) as profiler:
    for _ in range(3):
        optimizer.zero_grad()
        out = model(*inputs)
        torch.nn.functional.cross_entropy(out.flatten(0, -2), target.flatten()).backward()
        optimizer.step()
        profiler.step()
