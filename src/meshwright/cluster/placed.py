"""A job as an engine is told to run it: on which servers, with which GPUs, cores and memory, and which rank is where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..errors import UsageError
from .allocation import Given
from .servers import Servers

__all__ = ["Placed", "Rank", "Shape", "placed", "shapes"]

Per = Literal["gpu", "server"]


class Rank(NamedTuple):
    """A process of a job: its server, and numbers of the GPUs there that are its own."""

    server: str
    gpus: tuple[int, ...]


class Placed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`number`: of the job in its queue; `attempt`: from 1 on; `ranks`: in the order of ranks."""

    job: str
    number: int
    attempt: int
    given: tuple[Given, ...]
    ranks: tuple[Rank, ...]

    def numbers(self, server: str) -> tuple[int, ...]:
        """Numbers of its GPUs on a server."""
        return tuple(sorted({g for rank in self.ranks if rank.server == server for g in rank.gpus}))


class Shape(NamedTuple):
    """Servers on which a job has the same number of GPUs and cores, and the same memory: what one object of an engine can say."""

    servers: tuple[str, ...]
    gpus: int
    cores: int
    memory_bytes: int


def shapes(given: Iterable[Given]) -> list[Shape]:
    """Parts of a job by what they have, in the order of its parts."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for g in given:
        found.setdefault((len(g.gpus), g.cores, g.memory_bytes), []).append(g.server)
    return [Shape(tuple(names), *key) for key, names in found.items()]


def placed(
    servers: Servers, job: str, given: Sequence[Given], *, number: int, attempt: int = 1, per: Per = "gpu", order: Sequence[str] = ()
) -> Placed:
    """`order`: names of the job's GPUs in the order of ranks, e.g. a plan's placement; without it server by server. `per`: a rank per GPU or per
    server.

    Raises: UsageError for servers and GPUs that are not there, and for an order of other GPUs."""
    hosts: Mapping[str, Mapping[str, int]] = {s.name: {g: n for n, g in enumerate(s.gpus)} for s in servers.servers}
    at: dict[str, Rank] = {}
    for g in given:
        for gpu in g.gpus:
            if gpu not in hosts.get(g.server, {}):
                raise UsageError(f"server {g.server[:64]} has no GPU {gpu[:64]}", where=f"job {job[:64]}", hint="decide for the engine's own servers")
            at[gpu] = Rank(g.server, (hosts[g.server][gpu],))
    if order and (set(order) != set(at) or len(order) != len(at)):
        raise UsageError(
            f"the order of ranks names {len(order)} GPUs, not the {len(at)} that it was given", where=f"job {job[:64]}",
            hint="make the plan for the GPUs of the allocation, in any order",
        )  # fmt: skip
    ranks = tuple(at[gpu] for gpu in (order or at))
    if per == "server":
        names = dict.fromkeys(r.server for r in ranks)
        ranks = tuple(Rank(name, tuple(g for r in ranks if r.server == name for g in r.gpus)) for name in names)
    return Placed(job=job, number=number, attempt=attempt, given=tuple(given), ranks=ranks)
