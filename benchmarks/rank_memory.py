"""Peak memory of building every rank of a model: whole on each rank first, and by parts, which are read from safetensors files or drawn.

    python benchmarks/rank_memory.py [--hidden 1024] [--layers 16]   # other sizes are not recorded

A LLaMA of 271 million parameters is written into a folder in bfloat16, as models are published, in four files, planned for four ranks in float32
(2 tensor-parallel x 2 stages), and every rank's module with its gradients is built in a fresh process, one after the other. The same is done by its
configuration alone: weights are drawn from the seed then, and a rank's parts are the bits that one process would draw. `cpu_s`: processor time of
building.
`value` is the peak of its own (anonymous) memory above what it had after its imports, sampled every 2 ms; `resident_bytes` the same of its resident
set, in which pages of mapped files count that the system may take back at any time. Needs transformers. Nothing is trained: optimizer state and
activations come on top in both cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

from machine import memory_high_water_bytes, record

LAYOUTS = {"tp 2 x pp 2": ["--tp", "2", "--pp", "2", "--dp", "1", "--microbatch", "2"]}
HIDDEN, LAYERS = 1024, 16
INTERVAL_S = 0.002
FABRIC = "laptop:4?memory=64GiB"
FILE_BYTES = 150_000_000  # of each file of weights


def written(folder: Path, hidden: int, layers: int) -> int:
    """A folder as models are published; its bytes of weights."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=hidden * 11 // 4, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, vocab_size=32000, max_position_embeddings=64, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config)
    module.bfloat16().save_pretrained(folder, max_shard_size=FILE_BYTES)
    return sum(4 * p.numel() for p in module.parameters())


class Sampled(threading.Thread):
    """The peak of this process's anonymous memory while it lasts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over, self.peak_bytes = threading.Event(), 0

    def run(self) -> None:
        while not self.over.wait(INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def build(plan_file: str, rank: int, lazy: bool) -> dict[str, Any]:
    """In a process of its own: one rank's module."""
    import msgspec
    import torch

    import meshwright.run.launch.rank  # noqa: F401  what a rank imports anyway
    from meshwright.capture.resolve import build_model
    from meshwright.drive.plans import read_plan
    from meshwright.job import Training
    from meshwright.program.calls import inline
    from meshwright.run.launch.outcome import forward_graph
    from meshwright.run.steps.forward_graph import ForwardGraph
    from meshwright.run.train.segments import build_rank_module
    from meshwright.run.train.work import gradient_bytes

    plan = read_plan(Path(plan_file))
    layout, job = plan.layout, msgspec.convert(plan.job["training"], Training)
    traced = Path(plan_file).with_suffix(".graph")
    if not traced.exists():
        traced.write_bytes(forward_graph(plan, layout).to_json())
        return {}
    graph = ForwardGraph.from_json(traced.read_bytes())
    program = inline(plan.main, plan.programs).program
    import transformers  # noqa: F401

    before, own = memory_high_water_bytes(), anonymous_bytes()
    sampled = Sampled()
    sampled.start()
    start = time.process_time()
    source = build_model(job.model, device="cpu", seed=0, batch_size=layout.microbatch_size, lazy=lazy)
    assert (source.weights is not None) == lazy
    module = build_rank_module(
        graph, layout, rank, dict(source.module.named_parameters()), dict(source.module.named_buffers()), device=torch.device("cpu"),
        gradient_bytes=gradient_bytes(program, rank), values=source.weights,
    )  # fmt: skip
    held = sum(t.numel() * t.element_size() for _, t, _ in module.kept())
    sampled.over.set()
    sampled.join()
    peak = max(sampled.peak_bytes, anonymous_bytes())
    resident = memory_high_water_bytes() - before
    return {
        "rank": rank, "held_bytes": held, "peak_bytes": peak - own, "resident_bytes": resident, "imports_bytes": own,
        "cpu_s": round(time.process_time() - start, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--plan", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lazy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        print(json.dumps(build(args.plan, args.rank, args.lazy)))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        size = written(folder, args.hidden, args.layers)
        alone = Path(place) / "config.json"
        alone.write_bytes((folder / "config.json").read_bytes())
        for (layout, flags), (parts, name) in product(LAYOUTS.items(), (("read", folder), ("drawn", alone))):
            plan = Path(place) / f"{len(rows)}.json"
            model = ["--model", f"hf:{name}", "--dtype", "float32", "--seq-len", "16"]
            command = ["train", "plan", *model, "--fabric", FABRIC, "--global-batch", "8", *flags]
            subprocess.run([sys.executable, "-m", "meshwright", *command, "-o", str(plan)], check=True, stdout=subprocess.DEVNULL)
            own = [sys.executable, __file__, "--plan", str(plan)]
            subprocess.run([*own, "--rank", "0"], check=True, stdout=subprocess.DEVNULL)  # traces
            for how, more in ((f"{parts} whole", []), (f"{parts} by parts", ["--lazy"])):
                for rank in range(4):
                    said = subprocess.run([*own, "--rank", str(rank), *more], check=True, capture_output=True, text=True).stdout.splitlines()[-1]
                    one = json.loads(said)
                    rows.append({"what": f"{layout}, {how}, rank {rank}", "value": one.pop("peak_bytes"), "unit": "bytes", **one})
                    print(rows[-1], flush=True)
        if args.hidden == HIDDEN and args.layers == LAYERS:
            record("rank_memory", rows, model_bytes=size, command="python benchmarks/rank_memory.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
