from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Cost, Priced, Transport
from meshwright.errors import UsageError
from meshwright.evidence import EVIDENCE_CODES, evidence_of_timeline, evidence_shares, step_evidence
from meshwright.program.builder import ProgramBuilder
from meshwright.timeline import Spans, Timeline


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 2), st.booleans()), max_size=30))
def test_shares_sum_to_one_and_count_only_the_path(steps):
    seconds, codes = np.array([s for s, _, _ in steps]), np.array([c for _, c, _ in steps], np.int8)
    path = [(i, 0) for i, (_, _, on) in enumerate(steps) if on]
    shares = evidence_shares(seconds, codes, path)
    assert list(shares) == list(EVIDENCE_CODES) and sum(shares.values()) == pytest.approx(1)
    total = sum(s for s, _, on in steps if on)
    for code, name in enumerate(EVIDENCE_CODES):
        expected = sum(s for s, c, on in steps if on and c == code)
        assert shares[name] == pytest.approx(expected / total if total > 0 else float(name == "measured"))


def test_a_repeated_step_counts_each_time():
    shares = evidence_shares(np.array([1.0, 3.0]), np.array([0, 2]), [(0, 0), (1, 0), (0, 1), (0, 2)])
    assert shares == pytest.approx({"measured": 0.5, "interpolated": 0.0, "assumed": 0.5})


@pytest.mark.parametrize(
    ("seconds", "codes", "path", "match"),
    [
        ([1.0], [0, 1], [], "2 evidence codes"),
        ([1.0], [3], [], "evidence code must be"),
        ([1.0], [-1], [], "evidence code must be"),
        ([1.0], [0], [(1, 0)], "step 1 of 1"),
        ([1.0], [0], [(-1, 0)], "critical path"),
        ([-1.0], [0], [(0, 0)], "not negative"),
        ([float("nan")], [0], [(0, 0)], "finite"),
    ],
)
def test_refusals(seconds, codes, path, match):
    with pytest.raises(UsageError, match=match):
        evidence_shares(np.array(seconds), np.array(codes), path)


@pytest.fixture
def program():
    """Rank 0 computes `a` (known) and `b` (unknown) and sends; rank 1 receives."""
    b = ProgramBuilder(ranks=2, name="p")
    x, y = b.buffer(0, chunks=1, chunk_bytes=4, role="input"), b.buffer(1, chunks=1, chunk_bytes=4, role="output")
    lane = b.lane(0, unit=0)
    lane.compute(b.op("F", graph="a", writes=[(x, 0, 1)]))
    lane.compute(b.op("F", graph="b", writes=[(x, 0, 1)]))
    channel = b.channel(0, 1)
    lane.send(channel, x, 0)
    b.lane(1).recv(channel, y, 0)
    return b.build()


def timeline(path, spans=((0, 1.0), (1, 2.0), (2, 1.0), (3, 4.0))):
    n = len(spans)
    step = np.array([s for s, _ in spans], np.int32)
    zero = np.zeros(n, np.int32)
    rows = Spans(rank=zero, lane=zero, step=step, iteration=zero, start_s=np.arange(n, dtype=float), end_s=np.arange(n) + [t for _, t in spans])
    return Timeline(origin="simulated", run_fabric="f", spans=rows, makespan_s=8.0, critical_path=path)


def test_shares_of_a_timeline(program):
    cost = Cost(table={"a|F": Priced(1.0, "measured", 1.0)}, transport=Transport(evidence="interpolated"))
    assert step_evidence(program, cost).tolist() == [0, 2, 1, 1]
    found = evidence_of_timeline(timeline([(0, 0), (1, 0), (2, 0), (3, 0)]), program, cost)
    assert found == pytest.approx({"measured": 1 / 8, "interpolated": 5 / 8, "assumed": 2 / 8})
    assert evidence_of_timeline(timeline([(1, 0)]), program, Cost(evidence="interpolated"))["interpolated"] == 1.0
    assert evidence_of_timeline(timeline([]), program, cost)["measured"] == 1.0


def test_spans_in_any_order(program):
    cost = Cost(table={"a|F": Priced(1.0, "measured", 1.0)})
    shuffled = timeline([(0, 0), (3, 0)], spans=((3, 3.0), (1, 2.0), (0, 1.0)))
    assert evidence_of_timeline(shuffled, program, cost) == pytest.approx({"measured": 0.25, "interpolated": 0, "assumed": 0.75})


def test_a_path_that_was_not_recorded(program):
    with pytest.raises(UsageError, match="not recorded"):
        evidence_of_timeline(timeline([(3, 0)], spans=((0, 1.0),)), program, Cost())
    with pytest.raises(UsageError, match="not recorded"):
        evidence_of_timeline(timeline([(0, 1)]), program, Cost())
