"""Devices, switches and directed links, with what is done to them: presets, routes, edits, lint."""

from .edit import edited, scaled, without
from .fabric import Device, Fabric, Link, Switch
from .lint import Finding, lint_fabric
from .presets import PRESETS
from .route import Router

__all__ = ["Device", "Fabric", "Finding", "Link", "PRESETS", "Router", "Switch", "edited", "lint_fabric", "scaled", "without"]
