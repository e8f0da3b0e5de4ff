"""The lab: any fabric rehearsed on one machine, with real processes and real sockets over shaped links. See docs/lab.md."""

from .lab import Lab
from .links import LinkCount
from .process import LabProcess
from .ranks import RunResult

__all__ = ["Lab", "LabProcess", "LinkCount", "RunResult"]
