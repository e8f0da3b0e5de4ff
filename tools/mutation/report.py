"""The report: per room how many mutants were caught, and every survivor, with the reason where one is written in `explained.toml`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .operators import Mutation
from .runs import Verdict

EXPLAINED = Path(__file__).parent / "explained.toml"
WANTED = {"check": 0.9, "lower": 0.9}
WANTED_ELSEWHERE = 0.8
SINCE = ("since:", "caught by hand:")
NO_TESTS = {"untouched": "no test of the room runs the line", "not run": "not run, counted as not caught"}


def _key(scope: str, before: str, after: str) -> tuple[str, str, str]:
    return scope, before.strip(), after.strip()


def reasons(path: Path = EXPLAINED) -> dict[tuple[str, str, str], str]:
    """(scope, line before, line after) -> why no test can or need notice the change."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []) if path.exists() else []
    return {_key(e["scope"], e["before"], e["after"]): e["reason"] for e in entries}


def reason_of(mutation: Mutation, known: dict[tuple[str, str, str], str]) -> str:
    return known.get(_key(mutation.scope, mutation.before, mutation.after), "")


def rows(verdicts: dict[str, list[Verdict]], seed: int, commit: str) -> list[dict[str, Any]]:
    """One row per room: share caught of all that were drawn, with the share that is asked."""
    made = []
    for room, found in verdicts.items():
        caught = sum(v.verdict == "caught" for v in found)
        wanted = WANTED.get(room, WANTED_ELSEWHERE)
        share = round(caught / len(found), 4) if found else 0.0
        row = {"what": f"{room}: mutants that its tests catch", "value": share, "unit": "share", "at_least": wanted}
        made.append({**row, "room": room, "caught": caught, "drawn": len(found), "seed": seed, "commit": commit})
    return made


def survivors(verdicts: dict[str, list[Verdict]], seed: int) -> list[dict[str, Any]]:
    known = reasons()
    return [
        {
            "room": room, "seed": seed, "place": f"{v.mutation.path}:{v.mutation.line}", "scope": v.mutation.scope, "operator": v.mutation.operator,
            "before": v.mutation.before.strip(), "after": v.mutation.after.strip(), "verdict": v.verdict, "tests": v.tests,
            "reason": reason_of(v.mutation, known),
        }
        for room, found in verdicts.items() for v in found if v.verdict != "caught"
    ]  # fmt: skip


def with_other_rooms(of: str, new: list[dict[str, Any]], run: set[tuple[str, int]], record: Path, rooms: Iterable[str]) -> list[dict[str, Any]]:
    """`new` and, of the rooms and seeds that were not `run`, what an earlier `record` holds under `of` (rows, survivors), by `rooms` and seed."""
    old = json.loads(record.read_text(encoding="utf-8")).get(of, []) if record.exists() else []
    order = [*rooms]
    kept = [x for x in old if (x.get("room"), x.get("seed")) not in run]
    return sorted([*new, *kept], key=lambda x: (order.index(x["room"]), x["seed"]))


def markdown(rows: list[dict[str, Any]], left: list[dict[str, Any]], notes: Iterable[str] = ()) -> str:
    """A draw's share is that of the tests as they were; "since" counts survivors for which a test, or other code, has come after it was looked at."""
    lines = [
        "# Mutants of the source", "",
        "`tools/mutate_source`: one line of a room's source is changed; the tests of that room notice, or do not.", "",
        "| room | seed | caught | drawn | share | asked | since | the same or chosen | open | commit |", "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        here = [s["reason"] for s in left if (s["room"], s["seed"]) == (row["room"], row["seed"])]
        since, open_ = sum(x.startswith(SINCE) for x in here), here.count("")
        share, counts = f"{row['value']:.0%} | {row['at_least']:.0%}", f"{since} | {len(here) - since - open_} | {open_}"
        lines.append(f"| {row['room']} | {row['seed']} | {row['caught']} | {row['drawn']} | {share} | {counts} | {row['commit']} |")
    lines += ["", *notes]
    for s in left:
        what = NO_TESTS.get(s["verdict"], f"survived {s['tests']} tests")
        lines += ["", f"**{s['place']}** `{s['scope']}`, {s['operator']}, seed {s['seed']}, {what}"]
        lines += ["", "```diff", f"-{s['before']}", f"+{s['after']}", "```"]
        lines += ["", s["reason"]] if s["reason"] else []
    return "\n".join(lines) + "\n"
