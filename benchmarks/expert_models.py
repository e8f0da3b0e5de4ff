"""Transformers' expert models as they are, trained with their experts spread over processes, against the loop that everybody writes.

Run: `python benchmarks/expert_models.py [mixtral,qwen]` (needs transformers 5; minutes; at most four gloo processes here). Two layers,
four experts, top 2, from small configs without weights of others. Twenty AdamW steps of eight samples; largest relative difference of losses, and of
each weight over its largest element. Layouts: experts over 2 and 4 replicas, over 2 with data 2 or pipeline 2, and degree 0 (weights travel,
tokens stay: sharding level 3). Targets: 1e-9 in float64, 1e-5 in float32.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import meshwright as mw
from meshwright.nn import convert_experts

STEPS, ROWS, LENGTH, VOCABULARY = 20, 8, 8, 61
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts 2": (2, {"expert": 2, "data": 2}), "degree 0": (2, {"data": 2, "zero": 3}), "experts 2 x data 2": (4, {"expert": 2, "data": 4}),
    "experts 2 x pipeline 2": (4, {"expert": 2, "data": 2, "pipeline": 2}), "experts 4": (4, {"expert": 4, "data": 4}),
}  # fmt: skip
TARGETS = {torch.float64: 1e-9, torch.float32: 1e-5}


def model_of(name: str, dtype: torch.dtype, *, converted: bool) -> torch.nn.Module:
    import transformers

    base: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY,
        "max_position_embeddings": 16, "num_experts_per_tok": 2, "use_cache": False, "attn_implementation": "eager",
    }  # fmt: skip
    if name == "mixtral":
        config = transformers.MixtralConfig(**base, intermediate_size=12, num_local_experts=4, head_dim=8)
        kind = transformers.MixtralForCausalLM
    else:
        config = transformers.Qwen2MoeConfig(**base, moe_intermediate_size=12, shared_expert_intermediate_size=8, num_experts=4)
        kind = transformers.Qwen2MoeForCausalLM
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).to(dtype)
    if converted and (whole := convert_experts(model).whole):
        raise SystemExit(f"stays whole: {whole}")
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": (x := torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)), "labels": x} for _ in range(STEPS)]


def loss_of(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """In the weights' precision; transformers' own is float32."""
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def rank_of(rank: int, ranks: int, folder: str, plan: Any, name: str, dtype: torch.dtype) -> None:
    import meshwright.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = model_of(name, dtype, converted=True)
    step = meshwright.torch.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan, loss=loss_of)
    losses = [float(step(b)) for b in batches()]
    state = step.state_dict(full=True)
    if rank == 0:
        torch.save((losses, state), f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def plain(name: str, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = model_of(name, dtype, converted=False), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for b in batches():
        optimizer.zero_grad()
        loss = loss_of(model(**b), b)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def compared(name: str, dtype: torch.dtype, layout: str) -> dict[str, Any]:
    ranks, degrees = LAYOUTS[layout]
    model = model_of(name, dtype, converted=True)
    begin = time.process_time()
    options: dict[str, Any] = {"data": 2, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 1, **degrees}
    plan = mw.plan(model, batches()[0], fabric=f"laptop:{ranks}", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loss=loss_of, **options)
    planned = time.process_time() - begin
    losses, state = plain(name, dtype)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank_of, (ranks, folder, plan, name, dtype), nprocs=ranks)
        found, weights = torch.load(f"{folder}/found")
    assert list(weights) == list(state)
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
    weight = max(float((weights[n] - x).abs().max() / x.abs().max()) for n, x in state.items())
    row = {
        "what": f"{name}, {str(dtype).removeprefix('torch.')}, {layout}", "value": max(apart, weight), "unit": "relative", "limit": TARGETS[dtype],
        "losses": apart, "weights": weight, "planned_cpu_s": planned,
    }  # fmt: skip
    print(f"{row['what']}: losses {apart:.2g}, weights {weight:.2g}", flush=True)
    return row


def main() -> None:
    names = sys.argv[1].split(",") if len(sys.argv) > 1 else ["mixtral", "qwen"]
    rows = []
    for name in names:
        for dtype in TARGETS:
            for layout in LAYOUTS:
                rows.append(compared(name, dtype, layout))
                machine.record("expert_models", rows, steps=STEPS)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
