"""What ranks do in `test_convert`: functions of (rank, group, ...) that give plain data."""

from __future__ import annotations

from typing import Any

import torch
from owner_models import Block

from meshwright.nn import Spread, convert_experts

MODEL, INNER, K = 6, 8, 1
TOKENS = (5, 3, 0, 7)


def block_of(experts: int) -> Block:
    torch.manual_seed(3)
    return Block(experts, MODEL, INNER, min(K, experts)).double()


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(TOKENS[rank], MODEL, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def every_choice(rank: int, group: Any, experts: int, choices: list[Any]) -> list[dict[str, Any]]:
    found = []
    for choice in choices:
        block = block_of(experts)
        spread = Spread(dropless="loop") if choice == "loop" else Spread(choice=choice, chunks=(1, 2))
        convert_experts(block, spread=spread, group=group)
        whole = {n: t.clone() for n, t in block.state_dict().items()}
        x, weights = inputs(rank)
        x.requires_grad_()
        y = block(x)
        (y * weights).sum().backward()
        layer = block.experts
        gradients = layer.whole_experts((layer.gate_up_proj.grad, layer.down_proj.grad))
        with torch.no_grad():
            layer.gate_up_proj.zero_()
        block.load_state_dict(whole)
        again = block.state_dict()
        found.append({
            "y": y.detach().numpy(), "x": x.grad.numpy(), "own": layer.gate_up_proj.shape[0] * layer.gate_up_proj.shape[1],
            **{n: t.numpy() for n, t in gradients.items()}, "state": {n: t.numpy() for n, t in whole.items()},
            "loaded": all(torch.equal(again[n], t) for n, t in whole.items()), "apart": layer.gate_up_proj.meshwright_expert,
        })  # fmt: skip
    return found
