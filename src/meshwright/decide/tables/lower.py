"""A table plan as a program: one iteration. Gradients come, the device looks up and updates its shards, pooled rows go: each pair of devices has a
channel for either exchange, each with a lane at both ends, as gloo and NCCL post all messages of an all-to-all at once."""

from __future__ import annotations

from collections.abc import Mapping

from ...cost import Cost, Priced
from ...program.builder import ProgramBuilder
from ...program.program import Program, Role, Unit
from .problem import TablePlan, TableProblem

__all__ = ["OP", "lower_tables", "price_table"]

OP = "lookup"  # name of every device's op; `op.graph` is the device's name


def lower_tables(problem: TableProblem, plan: TablePlan) -> Program:
    """One rank per device of the fabric. Message of s to r: samples of one times columns of the other times the bytes of an element."""
    names, size = [d.name for d in problem.fabric.devices], problem.tables.element_bytes
    b = ProgramBuilder(ranks=len(names), name=problem.tables.name)
    held = [sum(s.elements for s in plan.shards if s.device == name) * problem.tables.weight_bytes for name in names]
    holders = [r for r in range(len(names)) if plan.columns[r]]
    others = {r: [s for s in range(len(names)) if s != r and problem.samples[s]] for r in holders}
    nbytes = {(r, s): int(problem.samples[s]) * plan.columns[r] * size for r in holders for s in range(len(names)) if problem.samples[s]}
    for r in holders:
        weights = b.buffer(r, chunks=1, chunk_bytes=held[r], role="weight", persistent=True, name=f"{names[r]}: tables")
        ends = ("input", "output") if (r, r) in nbytes else ()
        own = [(b.buffer(r, chunks=1, chunk_bytes=nbytes[r, r], role=role, name=f"{names[r]}: {role}"), 0, 1) for role in ends]
        got, made, arrived = [], [], []
        for s in others[r]:
            gradient = b.buffer(s, chunks=1, chunk_bytes=nbytes[r, s], role="input", name=f"gradients of {names[r]} on {names[s]}")
            got.append(b.buffer(r, chunks=1, chunk_bytes=nbytes[r, s], name=f"gradients of {names[r]} from {names[s]}"))
            channel = b.channel(s, r)
            sent = b.lane(s, role=Role.COMM).send(channel, gradient, 0)
            b.dies_after(gradient, sent)
            arrived.append(b.lane(r, role=Role.COMM).recv(channel, got[-1], 0))
            made.append(b.buffer(r, chunks=1, chunk_bytes=nbytes[r, s], name=f"rows of {names[r]} for {names[s]}"))
        reads = [(weights, 0, 1), *own[:1], *((x, 0, 1) for x in got)]
        writes = [*own[1:], *((x, 0, 1) for x in made)]
        op = b.op(OP, graph=names[r], reads=reads, writes=writes)
        done = b.lane(r, unit=Unit.COMPUTE, role=Role.COMPUTE).compute(op, after=arrived)
        for x in got:
            b.dies_after(x, done)
        for s, x in zip(others[r], made, strict=True):
            rows = b.buffer(s, chunks=1, chunk_bytes=nbytes[r, s], role="output", name=f"rows of {names[r]} on {names[s]}")
            channel = b.channel(r, s)
            b.dies_after(x, b.lane(r, role=Role.COMM).send(channel, x, 0, after=[done]))
            b.lane(s, role=Role.COMM).recv(channel, rows, 0)
    return b.build()


def price_table(problem: TableProblem, plan: TablePlan, measured_s: Mapping[str, float] | None = None) -> Cost:
    """Seconds of every device's lookups: those measured, else those of the cost nets."""
    names = [d.name for d in problem.fabric.devices]
    table = {f"{n}|{OP}": Priced(float(s)) for n, s, c in zip(names, plan.phases.compute_s, plan.columns, strict=True) if c}
    table |= {f"{n}|{OP}": Priced(float(s)) for n, s in (measured_s or {}).items() if f"{n}|{OP}" in table}
    return Cost(name="lookups", table=table, source="measured here" if measured_s else "nets over measured lookups")
