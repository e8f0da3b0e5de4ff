"""Writes what benchmarks measured into docs: `python tools/measured_tables.py`. `tests/docs/test_measured_tables.py` compares.

A page has `<!-- measured: NAME -->`, and `<!-- end -->` behind it; what lies between comes from `benchmarks/results/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PART = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def milliseconds(time_s: float) -> str:
    return f"{time_s * 1e3:.0f} ms" if time_s < 1 else f"{time_s:.1f} s"


def sparse() -> str:
    rows = rows_of("sparse_aggregate")
    densities = sorted({r["density"] for r in rows})
    lines = []
    for place in dict.fromkeys(r["what"].split(":")[0] for r in rows):
        for alike in sorted({r["overlap"] for r in rows}):
            of = {r["density"]: r for r in rows if r["what"].startswith(f"{place}:") and r["overlap"] == alike}
            best = {d: min((w for w in r["medians_s"] if w != "auto"), key=r["medians_s"].__getitem__) for d, r in of.items()}
            lines.append([place, f"{alike:.0%}", *(f"{best[d]} {of[d]['ratio']:.2f}" for d in densities)])
    within, by_way = (sum(r[what] <= r["asked"] for r in rows) for what in ("ratio", "choice"))
    worst = max(rows, key=lambda r: r["ratio"])
    low, high = worst["interval"]
    said = f"\nAt most {worst['asked']:.2f}: {within} of {len(rows)} cases, and {by_way} by the medians of the way that was taken. "
    said += f"The worst is {worst['ratio']:.2f} (95 % interval {low:.2f} to {high:.2f}).\n"
    return table(["workers", "places alike", *(f"{d:.1%}" for d in densities)], lines) + said


def aggregate() -> str:
    rows = [r for r in rows_of("aggregate") if r["unit"] == "s"]
    return table(
        ["all-reduce", "time", "beside", "times", "asked"],
        ([r["what"].split(", beside ")[0], milliseconds(r["value"]), r["what"].split(", beside ")[1], *_times(r)] for r in rows),
    )


def _times(row: Row) -> tuple[str, str]:
    if "gloo" in row["what"]:  # how many times as long the other takes
        return f"1 / {row['peer'] / row['value']:.2f}", f"1 / {row['asked']}"
    return f"{row['ratio']:.2f}", f"at most {row['asked']}" if row.get("asked") else ""


def reproducible() -> str:
    lines = []
    for r in [*rows_of("reproducible_lab"), *rows_of("reproducible_training")]:
        value = f"{r['value']:.0f}" if r["unit"] == "results" else f"{r['value']:.0%}" if r["unit"] == "share" else milliseconds(r["value"])
        asked = f"more than {r['asked_more_than']:.0%}" if "asked_more_than" in r else ""
        if r["unit"] == "s":
            value, asked = f"{value} beside {milliseconds(r['peer'])}: {r['ratio']:.2f} times", f"at most {r['asked_ratio']} times"
        lines.append([r["what"], value + (" (it is the fold)" if r.get("is_the_fold") else ""), asked])
    return table(["what", "reached", "asked"], lines)


def bfb() -> str:
    lines = []
    for r in rows_of("bfb"):
        if "lab" in r["what"]:
            size, of = int(r["what"].split()[2]), r["simulated_s"] / r["value"]
            times = milliseconds(r["value"]), milliseconds(r["simulated_s"]), f"{of:.2f}", f"{r['gain']:.2f}"
            lines.append([r["what"].split()[0], f"{size // 1024:,} KiB", *times])
    return table(["collective", "size", "BFB", "simulated", "of the measured time", "ring takes, times"], lines)


TABLES: dict[str, Callable[[], str]] = {"sparse": sparse, "aggregate": aggregate, "reproducible": reproducible, "bfb": bfb}


def rewritten(page: str) -> str:
    """The page with what was measured last."""
    return PART.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (today := rewritten(text)) != text:
            path.write_text(today, encoding="utf-8")
