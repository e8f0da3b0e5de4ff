"""Routing: which experts a token goes to, its place in each expert's buffer, and how long that buffer is.

Cite: C. Hwang and others, "Tutel: Adaptive Mixture-of-Experts at Scale" (MLSys 2023, arXiv 2206.03382), section 3; GShard's loss is from D. Lepikhin
and others (arXiv 2006.16668), batch-prioritised routing and the loss of load and importance from C. Riquelme and others (arXiv 2106.05974).
Left open by the paper: equal scores, ranks with unlike numbers of tokens. Our answer: of equal scores the earlier token comes first; capacity follows
the rank with the most tokens.
Deviations: places come from one stable sort instead of running sums over [tokens, experts]; the demand counts every choice under batch priority too
(Tutel's counts the last token's row there, so its capacity at f <= 0 is too small, and tokens are lost).
Invariant: all first choices have their places before any second choice; the places of an expert are 0 .. demand - 1, each once.
Cost: O(T k log(T k)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...errors import UsageError

__all__ = ["Routing", "load_balance_loss", "load_importance_loss", "locations_of", "route"]

@dataclass(frozen=True)
class Routing:
    """Where T tokens go. `experts`, `locations`, `gates`: [T, k], by choice; `counts`: [E], tokens that want each expert, whatever fits."""

    experts: torch.Tensor
    locations: torch.Tensor
    gates: torch.Tensor
    counts: torch.Tensor


def route(scores: torch.Tensor, k: int, *, prioritised: bool = False, normalise: bool = True) -> Routing:
    """The `k` experts of highest score for every token of `scores` [T, E], their places and gates. Gradients flow through the gates.

    prioritised: tokens take their places in the order of their best score (batch-prioritised routing), not of their number. normalise: gates of a
    token add up to 1; never with k = 1, and before anything is dropped, as Tutel does.
    Raises: UsageError for k outside 1..E.
    """
    if scores.dim() != 2:
        raise UsageError(f"scores must be [tokens, experts], got {list(scores.shape)}", where="route")
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise UsageError(f"k must be 1..{n} (there are {n} experts), got {k}", where="route", hint=f"k={min(max(k, 1), n)}")
    experts = torch.topk(scores, k, dim=1).indices
    gates = scores.gather(1, experts)
    if normalise and k > 1:
        gates = gates / gates.sum(dim=1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    priority = torch.argsort(scores.detach().max(dim=1).values, descending=True, stable=True) if prioritised else None
    locations, counts = locations_of(experts, n, priority)
    return Routing(experts, locations, gates, counts)


def locations_of(experts: torch.Tensor, n: int, priority: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(places [T, k], demand [n]) of choices [T, k]: choice by choice, and within a choice by token, or in the order `priority` of tokens."""
    tokens, k = experts.shape
    flat = (experts if priority is None else experts[priority]).t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=n)
    first = torch.cumsum(counts, 0) - counts
    places = torch.empty_like(flat)
    places[order] = torch.arange(flat.numel(), device=flat.device) - first[flat[order]]
    places = places.view(k, tokens).t()
    if priority is None:
        return places.contiguous(), counts
    out = torch.empty(tokens, k, dtype=places.dtype, device=places.device)
    out[priority] = places
    return out, counts


def load_balance_loss(scores: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """GShard's loss: E / T² · sum over experts of (sum of its scores) · (tokens whose first choice it is). 1 where all is balanced; 0 of no tokens.

    scores: [T, E], with the router's noise; first: [T], the first choices.
    """
    tokens, experts = scores.shape
    if not tokens:
        return scores.sum()
    chosen = torch.bincount(first, minlength=experts).to(scores.dtype)
    return (scores.sum(0) * chosen).sum() * (experts / tokens**2)


def load_importance_loss(clean: torch.Tensor, chosen_logits: torch.Tensor, noise: float) -> torch.Tensor:
    """Half the squared coefficients of variation of load and importance, added up. clean: softmax of the logits without noise [T, E]; chosen_logits:
    the noisy logits of the k choices [T, k]; noise: its deviation times the number of experts.

    As Tutel computes it: probabilities are compared with the k-th noisy logit, and variances are unbiased.
    Raises: UsageError without noise: the load has no derivative then.
    """
    if not noise > 0:
        raise UsageError(f"the loss of load needs noise above 0, got {noise:g}", where="router noise", hint="noise=1.0, or loss='balance'")
    clean = clean.float()
    if not clean.shape[0]:
        return clean.sum()
    above = clean - chosen_logits[:, -1:].float()
    probability = 0.5 * (1 + torch.erf(above / (noise / clean.shape[1] * math.sqrt(2))))

    def variation(of: torch.Tensor) -> torch.Tensor:
        return of.var() / (of.mean() ** 2 + 1e-10)

    return (variation(clean.sum(0)) + variation(probability.sum(0))) / 2
