"""What a changed fabric would bring: one more NIC, one more GPU, a tenth more memory. The job is planned again on each.

One more NIC: every server that has NICs gets one more, traffic spread evenly over them, so that each carries n + 1 / n of its rate; a fabric without
NICs gets every link between servers (or, in one server, every link) half as fast again. One more GPU: a copy of the last device with its links.
A plan on the changed fabric is never worse than the present one, which stays possible: then it brings nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec

from ...errors import MeshwrightError
from ...fabric.edit import is_port
from ...fabric.fabric import Fabric
from ...kernels.effort import Budget

__all__ = ["WhatIf", "more_devices", "more_memory", "one_more_device", "one_more_nic", "what_ifs"]

MEMORY = Fraction(11, 10)


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`time_s`: best step then; None if it was not found out, `why` says why. `gain`: share of the present step that is saved."""

    what: str
    time_s: float | None = None
    gain: float = 0.0
    layout: str = ""
    why: str = ""


@dataclass(frozen=True)
class _Change:
    what: str
    fabric: Fabric


def one_more_nic(fabric: Fabric) -> tuple[str, Fabric] | None:
    """(what was done, the fabric), or None when there is no link to widen."""
    ports: dict[str, set[str]] = {}
    for s in fabric.switches:
        if is_port(fabric, s.name):
            ports.setdefault(s.group, set()).add(s.name)
    if ports:
        factor = {name: Fraction(len(names) + 1, len(names)) for names in ports.values() for name in names}
        most = max(len(names) for names in ports.values())
        links = tuple(
            replace(x, rate_Bps=int(x.rate_Bps * max(factor.get(x.src, Fraction(1)), factor.get(x.dst, Fraction(1))))) for x in fabric.links
        )
        return f"one more NIC in every server ({most + 1} instead of {most})", replace(fabric, links=links)
    group = {d.name: d.group for d in fabric.devices} | {s.name: s.group for s in fabric.switches}
    between = [i for i, x in enumerate(fabric.links) if group[x.src] != group[x.dst]]
    chosen = set(between or range(len(fabric.links)))
    if not chosen:
        return None
    links = tuple(replace(x, rate_Bps=x.rate_Bps * 3 // 2) if i in chosen else x for i, x in enumerate(fabric.links))
    return f"links {'between groups' if between else ''} half as fast again (the fabric has no NICs)".replace("  ", " "), replace(fabric, links=links)


def one_more_device(fabric: Fabric) -> tuple[str, Fabric]:
    """A copy of the last device, in the same server, with a copy of each of its links."""
    return f"one more device like {fabric.devices[-1].name}", more_devices(fabric, 1)


def more_devices(fabric: Fabric, count: int) -> Fabric:
    """`count` copies of the last device, in the same server, each with a copy of each of its links."""
    last, known = fabric.devices[-1], set(fabric.actor_names)
    free = (name for number in itertools.count(1) if (name := f"{last.name}.{number}") not in known)
    names = list(itertools.islice(free, count))
    links = [x for x in fabric.links if last.name in (x.src, x.dst)]
    copies = (
        replace(x, src=name if x.src == last.name else x.src, dst=name if x.dst == last.name else x.dst) for name in names for x in links
    )
    return replace(fabric, devices=(*fabric.devices, *(replace(last, name=name) for name in names)), links=(*fabric.links, *copies))


def more_memory(fabric: Fabric) -> tuple[str, Fabric] | None:
    """A tenth more on every device that states a limit; None when none does."""
    if not any(d.memory_bytes for d in fabric.devices):
        return None
    return "10 % more memory", replace(fabric, devices=tuple(replace(d, memory_bytes=int(d.memory_bytes * MEMORY)) for d in fabric.devices))


def what_ifs(fabric: Fabric, now_s: float, best: Callable[[Fabric], tuple[float, str]], budget: Budget) -> tuple[WhatIf, ...]:
    """`best(fabric)` plans the job there and returns the step time and the layout; it may raise."""
    changes: list[_Change] = []
    nic, memory = one_more_nic(fabric), more_memory(fabric)
    if nic is not None:
        changes.append(_Change(*nic))
    changes.append(_Change(*one_more_device(fabric)))
    found: list[WhatIf] = []
    if memory is not None:
        changes.append(_Change(*memory))
    else:
        found.append(WhatIf(what="10 % more memory", why="the devices state no memory limit: nothing was refused for it"))
    for change in changes:
        if budget.late or not budget.spend():
            found.append(WhatIf(what=change.what, why="not tried: the time limit was reached"))
            continue
        try:
            with budget.net():
                time_s, layout = best(change.fabric)
        except MeshwrightError as error:
            found.append(WhatIf(what=change.what, why=f"no plan: {error.message}"))
            continue
        if time_s < now_s * (1 - 1e-9):
            found.append(WhatIf(what=change.what, time_s=time_s, gain=1 - time_s / now_s, layout=layout))
        else:
            found.append(WhatIf(what=change.what, time_s=now_s, why=f"nothing: the best layout there takes {time_s:.4g} s, the present plan stays"))
    return tuple(found)
