"""Measured operator costs: every call of a forward graph and what it causes in backward, timed in place.

In place means: in graph order, on the tensors that the calls before have just made, with one thread, so that caches and memory are as in
a real step; a call measured alone and hot is 3-17 % too fast. Time is the thread's CPU time, which other programs on the machine
change little.

- Forward: each call between two readings of the clock.
- Backward: the autograd engine runs as it always does, and a hook before every autograd node reads the clock, so a node's time includes
  adding its gradients to those that others have left. Nodes belong to the call that made them.
- Neither includes what one call costs outside the operator, and both include the clock's own cost. The difference is measured on
  chains of the smallest operator there is (`dispatch_overhead`) and added per call.

Not covered: memory held by several micro-batches in flight; `meshwright.run.calibrate.rank_times` times whole steps in that state.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...capture.work import tensors_in
from ...cost import Priced
from ..steps.split_backward import input_gradients
from .operator_times import OperatorTime, OperatorTimes, call_key

__all__ = ["DispatchOverhead", "TracedLike", "dispatch_overhead", "measure_graph", "measure_weight_shares", "measured_total_s", "quiet_single_thread"]

Pair = tuple[Priced, Priced]
Result = TypeVar("Result")
_clock = time.thread_time
CHAIN_CALLS = 400  # in one chain, over which the cost of a call is averaged: it is too short to be timed alone


class TracedLike(Protocol):
    """What is used of `meshwright.capture.TracedForward`, traced on a real device."""

    @property
    def graph_module(self) -> fx.GraphModule: ...
    @property
    def placeholders(self) -> tuple[str, ...]: ...
    def value(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class DispatchOverhead:
    """Seconds to add per call to a time taken in place; negative when the clock costs more than the call's way to the operator."""

    forward_s: float
    backward_s: float


