"""Layers for users' models: mixtures of experts."""

from __future__ import annotations

from .experts import ExpertForm, FeedForward, GatedFeedForward, ModuleExpert
from .layer import MoELayer
from .routers import CosineRouter, LinearRouter

__all__ = ["CosineRouter", "ExpertForm", "FeedForward", "GatedFeedForward", "LinearRouter", "MoELayer", "ModuleExpert"]
