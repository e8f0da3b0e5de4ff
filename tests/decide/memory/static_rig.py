"""Random operators on streams with events, their storages, and slow oracles for what may share bytes and how small an arena can be."""

from __future__ import annotations

from itertools import permutations, product

import networkx as nx

from meshwright.arena import ArenaProblem


def reachable(stream: list[int], after: list[list[int]]) -> list[set[int]]:
    """Ancestors of every operator, by networkx."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(stream)))
    for s in set(stream):
        mine = [v for v, x in enumerate(stream) if x == s]
        nx.add_path(graph, mine)
    graph.add_edges_from((u, v) for v, before in enumerate(after) for u in before)
    return [nx.ancestors(graph, v) for v in graph]


def apart(problem: ArenaProblem) -> set[tuple[int, int]]:
    """Pairs (a, b) with a surely finished with before b begins."""
    ancestors = reachable(problem.stream.tolist(), [problem.after[v].tolist() for v in range(len(problem.stream))])
    found = set()
    for a, b in product(range(len(problem.size_bytes)), repeat=2):
        touching = {*problem.sources[a].tolist(), *problem.consumers[a].tolist()}
        if a != b and a not in problem.to_end and b not in problem.from_start and all(touching <= ancestors[w] for w in problem.sources[b].tolist()):
            found.add((a, b))
    return found


def smallest_arena(problem: ArenaProblem) -> int:
    """Every order of blocks, each block at its lowest free place."""
    unit, order = problem.alignment_bytes, apart(problem)
    size = [-(-int(s) // unit) * unit for s in problem.size_bytes]
    in_runs = {t for run in problem.runs for t in run}
    blocks = [list(run) for run in problem.runs] + [[t] for t in range(len(size)) if t not in in_runs]
    best = sum(size)
    for chosen in permutations(blocks):
        placed: dict[int, int] = {}
        for block in chosen:
            inner = {t: sum(size[u] for u in block[:i]) for i, t in enumerate(block)}
            starts = sorted({0, *(placed[u] + size[u] - inner[t] for u in placed for t in block)})
            start = next(
                s for s in starts
                if s >= 0 and not any(
                    s + inner[t] < placed[u] + size[u] and placed[u] < s + inner[t] + size[t] and (t, u) not in order and (u, t) not in order
                    for t in block for u in placed
                )
            )  # fmt: skip
            placed |= {t: start + inner[t] for t in block}
        best = min(best, max((placed[t] + size[t] for t in placed), default=0))
    return best
