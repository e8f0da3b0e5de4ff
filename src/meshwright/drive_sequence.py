"""The plan's entry on sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .drive_evaluated import Evaluated

__all__ = ["sequence_decision"]


def sequence_decision(wanted: bool | None, best: Evaluated, judged: list[Evaluated]) -> dict[str, Any]:
    """Why what lies between the tensor-parallel regions is split along the sequence, or is not: the same degrees the other way."""
    from .decide.layout import sequence

    chosen = best.layout.sequence
    other = replace(best.candidate.degrees, sequence=not chosen)
    same = [e for e in judged if e.candidate.degrees == other]
    rival = min((e for e in same if e.timeline is not None), key=lambda e: (e.excess_bytes > 0, e.time_s), default=None)
    if wanted is not None:
        why = "as asked"
    elif rival is not None and rival.timeline is not None and best.timeline is not None:
        peaks = [max(e.timeline.memory_peak_bytes) for e in (best, rival) if e.timeline is not None]
        other_way = "without" if chosen else "with"
        why = f"{best.time_s:.4g} s and {peaks[0]} bytes per rank; {other_way}, {rival.time_s:.4g} s and {peaks[1]} bytes"
        why += ", which is more than there is" if rival.excess_bytes > 0 else ""
    else:
        why = next((e.why for e in same if e.why), "only this way was considered")
    return {
        "strategy": "sequence" if chosen else "whole", "options": {"wanted": {None: "auto", True: "on", False: "off"}[wanted]}, "why": why,
        "cite": [sequence.CITE.key] if chosen else [],
    }  # fmt: skip
