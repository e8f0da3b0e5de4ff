"""Table plans: is every element of every table on one device that has room, is every exchange whole and in order, is the bound one of these tables?

What a device sends of its pooled rows, and gets back of their gradients, is the other's samples times its columns. Prices are not below the floor
that the plan states for its devices. Shares nothing with the planner but the types of job and fabric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec
import numpy as np

from ..bound import Bound
from ..fabric.fabric import Device, Fabric
from ..graph.embeddings import ALIGNMENT, Shard, Tables
from ..plan.plan import Plan
from ..program.program import Kind, Program
from .program.order import Order, messages
from .program.wellformed import witness
from .verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["Sharded", "check_shards", "check_table_bound", "check_tables", "sharded_tables"]

TOLERANCE = 1e-9  # of sums of floats, relative


@dataclass(frozen=True)
class Sharded:
    """The job's tables and shards, the device of every rank, seconds that the plan says its lookups take, and the floor of its costs: seconds of an
    element looked up, of a pooled element, of a table."""

    tables: Tables
    shards: tuple[Shard, ...]
    devices: tuple[Device, ...]
    prices_s: Mapping[str, float]
    floor: Mapping[str, tuple[float, float, float]]

    def samples(self, rank: int) -> int:
        each, more = divmod(self.tables.batch, len(self.devices))
        return each + (rank < more)

    def width(self, rank: int) -> int:
        return sum(s.columns[1] - s.columns[0] for s in self.shards if s.device == self.devices[rank].name)


def sharded_tables(plan: Plan, fabric: Fabric) -> Sharded:
    """Raises: ValueError, KeyError or TypeError for a job that states no tables, or not so."""
    by_name = {d.name: d for d in fabric.devices}
    prices = {str(key): float(entry["time_s"] if isinstance(entry, Mapping) else entry[0]) for key, entry in plan.job["cost"]["table"].items()}
    floor = {str(name): (float(a), float(b), float(c)) for name, (a, b, c) in plan.job["floor"].items()}
    if any(not (0 <= x < float("inf")) for row in floor.values() for x in row):
        raise ValueError("a floor below nothing")
    return Sharded(
        msgspec.convert(plan.job["tables"], Tables), tuple(msgspec.convert(list(plan.job["shards"]), list[Shard])),
        tuple(by_name[name] for name in plan.placement[: plan.main.ranks]), prices, floor,
    )  # fmt: skip


def check_shards(job: Sharded) -> list[Finding]:
    """Do shards tile their tables, and fit on their devices?"""
    found: list[Finding] = []
    names = {d.name for d in job.devices}
    by_table: dict[str, list[Shard]] = {t.name: [] for t in job.tables.tables}
    for s in job.shards:
        table = job.tables.tables[job.tables.number_of[s.table]] if s.table in by_table else None
        (top, bottom), (left, right) = s.rows, s.columns
        why = ""
        if table is None or s.device not in names:
            why = "there is no such table" if table is None else f"there is no device {s.device[:64]}"
        elif not (0 <= top < bottom <= table.rows and 0 <= left < right <= table.dim):
            why = f"rows {top}-{bottom} and columns {left}-{right} are not inside {table.rows} x {table.dim}"
        elif (right - left) % ALIGNMENT or left % ALIGNMENT:
            why = f"columns {left}-{right} are no multiples of {ALIGNMENT}"
        else:
            by_table[s.table].append(s)
            continue
        found.append(_wrong(f"a shard of table {s.table[:64]}: {why}", s))
    for table in job.tables.tables:
        held = by_table[table.name]
        if (twice := _overlap(held)) is not None:
            found.append(_wrong(f"table {table.name}: two shards hold row {twice[0]}, column {twice[1]}", held[0]))
        elif (area := sum((s.rows[1] - s.rows[0]) * (s.columns[1] - s.columns[0]) for s in held)) != table.rows * table.dim:
            text = f"table {table.name}: shards hold {area} of {table.rows * table.dim} elements"
            found.append(Finding(check="values", message=text, witness={"table": table.name}))
    for rank, d in enumerate(job.devices):
        need = sum((s.rows[1] - s.rows[0]) * (s.columns[1] - s.columns[0]) for s in job.shards if s.device == d.name)
        need *= job.tables.element_bytes + job.tables.state_bytes
        if d.memory_bytes and need > d.memory_bytes:
            text = f"device {d.name} holds {need} bytes of tables, it has {d.memory_bytes}"
            found.append(Finding(check="memory", message=text, witness={"device": d.name, "rank": rank}))
    return found[:MAX_FINDINGS_OF_A_KIND]


def _overlap(shards: list[Shard]) -> tuple[int, int] | None:
    """An element that two shards hold."""
    for i, a in enumerate(shards):
        for b in shards[i + 1 :]:
            row, column = max(a.rows[0], b.rows[0]), max(a.columns[0], b.columns[0])
            if row < min(a.rows[1], b.rows[1]) and column < min(a.columns[1], b.columns[1]):
                return row, column
    return None


def _wrong(text: str, shard: Shard) -> Finding:
    return Finding(check="values", message=text, witness={"table": shard.table[:64], "device": shard.device[:64]})


def check_tables(p: Program, job: Sharded, order: Order) -> list[Finding]:
    """Findings about lookups, their prices and both exchanges; `order` of the program's one turn."""
    found = check_shards(job)
    if found:
        return found
    step_of, found = _lookups(p, job)
    if found:
        return found[:MAX_FINDINGS_OF_A_KIND]
    m = messages(p)
    actor = p.lanes.actor[p.lane_of_step()]
    gone: dict[tuple[str, int, int], tuple[int, int]] = {}
    for send, recv in zip(m.send.tolist(), m.recv.tolist(), strict=True):
        src, dst = int(actor[send]), int(actor[recv])
        size = int(p.steps.count[send]) * int(p.buffers.chunk_bytes[int(p.steps.src_buffer[send])]) if int(p.steps.src_buffer[send]) >= 0 else 0
        into, out = int(p.steps.dst_buffer[recv]), int(p.steps.src_buffer[send])
        forward = src in step_of and out in _buffers(p, step_of[src], p.ops.writes)
        backward = dst in step_of and into in _buffers(p, step_of[dst], p.ops.reads)
        key = ("rows", src, dst) if forward else ("gradients", dst, src)
        if forward == backward or key in gone:
            text = f"the message of {job.devices[src].name} to {job.devices[dst].name} is none of the exchanges, or goes twice"
            found.append(Finding(check="values", message=text, witness=witness(p, send)))
            continue
        due = job.samples(key[2]) * job.width(key[1]) * job.tables.element_bytes
        if size != due:
            text = f"{key[0]} of {job.devices[key[1]].name} for {job.devices[key[2]].name} are {due} bytes, the program sends {size}"
            found.append(Finding(check="values", message=text, witness=witness(p, send)))
        gone[key] = (step_of[src], send) if forward else (recv, step_of[dst])
    for r in step_of:
        for s in range(len(job.devices)):
            if s != r and job.samples(s):
                for what in ("rows", "gradients"):
                    if (what, r, s) not in gone:
                        text = f"{what} of {job.devices[r].name} never pass between it and {job.devices[s].name}"
                        found.append(Finding(check="values", message=text, witness=witness(p, step_of[r])))
    if gone and not found:
        first, second = (np.array(x) for x in zip(*gone.values(), strict=True))
        late = ~order.before(order.node(first, 0), order.node(second, 0))
        for (what, r, s), bad in zip(gone, late.tolist(), strict=True):
            if bad:
                text = f"{what} of {job.devices[r].name} for {job.devices[s].name}: nothing makes one wait for the other"
                found.append(Finding(check="values", message=text, witness=witness(p, step_of[r])))
    return found[:MAX_FINDINGS_OF_A_KIND]


