"""The report page in headless Chromium: 200,000 spans from navigation to the first complete draw, what zooming and stepping cost, sizes.

The page marks itself when everything on it stands (`meshwright:drawn`: unpacked, timeline and table drawn, stepper ready); the time is the
page's own, from navigation. Two pipelines of 16 and 64 stages are simulated for it; a third has names of 300 characters with markup in them. The
browser is limited to two cores. At the end: what the page of a plan for 16,384 devices takes to write. Needs Chromium (Debian:
chromium); without it, only sizes and what writing costs.

    python benchmarks/report_page.py [--quick]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "report"))
import machine
from chromium import Chromium, chromium_path
from plan_file import pipeline

SPANS = 200_000
LIMIT_S, LIMIT_BYTES = 2.0, 8_000_000
LIMIT_LARGE_S = 10.0
REPEATS = 7
LONG = "<img src=x onerror=alert(1)></script>" + "module." * 40


def content(stages: int, microbatches: int, name: str = "") -> Any:
    """A simulated pipeline; `name`: what its segments are called besides their number."""
    import msgspec

    from meshwright.cost import Cost, Priced, Transport
    from meshwright.fabric.fabric import Device, Fabric, Link
    from meshwright.io.fabric.document import fabric_document
    from meshwright.plan.plan import CycleEntry, Plan
    from meshwright.program.hash import program_hash
    from meshwright.report.page.gather import gather

    program = pipeline(stages, microbatches)
    if name:
        program = replace(program, ops=replace(program.ops, graph=tuple(f"{name}{graph}" for graph in program.ops.graph)))
    places = [f"gpu{s}" for s in range(stages)]
    ends = [(a, b) for i, a in enumerate(places) for b in places[max(i - 1, 0) : i + 2] if a != b]
    fabric = Fabric(
        name="chain", devices=tuple(Device(name=p) for p in places),
        links=tuple(Link(src=a, dst=b, rate_Bps=1_000_000_000, latency_s=1e-5) for a, b in ends),
    )  # fmt: skip
    table = {program.ops.key(i): Priced(0.002 if program.ops.name[i] == "F" else 0.0041, "assumed") for i in range(len(program.ops))}
    cost = Cost(table=table, transport=Transport(per_message_s=1e-5))
    key = program_hash(program)
    plan = Plan(
        kind="pipeline", job={"cost": msgspec.to_builtins(cost), "works": {}}, target_fabric=fabric_document(fabric), placement=tuple(places),
        programs={key: program}, cycle=(CycleEntry(program=key),), decisions={},
    )  # fmt: skip
    return gather(plan, plan_file="plan.json", checked=False)


def measured(path: Path) -> dict[str, Any]:
    """One visit: times in ms from navigation, and of some interactions until they are drawn."""
    browser = chromium_path()
    assert browser is not None
    with Chromium(browser, timeout_s=60) as c:
        c.size(1280, 900)
        c.open(path)
        found = {
            "drawn_ms": c.value("performance.getEntriesByName('meshwright:drawn')[0].startTime"),
            "unpacked_ms": c.value("performance.getEntriesByName('meshwright:unpacked')[0].startTime"),
            "table_rows": c.value("document.querySelectorAll('#spans-body tr').length"),
        }
        c.value("document.getElementById('timeline-box').focus()")
        frame = "new Promise((done) => { const t = performance.now(); const key = new KeyboardEvent('keydown', {key: '%s', bubbles: true});"
        frame += " document.getElementById('timeline-box').dispatchEvent(key);"
        frame += " requestAnimationFrame(() => setTimeout(() => done(performance.now() - t))); })"
        zooms = [c.value(frame % key) for key in ("+", "+", "+", "+", "ArrowRight", "ArrowRight", "-", "-", "End", "Home", "0")]
        c.settle()
        steps = "(() => { const t = performance.now(); for (let k = 0; k < 20; k++) document.getElementById('step-forward').click();"
        found["step_ms"] = c.value(steps + " return (performance.now() - t) / 20; })()")
        found |= {"zoom_ms": statistics.median(zooms), "slowest_zoom_ms": max(zooms), "errors": c.errors, "requests": len(c.requests)}
        found["overflow"] = c.value("document.documentElement.scrollWidth > innerWidth")
        found["images"] = c.value("document.querySelectorAll('img').length")
    return found


def one(what: str, stages: int, spans: int, name: str, folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes a page, visits it REPEATS times, adds its rows."""
    from meshwright.report.page.document import report_page

    few = report_page(content(stages, 32, name)).spans / 32
    page = content(stages, int(spans / few) + 1, name)
    start = time.process_time()
    made = report_page(page)
    written_s = time.process_time() - start
    path = folder / "page.html"
    path.write_text(made.html)
    facts: dict[str, Any] = {"spans": made.spans, "shown": made.shown, "messages": made.messages, "bytes": made.size_bytes}
    rows.append({"what": f"{what}: size of the page", "value": made.size_bytes, "unit": "bytes", "limit": LIMIT_BYTES})
    rows.append({"what": f"{what}: writing it, processor time per 1,000 spans", "value": 1e6 * written_s / made.spans, "unit": "ms"})
    if chromium_path() is None:
        return facts
    visits = [measured(path) for _ in range(REPEATS)]
    facts["visits"] = visits
    drawn = statistics.median(v["drawn_ms"] for v in visits) / 1000
    rows.append({"what": f"{what}: navigation to first complete draw, median", "value": drawn, "unit": "s", "limit": LIMIT_S})
    worst = max(v["drawn_ms"] for v in visits) / 1000
    rows.append({"what": f"{what}: navigation to first complete draw, slowest", "value": worst, "unit": "s", "limit": LIMIT_S})
    rows.append({"what": f"{what}: a zoom or move until drawn, median", "value": statistics.median(v["zoom_ms"] for v in visits), "unit": "ms"})
    rows.append({"what": f"{what}: a step of the transfers, median", "value": statistics.median(v["step_ms"] for v in visits), "unit": "ms"})
    wrong = sum(len(v["errors"]) + (v["requests"] != 1) + v["overflow"] + v["images"] + (v["table_rows"] == 0) for v in visits)
    rows.append({"what": f"{what}: console messages, requests, overflows, markup from names", "value": wrong, "unit": "", "limit": 0, "ratio": wrong})
    return facts


