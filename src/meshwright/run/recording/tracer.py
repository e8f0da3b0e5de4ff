"""`train run --profile`: torch.profiler's own trace of a few steps of one rank, written as .json.gz.

Ranges added: `ProfilerStep#k` around each step, `load data`, and `module:<path>` around each run of calls of one module in forward.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...io.plan.run_names import trace_name
from .module_clock import ModuleClock

__all__ = ["TRACED_STEPS", "StepTracer"]

TRACED_STEPS = 3  # of training that the profiler records; each makes the file larger


class StepTracer:
    """`steps`: the training steps to trace, from `first` on or the last ones there are. The file is written after the last of them."""

    def __init__(self, folder: str, rank: int, device: torch.device, first: int, end: int, marks: ModuleClock | None) -> None:
        begin = max(min(first, end - TRACED_STEPS), 0)
        self.steps = range(begin, min(begin + TRACED_STEPS, end))
        self.path, self.rank, self.marks = Path(folder) / trace_name(rank), rank, marks
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self.profiler: Any = profile(activities=activities, record_shapes=False)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one training step."""
        if step == self.steps.start:
            self.profiler.start()
        if self.marks is not None:
            self.marks.annotate = True
        try:
            with record_function(f"ProfilerStep#{step}"):
                yield
        finally:
            if self.marks is not None:
                self.marks.annotate = False
                self.marks.close()
        if step == self.steps.stop - 1:
            self.profiler.stop()
            self._write()

    def _write(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".trace-") as folder:
            plain, packed = Path(folder) / "trace.json", Path(folder) / self.path.name
            self.profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target)
            packed.replace(self.path)
