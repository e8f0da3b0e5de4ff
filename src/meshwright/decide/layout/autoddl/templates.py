"""Known strategies as restrictions of the search space: what people would write by hand, each in its best form.

A template names, per mesh axis, which signatures operators may use. The best plan within it is found by the same exact search, so a template here is
never worse than the hand-written strategy of its name, and AutoDDL's space contains every template.
Source: data parallelism; Megatron-LM (column and row pairs, vocabulary-parallel embedding and loss); convolutions data-parallel and fully connected
layers tensor-parallel (Krizhevsky, "One weird trick", 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....errors import UnknownName
from ....graph.graph import operator_name
from .model import Choice, Model
from .network import Vertex
from .rules_matrix import MATRIX

__all__ = ["TEMPLATES", "allowed", "kinds_of"]

TEMPLATES = ("data", "megatron", "conv-dp+fc-tp", "data+megatron")

BATCHED = {"linear", "addmm", "mm", "conv1d", "conv2d", "conv3d", "batch_norm", "cross_entropy_loss", "scaled_dot_product_attention"}
TENSOR = {"linear", "addmm", "mm"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "batch_norm", "group_norm"}


def kinds_of(template: str, axes: int) -> tuple[str, ...] | None:
    """Template per axis, None if it is not defined on that many axes. Raises: UnknownName."""
    if template not in TEMPLATES:
        raise UnknownName(f"there is no template {template!r}", hint=f"there are: {', '.join(TEMPLATES)}")
    if template == "data+megatron":
        return ("data",) * (axes - 1) + ("megatron",) if axes > 1 else None
    return (template,) if axes == 1 else None


def allowed(model: Model, kinds: Sequence[str]) -> list[NDArray[np.bool_]]:
    """Per vertex, which choices the template has. Where it would leave none, all stay."""
    found = []
    for vertex, choices in zip(model.network.vertices, model.choices, strict=True):
        mask = np.array([all(_fits(vertex, c, axis, kind) for axis, kind in enumerate(kinds)) for c in choices])
        forced = np.array([all(_forced(vertex, c, axis, kind) for axis, kind in enumerate(kinds)) for c in choices])
        both = mask & forced
        found.append(both if both.any() else mask if mask.any() else np.ones(len(choices), dtype=bool))
    return found


def _forced(vertex: Vertex, choice: Choice, axis: int, kind: str) -> bool:
    """What the template prescribes where it can be had."""
    name = operator_name(vertex.node.target) if vertex.node is not None else ""
    weighted = vertex.node is not None and name in TENSOR and any(x.startswith("param:") for x in vertex.node.inputs)
    if kind != "data" and weighted and not choice.signatures[axis].divided:
        return False
    by_batch = kind == "data" or (kind == "conv-dp+fc-tp" and name in CONVOLUTIONS)
    if vertex.kind == "input":
        return choice.output[axis] == ("R" if kind == "megatron" else "S0")
    if vertex.kind == "param":
        return kind != "data" or choice.output[axis] == "R"
    return not by_batch or name not in BATCHED or choice.names[axis] == "data"


def _fits(vertex: Vertex, choice: Choice, axis: int, kind: str) -> bool:
    """What the template excludes."""
    if vertex.kind != "op" or vertex.node is None or kind == "data":
        return True
    name = operator_name(vertex.node.target)
    tensor_parallel = name in {*MATRIX, *BATCHED} if kind == "megatron" else name in TENSOR
    return not tensor_parallel or not (choice.names[axis] == "data" or choice.names[axis].startswith("rows"))
