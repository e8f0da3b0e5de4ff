"""Writes out changes in place that later calls see only through memory: what a graph says by order alone, a cut of it would lose.

`y = a(x); y[:, 0] = 1; b(y)` is recorded as a view of `y` that is changed, and `b(y)` does not read the result. Here the change makes a new value,
put into a new value of the whole (`slice_scatter`, `select_scatter`, ...), and later calls read that. The values and gradients are those of the calls
in place. Changes whose results alone are read (`relu_` in a chain) stay as they are, and so do those of parameters, buffers and inputs.
Also: a constant made from Python values needs no `detach_`, and dropout in place is dropout, so that it draws the same bits wherever it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .torch_private import storage_key

__all__ = ["changed_parameter", "written_out"]

aten = torch.ops.aten
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default, aten.diagonal.default: aten.diagonal_scatter.default
}  # fmt: skip
_DROPOUTS = ("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_")


def written_out(graph: fx.Graph) -> bool:
    """Rewrites the graph in place; whether anything changed."""
    changed = False
    for n in list(graph.nodes):
        if n.target is aten.detach_.default and getattr(n.args[0], "target", None) is aten.lift_fresh_copy.default:
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)
            changed = True
        elif n.op == "call_function" and (name := _in_place_name(n)) in _DROPOUTS and len(n.args[0].users) == 1:
            n.target = _functional(n)
            changed |= bool(name)
    groups: dict[int, list[fx.Node]] = {}
    for n in graph.nodes:
        val = n.meta.get("val")
        if n.op in ("placeholder", "call_function") and isinstance(val, torch.Tensor) and val.layout == torch.strided:
            groups.setdefault(storage_key(val), []).append(n)
    written = {x for n in graph.nodes for x in _written(n)}
    for group in groups.values():
        if len(group) > 1 and group[0].op == "call_function" and not written.isdisjoint(group) and _by_order_alone(graph, group):
            changed |= _Rewrite(graph, group).run()
    if changed:
        graph.lint()
    return changed


def changed_parameter(exported: Any) -> tuple[str, fx.Node] | None:
    """The first parameter that a call changes in place, and the call: (its name in the program's state, node)."""
    names = {s.arg.name: s.target for s in exported.graph_signature.input_specs if s.kind.name == "PARAMETER"}
    held = {storage_key(n.meta["val"]): names[n.name] for n in exported.graph.nodes if n.op == "placeholder" and n.name in names}
    for n in exported.graph.nodes:
        for x in _written(n):
            if isinstance(val := x.meta.get("val"), torch.Tensor) and val.layout == torch.strided and storage_key(val) in held:
                return held[storage_key(val)], n
    return None


def _written(n: fx.Node) -> list[fx.Node]:
    """Operands that the call changes."""
    schema = getattr(n.target, "_schema", None)
    if n.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
            found += [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, fx.Node)]
    return found


def _by_order_alone(graph: fx.Graph, group: Sequence[fx.Node]) -> bool:
    """Whether some call reads what another changed before it, without reading from that other."""
    members, stale = set(group), set[fx.Node]()
    known: set[fx.Node] = set()
    for n in graph.nodes:
        if any(x in stale for x in n.all_input_nodes):
            return True
        if any(x in members for x in _written(n)):
            stale = set(known)
        if n in members:
            known.add(n)
    return False


