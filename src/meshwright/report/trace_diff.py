"""A difference of two measurements as text and as a JSON document."""

from __future__ import annotations

from typing import Any

from ..bottleneck.diff import Change, Diff
from ..explain.numbers import seconds_text
from .columns import columns

__all__ = ["diff_document", "diff_text"]


def diff_document(diff: Diff, *, a: str, b: str, joined: str) -> dict[str, Any]:
    """Seconds per step; the deltas of `changes` sum to `delta_s`."""
    return {
        "schema": "meshwright.trace-diff", "version": 1, "a": a, "b": b, "joined_by": joined, "a_s": diff.a_s, "b_s": diff.b_s,
        "delta_s": diff.b_s - diff.a_s, "changes": [_row(c) for c in diff.changes], "branches": [_row(c) for c in diff.branches],
    }  # fmt: skip


def _row(change: Change) -> dict[str, Any]:
    return {"path": list(change.leaf), "a_s": change.a_s, "b_s": change.b_s, "delta_s": change.delta_s}


def diff_text(diff: Diff, *, a: str, b: str, joined: str, limit: int) -> str:
    lines = [f"A {a}: {seconds_text(diff.a_s)} per step", f"B {b}: {seconds_text(diff.b_s)} per step, {_signed(diff.b_s - diff.a_s)}", ""]
    shown = diff.changes[:limit] if limit else diff.changes
    rows = [["change", "A", "B", f"by {joined}"]]
    rows += [[_signed(c.delta_s), seconds_text(c.a_s), seconds_text(c.b_s), " / ".join(c.leaf)] for c in shown]
    rest = diff.changes[len(shown) :]
    if rest:
        left = (sum(c.a_s for c in rest), sum(c.b_s for c in rest))
        rows.append([_signed(left[1] - left[0]), seconds_text(left[0]), seconds_text(left[1]), f"{len(rest)} more"])
    rows.append([_signed(diff.b_s - diff.a_s), seconds_text(diff.a_s), seconds_text(diff.b_s), "all"])
    lines += columns(rows)
    tops = [c for c in diff.branches if len(c.leaf) == 1]
    lines += ["", *columns([[" / ".join(c.leaf), seconds_text(c.a_s), seconds_text(c.b_s), _signed(c.delta_s)] for c in tops])]
    return "\n".join(lines)


def _signed(time_s: float) -> str:
    return ("+" if time_s > 0 else "") + seconds_text(time_s)
