"""List scheduling: the compiled kernel against a plain twin that looks at every candidate each time, and against its promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.list_schedule import Csr, ListProblem, place_items


@st.composite
def problems(draw: st.DrawFn) -> tuple[ListProblem, list[list[int]], list[list[int]]]:
    routes, resources = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    held = [draw(st.lists(st.integers(0, resources - 1), min_size=1, max_size=3, unique=True)) for _ in range(routes)]
    number = st.integers(0, 6).map(float)
    hops = sum(map(len, held))
    items = draw(st.integers(1, 9))
    after: list[list[int]] = [draw(st.lists(st.integers(0, t - 1), max_size=2, unique=True)) if t else [] for t in range(items)]
    behind: list[list[int]] = [draw(st.lists(st.integers(0, t - 1), max_size=1)) if t else [] for t in range(items)]

    def turned(lists: list[list[int]]) -> Csr:
        return Csr.of([[t for t, x in enumerate(lists) if i in x] for i in range(items)])

    problem = ListProblem(
        route=np.array([draw(st.integers(0, routes - 1)) for _ in range(items)], np.int64), resources=Csr.of(held),
        offset=np.array([draw(number) for _ in range(hops)]), hold=np.array([draw(number) for _ in range(hops)]),
        delay=np.array([draw(number) for _ in range(routes)]), after=turned(after), behind=turned(behind),
        waits=np.array([len(a) + len(b) for a, b in zip(after, behind, strict=True)], np.int64),
    )  # fmt: skip
    return problem, after, behind


def twin(
    p: ListProblem, after: list[list[int]], behind: list[list[int]], urgency: list[float], tie: list[int], eager: bool
) -> list[tuple[int, float]]:
    """(item, start) in order of placing, by definition."""
    free: dict[int, float] = {}
    end: dict[int, float] = {}
    out: list[tuple[int, float]] = []
    while len(out) < len(after):
        candidates = []
        for t in range(len(after)):
            if t in end or any(b not in end for b in after[t] + behind[t]):
                continue
            at = max([0.0, *(end[b] for b in after[t])])
            for k in range(p.resources.ptr[p.route[t]], p.resources.ptr[p.route[t] + 1]):
                at = max(at, free.get(int(p.resources.values[k]), 0.0) - p.offset[k])
            candidates.append((at, -urgency[t], tie[t], t) if eager else (-urgency[t], at, tie[t], t))
        best = min(candidates)
        t, at = best[3], best[0] if eager else best[1]
        for k in range(p.resources.ptr[p.route[t]], p.resources.ptr[p.route[t] + 1]):
            free[int(p.resources.values[k])] = at + p.offset[k] + p.hold[k]
        end[t] = at + float(p.delay[p.route[t]])
        out.append((t, at))
    return out


@settings(max_examples=200, deadline=None)
@given(drawn=problems(), eager=st.booleans(), data=st.data())
def test_equals_the_twin(drawn: tuple[ListProblem, list[list[int]], list[list[int]]], eager: bool, data: st.DataObject) -> None:
    problem, after, behind = drawn
    n = len(after)
    urgency = [float(data.draw(st.integers(0, 3))) for _ in range(n)]
    tie = [data.draw(st.integers(0, 1)) for _ in range(n)]
    start, end, order = place_items(problem, np.array(urgency), np.array(tie, np.int64), eager=eager)
    assert [(t, start[t]) for t in order.tolist()] == twin(problem, after, behind, urgency, tie, eager)
    assert all(start[t] >= end[b] for t in range(n) for b in after[t])
    assert (end == start + problem.delay[problem.route]).all()


def test_items_that_wait_for_each_other() -> None:
    one = ListProblem(
        route=np.zeros(2, np.int64), resources=Csr.of([[0]]), offset=np.zeros(1), hold=np.ones(1), delay=np.ones(1), after=Csr.of([[1], [0]]),
        behind=Csr.of([[], []]), waits=np.ones(2, np.int64),
    )  # fmt: skip
    with pytest.raises(ValueError, match="2 of 2 items wait"):
        place_items(one, np.zeros(2), np.zeros(2, np.int64), eager=True)
