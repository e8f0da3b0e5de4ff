"""A shared cluster: its servers, a queue of jobs with what they gain from cores and memory, and who got what."""

from __future__ import annotations

from .allocation import Allocation, Given, Part
from .queue import Queue, QueuedJob
from .sensitivity import Sensitivity
from .servers import Server, Servers, servers_of

__all__ = ["Allocation", "Given", "Part", "Queue", "QueuedJob", "Sensitivity", "Server", "Servers", "servers_of"]
