"""Layers for users' models: mixtures of experts, and ours in the place of other makers'."""

from __future__ import annotations

from .convert import ExpertReport, balance_biases, convert_experts
from .experts import ExpertForm, FeedForward, GatedFeedForward, ModuleExpert
from .layer import MoELayer
from .routed import Spread
from .routers import CosineRouter, LinearRouter
from .stacked import StackedExperts

__all__ = [
    "CosineRouter", "ExpertForm", "ExpertReport", "FeedForward", "GatedFeedForward", "LinearRouter", "MoELayer", "ModuleExpert", "Spread",
    "StackedExperts", "balance_biases", "convert_experts",
]  # fmt: skip