def _in_place_name(n: fx.Node) -> str:
    schema = getattr(n.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else ""
    return name if name.endswith("_") and not name.endswith("__") and _written(n) == [n.args[0]] else ""


def _functional(n: fx.Node) -> Any:
    """The operator that makes a new tensor instead, or None."""
    name = _in_place_name(n)
    packet = getattr(aten, name[:-1], None) if name and n.target.namespace == "aten" else None
    return getattr(packet, n.target._overloadname, None) if packet is not None else None


@dataclass
class _Rewrite:
    """One storage. `now`: the present value of every tensor in it; one that is missing is made again from its parent's."""

    graph: fx.Graph
    group: Sequence[fx.Node]
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> bool:
        if not self.possible():
            return False
        members = set(self.group)
        nodes = list(self.graph.nodes)
        for n in nodes[nodes.index(self.group[0]) :]:
            if n is self.group[0]:
                self.now[n] = n
                continue
            with self.graph.inserting_before(n):
                for x in n.all_input_nodes:
                    if x in members and (present := self.present(x)) is not x:
                        n.replace_input_with(x, present)
                if n in self.parent and _in_place_name(n):
                    self.change(n)
                elif n in members:
                    self.now[n] = n
        for n in reversed(nodes):
            if n in self.parent and _in_place_name(n):
                self.graph.erase_node(n)
        return True

    def possible(self) -> bool:
        base = self.group[0]
        for n in self.group[1:]:
            parents = [x for x in n.all_input_nodes if x in self.group]
            name = _in_place_name(n)
            if not parents or n.target in (aten.detach.default, aten.detach_.default) or (name and _functional(n) is None):
                return False
            if not name and n.target not in _SCATTERS and n.target not in (aten.transpose.int, aten.permute.default) and not _reshaped(n, parents[0]):
                return False
            self.parent[n] = parents[0]
        others = [n for n in self.graph.nodes if any(x in self.parent or x is base for x in _written(n))]
        return all(n in self.parent and _in_place_name(n) for n in others)

    def present(self, x: fx.Node) -> fx.Node:
        if x not in self.now:
            above = self.present(self.parent[x])
            self.now[x] = above if _in_place_name(x) else self.call(x.target, (above, *x.args[1:]), x.kwargs, x)
        return self.now[x]

    def change(self, n: fx.Node) -> None:
        """`n` as a call that makes a new value of what it changes, put into a new value of the whole."""
        target, base = self.parent[n], self.group[0]
        new = self.copied(n) if n.target is aten.copy_.default else self.call(_functional(n), n.args, n.kwargs, n)
        root = target
        while _in_place_name(root) and root in self.parent:
            root = self.parent[root]
        whole = self.put(new, root, n)
        self.now = {base: whole, root: new, target: new, n: new}

    def copied(self, n: fx.Node) -> fx.Node:
        """What `copy_` makes of its source; `aten.copy` has no gradient."""
        into, source = n.args[0].meta["val"], n.args[1]
        new: fx.Node = source
        if source.meta["val"].dtype != into.dtype:
            new = self.call(aten.to.dtype, (new, into.dtype), {}, n)
        if source.meta["val"].shape != into.shape:
            new = self.call(aten.expand.default, (new, list(into.shape)), {}, n)
        return self.call(aten.clone.default, (new,), {}, n) if new is source else new

    def put(self, new: fx.Node, view: fx.Node, like: fx.Node) -> fx.Node:
        """The base with `new` where `view` lies in it: put into one view after the other."""
        while view is not self.group[0]:
            above = self.parent[view]
            if not _in_place_name(view):
                new = self.into(above, new, view, like)
            view = above
        return new

    def into(self, above: fx.Node, new: fx.Node, view: fx.Node, like: fx.Node) -> fx.Node:
        shape = list(above.meta["val"].shape)
        if view.target in _SCATTERS:
            return self.call(_SCATTERS[view.target], (self.present(above), new, *view.args[1:]), view.kwargs, like)
        if view.target is aten.transpose.int:
            return self.call(view.target, (new, *view.args[1:]), {}, like)
        if view.target is aten.permute.default:
            order = [d % len(shape) for d in view.args[1]]
            return self.call(view.target, (new, [order.index(d) for d in range(len(shape))]), {}, like)
        return self.call(aten.reshape.default, (new, shape), {}, like)

    def call(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, tuple(args), dict(kwargs))
        made.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace", "torch_fn")}
        given, named = fx.node.map_arg((tuple(args), dict(kwargs)), lambda x: x.meta["val"])
        made.meta["val"] = target(*given, **named)
        return made


def _reshaped(n: fx.Node, above: fx.Node) -> bool:
    """Whether `n` is a view of all elements of `above` in the same order: of another shape at most."""
    a, b = n.meta["val"], above.meta["val"]
    return bool(a.numel() == b.numel() and a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype)
