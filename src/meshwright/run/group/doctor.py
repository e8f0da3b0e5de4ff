"""Reading the flight records of all ranks and naming the first divergence in one line.

The rule is the one that the ranks themselves use (`group.verdict`); here the views come from files, and what the connections would tell comes from
the machine: whether the process is there, or stopped. A record of another machine, or of a run that is over as a whole, speaks by its place alone.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ..machine.process import stopped
from .record_file import FAILED, LIVE, SUFFIX, GroupRecord, RankRecord, call_text, read_record
from .recorder import process_started
from .verdict import DEAD, SILENT, UP, Verdict, View, first_cause, place_text, rank_list

__all__ = ["ALIVE", "GONE", "STOPPED", "UNKNOWN", "Diagnosis", "GroupFinding", "diagnose", "dump", "find_records", "liveness"]

ALIVE, GONE, STOPPED, UNKNOWN = "alive", "gone", "stopped", "unknown"
MIN_STUCK_S = 1.0  # that a live rank has waited for a message before the doctor takes it for lost; messages of a healthy run come sooner
MAX_FILES = 100_000  # records read from one folder, so that a folder of something else ends
Key = tuple[tuple[int, ...], int]  # a group: its global ranks, and which of those with the same ranks


@dataclass(frozen=True)
class GroupFinding:
    """`verdict` None: nothing is wrong. `places`: global rank -> where it is; `waits`: (source, target, seconds), the longest first."""

    ranks: tuple[int, ...]
    verdict: Verdict | None
    line: str
    places: Mapping[int, str]
    waits: Sequence[tuple[int, int, float]]


@dataclass(frozen=True)
class Diagnosis:
    """`line`: the first divergence, or that there is none."""

    run: str
    line: str
    wrong: bool
    groups: Sequence[GroupFinding]
    processes: Mapping[int, str]
    damaged: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        groups = []
        for g in self.groups:
            found: dict[str, Any] = {"ranks": list(g.ranks), "line": g.line, "places": {str(r): p for r, p in g.places.items()}}
            found["waits"] = [{"link": f"{a} -> {b}", "seconds": round(s, 6)} for a, b, s in g.waits]
            if (v := g.verdict) is not None:
                link = f"{g.ranks[v.source]} -> {g.ranks[v.target]}" if v.source >= 0 and v.target >= 0 else ""
                found["verdict"] = {
                    "code": v.code, "message": v.message, "rank": g.ranks[v.rank], "step": v.step, "link": link, "how": v.how, "hint": v.hint,
                }  # fmt: skip
            groups.append(found)
        return {
            "schema": "meshwright.doctor", "version": 1, "run": self.run, "line": self.line, "wrong": self.wrong,
            "processes": {str(r): p for r, p in sorted(self.processes.items())}, "groups": groups, "damaged": list(self.damaged),
        }  # fmt: skip


def find_records(paths: Sequence[str | Path], run: str = "") -> tuple[list[RankRecord], list[str]]:
    """Records of one run (the latest, unless named) in folders and files, and what could not be read.

    Raises: UsageError (nothing there, no such run); FormatError for a file that was named itself.
    """
    found: list[RankRecord] = []
    damaged: list[str] = []
    for path in map(Path, paths):
        named = not path.is_dir()
        for file in [path] if named else sorted(path.glob(f"*{SUFFIX}"))[:MAX_FILES]:
            try:
                found.append(read_record(file))
            except (FormatError, UsageError) as error:
                if named:
                    raise
                damaged.append(str(error))
    where = ", ".join(str(p) for p in paths)
    if not found:
        told = f"; damaged: {damaged[0]}" if damaged else ""
        hint = "MESHWRIGHT_RECORD_DIR says where ranks write them; those of a run that ended well are removed"
        raise UsageError(f"no flight records{told}", where=where, hint=hint)
    runs: dict[str, int] = defaultdict(int)
    for record in found:
        runs[record.header.run] = max(runs[record.header.run], record.header.wall_ns)
    if run and run not in runs:
        raise UsageError(f"no run {run!r}", where=where, hint=f"runs: {', '.join(sorted(runs)[:8])}")
    chosen = run or max(runs, key=lambda r: (runs[r], r))
    return [r for r in found if r.header.run == chosen], damaged


def dump(records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Everything in the records; times in ns of each machine's monotonic clock, `call` in words."""
    out = []
    for record in records:
        groups = []
        for group in record.groups:
            row = asdict(group)
            for item, call in zip(row["history"], group.history, strict=True):
                item["call"] = call_text(call.call, call.size_bytes)
                item["name"] = f"{call.name:015x}"
            groups.append(row)
        out.append({"header": msgspec.to_builtins(record.header), "torn": record.torn, "groups": groups})
    return out


def liveness(record: RankRecord) -> str:
    """What the machine says of the process that wrote a record."""
    header = record.header
    if header.host != socket.gethostname():
        return UNKNOWN
    if process_started(header.pid) != header.started or not header.started:
        return GONE
    return STOPPED if stopped(header.pid) else ALIVE


def diagnose(
    records: Sequence[RankRecord], alive: Mapping[int, str] | None = None, now_ns: int | None = None, damaged: Sequence[str] = ()
) -> Diagnosis:  # fmt: skip
    """`alive`: process states by global rank, default: asked of this machine."""
    alive = dict(alive) if alive is not None else {r.header.rank: liveness(r) for r in records}
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    groups: dict[Key, dict[int, GroupRecord]] = defaultdict(dict)
    for record in records:
        seen: dict[tuple[int, ...], int] = defaultdict(int)
        for group in sorted(record.groups, key=lambda g: g.id):
            groups[group.ranks, seen[group.ranks]][record.header.rank] = group
            seen[group.ranks] += 1
    findings = [_examine(ranks, here, alive, now_ns) for (ranks, _), here in sorted(groups.items(), key=lambda x: (-len(x[0][0]), x[0]))]
    wrong = [f for f in findings if f.verdict is not None]
    if wrong:
        line = wrong[0].line
    else:
        world = {r for f in findings for r in f.ranks}
        line = f"no divergence among {rank_list(sorted(world))}" if world else "no group has been made"
        if findings:
            line += f"; {_where(findings[0])}"
    run = records[0].header.run if records else ""
    return Diagnosis(run, line, bool(wrong), findings, alive, tuple(damaged))


