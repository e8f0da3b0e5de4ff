"""Every use of torch's private interfaces, in one place, so that a new torch release breaks one file.

Written against torch 2.13; `torch.export` and `torch.fx` are public and used directly elsewhere.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

__all__ = [
    "DispatchRecorder", "FakeTensorMode", "as_if_exported", "autocast_kernel",
    "below_autocast", "calls_untraced", "checkpoints_run_plainly", "constant_spec",
    "custom_partitioner", "dispatch_mode", "export_as_called", "fake_attributes", "fake_like", "fake_mode", "flat_tree", "functorch_block",
    "global_backward_hooks", "held_weakly", "inductor_partitioner", "joint_graph", "make_fx_graph", "mode_of", "noting_places",
    "partition_saving", "register_constants", "replaced_autocast", "run_backward", "sac_tools", "storage_key", "torch_partition", "traced_below",
    "uncompiled_graphs", "without_hooks_where_refused",
]  # fmt: skip


def _fake_tensor_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode as mode

    return mode


FakeTensorMode = _fake_tensor_mode()


def custom_partitioner() -> Any:
    """The base class of partitioners for Inductor (whose import takes a second)."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as base

    return base


@contextlib.contextmanager
def inductor_partitioner(partitioner: Any) -> Iterator[None]:
    """While it lasts, Inductor lets `partitioner` cut joint graphs into forward and backward."""
    import torch._inductor.config as config

    with config.patch(custom_partitioner_fn=partitioner):
        yield


def fake_mode() -> Any:
    """A fresh mode in which tensors have shapes and storages but no memory. Real tensors met on the way are treated as fakes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(mode: Any, x: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """A fake of a meta (or real) tensor on `device`, with its shape, strides and dtype."""
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def storage_key(x: torch.Tensor) -> int:
    """Equal for two tensors, fake or real, exactly if they share their storage (while both are alive)."""
    return int(x.untyped_storage()._cdata)


def uncompiled_graphs() -> contextlib.AbstractContextManager[None]:
    """While it lasts, tracing's many intermediate graph modules are turned into Python code at their first call only, which most never see."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)  # type: ignore[no-any-return]


@contextlib.contextmanager
def noting_places(noted: bool) -> Iterator[None]:
    """Whether, while it lasts, tracing notes at every call where in the Python source it was made, also below a function that is no module's forward.
    The deeper the caller's stack, the longer that takes; a seventh of an export under pytest. Torch 2.11 cannot leave it out."""
    config: Any = getattr(torch.fx, "config", None)
    if not hasattr(config, "do_not_emit_stack_traces"):
        yield
        return
    tracer: Any = torch.fx.proxy.TracerBase
    before, chosen = config.do_not_emit_stack_traces, tracer._filter_traceback_frames

    def below_forward(self: Any, frames: Any) -> Any:
        self._record_forward_stack_traces_only = False  # not of frames that are called `forward` alone
        return chosen(self, frames)

    config.do_not_emit_stack_traces, tracer._filter_traceback_frames = not noted, below_forward
    try:
        yield
    finally:
        config.do_not_emit_stack_traces, tracer._filter_traceback_frames = before, chosen


@contextlib.contextmanager
def calls_untraced() -> Iterator[None]:
    """While it lasts, a tracer that is at work is not told of calls of modules: it counts them, and loses count where one fails."""
    from torch.fx._symbolic_trace import _orig_module_call as plain

    traced = nn.Module.__call__
    nn.Module.__call__ = plain
    try:
        yield
    finally:
        nn.Module.__call__ = traced


def without_hooks_where_refused(owner: Any, function: Callable[[], Any]) -> Any:
    """What `function` returns. Where it refuses to run under hooks on saved tensors (`torch.func.grad` does), it is run without them, from the same
    random state, and `owner`, an object with attributes, remembers that."""
    if not getattr(owner, "refuses_hooks", False):
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            return function()
        drawn = torch.get_rng_state()
        try:
            return function()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
        torch.set_rng_state(drawn)
        owner.refuses_hooks = True
    hooks: list[Any] = []
    while (hook := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(hook)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        return function()
    finally:
        for hook in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*hook)


def run_backward(
    edges: Sequence[Any], gradients: Sequence[torch.Tensor], wanted: Sequence[Any] = (), *, accumulate: bool = True, keep: bool = False
) -> Sequence[Any]:
    """`torch.autograd.backward` straight into the engine; with `accumulate` off `grad`, of the edges `wanted` (None: not reached).

    wanted: of a backward, the leaves it is for (none: all). keep: the graph may be run through again. The public functions first check in Python what
    the engine checks again: as much time as the engine takes for a small graph, and twice that where a processor comes from other work.
    """
    engine = torch.autograd.Variable._execution_engine
    found: Sequence[Any] = engine.run_backward(tuple(edges), tuple(gradients), keep, False, tuple(wanted), True, accumulate_grad=accumulate)
    return found


