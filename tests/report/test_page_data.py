"""What is packed into the page is what the timelines say: read back by a reader of its own, compared with the simulation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_plans import HOSTILE, Elements, content, expected_spans, spans_of, unpacked

from meshwright.errors import UsageError
from meshwright.io.trace.events import build_trace
from meshwright.program.program import Kind, Part
from meshwright.report.page.curves import thinned
from meshwright.report.page.document import report_page
from meshwright.report.page.packed import MAX_NAME_CHARACTERS, clean, pack
from meshwright.report.page.spans import MAX_TICKS, tick_of, timeline_view

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@given(st.lists(INT32), st.lists(st.floats(allow_nan=False)), st.lists(st.text()))
def test_what_is_packed_is_read_back(whole: list[int], parts: list[float], texts: list[str]) -> None:
    block = pack({"a": np.array(whole, np.int64), "b": np.array(parts, np.float64)}, {"t": texts})
    found = unpacked(block)
    assert found["a"] == whole and found["b"] == parts
    assert found["t"] == [clean(t) for t in texts] and all(t.isprintable() and len(t) <= MAX_NAME_CHARACTERS for t in found["t"])
    assert pack({"a": np.array(whole, np.int64), "b": np.array(parts, np.float64)}, {"t": texts}) == block


def test_numbers_beyond_32_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="beyond 32 bits"):
        pack({"a": np.array([1 << 31])}, {})


def test_names_keep_one_line_and_lose_what_hides() -> None:
    assert clean(HOSTILE) == HOSTILE.replace("\u202e", "\ufffd").replace("\x07", "\ufffd")
    assert clean("\ud800a\nb") == "\ufffda\ufffdb" and clean("x" * 1000) == "x" * (MAX_NAME_CHARACTERS - 1) + "…"


@given(st.floats(1e-12, 1e9))
def test_ticks_are_fine_and_fit(end_s: float) -> None:
    tick_s = 10.0 ** tick_of(end_s)
    assert end_s / tick_s <= MAX_TICKS * 1.001
    assert tick_s <= 1e-9 or end_s / tick_s > MAX_TICKS / 11


@pytest.mark.parametrize("kind", ["pipeline", "collective", "training"])
def test_every_simulated_span_is_on_the_page(kind: str) -> None:
    page = content(kind)
    data = Elements(report_page(page).html).data("data-target")
    found, expected = spans_of(data), expected_spans(page.timeline, "predicted")
    assert found.keys() == expected.keys()
    ticks = 1.01 * data["tick_s"]
    assert all(abs(found[k][0] - a) <= ticks and abs(found[k][1] - b) <= ticks for k, (a, b) in expected.items())
    assert data["end"] * data["tick_s"] == pytest.approx(page.timeline.makespan_s, rel=1e-6)


def test_a_run_stands_beside_its_prediction() -> None:
    page = content("run")
    assert page.run is not None
    data = Elements(report_page(page).html).data("data-run")
    c = page.run.comparison
    expected = expected_spans(c.predicted, "predicted") | expected_spans(c.typical_step(), "measured")
    assert spans_of(data).keys() == expected.keys()
    lanes: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for place, (group, origin, lane, role, _, _) in enumerate(data["rows"]):
        if role != "path":
            lanes.setdefault((group, lane), []).append((place, origin))
    pairs = [found for found in lanes.values() if len(found) > 1]
    assert len(pairs) >= page.ranks  # what computes, at least
    for (above, one), (below, two) in pairs:
        assert (one, two) == ("predicted", "measured") and below == above + 1


def test_measured_messages_stand_below_those_predicted_for_their_link() -> None:
    page = content("run")
    assert page.run is not None
    data = Elements(report_page(page).html).data("data-run")
    columns = unpacked(data["packed"])
    rows = [(lane.partition(" · ")[0], origin, first, last) for _, origin, lane, role, first, last in data["rows"] if role == "link"]
    for link in dict.fromkeys(link for link, *_ in rows):
        of_link = [i for i, row in enumerate(rows) if row[0] == link]
        assert of_link == list(range(of_link[0], of_link[-1] + 1))
        assert [rows[i][1] for i in of_link[:2]] == ["predicted", "measured"]
        steps = {origin: sorted(s for i in of_link for s in columns["step"][slice(*rows[i][2:])] if rows[i][1] == origin) for _, origin, *_ in rows}
        assert steps["predicted"] == steps["measured"]
    moved = page.run.comparison.typical_step().transfers
    assert moved is not None
    assert {link for link, *_ in rows} == {moved.links[k] for k in moved.link.tolist()}


def test_spans_of_a_row_are_sorted_and_apart() -> None:
    page = content("training")
    view = timeline_view(page.inlined.program, [page.timeline])
    for row in view.rows:
        start, end = view.start[row.first : row.last], (view.start + view.duration)[row.first : row.last]
        assert np.all(start[1:] >= end[:-1] - 1)  # one tick of rounding


def test_joined_spans_say_how_many_and_lose_no_time() -> None:
    page = content("pipeline")
    whole = timeline_view(page.inlined.program, [page.timeline])
    assert not whole.notes and int(whole.count.max()) == 1
    for most in (100, 40, len(whole.rows)):
        few = timeline_view(page.inlined.program, [page.timeline], most_spans=most)
        assert len(few.start) <= max(most, len(whole.rows)) and "are shown as" in few.notes[0]
        assert [(r.who, r.origin, r.lane) for r in few.rows] == [(r.who, r.origin, r.lane) for r in whole.rows]
        for a, b in zip(whole.rows, few.rows, strict=True):
            one, two = slice(a.first, a.last), slice(b.first, b.last)
            assert few.count[two].sum() == a.last - a.first and few.busy[two].sum() == whole.duration[one].sum()
            assert few.start[two].min() == whole.start[one].min()
            assert (few.start + few.duration)[two].max() == (whole.start + whole.duration)[one].max()
        joined = few.count > 1
        assert np.all(few.step[joined] == -1) and np.all(few.busy <= few.duration)


def test_rows_beyond_the_most_are_left_out_and_said() -> None:
    page = content("pipeline")
    view = timeline_view(page.inlined.program, [page.timeline], most_rows=5)
    assert len(view.rows) == 5 and view.rows[0].who == "critical path" and [n for n in view.notes if "rows are left out" in n] == list(view.notes)


def test_messages_beside_others_on_a_link_go_first() -> None:
    page = content("shared")
    whole = timeline_view(page.inlined.program, [page.timeline], collective=True)
    beside = [r for r in whole.rows if "also under way" in r.lane]
    assert beside and all(r.role == "link" for r in beside)
    view = timeline_view(page.inlined.program, [page.timeline], collective=True, most_rows=len(whole.rows) - 1)
    assert [r.lane for r in view.rows] == [r.lane for r in whole.rows if r not in beside]
    assert view.notes == (f"{len(beside):,} rows of messages that share a link with others are left out",)


@pytest.mark.parametrize("kind", ["pipeline", "collective", "training"])
def test_messages_are_those_of_the_program(kind: str) -> None:
    """Each message once, by a walk through the channels; its time lies between its sender's and its receiver's step."""
    page = content(kind)
    program = page.inlined.program
    data = Elements(report_page(page).html).data("data-transfers")
    found = unpacked(data["packed"])
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[int]] = {}
    for i, step in enumerate(program.iter_steps()):
        if step.kind is Kind.TRANSFER and Part.SEND in step.parts:
            sends.setdefault(step.chan_out, []).append(i)
        if step.kind is Kind.TRANSFER and Part.RECV in step.parts:
            receives.setdefault(step.chan_in, []).append(i)
    size = program.message_bytes()
    s = page.timeline.spans
    end_of = dict(zip(zip(s.step.tolist(), s.iteration.tolist(), strict=True), s.end_s.tolist(), strict=True))
    expected = []
    repeats = program.lanes.repeat[program.lane_of_step()]
    for channel, first in sends.items():
        for a, b in zip(first, receives[channel], strict=True):
            ends = [end_of[b, turn] for turn in range(int(repeats[b]))]
            expected += [
                (int(program.channels.src[channel]), int(program.channels.dst[channel]), float(size[a]), round(t / data["tick_s"])) for t in ends
            ]
    assert sorted(zip(found["src"], found["dst"], found["size"], found["end"], strict=True)) == sorted(expected)
    assert found["end"] == sorted(found["end"]) and all(a <= b for a, b in zip(found["start"], found["end"], strict=True))
    totals = [0] * len(data["actors"])
    for dst, amount in zip(found["dst"], found["size"], strict=True):
        totals[dst] += int(amount)
    assert totals == data["received_bytes"]
    for src, dst, route in zip(found["src"], found["dst"], found["route"], strict=True):
        names = [data["link_names"][k] for k in data["routes"][route]]
        assert names[0][0] == data["actors"][src] and names[-1][1] == data["actors"][dst]
        assert all(a[1] == b[0] for a, b in pairwise(names))


def test_more_messages_than_fit_are_counted() -> None:
    from meshwright.report.page.transfers import transfers

    page = content("collective")
    view = timeline_view(page.inlined.program, [page.timeline], collective=True)
    given = (page.inlined.program, view.trace, view.trace_category, page.fabric, page.plan.placement, view.tick_s)
    whole, part = transfers(*given), transfers(*given, most=10)
    assert len(part.src) == 10 and part.left_out == len(whole.src) - 10 and whole.left_out == 0
    assert part.received_bytes == whole.received_bytes and part.end.tolist() == whole.end[:10].tolist()
    assert len(whole.src) == len(build_trace(page.inlined.program, [page.timeline]).flows)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1000)), min_size=1, max_size=200), st.integers(1, 20))
def test_thinned_curves_keep_the_peak_and_never_fall_below(points: list[tuple[float, int]], most: int) -> None:
    points = sorted(points)
    time_s, value = np.array([t for t, _ in points]), np.array([float(v) for _, v in points])
    at, high = thinned(time_s, value, 1.0, most)
    assert len(at) <= max(most, 1) or len(time_s) <= most
    assert high.max() == value.max() and np.all(np.diff(at) >= 0)
    for t, v in zip(time_s, value, strict=True):
        assert high[np.searchsorted(at, t, side="right") - 1] >= v
