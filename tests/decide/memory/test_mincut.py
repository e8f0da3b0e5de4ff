"""The cut between forward and backward: the numbers of real nets, and enumeration of every saved set."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from random_steps import Builder, step_graphs
from torch import nn

from meshwright.capture.step import capture_step
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.fusionaware.network import BANS, MIN_MEMORY, MinCut, saved_set
from meshwright.errors import Infeasible, UnknownName

RNG = np.random.default_rng(0)


class Waves(nn.Module):
    def forward(self, x, _):
        for _i in range(8):
            x = x.sin().cos()
        return x.sum()


class Attention(nn.Module):
    def forward(self, q, k, v, _):
        return (torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v).sum()


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x, _):
        return self.down(F.gelu(self.up(self.norm(x)))).sum()


def step(module, *inputs):
    return capture_step(module, [*inputs, torch.zeros(1)], loss="output").step_graph


def test_a_chain_of_waves_saves_nothing_new():
    x = torch.randn(1024, requires_grad=True)
    assert saved_set(step(Waves(), x)).new_bytes == 0


def test_attention_saves_one_matrix():
    graph = step(Attention(), *(torch.randn(4, 128, 64, requires_grad=True) for _ in range(3)))
    assert saved_set(graph).new_bytes == 262_144


def test_feed_forward_saves_half_a_mebibyte_where_torch_saves_more_than_one():
    graph = step(Feed(), torch.randn(128, 256, requires_grad=True))
    least = saved_set(graph, bans=MIN_MEMORY, distance=False, write_twice=False)
    assert least.new_bytes <= 525_312
    plan = MinCut(bans=MIN_MEMORY, distance=False, write_twice=False).plan(graph, None, rng=RNG)
    products = [graph.nodes[a.node].name for a in plan.actions if "mm" in graph.nodes[a.node].target]
    assert len(products) == len({*products}) and not check_step_plan(graph, plan).findings
    with pytest.raises(Infeasible):
        MinCut().plan(graph, 1, rng=RNG)


def least_cost(graph, *, views_cost):
    """Over all sets of savable nodes with which backward can compute everything, when random nodes must not run again."""
    nodes = graph.nodes
    read = {x for n in nodes[graph.boundary :] for x in n.inputs if x < graph.boundary}
    cost = {
        i: sum(graph.storages[s].size_bytes for s in n.storages)
        for i, n in enumerate(nodes[: graph.boundary])
        if len(n.makes) == 1 or (views_cost and not n.makes and n.phase != "input") or n.target == "getitem"
    }

    def there(i, saved, memory):
        if i not in memory:
            again = not nodes[i].random and nodes[i].phase == "forward"
            memory[i] = i in saved or nodes[i].phase == "input" or (again and all(there(x, saved, memory) for x in nodes[i].inputs))
        return memory[i]

    best = float("inf")
    for k in range(len(cost) + 1):
        for saved in combinations(cost, k):
            memory: dict[int, bool] = {}
            if sum(cost[i] for i in saved) < best and all(there(i, {*saved}, memory) for i in read):
                best = sum(cost[i] for i in saved)
    return best


@settings(deadline=None, max_examples=60)
@given(step_graphs(most=6))
def test_no_other_saved_set_costs_less(graph):
    found = saved_set(graph, bans=("random",), distance=False, write_twice=False)
    assert found.value == least_cost(graph, views_cost=False)


def test_bans_are_switches():
    b = Builder()
    x, t = b.given(400), b.given(4, "tangent")
    product = b.op((x,), (400,), target="aten.mm.default")
    small = b.op((product,), (4,), target="aten.sum.default")
    noise = b.op((product,), (100,), target="aten.rand_like.default", random=True)
    odd = b.op((noise,), (100,), target="other.op.default")
    loss = b.op((odd, small), (4,), target="aten.add.Tensor")
    g = b.op((t, odd, small, noise, product), (400,), phase="backward", target="aten.mul.Tensor")
    graph = b.graph((loss, g))
    assert saved_set(graph, bans=()).new_bytes == 0
    for ban, node in (("intensive", product), ("reduction", small), ("random", noise), ("unknown", odd)):
        assert saved_set(graph, bans=(ban,)).banned[node] == ban
        assert node in saved_set(graph, bans=(ban,)).nodes
    assert set(saved_set(graph).banned.values()) <= set(BANS)
    with pytest.raises(UnknownName, match="there is no ban 'moon'"):
        saved_set(graph, bans=("moon",))


def test_what_must_be_saved_and_cannot_be_is_named():
    """A tuple as a whole is not saved, its items are; backward here reads the tuple."""
    b = Builder()
    x, t = b.given(400), b.given(4, "tangent")
    pair = b.op((x,), (400, 400), target="aten.mm.default")
    loss = b.op((b.item(pair, 0),), (4,))
    graph = b.graph((loss, b.op((t, pair), (400,), phase="backward")))
    with pytest.raises(Infeasible, match="must be saved, and cannot be") as refused:
        saved_set(graph)
    assert refused.value.where == "n2"
