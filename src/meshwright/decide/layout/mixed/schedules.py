"""What a search over layouts asks of pipeline schedules; the driver answers, for decisions know nothing of each other.

1F1B is not among them: it is a layout without a schedule, in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ....profile.network import PieceOrder

__all__ = ["Forecast", "Schedules", "Variant"]

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """One schedule with its options for so many stages and micro-batches. `stage_of`: of every piece of the model; `split`: its backward is."""

    label: str
    stage_of: tuple[int, ...]
    split: bool = False


class Forecast(Protocol):
    """Times and memory of a schedule for any numbers."""

    def ends_s(self, forward_s: F64, backward_s: F64, weights_s: F64, delays_s: F64) -> F64:
        """When every stage has done its last action. Of every piece: forward, whole backward, the weights' part of it; `delays_s`: of messages
        from every piece but the last to the next one, then back."""
        ...

    def held_bytes(self, kept: F64, left: F64) -> F64:
        """Most bytes of activations of every stage, of what pieces keep of a micro-batch, and leave between the two parts of a backward."""
        ...


class Schedules(Protocol):
    def variants(self, stages: int, microbatches: int, layers: int) -> Sequence[Variant]:
        """What is worth pricing on a model of so many layers."""
        ...

    def forecast(self, label: str, stages: int, microbatches: int, parts: tuple[float, float, float]) -> Forecast | None:
        """`parts`: seconds of forward, input's and weights' gradient of the whole model, for which orders are planned where these matter. None:
        the schedule does not exist there, or orders of so many actions are not planned."""
        ...

    def orders(self, label: str, stages: int, microbatches: int, parts: tuple[float, float, float]) -> PieceOrder | None:
        """The orders themselves, for the event simulation; None as above."""
        ...
