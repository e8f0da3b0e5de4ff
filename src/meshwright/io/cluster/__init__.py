"""Queues and allocations in files: our own, and traces of clusters."""

from __future__ import annotations

from .allocation import read_allocation, write_allocation
from .name import load_queue
from .queue import read_queue, write_queue

__all__ = ["load_queue", "read_allocation", "read_queue", "write_allocation", "write_queue"]
