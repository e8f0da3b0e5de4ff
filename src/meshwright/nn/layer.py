"""A mixture-of-experts layer that changes its parallelism between two steps without moving a weight.

Cite: C. Hwang and others, "Tutel: Adaptive Mixture-of-Experts at Scale" (MLSys 2023, arXiv 2206.03382).
Left open by the paper, deviations: see `nn.routed`, which this gives a router and its losses.
Invariant: outputs, gradients and losses are those of one process with all experts, but for the order of sums.
Cost: that of the experts on E · C rows over all ranks, and the exchanges of `decide.experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..decide.experts import Choice
from ..errors import UsageError
from ..fabric.fabric import Fabric
from ..kernels.experts import Routing, load_balance_loss, load_importance_loss, route
from ..plan.plan import Plan
from .experts import ExpertForm
from .routed import Ask, RoutedExperts, Spread
from .routers import LinearRouter

__all__ = ["MoELayer"]


class MoELayer(RoutedExperts):
    """y [..., output] = sum over a token's k experts of gate · expert(x [..., H]). Call it on all ranks of `group`, also without tokens.

    experts: their number, over all ranks. form: `FeedForward`, `GatedFeedForward`, `ModuleExpert`, or your own `ExpertForm`.
    k, capacity_factor: defaults of every call; the factor f as in `kernels.experts.capacity_of`: > 0 fixed, 0 drops nothing, < 0 at most.
    prioritised: batch-prioritised routing. normalise: a token's gates add up to 1. gate: "after" weighs what experts give, "before" what they get.
    loss: "balance" (GShard) or "importance" (with `noise`), in `l_aux` after every call; noise: deviation of that on logits in training, times E.
    choice: (r, d, algorithm) of every step, or "search": tried and measured while training goes on. chunks, algorithms: tried.
    dropless: "loop", "padded", "grouped", "sparse" (blocks of `block`) or "auto", fitted to measured steps: rows of any number each instead of
        buffers, whatever capacity_factor says; among ranks for as many experts or a multiple of them.
    plan: of `experts plan`, or its file: the choice of every range of capacities comes from its table, and nothing is tried.
    fabric: a preset, file or Fabric whose devices are the group's ranks in order; it says what lies in one server. None: one switch.
    spare, replan: with `dropless` on several ranks: places on every rank for copies of hot experts, which are chosen anew after every `replan` calls
        and moved where that pays on `fabric`. `copies.made` says which there are, `copies.moves` what was decided.
    seed: of the experts' first weights, the same on all ranks; None: torch's own generator must be alike everywhere.

    After a call: `l_aux`, `dispatch_count` [E] (demand at this rank), `capacity`, `dropped` (choices of this rank's tokens that found no place),
    `used` (the choice). Expert parameters are apart on every rank and must not be averaged (`expert_parameters`); gradients are sums over all ranks.
    Raises: UsageError, Unsupported (an algorithm that does not apply); from calls on all ranks: NotFinite, RankDiverged, UsageError, GroupFailed.
    """

    def __init__(
        self, form: ExpertForm, experts: int, *, k: int = 2, capacity_factor: float = 1.0, router: torch.nn.Module | None = None,
        prioritised: bool = False, normalise: bool = True, gate: Literal["after", "before"] = "after",
        loss: Literal["balance", "importance"] = "balance", noise: float = 0.0, choice: Choice | tuple[int, int, str] | Literal["search"] = "search",
        dropless: str = "", block: int = 16, chunks: Sequence[int] = (1, 2, 4), algorithms: Sequence[str] = ("linear",), window: int = 128,
        fabric: str | Fabric | None = None, group: Any = None, seed: int | None = None, plan: str | Plan | None = None,
        spare: int = 0, replan: int = 100,
    ) -> None:  # fmt: skip
        if gate not in ("after", "before") or loss not in ("balance", "importance"):
            raise UsageError(f"no gate {gate!r} or loss {loss!r}", where="MoELayer", hint="gate: after, before; loss: balance, importance")
        spread = Spread(
            choice=choice, dropless=dropless, block=block, chunks=chunks, algorithms=algorithms, window=window, fabric=fabric, plan=plan, spare=spare,
            replan=replan,
        )  # fmt: skip
        super().__init__(form, experts, spread, group if group is not None else (dist.group.WORLD if dist.is_initialized() else None))
        self.k, self.capacity_factor = k, capacity_factor
        self.prioritised, self.normalise, self.gate, self.loss, self.noise = prioritised, normalise, gate, loss, noise
        self.router = router or LinearRouter(form.model, experts)
        self._begin(seed)
        self.l_aux: torch.Tensor | None = None

    def _begin(self, seed: int | None) -> None:
        """First weights: all experts are drawn on every rank, in order, and each keeps its own."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        each = [self.form.initial(generator) for _ in range(self.experts)]
        slices, whole = self.layout.part({name: torch.stack([e[name] for e in each]) for name in each[0]}, self.rank)
        self.slices, self.whole = torch.nn.Parameter(slices), torch.nn.Parameter(whole)
        for parameter in self.expert_parameters():
            parameter.meshwright_expert = True

    def flat_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slices, self.whole

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's own: leave them out of data-parallel averages."""
        return [self.slices, self.whole]

    # ---- a step ------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, *, k: int | None = None, capacity_factor: float | None = None) -> torch.Tensor:
        """x: [..., H]. Other ranks may have other numbers of tokens."""
        k, factor = k or self.k, self.capacity_factor if capacity_factor is None else capacity_factor
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        noisy = logits + self.noise * torch.randn_like(logits) / self.experts if self.training and self.noise > 0 else logits
        scores = torch.softmax(noisy, dim=1)
        fits = logits.shape[1] == self.experts and 1 <= k <= self.experts and bool(torch.isfinite(logits).all())
        routing = route(scores, k, prioritised=self.prioritised, normalise=self.normalise) if fits else None
        out = self.dispatch(tokens, routing, Ask(k, factor, bool(torch.isfinite(logits).all()), logits.shape[1]), self.gate)
        assert routing is not None
        self.l_aux = self._loss(scores, logits, noisy, routing)
        return out.view(*x.shape[:-1], self.form.output)

    def _loss(self, scores: torch.Tensor, logits: torch.Tensor, noisy: torch.Tensor, routing: Routing) -> torch.Tensor:
        if self.loss == "balance":
            return load_balance_loss(scores, routing.experts[:, 0])
        return load_importance_loss(torch.softmax(logits, 1), noisy.gather(1, routing.experts), self.noise)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def full_experts(self) -> dict[str, torch.Tensor]:
        """Parameters of all experts, stacked [E, ...], on every rank; to be called on all of them. Raises: GroupFailed."""
        if self.ranks == 1:
            return self.layout.full([self.slices.detach()], [self.whole.detach()])
        parts = []
        for own in (self.slices.detach(), self.whole.detach()):
            every = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(every, own, group=self.group) if own.numel() else None
            parts.append(every)
        return self.layout.full(*parts)

    def load_full_experts(self, full: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of what `full_experts` gave, on any number of ranks. Raises: FormatError for another kind or number of experts."""
        with torch.no_grad():
            for parameter, part in zip(self.expert_parameters(), self.layout.part(full, self.rank), strict=True):
                parameter.copy_(part)
