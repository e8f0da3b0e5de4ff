"""Numeric kernels of expert layers: routing, encode and decode, block-sparse products. Each has a plain twin in the tests."""

from __future__ import annotations

from ..capacity import aligned, capacity_of
from .dispatch import decode, encode, slots_of
from .routing import Routing, load_balance_loss, load_importance_loss, route

__all__ = ["Routing", "aligned", "capacity_of", "decode", "encode", "load_balance_loss", "load_importance_loss", "route", "slots_of"]
