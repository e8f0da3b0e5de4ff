"""The reader's traces: two steps of four processes without a network between them, and the same before and after a change."""

import gzip
import os
from pathlib import Path

import torch

os.environ["KINETO_LOG_LEVEL"] = "6"


def export(profiler: torch.profiler.profile) -> None:
    profiler.export_chrome_trace("one.json")


def traced(path: str, width: int) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, on_trace_ready=export) as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(64, width)).square().mean().backward()
            optimizer.step()
            profiler.step()
    Path(path).write_bytes(gzip.compress(Path("one.json").read_bytes()))


for rank in range(4):
    traced(f"rank{rank}.json.gz", 64)
traced("before.json.gz", 64)
traced("after.json.gz", 256)
