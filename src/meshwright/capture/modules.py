"""The module tree of a real PyTorch module, the operators that one forward pass runs in each module, and spans that record modules in a trace."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.errors import CaptureError
from meshwright.trace.module_tree import MODULE_SPAN, CapturedOperator, ModuleNode, ModuleTree

from .resolve import build_model, user_code

__all__ = ["capture_modules", "module_spans", "module_tree", "named_capture"]


def named_capture(model: str, *, device: str = "cpu", seed: int = 0) -> ModuleTree:
    """The tree of the model that `module:function` builds, with its operators. On `device="meta"` nothing is computed and no memory is taken.

    Raises: UsageError, UnknownName, CaptureError, as for every command that builds a model.
    """
    source = build_model(model, device=device, seed=seed)
    with user_code(model, model.rpartition(":")[0]):
        inputs = source.inputs[:-1] or source.inputs
        args, keywords = (inputs, {}) if source.calling is None else source.calling.arguments(inputs)
        return capture_modules(source.module, args, model=model, keywords=keywords)


def module_tree(module: nn.Module, *, model: str = "") -> ModuleTree:
    """The modules alone, a module that stands in several places once, under its first path."""
    nodes: list[ModuleNode] = []
    number: dict[str, int] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        number[path] = len(nodes)
        mine = [name for name, p in part.named_parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in part.parameters(recurse=False)}
        parent = number[path.rpartition(".")[0]] if path else -1
        nodes.append(ModuleNode(path=path, kind=type(part).__name__, parent=parent, parameters=tuple(mine)))
    return ModuleTree(model=model or type(module).__name__, modules=tuple(nodes))


@contextlib.contextmanager
def module_spans(module: nn.Module, *, prefix: str = MODULE_SPAN) -> Iterator[None]:
    """While it lasts, every forward call of a module within `module` is a slice `prefix + path` of a running profiler's trace."""
    handles: list[Any] = []

    def enter(path: str, stack: list[Any]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            span = record_function(prefix + path)
            span.__enter__()
            stack.append(span)

        return hook

    def leave(stack: list[Any]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if stack:
                stack.pop().__exit__(None, None, None)

        return hook

    try:
        for path, part in module.named_modules():
            stack: list[Any] = []
            handles.append(part.register_forward_pre_hook(enter(path, stack), prepend=True))
            handles.append(part.register_forward_hook(leave(stack), always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def capture_modules(module: nn.Module, inputs: tuple[Any, ...], *, model: str = "", keywords: Mapping[str, Any] | None = None) -> ModuleTree:
    """The module's tree with the operators of one forward pass on `inputs`; buffers and random state are put back as they were.

    Raises: CaptureError if the forward pass fails.
    """
    tree = module_tree(module, model=model)
    number = {m.path: i for i, m in enumerate(tree.modules)}
    kept = {name: b.detach().clone() for name, b in module.named_buffers()}
    with torch.random.fork_rng(), module_spans(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                output = module(*inputs, **dict(keywords or {}))
        except Exception as error:
            raise CaptureError(f"the forward pass failed: {type(error).__name__}: {error}", where=tree.model) from error
    with torch.no_grad():
        for name, b in module.named_buffers():
            b.copy_(kept[name])
    owners = _owners(module, output, number)
    found: list[tuple[str, int, list[Any]]] = []
    events = [e for e in profiler.events() if not e.is_async and e.cpu_parent is None]
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        _collect(event, 0, number, found)
    # Operators note the number that the next autograd node will get; the last to note it is the one that made the node.
    maker = {e.sequence_nr: i for i, (_, _, inside) in enumerate(found) for e in inside if e.sequence_nr >= 0}
    made: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in found]
    for sequence, i in maker.items():
        made[i] += owners.get(sequence, ())
    operators = (
        CapturedOperator(name=name, module=mod, inner=tuple(str(e.name) for e in inside[1:]), owners=tuple(nodes))
        for (name, mod, inside), nodes in zip(found, made, strict=True)
    )
    return ModuleTree(model=tree.model, modules=tree.modules, operators=tuple(operators))


def _collect(event: Any, module: int, number: Mapping[str, int], out: list[tuple[str, int, list[Any]]]) -> None:
    """Append name, module and events of the outermost operators under `event`, which runs in `module`."""
    name = str(event.name)
    children = sorted(event.cpu_children, key=lambda e: (e.time_range.start, -e.time_range.end))
    if "::" in name and not name.startswith(MODULE_SPAN):
        out.append((name, module, [event, *_descendants(event)]))
        return
    inner = number.get(name.removeprefix(MODULE_SPAN), module) if name.startswith(MODULE_SPAN) else module
    for child in children:
        _collect(child, inner, number, out)


def _descendants(event: Any) -> list[Any]:
    found = []
    for child in sorted(event.cpu_children, key=lambda e: (e.time_range.start, -e.time_range.end)):
        found += [child, *_descendants(child)]
    return found


def _owners(module: nn.Module, output: Any, number: Mapping[str, int]) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    """Sequence number of an autograd node -> its name and the modules that own the parameters it hands gradients to."""
    owner: dict[int, int] = {}
    for path, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            owner.setdefault(id(parameter), number[path])
    found: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    waiting = [x.grad_fn for x in _tensors(output) if x.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        following = [n for n, _ in node.next_functions if n is not None]
        mine = tuple(owner[id(n.variable)] for n in following if hasattr(n, "variable") and id(n.variable) in owner)
        if mine:
            found.setdefault(int(node._sequence_nr()), []).append((node.name(), mine))
        fresh = [n for n in following if n not in seen and not hasattr(n, "variable")]
        seen.update(fresh)
        waiting += fresh
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
