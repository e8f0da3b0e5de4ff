"""Codec states in checkpoints: other groupings, other numbers of ranks, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from meshwright.codec import parse_codec
from meshwright.errors import PlanMismatch
from meshwright.run.traffic.group import GroupExchange
from meshwright.run.traffic.state import load_groups, saved_groups

NAMES, SHAPES = ("a", "b", "c"), ((3,), (2, 2), (5,))


def groups_of(*cuts, codec="topk:density=0.3"):
    edges = [0, *cuts, 3]
    return [
        GroupExchange(i, parse_codec(codec), NAMES[a:b], SHAPES[a:b], torch.float32, "refuse")
        for i, (a, b) in enumerate(pairwise(edges))
    ]


def state_of(rank, world, *cuts):
    groups = groups_of(*cuts)
    for g in groups:
        g.state["residual"].copy_(torch.randn(g.flat.numel(), generator=torch.Generator().manual_seed(rank * 10 + g.index)))
    return saved_groups(groups, step=7, rank=rank, world=world)


def mass(states):
    return {n: sum(s["elements"]["residual"][n].double() for s in states) for n in NAMES}


@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 2), (2, 5), (1, 3), (3, 1), (2, 2)])
def test_another_number_of_ranks_keeps_the_mass_of_every_element(old, new):
    before = [state_of(r, old, 1) for r in range(old)]
    after = []
    for rank in range(new):
        groups = groups_of(2)  # grouped otherwise as well
        assert load_groups(groups, before, rank, new, drop_residual=False) == 7
        after.append(saved_groups(groups, step=7, rank=rank, world=new))
    for name, total in mass(before).items():
        assert torch.allclose(mass(after)[name], total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 5)])
def test_velocities_that_become_gradients_are_not_lost(old, new):
    def of_all(ranks, load=None):
        found = []
        for rank in range(ranks):
            groups = groups_of(codec="dgc")
            if load is not None:
                load_groups(groups, load, rank, ranks, drop_residual=False)
            else:
                groups[0].state["velocity"].copy_(torch.randn(12, generator=torch.Generator().manual_seed(rank)))
            found.append(saved_groups(groups, step=7, rank=rank, world=ranks))
        return found

    before = of_all(old)
    after = of_all(new, before)
    for name in NAMES:
        total = sum(s["elements"]["velocity"][name].double() for s in before)
        assert torch.allclose(sum(s["elements"]["velocity"][name].double() for s in after), total, atol=1e-6)
    with pytest.raises(PlanMismatch, match="residual of 'a'"):
        load_groups(groups_of(), before, 0, old, drop_residual=False)


def test_the_same_ranks_go_on_with_their_own():
    mine = state_of(1, 3, 1)
    groups = groups_of(1)
    load_groups(groups, [mine], 1, 3, drop_residual=False)
    again = saved_groups(groups, step=7, rank=1, world=3)
    assert all(torch.equal(again["elements"]["residual"][n], mine["elements"]["residual"][n]) for n in NAMES)


def test_what_would_be_lost_or_is_not_whole_is_refused():
    states = [state_of(r, 2) for r in range(2)]
    plain = groups_of(codec="none")
    with pytest.raises(PlanMismatch, match="residual of 'a'"):
        load_groups(plain, states, 0, 2, drop_residual=False)
    assert load_groups(plain, states, 0, 2, drop_residual=True) == 7
    for wrong in (states[:1], [states[0], states[0]], [state_of(0, 2), state_of(1, 3)]):
        with pytest.raises(PlanMismatch, match="states of ranks"):
            load_groups(groups_of(), wrong, 1, 2, drop_residual=False)
    with pytest.raises(PlanMismatch, match="no traffic state"):
        load_groups(groups_of(), [{"schema": "other"}], 0, 2, drop_residual=False)
    cut = state_of(0, 1)
    cut["elements"]["residual"]["a"] = torch.zeros(2)
    with pytest.raises(PlanMismatch, match="2 elements, not 3"):
        load_groups(groups_of(), [cut], 0, 1, drop_residual=False)
