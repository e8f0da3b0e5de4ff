"""Error bars on the page: what `train explain` says the prediction rests on, in words and drawn to one scale."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
from page_plans import HOSTILE, Elements, content, training_plan

from meshwright.explain.explanation import explain_plan
from meshwright.explain.numbers import seconds_text
from meshwright.report.page.document import report_page

CAPTION = "What the predicted step rests on, with error bars"


@pytest.fixture(scope="module")
def page():
    return content("training")


def bars_of(html: str) -> list[tuple[str, float, float, float]]:
    """(text, low, high, prediction) of every drawn bar, in units of the drawing."""
    found = []
    for text, inner in re.findall(r'<svg viewBox="-1 0 242 12" class="error-bar" role="img" aria-label="([^"]*)">(.*?)</svg>', html):
        x, width, line = (float(re.search(rf' {name}="([^"]*)"', inner)[1]) for name in ("x", "width", "x1"))
        found.append((text, x, x + width, line))
    return found


def test_they_are_explains(page):
    found = explain_plan(training_plan(), quick=True)
    assert page.bars.assumptions == found.assumptions and (page.bars.low_s, page.bars.high_s) == (found.low_s, found.high_s)
    html = report_page(page).html
    step_s = page.timeline.makespan_s
    moving = [a for a in found.assumptions if a.high_s - a.low_s > 1e-6 * step_s]
    drawn = bars_of(html)
    assert moving and len(drawn) == 1 + len(moving)
    low, high = found.low_s, found.high_s
    assert drawn[0][0] == f"{seconds_text(low)} to {seconds_text(high)}"
    assert {text for text, *_ in drawn[1:]} == {f"{seconds_text(a.low_s)} to {seconds_text(a.high_s)}" for a in moving}
    first, last = min([low, *(a.low_s for a in moving)]), max([high, *(a.high_s for a in moving)])
    of_text = {f"{seconds_text(a.low_s)} to {seconds_text(a.high_s)}": (a.low_s, a.high_s) for a in moving} | {drawn[0][0]: (low, high)}
    for text, begin, end, line in drawn:
        wanted = [(t - first) / (last - first) * 240 for t in (*of_text[text], step_s)]
        assert [begin, end, line] == pytest.approx(wanted, abs=1.1)
    widths = [end - begin for _, begin, end, _ in drawn[1:]]
    assert widths == sorted(widths, reverse=True)
    said = "".join(text for _, text in Elements(html).all("caption"))
    assert CAPTION in said
    assert f"{seconds_text(low)} to {seconds_text(high)} if its prices are off" in html


def test_what_does_not_move_the_step_is_named(page):
    still = {a.what for a in page.bars.assumptions if a.high_s - a.low_s <= 1e-6 * page.timeline.makespan_s}
    html = report_page(page).html
    assert ("do not move the step" in html) == bool(still) and all(what in html for what in still)


def test_names_from_files_are_text(page):
    odd = tuple(msgspec.structs.replace(a, source=HOSTILE, what=HOSTILE) for a in page.bars.assumptions)
    html = report_page(replace(page, bars=msgspec.structs.replace(page.bars, assumptions=odd))).html
    assert "<img" not in html and not Elements(html).mismatched


def test_without_error_bars_there_is_no_table():
    for kind in ("pipeline", "collective"):
        html = report_page(content(kind)).html
        assert CAPTION not in html and 'class="error-bar"' not in html
