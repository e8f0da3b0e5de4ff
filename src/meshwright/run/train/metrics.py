"""What a run says of every step while it goes on: a line of JSON in `metrics.jsonl`, written by rank 0, and the same to TensorBoard where asked.

    {"step": 12, "loss": 3.2, "step_s": 0.11, "samples_per_s": 290.0, "tokens_per_s": 18600.0, "learning_rate": 1e-3, "gradient_norm": 0.8}

with `mfu` where the devices' peak is known (`utilisation`), and after an evaluation `evaluation_loss`. Losses come from the ranks that compute them,
through the store; rank 0 writes a step when it has finished the next one, for which it needed what those ranks did after it, so it waits for nobody;
of short steps, several at once.
A resumed run leaves out the lines of steps that are run again. Times are rank 0's. Nothing is there before the first line; a run that fails leaves
whole lines, of the last step that ended too where its loss is known (`leave`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import MissingExtra
from ...io.atomic import write_bytes
from ...plan.plan import TrainingLayout
from ..steps.forward_graph import TensorInfo
from .utilisation import Utilisation

__all__ = ["METRICS", "Metrics", "last_line", "loss_ranks", "tokens_of"]

METRICS = "metrics.jsonl"
MIN_WRITE_S = 0.1  # between two writings: a line takes 0.4 ms, a tenth of a short step
MAX_LINE_BYTES = 4096  # of the end of the file, read for the last line


def loss_ranks(layout: TrainingLayout) -> list[int]:
    """Ranks that compute some of the loss, one of each tensor-parallel group."""
    last = len(layout.stages) - 1
    places = [(r, *layout.coordinates(r)) for r in range(layout.ranks)]
    return [r for r, p, _, t in places if t == 0 and any(stage == last for stage, _ in layout.hosted(p))]


@dataclass
class Metrics:
    """Of one rank. `store`: shared by all; `folder`: the run's, where rank 0 writes."""

    store: Any
    rank: int
    layout: TrainingLayout
    inputs: Sequence[TensorInfo]
    folder: Path
    first: int
    tensorboard: bool = False
    utilisation: Utilisation | None = None
    waiting: list[dict[str, Any]] = field(default_factory=list)  # rank 0's own part of steps that are not written yet
    written_s: float = 0.0

    def __post_init__(self) -> None:
        self.of = loss_ranks(self.layout)
        self.tokens = tokens_of(self.inputs)
        self.writer: Any = None
        if self.rank:
            return
        if self.tensorboard:
            _summary_writer()
        path = self.folder / METRICS
        kept = [line for line in path.read_text().splitlines() if _step_of(line) < self.first] if self.first and path.is_file() else []
        if kept:
            write_bytes(path, "".join(f"{line}\n" for line in kept).encode())
        else:
            path.unlink(missing_ok=True)

    def step(self, step: int, loss: float | None, seconds: float, **more: float) -> None:
        """A step is over on this rank. `more`: what rank 0 adds, by name."""
        if self.rank in self.of and self.layout.ranks > 1:
            self.store.set(_key(step, self.rank), json.dumps(loss))
        if self.rank:
            return
        samples = self.layout.global_batch / seconds if seconds > 0 else 0.0
        record = {"step": step, "loss": loss, "step_s": round(seconds, 6), "samples_per_s": round(samples, 3)}
        if self.tokens:
            record["tokens_per_s"] = round(samples * self.tokens, 1)
        if self.utilisation is not None:
            record["mfu"] = round(self.utilisation.mfu(seconds), 9)
        self.waiting.append(record | more)
        if time.monotonic() - self.written_s > MIN_WRITE_S:  # else short steps wait for rank 0, which asks the store for every rank's loss
            self.write(all_but=1)
            self.written_s = time.monotonic()

    def evaluated(self, step: int, loss: float | None) -> None:
        """An evaluation after `step` is over on this rank, before the next step ends."""
        if self.rank in self.of and self.layout.ranks > 1:
            self.store.set(_key(step, self.rank, "evaluation"), json.dumps(loss))
        for record in self.waiting:
            if record["step"] == step:
                record["evaluation_loss"] = loss

    def write(self, *, all_but: int = 0) -> None:
        """Write what waits, except so many of the last steps."""
        while len(self.waiting) > all_but:
            record = self.waiting.pop(0)
            if self.layout.ranks > 1:
                for name, what in (("loss", "loss"), ("evaluation_loss", "evaluation")):
                    if name in record:
                        record[name] = self._mean(record["step"], what)
            plain = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in record.items()}  # JSON has no infinity
            with (self.folder / METRICS).open("a") as file:
                file.write(json.dumps(plain) + "\n")
            if self.tensorboard and self.writer is None:
                self.writer = _summary_writer()(str(self.folder / "tensorboard"), purge_step=self.first)
            for name, value in record.items() if self.writer is not None else ():
                if name != "step" and value is not None:
                    self.writer.add_scalar(name, value, record["step"])

    def _mean(self, step: int, what: str) -> float | None:
        """Of what the ranks said that compute some of the loss."""
        keys = [_key(step, r, what) for r in self.of]
        found = [json.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        known = [x for x in found if x is not None]
        return sum(known) / len(known) if known else None

    def leave(self) -> None:
        """The run has failed: write what waits and is known, in order, without waiting for others."""
        while self.waiting:
            record = self.waiting[0]
            keys = [_key(record["step"], r, x) for x, of in (("loss", "loss"), ("evaluation", "evaluation_loss")) if of in record for r in self.of]
            if self.layout.ranks > 1 and not all(self.store.check([key]) for key in keys):
                return
            self.write(all_but=len(self.waiting) - 1)

    def close(self) -> None:
        self.write()
        if self.writer is not None:
            self.writer.close()


def tokens_of(inputs: Sequence[TensorInfo]) -> int:
    """Of a sample; 0 where the first input is no row of tokens."""
    first = inputs[0]
    return first.shape[1] if len(first.shape) == 2 and first.dtype in ("int64", "int32") else 0


def _key(step: int, rank: int, what: str = "loss") -> str:
    return f"{what}/{step}/{rank}"


def _step_of(line: str) -> int:
    """Of a line of the file; a line that was cut short counts as of no step that stays."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62


def last_line(folder: Path) -> dict[str, Any]:
    """The last step that was written; nothing where there is none yet."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MAX_LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    whole = [line for line in lines[-2:] if _step_of(line) < 1 << 62]
    return dict(json.loads(whole[-1])) if whole else {}


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard", extra="tensorboard", needed_for="--tensorboard") from None
    return SummaryWriter
