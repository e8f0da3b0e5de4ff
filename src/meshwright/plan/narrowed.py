"""What a layout's precision makes of a graph that was captured in float32, and of the state that an optimizer keeps."""

from __future__ import annotations

import msgspec

from ..graph.graph import GraphValue, JointNode, OpGraph, OpNode, Parameter, Storage, Work
from ..profile.frameworks import MOMENT_BYTES
from .precision import Precision

__all__ = ["in_precision", "with_optimizer"]


def with_optimizer(precision: Precision, optimizer: str) -> Precision:
    """What `optimizer` keeps instead of AdamW's two moments: the state that this precision has beside them stays. One that is not known by name
    (a user's own) is taken to keep as much as AdamW."""
    if optimizer not in MOMENT_BYTES:
        return precision
    state = precision.state
    kept = state._replace(optimizer=state.optimizer - MOMENT_BYTES["adamw"] + MOMENT_BYTES[optimizer])
    return msgspec.structs.replace(precision, state=kept)


def in_precision(graph: OpGraph, precision: Precision | None) -> OpGraph:
    """A graph that was captured in float32 as it is in the precision, at its own batch size only. Other graphs stay as they are, and so do inputs
    and buffers."""
    if precision is None or precision.torch_name == "float32" or all(p.dtype != "float32" for p in graph.parameters):
        return graph
    return _Narrow(graph, precision.torch_name).run()


class _Narrow:
    """float32 becomes `dtype`, half as wide."""

    def __init__(self, graph: OpGraph, dtype: str) -> None:
        self.graph, self.dtype = graph, dtype

    def run(self) -> OpGraph:
        g = self.graph
        gradients = {g.gradients[p.name] for p in g.parameters if p.name in g.gradients}
        wide = {n.name for n in g.nodes if n.outputs and n.outputs[0].dtype == "float32"}
        joint = {j.name for j in g.joint if j.outputs and j.outputs[0].dtype == "float32"} | gradients
        return msgspec.structs.replace(
            g, nodes=tuple(map(self.node, g.nodes)), joint=tuple(map(self.joint, g.joint)), parameters=tuple(map(self.parameter, g.parameters)),
            storages=tuple(self.storage(x, wide) for x in g.storages), joint_storages=tuple(self.storage(x, joint) for x in g.joint_storages),
            scaling=None,
        )  # fmt: skip

    def value(self, x: GraphValue) -> GraphValue:
        return msgspec.structs.replace(x, dtype=self.dtype) if x.dtype == "float32" else x

    def work(self, w: Work, outputs: tuple[GraphValue, ...]) -> Work:
        """Bytes of operands follow those of what is made of them, as layer tables count; of float64 and complex numbers none do."""
        if not outputs or outputs[0].dtype.startswith(("float64", "complex")):
            return w
        return Work(flops=w.flops, bytes_read=w.bytes_read // 2, bytes_written=w.bytes_written // 2, calls=w.calls)

    def node(self, n: OpNode) -> OpNode:
        made = tuple(map(self.value, n.outputs))
        return msgspec.structs.replace(n, outputs=made, forward=self.work(n.forward, n.outputs), backward=self.work(n.backward, n.outputs))

    def joint(self, j: JointNode) -> JointNode:
        return msgspec.structs.replace(j, outputs=tuple(map(self.value, j.outputs)), work=self.work(j.work, j.outputs))

    def parameter(self, p: Parameter) -> Parameter:
        return msgspec.structs.replace(p, dtype=self.dtype, size_bytes=p.size_bytes // 2) if p.dtype == "float32" else p

    def storage(self, x: Storage, wide: set[str]) -> Storage:
        return msgspec.structs.replace(x, size_bytes=x.size_bytes // 2) if x.owner in wide else x
