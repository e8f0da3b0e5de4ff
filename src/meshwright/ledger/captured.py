"""The ledger of a captured graph: bytes that autograd keeps and floating-point operations, per operator and per module.

Bytes are those of `OpNode.saved`: every storage once, at the first operator that keeps it, parameters never. Operations are those of
the joint graph. Model operations leave out what a fused attention kernel computes again in its backward (its scores).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ..graph.graph import OpGraph

__all__ = ["CapturedFlops", "captured_flops"]


class CapturedFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pass at the graph's batch size. `causal_attention`: model operations of attention under a causal mask, counted in full."""

    model: int
    hardware: int
    causal_attention: int

    def scaled(self, samples: int, batch_size: int) -> CapturedFlops:
        values = (self.model, self.hardware, self.causal_attention)
        model, hardware, causal = (v * samples // batch_size for v in values)
        return CapturedFlops(model=model, hardware=hardware, causal_attention=causal)

    def halved(self) -> CapturedFlops:
        """Causal attention counted below the diagonal only."""
        half = self.causal_attention // 2
        return CapturedFlops(model=self.model - half, hardware=self.hardware - half, causal_attention=self.causal_attention - half)


def captured_flops(graph: OpGraph, recomputed: Collection[str] = ()) -> CapturedFlops:
    """`recomputed`: names of forward nodes that run once more before their backward (hardware operations only)."""
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    fused: set[str] = set()
    causal: set[str] = set()
    for call in graph.joint:
        side = forward if call.phase == "forward" else backward
        side[call.node] = side.get(call.node, 0) + call.work.flops
        if "scaled_dot_product" in call.target or "flash_attention" in call.target or "efficient_attention" in call.target:
            fused.add(call.node)
            if call.causal:
                causal.add(call.node)
    if not graph.joint:
        forward = {n.name: n.forward.flops for n in graph.nodes}
        backward = {n.name: n.backward.flops for n in graph.nodes}
    again = sum(max(backward.get(n, 0) - 2 * forward.get(n, 0), 0) for n in fused)
    whole = sum(forward.values()) + sum(backward.values())
    redone = sum(forward.get(n, 0) for n in recomputed)
    return CapturedFlops(model=whole - again, hardware=whole + redone, causal_attention=sum(3 * forward.get(n, 0) for n in causal))
