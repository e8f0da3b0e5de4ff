"""Makes an exported graph flat: one list of ATen calls, with the effect of the modes it was run in written out.

- `torch.no_grad` and the like: inside, tensors that lead to parameters are detached first, so nothing made there has a gradient, and what is changed
  in place there is changed;
- `torch.autocast`: the casts that autocast makes are calls of their own. They are found by running each operator on fakes with autocast on and off. A
  weight is cast once in the outermost region, as autocast's cache does it, so that its gradient is summed in the narrow type;
- `torch.vmap`, and calls of Python functions that tracing can look through: the block is traced again below them.

What is left (control flow by value, shapes that depend on values, calls of something that is no operator) comes back with the module it is in, so
that the module can be kept whole (`regions`). A graph without such things is not touched.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .torch_private import DispatchRecorder, autocast_kernel, constant_spec, functorch_block, mode_of, traced_below

__all__ = ["Left", "flatten", "plain_call"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Left:
    """A call that could not be made flat: why, and the metadata of its node (module path, place in the user's code)."""

    reason: str
    meta: dict[str, Any] = field(repr=False)


@dataclass
class _Cast:
    """What `torch.autocast` says where a call stands. `casts`: of weights, in the outermost region."""

    device: str
    dtype: torch.dtype
    enabled: bool
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node]

    def __call__(self) -> Any:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


def flatten(exported: Any) -> list[Left]:
    """Rewrites the graph of an exported program in place where it is not flat; returns what could not be."""
    _unread_sizes_removed(exported.graph)
    if all(plain_call(n) for n in exported.graph.nodes):
        return []
    made = _Flat(exported)
    made.run()
    return made.left


def plain_call(n: fx.Node) -> bool:
    """Whether a node is an input, the output, or a call of an operator that gives what has sizes."""
    if n.op != "call_function":
        return bool(n.op in ("placeholder", "output"))
    return _is_operator(n) and not _symbolic(n.meta.get("val"))


