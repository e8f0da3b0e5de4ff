"""Capture of transformers' LLaMA class at its published sizes: processor time and peak memory. Needs transformers.

    python benchmarks/llama_capture.py [8B] [70B] [405B] [--no-write]

Every capture runs in a fresh process, as `train plan` does it (on the meta device, twice, so that the graph gives every batch size), imports counted;
sequences of 2048 tokens, the loss by name. Ends with 1 if a size takes more than its limit. Raw output: benchmarks/results/llama_capture.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

FIELDS = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "8B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70B": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "405B": {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}
MAX_CPU_S = {"8B": 60.0, "70B": 120.0, "405B": 240.0}
MAX_BYTES = 2 << 30
LENGTH = 2048


def one(size: str) -> dict[str, Any]:
    """In a fresh process."""
    from meshwright.capture.precision import capture_job
    from meshwright.job import Training

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps({**FIELDS, **SIZES[size]}))
        graph = capture_job(Training(model=f"hf:{config}@{LENGTH}", global_batch=8))
    return {
        "cpu_s": round(time.process_time(), 1), "rss_peak_bytes": machine.memory_high_water_bytes(), "parameters": graph.parameter_count,
        "nodes": len(graph.nodes), "method": graph.method, "scalable": graph.scaling is not None,
    }  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2])))
        return 0
    rows, captures = [], {}
    for size in [a for a in sys.argv[1:] if a in SIZES] or list(SIZES):
        found = machine.fresh("llama_capture", "--one", size, timeout_s=3000)
        print(size, found, flush=True)
        captures[size] = found
        rows.append({"what": f"LLaMA {size}: processor time", "value": found["cpu_s"], "unit": "s", "limit": MAX_CPU_S[size]})
        rows.append({"what": f"LLaMA {size}: peak memory", "value": found["rss_peak_bytes"], "unit": "B", "limit": MAX_BYTES})
    if "--no-write" not in sys.argv:
        machine.record("llama_capture", rows, captures=captures)
    return int(any(r["value"] > r["limit"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
