"""`import meshwright.torch` makes "meshwright" a backend of torch.distributed.

    import meshwright.torch
    torch.distributed.init_process_group("meshwright")     # instead of "gloo"

DDP, FSDP2, tensor parallelism and plain collectives run unchanged. What runs is told by environment variables (`meshwright.run.group.settings`
lists them) or `configure`: plan files, or a fabric to plan for. Whatever has no plan runs on gloo, and is counted: see `report`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from .errors import MeshwrightError, PlanMismatch, UsageError
from .fabric import Fabric
from .run.group.engine import Engine
from .run.group.group import MeshwrightGroup
from .run.group.health import refuse
from .run.group.settings import Settings, configure, current_settings

__all__ = ["MeshwrightGroup", "configure", "report"]

_groups: weakref.WeakSet[MeshwrightGroup] = weakref.WeakSet()


def _create(options: Any, _: Any = None) -> MeshwrightGroup:
    settings = current_settings()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    try:
        fabric = _fabric(settings)
        devices = _devices(settings, fabric, ranks)
    except MeshwrightError as error:  # the others wait: they must hear of it
        refuse(dist.PrefixStore("meshwright", options.store), options.group_rank, options.group_size, error)
        raise
    engine = Engine(
        settings, options.store, options.group_rank, options.group_size, options.timeout.total_seconds(), global_ranks=ranks, devices=devices,
        fabric=fabric,
    )  # fmt: skip
    try:
        own = dist.PrefixStore("builtin", options.store)
        builtin = dist.ProcessGroupGloo(own, options.group_rank, options.group_size, options.timeout)
    except RuntimeError as error:
        found = engine.lost_builtin("closed")
        engine.close()
        raise found from error
    group = MeshwrightGroup(engine, builtin)
    _groups.add(group)
    return group


def _fabric(settings: Settings) -> Fabric | None:
    if not settings.fabric:
        return None
    from .drive import read_fabric

    return read_fabric(settings.fabric)


def _devices(settings: Settings, fabric: Fabric | None, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the group's devices. Raises: PlanMismatch when there are fewer devices than ranks, UnknownName for one that the fabric lacks."""
    names = settings.devices or (tuple(d.name for d in fabric.devices) if fabric is not None else ())
    if not names:
        return ()
    if max(ranks) >= len(names):
        raise PlanMismatch(
            f"rank {max(ranks)} has no device: {len(names)} are named", where="MESHWRIGHT_DEVICES" if settings.devices else settings.fabric,
            hint="name a fabric with a device for every rank", data={"rank": max(ranks), "devices": len(names)},
        )  # fmt: skip
    if len(set(names)) < len(names):
        raise UsageError("a device is named twice", where="MESHWRIGHT_DEVICES", hint="one per rank")
    if fabric is not None:
        for name in names:
            fabric.device(name)
    return tuple(names[r] for r in ranks)


def report(group: Any = None) -> Mapping[str, Any]:
    """What became of the collectives of a group, or of all groups that are alive: `planned` by operation and strategy, `builtin` by operation and
    reason, each with its count."""
    groups = [group] if group is not None else list(_groups)
    planned: dict[str, dict[str, int]] = {}
    builtin: dict[str, dict[str, int]] = {}
    for one in groups:
        for table, counts in ((planned, one.tally.planned), (builtin, one.tally.builtin)):
            for (op, what), count in counts.items():
                row = table.setdefault(op, {})
                row[what] = row.get(what, 0) + count
    return {"schema": "meshwright.group-report", "version": 1, "planned": planned, "builtin": builtin}


if "meshwright" not in dist.Backend.backend_list:
    dist.Backend.register_backend("meshwright", _create, extended_api=True, devices=["cpu"])
