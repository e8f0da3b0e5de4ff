"""The page in a real browser, where one is installed: it draws without an error, answers keys, steps, stays in its width and asks for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import Chromium, chromium_path
from page_plans import collective_plan, content, pipeline_plan, renamed

from meshwright.report.page.document import report_page
from meshwright.report.page.gather import gather

BROWSER = chromium_path()
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here (install chromium, or name one in MESHWRIGHT_CHROMIUM)"),
    pytest.mark.real,
]  # fmt: skip
WIDTHS = {"phone": 390, "desktop": 1280}


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert BROWSER is not None
    with Chromium(BROWSER) as running:
        running.size(1280, 900)
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    hostile = renamed(pipeline_plan(), "</script><img/src=x/onerror=alert`1`>" + "-long" * 12)
    found = {kind: content(kind) for kind in ("pipeline", "collective", "run")} | {"hostile": gather(hostile, plan_file="<b>", checked=False)}
    for kind, page in found.items():
        (folder / f"{kind}.html").write_text(report_page(page).html)
    return {kind: folder / f"{kind}.html" for kind in found}


def quiet(browser: Chromium, page: Path) -> None:
    assert browser.errors == []
    assert browser.requests == [page.resolve().as_uri()]


def view(browser: Chromium) -> str:
    browser.settle()
    return str(browser.value("document.getElementById('timeline-status').textContent"))


def until(true: Callable[[], bool]) -> bool:
    return any(true() for _ in range(50))


@pytest.mark.parametrize("kind", ["pipeline", "collective", "run", "hostile"])
def test_it_draws_and_asks_for_nothing(browser: Chromium, pages: dict[str, Path], kind: str) -> None:
    for width in WIDTHS.values():
        browser.size(width, 844, mobile=width < 600)
        browser.open(pages[kind])
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        colours = browser.value(
            "(() => { const c = document.getElementById('rows'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " const seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size; })()"
        )
        assert colours > 5
        assert browser.value("document.querySelectorAll('#spans-body tr').length") > 0
        assert not browser.value("document.querySelectorAll('img, iframe, object').length")
        quiet(browser, pages[kind])


def test_the_table_says_what_the_timeline_holds(browser: Chromium, pages: dict[str, Path]) -> None:
    """All pages of the table together are all simulated spans of the compute lanes, longest first."""
    browser.size(1280, 900)
    browser.open(pages["pipeline"])
    spans = content("pipeline").timeline.spans
    program = content("pipeline").inlined.program
    compute = [i for i, lane in enumerate(spans.lane.tolist()) if int(program.lanes.role[lane]) == 0]
    browser.value("(() => { const r = document.getElementById('rows-shown'); r.value = 'compute'; r.dispatchEvent(new Event('change')); })()")
    browser.settle()
    found = []
    while True:
        found += browser.value("[...document.querySelectorAll('#spans-body tr')].map((r) => [r.children[0].textContent, r.children[4].textContent])")
        if browser.value("document.getElementById('spans-after').disabled"):
            break
        browser.value("document.getElementById('spans-after').click()")
    assert len(found) == len(compute)
    longest = max(float(spans.end_s[i] - spans.start_s[i]) for i in compute)
    assert float(found[0][1].split()[0]) == pytest.approx(longest, rel=1e-3)
    assert {name for name, _ in found} >= {"F stage0 micro-batch 0", "B stage3 micro-batch 7"}


def test_keys_move_zoom_choose_and_reach_the_table(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.size(1280, 900)
    browser.open(pages["run"])
    browser.value("document.getElementById('timeline-box').focus()")
    whole = view(browser)
    for key in ("+", "+"):
        browser.press(key)
    assert until(lambda: view(browser) != whole)  # a busy machine's browser draws later than it is told
    zoomed = view(browser)
    browser.press("ArrowRight")
    moved = view(browser)
    browser.press("ArrowLeft")
    assert view(browser) == zoomed != moved
    browser.press("End")
    assert view(browser).split(":")[0].endswith(whole.split(":")[0].split(" to ")[1])
    browser.press("Home")
    assert view(browser).startswith("0 s to ")
    browser.press("-")
    browser.press("-")
    assert view(browser) == whole
    for key in (".", ".", "ArrowDown", "Enter"):
        browser.press(key)
    assert view(browser) != whole
    said = browser.value("document.getElementById('chosen').textContent")
    assert "predicted:" in said and "measured:" in said and "(prediction " in said  # the two are found by their step
    browser.press("Escape")
    browser.settle()
    assert browser.value("document.getElementById('chosen').textContent") == ""
    for _ in range(4):  # the rows, the table's box, then its first span
        browser.press("Tab")
        if browser.value("document.activeElement.closest('#spans-body') !== null"):
            break
    assert browser.value("document.activeElement.closest('#spans-body') !== null")
    outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # one sees where the focus is
    browser.press("Enter")
    browser.settle()
    assert browser.value("document.getElementById('chosen').textContent").startswith(browser.value("document.activeElement.title"))
    quiet(browser, pages["run"])


def test_finding_choosing_rows_and_views(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.size(1280, 900)
    browser.open(pages["run"])
    every = view(browser)
    browser.value("(() => { const f = document.getElementById('find'); f.value = 'micro-batch 1'; f.dispatchEvent(new Event('input')); })()")
    assert view(browser) != every
    names = browser.value("[...document.querySelectorAll('#spans-body button')].map((b) => b.title)")
    assert names and all("micro-batch 1" in n for n in names)
    browser.value("(() => { const f = document.getElementById('find'); f.value = ''; f.dispatchEvent(new Event('input')); })()")
    browser.value("(() => { const r = document.getElementById('rows-shown'); r.value = 'all'; r.dispatchEvent(new Event('change')); })()")
    assert view(browser) != every
    browser.value("(() => { const r = document.getElementById('rows-shown'); r.value = 'link'; r.dispatchEvent(new Event('change')); })()")
    browser.value("document.getElementById('timeline-box').focus()")
    for key in (".", "ArrowDown", "ArrowDown"):  # the critical path, then a link
        browser.press(key)
    browser.settle()
    said = browser.value("document.getElementById('chosen').textContent")
    assert said.startswith("message, ") and "predicted:" in said and "measured:" in said
    browser.value("(() => { const v = document.getElementById('view'); v.value = 'target'; v.dispatchEvent(new Event('change')); })()")
    assert "other timeline" not in browser.value("document.getElementById('spans').innerText")
    quiet(browser, pages["run"])


@pytest.mark.parametrize("kind", ["collective", "pipeline"])
def test_stepping_through_all_transfers(browser: Chromium, pages: dict[str, Path], kind: str) -> None:
    browser.size(1280, 900)
    browser.open(pages[kind])
    steps = int(browser.value("document.getElementById('step-slider').max"))
    arrived = 0
    browser.value("document.getElementById('step-first').click()")
    for step in range(1, steps + 1):
        browser.value("document.getElementById('step-forward').click()")
        status = browser.value("document.getElementById('step-status').textContent")
        assert status.startswith(f"Step {step} of {steps}")
        arrived += int(status.split(": ")[1].split()[0].replace(",", ""))
        if step == 1:
            assert browser.value("document.querySelectorAll('#moving line.arriving').length") > 0
            assert browser.value("document.querySelectorAll('#step-body tr').length") > 0
    program = content(kind).inlined.program
    assert arrived == sum(int(n) for n in program.lanes.repeat[program.lane_of_step()][(program.steps.parts & 1) > 0])
    meters = browser.value("[...document.querySelectorAll('#step-progress label:not([hidden]) meter')].map((m) => m.value)")
    assert meters and all(m == 1 for m in meters)
    browser.value("document.getElementById('step-back').click()")
    assert browser.value("document.getElementById('step-status').textContent").startswith(f"Step {steps - 1} of")
    quiet(browser, pages[kind])


def test_dark_light_and_paper(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.size(1280, 900, dark=True)
    browser.open(pages["run"])
    dark = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.size(1280, 900)
    browser.settle()
    assert browser.value("getComputedStyle(document.body).backgroundColor") != dark
    data = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(data) > 10_000
    assert not browser.value("document.querySelectorAll('details[open]').length")  # folded again
    quiet(browser, pages["run"])


def test_a_page_whose_data_is_broken_says_so(browser: Chromium, pages: dict[str, Path], tmp_path: Path) -> None:
    html = pages["collective"].read_text()
    at = html.index('"data":"') + 60
    broken = tmp_path / "broken.html"
    broken.write_text(html[:at] + "AAAA" + html[at + 4 :])
    browser.open(broken, ready="Boolean(document.getElementById('timeline-status')?.textContent)")
    assert "cannot be shown" in browser.value("document.getElementById('timeline-status').textContent")
    assert collective_plan().bound is not None and "nothing can be faster than" in browser.value("document.body.innerText")
