"""Measured tables of layers, and what a prediction from them needs beside."""

from .layer_profile import LayerProfile
from .layer_table import LayerTable

__all__ = ["LayerProfile", "LayerTable"]
