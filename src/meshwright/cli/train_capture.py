"""`meshwright train capture`: the operator graph of a PyTorch model, written to a file for planning without capturing again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, model_arguments, model_given, require_directory
from .frame import Result

if TYPE_CHECKING:
    from ..graph.graph import OpGraph

HELP = "capture a PyTorch model as an operator graph"
EPILOG = """\
The model is FILE.py:function or module:function; the function returns (nn.Module, (input, ..., target)) or (nn.Module, {name: input, ...}), batch
first, target last (`labels`). Or it is a class of transformers by its configuration: hf:CONFIG.json[:Class], or a folder with config.json.
It is captured on fake tensors: a model of any size needs no memory for its weights. Plan with the file: meshwright train plan --graph FILE."""


def arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser, "-m", required=True)
    parser.add_argument("--loss", default="cross-entropy", help="cross-entropy (default), mse, output (the module returns it), or module:function")
    parser.add_argument("--batch", type=at_least_one, default=None, metavar="N", help="rows of the example inputs (default: as the function returns)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random state before the model is built (default 0)")
    parser.add_argument("--out", "-o", type=Path, default=Path("graph.json"), help="where to write it; .json or .json.gz (default graph.json)")
    parser.add_argument("--strict", action="store_true", help="fail instead of falling back to a graph that cannot be cut")
    parser.add_argument("--top", type=int, default=8, metavar="K", help="how many operators to show (default 8)")


def run(args: argparse.Namespace) -> Result:
    require_directory(args.out)
    from ..capture.graph import METHODS, capture
    from ..io.model.graph import write_graph

    require_directory(args.out)
    methods = METHODS[:1] if args.strict else METHODS
    graph = capture(model_given(args) or "", loss=args.loss, batch_size=args.batch, seed=args.seed, methods=methods)
    write_graph(args.out, graph)
    document = summary(graph, top=max(args.top, 0))
    document["path"] = str(args.out)
    return Result(document, _text(document))


def summary(graph: OpGraph, *, top: int) -> dict[str, Any]:
    """The figures of a graph: parameters, flops, saved and peak bytes, path coverage, the operators with most flops."""
    from ..graph.graph import Work
    from ..graph.liveness import peak_bytes

    totals = {"forward": Work(), "backward": Work()}
    for n in graph.nodes:
        totals["forward"] += n.forward
        totals["backward"] += n.backward
    by_target: dict[str, Work] = {}
    for j in graph.joint:
        by_target[j.target] = by_target.get(j.target, Work()) + j.work
    ranked = sorted(by_target.items(), key=lambda item: (-item[1].flops, -item[1].bytes_read - item[1].bytes_written, item[0]))
    calls = [j for j in graph.joint if j.target != "operator.getitem"]
    return {
        "schema": "meshwright.capture",
        "version": 1,
        "model": graph.model,
        "loss": graph.loss,
        "method": graph.method,
        "batch_size": graph.batch_size,
        "parameters": graph.parameter_count,
        "parameter_bytes": sum(p.size_bytes for p in graph.parameters),
        "forward_flops": totals["forward"].flops,
        "backward_flops": totals["backward"].flops,
        "saved_bytes": graph.saved_bytes,
        "peak_bytes": peak_bytes(graph),
        "forward_nodes": len(graph.nodes),
        "joint_calls": len(calls),
        "share_with_cause": sum(bool(j.node) for j in calls) / len(calls) if calls else 0.0,
        "scalable": graph.scaling is not None,
        "operators": [
            {"target": t, "calls": w.calls, "flops": w.flops, "bytes": w.bytes_read + w.bytes_written} for t, w in ranked[:top] if w.calls
        ],
        "notes": list(graph.notes),
    }


def _text(d: dict[str, Any]) -> str:
    from ..explain.numbers import bytes_text
    from ..report.columns import columns

    flops = d["forward_flops"] + d["backward_flops"]
    traced = f"{100 * d['share_with_cause']:.1f} % traced to their module" if d["joint_calls"] else "no joint graph"
    facts = [
        ("model", f"{d['model']}, loss {d['loss']}, batch {d['batch_size']}, by {d['method']}"),
        ("parameters", f"{d['parameters']:,} ({bytes_text(d['parameter_bytes'])})"),
        ("flops", f"{d['forward_flops']:.4g} forward, {d['backward_flops']:.4g} backward"),
        ("saved for backward", f"{bytes_text(d['saved_bytes'])} ({d['saved_bytes']:,} B)"),
        ("peak of one step", f"{bytes_text(d['peak_bytes'])} with parameters and gradients, without optimiser state"),
        ("calls", f"{d['forward_nodes']} forward nodes, {d['joint_calls']} joint calls, {traced}"),
    ]
    lines = [f"{name:<20}{value}" for name, value in facts]
    if d["operators"]:
        rows = [["operator", "calls", "flops", "share", "bytes"]]
        for o in d["operators"]:
            rows.append([o["target"], str(o["calls"]), f"{o['flops']:.4g}", f"{100 * o['flops'] / max(flops, 1):.1f} %", bytes_text(o["bytes"])])
        lines += ["", *columns(rows)]
    lines += [f"note: {note}" for note in d["notes"]]
    return "\n".join([*lines, "", f"written to {d['path']}"])
