"""Drawings of plans that no command draws, for `tools/method_pictures.py`: an arena, a layout's signatures, gradients in groups,
times of an expert layer and of sparse sums, blocks of a product, shares of servers and tables, bits, modules of a trace."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

__all__ = [
    "arena_svg", "bits_svg", "blocks_svg", "cores_svg", "curves_svg", "degrees_svg", "hosts_svg", "layout_svg", "modules_svg", "nccl_svg",
    "reads_svg", "sizes_svg", "sparse_svg", "stages_svg", "tables_svg", "traffic_svg",
]  # fmt: skip


def arena_svg(placed: Path) -> str:
    """Storages in their arena: time to the right, addresses upwards."""
    from meshwright.report.svg import PALETTE, document, rect, text

    with placed.open(encoding="utf-8") as file:
        rows = [(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"]), int(r["offset"])) for r in csv.DictReader(file)]
    end, top = max(r[2] for r in rows), max(r[3] + r[4] for r in rows)
    width, height, left, above = 640, 300, 70, 20

    def y(address: int) -> float:
        return above + height * (1 - address / top)

    parts = []
    for k, (name, lower, upper, size, offset) in enumerate(rows):
        x, wide, tall = left + width * lower / end, width * (upper - lower) / end, height * size / top
        parts += [rect(x, y(offset + size), wide, tall, fill=PALETTE[k % len(PALETTE)], tip=name, rx=2),
                  text(x + 6, y(offset + size) + tall / 2 + 4, f"{name}, {size} B", fill="#ffffff")]  # fmt: skip
    parts += [text(left - 6, y(0), "0", anchor="end"), text(left - 6, y(top) + 10, f"{top} B", anchor="end")]
    parts += [text(left, above + height + 18, "time 0"), text(left + width, above + height + 18, f"time {end}", anchor="end")]
    return document(left + width + 20, above + height + 30, parts, title="An arena", summary="Storages by lifetime and address")


def layout_svg(path: Path) -> str:
    """A layout plan: what every operator does on each axis of the devices, where a signature changes, and the times of the other layouts."""
    from meshwright.io.quantity import show_time
    from meshwright.report.svg import PALETTE, document, rect, text

    plan = json.loads(path.read_text(encoding="utf-8"))
    plan = plan.get("plan", plan)
    width, left, parts = 760, 20, []
    shown = [name for name, op in plan["ops"].items() if not name.startswith("reshape")]
    wide = (width - 2 * left) / len(shown)
    moves = {(m["source"].split(":")[0], m["reader"]): m for m in plan["moves"]}
    for k, name in enumerate(shown):
        x = left + k * wide
        parts += [rect(x, 24, wide - 34, 66, kind="panel", rx=4), text(x + 8, 42, name, bold=True)]
        parts += [text(x + 8, 60 + 16 * axis, f"axis {axis}: {what}") for axis, what in enumerate(plan["ops"][name]["names"])]
        if k and (move := moves.get((shown[k - 1], name)) or moves.get(("reshape", name))):
            axis, after = move["forward"][0]
            parts += [text(x - 17, 50, "→", anchor="middle", size=16), text(x - 17, 106, f"axis {axis} to {after}", anchor="middle", kind="soft")]
        elif k:
            parts.append(text(x - 17, 50, "→", anchor="middle", size=16, kind="soft"))
    rows = [r for r in plan["alternatives"] if r["time_s"]]
    longest = max(r["time_s"] for r in rows)
    for k, row in enumerate(rows):
        y, name = 130 + 24 * k, f"{row['what']} {' x '.join(map(str, row['mesh']))}"
        long = max(2.0, 450 * row["time_s"] / longest)
        parts += [text(left, y + 12, name), rect(left + 170, y, long, 16, fill=PALETTE[0 if row["why"] == "chosen" else 7])]
        parts.append(text(left + 180 + long, y + 12, show_time(row["time_s"])))
    title = "What every operator does on two axes of two devices, and the step of each layout"
    return document(width, 140 + 24 * len(rows), parts, title=title, summary="Above: operators with one word an axis. Below: bars of time per step")


def traffic_svg(plans: dict[str, Path]) -> str:
    """Steps of plans of `traffic plan`, one below the other: the backward pass with encoding, the network, decoding."""
    from meshwright.decide.traffic.problem import TrafficProblem, timeline
    from meshwright.drive.traffic import load_traffic_plan
    from meshwright.io.quantity import show_time
    from meshwright.report.svg import PALETTE, document, legend, rect, text

    loaded = {name: load_traffic_plan(path) for name, path in plans.items()}
    width, left, parts, y = 820, 190, [], 20.0
    longest = max(plan.step_ns for plan in loaded.values())
    scale = (width - left - 90) / longest
    for name, plan in loaded.items():
        problem = TrafficProblem.of(plan.profile)
        _, times = timeline(problem, plan.groups)
        parts.append(text(10, y + 12, name, bold=True))
        bars, at = list[tuple[int, int, int, int, str]](), 0
        for k, (group, t) in enumerate(zip(plan.groups, times, strict=True)):
            tip = f"group {k + 1}: {group.last - group.first} tensors, {group.codec}"
            bars += [(0, at, t.encode_start_ns, 0, "backward"), (0, t.encode_start_ns, t.encode_end_ns, 1, tip)]
            bars += [(1, t.exchange_start_ns, t.exchange_end_ns, 2 + k % 2, tip), (0, t.decode_start_ns, t.decode_end_ns, 4, tip)]
            at = t.encode_end_ns
        for row, label in enumerate(("computes", "network")):
            parts.append(text(left - 8, y + 12 + 20 * row, label, anchor="end", kind="soft"))
        for row, begin, end, colour, tip in bars:
            parts.append(rect(left + begin * scale, y + 20 * row, max(0.6, (end - begin) * scale), 16, fill=PALETTE[colour], tip=tip))
        parts.append(text(left + plan.step_ns * scale + 6, y + 22, show_time(plan.step_ns / 1e9)))
        y += 62
    names = ("backward", "encode", "message", "next message", "decode")
    marks, tall = legend(left, y, [(n, PALETTE[k]) for k, n in enumerate(names)], width=width - left)
    summary = "Three plans of one step, from its start to its end"
    return document(width, y + tall + 12, [*parts, *marks], title="Gradients sent in groups", summary=summary)


def degrees_svg(printed: Path) -> str:
    """`experts compare --json`: seconds of a step over capacities, a line for each degree; the best of each capacity is marked."""
    rows = [row for each in json.loads(printed.read_text(encoding="utf-8"))["capacities"] for row in each]
    capacities, degrees = sorted({r["capacity"] for r in rows}), sorted({r["degree"] for r in rows})
    time_s = {(r["degree"], r["capacity"]): r["time_s"] for r in rows}
    lines = {f"r = {degree}": [time_s[degree, c] for c in capacities] for degree in degrees}
    below, title, summary = "capacity, tokens of an expert", "Degrees of an expert layer", "Time of a step over the capacity"
    return _curves(lines, [str(c) for c in capacities], below, title, summary)


def sparse_svg(printed: list[Path]) -> str:
    """`collective sparse-switch --json` at several densities: time of the busiest link, a line for each way; the best of each density is marked."""
    rows = [json.loads(p.read_text(encoding="utf-8")) for p in printed]
    words = {"dense": "all numbers in the network", "sparse": "pairs in the network", "hosts": "pairs among hosts", "ring": "a ring"}
    lines = {says: [row["times_s"][way] for row in rows] for way, says in words.items()}
    densities = [f"{100 * row['density']:g} %" for row in rows]
    return _curves(lines, densities, "density of a host's numbers", "Sparse sums of 64 hosts", "Time of the busiest link over the density", room=170)


def _curves(lines: dict[str, list[float]], names: list[str], below: str, title: str, summary: str, *, room: int = 70) -> str:
    """Seconds on a logarithmic scale, a line each; the least of each place is marked. `room`: for the lines' names, on the right."""
    from meshwright.io.quantity import show_time
    from meshwright.report.svg import PALETTE, document, line, rect, text

    low, high = math.log(min(map(min, lines.values()))), math.log(max(map(max, lines.values())))
    left, above, width, height = 80, 24, 480, 260

    def at(place: int, time_s: float) -> tuple[float, float]:
        return left + width * place / (len(names) - 1), above + height * (1 - (math.log(time_s) - low) / (high - low))

    parts = [line([(left, above), (left, above + height), (left + width, above + height)], "#888888", width=1)]
    for k, times_s in enumerate(lines.values()):
        points = [at(i, time_s) for i, time_s in enumerate(times_s)]
        parts.append(line(points, PALETTE[k], width=2))
    heights, lowest = dict[str, float](), float("inf")  # names stand beside the lines' ends, each at least a line's height above the one before
    for name, times_s in sorted(lines.items(), key=lambda x: x[1][-1]):
        heights[name] = lowest = min(at(0, times_s[-1])[1] + 4, lowest - 13)
    down = max(0.0, above + 4 - lowest)
    for name, y in heights.items():
        parts.append(text(left + width + 8, y + down, name, fill=PALETTE[list(lines).index(name)]))
    for i, name in enumerate(names):
        best = min(lines, key=lambda key, i=i: lines[key][i])
        x, y = at(i, lines[best][i])
        parts.append(rect(x - 5, y - 5, 10, 10, fill=PALETTE[list(lines).index(best)], tip=f"best: {best}", rx=5))
        parts.append(text(left + width * i / (len(names) - 1), above + height + 18, name, anchor="middle"))
    parts.append(text(left + width / 2, above + height + 38, below, anchor="middle"))
    for value in (math.exp(low), math.exp(high)):
        parts.append(text(left - 8, at(0, value)[1] + 4, show_time(value), anchor="end"))
    return document(left + width + room, above + height + 50, parts, title=title, summary=summary)


