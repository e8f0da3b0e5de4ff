"""Measuring how fast a command is under limits of cores, memory and disk."""

from __future__ import annotations

from .sensitivity import Measured, Timing, measure_rate, profile_command, profiled

__all__ = ["Measured", "Timing", "measure_rate", "profile_command", "profiled"]
