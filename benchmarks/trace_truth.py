"""Share of operator time that `trace annotate` gives to the right module, against recorded truth, by how much it is told.

A CNN with skips, an encoder-decoder transformer, an LSTM, DDP and FSDP2 on two gloo processes are trained for real with marks in the trace
(`trace_models.py`). The marks are taken out, and the trace is annotated (a) with module spans of the forward kept, so that backward
has to be found, (b) from the plain trace and one captured forward pass, (c) from the plain trace and the module tree alone. Counted is
the own time of every operator of the host, forward and backward; the loss and the optimizer are right in their own stage and under no module.

    python benchmarks/trace_truth.py [--quick] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import machine
from trace_models import BACKWARD, FORWARD, NAMES, OWNER, run

from meshwright.annotate import Annotation, Evidence, Stage, annotate
from meshwright.annotate.segments import segments
from meshwright.annotate.slices import around
from meshwright.io.trace.module_tree import read_module_tree
from meshwright.io.trace.read import read_trace
from meshwright.trace.module_tree import MODULE_SPAN, ModuleTree
from meshwright.trace.trace import Trace

LIMITS = {"spans": 0.995, "captured": 0.98, "tree": 0.90}
CNN_TREE_LIMIT = 0.95


def without_marks(marked: Path, plain: Path, *, spans: bool) -> None:
    """Write the trace without marks; `spans`: those of the forward stay, as a user's own module spans."""
    document = msgspec.json.decode(marked.read_bytes())
    kept = []
    for event in document["traceEvents"]:
        name = str(event.get("name", ""))
        if name.startswith(FORWARD) and spans:
            event["name"] = MODULE_SPAN + name.removeprefix(FORWARD)
        elif name.startswith((FORWARD, BACKWARD, OWNER)):
            continue
        kept.append(event)
    document["traceEvents"] = kept
    plain.write_bytes(msgspec.json.encode(document))


