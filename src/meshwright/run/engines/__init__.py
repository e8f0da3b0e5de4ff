"""Decisions about jobs carried out by what really runs them: this machine, Slurm, Ray, Kubernetes; journaled, repeatable, audited."""

from __future__ import annotations

from .driven import Driver
from .local import Local
from .session import Session
from .slurm import Slurm

__all__ = ["Driver", "Local", "Session", "Slurm"]