def hosts_svg(placements: dict[str, Path]) -> str:
    """`meshwright.vm-placement` files: when each host is in use, a row for each, after the warm-up."""
    from meshwright.report.svg import PALETTE, document, rect, text

    left, y, width, tall, parts = 70, 24, 520, 9, []
    for k, (name, path) in enumerate(placements.items()):
        placed = json.loads(path.read_text(encoding="utf-8"))
        until_s = max(s[3] or s[2] for s in placed["stays"])
        scale = width / (until_s - placed["from_s"])
        parts.append(text(left, y, f"{name}: {placed['used_host_s'] / 3600:.0f} host hours in use"))
        y += 8
        for host in range(sum(placed["hosts"])):
            parts.append(rect(left, y, width, tall - 2, fill="#eeeeee", tip=f"host {host}"))
            used: list[list[float]] = []
            for begin, end in sorted((begin, end or until_s) for _, where, begin, end in placed["stays"] if where == host):
                if used and begin <= used[-1][1]:
                    used[-1][1] = max(used[-1][1], end)
                elif end > placed["from_s"]:
                    used.append([max(begin, placed["from_s"]), end])
            parts += [rect(left + (a - placed["from_s"]) * scale, y, (b - a) * scale, tall - 2, fill=PALETTE[k]) for a, b in used]
            y += tall
        y += 24
    parts.append(text(left, y - 8, "time; grey: an empty host"))
    return document(left + width + 20, y + 4, parts, title="Hosts in use", summary="When each host holds a machine, under two strategies")


