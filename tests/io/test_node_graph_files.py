"""Graphs to train on in files: npz, OGB's folders, node-link JSON, lines of edges; points in CSV; and what is refused."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace

import networkx as nx
import numpy as np
import pytest

from meshwright.cli.graph_arguments import data_of
from meshwright.drive.node_graphs import load_node_graph
from meshwright.errors import FormatError, Infeasible, MissingExtra, UsageError
from meshwright.io.model import node_graphs
from meshwright.io.model.node_graphs import COPIES, read_node_graph, read_points

PTR, IDX = np.array([0, 1, 3, 3]), np.array([2, 0, 1])


def test_npz(tmp_path):
    path = tmp_path / "g.npz"
    np.savez(path, indptr=PTR, indices=IDX, x=np.ones((3, 2)), y=np.array([1.0, np.nan, 0.0]), train_mask=np.array([1, 0, 1]))
    found = read_node_graph(path)
    assert found.graph.indptr.tolist() == PTR.tolist() and found.graph.indices.tolist() == IDX.tolist()
    assert found.labels.tolist() == [1, -1, 0] and found.train.tolist() == [True, False, True] and found.features.dtype == np.float32
    np.savez(path, indptr=PTR, indices=IDX, data=np.ones(3), shape=(3, 3), format=b"csc")  # as scipy.sparse.save_npz
    assert read_node_graph(path).graph.indptr.tolist() == [0, 1, 2, 3]
    np.savez(path, row=[0, 1, 1], col=IDX, data=np.ones(3), shape=(3, 3), format=b"coo")
    assert read_node_graph(path).graph.indptr.tolist() == PTR.tolist() and read_node_graph(path).graph.indices.tolist() == [2, 0, 1]
    data = load_node_graph(str(path), features=4)
    assert data.features.shape == (3, 4) and data.classes <= 10


def test_ogb_folders(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "split" / "time").mkdir(parents=True)
    write = lambda name, text: (tmp_path / name).write_bytes(gzip.compress(text.encode()))  # noqa: E731
    write("raw/edge.csv.gz", "0,1\n2,1\n")
    write("raw/num-node-list.csv.gz", "4\n")
    write("raw/node-feat.csv.gz", "0.5,1\n0,0\n1,1\n2,2\n")
    write("raw/node-label.csv.gz", "1\n0\nnan\n2\n")
    write("split/time/train.csv.gz", "3\n0\n")
    found = read_node_graph(tmp_path)
    assert found.graph.nodes == 4 and found.graph.indices.tolist() == [0, 2] and found.labels.tolist() == [1, 0, -1, 2]
    assert found.train.tolist() == [True, False, False, True] and found.features[0].tolist() == [0.5, 1]
    write("split/time/train.csv.gz", "9\n")
    with pytest.raises(FormatError, match="none of 4"):
        read_node_graph(tmp_path)
    (tmp_path / "raw" / "num-node-list.csv.gz").unlink()
    with pytest.raises(FormatError, match="num-node-list"):
        read_node_graph(tmp_path)


def test_published_npz(tmp_path):
    """Amazon's and Coauthor's form (gnn-benchmark), and that of OGB's large graphs."""
    path, folder = tmp_path / "g.npz", tmp_path / "raw"
    sparse = {"attr_data": [2.0, 3.0], "attr_indices": [1, 0], "attr_indptr": [0, 1, 1, 2], "attr_shape": [3, 2]}
    np.savez(path, adj_data=np.ones(3), adj_indices=IDX, adj_indptr=PTR, adj_shape=(3, 3), labels=[1, 0, 1], **sparse)
    found = read_node_graph(path)
    assert found.graph.indices.tolist() == IDX.tolist() and found.features.tolist() == [[0, 2], [0, 0], [3, 0]] and found.labels.tolist() == [1, 0, 1]
    for wrong in ({"attr_indptr": [0, 1, 2]}, {"attr_indices": [1, 2]}, {"attr_shape": [3]}, {"attr_data": [1.0]}, {"attr_indptr": [0, 2, 1, 2]}):
        np.savez(path, adj_indices=IDX, adj_indptr=PTR, **{**sparse, **wrong})
        with pytest.raises(FormatError, match="no sparse matrix with a row for each node"):
            read_node_graph(path)
    folder.mkdir()
    np.savez(folder / "data.npz", edge_index=[[2, 0, 1], [0, 1, 1]], num_nodes_list=[4], node_feat=np.ones((4, 1), np.float16))
    np.savez(folder / "node-label.npz", node_label=[[0], [np.nan], [1], [1]])
    found = read_node_graph(tmp_path)
    assert found.graph.indptr.tolist() == [0, 1, 3, 3, 3] and found.labels.tolist() == [0, -1, 1, 1] and found.features.shape == (4, 1)
    np.savez(path, edge_index=[[0, 1]])
    with pytest.raises(FormatError, match="edge_index of two rows"):
        read_node_graph(path)


