"""The page without a browser: well-formed, closed to the outside, nothing from a name becomes markup, every reference has its place."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from page_plans import HOSTILE, Elements, collective_plan, content, pipeline_plan, renamed, run_of, unpacked

from meshwright.errors import Unsupported
from meshwright.plan.plan import Alternative, CycleEntry, Plan
from meshwright.program.fold_find import fold
from meshwright.program.hash import program_hash
from meshwright.report.page import document
from meshwright.report.page.document import MAX_PAGE_BYTES, report_page
from meshwright.report.page.gather import gather
from meshwright.report.page.html import Html, cell, joined, shortened, table, tag

KINDS = ["pipeline", "collective", "training", "run"]


@pytest.fixture(scope="module", params=KINDS)
def page(request: pytest.FixtureRequest) -> tuple[str, str, Elements]:
    html = report_page(content(request.param)).html
    return request.param, html, Elements(html)


def test_elements_are_closed_and_ids_are_unique(page: tuple[str, str, Elements]) -> None:
    _, html, found = page
    assert html.startswith("<!DOCTYPE html>\n<html lang=") and not found.mismatched and not found.open
    ids = found.ids()
    assert len(ids) == len(set(ids))
    for _, attributes, _ in found.found:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            if attributes.get(name):
                assert set(str(attributes[name]).split()) <= {*ids, *(f"received-{i}" for i in range(64))}
        if str(attributes.get("href", "")).startswith("#"):
            assert str(attributes["href"])[1:] in ids, attributes


def test_nothing_comes_from_outside(page: tuple[str, str, Elements]) -> None:
    _, _, found = page
    for tag_name, attributes, _ in found.found:
        assert not {"src", "style", "srcdoc", "action", "formaction"} & attributes.keys(), (tag_name, attributes)
        assert not [k for k in attributes if k.startswith("on")]
        assert str(attributes.get("href", "#")).startswith("#")
        assert tag_name not in ("link", "iframe", "object", "embed", "img", "base", "form")
    scripts = [(a, text) for a, text in found.all("script") if a.get("type") != "application/json"]
    (_, script), (_, style) = scripts[0], found.all("style")[0]
    assert len(scripts) == 1 and len(found.all("style")) == 1
    policy = next(str(a["content"]) for a, _ in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not re.search(r"\beval\b|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write|fetch\(|XMLHttpRequest|import\(", script)
    written = " ".join([script, style, policy, *(str(v) for _, a, _ in found.found for v in a.values())])
    assert set(re.findall(r"https?://[^\s\"'<>)]+", written)) <= {"http://www.w3.org/2000/svg"}  # a name of SVG, not an address
    assert "@import" not in style and "url(" not in style


def test_drawings_are_whole(page: tuple[str, str, Elements]) -> None:
    _, _, found = page
    number = r"-?\d+(\.\d+)?"
    for attributes, _ in found.all("path"):
        assert re.fullmatch(rf"M{number} {number}([HV]{number})*Z", str(attributes["d"]))
    for attributes, _ in found.all("polyline"):
        assert re.fullmatch(rf"({number},{number} ?)+", str(attributes["points"]))


def test_headings_landmarks_and_labels(page: tuple[str, str, Elements]) -> None:
    kind, _, found = page
    names = [name for name, _, _ in found.found]
    assert names.count("h1") == names.count("main") == names.count("header") == names.count("footer") == names.count("nav") == 1
    levels = [int(n[1]) for n in names if re.fullmatch("h[1-6]", n)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert all(a.get("aria-labelledby") for a, _ in found.all("section"))
    assert all(a.get("aria-label") or text.strip() for a, text in found.all("button"))
    assert all(a.get("scope") for a, _ in found.all("th")) and names.count("caption") == names.count("table")
    shown = [a["id"] for a, _ in found.all("section")]
    expected = ["summary", "timeline", "where", "fabric", "memory", "run", "layout", "others", "decisions", "sources"]
    left_out = {"collective": {"where", "memory", "run"}, "run": set[str]()}.get(kind, {"run"})
    assert shown == [x for x in expected if x not in left_out]


def test_every_figure_names_its_source(page: tuple[str, str, Elements]) -> None:
    kind, _, found = page
    figures = [a for _, a, _ in found.found if a.get("class") == "figure"]
    links = [a for a, _ in found.all("a") if str(a.get("class", "")).startswith("source")]
    assert len(links) >= len(figures) >= 3
    targets = {str(a["href"])[1:] for a in links}
    assert targets <= set(found.ids())
    assert ("source-measured" in targets) == (kind == "run")
    said = " ".join("".join(t) for _, _, t in found.found)
    assert "seed 0" in said and "meshwright 0." in said and "certificate" in said
    if kind == "run":
        assert "a processor" in said and "torch 2.13.0" in said and "a note of the run" in said


def test_equal_content_gives_equal_pages() -> None:
    assert report_page(content("run")).html == report_page(content("run")).html


@pytest.mark.parametrize("kind", ["pipeline", "collective"])
def test_hostile_names_stay_text(kind: str) -> None:
    plan: Plan = renamed(pipeline_plan() if kind == "pipeline" else collective_plan(), "</script><img/src=x/onerror=alert`1`>&\"'")
    name, made = next(iter(plan.decisions.items()))
    more = {name: {**made, "why": HOSTILE, "options": {HOSTILE: HOSTILE}}, HOSTILE: {"strategy": HOSTILE, "why": ""}}
    others = (Alternative(what=HOSTILE * 3, time_s=1.0, why=HOSTILE), Alternative(what="refused", why=HOSTILE))
    content = gather(replace(plan, decisions=more, alternatives=others), plan_file=HOSTILE, checked=False)
    html = report_page(content).html
    found = Elements(html)
    assert not found.mismatched and not found.all("img") and "alert(1)</" not in html and "<!-- \u202e" not in html
    assert len([a for a, _ in found.all("script") if a.get("type") != "application/json"]) == 1
    said = "".join("".join(t) for _, _, t in found.found)
    assert "<img src=x onerror=alert(1)>" in said  # shown as what it is
    assert "\u202e" not in html and "\x07" not in html and "not checked" in said
    assert any("onerror" in group for group in found.data("data-target")["groups"])
    assert any("onerror" in actor for actor in found.data("data-transfers")["actors"])


def test_hostile_names_of_a_run_stay_text() -> None:
    page = content("training")
    run = run_of(page)
    bad = {**run.document, "machine": {"cores": HOSTILE, "cpu_model": HOSTILE}, "versions": {HOSTILE: HOSTILE}, "data": HOSTILE}
    html = report_page(replace(page, run=replace(run, folder=HOSTILE, document=bad))).html
    found = Elements(html)
    assert not found.mismatched and not found.all("img") and len(found.all("script")) == 4


def test_long_names_are_shortened_and_whole_in_their_title() -> None:
    name = "server/" + "very-" * 20 + "long"
    content = gather(renamed(pipeline_plan(), name), plan_file="plan.json", checked=False)
    found = Elements(report_page(content).html)
    cells = [(a, text) for a, text in found.all("span") if a.get("title") == name]
    assert cells and all(len(text) <= 48 and text.endswith("long") for _, text in cells)


def test_a_page_too_large_gets_fewer_spans_and_then_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    page = gather(pipeline_plan(4, 120), plan_file="plan.json", checked=False)
    whole = report_page(page)
    assert whole.size_bytes < MAX_PAGE_BYTES and whole.shown == whole.spans
    monkeypatch.setattr(document, "MIN_SPANS", 50)
    monkeypatch.setattr(document, "MAX_PAGE_BYTES", whole.size_bytes - 5000)
    assert "…" not in "".join(str(a["d"]) for a, _ in Elements(whole.html).all("path"))  # long drawings are not names
    less = report_page(page, most_spans=4000)
    assert less.shown < whole.shown and less.size_bytes <= whole.size_bytes - 5000 and less.spans == whole.spans and less.notes
    data = Elements(less.html).data("data-target")
    assert sum(unpacked(data["packed"])["count"]) == whole.spans and data["notes"]
    monkeypatch.setattr(document, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(Unsupported, match="at most 1,000 are written"):
        report_page(page)


def test_a_folded_plan_says_for_how_many_a_row_stands() -> None:
    plan = collective_plan()
    folded = fold(plan.main)
    assert folded is not None
    key = program_hash(folded)
    whole = gather(plan, plan_file="plan.json", checked=False)
    page = gather(replace(plan, programs={key: folded}, cycle=(CycleEntry(program=key),)), plan_file="plan.json", checked=False)
    assert page.timeline.makespan_s == pytest.approx(whole.timeline.makespan_s)
    found = Elements(report_page(page).html)
    assert found.data("data-target")["groups"] == ["critical path", "rank 0 on box0/gpu0 and 7 alike"]
    said = " ".join("".join(t) for _, _, t in found.found)
    assert "Each stored rank stands for 8 alike" in said and "symmetric ranks are stored once" in said
    assert "data-transfers" not in found.ids()


def test_markup_escapes_whatever_is_not_markup() -> None:
    assert tag("p", "a<b", Html("<i></i>"), title='"&') == '<p title="&quot;&amp;">a&lt;b<i></i></p>'
    assert joined(["<", None, Html("<b></b>")]) == "&lt;<b></b>" and cell(3) == "<td>3</td>"
    assert tag("input", disabled=True, hidden=False, data_x=None) == "<input disabled>"
    assert "…" in shortened("x" * 100) and 'title="' + "x" * 100 in shortened("x" * 100)
    made = Elements(table("<caption>", ["<h>"], [["<td>", "<b>"]]))
    assert not made.mismatched and {"caption", "th", "td"} <= {n for n, _, _ in made.found} and not made.all("b")
