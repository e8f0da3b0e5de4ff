"""PyTorch's `sac_milp` for a captured step: which modules it would checkpoint and how much of each it would let go, as step plans.

Its integer programme (torch.distributed._tools.sac_ilp) needs PuLP. Its estimators want a GPU or benchmark operators by themselves; here the
programme is given what this step's graph says: bytes by storage, measured seconds. What it decides is turned into plans with favour to it: a
dropped result is computed again when it is first read, with what that needs, not with its whole module.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from ...capture.step import CapturedStep
from ...capture.torch_private import sac_tools
from ...decide.memory.lifetimes import Lifetimes, lifetimes_of
from ...graph.step_graph import StepGraph, StepPlan

__all__ = ["SAC_SHARES", "module_info", "sac_installed", "sac_plans"]

SAC_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
ROOT = "Root"  # the programme takes a module for a part of another by its name
MAX_CURVE_SEGMENTS = 12  # of a module's curve of seconds against bytes: each is a variable of the program that is solved
MILLISECOND = 1e-3


def sac_installed() -> bool:
    return find_spec("pulp") is not None


def sac_plans(step: CapturedStep, *, graph: StepGraph | None = None, shares: Sequence[float] = SAC_SHARES) -> tuple[StepPlan, ...]:
    """One plan per share of the peak that the programme itself predicts without checkpoints, where it finds a solution.

    `graph`: the step graph with times. Raises: ImportError without PuLP.
    """
    step_graph = graph or step.step_graph
    tools, lives = sac_tools(), lifetimes_of(step_graph)
    parts = _parts(step, lives)
    tree = tools.parse_module_info(module_info(lives, parts))
    baseline, _ = tools.get_peak_memory_runtime_baseline(tree)
    plans = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's calls of PuLP are older than PuLP 3
        for share in shares:
            decisions, _, _ = tools.sac_milp(tree, share * baseline / 2**30)
            held = _held(lives, parts, decisions, tools) if decisions else None
            plan = None if held is None else lives.plan(held, strategy="torch sac_milp", options={"budget": share})
            plans += [plan] if plan is not None else []
    return tuple(plans)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A module that runs: its forward nodes that make something, its children's among them, and the storages that others read of what they make."""

    name: str
    leaf: bool
    nodes: tuple[int, ...]
    outputs: frozenset[int]


def _parts(step: CapturedStep, lives: Lifetimes) -> tuple[_Part, ...]:
    """In the order in which modules begin; a module before its children."""
    graph, boundary = lives.graph, lives.arrays.boundary
    forward = [i for i in range(boundary) if lives.arrays.forward_wanted[i] and graph.nodes[i].phase == "forward"]
    found = []
    for path, module in step.source.module.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        mine = {i for i in forward if not path or graph.nodes[i].module == path or graph.nodes[i].module.startswith(f"{path}.")}
        makers = tuple(i for i in sorted(mine) if graph.nodes[i].makes)
        if makers:
            made = {s for i in makers for s in graph.nodes[i].makes}
            read = {s for i in forward if i not in mine for x in graph.nodes[i].inputs for s in graph.nodes[x].storages}
            read |= {s for r in graph.results for s in graph.nodes[r].storages}
            name = f"{ROOT}.{path}" if path else ROOT
            found.append(_Part(name=name, leaf=not any(module.children()), nodes=makers, outputs=frozenset(made & read)))
    return tuple(sorted(found, key=lambda p: (p.nodes[0], p.name.count("."))))


def module_info(lives: Lifetimes, parts: Sequence[_Part]) -> dict[str, Any]:
    """What `parse_module_info` takes: bytes and milliseconds of every module, and the order in which they run."""
    graph, size = lives.graph, lives.arrays.size
    gradients, others = _backward_bytes(graph)
    stats = []
    fixed = {kind: sum(s.size_bytes for s in graph.storages if s.kind == kind) for kind in ("parameter", "input")}
    for p in parts:
        made = [s for i in p.nodes for s in graph.nodes[i].makes]
        saved = sum(int(size[s]) for s in made if lives.read_backward[s] and s not in p.outputs)
        until = sum(int(size[s]) for s in range(len(size)) if lives.read_backward[s] and 0 <= lives.maker[s] <= p.nodes[-1])
        window = _window(graph, {*made})
        time_s = sum(graph.nodes[i].time_s for i in p.nodes)
        slopes, intercepts, curve = _curve(graph, p) if not p.leaf else ([], [], OrderedDict())
        stats.append({
            "fqn": p.name, "param_per_module": fixed["parameter"] + fixed["input"] if p.name == ROOT else 0, "grad_per_module": 0,
            "grad_total": gradients[window[0]] if window else 0, "act_fw_per_module": saved, "act_bw_per_module": 0,
            "act_grad_per_module": max((others[b] for b in range(window[0], window[1] + 1)), default=0) if window else 0, "act_total": until,
            "input_per_module": 0, "output_per_module": sum(int(size[s]) for s in p.outputs), "fw_runtime_per_module": time_s / MILLISECOND,
            "bw_runtime_per_module": 0.0, "is_leaf": p.leaf, "sac_runtime": 0.0 if p.leaf else time_s / MILLISECOND,
            "sac_memory": 0 if p.leaf else sum(int(size[s]) for s in made), "n_segments": len(slopes), "slopes": slopes,
            "intercepts": intercepts, "breakpoints": [], "tradeoff_curve": curve,
        })  # fmt: skip
    before = [p.name for p in parts]
    after = [p.name for p in sorted(parts, key=lambda p: (p.nodes[-1], -p.name.count(".")))]
    order = {"fw_pre_order": before, "fw_post_order": after, "bw_pre_order": after[::-1], "bw_post_order": before[::-1]}
    return {"mod_order": order, "mod_stats": stats}