def _where(finding: GroupFinding) -> str:
    found = sorted(set(finding.places.values()))
    return found[0] if len(found) == 1 else f"{len(found)} places between {found[0]} and {found[-1]}"


def _examine(ranks: tuple[int, ...], here: Mapping[int, GroupRecord], alive: Mapping[int, str], now_ns: int) -> GroupFinding:
    """One group. Ranks of views are the group's own numbers."""
    over = all(alive.get(r, UNKNOWN) == GONE for r in here)
    views: dict[int, View] = {}
    links: dict[int, str] = {}
    stuck = False
    for number, rank in enumerate(ranks):
        group, process = here.get(rank), alive.get(rank, UNKNOWN)
        if group is None:
            links[number] = UP  # it has left no record
            continue
        ended = group.state != LIVE
        if process == GONE and not over and not ended:
            links[number] = DEAD
        elif process == STOPPED:
            links[number] = SILENT
        view = views[number] = _view(number, group, now_ns, moving=process == ALIVE)
        stuck = stuck or bool(view.why)
    lost = [r for r in links if links[r] in (DEAD, SILENT)]
    told = next((g.verdict for g in here.values() if g.state == FAILED and g.verdict), "")
    places = {ranks[r]: _place(v, links.get(r, ""), ranks) for r, v in views.items()}
    waits = _waits(ranks, here)
    shown = dict(views)
    for number in lost:
        del views[number]
    table = "".join(links.get(r, UP) for r in range(len(ranks)))
    for view in views.values():
        view.links = table
    verdict = None
    if lost or stuck or told or _differ(list(views.values())):
        missing = [r for r in range(len(ranks)) if r not in shown]
        verdict = _absent(missing, ranks) if missing and not lost and not told else first_cause(views, len(ranks), ranks)
        if told:
            verdict.message = told
    line = _line(verdict, shown, ranks) if verdict is not None else ""
    return GroupFinding(ranks, verdict, line, places, waits)


def _view(number: int, group: GroupRecord, now_ns: int, *, moving: bool) -> View:
    history = [(c.number, c.call, c.size_bytes, c.name) for c in group.history[-64:]]
    running = next((c for c in group.history if c.state in ("running", "failed")), None)
    done = [c.number for c in group.history if c.state == "done"]
    view = View(rank=number, asked=group.asked, history=history, number=max(done, default=0))
    if running is not None:
        view.state, view.number, view.step = "walking", running.number, group.step
        if group.waiting:
            view.waiting, view.peer, view.receives = True, group.peer, group.receives
            view.waited_s = max(0.0, (now_ns - group.since_ns) / 1e9)
            view.why = "deadline" if not moving or view.waited_s >= MIN_STUCK_S else ""
    elif group.history and group.history[-1].state == "builtin":
        view.number = group.history[-1].number
    if group.state not in (LIVE, FAILED):
        view.state = "closed"
    return view


def _differ(views: Sequence[View]) -> bool:
    known: dict[int, tuple[int, int, int]] = {}
    return any(known.setdefault(n, (c, s, p)) != (c, s, p) for v in views for n, c, s, p in v.history)


def _absent(missing: Sequence[int], ranks: Sequence[int]) -> Verdict:
    names = rank_list([ranks[r] for r in missing])
    hint = "copy the records of all machines into one folder"
    return Verdict(code="group-failed", message=f"{names} left no record here", rank=missing[0], where=names, hint=hint, how="no record")


def _place(view: View, link: str, ranks: Sequence[int]) -> str:
    text = place_text(view, ranks)
    return {DEAD: "process gone; was at ", SILENT: "process stopped; is at "}.get(link, "") + text


def _line(verdict: Verdict, views: Mapping[int, View], ranks: Sequence[int]) -> str:
    """The verdict and where the others are."""
    at: dict[int, list[int]] = defaultdict(list)
    for number, view in views.items():
        if number != verdict.rank:
            at[view.number].append(ranks[number])
    words = [verdict.message]
    culprit = views.get(verdict.rank)
    if culprit is not None:
        words.append(f"rank {ranks[verdict.rank]} is at {place_text(culprit, ranks)}")
    for number, rows in sorted(at.items()):
        words.append(f"{rank_list(rows)} {'are' if len(rows) > 1 else 'is'} at {number}")
    idle = [ranks[r] for r, v in views.items() if not v.waiting and r != verdict.rank]
    if idle and len(idle) < len(views) - 1:
        words.append(f"{rank_list(idle)} {'wait' if len(idle) > 1 else 'waits'} for nobody")
    return "; ".join(words)


def _waits(ranks: Sequence[int], here: Mapping[int, GroupRecord]) -> list[tuple[int, int, float]]:
    """Seconds that either end has waited for a link's messages since the group began."""
    total: dict[tuple[int, int], float] = defaultdict(float)
    for rank, group in here.items():
        for peer, ns in enumerate(group.receive_ns):
            total[ranks[peer], rank] += ns / 1e9
        for peer, ns in enumerate(group.send_ns):
            total[rank, ranks[peer]] += ns / 1e9
    return sorted(((a, b, s) for (a, b), s in total.items() if s > 0), key=lambda x: (-x[2], x[0], x[1]))
