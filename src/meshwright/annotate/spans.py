"""Modules that the trace itself names: our own spans (`module:PATH`) and the profiler's `nn.Module: Conv2d_0` slices (`with_modules`).

The profiler numbers instances per class, in the order in which they are first called. Which instance is which module of a tree is
settled by votes where operators are also aligned with a captured sequence, and otherwise by order: the instances first called under
one parent take that parent's children of their class in definition order.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import numpy as np

from ..trace.module_tree import MODULE_SPAN, ModuleNode, ModuleTree
from ..trace.trace import I32, Trace
from .slices import around

__all__ = ["ModuleSpans", "module_spans"]

_INSTANCE = re.compile(r"^nn\.Module: (.+)_(\d+)$")


class ModuleSpans(msgspec.Struct, frozen=True, kw_only=True):
    """`tree`: the given one, or what the spans tell. `module[i]`: the innermost module running at slice i, -1 outside all; a span is in itself."""

    tree: ModuleTree
    module: I32
    span: np.ndarray[tuple[int], np.dtype[np.bool_]]


def module_spans(trace: Trace, tree: ModuleTree | None, aligned: I32 | None = None) -> ModuleSpans | None:
    """None if the trace has no such slices. `aligned[i]`: module of slice i by other evidence, -1 where there is none."""
    own = np.array([n.startswith(MODULE_SPAN) for n in trace.names], bool)
    instance = np.array([_INSTANCE.match(n) is not None for n in trace.names], bool)
    if own.any():
        return _named(trace, trace.where_name(own) & ~trace.in_category("gpu_user_annotation"), tree)
    span = trace.where_name(instance)
    if not span.any():
        return None
    return _numbered(trace, span, tree, aligned)


def _filled(trace: Trace, span: np.ndarray[tuple[int], np.dtype[np.bool_]], module_of_name: np.ndarray[tuple[int], np.dtype[np.int32]]) -> I32:
    nearest = around(trace, span)
    at = np.where(span, np.arange(len(trace)), nearest)
    return np.where(at >= 0, module_of_name[trace.name[np.maximum(at, 0)]], -1).astype(np.int32)


def _named(trace: Trace, span: np.ndarray[tuple[int], np.dtype[np.bool_]], tree: ModuleTree | None) -> ModuleSpans:
    paths = {name.removeprefix(MODULE_SPAN): i for i, name in enumerate(trace.names) if name.startswith(MODULE_SPAN)}
    if tree is None:
        whole = {""} | {p[: m.start()] for p in paths for m in re.finditer(r"\.", p)} | set(paths)
        ordered = sorted(whole, key=lambda p: (p.split(".") if p else [], p))
        number = {p: i for i, p in enumerate(ordered)}
        nodes = [ModuleNode(path=p, kind="", parent=number[p.rpartition(".")[0]] if p else -1) for p in ordered]
        tree = ModuleTree(model="", modules=tuple(nodes))
    index = {m.path: i for i, m in enumerate(tree.modules)}
    module_of_name = np.full(len(trace.names), -1, np.int32)
    for path, name in paths.items():
        # A path that the tree lacks (a wrapper's own prefix, an older tree) is the nearest module around it that the tree has.
        known = path
        while known not in index:
            known = known.rpartition(".")[0]
        module_of_name[name] = index[known]
    return ModuleSpans(tree=tree, module=_filled(trace, span, module_of_name), span=span)


def _numbered(trace: Trace, span: np.ndarray[tuple[int], np.dtype[np.bool_]], tree: ModuleTree | None, aligned: I32 | None) -> ModuleSpans:
    rows = np.flatnonzero(span)
    parent_row = around(trace, span)
    order = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    first: dict[int, int] = {}
    for row in order.tolist():  # name -> the instance around its first call
        first.setdefault(int(trace.name[row]), int(trace.name[parent_row[row]]) if parent_row[row] >= 0 else -1)
    if tree is None:
        return _told(trace, span, first)
    votes: dict[int, Counter[int]] = {}
    if aligned is not None:
        labelled = np.flatnonzero((aligned >= 0) & (parent_row >= 0))
        for name, module in zip(trace.name[parent_row[labelled]].tolist(), aligned[labelled].tolist(), strict=True):
            votes.setdefault(name, Counter())[module] += 1
    children: dict[int, list[int]] = {}
    for i, module in enumerate(tree.modules):
        children.setdefault(module.parent, []).append(i)
    found, taken = {-1: -1}, set[int]()
    module_of_name = np.full(len(trace.names), -1, np.int32)
    for name, outer in first.items():
        kind = _kind(trace.names[name])
        inside = found.get(outer, -1)
        free = [m for m in _below(children, inside) if m not in taken and tree.modules[m].kind == kind]
        voted = [m for m, _ in votes.get(name, Counter()).most_common() if tree.modules[m].kind == kind and m not in taken]
        chosen = voted[0] if voted else free[0] if free else inside
        found[name] = chosen
        module_of_name[name] = chosen
        if chosen != inside:
            taken.add(chosen)
    return ModuleSpans(tree=tree, module=_filled(trace, span, module_of_name), span=span)


def _below(children: dict[int, list[int]], module: int) -> list[int]:
    """Children first, then their children: a container such as a ModuleList is never called itself."""
    level, found = children.get(module, []), []
    while level:
        found += level
        level = [c for m in level for c in children.get(m, ())]
    return found


def _kind(name: str) -> str:
    match = _INSTANCE.match(name)
    return match[1] if match else ""


def _told(trace: Trace, span: np.ndarray[tuple[int], np.dtype[np.bool_]], first: dict[int, int]) -> ModuleSpans:
    """A tree from the spans alone: instances named as the profiler names them, each under the instance around its first call."""
    nodes = [ModuleNode(path="", kind="", parent=-1)]
    number, module_of_name = {-1: 0}, np.full(len(trace.names), -1, np.int32)
    for name, outer in first.items():
        parent = number.get(outer, 0)
        own = trace.names[name].removeprefix("nn.Module: ")
        number[name] = len(nodes)
        module_of_name[name] = len(nodes)
        nodes.append(ModuleNode(path=f"{nodes[parent].path}.{own}".lstrip("."), kind=_kind(trace.names[name]), parent=parent))
    return ModuleSpans(tree=ModuleTree(model="", modules=tuple(nodes)), module=_filled(trace, span, module_of_name), span=span)
