"""Drawings of plans that no command draws, for `tools/method_pictures.py`: an arena, a layout's signatures, gradients in groups,
times of an expert layer and of sparse sums, blocks of a product."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

__all__ = ["arena_svg", "blocks_svg", "curves_svg", "degrees_svg", "hosts_svg", "layout_svg", "sparse_svg", "traffic_svg"]


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
    lowest = float("inf")  # names stand beside the lines' ends, each at least a line's height above the one before
    for name, times_s in sorted(lines.items(), key=lambda x: x[1][-1]):
        lowest = min(at(0, times_s[-1])[1] + 4, lowest - 13)
        parts.append(text(left + width + 8, lowest, name))
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
