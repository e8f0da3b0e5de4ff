"""Codec states in checkpoints, by tensor where they are one number per element, so that another grouping or number of ranks can go on with them.

Left open by the papers: another number of ranks. Our answer: what was not sent (residuals, DGC's velocity) is a sum over ranks, so new rank r takes
the sum of the old ranks r, r + new, r + 2 new, ...; the total stays (to float32 rounding). Averages of gradients (Signum's momentum) are no such
sum: they are taken from old rank r mod old, as are states that are no number per element (starts, thresholds),
and those only where the group is the same.
Invariant: nothing that was not sent is lost unless `drop_residual` is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import PlanMismatch
from ..codecs.base import PENDING
from .group import GroupExchange

__all__ = ["load_groups", "saved_groups"]

VERSION = 1


def saved_groups(groups: Sequence[GroupExchange], *, step: int, rank: int, world: int) -> dict[str, Any]:
    """{"schema", "version", "step", "rank", "world", "elements": {state: {tensor: values}}, "groups": {codec and tensors: {state: values}}}"""
    elements: dict[str, dict[str, torch.Tensor]] = {}
    others: dict[str, dict[str, torch.Tensor]] = {}
    for g in groups:
        for name, value in g.state.items():
            if value.numel() == g.flat.numel():
                pieces = value.detach().clone().view(-1).split([p.numel() for p in g.parts])
                elements.setdefault(name, {}).update({n: piece.clone() for n, piece in zip(g.names, pieces, strict=True)})
            else:
                others.setdefault(_label(g), {})[name] = value.detach().clone()
    return {
        "schema": "meshwright.traffic-state", "version": VERSION, "step": step, "rank": rank, "world": world, "elements": elements, "groups": others,
    }  # fmt: skip


def load_groups(groups: Sequence[GroupExchange], saved: Sequence[Mapping[str, Any]], rank: int, world: int, *, drop_residual: bool) -> int:
    """Fill the groups' states from those of all old ranks (or this rank's own alone); returns the step to go on with.

    Raises: PlanMismatch for states of other runs, missing ranks, or a residual without a place.
    """
    by_rank = _by_rank(saved, rank, world)
    old = len(by_rank)
    same = old == 1 and int(saved[0]["world"]) == world
    own = by_rank[0] if same else by_rank[rank % old]
    parts = [own] if same else by_rank[rank::world]
    held: set[tuple[str, str]] = set()
    for g in groups:
        for name, value in g.state.items():
            if value.numel() != g.flat.numel():
                if (kept := own["groups"].get(_label(g), {}).get(name)) is not None:
                    value.copy_(kept.view(value.shape))
                continue
            for tensor, piece in zip(g.names, value.view(-1).split([p.numel() for p in g.parts]), strict=True):
                piece.copy_(_summed(parts, name, tensor, piece) if name in PENDING else _summed([own], name, tensor, piece))
                held.add((name, tensor))
    lost = {t for part in by_rank for name in PENDING for t, v in part["elements"].get(name, {}).items() if (name, t) not in held and v.any()}
    if lost and not drop_residual:
        raise PlanMismatch(
            f"the checkpoint holds a residual of {min(lost)!r}, and this plan's codec keeps none", where="traffic state",
            hint="plan with a codec that has error feedback, or say drop_residual=True", data={"tensors": sorted(lost)[:16]},
        )  # fmt: skip
    return int(own["step"])


def _by_rank(saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> list[Mapping[str, Any]]:
    for one in saved:
        if one.get("schema") != "meshwright.traffic-state" or one.get("version") != VERSION:
            raise PlanMismatch("is no traffic state that this version reads", where="traffic state")
    worlds = {int(one["world"]) for one in saved}
    if len(saved) == 1 and worlds == {world} and int(saved[0]["rank"]) == rank:
        return [saved[0]]
    found = {int(one["rank"]): one for one in saved}
    if len(worlds) != 1 or sorted(found) != list(range(*worlds)) or len(saved) != len(found):
        raise PlanMismatch(
            f"states of ranks {sorted(found)} of a run with {sorted(worlds)} ranks", where="traffic state",
            hint="give this rank's own state, or those of all old ranks", data={"ranks": sorted(found)},
        )  # fmt: skip
    return [found[r] for r in sorted(found)]


def _summed(parts: Sequence[Mapping[str, Any]], name: str, tensor: str, like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(like.shape, dtype=torch.float64)
    for part in parts:
        value = part["elements"].get(name, {}).get(tensor)
        if value is not None:
            if value.numel() != like.numel():
                raise PlanMismatch(f"the state of {tensor!r} has {value.numel()} elements, not {like.numel()}", where="traffic state")
            total += value.view(-1)
    return total


def _label(group: GroupExchange) -> str:
    return f"{group.spec.text}|{','.join(group.names)}"
