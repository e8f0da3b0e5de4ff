"""`meshwright program stats FILE`: sizes, critical path, smallest channel depth, worst-order memory, bytes per channel."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .frame import Result
from .program_show import choose

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..program.program import Program

HELP = "critical path, smallest channel depth, worst-order memory of a program"
EPILOG = "Calls are written out first. The critical path counts every step as 1; for a plan the simulated one is shown too."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="plan or program")
    parser.add_argument("--program", metavar="NAME", help="one of the plan's programs: start of its hash, or its name (default: the main one)")
    parser.add_argument("--channels", type=int, default=8, metavar="N", help="print the N busiest channels (default 8)")


def run(args: argparse.Namespace) -> Result:
    import numpy as np

    plan, stored = choose(args.file, args.program)
    flat = _flat(plan, stored)
    document: dict[str, Any] = {"schema": "meshwright.program-stats", "version": 1, "name": stored.name} | _counts(stored, flat)
    text = [_counts_text(stored, flat)]
    if flat is None:
        return Result(document, "\n".join([*text, "folded and too large to expand: only what is stored is shown"]))
    from ..check.program.deadlock import find_cycle, smallest_depth
    from ..check.program.wellformed import check_wellformed

    wrong = check_wellformed(flat)
    cycle = [] if wrong else find_cycle(flat)
    document["wellformed"], document["live"] = not wrong, not wrong and not cycle
    if wrong:
        text.append(f"not well-formed: {wrong[0].message}")
        return Result(document | {"fault": wrong[0].message}, "\n".join(text))
    depth = smallest_depth(flat)
    load = _channel_bytes(flat)
    if len(depth):
        stated = flat.channels.depth
        document["smallest_depth"] = {"largest": int(depth.max()), "per_channel": depth.tolist(), "stated": stated.tolist()}
        needed = f"at most {int(depth.max())} needed" if depth.min() > 0 else "no depth helps"
        text.append(f"channel depth: at most {int(stated.max())} stated, {needed}")
        document["channel_bytes"] = load.tolist()
        for c in np.argsort(-load, kind="stable")[: max(0, args.channels)].tolist():
            ends = f"{int(flat.channels.src[c])} > {int(flat.channels.dst[c])}"
            text.append(f"  channel {c:<5} {ends:<12} {int(load[c]):>14} bytes, depth {int(stated[c])}, needs {int(depth[c])}")
    if cycle:
        text.append("it deadlocks: " + "; ".join(f"{flat.describe(step)} {why} the one before it" for step, why in cycle[:6]))
        return Result(document | {"cycle": [step for step, _ in cycle]}, "\n".join(text))
    text += _memory(flat, document) + _path(flat, document) + _simulated(plan, stored, document)
    return Result(document, "\n".join(text))


def _flat(plan: Plan | None, p: Program) -> Program | None:
    from ..errors import Unsupported
    from ..program.calls import inline
    from ..program.fold import expand

    if p.fold is not None:
        if p.executed_steps > 400_000:
            return None
        p = expand(p)
    if len(p.calls) and plan is None:
        raise Unsupported(f"program {p.name!r} calls others, which a program file does not hold", hint="give the plan file")
    return inline(p, plan.programs if plan is not None else {}).program


def _counts(stored: Program, flat: Program | None) -> dict[str, Any]:
    out: dict[str, Any] = {"ranks": stored.ranks, "switches": stored.switches, "requires": list(stored.requires)} | _sizes(stored)
    if flat is not None:
        out["written_out"] = _sizes(flat)
        out["kinds"] = _kinds(flat)
    return out


def _sizes(p: Program) -> dict[str, int]:
    tables: dict[str, Any] = {"lanes": p.lanes, "steps": p.steps, "calls": p.calls, "channels": p.channels, "buffers": p.buffers}
    return {name: len(table) for name, table in tables.items()} | {"executed_steps": p.executed_steps}


def _kinds(p: Program) -> dict[str, int]:
    import numpy as np

    from ..program.program import Kind

    return {k.name.lower(): int(np.count_nonzero(p.steps.kind == k)) for k in Kind}


def _counts_text(stored: Program, flat: Program | None) -> str:
    text = f"program {stored.name or '(unnamed)'}: {stored.ranks} ranks, {len(stored.lanes)} lanes, {len(stored.steps)} steps stored"
    if flat is None or flat is stored:
        return text + f", {stored.executed_steps} executed, {len(stored.channels)} channels, {len(stored.buffers)} buffers"
    kinds = ", ".join(f"{n} {name}" for name, n in _kinds(flat).items() if n)
    return text + f"; written out {len(flat.lanes)} lanes, {flat.executed_steps} executed steps ({kinds}), {len(flat.channels)} channels"


def _channel_bytes(p: Program) -> Any:
    import numpy as np

    from ..check.program.order import messages

    m = messages(p)
    out = np.zeros(len(p.channels), np.int64)
    np.add.at(out, m.channel, p.message_bytes()[m.send] * p.lanes.repeat[p.lane_of_step()[m.send]])
    return out


def _memory(p: Program, document: dict[str, Any]) -> list[str]:
    from ..check.program.memory import worst_order_memory
    from ..errors import TimeLimit

    try:
        worst = worst_order_memory(p)
    except TimeLimit as error:
        return [f"worst-order memory: unknown, {error}"]
    peaks = list(worst.peak_bytes[: p.ranks])
    rank = max(range(p.ranks), key=lambda r: peaks[r] + worst.staging_bytes[r])
    largest = sorted(worst.alive[rank], key=lambda b: (-int(p.buffers.chunks[b] * p.buffers.chunk_bytes[b]), b))[:4]
    names = [p.buffer_name(b) for b in largest]
    document["worst_order_memory"] = {
        "peak_bytes": peaks, "staging_bytes": list(worst.staging_bytes[: p.ranks]), "exact": list(worst.exact[: p.ranks]), "largest": names,
    }  # fmt: skip
    word = "" if worst.exact[rank] else " (upper bound)"
    staging = f" + {worst.staging_bytes[rank]} staging" if worst.staging_bytes[rank] else ""
    return [f"worst-order memory: rank {rank} {peaks[rank]}{staging} bytes{word}" + (f"; largest then: {', '.join(names)}" if names else "")]


def _path(p: Program, document: dict[str, Any]) -> list[str]:
    """The longest chain of steps that wait for each other, channels unbounded, repeats unrolled while that stays small."""
    import numpy as np

    from ..check.program.order import Order

    turns = int(p.lanes.repeat.max(initial=1))
    if p.executed_steps > 2_000_000:
        return []
    order = Order(p, iterations=turns)
    source = order.cross_src[np.argsort(order.cross_dst, kind="stable")].tolist()
    ptr = np.concatenate([[0], np.cumsum(np.bincount(order.cross_dst, minlength=order.n))]).tolist()
    position = order.position.tolist()
    length, came = [1] * order.n, [-1] * order.n
    for v in order.order.tolist():
        before = source[ptr[v] : ptr[v + 1]] + ([v - 1] if position[v] else [])
        for u in before:
            if length[u] + 1 > length[v]:
                length[v], came[v] = length[u] + 1, u
    if not order.n:
        return []
    v = max(range(order.n), key=length.__getitem__)
    chain = []
    while v >= 0:
        chain.append([int(order.step[v]), int(order.iteration[v])])
        v = came[v]
    chain.reverse()
    document["critical_path_steps"] = {"length": len(chain), "steps": chain[:1000]}
    ends = [p.describe(chain[0][0]), p.describe(chain[-1][0])]
    return [f"critical path: {len(chain)} steps, from {ends[0]} to {ends[1]}"]


def _simulated(plan: Plan | None, stored: Program, document: dict[str, Any]) -> list[str]:
    """The critical path in seconds, where the file says what the steps cost."""
    if plan is None or stored is not plan.main or "cost" not in plan.job:
        return []
    from ..drive.plans import simulate_plan
    from ..program.calls import inline

    timeline = simulate_plan(plan)
    path = list(timeline.critical_path)
    flat = inline(stored, plan.programs).program
    document["critical_path_s"] = {"time_s": timeline.makespan_s, "steps": [list(x) for x in path[:1000]]}
    document["memory_peak_bytes"] = list(timeline.memory_peak_bytes)
    columns = (getattr(timeline.spans, name).tolist() for name in ("step", "iteration", "start_s", "end_s"))
    spans = {(step, turn): end - start for step, turn, start, end in zip(*columns, strict=True)}
    longest = sorted(path, key=lambda x: (-spans.get(x, 0.0), x))[:4]
    text = [f"simulated on {timeline.run_fabric}: {timeline.makespan_s:.6g} s, critical path of {len(path)} steps; its longest:"]
    return text + [f"  {spans.get(x, 0.0):.6g} s  {flat.describe(x[0])}" for x in longest]
