"""The same traces in Kineto's own dress: its layout of the text, and what it writes around the work itself.

Layout, keys and extra events follow the traces in pytorch/kineto (docs/traces, output of its CUPTI profiler): times with three decimals,
process and thread metadata, slices of waits (`cuda_sync`) on the tracks of streams at the host's time of the call, with an arrow that nothing
began, the host's annotations drawn around the kernels launched in them (`gpu_user_annotation`), overhead, spans of the recording, instants.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]
COMPUTE, NCCL = 7, 20
_RESOURCES = {"registers per thread": 32, "shared memory": 0, "blocks per SM": 0.007576, "warps per SM": 0.000237, "grid": [1, 1, 1],
              "block": [128, 1, 1], "est. achieved occupancy %": 0, "graph id": 0, "graph node id": 0}  # fmt: skip


def as_kineto(document: dict[str, Any]) -> str:
    """The text of `document` (see `cuda_traces.Maker`) with everything that Kineto would have around it."""
    events = document["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    host = next(e["pid"] for e in work if e["cat"] == "cpu_op")
    for e in work:
        if e["cat"] == "kernel":
            e["args"] = {"queued": 0, **e["args"], **_RESOURCES}
    extra = [*_metadata(host, first), *_waits(work), *_drawn_on_streams(work), *_recording(host, first, last)]
    head = {k: v for k, v in document.items() if k != "traceEvents"}
    lines = [f"  {json.dumps(k)}: {json.dumps(v, indent=2)}," for k, v in head.items()]
    body = ",\n".join(map(_text, [*extra, *events]))
    return "\n  {\n" + "\n".join(lines) + '\n  "traceEvents": [\n' + body + '\n  ],\n  "traceName": "/tmp/trace.json"\n}'


def _text(e: Event) -> str:
    plain = {k: v for k, v in e.items() if k not in ("ts", "dur", "args")}
    parts = [", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in plain.items())]
    times = ", ".join(f'"{k}": {e[k]:.3f}' for k in ("ts", "dur") if k in e)
    parts += [times] if times else []
    if "args" in e:
        inner = ", ".join(f"     {json.dumps(k)}: {json.dumps(v)}" for k, v in e["args"].items())
        parts.append(f'"args": {{\n      {inner}\n    }}')
    return "  {\n    " + ",\n    ".join(parts) + "\n  }"


def _metadata(host: int, ts: float) -> list[Event]:
    out = []
    for pid in (host, *range(8)):
        for name, args in (
            ("process_name", {"name": "python"}), ("process_labels", {"labels": "CPU" if pid == host else f"GPU {pid}"}),
            ("process_sort_index", {"sort_index": pid}),
        ):
            out.append({"name": name, "ph": "M", "ts": ts, "pid": pid, "tid": 0, "args": args})
    for tid in (COMPUTE, NCCL):
        out.append({"name": "thread_name", "ph": "M", "ts": ts, "pid": 0, "tid": tid, "args": {"name": f"stream {tid} "}})
        out.append({"name": "thread_sort_index", "ph": "M", "ts": ts, "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    return out


def _waits(work: list[Event]) -> list[Event]:
    """Waits of streams and of the host: their times are the host's, so on the stream's track they lie over whatever runs then."""
    out = []
    by_call = {e["args"]["correlation"]: e for e in work if e["cat"] == "cuda_runtime"}
    number = 10**6
    for e in work:
        if e["cat"] == "kernel" and e["name"].startswith("nccl"):
            call, kind, stream, length = by_call[e["args"]["correlation"]], "Stream Wait Event", NCCL, 0.8
            out.append(_wait(kind, COMPUTE, stream, call["ts"] + 0.1, length, number))
            around = {k: e[k] for k in ("pid", "tid", "ts", "dur")}
            out.append({"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:all_reduce", **around, "args": {"External id": 1}})
        elif e["name"] == "cudaDeviceSynchronize":
            kind, stream = "Context Sync", -1
            out.append(_wait(kind, COMPUTE, stream, e["ts"] + 0.2, e["dur"], number))
        else:
            continue
        out.append({"ph": "f", "id": number, "pid": 0, "tid": COMPUTE, "ts": out[-1]["ts"], "cat": "ac2g", "name": "ac2g", "bp": "e"})
        number += 1
    return out


def _wait(kind: str, tid: int, stream: int, ts: float, dur: float, correlation: int) -> Event:
    args = {"cuda_sync_kind": kind, "wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1, "wait_on_cuda_event_id": 7777,
            "stream": stream, "correlation": correlation, "device": 0, "context": 1}  # fmt: skip
    return {"ph": "X", "cat": "cuda_sync", "name": kind, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _drawn_on_streams(work: list[Event]) -> list[Event]:
    """The host's annotations once more, on each stream from the first to the last piece of work that was launched in them."""
    launch = {e["args"]["correlation"]: e for e in work if e["cat"] == "cuda_runtime"}
    device = [e for e in work if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    out = []
    for a in (e for e in work if e["cat"] == "user_annotation"):
        for stream in (COMPUTE, NCCL):
            mine = [
                e for e in device
                if e["tid"] == stream and a["ts"] <= launch[e["args"]["correlation"]]["ts"] < a["ts"] + a["dur"]
                and launch[e["args"]["correlation"]]["tid"] == a["tid"]
            ]  # fmt: skip
            if mine:
                begin, end = min(e["ts"] for e in mine), max(e["ts"] + e["dur"] for e in mine)
                out.append({"ph": "X", "cat": "gpu_user_annotation", "name": a["name"], "pid": 0, "tid": stream, "ts": begin, "dur": end - begin,
                            "args": {"External id": 1}})  # fmt: skip
    return out


def _recording(host: int, first: float, last: float) -> list[Event]:
    memory = {"Total Reserved": 1 << 21, "Total Allocated": 512, "Bytes": 512, "Addr": 140263932559360, "Device Id": 0, "Device Type": 1, "Ev Idx": 3}
    return [
        {"ph": "X", "cat": "overhead", "name": "Activity Buffer Request", "pid": -1, "tid": 0, "ts": first + 1, "dur": 900.0,
         "args": {"overhead cost": 0, "overhead occupancy": 0, "overhead count": 0}},
        {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": host, "tid": host, "ts": first + 5, "args": memory},
        {"ph": "X", "cat": "Trace", "ts": first, "dur": last - first, "pid": "Spans", "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)",
         "args": {"Op count": 0}},
        {"name": "process_sort_index", "ph": "M", "ts": first, "pid": "Spans", "tid": 0, "args": {"sort_index": 536870912}},
        {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces", "tid": "Trace PyTorch Profiler", "ts": first},
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": last},
    ]  # fmt: skip
