"""What the `graph` commands share: the graph, its parts, the network, and how bits are chosen."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..decide.traffic.adaqp import HaloProblem, HaloStrategy, Parts
    from ..drive.halo import TriedBits
    from ..graph.halo import Halo
    from ..graph.nodes import Labelled
    from ..job import GraphTraining
    from ..kernels.effort import Budget

OWN_COPIES = 40  # times that our own partitioner holds a graph's columns (a drawn graph of 300,000 edges: 37.6)
MAX_LAYERS = 1024  # of a graph network: each is two exchanges of a plan
GRAPH = (
    "rmat:NODES,EDGES, digits:K, knn:K,POINTS.csv, or a file: .npz of compressed rows, OGB's folder, node-link .json, METIS' .graph, DIMACS, "
    "Matrix Market, lines of edges"
)


def data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("graph", help=GRAPH)
    add("--undirected", action="store_true", help="add the other direction of every edge of a file")
    add("--features", type=at_least_one, metavar="F", help="numbers of a node, drawn where the graph has none (default 64)")
    add("--seed", type=whole_number, default=0, help="seed of generated graphs, parts, weights and rounding (default 0)")


def _layers(text: str) -> int:
    if (number := at_least_one(text)) > MAX_LAYERS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_LAYERS}, got {number}")
    return number


def parts_arguments(parser: argparse.ArgumentParser) -> None:
    say = "partitioner (default auto: pymetis where it is installed)"
    parser.add_argument("--method", choices=["auto", "own", "pymetis"], default="auto", help=say)


def network_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--fabric", required=True, help="FILE.toml or PRESET:n; one worker on each device, e.g. 'star:4?link=12.5MB/s'")
    add("--devices", help="use only these devices, e.g. 0-3,8")
    add("--network", choices=["gcn", "sage"], default="gcn", help="gcn (default) or sage (GraphSAGE, mean)")
    add("--layers", type=_layers, default=3, help="default 3")
    add("--hidden", type=at_least_one, default=256, help="width between layers (default 256)")
    add("--reassign", type=whole_number, default=50, metavar="N", help="choose bits anew from traced rows every N epochs, 0: never (default 50)")


def planning_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that chooses bits."""
    data_arguments(parser)
    parts_arguments(parser)
    network_arguments(parser)
    bits_arguments(parser)


def bits_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--group", type=at_least_one, default=100, help="rows that share a width, 1: each for itself (default 100)")
    add("--trade", type=float, default=0.5, metavar="LAMBDA", help="0 counts time alone, 1 variance alone (default 0.5)")
    add("--max-variance", type=float, metavar="V", help="least time at most this variance, instead of a trade")
    add("--like", type=int, choices=[2, 4, 8], help="least time at the variance of so many bits everywhere, instead of a trade")
    add("--max-rounds-s", type=float, metavar="S", help="least variance within these seconds of all rounds, instead of a trade")


def data_of(args: argparse.Namespace) -> Labelled:
    from ..drive.node_graphs import load_node_graph
    from ..io.model.node_graphs import require_room

    data = load_node_graph(args.graph, seed=args.seed, directed=not args.undirected, features=args.features or 0)
    method = getattr(args, "method", "auto")
    if method == "own" or (method == "auto" and find_spec("pymetis") is None):
        size = 8 * (data.graph.nodes + 1 + data.graph.edges)
        require_room(size, args.graph, copies=OWN_COPIES, hint="METIS takes a third of that: pip install 'meshwright[graphs]'")
    return data


def planned_bits(args: argparse.Namespace) -> HaloStrategy:
    from ..decide.traffic.adaqp.strategy import AdaQP

    return AdaQP(group=args.group, trade=args.trade, max_variance=args.max_variance, max_rounds_s=args.max_rounds_s, like=args.like)


def problem_of(args: argparse.Namespace, data: Labelled, budget: Budget) -> tuple[GraphTraining, Parts, Sequence[Halo], HaloProblem]:
    from ..decide.traffic.adaqp import partition
    from ..drive.halo import aggregated, halo_problem
    from ..drive.plans import read_fabric
    from ..graph.halo import halos
    from ..job import GraphTraining

    fabric = read_fabric(args.fabric, args.devices)
    workers = len(fabric.devices)
    job = GraphTraining(
        name=data.graph.name, features=data.features.shape[1], classes=data.classes, model=args.network, layers=args.layers, hidden=args.hidden,
        reassign=args.reassign, seed=args.seed,
    )  # fmt: skip
    with budget.net():
        parts = partition(data.graph, workers, method=args.method, seed=args.seed)
    graph, weights = aggregated(job, data.graph)
    shares = halos(graph, parts.of, workers, weights)
    return job, parts, shares, halo_problem(job, shares, fabric)


def share_rows(shares: Sequence[Halo]) -> list[dict[str, Any]]:
    return [{"worker": s.rank, "nodes": s.own, "central": s.central, "copies": s.copies, "sends": sum(len(x) for x in s.send)} for s in shares]


def bits_rows(problem: HaloProblem, tried: Sequence[TriedBits]) -> list[dict[str, Any]]:
    rows = []
    for t in tried:
        a = t.assignment
        size = sum(problem.size_bytes(x, c, a.widths) for x in problem.exchanges for c in x.channels) if a else None
        rows.append({
            "bits": t.label, "time_s": t.time_s if a else None, "rounds_s": a.rounds_s if a else None, "variance": a.variance if a else None,
            "sent_bytes": size, "exact": a.exact if a else None, "why": t.why,
        })  # fmt: skip
    return rows


def bits_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    from ..io.quantity import show_size, show_time

    lines = [f"{'bits':<12}{'epoch':>12}{'messages':>12}{'sent':>12}{'variance':>12}"]
    for r in rows:
        if r["time_s"] is None:
            lines.append(f"{r['bits']:<12}{'-':>12}{'-':>12}{'-':>12}{'-':>12}  {r['why']}")
        else:
            sent = show_size(r["sent_bytes"])
            lines.append(f"{r['bits']:<12}{show_time(r['time_s']):>12}{show_time(r['rounds_s']):>12}{sent:>12}{r['variance']:>12.4g}")
    return lines
