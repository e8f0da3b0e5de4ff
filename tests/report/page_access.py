"""What a page is like for those who see it differently: axe-core's findings, the accessibility tree, sizes of targets, contrast of what is drawn.

axe-core is not part of this repository: `MESHWRIGHT_AXE` names its file (`npm install axe-core`, then node_modules/axe-core/axe.min.js).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chromium import Chromium
from page_plans import content

from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.diff import by_module, difference
from meshwright.report.page.document import report_page
from meshwright.report.page.measured import Side, measured_page

__all__ = ["LEAST_TARGET_PX", "SIZES", "axe_path", "drawn", "findings", "named", "small_targets", "tree", "write_pages"]

SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1280, 900), "wide": (1920, 1080)}
LEAST_TARGET_PX = 24
# Controls that are too small: links in the middle of a sentence have its height, as WCAG 2.2 (2.5.8) allows.
_SMALL = """(() => [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex="0"]')].filter((e) => {
  const r = e.getBoundingClientRect(), s = getComputedStyle(e);
  if (!r.width || !r.height || s.visibility === 'hidden' || e.closest('[hidden]') || e.classList.contains('skip')) return false;
  if (e.tagName === 'A' && s.display === 'inline' && e.closest('p, li, td, dd')) return false;
  return r.width < LEAST || r.height < LEAST;
}).map((e) => `${e.tagName} ${e.id || e.className || e.textContent.slice(0, 20)} ${Math.round(e.getBoundingClientRect().width)}x${
  Math.round(e.getBoundingClientRect().height)}`))()"""
# Of a canvas: how many of its pixels differ from its most frequent colour, and how many colours there are.
_DRAWN = """((id) => { const c = document.getElementById(id), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Map();
  for (let i = 0; i < d.length; i += 4) { const k = d[i] << 16 | d[i + 1] << 8 | d[i + 2]; seen.set(k, (seen.get(k) || 0) + 1); }
  const most = Math.max(...seen.values()); return [1 - 4 * most / d.length, seen.size]; })"""


def axe_path() -> Path | None:
    """The file that MESHWRIGHT_AXE names; None where it names none that is there."""
    named = os.environ.get("MESHWRIGHT_AXE", "")
    return Path(named) if named and Path(named).is_file() else None


def write_pages(folder: Path, traces: list[Any]) -> dict[str, Path]:
    """One page of every kind. `traces`: views of two runs of a profiler."""
    sides = [Side(name=name, found=break_down(views)) for name, views in zip(("before", "after"), traces, strict=True)]
    made = {kind: report_page(content(kind)).html for kind in ("pipeline", "collective", "run")}
    made["trace"] = measured_page(sides[:1]).html
    made["two runs"] = measured_page(sides, difference(*(by_module(s.found.views) for s in sides))).html
    for kind, html in made.items():
        (folder / f"{kind}.html").write_text(html)
    return {kind: folder / f"{kind}.html" for kind in made}


def findings(browser: Chromium, axe: Path) -> list[str]:
    """What axe-core finds on the open page: `rule (impact): how many, the first`."""
    browser.value(axe.read_text() + "; true")
    found = browser.value(
        "axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations.map((v) => [v.id, v.impact, v.nodes.length, v.nodes[0].html]))"
    )
    return [f"{rule} ({impact}): {count}, {first[:120]}" for rule, impact, count, first in found]


def small_targets(browser: Chromium) -> list[str]:
    return list(browser.value(_SMALL.replace("LEAST", str(LEAST_TARGET_PX))))


def drawn(browser: Chromium, canvas: str) -> tuple[float, int]:
    """(share of the pixels that are not background, number of colours)."""
    share, colours = browser.value(f"{_DRAWN}('{canvas}')")
    return float(share), int(colours)


def tree(browser: Chromium) -> list[tuple[str, str, dict[str, Any]]]:
    """(role, name, properties) of everything that a screen reader is told of, in its order."""
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    return [
        (str(n.get("role", {}).get("value", "")), str(n.get("name", {}).get("value", "")),
         {p["name"]: p["value"].get("value") for p in n.get("properties", ())})
        for n in nodes if not n.get("ignored")
    ]  # fmt: skip


def named(browser: Chromium) -> list[str]:
    """What has no name in the accessibility tree and needs one."""
    needs = {"button", "link", "combobox", "searchbox", "slider", "img", "image", "application", "region", "table", "heading", "meter"}
    return [f"{role} without a name" for role, name, _ in tree(browser) if role in needs and not name.strip()]
