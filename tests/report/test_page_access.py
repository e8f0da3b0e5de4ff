"""The page for those who see it differently, in a real browser: names, headings, targets, what is drawn, light, dark and on paper."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bottleneck"))
from chromium import Chromium, chromium_path
from cuda_traces import Settings, write_ranks
from page_access import SIZES, axe_path, drawn, findings, named, small_targets, tree, write_pages

from meshwright.compare.ranks import read_ranks

BROWSER, AXE = chromium_path(), axe_path()
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here (install chromium, or name one in MESHWRIGHT_CHROMIUM)"),
    pytest.mark.real,
]  # fmt: skip
KINDS = ["pipeline", "collective", "run", "trace", "two runs"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert BROWSER is not None
    with Chromium(BROWSER) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    views = [r.view for r in read_ranks(write_ranks(folder, Settings()), None)]
    return write_pages(folder, [views, views])


@pytest.mark.parametrize("kind", KINDS)
def test_everything_has_a_name_and_room_for_a_finger(browser: Chromium, pages: dict[str, Path], kind: str) -> None:
    for width, height in (SIZES["phone"], SIZES["desktop"]):
        browser.size(width, height, mobile=width < 600)
        browser.open(pages[kind])
        assert named(browser) == []
        assert small_targets(browser) == []
        assert browser.value("document.documentElement.scrollWidth <= innerWidth") and browser.errors == []
    headings = [(name, int(p["level"])) for role, name, p in tree(browser) if role == "heading"]
    assert headings[0][1] == 1 and [level for _, level in headings].count(1) == 1
    assert all(b[1] <= a[1] + 1 for a, b in pairwise(headings))  # no level is skipped
    assert {"Summary", "Timeline"} <= {name for name, _ in headings}
    assert "banner" in (roles := {role for role, _, _ in tree(browser)}) and {"main", "navigation", "contentinfo"} <= roles


@pytest.mark.parametrize("dark", [False, True])
def test_the_timeline_is_drawn_light_dark_and_on_paper(browser: Chromium, pages: dict[str, Path], dark: bool) -> None:
    browser.size(1280, 900, dark=dark)
    for kind in ("run", "two runs"):
        browser.open(pages[kind])
        for canvas in ("rows", "overview"):
            share, colours = drawn(browser, canvas)
            assert share > 0.1 and colours > 8, (kind, canvas)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_curves_have_axes(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.size(1280, 900)
    browser.open(pages["run"])
    plots = browser.value("[...document.querySelectorAll('#run .plot')].map((p) => [...p.querySelectorAll('span')].map((s) => s.textContent))")
    assert len(plots) >= 2 and all(len(p) == 5 and p[3] == "step" and all(p) for p in plots)
    memory = browser.value("[...document.querySelectorAll('#memory .plot span')].map((s) => s.textContent)")
    assert "time in the step" in memory and "0 B" in memory


def test_many_alike_ranks_are_shown_once_with_their_communication(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.size(1280, 900)
    browser.open(pages["run"])
    browser.value("(() => { const r = document.getElementById('rows-shown'); r.value = 'step'; r.dispatchEvent(new Event('change')); })()")
    browser.settle()
    assert drawn(browser, "rows")[0] > 0.1
    assert "hatched: communication" in browser.value("document.getElementById('legend').textContent")


@pytest.mark.skipif(AXE is None, reason="no axe-core here (npm install axe-core; MESHWRIGHT_AXE names axe.min.js)")
@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_nothing(browser: Chromium, pages: dict[str, Path], kind: str) -> None:
    assert AXE is not None
    browser.size(1280, 900)
    browser.open(pages[kind])
    assert findings(browser, AXE) == []