def _is_operator(n: fx.Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem


def _symbolic(value: Any) -> bool:
    """Whether a size depends on values."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(d, int) for d in value.shape)
    if isinstance(value, (tuple, list)):
        return any(map(_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _unread_sizes_removed(graph: fx.Graph) -> None:
    """Takes out values whose shape follows others where nothing reads them but what torch asserts of every size (`0 <= n <= most`)."""
    for n in [n for n in reversed(graph.nodes) if isinstance(n.meta.get("val"), torch.Tensor) and _symbolic(n.meta["val"])]:
        most = [x.meta["val"].numel() for x in n.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
        sizes = [u for u in n.users if u.target is aten.sym_size.int]
        bounds = [u for s in sizes for u in s.users]
        asserts = [u for b in bounds for u in b.users]
        trivial = all((b.target is operator.ge and b.args[1] == 0) or (b.target is operator.le and b.args[1] in most) for b in bounds)
        if trivial and not n.is_impure() and len(sizes) == len(n.users) and all(a.target is aten._assert_scalar.default for a in asserts):
            for x in (*asserts, *bounds, *sizes, n):
                graph.erase_node(x)


def _floating(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_floating, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class _Flat:
    def __init__(self, exported: Any) -> None:
        self.exported = exported
        self.graph = fx.Graph()
        self.left: list[Left] = []
        self.tracked: set[fx.Node] = set()  # nodes whose value leads to a parameter that is trained
        self.weights: set[fx.Node] = set()
        self.detached: dict[fx.Node, fx.Node] = {}
        vals = [n.meta.get("val") for n in exported.graph.nodes]
        self.mode = mode_of([v for v in vals if isinstance(v, torch.Tensor)])

    def run(self) -> None:
        nodes = list(self.exported.graph.nodes)
        env: dict[fx.Node, Any] = {}
        places = [n for n in nodes if n.op == "placeholder"]
        for n, spec in zip(places, self.exported.graph_signature.input_specs, strict=True):
            env[n] = self.graph.node_copy(n)
            if spec.kind.name == "PARAMETER" and self.exported.state_dict[spec.target].requires_grad:
                self.tracked.add(env[n])
                self.weights.add(env[n])
        results = self.emit(self.exported.graph_module, nodes, env, True, None)
        output = self.graph.output(results)
        output.meta = dict(self.exported.graph.output_node().meta)
        self.graph.lint()
        self.exported.graph_module.graph = self.graph
        self.exported.graph_module.recompile()

    def emit(self, module: fx.GraphModule, nodes: Sequence[fx.Node], env: dict[fx.Node, Any], grad: bool, cast: _Cast | None) -> Any:
        """Copies the nodes of `module`; `env`: what their values are here. Returns what its output is."""
        done: set[fx.Node] = set()
        outer = [cast]
        for i, n in enumerate(nodes):
            if n in done or n.op == "placeholder":
                continue
            if n.op == "output":
                return fx.node.map_arg(n.args[0], env.__getitem__)
            if n.op == "get_attr":
                env[n] = _attribute(module, str(n.target))
                if isinstance(env[n], torch.Tensor):
                    env[n] = self.constant(env[n])
            elif n.target is torch._C._set_grad_enabled:
                grad, self.detached = bool(n.args[0]), {}
            elif n.target is torch.amp.autocast_mode._enter_autocast:
                outer.append(cast)
                cast = _cast(n.args, cast)
            elif n.target is torch.amp.autocast_mode._exit_autocast:
                cast = outer.pop()
            elif block := functorch_block(nodes[i:]):
                done.update(block)
                self.again(module, block, env, grad, cast)
            elif _symbolic(n.meta.get("val")):
                self.leave(n, env, "a shape depends on values")
            elif not _is_operator(n):
                self.again(module, [n], env, grad, cast)
            elif cast is not None and cast.enabled and n.target is not operator.getitem:
                self.cast(module, n, env, grad, cast)
            else:
                env[n] = self.copy(n, env, grad)
        return None

    def copy(self, n: fx.Node, env: dict[fx.Node, Any], grad: bool, given: dict[fx.Node, Any] | None = None) -> Any:
        """One call. `given`: values that stand for some of its operands."""
        seen = {**env, **(given or {})}
        used = {x: seen[x] if grad else self.detach(seen[x]) for x in n.all_input_nodes}
        made: fx.Node = self.graph.node_copy(n, used.__getitem__)
        self.note(made, grad)
        changed = n.args[0] if n.args and _in_place(n) else None
        if not grad and isinstance(changed, fx.Node) and used[changed] is not seen[changed]:
            return seen[changed]  # changed without a gradient; what leads to it still does
        return made

    def note(self, made: fx.Node, grad: bool) -> None:
        leads = grad and made.target is not aten.detach.default and _floating(made.meta.get("val"))
        if leads and any(x in self.tracked for x in made.all_input_nodes):
            self.tracked.add(made)

    def detach(self, value: Any) -> Any:
        if not isinstance(value, fx.Node) or value not in self.tracked:
            return value
        if value not in self.detached:
            self.detached[value] = self.call(aten.detach.default, (value,), value)
        return self.detached[value]

    def call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """A call of ours, with the module path of `like`."""
        made = self.graph.call_function(target, args)
        made.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace", "torch_fn")}
        made.meta["val"] = target(*fx.node.map_arg(args, lambda x: x.meta["val"]))
        return made

    def constant(self, value: torch.Tensor) -> fx.Node:
        """A tensor that the graph holds, as one more placeholder."""
        places = [n for n in self.graph.nodes if n.op == "placeholder"]
        with self.graph.inserting_after(places[-1]) if places else contextlib.nullcontext():
            made: fx.Node = self.graph.placeholder(f"c_held_{len(places)}")
        made.meta["val"] = self.mode.from_tensor(value) if self.mode is not None else value
        self.exported.graph_signature.input_specs.append(constant_spec(made.name))
        self.exported.constants[made.name] = value
        return made

    def leave(self, n: fx.Node, env: dict[fx.Node, Any], reason: str) -> None:
        self.left.append(Left(reason, dict(n.meta)))
        env[n] = self.graph.create_node("call_function", operator.getitem, ((), 0), name=n.name)  # the graph is not used
        env[n].meta = dict(n.meta)

    def cast(self, module: fx.GraphModule, n: fx.Node, env: dict[fx.Node, Any], grad: bool, cast: _Cast) -> None:
        """One call under autocast, with its casts before it."""
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda x: x.meta["val"])
        if not autocast_kernel(n.target, cast.device):
            on, off = (_recorded(n.target, args, kwargs, c) for c in (cast, None))
            if [f for f, _, _ in on] == [f for f, _, _ in off]:
                env[n] = self.copy(n, env, grad)
            else:
                self.again(module, [n], env, grad, cast)
            return
        owner = {id(x.meta["val"]): x for x in n.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)}
        plain = _conversions(n.target, args, kwargs, None)
        wanted = [(owner[k], d) for k, d in _conversions(n.target, args, kwargs, cast) if k in owner and (k, d) not in plain]
        given: dict[fx.Node, Any] = {}
        for x, dtype in wanted:
            value = env[x] if grad else self.detach(env[x])
            key = (value, dtype)
            kept = cast.casts.get(key)
            if kept is None:
                kept = self.call(aten.to.dtype, (value, dtype), n)
                self.note(kept, grad)
                if value in self.weights and value.meta["val"].dtype == torch.float32 and dtype == cast.dtype:
                    cast.casts[key] = kept
            given[x] = kept
        env[n] = self.copy(n, env, grad, given)

    def again(self, module: fx.GraphModule, block: Sequence[fx.Node], env: dict[fx.Node, Any], grad: bool, cast: _Cast | None) -> None:
        """Traces the calls of `block` again, below whatever they call, and puts what is found in their place."""
        inside = set(block)
        inputs = [x for x in dict.fromkeys(y for n in block for y in n.all_input_nodes) if x not in inside]
        wanted = [n for n in block if any(u not in inside for u in n.users)]
        graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
        held: list[Any] = []
        places = [x for x in inputs if x.op != "get_attr" and isinstance(env[x], fx.Node)]
        for x in places:
            known[x] = graph.placeholder(x.name)
        for x in inputs:
            if x not in known:
                known[x] = graph.get_attr(f"held_{len(held)}")
                held.append(_attribute(module, str(x.target)) if x.op == "get_attr" else env[x])
        for n in block:
            known[n] = graph.node_copy(n, known.__getitem__)
        graph.output(tuple(known[n] for n in wanted))
        root = torch.nn.Module()
        for i, value in enumerate(held):
            setattr(root, f"held_{i}", value)
        try:
            with cast() if cast is not None else contextlib.nullcontext():
                found = traced_below(root, graph, [x.meta["val"] for x in places], self.mode)
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            for n in wanted or block[-1:]:
                self.leave(n, env, f"{type(error).__name__}: {reason}")
            return
        odd = next((n for n in found.graph.nodes if not plain_call(n) and not _held_tensor(found, n)), None)
        if odd is not None:
            for n in wanted or block[-1:]:
                self.leave(n, env, f"{odd.target} is no operator")
            return
        inner: dict[fx.Node, Any] = dict(zip((n for n in found.graph.nodes if n.op == "placeholder"), (env[x] for x in places), strict=True))
        meta = {k: v for k, v in block[-1].meta.items() if k in ("nn_module_stack", "stack_trace")}
        for n in found.graph.nodes:
            if n.op == "call_function":
                n.meta = {**meta, "val": n.meta.get("val")}
        results = self.emit(found, list(found.graph.nodes), inner, grad, None)
        env.update(zip(wanted, results, strict=True))


def _cast(said: Sequence[Any], outer: _Cast | None) -> _Cast:
    """Of the arguments (device, dtype, enabled, ...) with which autocast was entered."""
    device, dtype, enabled = said[:3]
    return _Cast(device, dtype or torch.get_autocast_dtype(device), bool(enabled), outer.casts if outer else {})


def _held_tensor(module: fx.GraphModule, n: fx.Node) -> bool:
    return n.op == "get_attr" and isinstance(_attribute(module, str(n.target)), torch.Tensor)


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _in_place(n: fx.Node) -> bool:
    schema = getattr(n.target, "_schema", None)
    first = schema.arguments[0] if schema is not None and schema.arguments else None
    return first is not None and first.alias_info is not None and bool(first.alias_info.is_write)


def _recorded(target: Any, args: Any, kwargs: Any, cast: _Cast | None) -> list[tuple[Any, Any, Any]]:
    """The ATen calls that running the operator comes to. Without casts it may not run: then those up to where it stops."""
    found: list[tuple[Any, Any, Any]] = []
    off = torch.autocast("cpu", enabled=False)
    stops = contextlib.suppress(RuntimeError) if cast is None else contextlib.nullcontext()
    with stops, torch.no_grad(), cast() if cast is not None else off, DispatchRecorder(lambda f, a, k, r: found.append((f, a, k))):
        target(*args, **kwargs)
    return found


def _conversions(target: Any, args: Any, kwargs: Any, cast: _Cast | None) -> list[tuple[int, torch.dtype]]:
    """(identity of the tensor, dtype) of every cast that running the operator makes."""
    found: Iterable[tuple[Any, Any, Any]] = _recorded(target, args, kwargs, cast)
    return [(id(a[0]), k["dtype"]) for f, a, k in found if f is aten._to_copy.default and k.get("dtype") is not None]
