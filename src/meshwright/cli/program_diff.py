"""`meshwright program diff A B`: what differs, step by step, lane by lane."""

from __future__ import annotations

import argparse
from dataclasses import fields
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .frame import Result
from .program_show import choose

if TYPE_CHECKING:
    from ..program.program import Program

HELP = "compare two programs step by step"
EPILOG = "Exit code 1 if they differ. Steps are compared by what they do, not by their numbers."
MAX_MOVED_STEPS = 3000  # steps of a lane up to which moved steps are recognised, which compares all with all


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="A", help="plan or program")
    parser.add_argument("two", metavar="B", help="plan or program")
    parser.add_argument("--limit", type=int, default=40, metavar="N", help="print at most N differences (default 40; 0 = all)")


def run(args: argparse.Namespace) -> Result:
    if args.limit < 0:
        raise UsageError(f"--limit must be >= 0, got {args.limit}")
    (_, one), (_, two) = choose(args.one, None), choose(args.two, None)
    found = differences(one, two)
    document = {"schema": "meshwright.program-diff", "version": 1, "equal": not found, "differences": found}
    shown = found[: args.limit] if args.limit else found
    text = [f"{d['where']}: {d['text']}" for d in shown]
    if len(found) > len(shown):
        text.append(f"... {len(found) - len(shown)} more differences")
    return Result(document, "\n".join(text) if found else "the programs are the same", exit_code=1 if found else 0)


def differences(one: Program, two: Program) -> list[dict[str, Any]]:
    """What differs between the programs, tables first, then lane by lane."""
    found: list[dict[str, Any]] = []
    for what in ("ranks", "switches", "contract", "fold"):
        a, b = getattr(one, what), getattr(two, what)
        if str(a) != str(b):
            found.append({"where": what, "text": f"{_brief(a)} became {_brief(b)}"})
    for table in ("channels", "buffers", "sizes", "comms"):
        found += _table(table, getattr(one, table), getattr(two, table))
    for lane in range(max(len(one.lanes), len(two.lanes))):
        if lane >= len(two.lanes) or lane >= len(one.lanes):
            p, word = (one, "is gone") if lane >= len(two.lanes) else (two, "is new")
            count = int(p.lanes.end[lane] - p.lanes.start[lane])
            found.append({"where": f"lane {lane}", "text": f"{word} (rank {int(p.lanes.actor[lane])}, {count} steps)"})
        else:
            found += _lane(one, two, lane)
    return found


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rows(table: Any, row: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for column in fields(table):
        values = getattr(table, column.name)
        if column.name in ("sets", "routes", "producer") or not len(values):
            continue
        value = values[row]
        out[column.name] = value.tolist() if hasattr(value, "tolist") else value
    return out


def _table(name: str, a: Any, b: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if len(a) != len(b):
        found.append({"where": name, "text": f"{len(a)} became {len(b)}"})
    for row in range(min(len(a), len(b))):
        x, y = _rows(a, row), _rows(b, row)
        x.pop("last", None), y.pop("last", None)  # step numbers
        changed = [f"{k} {x.get(k)} became {y.get(k)}" for k in sorted({*x, *y}) if x.get(k) != y.get(k)]
        if changed:
            found.append({"where": f"{name}[{row}]", "text": "; ".join(changed)})
    return found


def _keys(p: Program, lane: int) -> list[str]:
    """What each step of a lane does and waits for, with other steps named by lane and position."""
    lane_of, start = p.lane_of_step(), p.lanes.start
    out = []
    for step in range(int(p.lanes.start[lane]), int(p.lanes.end[lane])):
        st = p.step(step)
        text = p.describe(step)
        waits = [f"lane {lane_of[d]} position {d - start[lane_of[d]]} lag {lag}" for d, lag in st.after]
        channels = f" [channels {st.chan_in}, {st.chan_out}]" if st.chan_in >= 0 or st.chan_out >= 0 else ""
        extra = ""
        if st.kind == 0:
            o = p.ops
            part = f"part {int(o.part[st.op])} of {int(o.parts[st.op])}, accumulate {int(o.accumulate[st.op])}"
            extra = f" [{part}, reads {o.reads[st.op].tolist()}, writes {o.writes[st.op].tolist()}]"
        elif st.kind == 2:
            extra = f" [binds {p.calls.binds[st.op].tolist()}]"
        out.append(text[text.index("(") + 1 : -1] + channels + extra + (f" after {'; '.join(waits)}" if waits else ""))
    return out


def _lane(one: Program, two: Program, lane: int) -> list[dict[str, Any]]:
    where = f"lane {lane} of rank {int(one.lanes.actor[lane])}"
    found = []
    for column in ("actor", "unit", "repeat", "role"):
        a, b = int(getattr(one.lanes, column)[lane]), int(getattr(two.lanes, column)[lane])
        if a != b:
            found.append({"where": where, "text": f"{column} {a} became {b}"})
    a_keys, b_keys = _keys(one, lane), _keys(two, lane)
    if a_keys == b_keys:
        return found
    if max(len(a_keys), len(b_keys)) > MAX_MOVED_STEPS:
        moves = [("replace", i, i + 1, i, i + 1) for i in range(min(len(a_keys), len(b_keys))) if a_keys[i] != b_keys[i]]
        if len(a_keys) != len(b_keys):
            found.append({"where": where, "text": f"{len(a_keys)} steps became {len(b_keys)}"})
    else:
        moves = [x for x in SequenceMatcher(None, a_keys, b_keys, autojunk=False).get_opcodes() if x[0] != "equal"]
    for _, i, j, k, m in moves:
        for step in range(i, j):
            found.append({"where": f"{where}, position {step}", "text": f"- {a_keys[step]}", "one": a_keys[step]})
        for step in range(k, m):
            found.append({"where": f"{where}, position {step}", "text": f"+ {b_keys[step]}", "two": b_keys[step]})
    return found
