"""Traces of our own, drawn and mutated: what the readers and the analysis make of them against counting that shares no code with either.

A drawn trace is a list of events in whole nanoseconds. It is written in the dress that a mutation asks for (other order, begins and ends, packed,
a list without a head, numbers as texts, unknown fields) or damaged (an event without a time, half an event, the end of the file missing), which
leaves out what cannot be read. `counted` answers from the events alone, over every nanosecond at which something begins or ends.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...bottleneck.device import device_times
from ...io.trace.read import read_trace
from ...trace.trace import ABSENT, Trace

__all__ = ["DRESSES", "Drawn", "counted", "drawn_trace", "generated_traces", "seen"]

Rng = np.random.Generator
MUTANTS_OF_A_TRACE = 6
HOST, STREAMS = 100, (7, 20)
BASE_NS = 1_700_000_000_000_000  # of the first event: profilers count from the epoch, in µs


@dataclass(frozen=True)
class Event:
    """`stream` -1: on a thread of the host. `launch`: number that joins a call with its kernel, or 0."""

    name: str
    category: str
    thread: int
    start_ns: int
    duration_ns: int
    stream: int = -1
    launch: int = 0


@dataclass(frozen=True)
class Drawn:
    """`lost`: places of events that the dress leaves unreadable. `dress` makes the text from the rows."""

    events: tuple[Event, ...]
    lost: frozenset[int] = frozenset()
    dress: Callable[[list[str]], str] = field(default=lambda rows: '{"traceEvents": [\n' + ",\n".join(rows) + "\n]}")
    row: Callable[[Event], str] = field(default=lambda event: json.dumps(_document(event)))
    packed: bool = False

    def text(self) -> str:
        return self.dress([self.row(event) for event in self.events])

    @property
    def readable(self) -> list[Event]:
        return [event for place, event in enumerate(self.events) if place not in self.lost]


def drawn_trace(rng: Rng) -> Drawn:
    """A few steps on one thread, nested operators, calls that launch kernels on two streams."""
    events: list[Event] = []
    now, launch = BASE_NS + int(rng.integers(1000)), 0
    free = dict.fromkeys(STREAMS, now)
    for step in range(int(rng.integers(1, 4))):
        begin = now
        for _ in range(int(rng.integers(1, 5))):
            first = now + int(rng.integers(0, 3000))
            now = first + int(rng.integers(1, 200))
            for _ in range(int(rng.integers(0, 3))):
                launch += 1
                call = Event("cudaLaunchKernel", "cuda_runtime", HOST, now, int(rng.integers(1, 2000)), launch=launch)
                stream = int(rng.choice(STREAMS))
                name = str(rng.choice(["gemm", "ncclDevKernel_AllReduce_Sum", "Memcpy HtoD", "relu"]))
                category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
                start = max(free[stream], call.start_ns + int(rng.integers(0, 4000)))
                kernel = Event(name, category, stream, start, int(rng.integers(1, 9000)), stream, launch)
                free[stream] = start + kernel.duration_ns + int(rng.choice([0, 0, 500]))
                events += [call, kernel]
                now = call.start_ns + call.duration_ns + int(rng.integers(0, 100))
            events.append(Event(str(rng.choice(["aten::mm", "aten::add", "aten::relu"])), "cpu_op", HOST, first, now - first))
            now += int(rng.integers(1, 500))
        events.append(Event(f"ProfilerStep#{step + 5}", "user_annotation", HOST, begin, now - begin))
        now += int(rng.integers(1, 300))
    return Drawn(tuple(events))


def _document(event: Event) -> dict[str, Any]:
    place: dict[str, Any] = {"pid": 0, "tid": event.thread} if event.stream >= 0 else {"pid": 4242, "tid": event.thread}
    args: dict[str, Any] = {"correlation": event.launch} if event.launch else {}
    if event.stream >= 0:
        args |= {"device": 0, "stream": event.stream}
    return {
        "ph": "X", "cat": event.category, "name": event.name, **place, "ts": event.start_ns / 1000, "dur": event.duration_ns / 1000,
        "args": args,
    }  # fmt: skip


# ---- dresses: what a mutation does ---------------------------------------------------------------------------------------------
def _shuffled(drawn: Drawn, rng: Rng) -> Drawn:
    return replace(drawn, events=tuple(drawn.events[int(i)] for i in rng.permutation(len(drawn.events))))


def _bare(drawn: Drawn, rng: Rng) -> Drawn:
    return replace(drawn, dress=lambda rows: "[" + ",".join(rows) + "]")


def _one_line(drawn: Drawn, rng: Rng) -> Drawn:
    return replace(drawn, dress=lambda rows: '{"a":{"traceEvents":[1]},"traceEvents":[' + ",".join(rows) + '],"z":"]}"}')


def _indented(drawn: Drawn, rng: Rng) -> Drawn:
    return replace(drawn, dress=lambda rows: json.dumps({"schemaVersion": 1, "traceEvents": [json.loads(r) for r in rows], "b": [[]]}, indent=3))


def _packed(drawn: Drawn, rng: Rng) -> Drawn:
    return replace(drawn, packed=True)


def _unknown_fields(drawn: Drawn, rng: Rng) -> Drawn:
    def row(event: Event) -> str:
        return json.dumps({"zz": [{"ph": "X"}, "}"], **_document(event), "s": 'a "quoted" \\ {brace', "n": None})

    return replace(drawn, row=row)


def _as_texts(drawn: Drawn, rng: Rng) -> Drawn:
    def row(event: Event) -> str:
        doc = _document(event)
        return json.dumps({**doc, "ts": repr(doc["ts"]), "dur": repr(doc["dur"])})

    return replace(drawn, row=row)


def _begins_and_ends(drawn: Drawn, rng: Rng) -> Drawn:
    """Slices of the host in two events each. Those that begin later and end first come in between, so the order is that of time."""

    def dress(rows: list[str]) -> str:
        out: list[tuple[float, int, float, str]] = []
        for text in rows:
            doc = json.loads(text)
            if doc["pid"] == 0:
                out.append((0.0, 0, 0.0, text))
                continue
            start, end = round(doc["ts"] * 1000), round((doc["ts"] + doc["dur"]) * 1000)  # ns: sums of µs differ by less than one
            out.append((start, 1, -doc["dur"], json.dumps({k: v for k, v in doc.items() if k != "dur"} | {"ph": "B"})))
            out.append((end, 0, doc["dur"], json.dumps({"ph": "E", "pid": doc["pid"], "tid": doc["tid"], "ts": end / 1000})))
        return "[" + ",\n".join(text for *_, text in sorted(out, key=lambda x: x[:3])) + "]"

    return replace(drawn, dress=dress)


def _other_origin(drawn: Drawn, rng: Rng) -> Drawn:
    by = int(rng.choice([-BASE_NS, 10**15, 7]))
    return replace(drawn, events=tuple(replace(e, start_ns=e.start_ns + by) for e in drawn.events))


def _other_phases(drawn: Drawn, rng: Rng) -> Drawn:
    more = ['{"ph":"C","pid":1,"name":"m","ts":1,"args":{"v":3}}', '{"ph":"i","pid":1,"tid":1,"ts":5,"s":"t","name":"x"}',
            '{"ph":"M","pid":4242,"name":"process_name","args":{"name":"python"}}', '{"ph":"N","id":1,"ts":2}']  # fmt: skip
    return replace(drawn, dress=lambda rows: '{"traceEvents":[' + ",".join([*more, *rows, *more]) + "]}")


def _lost(drawn: Drawn, rng: Rng, spoil: Callable[[str], str]) -> Drawn:
    place = int(rng.integers(len(drawn.events)))

    def dress(rows: list[str]) -> str:
        rows[place] = spoil(rows[place])
        return '{"traceEvents": [\n' + ",\n".join(rows) + "\n]}"

    return replace(drawn, lost=frozenset({place}), dress=dress)


def _no_time(drawn: Drawn, rng: Rng) -> Drawn:
    word = str(rng.choice(["null", '"soon"', "[]", "true", "1e300"]))
    return _lost(drawn, rng, lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "ts"})[:-1] + f', "ts": {word}}}')


def _other_letter(drawn: Drawn, rng: Rng) -> Drawn:
    return _lost(drawn, rng, lambda text: text.replace('"ph": "X"', '"ph": "Q"', 1))


def _end_missing(drawn: Drawn, rng: Rng) -> Drawn:
    """The file ends inside an event: those before it are there, that one and those after it are not."""
    place = int(rng.integers(1, len(drawn.events)))

    def dress(rows: list[str]) -> str:
        # up to the name at most: a whole event without its last brace may be repaired
        return '{"traceEvents": [\n' + ",\n".join(rows[:place]) + ",\n" + rows[place][: int(rng.integers(2, 14))]

    return replace(drawn, lost=frozenset(range(place, len(drawn.events))), dress=dress)


DRESSES: Mapping[str, Callable[[Drawn, Rng], Drawn]] = {
    "as it is": lambda drawn, rng: drawn, "shuffled": _shuffled, "a bare list": _bare, "one line": _one_line, "indented": _indented,
    "packed": _packed, "unknown fields": _unknown_fields, "numbers as texts": _as_texts, "begins and ends": _begins_and_ends,
    "another origin": _other_origin,
    "other phases": _other_phases, "an event without a time": _no_time, "an event of no kind": _other_letter, "the end is missing": _end_missing,
}  # fmt: skip


# ---- counting ------------------------------------------------------------------------------------------------------------------
def counted(events: list[Event]) -> dict[str, Any]:
    """What is to be found, from the events alone."""
    zero = min(e.start_ns for e in events)
    rows = sorted((e.name, e.category, e.thread, e.stream, e.start_ns - zero, e.duration_ns) for e in events)
    host = [e for e in events if e.stream < 0]
    outer = {
        (e.name, e.start_ns - zero): [  # the shortest slice of the thread that holds it
            (o.name, o.start_ns - zero)
            for o in sorted(host, key=lambda o: o.duration_ns)
            if o.duration_ns > e.duration_ns and o.start_ns <= e.start_ns and o.start_ns + o.duration_ns >= e.start_ns + e.duration_ns
        ][:1]
        for e in host
    }
    return {"rows": rows, "outer": outer, "device": _device(events)}


def _device(events: list[Event]) -> dict[str, int] | None:
    steps = [e for e in events if e.name.startswith("ProfilerStep#")]
    kernels = [e for e in events if e.stream >= 0]
    if len(steps) > 1:  # only what was launched before the end of the last step
        last = max(e.start_ns + e.duration_ns for e in steps)
        begun = {e.launch for e in events if e.category == "cuda_runtime" and e.launch and e.start_ns <= last}
        kernels = [e for e in kernels if e.launch in begun]
    if not kernels:
        return None
    times = sorted({t for e in kernels for t in (e.start_ns, e.start_ns + e.duration_ns)})
    sums = dict.fromkeys(("idle", "compute", "other", "communication", "both"), 0)
    for low, high in pairwise(times):
        names = [e.name for e in kernels if e.start_ns <= low and e.start_ns + e.duration_ns >= high]
        computes = any(not n.startswith(("nccl", "Memcpy")) for n in names)
        talks = any(n.startswith("nccl") for n in names)
        sums["idle" if not names else "compute" if computes else "other"] += high - low
        sums["communication"] += talks * (high - low)
        sums["both"] += (talks and computes) * (high - low)
    return {**sums, "whole": times[-1] - times[0]}


def seen(trace: Trace) -> dict[str, Any]:
    """The same from what the reader and the analysis say."""
    at = range(len(trace))
    stream = [int(trace.stream[i]) if trace.stream[i] != ABSENT else -1 for i in at]
    rows = sorted(
        (
            trace.name_of(i), trace.categories[int(trace.category[i])], int(trace.tracks[int(trace.track[i])].tid), stream[i],
            int(trace.start_ns[i]), int(trace.duration_ns[i]),
        )
        for i in at
    )  # fmt: skip
    outer = {
        (trace.name_of(i), int(trace.start_ns[i])): [(trace.name_of(p), int(trace.start_ns[p]))] if (p := int(trace.parent[i])) >= 0 else []
        for i in at if stream[i] < 0
    }  # fmt: skip
    times = device_times(trace)
    device = None
    if times is not None:
        told = {"idle": times.idle_s, "compute": times.compute_s, "other": times.other_s, "communication": times.communication_s}
        device = {k: round(v * 1e9) for k, v in told.items()}
        device["both"] = round(times.overlap * times.communication_s * 1e9) if times.communication_s else 0
        device["whole"] = round(times.kernel_s * 1e9)
    return {"rows": rows, "outer": outer, "device": device}


def generated_traces(rng: Rng) -> Generator[dict[str, Any], None, None]:
    """Without end: traces as they are, and in every dress."""
    names = sorted(DRESSES)
    while True:
        drawn = drawn_trace(rng)
        for _ in range(MUTANTS_OF_A_TRACE):
            name = names[int(rng.integers(len(names)))]
            dressed = DRESSES[name](drawn, rng)
            if not dressed.readable:
                continue
            kind = "damaged" if dressed.lost else "dressed"
            case: dict[str, Any] = {"kind": kind, "operator": name, "what": f"{len(drawn.events)} events", "sums": {"events": len(drawn.events)}}
            case["judge"] = lambda dressed=dressed: _judged(dressed)
            yield case


def _judged(dressed: Drawn) -> tuple[str, str]:
    data = dressed.text().encode()
    with tempfile.TemporaryDirectory(prefix="meshwright-soak-") as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(gzip.compress(data, 1) if dressed.packed else data)
        found, want = seen(read_trace(path)), counted(dressed.readable)
    for what, value in want.items():
        if found[what] != value:
            return "wrong", f"{what}: {_first_difference(found[what], value)} in {data[:3000].decode()!r}"
    return "same", ""


def _first_difference(found: Any, want: Any) -> str:
    if isinstance(want, list) and len(found) == len(want):
        return next(f"{a} for {b}" for a, b in zip(found, want, strict=True) if a != b)
    if isinstance(want, dict) and isinstance(found, dict):
        return next((f"{k}: {found.get(k)} for {v}" for k, v in want.items() if found.get(k) != v), f"{len(found)} for {len(want)}")
    return f"{str(found)[:300]} for {str(want)[:300]}"
