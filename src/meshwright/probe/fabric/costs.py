"""Costs for rank orders (`collective order`) from a probed fabric: pairs along its routes, groups behind its trunks, and what leaves a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...decide.collective.cloudcollectives.cost import CostMatrix
from .infer import Inferred, Trunk
from .measurements import Measurements

__all__ = ["cost_matrix"]


def cost_matrix(measured: Measurements, found: Inferred) -> CostMatrix:
    """Groups are the sets behind the trunks that are scarcest for what sits behind them, disjoint; everyone else is one group."""
    plain = CostMatrix.of_fabric(found.fabric, measured.names)
    number: dict[str, int] = {}
    host = tuple(number.setdefault(h, len(number)) for h in measured.host)
    plain = replace(plain, host=host, group=(0,) * len(host), uplink_Bps=(), source=measured.source, address=measured.address)
    chosen = _disjoint(found.trunks, plain)
    if not chosen:
        return plain
    group = np.zeros(len(host), np.int64)
    uplinks = [0.0]
    for k, trunk in enumerate(chosen, 1):
        group[list(trunk.members)] = k
        uplinks.append(min(trunk.out_Bps, trunk.in_Bps))
    if len(chosen) == 1:  # two sides of one trunk
        uplinks[0] = uplinks[1]
    present: dict[int, int] = {}
    numbered = tuple(present.setdefault(int(g), len(present)) for g in group)
    return replace(plain, group=numbered, uplink_Bps=tuple(uplinks[g] for g in present))


def _disjoint(trunks: Sequence[Trunk], costs: CostMatrix) -> list[Trunk]:
    def per_member(trunk: Trunk) -> tuple[float, int, tuple[int, ...]]:
        ports = sum(1 / float(np.delete(costs.beta_s_per_byte[i], i).min()) for i in trunk.members)
        return min(trunk.out_Bps, trunk.in_Bps) / ports, len(trunk.members), trunk.members

    taken: list[Trunk] = []
    for trunk in sorted(trunks, key=per_member):
        if not any(set(trunk.members) & set(t.members) for t in taken):
            taken.append(trunk)
    return taken