@contextmanager
def quiet_single_thread() -> Iterator[None]:
    """One intra-op thread and no garbage collection inside; both are put back."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


@cache
def dispatch_overhead() -> DispatchOverhead:
    """Measured once per process on chains of one-element operators, in eager mode and with the clocks of `measure_graph`."""

    def chain(x: Any, *, timed: bool) -> tuple[Any, float]:
        inside = 0.0
        begin = _clock()
        for _ in range(CHAIN_CALLS):
            if timed:
                a = _clock()
                x = mul(x, one)
                inside += _clock() - a
            else:
                x = mul(x, one)
        return x, inside if timed else _clock() - begin

    mul, one = torch.ops.aten.mul.Tensor, torch.ones(1)
    leaf = torch.ones(1, requires_grad=True)
    samples: list[tuple[float, float]] = []
    with quiet_single_thread():
        for _ in range(9):
            out, eager_forward = chain(leaf, timed=False)
            begin = _clock()
            torch.autograd.grad(out, leaf)
            eager_backward = _clock() - begin
            out, inside = chain(leaf, timed=True)
            with _BackwardTimer() as timer:
                timer.own("chain", [out])
                timer.run([out], [leaf], [torch.ones(1)])
            samples.append(((eager_forward - inside) / CHAIN_CALLS, (eager_backward - sum(timer.seconds.values())) / CHAIN_CALLS))
    # Below-median samples are the undisturbed ones; the median of all is robust enough and does not favour either sign.
    return DispatchOverhead(*(statistics.median(column) for column in zip(*samples, strict=True)))


class _BackwardTimer:
    """Times autograd nodes where they run. `seconds` and `calls` are per owner; an owner is the forward call that made the node."""

    def __init__(self) -> None:
        self.owner: dict[Any, str] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._marks: list[tuple[str, float]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _BackwardTimer:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def own(self, name: str, outputs: Sequence[Any]) -> None:
        """Everything behind these tensors that nobody owns yet belongs to `name`."""
        todo = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in self.owner or node.name() == "torch::autograd::AccumulateGrad":
                continue
            self.owner[node] = name
            self._handles.append(node.register_prehook(self._mark(name)))
            todo.extend(n for n, _ in node.next_functions if n is not None)

    def _mark(self, name: str) -> Callable[[Any], None]:
        marks = self._marks

        def mark(_: Any) -> None:
            marks.append((name, _clock()))

        return mark

    def run(self, outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        return self.timed(lambda: torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))

    def timed(self, backward: Callable[[], Result]) -> Result:
        """What `backward` gives, which runs autograd."""
        self._marks.clear()
        found = backward()
        end = _clock()
        for (name, start), (_, stop) in zip(self._marks, [*self._marks[1:], ("", end)], strict=True):
            self.seconds[name] += stop - start
            self.calls[name] += 1
        return found


@dataclass
class _Pass:
    keys: dict[str, str]
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    backward_calls: dict[str, int]
    weights_s: dict[str, float] = field(default_factory=dict)


def _run(traced: TracedLike, *, backward: bool, in_two: bool = False) -> _Pass:
    """One forward and backward pass with a clock around every call; `backward=False` only collects keys.

    `in_two`: first the gradients of what calls made from parameters alone (`backward_s`), then those of the parameters (`weights_s`).
    """
    values: dict[fx.Node, Any] = {}
    last_use = _last_uses(traced.graph_module.graph)
    done = _Pass({}, {}, {}, {})
    names = iter(traced.placeholders)
    leaves: list[Any] = []
    first: list[GradientEdge] = []  # differentiable results that need no other one
    with _BackwardTimer() as timer, torch.set_grad_enabled(True):
        result: Any = None
        for node in traced.graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = _leaf(traced.value(next(names)), leaves)
            elif node.op == "output":
                result = fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                target = _target(traced.graph_module, node)
                args = fx.node.map_arg(node.args, values.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
                done.keys[node.name] = call_key(str(node.target), args, kwargs)
                begin = _clock()
                out = target(*args, **kwargs)
                done.forward_s[node.name] = _clock() - begin
                values[node] = out
                if in_two and all(x.is_leaf for x in tensors_in((args, kwargs)) if x.requires_grad):
                    first += [get_gradient_edge(x) for x in tensors_in(out) if x.requires_grad]
                if backward:
                    timer.own(node.name, out if isinstance(out, (tuple, list)) else [out])
                del out, args, kwargs
            for dead in last_use.get(node, ()):  # free as eager code would, so that the allocator works as in a real step
                del values[dead]
        if backward and leaves and result[0].requires_grad:
            one = torch.ones_like(result[0])
            if in_two:
                end = get_gradient_edge(result[0])
                _, left = timer.timed(lambda: input_gradients([end], [one], first))
                timer.seconds, spine = defaultdict(float), timer.seconds
                timer.timed(left.run)
                return replace(done, backward_s=spine, weights_s=timer.seconds)
            timer.run([result[0]], leaves, [one])
        done.backward_s, done.backward_calls = timer.seconds, timer.calls
    return done


def _leaf(tensor: torch.Tensor, leaves: list[Any]) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    leaves.append(leaf)
    return leaf


def _target(module: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_function":
        called: Callable[..., Any] = node.target
        return called
    if node.op == "get_attr":
        value = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return lambda: value
    submodule: Callable[..., Any] = module.get_submodule(str(node.target))
    return submodule


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for value, user in last.items():
        if value.op != "output":
            found[user].append(value)
    return found


def measure_graph(traced: TracedLike, *, repeats: int, warmup: int = 2, cache: OperatorTimes | None = None) -> dict[str, Pair]:
    """(forward, backward) price of every call of the graph, by node name, dispatch overhead included; evidence "measured".

    Runs `warmup + repeats` steps, unless `cache` knows every call. Medians over repeats, then means over calls with equal keys, so
    that sums are kept. The graph must be traced on a real device.
    """
    cache = OperatorTimes() if cache is None else cache
    with quiet_single_thread():
        keys = _run(traced, backward=False).keys
        if any(key not in cache for key in keys.values()):
            for _ in range(warmup):
                _run(traced, backward=True)
            cache.update(_summary(keys, [_run(traced, backward=True) for _ in range(repeats)]))
            cache.save()
    overhead = dispatch_overhead()
    return {name: _priced(cache[key], overhead) for name, key in keys.items()}


def measure_weight_shares(traced: TracedLike, *, repeats: int = 3, warmup: int = 1) -> dict[str, float]:
    """What share of a call's backward is for its parameters, of the calls that others' results reach too, by node name.

    Medians over backward passes in two parts; what the second part's own starts of autograd cost is in it, as it is when it runs.
    """
    with quiet_single_thread():
        for _ in range(warmup):
            _run(traced, backward=True, in_two=True)
        passes = [_run(traced, backward=True, in_two=True) for _ in range(repeats)]
    found = {}
    for name in passes[0].weights_s:
        on, later = (statistics.median(getattr(p, part).get(name, 0.0) for p in passes) for part in ("backward_s", "weights_s"))
        if on > 0 and later > 0:
            found[name] = later / (on + later)
    return found


def _summary(keys: Mapping[str, str], passes: Sequence[_Pass]) -> dict[str, OperatorTime]:
    by_key: dict[str, list[OperatorTime]] = defaultdict(list)
    for name, key in keys.items():
        by_key[key].append(
            OperatorTime(
                statistics.median(p.forward_s[name] for p in passes),
                statistics.median(p.backward_s.get(name, 0.0) for p in passes),
                statistics.median_low(p.backward_calls.get(name, 0) for p in passes),
            )
        )
    return {
        key: OperatorTime(
            statistics.fmean(t.forward_s for t in times), statistics.fmean(t.backward_s for t in times), max(t.backward_calls for t in times)
        )
        for key, times in by_key.items()
    }


def _priced(time_s: OperatorTime, overhead: DispatchOverhead) -> Pair:
    forward = max(0.0, time_s.forward_s + overhead.forward_s)
    backward = max(0.0, time_s.backward_s + overhead.backward_s * time_s.backward_calls)
    return Priced(forward, "measured", forward), Priced(backward, "measured", backward)


def measured_total_s(prices: Mapping[str, Pair]) -> tuple[float, float]:
    """Sums over all calls: (forward, backward) CPU seconds of one step."""
    return sum(f.cpu_s for f, _ in prices.values()), sum(b.cpu_s for _, b in prices.values())