def blocks_svg() -> str:
    """Blocks of the product of four experts with 5, 1, 0 and 9 tokens, in blocks of four: rows are tokens, columns the experts' inner dimensions."""
    from meshwright.report.svg import PALETTE, document, rect, text

    tokens, block, columns, cell = (5, 1, 0, 9), 4, 2, 34
    left, above, row, parts = 110, 40, 0, []
    rows = sum(-(-n // block) for n in tokens)
    for expert, n in enumerate(tokens):
        x = left + expert * columns * cell
        parts.append(text(x + columns * cell / 2, above - 14, f"expert {expert}", anchor="middle"))
        for k in range(-(-n // block)):
            y, full = above + (row + k) * cell, min(n - k * block, block)
            parts += [rect(x + c * cell, y, cell - 2, cell - 2, fill=PALETTE[expert], rx=2) for c in range(columns)]
            if full < block:  # rows of zeros
                part = (cell - 2) * full / block
                parts += [rect(x + c * cell, y + part, cell - 2, cell - 2 - part, kind="panel") for c in range(columns)]
            parts.append(text(left - 10, y + cell / 2 + 4, f"{full} token{'s' * (full > 1)}", anchor="end"))
        row += -(-n // block)
    parts.append(rect(left - 2, above - 2, len(tokens) * columns * cell + 2, rows * cell + 2, fill="none"))
    wide = left + len(tokens) * columns * cell + 20
    return document(wide, above + rows * cell + 20, parts, title="Block-sparse experts", summary="Blocks that a product of all experts has")


def curves_svg(results: Path) -> str:
    """Curves of `benchmarks/resize.py`: mean cores over the share of windows violated, for the strategies with a knob."""
    from meshwright.report.svg import PALETTE, document, rect, text

    most_rate, least, most = 0.0016, 900.0, 1700.0
    width, height, left, above = 560, 300, 70, 30
    drawn = {"linucb": "linucb", "threshold": "threshold", "vpa with growth after violations": "VPA, with growth after violations"}
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    parts = [rect(left, above, width, height, kind="panel")]
    for cores in (1000, 1200, 1400, 1600):
        y = above + height * (1 - (cores - least) / (most - least))
        parts.append(text(left - 6, y + 4, f"{cores} cores", anchor="end"))
    for rate in (0.0004, 0.0008, 0.0012, 0.0016):
        parts.append(text(left + width * rate / most_rate, above + height + 18, f"{rate:.2%}", anchor="middle"))
    for k, (what, name) in enumerate(drawn.items()):
        for row in rows:
            if row["what"] == what and row["violations"] <= most_rate and least <= row["value"] <= most:
                x, y = left + width * row["violations"] / most_rate, above + height * (1 - (row["value"] - least) / (most - least))
                parts.append(rect(x - 4, y - 4, 8, 8, fill=PALETTE[k], tip=f"{name} {row['options']}", rx=4))
        parts += [rect(left + width - 250, above + 12 + 18 * k, 8, 8, fill=PALETTE[k], rx=4), text(left + width - 236, above + 20 + 18 * k, name)]
    parts.append(text(left + width / 2, above + height + 36, "windows of tenants that were violated", anchor="middle"))
    return document(left + width + 20, above + height + 50, parts, title="Resizing", summary="Mean cores over violations, by strategy and knob")


# ---- bars -------------------------------------------------------------------------------------------------------------
Piece = tuple[str, float, int]  # what it says, how long it is, which colour


def _bars(rows: dict[str, tuple[list[Piece], str]], keys: list[str], *, title: str, summary: str, left: int = 150) -> str:
    """A row for each name: its pieces one after the other, all rows to one scale, and what stands behind them. `keys`: names of the colours."""
    from meshwright.report.svg import PALETTE, document, legend, rect, text

    width, tall, y, parts = 560, 24, 16.0, []
    longest = max(sum(long for _, long, _ in pieces) for pieces, _ in rows.values())
    for name, (pieces, behind) in rows.items():
        parts.append(text(left - 10, y + 16, name, anchor="end"))
        x = float(left)
        for what, long, colour in pieces:
            wide = width * long / longest
            parts.append(rect(x, y, max(0.6, wide - 1), tall, fill=PALETTE[colour], tip=what, rx=2))
            if wide > 6.5 * len(what) + 6:
                parts.append(text(x + wide / 2, y + 16, what, fill="#ffffff", anchor="middle"))
            x += wide
        parts.append(text(x + 8, y + 16, behind))
        y += tall + 8
    marks, high = legend(left, y + 8, [(key, PALETTE[k]) for k, key in enumerate(keys)], width=width)
    return document(left + width + 180, y + high + 20, [*parts, *marks], title=title, summary=summary)


def reads_svg(results: Path) -> str:
    """`benchmarks/data_cache.py`: bytes read from storage in an epoch after the first, the median of all rounds, by way."""
    from statistics import median

    from meshwright.io.quantity import show_size

    found = json.loads(results.read_text(encoding="utf-8"))
    names = {"kept": "kept, not exchanged", "plain": "page cache as it is", "mosaicml-streaming": "mosaicml-streaming"}
    least = next(row["peer"] for row in found["rows"] if row["what"].startswith("bytes of an epoch, kept"))
    read = {says: median(e["read_bytes"] for turn in found["raw"][way] for e in turn[1:]) for way, says in names.items()}
    rows = {"the least": ([("", float(least), 7)], show_size(least))}
    rows |= {says: ([("", float(size), k)], show_size(round(size))) for k, (says, size) in enumerate(read.items())}
    summary = f"{found['files']} files of {show_size(found['file_bytes'])}, {show_size(found['memory_bytes'])} of memory"
    return _bars(rows, [], title="Bytes from storage in an epoch", summary=summary)


def cores_svg(printed: dict[str, Path]) -> str:
    """`cluster plan --json` under several allocations: cores of every job, and the sum of GPUs times speed."""
    plans = {name: json.loads(path.read_text(encoding="utf-8"))["allocation"] for name, path in printed.items()}
    jobs = list(dict.fromkeys(given["job"] for plan in plans.values() for given in plan["given"]))
    rows = {}
    for name, plan in plans.items():
        pieces = [(f"{given['job']}: {given['cores']}", float(given["cores"]), jobs.index(given["job"]) % 8) for given in plan["given"]]
        rows[name] = (sorted(pieces, key=lambda piece: jobs.index(piece[0].partition(":")[0])), f"GPUs x speed {plan['speed']:.2f}")
    return _bars(rows, [], title="Cores of a server", summary="How many cores each job has, under several allocations", left=110)


def tables_svg(printed: dict[str, Path]) -> str:
    """`tables plan --json` of several strategies: what each device does in an iteration, and the tables that it holds."""
    from meshwright.io.quantity import show_time

    rows = {}
    for name, path in printed.items():
        for device in json.loads(path.read_text(encoding="utf-8"))["placed"]:
            times_s = [device["backward_s"], device["compute_s"], device["forward_s"]]
            held = ", ".join(dict.fromkeys(shard["table"] for shard in device["shards"]))
            rows[f"{name}, {device['device']}"] = ([(held if k == 1 else "", t, k) for k, t in enumerate(times_s)], show_time(sum(times_s)))
    summary = "Seconds of gradients, lookups and rows of each device, and its tables"
    return _bars(rows, ["gradients", "lookups", "rows"], title="Embedding tables on devices", summary=summary)


def stages_svg(printed: Path) -> str:
    """`layout search --json`: layers of each stage of the fastest layout, by the kind of its devices."""
    stages = json.loads(printed.read_text(encoding="utf-8"))["best"]["layout"]["stages"]
    kinds = list(dict.fromkeys(replica["device"] for stage in stages for replica in stage["replicas"]))
    rows = {}
    for k, stage in enumerate(stages):
        kind, replicas = stage["replicas"][0]["device"], stage["replicas"]
        pieces = [(f"{stage['layers']} layers", float(stage["layers"]), kinds.index(kind))]
        rows[f"stage {k}, {kind}"] = (pieces, f"{len(replicas)} replicas of {replicas[0]['tensor']} GPUs")
    return _bars(rows, kinds, title="Stages on unlike devices", summary="Layers of each stage, by kind of device")


def modules_svg(printed: Path) -> str:
    """`trace annotate --json`: a step's stages, and in each the seven modules that take longest; the others together."""
    from meshwright.io.quantity import show_time

    tree = json.loads(printed.read_text(encoding="utf-8"))["tree"]
    steps = [n for n in tree["children"] if n["kind"] == "step" and n["name"] != "before the first step"]
    step = min(steps, key=lambda n: n["host_ns"])
    found = {stage["name"]: [(n.get("module") or n["name"], n["host_ns"]) for n in _modules(stage)] for stage in step["children"]}
    total = dict[str, int]()
    for name, ns in (part for parts in found.values() for part in parts):
        total[name] = total.get(name, 0) + ns
    names = sorted(sorted(total, key=lambda name: -total[name])[:7])
    rows = {}
    for stage in step["children"]:
        pieces = [(name, float(ns), names.index(name)) for name, ns in found[stage["name"]] if name in names]
        if rest := stage["host_ns"] - sum(ns for _, ns, _ in pieces):
            pieces.append(("others", float(rest), 7))
        rows[stage["name"]] = (pieces, show_time(stage["host_ns"] / 1e9))
    return _bars(rows, [*names, "others"], title="A step by module", summary="Stages of one step, divided by module", left=110)


def _modules(node: dict[str, object], depth: int = 0) -> list[dict[str, object]]:
    """The modules two levels below the model, or what stands in their place."""
    children = node.get("children") or []
    assert isinstance(children, list)
    found = []
    for child in children:
        inner = [n for n in child.get("children", []) if n["kind"] == "module"]
        found += _modules(child, depth + 1) if inner and depth < 2 else [child]
    return found


# ---- lines over sizes ---------------------------------------------------------------------------------------------------
def bits_svg(printed: Path) -> str:
    """`graph compare --curve --json`: variance over the seconds of all messages, for chosen bits and for one width everywhere."""
    from meshwright.io.quantity import show_time
    from meshwright.report.svg import PALETTE, document, line, rect, text

    found = json.loads(printed.read_text(encoding="utf-8"))
    uniform = [(row["bits"].removeprefix("uniform "), row["rounds_s"], row["variance"]) for row in found["bits"]
               if row["bits"].startswith("uniform") and row["variance"]]  # fmt: skip
    curve = [(p["rounds_s"], p["variance"]) for p in found["curve"] if p["variance"] > 0]
    left, above, width, height = 90, 24, 520, 260
    times = [t for t, _ in curve] + [t for _, t, _ in uniform]
    logs = [math.log(v) for _, v in curve] + [math.log(v) for _, _, v in uniform]

    def at(time_s: float, variance: float) -> tuple[float, float]:
        across = (time_s - min(times)) / (max(times) - min(times))
        return left + width * across, above + height * (1 - (math.log(variance) - min(logs)) / (max(logs) - min(logs)))

    parts = [line([(left, above), (left, above + height), (left + width, above + height)], "#888888", width=1)]
    parts.append(line([at(t, v) for t, v in curve], PALETTE[0], width=2))
    for bits, time_s, variance in uniform:
        x, y = at(time_s, variance)
        parts += [rect(x - 5, y - 5, 10, 10, fill=PALETTE[1], rx=5), text(x + 9, y + 4, f"{bits} bits everywhere")]
    parts.append(text(*at(*curve[len(curve) // 3]), "chosen bits", fill=PALETTE[0], anchor="end"))
    for time_s in (min(times), max(times)):
        parts.append(text(at(time_s, 1.0)[0], above + height + 18, show_time(time_s), anchor="middle"))
    for value in (min(logs), max(logs)):
        parts.append(text(left - 8, at(min(times), math.exp(value))[1] + 4, f"{math.exp(value):.2g}", anchor="end"))
    parts.append(text(left + width / 2, above + height + 36, "all messages of an epoch", anchor="middle"))
    parts.append(text(left - 8, above - 10, "variance", anchor="end"))
    return document(left + width + 140, above + height + 50, parts, title="Bits of messages", summary="Variance over the seconds of all messages")


def sizes_svg(printed: Path) -> str:
    """`collective compare --json`: the time of each strategy over the size; the best of each size is marked."""
    from meshwright.io.quantity import show_size

    rows = json.loads(printed.read_text(encoding="utf-8"))["sizes"]
    names = [e["strategy"] for e in rows[0]["strategies"] if e["time_s"]]
    lines = {name: [next(e["time_s"] for e in row["strategies"] if e["strategy"] == name) for row in rows] for name in sorted(names)}
    sizes = [show_size(row["size_bytes"]) for row in rows]
    return _curves(lines, sizes, "size", "Strategies over sizes", "Simulated time of each strategy over the size", room=150)


def nccl_svg(printed: Path) -> str:
    """`collective nccl --json`: the time of each algorithm under its best protocol over the size; the choice of each size is marked."""
    from meshwright.io.quantity import show_size

    rows = json.loads(printed.read_text(encoding="utf-8"))["rows"]
    known = {c["algorithm"] for row in rows for c in row["table"] if c["time_us"] is not None}

    def best_s(row: dict[str, object], algorithm: str) -> float:
        table = row["table"]
        assert isinstance(table, list)
        return min(c["time_us"] for c in table if c["algorithm"] == algorithm and c["time_us"] is not None) / 1e6

    lines = {name: [best_s(row, name) for row in rows] for name in sorted(known)}
    sizes = [show_size(row["size_bytes"]) for row in rows]
    return _curves(lines, sizes, "size", "NCCL's algorithms over sizes", "Time of each algorithm by NCCL's model over the size", room=100)
