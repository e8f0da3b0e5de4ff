"""Refining a candidate: borders between stages moved, and recomputation and sharding chosen anew per layer of every stage.

Hill climbing on the closed form, then the simulator decides: what it does not find faster is dropped, so refining never makes worse.
Later stages keep fewer micro-batches in flight, so they have memory to recompute less (activation-recompute, Korthikanti et al., appendix C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from ....profile.layer_table import LayerChoice
from ....profile.network import ProfiledLayout
from .candidate import Candidate, Problem
from .proposals import with_best_choices

__all__ = ["refined"]

# Rounds of hill climbing; most climbs end sooner by themselves.
MAX_ROUNDS = 12
# Layers that move over a border between stages at once.
MOVED_LAYERS = (1, 2, 4)


def refined(problem: Problem, candidate: Candidate, value: Callable[[Candidate], float]) -> list[Candidate]:
    """Candidates that the closed form finds better than `candidate`, best last. `value`: seconds, infinite where it does not fit."""
    found: list[Candidate] = []
    best, least = candidate, value(candidate)
    choices = problem.choices_of(candidate)
    for _ in range(MAX_ROUNDS):
        moved = False
        for tried in _neighbours(problem, best, choices):
            seconds = value(tried)
            if seconds < least * (1 - 1e-9):
                best, least, moved = tried, seconds, True
        if not moved:
            break
        found.append(best)
    return found


def _neighbours(problem: Problem, c: Candidate, choices: list[LayerChoice]) -> Iterator[Candidate]:
    anew = with_best_choices(problem, c, choices, c.source.removesuffix(", refined") + ", refined")
    if anew is not None:
        yield anew
    layers = [count for _, _, count in c.layout.pieces]
    for s in range(len(layers) - 1):
        # a schedule's pieces are many and small: one layer at a time, and choices are made anew only for the borders as they are
        for step in MOVED_LAYERS if c.layout.schedule is None else MOVED_LAYERS[:1]:
            for a, z in ((s, s + 1), (s + 1, s)):
                if layers[a] > step:
                    moved = layers.copy()
                    moved[a] -= step
                    moved[z] += step
                    shifted = replace(c, layout=_with_layers(c.layout, moved), source=c.source.removesuffix(", refined") + ", refined")
                    yield shifted
                    anew_too = len(set(c.choices)) > 1 and c.layout.schedule is None
                    again = with_best_choices(problem, shifted, choices, shifted.source) if anew_too else None
                    if again is not None:
                        yield again


def _with_layers(layout: ProfiledLayout, layers: list[int]) -> ProfiledLayout:
    """`layers` of every piece."""
    held, schedule = [0] * len(layout.stages), layout.schedule
    for (s, _, _), n in zip(layout.pieces, layers, strict=True):
        held[s] += n
    stages = tuple(msgspec.structs.replace(s, layers=n) for s, n in zip(layout.stages, held, strict=True))
    if schedule is not None:
        schedule = msgspec.structs.replace(schedule, layers=tuple(layers))
    return msgspec.structs.replace(layout, stages=stages, schedule=schedule)
