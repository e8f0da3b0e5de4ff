"""What a PyTorch execution trace says, by operator: a table, and a document."""

from __future__ import annotations

from typing import Any

from ..explain.numbers import bytes_text
from ..trace.execution_trace import ExecutionTrace, OperatorUse, operator_uses
from .columns import columns
from .svg import cut

__all__ = ["execution_trace_document", "execution_trace_text"]

MAX_ROWS = 20  # uses that are listed; --json has all


def execution_trace_document(trace: ExecutionTrace) -> dict[str, Any]:
    return {
        "schema": "meshwright.program-import", "version": 1, "format": "pytorch-execution-trace", "schema_version": trace.version, "pid": trace.pid,
        "nodes": len(trace.nodes), "threads": len({n.thread for n in trace.nodes if n.schema}),
        "operators": [
            {
                "name": u.name, "calls": u.calls, "outermost": u.outermost, "backward": u.backward, "input_bytes": u.input_bytes,
                "output_bytes": u.output_bytes, "shapes": [list(s) for s in u.shapes], "same_shapes": u.same_shapes,
            }
            for u in operator_uses(trace)
        ],
    }  # fmt: skip


def execution_trace_text(trace: ExecutionTrace) -> str:
    """The operators that touch most bytes, those first that no other called."""
    uses = operator_uses(trace)
    calls, threads = sum(u.calls for u in uses), len({n.thread for n in trace.nodes if n.schema})
    rows = [["operator", "calls", "outermost", "backward", "operands", "results", "mostly of shapes"]]
    rows += [
        [_printable(u.name), f"{u.calls:,}", f"{u.outermost:,}", f"{u.backward:,}", bytes_text(u.input_bytes), bytes_text(u.output_bytes), _shapes(u)]
        for u in uses[:MAX_ROWS]
    ]
    more = [f"and {len(uses) - MAX_ROWS} more (--json has them)"] if len(uses) > MAX_ROWS else []
    head = f"{calls:,} calls of {len(uses)} operators on {threads} threads, {len(trace.nodes):,} nodes; no times are in such a trace"
    return "\n".join([head, "", *columns(rows), *more])


def _shapes(use: OperatorUse) -> str:
    said = " ".join("x".join(map(str, s)) or "scalar" for s in use.shapes)
    return cut(said, 40) + (f" ({use.same_shapes:,} times)" if said and use.same_shapes < use.calls else "")


def _printable(name: str) -> str:
    return cut("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name), 60)
