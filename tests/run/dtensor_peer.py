"""The same step by PyTorch's own tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def run_dtensor(rank: int, group: Any, name: str, ranks: int, folder: str, global_batch: int) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, whole gradients) of a model of `tensor_models` under `parallelize_module`."""
    import torch.distributed as dist
    from tensor_rig import whole_case
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'peer'}", rank=rank, world_size=ranks)
    try:
        module, (tokens, target) = whole_case(name, global_batch, "cross-entropy")
        mesh = init_device_mesh("cpu", (ranks,))
        plan = {f"blocks.0.attention.{x}": ColwiseParallel() for x in "qkv"} | {"blocks.0.attention.out": RowwiseParallel()}
        plan |= {f"blocks.0.mlp.{x}": ColwiseParallel() for x in ("gate", "up")} | {"blocks.0.mlp.down": RowwiseParallel()}
        plan |= {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(module, mesh, plan)
        loss = torch.nn.functional.cross_entropy(module(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        gradients = {n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) for n, p in module.named_parameters()}
        return float(loss.detach()), {n: g.detach().clone() for n, g in gradients.items()}
    finally:
        dist.destroy_process_group()
