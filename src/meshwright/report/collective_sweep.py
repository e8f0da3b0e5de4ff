"""Strategies by size: the document (`schema` "meshwright.collective-sweep") and the table for people, in the columns of nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decide.collective.problem import Ranked, busbw_factor
from ..decide.collective.sweep import SweepRow
from ..io.quantity import show_size, show_time
from .collective_text import bound_values, head_of

__all__ = ["sweep_document", "sweep_text"]

HEAD = f"{'size':>8}  {'strategy':<20} {'time':>9}  {'algbw':>8}  {'busbw':>8}  {'x bound':>7}"


def sweep_document(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """One entry per size: the bound, and per strategy time, bandwidths (bytes/s), ratio to the bound and why it lost or was refused."""
    document = head_of(rows[0].problem) | {"schema": "meshwright.collective-sweep", "version": 1}
    del document["size_bytes"]
    document["sizes"] = [
        {
            "size_bytes": row.problem.size_bytes, "planned": row.planned, "bound": bound_values(row.problem, row.bound),
            "strategies": [_entry(row, r) for r in row.ranked],
        }
        for row in rows
    ]  # fmt: skip
    return document


def _entry(row: SweepRow, r: Ranked) -> dict[str, Any]:
    entry: dict[str, Any] = {"strategy": r.strategy, "time_s": r.time_s, "why": r.why}
    if r.plan is not None and r.time_s:
        algbw = row.problem.size_bytes / r.time_s
        entry |= {
            "algbw_Bps": algbw,
            "busbw_Bps": algbw * float(busbw_factor(row.problem.op, len(row.problem.ranks))),
            "ratio": r.time_s / float(row.bound) if row.bound.exact else None,
            "steps": r.plan.program.executed_steps,
            "options": dict(r.plan.options),
        }
    return entry


def sweep_text(rows: Sequence[SweepRow], *, winners: bool) -> str:
    """A line per size and strategy, fastest first and starred; at most 80 columns. Reasons of refusals stand below, once each."""
    problem = rows[0].problem
    refused: dict[str, str] = {}
    lines = [f"{problem.op} on {len(problem.ranks)} devices of {problem.fabric.name}; bandwidths in GB/s", HEAD]
    for row in rows:
        factor = float(busbw_factor(row.problem.op, len(row.problem.ranks)))
        for place, r in enumerate(row.ranked[:1] if winners else row.ranked):
            size = _size(row.problem.size_bytes) if place == 0 else ""
            if r.time_s is None:
                said = "time limit" if "time limit" in r.why else "refused"
                if said == "refused":
                    refused.setdefault(r.strategy, r.why)
                    continue
                lines.append(f"{size:>8}    {r.strategy:<18} {said:>9}")
                continue
            algbw = row.problem.size_bytes / r.time_s / 1e9 if r.time_s else 0.0
            ratio = f"{r.time_s / float(row.bound):7.2f}" if row.bound.exact else "      -"
            star = "*" if place == 0 else " "
            lines.append(f"{size:>8}  {star} {r.strategy:<18} {show_time(r.time_s):>9}  {algbw:8.4g}  {algbw * factor:8.4g}  {ratio}")
        if not winners:
            algbw = row.problem.size_bytes / float(row.bound) / 1e9 if row.bound.exact else 0.0
            time, kind = show_time(float(row.bound)), row.bound.certificate.kind
            lines.append(f"{'':>8}    {'bound':<18} {time:>9}  {algbw:8.4g}  {algbw * factor:8.4g}  {kind:>7}")
    lines += [f"{name}: {why}" for name, why in refused.items()]
    planned = [row for row in rows if row.planned]
    if len(planned) < len(rows):
        lines.append(f"planned at {', '.join(_size(row.problem.size_bytes) for row in planned)}; between them these plans, cut for the size")
        lines.append("(the fast ones planned afresh); --every-size plans each one")
    return "\n".join(lines)


def _size(size_bytes: int) -> str:
    """Powers of two in binary units, as sweeps name them."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return show_size(size_bytes)
