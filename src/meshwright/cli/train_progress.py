"""What `train run` says while it goes on, on stderr: one line that is written anew on a terminal, else a line every so many steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plan.plan import Plan

__all__ = ["Progress", "progress_line"]

LINES = 10  # of a run that is not watched on a terminal, where nobody asks for more
WIDTH = 130  # columns that a line on a terminal is filled up to, to cover the one before


class Progress:
    """Called with the number of the step that begins. `every`: steps from line to line where stderr is no terminal; 0: `LINES` lines in all."""

    def __init__(self, plan: Plan, steps: int, out: Path, device: str, every: int = 0) -> None:
        from ..run.train.utilisation import utilisation_of

        self.steps, self.out, self.terminal = steps, out, sys.stderr.isatty()
        self.every = every or max(1, steps // LINES)
        self.prediction, self.utilisation = plan.prediction, utilisation_of(plan, device)
        self.began: tuple[int, float] | None = None  # the first step that was seen, and when
        self.said = -1
        if self.utilisation is not None:
            sys.stderr.write(f"MFU: share of {self.utilisation.source}\n")

    def __call__(self, step: int) -> None:
        now = time.monotonic()
        self.began = self.began or (step, now)
        if not self.terminal and step // self.every == self.said // self.every and self.said >= 0:
            return
        from ..run.train.metrics import last_line

        known = last_line(self.out)
        if not self.terminal and not known:
            return
        self.said = step
        done = step - self.began[0]
        left_s = (self.steps - step) * (now - self.began[1]) / done if done else None
        text = progress_line(known, step, self.steps, left_s, *self.planned())
        if self.terminal:
            sys.stderr.write(f"\r{text:<{WIDTH}}")
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def planned(self) -> tuple[str, str]:
        """What the plan predicts for its own fabric: the time of a step, and its MFU where the devices' peak is known."""
        p = self.prediction
        if p is None:
            return "", ""
        mfu = f"{100 * self.utilisation.mfu(p.time_s):.1f} %" if self.utilisation is not None else ""
        return f"{p.time_s:.3g} s on {p.target_fabric}", mfu

    def close(self) -> None:
        """After the last step, or what ended the run: others may write."""
        if self.terminal and self.began is not None:
            sys.stderr.write("\n")
            sys.stderr.flush()


def progress_line(known: dict[str, Any], step: int, steps: int, left_s: float | None, planned_s: str = "", planned_mfu: str = "") -> str:
    """`known`: the last line of the metrics; `left_s`: until the run is over."""
    parts = [f"step {min(step + 1, steps)}/{steps}"]
    for name, key in (("loss", "loss"), ("evaluation", "evaluation_loss")):
        if (loss := known.get(key)) is not None:  # a text where it is not finite
            parts.append(f"{name} {loss}" if isinstance(loss, str) else f"{name} {loss:.4f}")
    if known:
        tokens = "tokens_per_s" in known
        parts.append(f"{known['tokens_per_s']:,.0f} tokens/s" if tokens else f"{known['samples_per_s']:,.1f} samples/s")
        parts.append(f"{known['step_s']:.3g} s" + (f" (plan: {planned_s})" if planned_s else ""))
    if "mfu" in known:
        parts.append(f"MFU {100 * known['mfu']:.1f} %" + (f" (plan: {planned_mfu})" if planned_mfu else ""))
    if left_s is not None:
        parts.append(f"ETA {_clock(left_s)}")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
