"""Seconds of every step of a program on a fabric; how well each is known says `meshwright.evidence`.

compute: `cost.price(key, works[key], device)` with key `"<graph>|<name>"`. transfer, at the lane that runs it: per message sent
or received `transport.per_message_s`, plus `transport.per_byte_s` for the bytes it moves; the links' time is the network's. A message whose size is
a symbol and expected to be 0 is not posted and costs neither.
Every step of any kind: `transport.per_step_s`.

A device with a quota (`cpu_share`, `cpu_period_s`) uses up its share at once, and `cpu_overrun_s` more until the kernel notices; then it stands still
until the periods' shares have paid for that. While it runs, `cpu_stretch` of its processor time passes, and more while devices of one machine that
run are more than its cores (`cpu_cores`), or, by `cpu_speeds`, while more of them run than one. Where a rank is one thread (`Cost.thread`), what it
computes and copies takes turns. All this is the engine's (`tables.Processors`), whose durations are then seconds of the processor: `on_processors`
takes the share out of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cost import Cost, RankThread, Transport
from ..fabric.fabric import Device, Fabric
from ..graph.graph import Work
from ..program.program import Kind, Part, Program
from ..program.tables import Ops
from .tables import Processors

__all__ = ["durations", "on_processors"]

MIN_SHARE = 1e-9  # of a core, below which a device stands still for ever


def durations(
    program: Program, cost: Cost, fabric: Fabric, placement: Sequence[str], works: Mapping[str, Work] | None = None
) -> NDArray[np.float64]:
    """Seconds of every step of a program without calls; a call step costs `per_step_s`.

    Raises: UnknownName when a rank that computes is placed on no device of the fabric.
    """
    s, ops, transport = program.steps, program.ops, cost.transport
    time_s = np.full(len(s), transport.per_step_s)
    moves = s.kind == Kind.TRANSFER
    ends = ((s.parts & Part.RECV) != 0).astype(np.float64) + ((s.parts & Part.SEND) != 0)
    size_bytes = program.message_bytes()
    ends[(s.size >= 0) & (size_bytes == 0)] = 0
    time_s[moves] += transport.per_message_s * ends[moves] + transport.per_byte_s * size_bytes[moves]
    computes = np.flatnonzero(s.kind == Kind.COMPUTE)
    if len(computes):
        keys: dict[str, int] = {}
        key_of_op = np.array([keys.setdefault(_key(ops, i, cost, works or {}), len(keys)) for i in range(len(ops))])
        actor = program.lanes.actor[program.lane_of_step()[computes]].astype(np.int64)
        pair, which = np.unique(actor * len(keys) + key_of_op[s.op[computes]], return_inverse=True)
        names = list(keys)
        priced_s = [_price_s(cost, names[int(x) % len(keys)], works or {}, _device(fabric, placement, int(x) // len(keys))) for x in pair]
        time_s[computes] += np.array(priced_s)[which]
    return time_s


def on_processors(
    program: Program, cost: Cost | None, fabric: Fabric, placement: Sequence[str], time_s: NDArray[np.float64],
    works: Mapping[str, Work] | None = None,
) -> tuple[NDArray[np.float64], Processors | None]:  # fmt: skip
    """(durations in seconds of the processor where an actor has one, the processors or None if nobody has)."""
    if cost is None or program.switches:
        return time_s, None
    devices = [_device(fabric, placement, r) for r in range(program.ranks)]
    shares = np.array([d.cpu_share if d.cpu_period_s > 0 and 0 < d.cpu_share < 1 else 0.0 for d in devices])
    cores = np.array([d.cpu_cores for d in devices])
    curved = np.array([bool(d.cpu_speeds) for d in devices]) & (cores > 0)
    thread = cost.thread
    taken = (shares > 0) | bool(thread) | curved
    if not taken.any():
        return time_s, None
    names = ("cpu_period_s", "cpu_overrun_s", "cpu_stretch")
    period_s, overrun_s, stretch = (np.array([getattr(d, name) for d in devices]) for name in names)
    stretch = np.clip(np.where(shares > 0, stretch, 1.0), 1.0, 1.0 / np.maximum(shares, MIN_SHARE))
    thread = thread or RankThread()
    begin_s, waits_in = np.full(len(devices), thread.begin_s), _first_of(program, thread.waits_in)
    of_step = np.where(shares > 0, shares, 1.0)[program.lanes.actor[program.lane_of_step()]]
    spent_s = _message_cpu_s(program, cost.transport) + cost.transport.per_step_s * (cost.table_share or of_step)
    time_s = np.where((program.steps.kind == Kind.TRANSFER) & (of_step < 1.0), spent_s, time_s * of_step)
    time_s = time_s * stretch[program.lanes.actor[program.lane_of_step()]]
    pooled = ((shares > 0) & (cores > 0)) | curved
    shared = float(cores[pooled].min(initial=np.inf)) if pooled.any() else 0.0
    quota_s, overrun_s = shares * period_s * stretch, overrun_s * stretch
    speeds = _busy_speeds(program, cost, devices, works or {}) if curved.any() else ()
    return time_s, Processors(
        taken, quota_s, period_s, overrun_s, begin_s, waits_in, thread.begin_wait_s, thread.sum_cpu_s, pooled, shared, *speeds
    )


def _busy_speeds(
    program: Program, cost: Cost, devices: Sequence[Device], works: Mapping[str, Work]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """(`speeds`, `work_row`, `copy_row`) of `Processors`: copies of messages are work in memory."""
    rows: dict[tuple[float, ...], int] = {}

    def row(speeds: tuple[float, ...]) -> int:
        return rows.setdefault(speeds, len(rows))

    copy_row = np.array([row(d.cpu_speeds.get("memory", (1.0,))) for d in devices], np.int64)
    actor = program.lanes.actor[program.lane_of_step()].astype(np.int64)
    work_row = copy_row[actor]
    computes = np.flatnonzero(program.steps.kind == Kind.COMPUTE)
    pair, which = np.unique(actor[computes] * len(program.ops) + program.steps.op[computes], return_inverse=True)
    keys = [(int(x) // len(program.ops), _key(program.ops, int(x) % len(program.ops), cost, works)) for x in pair]
    work_row[computes] = np.array([row(cost.busy_speeds(works.get(key), devices[at])) for at, key in keys], np.int64)[which]
    most = max(map(len, rows))
    return np.array([[*x, *[x[-1]] * (most - len(x))] for x in rows]), work_row, copy_row


def _first_of(program: Program, keys: Sequence[str]) -> NDArray[np.int64]:
    """Per rank its first step of an op of one of the keys, -1 if it has none."""
    found = np.full(program.ranks, -1)
    if keys:
        wanted = np.array([program.ops.key(op) in keys for op in range(len(program.ops))])
        steps = np.flatnonzero((program.steps.kind == Kind.COMPUTE) & wanted[program.steps.op])[::-1]
        found[program.lanes.actor[program.lane_of_step()[steps]]] = steps  # of several the last one that is written, their first
    return found


def _message_cpu_s(program: Program, transport: Transport) -> NDArray[np.float64]:
    """Processor seconds of every transfer under a quota, which the transport's threads use up too; what was not measured is as long as it occupies
    the lane of a whole core."""
    parts, size_bytes = program.steps.parts, program.message_bytes()
    ends = ((parts & Part.RECV) != 0).astype(np.float64) + ((parts & Part.SEND) != 0)
    ends[(program.steps.size >= 0) & (size_bytes == 0)] = 0
    per_message_s = transport.cpu_per_message_s or transport.per_message_s
    spent_s: NDArray[np.float64] = ends * (per_message_s + transport.cpu_per_byte_s * size_bytes) + transport.per_byte_s * size_bytes
    return spent_s


def _key(ops: Ops, op: int, cost: Cost, works: Mapping[str, Work]) -> str:
    """`<graph>|<name>`, or that with `@<part>` where parts have unequal shares and no price was measured for all of them alike."""
    whole = ops.key(op)
    part = f"{whole}@{int(ops.part[op])}"
    return part if part in cost.table or (part in works and whole not in cost.table) else whole


def _device(fabric: Fabric, placement: Sequence[str], actor: int) -> Device:
    return fabric.device(placement[actor])


def _price_s(cost: Cost, key: str, works: Mapping[str, Work], device: Device) -> float:
    return cost.price(key, works.get(key), device).time_s
