"""Which share of a model's FLOPs tensor parallelism of degree 2 splits, for transformers' classes that nobody here wrote.

    python benchmarks/split_shares.py [NAME ...] [--no-write]

The models are those of the zoo (`zoo_nets.TRANSFORMERS`; needs transformers). Forward FLOPs by the capture's formulas; a call counts as split if it
lies in a region that two ranks share out. What stays whole is named with its reason. Raw output: benchmarks/results/split_shares.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import zoo
import zoo_nets

RESULTS = zoo.ROWS.with_name("split_shares.json")
MIXED = {"num_experts", "n_routed_experts", "state_size"}  # fields of classes with experts, or whose mixers have no attention
DECODERS = tuple(
    name for name, (fields, _) in zoo_nets.TRANSFORMERS.items()
    if fields["architectures"][0].endswith(("ForCausalLM", "LMHeadModel")) and not MIXED & fields.keys()
)  # fmt: skip


def one(name: str, folder: Path) -> dict[str, Any]:
    from meshwright.capture.graph import capture
    from meshwright.decide.layout.megatron import kept_notes, search_regions
    from meshwright.decide.layout.tensor_usable import usable_regions

    model, loss = zoo.model_of(f"transformers/{name}", folder)
    try:
        graph = capture(model, loss=loss, scalable=False)
    except Exception as error:
        said = str(error).splitlines()[0].rpartition("site-packages/")[2]
        return {"name": name, "why": f"{type(error).__name__}: {said}"}
    regions, kept = search_regions(graph)
    usable = usable_regions(graph, regions, 2)
    inside = {n for r in usable.shares for n in (*r.nodes, *r.losses)}
    total = sum(n.forward.flops for n in graph.nodes)
    split = sum(n.forward.flops for n in graph.nodes if n.name in inside)
    return {"name": name, "decoder": name in DECODERS, "split": round(split / total, 4), "whole": [*kept_notes(kept), *usable.notes]}


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or list(zoo_nets.TRANSFORMERS)
    found = {r["name"]: r for r in json.loads(RESULTS.read_text())["models"]} if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = row = one(name, Path(folder))
            print(f"{name:20} {row.get('split', row.get('why'))}", *row.get("whole", ())[:2], sep="\n    " if row.get("whole") else " ", flush=True)
    rows = [found[n] for n in zoo_nets.TRANSFORMERS if n in found]
    shares = [r["split"] for r in rows if r.get("decoder") and "split" in r]
    summary = {"models": len(rows), "decoders": len(shares), "decoders_split_95_percent": sum(s >= 0.95 for s in shares)}
    print(summary)
    if "--no-write" not in sys.argv:
        RESULTS.write_text(json.dumps({"summary": summary, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
