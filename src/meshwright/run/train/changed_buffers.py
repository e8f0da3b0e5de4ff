"""Buffers that a module changes: as one call of the owner's module on the whole batch would.

A change that does not depend on samples (a counter, the vectors of spectral norm) is the same in every micro-batch. So each micro-batch begins with
the values of before the batch, and the batch changes them once. In evaluation mode a change that depends on samples is right where the whole batch is
one micro-batch, and refused elsewhere; in training that is statistics of the batch, which the gate looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...capture.regions import REGION
from ...errors import Unsupported
from ...plan.batch_statistics import normalises
from ...plan.plan import TrainingLayout
from ...plan.vocabulary import base_node
from ..steps.forward_graph import OPAQUE, ForwardGraph, ForwardNode, resolve

__all__ = ["buffers_once", "changed_buffers", "refuse_changed", "refuse_following", "unseen_buffers"]


def changed_buffers(graph: ForwardGraph) -> dict[str, tuple[str, bool]]:
    """By buffer: (the first call that changes it, whether what it is changed to depends on samples). Views of a buffer are followed. What happens
    inside of modules that are kept whole is not known here (`unseen_buffers`)."""
    lies_in: dict[str, str] = {}  # a view's buffer
    of_samples: set[str] = set()
    found: dict[str, tuple[str, bool]] = {}
    for n in graph.nodes:
        depends = any(v.startswith("input:") or v in of_samples or lies_in.get(v, v) in of_samples for v in n.inputs)
        for value, writes in _operands(n):
            buffer = lies_in.get(value, value if value.startswith("buffer:") else "")
            if buffer:
                lies_in[n.name] = buffer
            if buffer and writes:
                name, before = buffer.removeprefix("buffer:"), found.get(buffer.removeprefix("buffer:"))
                found[name] = (before[0] if before else n.name, depends or bool(before and before[1]))
                of_samples |= {buffer} if depends else set()
        of_samples |= {n.name} if depends else set()
    return found


def _operands(n: ForwardNode) -> Iterable[tuple[str, bool]]:
    """Values that the call's result lies in, or that it changes; and whether it does."""
    if n.target == OPAQUE or n.target == REGION:
        return
    schema = getattr(resolve(n.target), "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        given = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(given, dict) and "value" in given:
            yield str(given["value"]), bool(argument.alias_info.is_write)


def buffers_once(graph: ForwardGraph, layout: TrainingLayout) -> Mapping[str, tuple[str, ...]]:
    """By segment, the buffers that each micro-batch finds as they were. Not those of normalisations that follow the samples of each."""
    following = {graph.modules.get(n.name, "") for n in graph.nodes if normalises(n.target, n.args)}
    found = changed_buffers(graph).items() if layout.microbatches > 1 else ()
    changed = [b for b, (_, depends) in found if not depends and b.rpartition(".")[0] not in following]
    by_segment: dict[str, tuple[str, ...]] = {}
    for s in layout.segments:
        calls = {base_node(x) for x in s.nodes}
        if mine := tuple(b for b in changed if any(f"buffer:{b}" in n.inputs for n in graph.nodes if n.name in calls)):
            by_segment[s.key] = mine
    return by_segment


def refuse_following(graph: ForwardGraph, layout: TrainingLayout) -> None:
    """Raises: Unsupported where a buffer changes with the samples in evaluation mode, and micro-batches have some each."""
    for name, (call, depends) in changed_buffers(graph).items() if layout.all_microbatches > 1 else ():
        if depends:
            raise _refusal(name, graph.modules.get(call, ""))


def unseen_buffers(graph: ForwardGraph, layout: TrainingLayout) -> tuple[str, ...]:
    """Buffers that modules kept whole may change, where that would not be one change of the whole batch."""
    if layout.all_microbatches == 1:
        return ()
    held = [n for n in graph.nodes if n.target in (OPAQUE, REGION)]
    return tuple(dict.fromkeys(v.removeprefix("buffer:") for n in held for v in n.inputs if v.startswith("buffer:")))


def refuse_changed(before: Mapping[str, torch.Tensor], now: Mapping[str, Any]) -> None:
    """Puts back what modules kept whole have changed. Raises: Unsupported naming the first."""
    odd = [name for name, x in before.items() if not torch.equal(x, now[name])]
    for name in odd:
        now[name].copy_(before[name])
    if odd:
        raise _refusal(odd[0], "")


def _refusal(name: str, module: str) -> Unsupported:
    return Unsupported(
        f"in evaluation mode the model changes the buffer {name!r} by the samples that it sees, and here each micro-batch has some of them",
        where=module or name, hint="change it in training only (if self.training), or plan one micro-batch in all", data={"buffer": name},
    )  # fmt: skip