def test_networkx_and_lines(tmp_path):
    made = nx.gnm_random_graph(8, 12, seed=1)
    path = tmp_path / "g.json"
    path.write_text(json.dumps(nx.node_link_data(made, edges="links")))
    assert read_node_graph(path).graph.edges == 24
    lattice = nx.grid_graph((3, 2, 2))  # its nodes are tuples
    path.write_text(json.dumps(nx.node_link_data(lattice, edges="edges")))
    assert read_node_graph(path).graph.edges == 2 * lattice.number_of_edges()
    lines = tmp_path / "edges.txt"
    lines.write_text("# from to\n0 3\n2\t1\n")
    assert read_node_graph(lines).graph.indices.tolist() == [2, 0] and read_node_graph(lines, directed=False).graph.edges == 4


def test_lines_as_networkx_writes_them(tmp_path):
    """`write_edgelist` puts attributes behind the nodes, and lists of weighted edges a number: the lines were refused."""
    for lines in ("0 1 {}\n2 1 {'weight': 4, 'name': 'a b'}\n", "# source target weight\n0\t1\t0.5\n2\t1\t1e-3\n"):
        (tmp_path / "g.txt").write_text(lines, encoding="utf-8")
        graph = read_node_graph(tmp_path / "g.txt").graph
        assert (graph.nodes, graph.rows.tolist(), graph.indices.tolist()) == (3, [1, 1], [0, 2]), lines
    (tmp_path / "g.csv").write_text("src,dst\n0,1\n", encoding="utf-8")
    with pytest.raises(FormatError, match="not a table of numbers") as caught:
        read_node_graph(tmp_path / "g.csv")
    assert "source target" in str(caught.value.hint)


def test_points_and_digits(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("0,0,1\n1,0,0\n0,2,1\n5,5,0\n")
    points, labels = read_points(path)
    assert points.shape == (4, 2) and labels.tolist() == [1, 0, 1, 0]
    assert load_node_graph(f"knn:1,{path}").graph.nodes == 4
    try:
        assert load_node_graph("digits:8").graph.nodes == 1797
    except MissingExtra as missing:
        assert "scikit-learn" in missing.message


def test_a_graph_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "g.npz"
    np.savez(path, indptr=PTR, indices=IDX)
    monkeypatch.setattr(node_graphs, "free_bytes", lambda: 100)
    with pytest.raises(Infeasible, match="100 are free") as refused:
        read_node_graph(path)
    assert refused.value.exit_code == 3 and refused.value.data == {"needed_bytes": COPIES * PTR.nbytes, "available_bytes": 100}
    with pytest.raises(Infeasible, match="100 are free"):
        load_node_graph("rmat:10,20")
    monkeypatch.setattr(node_graphs, "free_bytes", lambda: 5_000)
    with pytest.raises(Infeasible, match="40 times that") as refused:
        data_of(Namespace(graph="rmat:10,20", seed=0, undirected=False, features=4, method="own"))
    assert "METIS" in refused.value.hint


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"indptr": PTR}, "needs indptr and indices"), ({"indptr": PTR, "indices": IDX + 0.5}, "whole numbers"),
        ({"indptr": PTR, "indices": IDX + 9}, "none of 3 nodes"), ({"indptr": PTR, "indices": IDX, "x": np.ones(3)}, "one row of numbers"),
        ({"indptr": PTR, "indices": np.array([None] * 3)}, "plain numbers"),
    ],
)  # fmt: skip
def test_wrong_columns(tmp_path, columns, text):
    path = tmp_path / "g.npz"
    np.savez(path, **columns)
    with pytest.raises(FormatError, match=text):
        read_node_graph(path)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("g.npz", b"PK", "no npz"), ("g.txt", b"a b\n", "not a table"), ("g.txt", b"", "no line"), ("g.txt", b"0 -1\n", "none of"),
        ("g.json", b'{"nodes": []}', "mangles"), ("g.json", b'{"nodes": [], "links": []}', "no nodes"),
        ("g.json", b'{"nodes": [{"id": 1}], "links": [{"source": 1, "target": 2}]}', "mangles"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path, name, data, text):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(FormatError, match=text):
        read_node_graph(path)


@pytest.mark.parametrize("name", ["rmat:5", "rmat:0,4", "digits:x", "absent.npz", "absent.txt"])
def test_names_that_are_none(name):
    with pytest.raises((UsageError, MissingExtra)):
        load_node_graph(name)


def test_points_without_numbers(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("1\n2\n")
    with pytest.raises(FormatError, match="a class"):
        read_points(path)