def _buffers(p: Program, step: int, ranges: object) -> list[int]:
    return ranges[int(p.steps.op[step])].tolist()[::3]  # type: ignore[index, no-any-return]


def _lookups(p: Program, job: Sharded) -> tuple[dict[int, int], list[Finding]]:
    """The lookup step of every rank that holds shards, and what is wrong with it."""
    found: list[Finding] = []
    step_of: dict[int, int] = {}
    lane_of = p.lane_of_step()
    for step in np.flatnonzero(p.steps.kind == int(Kind.COMPUTE)).tolist():
        lane, op = int(lane_of[step]), int(p.steps.op[step])
        rank, name = int(p.lanes.actor[lane]), p.ops.graph[int(p.steps.op[step])]
        floor, says = _floor_s(job, rank), job.prices_s.get(p.ops.key(op), -1.0)
        why = ""
        if name != job.devices[rank].name or rank in step_of or int(p.lanes.repeat[lane]) != 1:
            why = "it is not this device's, or is run more than once"
        elif says < floor * (1 - TOLERANCE):
            why = f"the plan says {says:.6g} s, its costs' floor is {floor:.6g} s"
        if why:
            found.append(Finding(check="values", message=f"lookups of {name[:64]}: {why}", witness=witness(p, step, device=name)))
        step_of.setdefault(rank, step)
    for rank, d in enumerate(job.devices):
        if (job.width(rank) > 0) != (rank in step_of):
            text = f"device {d.name} looks up nothing, or nothing is there to be looked up"
            found.append(Finding(check="values", message=text, witness={"device": d.name}))
    return step_of, found


