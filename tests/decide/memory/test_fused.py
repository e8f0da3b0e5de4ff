"""Kernels of a fusing compiler: an order in which each reads what was made before; what is written out, and what is allocated together."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from meshwright.decide.memory.fusionaware.fused import fused_peak_bytes, priced
from meshwright.decide.memory.fusionaware.kernels import MAX_KERNEL_RUNS, kernels_of
from meshwright.decide.memory.fusionaware.network import BANS, MAX_CHAIN_POSITIONS, saved_set
from meshwright.decide.memory.step import finished
from meshwright.graph.step_graph import StepGraph, StepNode, StepStorage


@pytest.mark.parametrize("seed", range(30))
def test_kernels_run_in_an_order_that_is_possible(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    reads = [sorted({int(x) for x in rng.integers(0, k, int(rng.integers(0, 4)))}) if k else [] for k in range(n)]
    part = [int(k >= n // 2) for k in range(n)]
    size = [int(x) for x in rng.choice([0, 8, 16], n)]
    touched = [frozenset({*reads[k], k, int(rng.integers(100, 104))}) for k in range(n)]
    kernels = kernels_of(reads, part, size, touched)
    assert sorted(k for kernel in kernels for k in kernel) == list(range(n))
    of = {k: i for i, kernel in enumerate(kernels) for k in kernel}
    assert all(of[r] <= of[k] for k in range(n) for r in reads[k])
    for kernel in kernels:
        assert len(kernel) <= MAX_KERNEL_RUNS and len({(part[k], size[k]) for k in kernel}) == 1
        assert len(kernel) == 1 or size[kernel[0]]
    whole = nx.DiGraph((of[r], of[k]) for k in range(n) for r in reads[k] if of[r] != of[k])
    assert nx.is_directed_acyclic_graph(whole)
    apart = [k for k in range(1, n) if size[k] and size[k] == size[k - 1] and part[k] == part[k - 1] and reads[k] == [k - 1]]
    assert all(of[k] == of[k - 1] or len(kernels[of[k]]) + len(kernels[of[k - 1]]) > MAX_KERNEL_RUNS for k in apart), "nothing runs between these"


def graph_of(*calls: tuple[str, str, tuple[str, ...], int], given: tuple[str, ...] = ("x",)) -> StepGraph:
    """Forward calls (name, operator, operands, bytes made; 0: a view of its operand); the last one is the result."""
    nodes, storages, lies = [], [], dict[str, tuple[int, ...]]()
    for name in given:
        storages.append(StepStorage(size_bytes=1000, owner=name, kind="input"))
        lies[name] = (len(storages) - 1,)
        nodes.append(StepNode(name=name, target="placeholder", phase="input", storages=lies[name]))
    for name, operator, operands, size in calls:
        if size:
            storages.append(StepStorage(size_bytes=size, owner=name))
        lies[name] = (len(storages) - 1,) if size else lies[operands[0]]
        inputs = tuple(next(i for i, m in enumerate(nodes) if m.name == o) for o in operands)
        target = f"aten.{operator}.default"
        nodes.append(StepNode(name=name, target=target, phase="forward", inputs=inputs, storages=lies[name], makes=lies[name] if size else ()))
    return StepGraph(name="calls", nodes=tuple(nodes), storages=tuple(storages), boundary=len(nodes), results=(len(nodes) - 1,))


def peak(graph: StepGraph) -> int:
    runs = [(i, -1) for i, n in enumerate(graph.nodes) if n.phase != "input"]
    return fused_peak_bytes(graph, finished(graph, runs, len(runs), strategy="test")) - graph.fixed_bytes()


def test_what_a_library_kernel_reads_through_a_view_is_written_out() -> None:
    assert peak(graph_of(("a", "mul", ("x",), 100), ("b", "sin", ("a",), 100))) == 100
    assert peak(graph_of(("a", "mul", ("x",), 100), ("v", "view", ("a",), 0), ("m", "mm", ("v",), 10))) == 110
    assert peak(graph_of(("a", "mul", ("x",), 100), ("v", "view", ("a",), 0), ("b", "sin", ("v",), 100))) == 100


def test_results_of_one_kernel_are_there_together_and_reuse_only_what_nothing_else_in_it_reads() -> None:
    """Two products of the same operands fuse, though each is read by a matrix product before the other is asked for."""
    first = (("p", "mm", ("x",), 100), ("q", "mm", ("x",), 100))
    alone = (("a", "mul", ("p", "q"), 100), ("m", "mm", ("a",), 10))
    assert peak(graph_of(*first, *alone)) == 200
    both = (*alone, ("b", "add", ("p", "q"), 100), ("n", "mm", ("b",), 10), ("r", "mm", ("m", "n"), 1))
    assert peak(graph_of(*first, *both)) == 400


def test_a_fusible_call_costs_a_fifth_where_its_user_takes_it_in() -> None:
    graph = graph_of(("a", "relu", ("x",), 1000), ("b", "relu", ("a",), 1000), ("c", "mm", ("b", "x"), 1000), ("d", "view", ("c",), 0))
    made = {n.name: n.time_s for n in priced(graph, {"c": 30.0}, flops_per_s=0.001, bytes_per_s=10.0).nodes}
    assert made["a"] == pytest.approx(200.0 / 5), "read and written by the kernel of b"
    assert made["b"] == pytest.approx(200.0), "the product reads what b has written out"
    assert made["c"] == pytest.approx(30.0 / 0.001) and made["x"] == made["d"] == 0.0


def test_a_fusible_chain_is_cut_where_it_is_long() -> None:
    """And by no other ban."""
    calls = [(f"a{i}", "relu", (f"a{i - 1}" if i else "x",), 1000) for i in range(MAX_CHAIN_POSITIONS + 4)]
    graph = graph_of(*calls)
    names = {kind: [graph.nodes[i].name for i, why in saved_set(graph, bans=(kind,)).banned.items() if why == kind] for kind in BANS}
    assert {kind: found for kind, found in names.items() if found} == {"chain": [f"a{MAX_CHAIN_POSITIONS + 1}"]}
    assert saved_set(graph).banned == saved_set(graph, bans=("chain",)).banned
    assert not saved_set(graph_of(*calls[:-3]), bans=("chain",)).banned