def truths(marked: Trace) -> tuple[list[str | None], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Per slice of the marked trace: the module (None: none), whether it is a mark, its own time in ns."""
    span, mark = (marked.where_name(np.array([n.startswith(p) for n in marked.names], bool)) for p in (FORWARD, (BACKWARD, OWNER)))
    evaluate = marked.where_name(np.array([n.startswith("autograd::engine::evaluate_function") for n in marked.names], bool))
    in_span, in_node = around(marked, span), around(marked, evaluate)
    found: list[str | None] = [marked.name_of(i).partition(":")[2] if i >= 0 else None for i in in_span.tolist()]
    of_node = {int(in_node[i]): marked.name_of(i).partition(":")[2] for i in np.flatnonzero(mark).tolist() if in_node[i] >= 0}
    at = np.where(evaluate, np.arange(len(marked)), in_node)
    for i in np.flatnonzero(at > in_span).tolist():  # not what runs forward once more inside a node
        found[i] = of_node.get(int(at[i]))
    cut = segments(marked, np.zeros(len(marked), bool))
    own = np.zeros(len(marked), np.int64)
    np.add.at(own, cut.row[cut.row >= 0], cut.length_ns[cut.row >= 0])
    return found, span | mark, own


def score(marked: Trace, annotation: Annotation, *, spans: bool) -> dict[str, Any]:
    """Time in the right place over time counted; by tier; and whether the tree holds every ns."""
    truth, is_mark, own = truths(marked)
    kept = np.flatnonzero(~is_mark | (spans & marked.where_name(np.array([n.startswith(FORWARD) for n in marked.names], bool))))
    trace, units, labels, tree = annotation.trace, annotation.units, annotation.labels, annotation.tree
    if len(kept) != len(trace):
        raise AssertionError("the plain trace has other slices than the marked one")
    model_end = _model_ends(marked)
    total = right = 0
    tiers: dict[str, int] = defaultdict(int)
    wrong: dict[tuple[str, str | None, str | None], int] = defaultdict(int)
    for i, row in enumerate(kept.tolist()):
        head = int(units.head[i])
        if head < 0 or own[row] == 0 or _exchanges(units, head):
            continue
        there = int(kept[head])
        expected = truth[there]
        module = int(labels.module[head])
        given = tree.modules[module].path if tree is not None and module >= 0 else None
        correct = given == expected
        if expected is None and not units.evaluate[head] and _in_loss(marked, there, model_end):
            correct = correct and labels.stage[head] == Stage.LOSS
        total += int(own[row])
        tiers[Evidence(int(labels.evidence[head])).name.lower()] += int(own[row])
        if correct:
            right += int(own[row])
        else:
            wrong[trace.name_of(head), expected, given] += int(own[row])
    worst = sorted(wrong.items(), key=lambda item: -item[1])[:8]
    conserved = annotation.root.host_ns + annotation.root.device_ns == sum(annotation.track_ns.values())
    return {
        "right": right / total, "operator_time_s": total / 1e9, "tiers": {k: round(v / total, 5) for k, v in sorted(tiers.items())},
        "conserved": conserved, "worst": [{"operator": k[0], "truth": k[1], "given": k[2], "share": round(v / total, 5)} for k, v in worst],
    }  # fmt: skip


def _exchanges(units: Any, head: int) -> bool:
    while head >= 0:
        if units.communication[head]:
            return True
        head = int(units.outer[head])
    return False


def _model_ends(marked: Trace) -> np.ndarray[Any, Any]:
    roots = np.flatnonzero(marked.name == marked.names.index(FORWARD)) if FORWARD in marked.names else np.zeros(0, np.int64)
    return np.sort(marked.end_ns[roots])


def _in_loss(marked: Trace, row: int, model_end: Any) -> bool:
    """Between the end of the model's forward call and the first node of backward."""
    start = int(marked.start_ns[row])
    before = int(np.searchsorted(model_end, start, side="right")) - 1
    if before < 0:
        return False
    evaluate = marked.where_name(np.array([n.startswith(("autograd::engine", "Optimizer")) for n in marked.names], bool))
    later = marked.start_ns[evaluate & (marked.start_ns >= model_end[before])]
    return bool(len(later)) and start < int(later.min()) and "ones_like" not in marked.name_of(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the CNN and the LSTM only")
    parser.add_argument("--keep", type=Path, help="keep the traces here, and use those that are there")
    parser.add_argument("--worst", action="store_true", help="print what was put wrong")
    args = parser.parse_args()
    rows, details, failed = [], {}, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in NAMES[:1] + NAMES[2:3] if args.quick else NAMES:
            have = sorted(p for p in folder.glob(f"{name}*.json") if ".tree." not in p.name and ".plain." not in p.name)
            tree = None
            for marked_path in have or run(name, folder):
                tree = tree or read_module_tree(folder / f"{name}.tree.json")
                marked = read_trace(marked_path)
                for told, limit in LIMITS.items():
                    plain = folder / f"{marked_path.stem}.plain.json"
                    without_marks(marked_path, plain, spans=told == "spans")
                    given: ModuleTree = tree if told == "captured" else replace(tree, operators=())
                    result = score(marked, annotate(read_trace(plain), given), spans=told == "spans")
                    limit = CNN_TREE_LIMIT if told == "tree" and name == "cnn" else limit
                    failed += result["right"] < limit or not result["conserved"]
                    details[f"{marked_path.stem} {told}"] = result
                    rows.append({
                        "what": f"{marked_path.stem}: time in the wrong module, told {told}", "value": round(1 - result["right"], 6),
                        "unit": "of time", "limit": round(1 - limit, 4),
                    })  # fmt: skip
                    said = f"right {100 * result['right']:7.3f} %  conserved {result['conserved']}  {result['tiers']}"
                    print(f"{marked_path.stem:<12} {told:<9} {said}")
                    for item in result["worst"] if args.worst else ():
                        print("     ", item)
    machine.record("trace_truth", rows, details=details)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
