"""Segments whose forward pass runs a second time before their backward, messages among them: names, without torch.

A group (`TrainingLayout.forward_again`) is a run of consecutive segments of a stage, mostly a layer. `F` of its segments keeps nothing for backward.
Before backward of its last segment all of them run forward again (`R`), in order: from what came into the group, which is kept, with every sum,
gather and exchange between them. What they write then for each other is `remade:<value>:<micro-batch>`; backward of the group reads it, and what
`R` has saved.
Numbers of filled rows (`plan.experts`) are kept from the first time: rows that travel again are packed by them.
Cite: Chen and others, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174); over collectives, as full recomputation in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from .context import filled_rows, layout_exchanges
from .plan import Stage, TrainingLayout

__all__ = ["AGAIN", "group_ends", "remade_values", "run_again", "steps_of_pass"]

AGAIN = {"act": "remade", "actall": "remadeall", "actsum": "remadesum"}  # kinds of buffers of a first forward pass and of a second


def run_again(layout: TrainingLayout) -> frozenset[str]:
    """Keys of the segments that run forward again."""
    return frozenset(key for group in _groups(layout) for key in group)


def group_ends(layout: TrainingLayout) -> Mapping[str, tuple[str, ...]]:
    """By the last segment of each group: all of its segments, which run again before its backward."""
    return {group[-1]: group for group in _groups(layout)}


def steps_of_pass(stage: Stage, phase: str, ends: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """(phase, segment) of the compute steps of F, B, I or W of a stage, in order. `ends`: `group_ends`; what runs forward again is R."""
    found: list[tuple[str, str]] = []
    for key in stage.segments if phase == "F" else stage.segments[::-1]:
        found += [("R", other) for other in ends.get(key, ()) if phase in ("B", "I")]
        found.append((phase, key))
    return found


def remade_values(layout: TrainingLayout) -> Mapping[str, frozenset[str]]:
    """By segment that runs again: the values that its group makes again, or gets again of others that do, and reads itself."""
    segment, numbers = {s.key: s for s in layout.segments}, {*filled_rows(layout).values()}
    source = {x.target: x.source for x in layout_exchanges(layout)}
    found: dict[str, frozenset[str]] = {}
    for group in _groups(layout):
        made = {v for key in group for v in segment[key].writes}
        remade = set[str]()
        for v in {v for key in group for v in segment[key].reads}:
            way = [v]  # with what it came of
            while way[-1] in source:
                way.append(source[way[-1]])
            remade |= {*way} if way[-1] in made else set()
        found |= dict.fromkeys(group, frozenset(remade - numbers))
    return found


def _groups(layout: TrainingLayout) -> tuple[tuple[str, ...], ...]:
    return () if layout.forward_again is UNSET else layout.forward_again