def _backward_bytes(graph: StepGraph) -> tuple[dict[int, int], dict[int, int]]:
    """By backward node: bytes of results made in backward before it, and of all else that backward made and that exists while it runs."""
    last: dict[int, int] = {}
    for b in range(graph.boundary, len(graph.nodes)):
        for s in (s for x in (*graph.nodes[b].inputs, b) for s in graph.nodes[x].storages):
            last[s] = b
    results = {s for r in graph.results for s in graph.nodes[r].storages}
    gradients, others, done, alive = dict[int, int](), dict[int, int](), 0, dict[int, int]()
    for b in range(graph.boundary, len(graph.nodes)):
        gradients[b] = done
        for s in graph.nodes[b].makes:
            if s in results:
                done += graph.storages[s].size_bytes
            else:
                alive[s] = graph.storages[s].size_bytes
        others[b] = sum(alive.values()) + graph.nodes[b].workspace_bytes
        alive = {s: x for s, x in alive.items() if last[s] > b}
    return gradients, others


def _window(graph: StepGraph, made: set[int]) -> tuple[int, int] | None:
    """First and last backward node that reads one of these storages."""
    readers = [b for b in range(graph.boundary, len(graph.nodes)) if any(s in made for x in graph.nodes[b].inputs for s in graph.nodes[x].storages)]
    return (readers[0], readers[-1]) if readers else None


def _curve(graph: StepGraph, part: _Part) -> tuple[list[float], list[float], OrderedDict[float, float]]:
    """Slopes and intercepts of (share of bytes let go, share of seconds run again), cheapest operators per byte first."""
    costs = sorted(
        ((sum(graph.storages[s].size_bytes for s in graph.nodes[i].makes), graph.nodes[i].time_s) for i in part.nodes),
        key=lambda c: (c[1] / max(c[0], 1), -c[0]),
    )  # fmt: skip
    share = np.cumsum([[0.0, 0.0], *costs], axis=0)
    share = share / np.maximum(share[-1], 1e-30)
    points = share[np.unique(np.linspace(0, len(share) - 1, MAX_CURVE_SEGMENTS + 1).astype(int))]
    slopes, intercepts = [], []
    for (x0, y0), (x1, y1) in pairwise(points):
        if x1 > x0:
            slopes.append(float((y1 - y0) / (x1 - x0)))
            intercepts.append(float(y0 - slopes[-1] * x0))
    return slopes, intercepts, OrderedDict((float(x), float(y)) for x, y in points)


def _held(lives: Lifetimes, parts: Sequence[_Part], decisions: dict[str, float], tools: Any) -> Any:
    """`hold_from` of the modules' policies: what they save is kept, what they do not is computed again once and held to its last use."""
    held, nodes = lives.keep_all(), lives.graph.nodes
    for p in parts:
        if p.name not in decisions:
            continue
        stats = tools.SACStats(
            func_names=[nodes[i].target for i in p.nodes], runtimes=[nodes[i].time_s / MILLISECOND for i in p.nodes],
            memory=[sum(int(lives.arrays.size[s]) for s in nodes[i].makes) for i in p.nodes], view_like_ops=[],
            rand_ops=[k for k, i in enumerate(p.nodes) if nodes[i].random], saved_autograd_ops=[], inplace_ops=[], force_store_random=False,
        )  # fmt: skip
        saved = tools.get_optimal_checkpointing_policy_per_module(stats, min(max(1.0 - decisions[p.name], 0.0), 1.0))
        for i, keep in zip(p.nodes, saved, strict=True):
            for s in nodes[i].makes:
                if lives.movable[s] and s not in p.outputs:
                    held[s] = 0 if keep else 1
    return held
