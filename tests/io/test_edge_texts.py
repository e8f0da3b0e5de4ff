"""Graphs as text: METIS, DIMACS and Matrix Market are the graph that networkx writes, and what is cut off or of another form is refused by name."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest

from meshwright.errors import FormatError
from meshwright.io.model.node_graphs import read_node_graph


def edges_of(graph):
    rows = np.repeat(np.arange(len(graph.indptr) - 1), np.diff(graph.indptr))
    return sorted(zip(graph.indices.tolist(), rows.tolist(), strict=True))


def drawn(seed):
    graph = nx.gnm_random_graph(30, 60, seed=seed)
    graph.remove_node(29)
    graph.add_node(29)  # a node alone
    return graph


def metis(graph, *, sizes=False, weights=0, edge_weights=False, rng):
    digits = f"{int(sizes)}{int(weights > 0)}{int(edge_weights)}"
    lines = ["% drawn", f"{len(graph)} {graph.number_of_edges()} {digits}" + (f" {weights}" if weights else "")]
    for node in range(len(graph)):
        before = [str(rng.randrange(9)) for _ in range(int(sizes) + weights)]
        lines.append(" ".join(before + [t for v in sorted(graph[node]) for t in ([str(v + 1), "7"] if edge_weights else [str(v + 1)])]))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("seed", range(3))
def test_every_form_is_the_same_graph(tmp_path, seed):
    graph, rng = drawn(seed), random.Random(seed)
    wanted = sorted([(u, v) for u, v in graph.edges] + [(v, u) for u, v in graph.edges])
    m, head = graph.number_of_edges(), "%%MatrixMarket matrix coordinate"
    texts = {
        "plain.graph": metis(graph, rng=rng), "weights.graph": metis(graph, sizes=True, weights=2, edge_weights=True, rng=rng),
        "one.graph": metis(graph, weights=1, rng=rng).replace(" 010 1\n", " 10\n"),
        "queen.col": f"c drawn\np edge 30 {m}\n" + "".join(f"e {u + 1} {v + 1}\n" for u, v in graph.edges),
        "book.col": f"c twice\np edge 30 {m} 11\n" + "".join(f"e {u + 1} {v + 1}\n" for u, v in wanted),
        "roads.gr": f"c drawn\np sp 30 {2 * m}\n" + "".join(f"a {u + 1} {v + 1} 17\n" for u, v in wanted),
        "lower.mtx": f"{head} real symmetric\n% drawn\n30 30 {m}\n" + "".join(f"{v + 1} {u + 1} .5\n" for u, v in graph.edges),
        "whole.mtx": f"{head} pattern general\n30 30 {2 * m}\n" + "".join(f"{u + 1} {v + 1}\n" for u, v in wanted),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        found = read_node_graph(tmp_path / name).graph
        assert len(found.indptr) == 31 and edges_of(found) == wanted, name


def test_arcs_go_one_way(tmp_path):
    (tmp_path / "x.gr").write_text("p sp 3 2\na 1 2 5\na 2 3 5\n", encoding="utf-8")
    assert edges_of(read_node_graph(tmp_path / "x.gr").graph) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(("name", "text", "says"), [
    ("x.graph", "3 2\n2\n1 3\n", "states 3 nodes and has 2 lines"), ("x.graph", "3 2\n2\n1\n\n", "states 4 edges and has 2"),
    ("x.graph", "", "no counts"), ("x.graph", "2 1\n2\nx\n", "not a table of numbers"), ("x.graph", "2 1\n2\n3\n", "an edge to node 3 of 2"),
    ("x.graph", "2 1 002\n2\n1\n", "lines for them"), ("x.graph", f"{9 * 10**20} 1\n", "no counts"),
    ("x.col", "c only\n", "no line, or several"), ("x.col", "p edge 3 2\ne 1 2\n", "states 2 edges and has 1"),
    ("x.col", "p edge x 2\n", "no counts"),
    ("x.col", "p edge 3 1\ne 1 x\n", "not a table"), ("x.gr", "p sp 3 1\na 0 2 1\n", "an edge to node 0 of 3"),
    ("x.mtx", "%%MatrixMarket matrix array real general\n2 2\n1\n", "no matrix of coordinates"),
    ("x.mtx", "%%MatrixMarket matrix coordinate real general\n2 3 1\n1 1 1\n", "a matrix of 2 x 3"),
    ("x.mtx", "%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n", "states 2 edges and has 1"),
    ("x.gr", "p sp 5000000 1\na 1 2 3\n", "5000000 nodes"),
])  # fmt: skip
def test_what_is_no_such_graph(tmp_path, name, text, says):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=says):
        read_node_graph(tmp_path / name)
