"""Buffers that forward gives another tensor: `self.mean = 0.9 * self.mean + ...`. The tensor that the module had is changed in place instead.

Whoever runs a module on tensors of its own (export, `functional_call`) puts back what the module had, and what was assigned is lost without a word.
So forward ends by copying it into the module's own tensor. In a graph that copy then goes up to the call that made the value, behind the last reader
of the old one: a cut of the graph leaves both in one place. Changes in place go down to whoever reads or changes the buffer next,
for the same reason: `mean.mul_(0.9)`, other calls, `mean.add_(...)` with a cut between them would change a copy the second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from meshwright.errors import Unsupported

from .torch_private import storage_key

__all__ = ["Held", "assigned_in_place", "changes_moved_down", "copies_moved_up", "held_buffers", "put_back"]

aten = torch.ops.aten
Held = list[tuple[nn.Module, str, torch.Tensor]]


def held_buffers(model: nn.Module) -> Held:
    return [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]


def put_back(held: Held) -> None:
    """Each module has the tensors that it had, with the values that forward gave it. Raises: Unsupported for one of another shape or type."""
    for module, name, before in held:
        now = module._buffers.get(name)
        if now is before or now is None:
            continue
        if now.shape != before.shape or now.dtype != before.dtype:
            code = getattr(type(module).forward, "__code__", None)
            raise Unsupported(
                f"forward gives the buffer {name!r} another form: {tuple(now.shape)} {now.dtype} for {tuple(before.shape)} {before.dtype}",
                where=f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(module).__name__,
                hint="register it in its final shape and fill it, or keep it outside of the module",
            )  # fmt: skip
        before.copy_(now.detach())
        module._buffers[name] = before


@contextlib.contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """Around a forward pass of `model`. Where that fails, the module has its tensors, as they are."""
    held = held_buffers(model)
    try:
        yield
        put_back(held)
    finally:
        for module, name, before in held:
            if module._buffers.get(name) is not None:
                module._buffers[name] = before


def copies_moved_up(graph: fx.Graph) -> bool:
    """Copies into placeholders stand behind their value and the last reader of what they overwrite; whether any moved."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    moved = False
    for copy in [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0].op == "placeholder"]:
        buffer, value = copy.args[0], copy.args[1]
        key = _storage(buffer)
        readers = [u for n in graph.nodes if n is buffer or _storage(n) == key for u in n.users if place[u] < place[copy]]
        alone = value.target is aten.detach.default and len(value.users) == 1 and not any(u is value for u in readers)
        source = value.args[0] if alone else value
        after = max([source, *readers], key=place.__getitem__)
        if place[copy] - place[after] <= (2 if alone else 1):
            continue
        for n in (value, copy) if alone else (copy,):
            after.append(n)
            n.meta = {**n.meta, **{k: source.meta[k] for k in ("nn_module_stack", "stack_trace") if k in source.meta}}
            after = n
        place = {n: i for i, n in enumerate(graph.nodes)}
        moved = True
    return moved


def changes_moved_down(graph: fx.Graph) -> bool:
    """Changes of placeholders in place stand before the next reader of what they changed; whether any moved. Draws of random numbers stay."""
    held = {_storage(n) for n in graph.nodes if n.op == "placeholder"}
    moved = False
    for n in reversed(list(graph.nodes)):
        if _storage(n) not in held or not _written(n) or torch.Tag.nondeterministic_seeded in n.target.tags:
            continue
        mine, read = _storage(n), {_storage(x) for x in n.all_input_nodes}
        after = n.next
        while after.op == "call_function" and mine not in map(_storage, after.all_input_nodes) and read.isdisjoint(_written(after)):
            after = after.next
        if after.op == "call_function" and after is not n.next:
            after.prepend(n)
            moved = True
    return moved


def _written(n: fx.Node) -> set[Any]:
    """Storages that a call changes in place."""
    schema = getattr(n.target, "_schema", None)
    given = zip(schema.arguments, n.args, strict=False) if n.op == "call_function" and schema is not None else ()
    return {_storage(x) for a, x in given if a.alias_info is not None and a.alias_info.is_write and isinstance(x, fx.Node)}


def _storage(n: fx.Node) -> Any:
    val = n.meta.get("val")
    return storage_key(val) if isinstance(val, torch.Tensor) and val.layout == torch.strided else n
