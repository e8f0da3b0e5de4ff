"""`meshwright graph partition`: which worker owns which node, what is cut, and what each must send."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import at_least_one, require_directory
from .frame import Result
from .graph_arguments import data_arguments, data_of, parts_arguments, share_rows

__all__ = ["HELP", "arguments", "run"]

HELP = "divide a graph over workers: nodes, edges that are cut, and rows that each must send"


def arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser)
    parts_arguments(parser)
    parser.add_argument("--workers", "-W", type=at_least_one, required=True, help="how many")
    parser.add_argument("--out", "-o", type=Path, help="write the worker of every node here (.npz, `of`)")


def run(args: argparse.Namespace) -> Result:
    import numpy as np

    from ..decide.traffic.adaqp import partition
    from ..graph.halo import halos
    from ..io.atomic import write_bytes
    from ..kernels.effort import Budget

    if args.out is not None:
        require_directory(args.out)
    graph = data_of(args).graph
    budget = Budget(1)
    with budget.net():
        parts = partition(graph, args.workers, method=args.method, seed=args.seed)
    rows = share_rows(halos(graph, parts.of, args.workers, graph.coefficients("sum")))
    document = {
        "schema": "meshwright.graph-partition", "version": 1, "graph": graph.name, "nodes": graph.nodes, "edges": graph.edges, "method": parts.method,
        "cut_edges": parts.cut, "workers": rows,
    }  # fmt: skip
    pairs = graph.symmetric.edges // 2
    lines = [
        f"{graph.name}: {graph.nodes:,} nodes, {graph.edges:,} entries on {args.workers} workers by {parts.method}",
        f"cut: {parts.cut:,} of {pairs:,} pairs of neighbours" + (f" ({parts.cut / pairs:.1%})" if pairs else ""), "",
        f"{'worker':<8}{'nodes':>10}{'central':>10}{'copies':>10}{'sends':>10}",
        *(f"{r['worker']:<8}{r['nodes']:>10,}{r['central']:>10,}{r['copies']:>10,}{r['sends']:>10,}" for r in rows),
    ]  # fmt: skip
    if args.out is not None:
        import io

        packed = io.BytesIO()
        np.savez_compressed(packed, of=parts.of.astype(np.int32))
        write_bytes(args.out, packed.getvalue())
        document["out"] = str(args.out)
        lines.append(f"written: {args.out}")
    return Result(document, "\n".join(lines), cut=budget.cut)