def large(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The page of a plan for 16,384 devices that `collective plan` wrote, by the command: processor time with everything that it loads."""
    plan, program = folder / "large.json.gz", [sys.executable, "-m", "meshwright"]
    made = ["collective", "plan", "broadcast", "--fabric", "dgx-h100:2048", "--size", "1MiB", "--strategy", "forestcoll"]
    subprocess.run([*program, *made, "--out", str(plan), "--quiet"], check=True, capture_output=True)
    for what, more in (("proved and written", []), ("written, not proved", ["--no-check"])):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*program, "report", str(plan), "-o", str(folder / "large.html"), *more, "--quiet"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append({"what": f"16,384 devices: {what}, processor time", "value": spent_s, "unit": "s", "limit": LIMIT_LARGE_S})
    rows.append({"what": "16,384 devices: size of the page", "value": (folder / "large.html").stat().st_size, "unit": "bytes", "limit": LIMIT_BYTES})


def main() -> dict[str, Any]:
    global REPEATS
    quick = "--quick" in sys.argv
    spans = SPANS // 10 if quick else SPANS
    REPEATS = 2 if quick else REPEATS
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)  # the browser inherits it
    rows: list[dict[str, Any]] = []
    facts = {}
    with tempfile.TemporaryDirectory() as folder:
        for what, stages, name in (("16 stages", 16, ""), ("64 stages", 64, ""), ("names of 300 characters", 16, LONG)):
            facts[what] = one(what, stages, spans, name, Path(folder), rows)
        if not quick:
            large(Path(folder), rows)
    if quick:
        return {"rows": rows, **facts}
    return machine.record("report_page", rows, cores_of_browser=len(cores), pages=facts)


if __name__ == "__main__":
    for row in main()["rows"]:
        limit = f"  limit {row['limit']:g}" if "limit" in row else ""
        sys.stdout.write(f"{row['what']:<70} {row['value']:12.4g} {row['unit']}{limit}\n")
