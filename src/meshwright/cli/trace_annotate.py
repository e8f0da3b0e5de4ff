"""`meshwright trace annotate`: whose work every slice of a trace is: stage, module, operator."""

from __future__ import annotations

import argparse
from pathlib import Path

from .frame import Result, one_blas_thread

HELP = "say which stage, module and operator every slice of a PyTorch trace belongs to, and on what evidence"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="a trace of torch.profiler (.json, .json.gz), or another Chrome trace")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="FILE.py:function", help="the model that ran: its modules, and the operators of one forward pass")
    which.add_argument("--modules", type=Path, metavar="TREE.json", help="the model's modules as a file (`train run` writes modules.json)")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "meta"),
        help="where --model runs once: cpu (default), or meta, which computes nothing",
    )  # fmt: skip
    parser.add_argument("--save-modules", type=Path, metavar="FILE", help="write the modules of --model to this file, for --modules")
    parser.add_argument("--out", "-o", type=Path, metavar="OUT", help="write the trace with steps, stages and modules on tracks of their own")
    parser.add_argument("--depth", type=int, default=4, help="levels to print below a step (default 4)")
    parser.add_argument("--least", type=float, default=1.0, metavar="PERCENT", help="print what takes at least this many percent (default 1)")


def run(args: argparse.Namespace) -> Result:
    one_blas_thread()
    from ..annotate import annotate
    from ..errors import UsageError
    from ..io.trace.annotated import write_annotated
    from ..io.trace.module_tree import read_module_tree, write_module_tree
    from ..io.trace.read import read_trace
    from ..report.annotation import annotation_document, annotation_text

    if args.depth < 1 or not 0 <= args.least <= 100:
        raise UsageError("--depth is at least 1, --least a percentage from 0 to 100", where="trace annotate")
    if args.save_modules and not args.model:
        raise UsageError("--save-modules needs --model", where="trace annotate", hint="add --model FILE.py:function")
    if args.out and args.out.exists() and args.trace.exists() and args.out.samefile(args.trace):
        raise UsageError("would overwrite the trace it reads", where=str(args.out), hint="name another file after -o")
    trace = read_trace(args.trace)
    tree = None
    if args.model:
        from ..capture.modules import named_capture

        tree = named_capture(args.model, device=args.device)
        if args.save_modules:
            write_module_tree(args.save_modules, tree)
    elif args.modules:
        tree = read_module_tree(args.modules)
    annotation = annotate(trace, tree)
    text = annotation_text(annotation, depth=args.depth, least_share=args.least / 100)
    if args.out:
        write_annotated(args.trace, annotation, args.out)
        text += f"\nwritten: {args.out}; open it in https://ui.perfetto.dev or chrome://tracing"
    return Result(annotation_document(annotation), text)
