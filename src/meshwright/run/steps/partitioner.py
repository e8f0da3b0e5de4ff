"""A memory budget for unmodified `torch.compile`: the joint graph is planned here, torch cuts it exactly where the plan says, Inductor compiles.

    with meshwright.torch.memory_budget(budget_bytes=2 << 30) as partitions:
        model = torch.compile(model)
        ...                                  # the first step compiles
    partitions.made[0].peak_bytes            # predicted, of what Inductor makes of it

The budget counts one compiled graph: its parameters, inputs, saved values, gradients; not the optimiser's state, nor what other graphs of the same
model hold (after a graph break each is planned by itself). It works through `torch._inductor.config.custom_partitioner_fn`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import __version__
from ...capture.step import step_graph_of
from ...capture.torch_private import custom_partitioner, inductor_partitioner, partition_saving
from ...capture.work import work_of
from ...decide.memory.fusionaware import frontier_of
from ...decide.memory.fusionaware.frontier import Entry, Frontier
from ...decide.memory.fusionaware.fused import fused_peak_bytes, priced
from ...decide.memory.step import size_text
from ...errors import Infeasible, UsageError
from ...graph.step_graph import StepGraph, StepPlan

__all__ = ["MadePartition", "MemoryPartitioner", "memory_budget"]

MAX_EFFORT = 30_000_000  # of the planner, in its own counted work (`kernels.effort`): a compilation waits for it
MACHINES = {"cpu": (1e11, 1e10), "cuda": (2e14, 2e12)}  # FLOP/s and B/s: only their ratio decides


@dataclass(frozen=True, kw_only=True)
class MadePartition:
    """One joint graph that was cut. `peak_bytes`: predicted of the compiled graphs; `plain_bytes`: of the fastest plan without a budget;
    `again_s`, `plain_s`: seconds run again and in all, by roofline; `saved`: names of the saved nodes."""

    graph: StepGraph
    plan: StepPlan
    peak_bytes: int
    plain_bytes: int
    again_s: float
    plain_s: float
    saved: tuple[str, ...]


class MemoryPartitioner(custom_partitioner()):  # type: ignore[misc]
    """Give exactly one of `budget_bytes` and `share` (of the fastest plan's predicted peak, 0 to 1; below the least peak the least is taken).

    Raises, while compiling: Infeasible below the least peak found (names it); Unsupported for symbolic sizes. UsageError for a wrong budget.
    """

    def __init__(self, *, budget_bytes: int | None = None, share: float | None = None, effort: int = MAX_EFFORT) -> None:
        if (budget_bytes is None) == (share is None):
            raise UsageError("give either budget_bytes or share", where="memory_budget")
        if (budget_bytes is not None and budget_bytes < 0) or (share is not None and not 0 <= share <= 1):
            raise UsageError(f"{budget_bytes if share is None else share} is no budget", where="memory_budget", hint="bytes >= 0, or a share 0 to 1")
        self.budget_bytes, self.share, self.effort = budget_bytes, share, effort
        self.made: list[MadePartition] = []

    def uuid(self) -> str:
        """For torch's compile caches: what decides the cut."""
        return f"meshwright {__version__} {self.budget_bytes} {self.share} {self.effort}"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = kwargs.get("static_lifetime_input_indices") or ()
        return partition_saving(lambda joint: self._saved(gm, joint, kwargs["num_fwd_outputs"], static), gm, joint_inputs, **kwargs)

    def _saved(self, gm: fx.GraphModule, joint: fx.Graph, forward_outputs: int, static: Sequence[int]) -> list[fx.Node]:
        plain = step_graph_of(fx.GraphModule(gm, joint), name="compiled step", forward_outputs=forward_outputs, static_inputs=static)
        by_name = {n.name: n for n in joint.nodes}
        device = next((x.device.type for n in joint.nodes if isinstance(x := n.meta.get("val"), torch.Tensor)), "cpu")
        flops_per_s, bytes_per_s = MACHINES.get(device, MACHINES["cuda"])
        graph = priced(plain, _flops(joint), flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
        frontier = frontier_of(graph, self.effort, False, True)
        made = self._chosen(graph, frontier)
        self.made.append(made)
        return [by_name[name] for name in made.saved]

    def _chosen(self, graph: StepGraph, frontier: Frontier) -> MadePartition:
        """The fastest schedule whose compiled peak fits; they stand from fast to slow."""
        plain_bytes, limit, least = -1, 0, (1 << 62, frontier.entries[-1])
        for entry in frontier.entries:
            plan = _plan(frontier, entry)
            peak = fused_peak_bytes(graph, plan)
            if plain_bytes < 0:
                plain_bytes = peak
                limit = int(peak * self.share) if self.share is not None else self.budget_bytes or 0
            if peak <= limit:
                return _made(graph, frontier, plan, peak, plain_bytes, entry)
            least = min(least, (peak, entry), key=lambda x: x[0])
        if self.share is None:
            raise Infeasible(
                f"compiled, the least peak found is {size_text(least[0])}, the budget is {size_text(limit)}", where=graph.name,
                hint="raise the budget, or make the batch smaller", data={"least_bytes": least[0], "budget_bytes": limit},
            )  # fmt: skip
        return _made(graph, frontier, _plan(frontier, least[1]), least[0], plain_bytes, least[1])


def _plan(frontier: Frontier, entry: Entry) -> StepPlan:
    plan = frontier.lives.plan(entry.hold_from, strategy="fusionaware", options={"compiled": True})
    assert plan is not None
    return plan


def _made(graph: StepGraph, frontier: Frontier, plan: StepPlan, peak: int, plain_bytes: int, entry: Entry) -> MadePartition:
    ran: set[int] = set()
    needed: dict[int, None] = {}
    for action in plan.actions[plan.boundary :]:
        for x in graph.nodes[action.node].inputs:
            tangent = any(graph.storages[s].kind == "tangent" for s in graph.nodes[x].storages)
            if x not in ran and not tangent:
                needed[x] = None
        ran.add(action.node)
    return MadePartition(
        graph=graph, plan=plan, peak_bytes=peak, plain_bytes=plain_bytes,
        again_s=entry.time_s - frontier.plain_s, plain_s=frontier.plain_s, saved=tuple(graph.nodes[x].name for x in needed),
    )  # fmt: skip


def _flops(joint: fx.Graph) -> dict[str, float]:
    found = {}
    for n in joint.nodes:
        if n.op == "call_function":
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda x: x.meta.get("val"))
            found[n.name] = float(work_of(n.target, args, kwargs, n.meta.get("val")).flops)
    return found


@contextlib.contextmanager
def memory_budget(*, budget_bytes: int | None = None, share: float | None = None, effort: int = MAX_EFFORT) -> Iterator[MemoryPartitioner]:
    """While it lasts, what `torch.compile` compiles (with Inductor) keeps within the budget; yields the partitioner, whose `made` says what was cut.

    Raises: as `MemoryPartitioner`.
    """
    partitioner = MemoryPartitioner(budget_bytes=budget_bytes, share=share, effort=effort)
    with inductor_partitioner(partitioner):
        yield partitioner
