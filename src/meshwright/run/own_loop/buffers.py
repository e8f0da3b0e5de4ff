"""Buffers of the whole model: each as the ranks have it whose stage changes it. All ranks hold every buffer, and only those move in theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...capture.regions import REGION
from ...plan.plan import TrainingLayout
from ...plan.vocabulary import base_node
from ..steps.forward_graph import OPAQUE, ForwardGraph, ForwardNode
from ..train.changed_buffers import changed_buffers

__all__ = ["changed_on", "whole_buffers"]


def changed_on(graph: ForwardGraph, layout: TrainingLayout) -> dict[str, int]:
    """The first rank whose segments change a buffer, by the buffer's name; of what no call changes, none."""
    found: dict[str, int] = {}
    through_views = {call: name for name, (call, _) in changed_buffers(graph).items()}
    for segment in layout.segments:
        rank = next(r for r in range(layout.ranks) if segment.key in layout.held(layout.coordinates(r)[0]).segments)
        for name in segment.nodes:
            node = graph.by_name.get(base_node(name))
            if node is not None and node.name in through_views:
                found.setdefault(through_views[node.name], rank)
            if node is not None and _changes(node):
                found |= {v.removeprefix("buffer:"): rank for v in node.inputs if v.startswith("buffer:")}
    return found


def _changes(node: ForwardNode) -> bool:
    operator = node.target.split(".")[1] if node.target.count(".") else node.target
    return operator.endswith("_") or "batch_norm" in operator or node.target in (REGION, OPAQUE)


def whole_buffers(own: Mapping[str, torch.Tensor], senders: Mapping[str, int], ranks: Sequence[int], group: Any) -> dict[str, torch.Tensor]:
    """Copies on the processor of a rank's buffers, those of `senders` from there. `ranks`: of the group, by the plan's; all call it."""
    found = {name: b.detach().cpu().clone() for name, b in own.items()}
    for name in sorted(senders.keys() & found.keys()):
        value = found[name].contiguous()
        bits = value.reshape(-1).view(torch.uint8) if value.numel() else value
        dist.broadcast(bits, ranks[senders[name]], group)
        found[name] = bits.view(value.dtype).reshape(value.shape) if value.numel() else value
    return found