@contextlib.contextmanager
def joint_graph(module: nn.Module, inputs: tuple[Any, ...]) -> Iterator[Any]:
    """AOTAutograd's forward-and-backward graph of `module` (returns a scalar loss), with node metadata kept."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack, torch.fx.traceback.preserve_node_meta():
        yield aot_export_joint_with_descriptors(stack, module, inputs)


def make_fx_graph(function: Callable[..., Any], inputs: list[Any]) -> torch.fx.Graph:
    """The ATen calls of `function(*inputs)` on fake inputs, with their values in `meta["val"]`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, _allow_non_fake_inputs=True)(*inputs).graph


def dispatch_mode() -> Any:
    """The class of modes that see every ATen call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


class DispatchRecorder(dispatch_mode()):  # type: ignore[misc]
    """Calls `before(operator)` before and `seen(operator, args, kwargs, result)` after every ATen call inside it, backward included."""

    def __init__(self, seen: Callable[[Any, Any, Any, Any], None], before: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.seen, self.before = seen, before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.before is not None:
            self.before(func)
        result = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, result)
        return result


def fake_attributes(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces, in place, every parameter, buffer and plain tensor attribute of `module` by `convert(it)`, ties kept."""
    memo: dict[int, torch.Tensor] = {}

    def once(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in memo:
            new = convert(x)
            if isinstance(x, nn.Parameter):
                new = nn.Parameter(new, requires_grad=x.requires_grad)
            memo[id(x)] = new
        return memo[id(x)]

    keep: list[torch.Tensor] = []  # the originals stay alive, so that an id names one tensor only
    for sub in module.modules():
        for table in (sub._parameters, sub._buffers, sub.__dict__):
            for name, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    keep.append(value)
                    table[name] = once(value)


def register_constants(module: nn.Module, mode: Any) -> None:
    """Makes plain tensor attributes of `module` buffers, and fake ones: AOTAutograd takes parameters and buffers only.

    Constants made in forward come out of export as such attributes, as real tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    memo: dict[int, torch.Tensor] = {}
    for sub in module.modules():
        for name, value in list(sub.__dict__.items()):
            if isinstance(value, torch.Tensor):
                del sub.__dict__[name]
                memo.setdefault(id(value), value if isinstance(value, FakeTensor) else fake_like(mode, value))
                sub.register_buffer(name, memo[id(value)], persistent=False)
        for name, value in list(sub._buffers.items()):
            if value is not None and not isinstance(value, FakeTensor):
                sub._buffers[name] = fake_like(mode, value)


def torch_partition(
    joint: torch.fx.GraphModule, *, kind: str, budget: float, solver: str, forward_outputs: int, static_inputs: list[int]
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward graph as torch's partitioners cut them: `default`, or the minimum cut at an activation memory budget."""
    from torch._functorch import config, partitioners

    cut = partitioners.default_partition if kind == "default" else partitioners.min_cut_rematerialization_partition
    with config.patch(cse=False, activation_memory_budget=budget, activation_memory_budget_solver=solver):
        return cut(joint, None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=static_inputs)  # type: ignore[no-any-return]


def partition_saving(
    choose: Callable[[torch.fx.Graph], list[torch.fx.Node]], joint: torch.fx.GraphModule, inputs: Any, **given: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """torch's minimum-cut partitioner with the one decision replaced: `choose(joint graph)` gives the nodes that are saved.

    Random operators, effects, collectives and the order of backward are treated as torch treats them.
    """
    from torch._functorch import partitioners

    def chosen(graph: torch.fx.Graph, node_info: Any, memory_budget: float = 1) -> list[torch.fx.Node]:
        return choose(graph)

    with patch.object(partitioners, "choose_saved_values_set", chosen):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **given)  # type: ignore[no-any-return]


def sac_tools() -> Any:
    """`parse_module_info`, `get_peak_memory_runtime_baseline`, `sac_milp`, `get_optimal_checkpointing_policy_per_module` and `SACStats`.

    Raises: ImportError without PuLP.
    """
    from torch.distributed._tools import ilp_utils, sac_estimator, sac_ilp

    sac_ilp.logger.setLevel("CRITICAL")  # that it finds no solution is an answer here
    return SimpleNamespace(
        parse_module_info=ilp_utils.parse_module_info, get_peak_memory_runtime_baseline=ilp_utils.get_peak_memory_runtime_baseline,
        sac_milp=sac_ilp.sac_milp, SACStats=sac_estimator.SACStats,
        get_optimal_checkpointing_policy_per_module=sac_ilp.get_optimal_checkpointing_policy_per_module,
    )  # fmt: skip


@contextlib.contextmanager
def export_as_called() -> Iterator[None]:
    """While it lasts, torch.export leaves changes of the gradient mode and of autocast as calls where they were made.

    Otherwise it moves what lies between them into submodules, forgets one kind inside the other, and drops what has no result.
    """
    from torch._export.passes import replace_autocast_with_hop_pass as of_autocast
    from torch._export.passes import replace_set_grad_with_hop_pass as of_gradients

    def as_it_is(module: Any, signature: Any) -> tuple[Any, Any]:
        return module, signature

    autocast = patch.object(of_autocast, "replace_autocast_with_hop_pass", as_it_is)
    with autocast, patch.object(of_gradients, "replace_set_grad_with_hop_pass", as_it_is):
        yield


def as_if_exported() -> contextlib.AbstractContextManager[Any]:
    """While it lasts, code that asks is told that it is exported."""
    return patch.multiple(torch.compiler, _is_exporting_flag=True, _is_compiling_flag=True)


def mode_of(tensors: Sequence[torch.Tensor]) -> Any:
    """The fake mode that the fakes among these tensors live in, or None."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(tensors))


def constant_spec(name: str) -> Any:
    """What an exported program's signature says of a constant tensor that the placeholder `name` stands for."""
    from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

    return InputSpec(kind=InputKind.CONSTANT_TENSOR, arg=TensorArgument(name=name), target=name, persistent=None)


def replaced_autocast(kernels: Mapping[str, Callable[..., Any]]) -> Any:
    """A library whose kernels stand in the place of all that processors' autocast has, by operator and overload of `aten`, until its `_destroy()`."""
    library = torch.library.Library("aten", "IMPL")
    theirs = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    plain = [n.removeprefix("aten::") for n in theirs if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCPU")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for name in plain:
            if name not in kernels:
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutocastCPU")
    return library


def below_autocast(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The call as autocast hands it on."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return operator(*args, **kwargs)


def autocast_kernel(target: Any, device: str) -> bool:
    """Whether autocast has a rule for the operator itself, rather than for what it is made of."""
    schema = target._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device.upper()}"))


def functorch_block(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The calls of a `vmap` that begins with the first of `nodes`, to its end; empty if none begins there."""

    def called(n: torch.fx.Node) -> str:
        return str(getattr(n.target, "__name__", "")) if str(getattr(n.target, "__module__", "")).startswith("torch._functorch") else ""

    first = nodes[0] if nodes[0].op == "call_function" else None
    if first is None or not called(first):
        return []
    depth = 0
    for i, n in enumerate(nodes):
        if n.op == "output":
            break
        depth += called(n).endswith("_increment_nesting")
        if called(n).endswith("_decrement_nesting"):
            depth -= 1
            if depth == 0:
                return list(nodes[: i + 1])
    return []


def traced_below(root: nn.Module, graph: torch.fx.Graph, inputs: Sequence[torch.Tensor], mode: Any) -> torch.fx.GraphModule:
    """The ATen calls that a graph comes to when it is run on these fakes, whatever it calls."""
    from torch.fx.experimental.proxy_tensor import make_fx

    module = torch.fx.GraphModule(root, graph)

    def run(*values: Any) -> Any:
        return torch.fx.Interpreter(module).run(*values)

    with mode or contextlib.nullcontext():
        return make_fx(run, _allow_non_fake_inputs=True)(*inputs)


def global_backward_hooks() -> list[Any]:
    """Hooks that are registered on the backward pass of all modules of the process."""
    module = torch.nn.modules.module
    return [*module._global_backward_hooks.values(), *module._global_backward_pre_hooks.values()]


def flat_tree(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of nested containers (those that torch knows, packages' own among them), and what puts such leaves together again (`unflatten`)."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(tree)
    return leaves, SimpleNamespace(unflatten=lambda values: tree_unflatten(values, spec))


def held_weakly() -> Any:
    """A dictionary by identity of tensors."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


@contextlib.contextmanager
def checkpoints_run_plainly() -> Iterator[None]:
    """While it lasts, re-entrant activation checkpoints just run their function, with gradients exactly where they would have them."""
    from torch.utils.checkpoint import CheckpointFunction

    def plain(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        leads = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        with contextlib.nullcontext() if leads else torch.no_grad():
            return function(*args)

    with patch.object(CheckpointFunction, "apply", plain):
        yield
