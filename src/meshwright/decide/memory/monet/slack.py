"""Implementations that differ in time and workspace only: the small ones while a schedule is searched, the fast ones afterwards, wherever they fit.

Such implementations of a node read the same and write over the same, so which of them runs changes nothing but its time and the bytes alive while it
runs. Chosen run by run after the schedule is fixed, the fastest that fits is the best choice there is: runs do not influence each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....graph.step_graph import Alternative, StepGraph, StepNode
from ....simulate.step_memory import simulate_step
from ..step import dropped_at_last_use
from .schedule import Run

__all__ = ["hurried", "lean", "settled"]


def _alike(graph: StepGraph, node: int, alternative: int, lossy: bool) -> list[int]:
    """Implementations that read and write over what this one does, itself first."""
    n = graph.nodes[node]
    own = _way(n, alternative)
    others = [
        k for k in range(-1, len(n.alternatives))
        if k != alternative and _place(_way(n, k)) == _place(own) and (lossy or k < 0 or n.alternatives[k].lossless)
    ]  # fmt: skip
    return [alternative, *others]


def _way(node: StepNode, alternative: int) -> StepNode | Alternative:
    return node if alternative < 0 else node.alternatives[alternative]


def _place(way: StepNode | Alternative) -> tuple[tuple[int, ...], int]:
    return way.inputs, way.over if isinstance(way, Alternative) else -1


def lean(graph: StepGraph, ways: Mapping[int, int], *, lossy: bool, slower: float, own: bool = False) -> dict[int, int]:
    """`ways` with the smallest workspaces among implementations that take at most `slower` times as long as the fastest alike (`own`: as they do)."""
    found = dict(ways)
    for i, n in enumerate(graph.nodes):
        alike = _alike(graph, i, ways.get(i, -1), lossy) if n.alternatives else []
        if len(alike) > 1:
            # `own`: times count from what it runs by now, not from the fastest, which may not fit
            limit = slower * (_way(n, alike[0]).time_s if own else min(_way(n, k).time_s for k in alike))
            able = [k for k in alike if _way(n, k).time_s <= limit]
            found[i] = min(able, key=lambda k: (_way(n, k).workspace_bytes, _way(n, k).time_s))
    return found


def hurried(graph: StepGraph, runs: Sequence[Run], boundary: int, budget_bytes: int, *, lossy: bool) -> list[Run]:
    """`runs`, each by the fastest implementation alike that stays within the budget (where none does: as it was)."""
    alive = simulate_step(graph, dropped_at_last_use(graph, runs), boundary=boundary).bytes_at
    found: list[Run] = []
    for (node, alternative), bytes_alive in zip(runs, alive, strict=True):
        n = graph.nodes[node]
        # what is alive while it runs counts its present workspace, which would go
        room = budget_bytes - bytes_alive + _way(n, alternative).workspace_bytes
        able = [k for k in _alike(graph, node, alternative, lossy) if _way(n, k).workspace_bytes <= room] if n.alternatives else []
        found.append((node, min(able, key=lambda k: (_way(n, k).time_s, _way(n, k).workspace_bytes)) if able else alternative))
    return found


def settled(graph: StepGraph, runs: Sequence[Run]) -> dict[int, int]:
    """Of every node that runs, the implementation of smallest workspace by which it does: one that fits wherever the others do."""
    found: dict[int, int] = {}
    for node, alternative in runs:
        n = graph.nodes[node]
        if node not in found or _way(n, alternative).workspace_bytes < _way(n, found[node]).workspace_bytes:
            found[node] = alternative
    return found
