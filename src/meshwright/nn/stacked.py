"""Gated experts under the names and in the form of their owner: one tensor for all gates and ups, one for all downs.

Cite: transformers (huggingface/transformers, `integrations/moe.py`), whose Mixtral, Qwen, OLMoE and DeepSeek classes keep their experts so.
Left open there: experts on several ranks that change their parallelism (its own expert parallelism is fixed). Our answer: `nn.routed`.
Deviations: none in values. Invariant: outputs and gradients are those of the owner's module, but for the order of sums; names are the owner's.
Cost: with buffers and slices, a copy of this rank's experts in every step, from the owner's form to `WeightLayout`'s.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import Unsupported
from ..kernels.experts import Routing, capacity_of
from ..kernels.experts.padded import ACTIVATIONS, expert_counts, expert_mlp, expert_rows, expert_sums
from ..kernels.experts.routing import locations_of
from .experts import GatedFeedForward
from .routed import Ask, RoutedExperts, Spread

__all__ = ["StackedExperts"]

NAMES = ("gate_up_proj", "down_proj")


class StackedExperts(RoutedExperts):
    """y [T, H] = sum over a token's experts of weight · expert(x). `gate_up_proj` [E, 2F, H], `down_proj` [E, H, F], or this rank's part of them.

    While a model is captured, the layer is operators of fixed shapes (`kernels.experts.padded`), so plans can spread it over ranks. There every
    expert's buffer has room for all tokens, or for what `capacity_factor` says. `state_dict` and `load_state_dict` hold all experts whole, on every
    rank; all ranks of the group call them. `load`: tokens that chose each expert in training since it was last taken.
    """

    form: GatedFeedForward

    def __init__(
        self, gate_up: torch.nn.Parameter, down: torch.nn.Parameter, activation: str, *, k: int, capacity_factor: float = 0.0,
        spread: Spread | None = None, group: Any = None,
    ) -> None:  # fmt: skip
        experts, model, inner = down.shape
        form = GatedFeedForward(model, inner, activation=ACTIVATIONS[activation][0])
        super().__init__(form, experts, spread or Spread(dropless="" if capacity_factor else "auto", choice=(1, 1, "linear")), group)
        self.activation, self.k, self.capacity_factor = activation, k, capacity_factor
        self.gate_up_proj, self.down_proj = (gate_up, down) if self.ranks == 1 else map(torch.nn.Parameter, self._parts(gate_up, down))
        for mine, given in ((self.gate_up_proj, gate_up), (self.down_proj, down)):
            mine.requires_grad_(given.requires_grad)
            if self.ranks > 1:
                mine.meshwright_expert = True
        self.load: torch.Tensor | None = None

    # ---- parameters --------------------------------------------------------------------------------------------
    def _parts(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's experts, and of these its slice of the inner dimension."""
        shares, local, inner = self.layout.shares, self.layout.local, self.form.inner
        first, share = self.rank // shares * local, self.rank % shares
        own, mine = slice(first, first + local), slice(share * inner // shares, (share + 1) * inner // shares)
        cut = gate_up.detach()[own].unflatten(1, (2, inner))[:, :, mine].flatten(1, 2)
        return cut.clone(), down.detach()[own][:, :, mine].clone()

    def local_parameters(self) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up_proj.chunk(2, dim=1)
        return {"w1": gate, "v1": up, "w2": self.down_proj.transpose(1, 2)}

    def flat_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.ranks == 1:  # nothing travels
            return self.gate_up_proj.reshape(-1)[:0], self.gate_up_proj.new_zeros(0)
        return torch.cat([p.reshape(-1) for p in self.local_parameters().values()]), self.gate_up_proj.new_zeros(0)

    # ---- a step ------------------------------------------------------------------------------------------------
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states: [T, H]; the experts of every token [T, k], and their weights. Raises: as `MoELayer`, on all ranks."""
        if torch.compiler.is_compiling():
            return self._captured(hidden_states, top_k_index, top_k_weights)
        locations, counts = locations_of(top_k_index, self.experts)
        if self.training and torch.is_grad_enabled():
            self.load = counts if self.load is None else self.load + counts
        finite = bool(torch.isfinite(top_k_weights).all())
        routing = Routing(top_k_index, locations, top_k_weights, counts) if finite else None
        return self.dispatch(hidden_states, routing, Ask(top_k_index.shape[1], self.capacity_factor, finite, self.experts))

    def _captured(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.ranks > 1:
            copies = " and their copies" if self.copies is not None else ""
            raise Unsupported(
                f"a layer whose experts{copies} lie over {self.ranks} ranks already cannot be part of a training plan", where="convert_experts",
                hint="convert_experts(model) without group: the plan lays experts over ranks (--ep), and copies of hot ones (--spare)",
            )  # fmt: skip
        tokens, k = x.shape[0], index.shape[1]
        capacity = min(tokens, capacity_of(self.capacity_factor, tokens=tokens, experts=self.experts, k=k, demand=tokens))
        rows, counts = expert_rows(x, index, None, self.experts, capacity), expert_counts(index, self.experts, capacity)
        done = expert_mlp(rows, counts, self.gate_up_proj, self.down_proj, self.activation, min(tokens * k, self.experts * capacity))
        result: torch.Tensor = expert_sums(done, index, weights)
        return result

    # ---- states in the owner's form ----------------------------------------------------------------------------
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.ranks > 1:
            destination |= {f"{prefix}{name}": whole for name, whole in self.whole_experts().items()}

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        names = [f"{prefix}{name}" for name in NAMES]
        if self.ranks > 1 and all(n in state for n in names) and state[names[1]].shape[0] == self.experts:
            state = {**state, **dict(zip(names, self._parts(*(state[n] for n in names)), strict=True))}
        super()._load_from_state_dict(state, prefix, *args)

    def whole_experts(self, values: tuple[torch.Tensor, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """All experts' parameters in the owner's form, on every rank, which all call this. `values`: what to put together in their place, as
        gradients."""
        found, shares = {}, self.layout.shares
        for name, own in zip(NAMES, values or (self.gate_up_proj, self.down_proj), strict=True):
            parts = [own.detach().contiguous()]
            if self.ranks > 1:
                every = [torch.empty_like(parts[0]) for _ in range(self.ranks)]
                dist.all_gather(every, parts[0], group=self.group)
                parts = every
            neighbours = [parts[i : i + shares] for i in range(0, len(parts), shares)]
            if name == "down_proj":
                joined = [torch.cat(some, dim=2) for some in neighbours]
            else:
                joined = [torch.cat([p.unflatten(1, (2, -1)) for p in some], dim=2).flatten(1, 2) for some in neighbours]
            found[name] = torch.cat(joined)
        return found