def _floor_s(job: Sharded, rank: int) -> float:
    a, b, each = job.floor[job.devices[rank].name]
    total = 0.0
    for s in job.shards:
        if s.device == job.devices[rank].name:
            table = job.tables.tables[job.tables.number_of[s.table]]
            width, share = s.columns[1] - s.columns[0], (s.rows[1] - s.rows[0]) / table.rows
            total += job.tables.batch * width * (a * table.pooling * share + b) + each
    return total


def check_table_bound(bound: Bound, job: Sharded, fabric: Fabric) -> list[Finding]:
    """Of any weights that are not negative: the slowest device takes at least the weighted mean, and each term is paid somewhere."""
    try:
        y = [float(bound.certificate.data["weights"][d.name]) for d in job.devices]
        if bound.certificate.data["form"] != "load" or len(bound.certificate.data["weights"]) != len(y):
            raise ValueError("form or weights")
        if not (all(0 <= x < float("inf") for x in y) and sum(y) > 0):
            raise ValueError("weights")
        proved = _load_s(job, fabric, [x / sum(y) for x in y])
    except (KeyError, TypeError, ValueError) as error:
        return [Finding(check="certificate", message=f"the tables bound lacks or mangles {error}", witness={"kind": "tables"})]
    if bound.quantity != "tables iteration time" or bound.unit != "s" or bound.parts:
        text = "a table plan has a bound on its iteration in seconds, without parts"
        return [Finding(check="certificate", message=text, witness={"unit": bound.unit})]
    if bound.exact > Fraction(proved) * (1 - Fraction(TOLERANCE) / 2):
        text = f"the certificate proves {proved:.9g} s, claimed is {float(bound):.9g} s"
        return [Finding(check="certificate", message=text, witness={"value": bound.value})]
    return []


def _load_s(job: Sharded, fabric: Fabric, y: list[float]) -> float:
    """With the exchanges, each less its full token buckets, or without them: both are proved."""
    looked = pooled = bare = each = float("inf")
    ahead_s = 0.0
    for rank, (d, weight) in enumerate(zip(job.devices, y, strict=True)):
        a, b, c = job.floor[d.name]
        wires, others = 0.0, job.tables.batch - job.samples(rank)
        for links in ([x for x in fabric.links if x.src == d.name], [x for x in fabric.links if x.dst == d.name]):
            rate = sum(x.rate_Bps for x in links)
            wires += others * job.tables.element_bytes / rate if others else 0.0
            ahead_s += weight * sum(x.burst_bytes for x in links) / rate if links else 0.0
        bare, pooled = min(bare, weight * b * job.tables.batch), min(pooled, weight * (b * job.tables.batch + wires))
        looked, each = min(looked, weight * a), min(each, weight * c)
    elements, columns = sum(t.pooling * t.dim for t in job.tables.tables) * job.tables.batch, sum(t.dim for t in job.tables.tables)
    return looked * elements + max(pooled * columns - ahead_s, bare * columns) + each * len(job.tables.tables)
