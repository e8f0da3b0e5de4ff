"""Where every machine of a trace was, from when to when: what `cluster plan` writes for machines, and the checker proves."""

from __future__ import annotations

import msgspec

from ..bound import Bound

__all__ = ["Stay", "VmPlacement"]


class Stay(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine on a host. `to_s` is null while it is still there at the end. A moved machine has several, which overlap while it is copied."""

    vm: int
    host: int
    from_s: float
    to_s: float | None = None


class VmPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`hosts`: of every kind of the trace. `refused`: machines for which no host had room. `resized`: numbers of the trace's resizes, by time, that
    were done. `used_host_s`: time of hosts in use from `from_s` to the trace's end; `bound`: no placement of these machines has less."""

    strategy: str
    predictor: str
    trace: str
    hosts: tuple[int, ...]
    from_s: float
    stays: tuple[Stay, ...]
    used_host_s: float
    refused: tuple[int, ...] = ()
    resized: tuple[int, ...] = ()
    bound: Bound | None = None
