"""Queues, machines, allocations and placements in files: our own, and traces of clusters."""

from __future__ import annotations

from .allocation import read_allocation, write_allocation
from .name import is_vms, load_queue, load_vms
from .queue import read_queue, write_queue
from .vms import read_vm_placement, read_vms, write_vm_placement, write_vms

__all__ = [
    "is_vms", "load_queue", "load_vms", "read_allocation", "read_queue", "read_vm_placement", "read_vms", "write_allocation", "write_queue",
    "write_vm_placement", "write_vms",
]  # fmt: skip
