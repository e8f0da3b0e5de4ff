"""What a plan says beside its layout: what was predicted, what else was judged, which program runs when."""

from __future__ import annotations

import msgspec

__all__ = ["Alternative", "CycleEntry", "Prediction"]


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Simulated on `target_fabric`. Shares say how much of the critical path's time rests on which evidence; they sum to 1."""

    target_fabric: str
    time_s: float
    phases_s: dict[str, float] = {}  # mean over ranks of time in each phase
    memory_peak_bytes: tuple[int, ...] = ()  # per rank, in the simulated order
    memory_worst_bytes: tuple[int, ...] = ()  # per rank, over every order the program allows
    evidence: dict[str, float] = {}
    cpu_s: tuple[float, ...] = ()  # processor time per rank, where measured


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A candidate that was judged: `time_s` is None if it was refused, `why` says why it lost or could not be."""

    what: str
    time_s: float | None = None
    memory_peak_bytes: int | None = None
    why: str = ""


class CycleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A program of the cycle, and when it runs."""

    program: str  # content hash
    when: str = "every"  # "every" | "step % k == j" | "evaluation" | "select" | "shape"
    table: dict[str, str] = {}  # for "select": key -> program
