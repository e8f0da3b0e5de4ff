"""A backward pass in two: gradients of the inputs first, gradients of the weights later, each computed once.

Works on autograd's own graph of an ordinary forward pass, of any module. Nodes from which a differentiable input can be reached form the spine.
First pass: autograd runs the spine alone (it leaves out the weights of every operator by itself) and hands out the gradient that arrives at each
spine node with a branch towards weights. Second pass: each such node runs once more for its branches only. Nothing of the forward runs again;
spine operators run once per pass, for disjoint sets of results.
Exact: a branch is deferred only if one spine node alone leads to it, so running that node reaches it in one way. Branches that several spine nodes
share (a tied weight used bare, a bias used at each step of a recurrence), or that others run into, get their gradient in the first pass.

Cite: the split is that of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. PyTorch's own (torch.distributed.pipelining._backward)
groups weights by the nodes where they meet the spine and lets autograd run from there to the weights.
Deviation: here every meeting node is run for its own branches, so a weight that the spine passes twice is not counted twice.
Limits: an autograd.Function in the spine computes what its backward computes in both passes. Hooks on tensors of the spine are called twice.
Cost: O(nodes) Python per micro-batch, one call of autograd per meeting node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ...capture.torch_private import run_backward

__all__ = ["WeightWork", "input_gradients"]

Node = Any  # torch.autograd.graph.Node


@dataclass
class WeightWork:
    """The second pass of one micro-batch: `run()` adds to the weights' `.grad`, once.

    `meetings`: per spine node the gradients that arrived at its outputs, its branches, and the leaves below them where no other meeting node leads
    to these: then one run of the engine goes all the way. `ready`: gradients that are complete already.
    """

    meetings: list[tuple[list[GradientEdge], list[torch.Tensor], list[GradientEdge], list[GradientEdge]]]
    ready: list[tuple[GradientEdge, torch.Tensor]]

    def run(self) -> None:
        meetings, ready, self.meetings, self.ready = self.meetings, self.ready, [], []
        if ready:
            run_backward([e for e, _ in ready], [g for _, g in ready], keep=True)
        for outputs, gradients, branches, leaves in meetings:
            if leaves:
                run_backward(outputs, gradients, leaves)
                continue
            # To the heads of the branches first, then from all of them in one pass: a node that two share below runs once, with the sum.
            found = run_backward(outputs, gradients, branches, accumulate=False)
            pairs = [(b, g) for b, g in zip(branches, found, strict=True) if g is not None]
            if pairs:
                run_backward([b for b, _ in pairs], [g for _, g in pairs], keep=True)  # branches join further down


def input_gradients(
    outputs: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[GradientEdge]
) -> tuple[list[torch.Tensor | None], WeightWork]:
    """Gradients of `inputs` from those of `outputs`, and the work that is left for the weights. None: no output depends on that input.

    Autograd's graph is kept until the work has run or is dropped; an input that no output depends on need not be part of it any more.
    """
    graph = _Graph(outputs, inputs)
    met = [e for e in inputs if e.node in graph.met]
    meetings, joint, direct = graph.branches()
    # What reaches a node at which weights branch off is asked for beside the inputs' gradients, so that the second half begins there.
    arrivals = [GradientEdge(node, i) for node, _ in meetings for i in range(len(node._input_metadata))]
    wanted = [*met, *arrivals, *joint]
    found: Sequence[torch.Tensor | None] = ()
    if outputs and wanted:
        found = run_backward(outputs, gradients, wanted, accumulate=False, keep=True)
    own, at, shared = found[: len(met)], found[len(met) : len(met) + len(arrivals)], found[len(met) + len(arrivals) :]
    ready = [(edge, g) for edge, g in zip(joint, shared, strict=True) if g is not None]
    ready += [(edge, g) for edge, g in zip(outputs, gradients, strict=True) if edge in direct]
    left, place = [], 0
    for (node, branches), leaves in zip(meetings, graph.own_leaves(meetings), strict=True):
        count = len(node._input_metadata)
        pairs = [(e, g) for e, g in zip(arrivals[place : place + count], at[place : place + count], strict=True) if g is not None]
        place += count
        if pairs:
            left.append(([e for e, _ in pairs], [g for _, g in pairs], branches, leaves))
    arrived = dict(zip(met, own, strict=True)) if own else {}
    return [arrived.get(e) for e in inputs], WeightWork(left, ready)


class _Graph:
    """Autograd's graph between outputs and inputs. `children`: of every node seen; `spine`: whether it leads to an input; `met`: ends it leads to."""

    def __init__(self, outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge]) -> None:
        self.outputs = outputs
        self.ends = {e.node for e in inputs}
        self.met: set[Node] = set()
        self.children: dict[Node, list[tuple[Node, int]]] = {}
        self.spine: dict[Node, bool] = dict.fromkeys(self.ends, True)
        for edge in outputs:
            self._visit(edge.node)

    def _visit(self, root: Node) -> None:
        stack = [(root, False)]
        while stack:
            node, left = stack.pop()
            if left:
                self.spine[node] = any(self.spine[c] for c, _ in self.children[node])
            elif node in self.ends:
                self.met.add(node)
            elif node not in self.children:
                self.children[node] = [(c, i) for c, i in node.next_functions if c is not None]
                # Again after its children: only then is it known whether any of them leads to an input.
                stack.append((node, True))
                stack += [(c, False) for c, _ in self.children[node]]

    def branches(self) -> tuple[list[tuple[Node, list[GradientEdge]]], list[GradientEdge], set[GradientEdge]]:
        """(spine node, its deferred branches) in order of meeting; leaves whose gradient the first pass completes; outputs off the spine."""
        parents: dict[Node, set[Node | None]] = {}
        for node, children in self.children.items():
            if self.spine[node]:
                for c, _ in children:
                    if not self.spine[c]:
                        parents.setdefault(c, set()).add(node)
        off = {e for e in self.outputs if not self.spine[e.node]}
        for edge in off:
            parents.setdefault(edge.node, set()).add(None)
        leaves = self._joint_leaves(parents)
        kept = [
            (node, [GradientEdge(c, i) for c, i in dict.fromkeys(children) if not self.spine[c] and c not in leaves])
            for node, children in self.children.items() if self.spine[node]
        ]  # fmt: skip
        joint = {leaf for group in leaves.values() for leaf in group}
        return [(n, b) for n, b in kept if b], [GradientEdge(x, 0) for x in joint], {e for e in off if e.node not in leaves}

    def own_leaves(self, meetings: Sequence[tuple[Node, list[GradientEdge]]]) -> list[list[GradientEdge]]:
        """Per meeting node the leaves below its branches; none where it shares a node with another one."""
        owner: dict[Node, int] = {}
        shared: set[int] = set()
        found: list[list[GradientEdge]] = []
        for mine, (_, branches) in enumerate(meetings):
            leaves = []
            stack = [b.node for b in branches]
            while stack:
                node = stack.pop()
                if (other := owner.setdefault(node, mine)) != mine:
                    shared |= {mine, other}
                elif node not in leaves:
                    if not self.children[node]:
                        leaves.append(node)
                    stack += [c for c, _ in self.children[node]]
            found.append([GradientEdge(node, 0) for node in leaves])
        return [[] if i in shared else leaves for i, leaves in enumerate(found)]

    def _joint_leaves(self, parents: dict[Node, set[Node | None]]) -> dict[Node, list[Node]]:
        """Branch -> leaves below its group, for groups (of branches that join somewhere) in which one has several ways to be reached."""
        group: dict[Node, int] = {}
        merged: list[int] = []
        unclear = {c for c, from_ in parents.items() if len(from_) > 1}

        def find(g: int) -> int:
            while merged[g] != g:
                g = merged[g]
            return g

        for branch in parents:
            mine = len(merged)
            merged.append(mine)
            stack = [branch]
            while stack:
                node = stack.pop()
                if node is not branch and node in parents:
                    unclear.add(node)
                if node in group:
                    a, b = find(group[node]), find(mine)
                    merged[a] = b
                    continue
                group[node] = mine
                stack += [c for c, _ in self.children[node]]
        bad = {find(group[c]) for c in unclear}
        below: dict[int, list[Node]] = {}
        for node, g in group.items():
            if find(g) in bad and not self.children[node]:
                below.setdefault(find(g), []).append(node)
        return {c: below.get(find(group[c]), []) for c in parents if find(group[c]) in bad}
