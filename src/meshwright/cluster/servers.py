"""Servers of a cluster: the groups of a fabric, with the cores, memory and storage that the GPUs of each share.

Cores are whole. Memory is given out in thirds of a GPU's share, so that what fits is a question of whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..fabric.fabric import Fabric

__all__ = ["STEPS_PER_GPU", "Kind", "Server", "Servers", "servers_of"]

STEPS_PER_GPU = 3  # of memory; the least that the published profiles need is a third of a share


class Kind(NamedTuple):
    """What makes servers alike: GPUs, cores, memory, and the type of GPU."""

    gpus: int
    cores: int
    memory_bytes: int
    type: str

    @property
    def steps(self) -> int:
        """Steps of memory."""
        return STEPS_PER_GPU * self.gpus

    def bytes_of(self, steps: int) -> int:
        """Bytes of so many steps of memory."""
        return steps * self.memory_bytes // self.steps

    def share(self, gpus: int) -> tuple[int, int]:
        """Whole cores and steps of memory that so many of its GPUs have in proportion: everybody's fit together."""
        return gpus * self.cores // self.gpus, STEPS_PER_GPU * gpus


@dataclass(frozen=True, kw_only=True)
class Server:
    """`gpus`: names of its devices. `storage_Bps`: what it reads from storage, 0: unknown."""

    name: str
    gpus: tuple[str, ...]
    cores: int
    memory_bytes: int
    type: str = "gpu"
    storage_Bps: int = 0

    def __post_init__(self) -> None:
        if not self.gpus or self.cores < 1 or self.memory_bytes < STEPS_PER_GPU * len(self.gpus) or self.storage_Bps < 0:
            text = f"{len(self.gpus)} GPUs, {self.cores} cores, {self.memory_bytes} bytes"
            raise UsageError(f"a server needs GPUs, cores and memory, not {text}", where=f"server {self.name}")

    @property
    def kind(self) -> Kind:
        return Kind(len(self.gpus), self.cores, self.memory_bytes, self.type)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Servers with names of their own. `fabric`: its name."""

    servers: tuple[Server, ...]
    fabric: str = ""

    def __post_init__(self) -> None:
        if not self.servers or len({s.name for s in self.servers}) < len(self.servers):
            raise UsageError("a cluster has servers with names of their own", where="servers")

    def __len__(self) -> int:
        return len(self.servers)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(s.kind for s in self.servers))

    @cached_property
    def kind(self) -> NDArray[np.int64]:
        """Number of each server's kind."""
        number = {k: n for n, k in enumerate(self.kinds)}
        return np.array([number[s.kind] for s in self.servers], np.int64)

    @cached_property
    def gpus(self) -> NDArray[np.int64]:
        return np.array([len(s.gpus) for s in self.servers], np.int64)

    @cached_property
    def cores(self) -> NDArray[np.int64]:
        return np.array([s.cores for s in self.servers], np.int64)

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        return np.array([s.kind.steps for s in self.servers], np.int64)

    @property
    def total_gpus(self) -> int:
        return int(self.gpus.sum())

    def of_types(self, types: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which servers have a GPU of one of these types; of no types: all."""
        return np.array([not types or s.type in types for s in self.servers])


def servers_of(fabric: Fabric, *, cores: int, memory_bytes: int, storage_Bps: int = 0) -> Servers:
    """The fabric's groups with GPUs, each with so many cores and so much memory; GPUs that state a compute capability have it as type, `sm80`.

    Raises: UsageError for a fabric without GPUs in groups."""
    found = []
    for name, members in fabric.groups.items():
        gpus = [fabric.devices[m] for m in members if fabric.devices[m].kind == "gpu"]
        if gpus:
            kinds = {f"sm{d.sm}" if d.sm else "gpu" for d in gpus}
            if len(kinds) > 1:
                raise UsageError(f"server {name} holds GPUs of {len(kinds)} types", where=fabric.name, hint="a server has GPUs of one type")
            found.append(Server(
                name=name, gpus=tuple(d.name for d in gpus), cores=cores, memory_bytes=memory_bytes, type=kinds.pop(), storage_Bps=storage_Bps,
            ))  # fmt: skip
    if not found:
        raise UsageError("no GPUs in servers", where=fabric.name, hint="name a preset such as dgx1-v100:16; devices need kind gpu and a group")
    return Servers(servers=tuple(found), fabric=fabric.name)
