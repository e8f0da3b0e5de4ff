"""Which module runs when, on one rank: marks between the calls of the compiled segments, forward and backward.

A segment's calls are cut into runs of one innermost module. A mark is written where a run begins; the run lasts until the next mark or the end
of the program step. Backward is exact without a hook per operator: autograd runs ready nodes in descending order of their creation, and whatever
made a node ready was created later, so the nodes of one run come one after another; a hook on the run's last node is where its backward begins
(parameters' gradients are added at once, inside it). Costs about 0.2 µs per forward mark and 3 µs per backward mark.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ...plan.vocabulary import base_node
from ...trace.module_tree import MODULE_SPAN
from ..executor.device_time import DeviceTime
from ..steps.forward_graph import ForwardNode
from .recording import ModuleRun

__all__ = ["ModuleClock", "ModuleMarks"]


class ModuleClock:
    """`runs`: what marks refer to; `which`, `times_s`: the marks since `take`, `perf_counter` seconds. `annotate`: also as profiler ranges.
    `rows`: by module, (rows that each expert got, choices of tokens) since `take_rows`.

    `times`: of the device that the modules run on, begun by whoever begins a step; without it the processor's clock.
    """

    def __init__(self, times: DeviceTime | None = None) -> None:
        self.times = times
        self.now: Callable[[], float] = time.perf_counter if times is None else times.now
        self.runs: list[ModuleRun] = []
        self.which, self.times_s = array("i"), array("d")
        self.rows: dict[str, tuple[torch.Tensor, int]] = {}
        self.annotate = False
        self._open: Any = None

    def begins(self, segment: str, module: str) -> tuple[Callable[[], None], Callable[[Any], None]]:
        """A new run: what to call before its first call, and with the result of its last differentiable one."""
        number = len(self.runs)
        self.runs += [ModuleRun(segment, module, False), ModuleRun(segment, module, True)]
        which, times, now = self.which, self.times_s, self.now

        def enter() -> None:
            which.append(number)
            times.append(now())
            if self.annotate:
                self._range(MODULE_SPAN + module)

        def backward(_: Any) -> None:
            which.append(number + 1)
            times.append(now())

        def leave(result: Any) -> None:
            made = result.grad_fn if isinstance(result, torch.Tensor) else None
            if made is not None:
                made.register_prehook(backward)

        return enter, leave

    def counted(self, module: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What to call with the numbers of rows [E] of a layer's experts and its tokens' choices; calls while a segment is traced count nothing."""

        def count(rows: torch.Tensor, choices: torch.Tensor) -> None:
            if type(rows) is torch.Tensor and not rows.is_meta:
                before, many = self.rows.get(module, (0, 0))
                self.rows[module] = before + rows, many + choices.numel()

        return count

    def take_rows(self) -> dict[str, tuple[list[int], int]]:
        """By module, rows of every expert so far and choices of tokens that found no place among them; and forget them."""
        found = {}
        for module, (rows, choices) in self.rows.items():
            each = rows.tolist()
            found[module] = each, choices - sum(each)
        self.rows.clear()
        return found

    def _range(self, name: str) -> None:
        self.close()
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()

    def close(self) -> None:
        """End the profiler range of the last run."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def take(self, zero: float) -> tuple[list[int], list[float]]:
        """The marks so far, seconds from `zero`, and forget them."""
        if self.times is not None:
            self.times.settle(self.times_s)
        found = list(self.which), [round(t - zero, 7) for t in self.times_s]
        del self.which[:], self.times_s[:]
        return found


class ModuleMarks:
    """Adds the clock's marks to the graph of one segment: where a run of calls of one module begins, and at its last differentiable result."""

    def __init__(self, clock: ModuleClock | None, modules: Mapping[str, str], segment: str, graph: fx.Graph) -> None:
        self.clock, self.modules, self.segment, self.graph = clock, modules, segment, graph
        self.module: str | None = None
        self.last: fx.Node | None = None
        self.leave: Callable[[Any], None] | None = None

    def before(self, node: ForwardNode) -> None:
        module = self.modules.get(base_node(node.name), self.module or "")
        if self.clock is None or module == self.module:
            return
        self._leave()
        enter, self.leave = self.clock.begins(self.segment, module)
        self.module = module
        self.graph.call_function(enter)

    def after(self, node: ForwardNode, made: fx.Node) -> None:
        info = node.outputs[0]
        if not node.many and info is not None and not info.dtype.startswith(("int", "uint", "bool")):
            self.last = made

    def _leave(self) -> None:
        if self.leave is not None and self.last is not None:
            with self.graph.inserting_after(self.last):
                self.graph.call_function(self.leave, (self.last,))
        self.last = None

    def end(self) -> None:
        self._leave()
        if self.clock is not None:
            self.graph.call_function(self.clock.close)
