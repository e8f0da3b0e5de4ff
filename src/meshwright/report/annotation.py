"""An annotated trace as a document and as text: where a step's time went, by stage, module and operator, and on what evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..annotate import Annotation, Evidence, Node
from ..io.quantity import show_time

__all__ = ["annotation_document", "annotation_text"]

SCHEMA = "meshwright.trace-annotation"
VERSION = 1
_LETTERS = "ecsf-"


def annotation_document(annotation: Annotation) -> dict[str, Any]:
    """All times in whole ns. Every node's time is the sum of its children's where it has any; the root's is the sum of the tracks' windows."""
    trace, root = annotation.trace, annotation.root
    tracks = [
        {"pid": trace.tracks[t].pid, "tid": trace.tracks[t].tid, "thread": trace.tracks[t].thread, "window_ns": ns}
        for t, ns in sorted(annotation.track_ns.items())
    ]
    return {
        "schema": SCHEMA, "version": VERSION, "trace": trace.source, "rank": trace.rank, "world_size": trace.world_size, "slices": len(trace),
        "evidence": [e.name.lower() for e in Evidence], "evidence_ns": list(root.evidence_ns), "tracks": tracks,
        "warnings": [{"kind": w.kind, "count": w.count, "first": w.first} for w in trace.warnings], "notes": list(annotation.notes),
        "tree": _node(annotation, root),
    }  # fmt: skip


def _node(annotation: Annotation, node: Node) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": node.name, "kind": node.kind, "host_ns": node.host_ns, "device_ns": node.device_ns, "count": node.count, "start_ns": node.start_ns,
        "end_ns": node.end_ns, "evidence_ns": list(node.evidence_ns),
    }  # fmt: skip
    if node.kind == "module" and annotation.tree is not None:
        module = annotation.tree.modules[node.module]
        out["module"], out["class"] = module.path, module.kind
    if node.estimated_ns:
        out["estimated_ns"] = node.estimated_ns
    if node.children:
        out["children"] = [_node(annotation, child) for child in node.children]
    return out


def annotation_text(annotation: Annotation, *, depth: int = 4, least_share: float = 0.01) -> str:
    """The steps laid over each other: time of an average step, its share, and the letters of the evidence that it rests on."""
    root, trace = annotation.root, annotation.trace
    steps = [n for n in root.children if n.kind == "step" and n.name != "before the first step"]
    total = sum(_time(n) for n in steps)
    rank = f", rank {trace.rank} of {trace.world_size}" if trace.rank is not None else ""
    each = show_time(total / 1e9 / max(1, len(steps)))
    lines = [f"{_plain(trace.source)}{rank}: {len(steps)} step{'s' * (len(steps) != 1)}, {each} of threads and streams each"]
    if total:
        shares = [sum(n.evidence_ns[e] for n in steps) / total for e in range(len(Evidence))]
        said = {
            Evidence.EXACT: "e exact", Evidence.CAPTURED: "c captured", Evidence.STRUCTURAL: "s structural", Evidence.FUZZY: "f fuzzy",
            Evidence.NONE: "- outside operators",
        }  # fmt: skip
        lines.append("evidence: " + ", ".join(f"{said[e]} {100 * shares[e]:.1f} %" for e in Evidence if shares[e] > 0))
        lines.append(f"  {'per step':>10} {'share':>7}  evidence")
        _lines(steps, [], lines, total, len(steps), depth, least_share)
    for w in trace.warnings:
        lines.append(f"warning: {_plain(w.kind)} ({w.count}), first: {_plain(w.first)}")
    lines += [f"note: {note}" for note in annotation.notes]
    return "\n".join(lines)


def _lines(nodes: Sequence[Node], above: list[str], lines: list[str], total: int, steps: int, depth: int, least_share: float) -> None:
    """Children of equal name and kind of all `nodes` are one line."""
    merged: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        for child in node.children:
            merged.setdefault((child.kind, child.name), []).append(child)
    rest, hidden = 0, 0
    for (kind, name), same in merged.items():
        time = sum(_time(n) for n in same)
        if time < least_share * total:
            rest, hidden = rest + time, hidden + 1
            continue
        letters = "".join(x for e, x in enumerate(_LETTERS) if sum(n.evidence_ns[e] for n in same) > 0)
        again = " (again)" if kind == "recomputed" else ""
        of = f" {same[0].module_kind}" if same[0].module_kind and same[0].module_kind != name else ""
        estimated = sum(n.estimated_ns for n in same)
        guess = f" ({100 * estimated / time:.0f} % estimated)" if estimated else ""
        indent = "  " * len(above)
        shown = f"{indent}{_plain(name)}{_plain(of)}{again}{guess}"
        lines.append(f"  {show_time(time / 1e9 / steps):>10} {100 * time / total:6.1f}%  {letters:<8}  {shown}")
        if len(above) + 1 < depth:
            _lines(same, [*above, name], lines, total, steps, depth, least_share)
    if rest and merged and above:
        lines.append(f"  {show_time(rest / 1e9 / steps):>10} {100 * rest / total:6.1f}%  {'':<8}  {'  ' * len(above)}({hidden} more)")


def _time(node: Node) -> int:
    return node.host_ns + node.device_ns


def _plain(text: str) -> str:
    """Names come from outside: no line breaks, no terminal control characters."""
    return "".join(c if c.isprintable() else " " for c in text)[:120]
