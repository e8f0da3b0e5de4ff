"""Dynamic loss scaling for float16, as torch.amp.GradScaler does it: halved, and the step left out, where a gradient is not finite; doubled after
many steps in which all were.

Whether all are is told by the norm of all gradients, which every rank has alike: no rank steps where another does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["LossScaler"]

FIRST_SCALE = 65536.0
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000


@dataclass
class LossScaler:
    """`good`: steps with finite gradients since the scale changed last; `skipped`: steps left out in all."""

    scale: float = FIRST_SCALE
    good: int = 0
    skipped: int = 0

    def update(self, finite: bool) -> None:
        """After a step."""
        if not finite:
            self.scale, self.good, self.skipped = self.scale * BACKOFF, 0, self.skipped + 1
            return
        self.good += 1
        if self.good == GROWTH_STEPS:
            self.scale, self.good = self.scale * GROWTH, 0

    def saved(self) -> dict[str, Any]:
        return {"scaler:scale": self.scale, "scaler:good": self.good, "scaler:skipped": self.skipped}

    def resume(self, saved: dict[str, Any]) -> None:
        self.scale, self.good, self.skipped = (saved.get(f"scaler:{k}", getattr(self, k)) for k in ("scale", "good", "skipped"))
