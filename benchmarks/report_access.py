"""The report for those who see it differently, in headless Chromium: axe-core's findings, names in the accessibility tree, targets below 24 px.

Pages of every kind (a pipeline, a collective, a run, a profiler's trace, two traces side by side), on a phone and a desktop, light and dark, and the
paper they print on. Needs Chromium, and axe-core where MESHWRIGHT_AXE names its file:

    npm install --prefix /tmp/axe axe-core
    MESHWRIGHT_AXE=/tmp/axe/node_modules/axe-core/axe.min.js python benchmarks/report_access.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bottleneck"))
import machine
from chromium import Chromium, chromium_path
from cuda_traces import Settings, write_ranks
from page_access import SIZES, axe_path, drawn, findings, named, small_targets, write_pages

LOOKS = ("phone", "desktop")


def main() -> dict[str, Any]:
    from meshwright.compare.ranks import read_ranks

    path, axe = chromium_path(), axe_path()
    if path is None or axe is None:
        raise SystemExit("needs Chromium, and axe-core in the file that MESHWRIGHT_AXE names (see the head of this script)")
    rows, seen = list[dict[str, Any]](), dict[str, Any]()
    version = re.search(r"axe v([\d.]+)", axe.read_text()[:400])
    with tempfile.TemporaryDirectory() as name, Chromium(path, timeout_s=120) as browser:
        folder = Path(name)
        views = [r.view for r in read_ranks(write_ranks(folder, Settings()), None)]
        agent = browser.value("navigator.userAgent")
        for kind, page in write_pages(folder, [views, views]).items():
            for size in LOOKS:
                for dark in (False, True):
                    width, height = SIZES[size]
                    browser.size(width, height, mobile=size == "phone", dark=dark)
                    browser.open(page)
                    wrong = {"axe": findings(browser, axe), "without a name": named(browser), "small targets": small_targets(browser)}
                    share, colours = drawn(browser, "rows")
                    look = f"{kind}, {size}, {'dark' if dark else 'light'}"
                    seen[look] = {**wrong, "drawn_share": round(share, 4), "colours": colours, "console": list(browser.errors)}
                    count = sum(map(len, wrong.values())) + len(browser.errors)
                    rows.append({"what": f"{look}: findings", "value": count, "unit": "", "limit": 0, "ratio": count})
            paper = browser.call("Page.printToPDF", printBackground=True)["data"]
            rows.append({"what": f"{kind}: on paper", "value": len(paper) * 3 // 4, "unit": "bytes"})
    return machine.record("report_access", rows, axe=version[1] if version else "", browser=agent, looks=seen)


if __name__ == "__main__":
    for row in main()["rows"]:
        sys.stdout.write(f"{row['what']:<50} {row['value']:10} {row['unit']}\n")
