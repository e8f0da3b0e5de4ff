"""Expert layers as transformers' classes are built, without transformers: a router that gives (scores, weights, experts), experts in two tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class OwnerExperts(nn.Module):
    def __init__(self, experts: int, model: int, inner: int, act: Any = None) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, model) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, model, inner) * 0.3)
        self.act_fn = act or nn.SiLU()

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, place = torch.where(top_k_index == e)
            gate, up = functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, dim=-1)
            done = functional.linear(self.act_fn(gate) * up, self.down_proj[e])
            out = out.index_add(0, token, done * top_k_weights[token, place, None])
        return out


class Router(nn.Module):
    """As Mixtral's; `limited`: as DeepSeek-V3's, with groups and a bias for balance."""

    def __init__(self, experts: int, model: int, k: int, *, limited: bool = False) -> None:
        super().__init__()
        self.k, self.num_group, self.topk_group = k, 2 if limited else 1, 1
        self.weight = nn.Parameter(torch.randn(experts, model))
        if limited:
            self.e_score_correction_bias = nn.Buffer(torch.zeros(experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
        if self.num_group == 1:
            weights, index = logits.softmax(-1).topk(self.k, dim=-1)
            return logits, weights / weights.sum(-1, keepdim=True), index
        scores = logits.sigmoid()
        choosing = (scores + self.e_score_correction_bias).unflatten(1, (self.num_group, -1))
        group = choosing.topk(2, dim=-1).values.sum(-1).argmax(-1)
        kept = functional.one_hot(group, self.num_group).bool().unsqueeze(-1).expand_as(choosing)
        index = choosing.masked_fill(~kept, float("-inf")).flatten(1).topk(self.k, dim=-1).indices
        weights = scores.gather(1, index)
        return logits, 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20), index


class Block(nn.Module):
    def __init__(self, experts: int, model: int, inner: int, k: int, *, limited: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.gate = Router(experts, model, k, limited=limited)
        self.experts: nn.Module = OwnerExperts(experts, model, inner)
        self.shared_experts = nn.Linear(model, model) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        _, weights, index = self.gate(flat)
        done = self.experts(flat, index, weights).view(x.shape)
        return done if self.shared_experts is None else done + self.shared_experts(x)


class Model(nn.Module):
    """Embedding, two expert blocks with residuals, and a head; `forward` gives logits."""

    def __init__(self, experts: int = 4, model: int = 8, inner: int = 6, k: int = 2, vocabulary: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, model)
        self.blocks = nn.ModuleList([Block(experts, model, inner, k), Block(experts, model, inner, k, limited=True, shared=True)])
        self.norms = nn.ModuleList([nn.LayerNorm(model), nn.LayerNorm(model)])
        self.head = nn.Linear(model, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)
