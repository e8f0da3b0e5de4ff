"""Whether the ranks can reach each other as an operation needs it; if not, the cut: a set that no link leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import Disconnected
from .problem import CollectiveProblem
from .rates import RateGraph

__all__ = ["require_connected"]

TO_ALL = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")
MAX_NAMED_MEMBERS = 4  # of a cut's side, in the message


def require_connected(problem: CollectiveProblem, graph: RateGraph) -> None:
    """Raises: Disconnected where some rank's data cannot get to a rank that needs it; `data` holds both sides of the cut."""
    forward: dict[int, list[int]] = {}
    backward: dict[int, list[int]] = {}
    for u, v in graph.arcs:
        forward.setdefault(u, []).append(v)
        backward.setdefault(v, []).append(u)
    everyone = range(graph.ranks)
    if problem.op == "permute":
        for rank, peer in enumerate(problem.peers):
            if peer >= 0 and rank not in (reach := _reach(forward, peer)):
                raise _cut(graph, peer, rank, reach)
        return
    root = problem.root if problem.op in (*TO_ALL, *TO_ROOT) else 0
    if problem.op not in TO_ROOT:
        reach = _reach(forward, root)
        missing = next((r for r in everyone if r not in reach), None)
        if missing is not None:
            raise _cut(graph, root, missing, reach)
    if problem.op not in TO_ALL:
        reached_from = _reach(backward, root)
        missing = next((r for r in everyone if r not in reached_from), None)
        if missing is not None:
            raise _cut(graph, missing, root, _reach(forward, missing))


def _reach(near: Mapping[int, Sequence[int]], start: int) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        for v in near.get(todo.pop(), ()):
            if v not in found:
                found.add(v)
                todo.append(v)
    return found


def _cut(graph: RateGraph, src: int, dst: int, inside: set[int]) -> Disconnected:
    here = [graph.names[v] for v in range(graph.ranks) if v in inside]
    there = [graph.names[v] for v in range(graph.ranks) if v not in inside]
    some = ", ".join(here[:MAX_NAMED_MEMBERS]) + (f" and {len(here) - MAX_NAMED_MEMBERS} more" if len(here) > MAX_NAMED_MEMBERS else "")
    return Disconnected(
        f"no path from {graph.names[src]} to {graph.names[dst]}: no link leads from {some} to the other {len(there)}",
        hint="add links, or name a connected part of the devices",
        data={"from": here[:64], "to": there[:64]},
    )
