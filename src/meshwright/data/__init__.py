"""Input pipelines: which files stay in the page cache, what an epoch then reads, what stalls the training loop."""

from __future__ import annotations

from ..io.own_limits import memory_limit_bytes
from .kept import FileRange, Kept, Residency
from .limits import memory_budget_bytes
from .peers import PeerFiles
from .planned import planned_loader
from .served import ServedLoader
from .shards import MdsSamples, TarSamples
from .shared import SharedLoader
from .stalls import measure_stalls

__all__ = [
    "FileRange", "Kept", "MdsSamples", "PeerFiles", "Residency", "ServedLoader", "SharedLoader", "TarSamples", "measure_stalls",
    "memory_budget_bytes", "memory_limit_bytes", "planned_loader",
]  # fmt: skip
