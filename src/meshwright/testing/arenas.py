"""Random arenas, for tests of where storages may lie."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ..arena import ArenaProblem, rows

__all__ = ["arena_problems"]


@st.composite
def arena_problems(draw: st.DrawFn, *, storages: int = 7, streams: int = 3) -> ArenaProblem:
    """Random operators on streams with events, and storages that they make and read."""
    ops = draw(st.integers(1, 9))
    stream = [draw(st.integers(0, streams - 1)) for _ in range(ops)]
    after = [sorted(draw(st.sets(st.integers(0, v - 1), max_size=2))) if v else [] for v in range(ops)]
    ancestors = _ancestors(stream, after)
    sources, consumers = [], []
    for _ in range(draw(st.integers(1, storages))):
        first = draw(st.integers(0, ops - 1))
        later = [v for v in range(ops) if first in ancestors[v]]
        sources.append([first, *(draw(st.sets(st.sampled_from(later), max_size=1)) if later else ())])
        consumers.append(sorted(draw(st.sets(st.sampled_from([first, *later]), max_size=3))))
    count = len(sources)
    some = st.sets(st.integers(0, count - 1), max_size=1)
    return ArenaProblem(
        stream=np.array(stream, np.int32), after=rows(after), size_bytes=np.array([draw(st.integers(0, 9)) for _ in sources], np.int64),
        sources=rows(sources), consumers=rows(consumers), alignment_bytes=draw(st.sampled_from([1, 1, 4])), from_start=frozenset(draw(some)),
        to_end=frozenset(draw(some)), runs=draw(st.sampled_from([(), ((0, 1),), ((2, 0, 1),)])) if count >= 3 else (),
    )  # fmt: skip


def _ancestors(stream: list[int], after: list[list[int]]) -> list[set[int]]:
    """Of every operator: those before it on its stream, those it waits for, and theirs."""
    found: list[set[int]] = []
    last: dict[int, int] = {}
    for v, s in enumerate(stream):
        before = [*after[v], *([last[s]] if s in last else [])]
        found.append({*before}.union(*(found[u] for u in before)))
        last[s] = v
    return found
