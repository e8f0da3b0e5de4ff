"""Experts with copies beside the same layer without: outputs and gradients, and where rows go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.experts.copied import expert_given, expert_slots
from meshwright.kernels.experts.padded import expert_counts, expert_mlp, expert_rows, expert_sums
from meshwright.plan.copies import ExpertCopies, blocks_of, came_from, held, places_of, slot_shares
from meshwright.plan.copies import given as blocks
from meshwright.run.context.experts import _places


def copies_for(members, experts, copies):
    copies = tuple(sorted({*copies}))
    where = {e: sorted({e // (experts // members), *(m for x, m in copies if x == e)}) for e in sorted({e for e, _ in copies})}
    rows = tuple((e, tuple((m, 1 + m) for m in of)) for e, of in where.items())
    return ExpertCopies(members=members, experts=experts, copies=copies, rows=rows, busiest_rows=1, before_rows=1, bound_rows=1)


@st.composite
def layers(draw):
    members, local = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    pairs = [(e, m) for e in range(members * local) for m in range(members) if m != e // local]
    return copies_for(members, members * local, draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=6)))


@settings(max_examples=40)
@given(x=layers(), seed=st.integers(0, 99))
def test_all_members_together_compute_what_one_process_does(x, seed):
    make = torch.Generator().manual_seed(seed)
    tokens, width, inner, k = 6, 3, 2, 2
    shapes = (2 * inner, width), (width, inner)
    gate_up, down = (torch.randn(x.experts, *s, generator=make, dtype=torch.float64, requires_grad=True) for s in shapes)
    given_x = [torch.randn(tokens, width, generator=make, dtype=torch.float64, requires_grad=True) for _ in range(x.members)]
    chosen = [torch.stack([torch.randperm(x.experts, generator=make)[:k] for _ in range(tokens)]) for _ in range(x.members)]
    wide, slots = x.local + places_of(x), x.members * (x.local + places_of(x))
    own = [slice(m * x.local, (m + 1) * x.local) for m in range(x.members)]
    out = [expert_given(gate_up[s], down[s], [e % x.local for e, _ in blocks(x, m)], blocks_of(x)) for m, s in enumerate(own)]
    came = [torch.stack([out[home][block] for home, block in (came_from(x, m, i) for i in range(places_of(x)))]) for m in range(x.members)]
    index = [expert_slots(c, *_places(x, m)) for m, c in enumerate(chosen)]
    rows = [expert_rows(t, i, None, slots, tokens) for t, i in zip(given_x, index, strict=True)]
    counts = [expert_counts(i, slots, tokens) for i in index]
    back = [[] for _ in range(x.members)]
    for m, s in enumerate(own):
        mine = slice(m * wide, (m + 1) * wide)
        here, filled = torch.cat([r[mine] for r in rows]), torch.cat([c[mine] for c in counts])
        done = expert_mlp(here, filled, gate_up[s], down[s], "silu", 1, copies=came[m])
        for i, part in enumerate(done.split(wide)):
            back[i].append(part)
    found = [expert_sums(torch.cat(b), i, None) for b, i in zip(back, index, strict=True)]
    want = []
    for t, c in zip(given_x, chosen, strict=True):
        alone = expert_mlp(expert_rows(t, c, None, x.experts, tokens), expert_counts(c, x.experts, tokens), gate_up, down, "silu", 1)
        want.append(expert_sums(alone, c, None))
    for a, b in zip(found, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    leaves = [gate_up, down, *given_x]
    one, other = (torch.autograd.grad(sum(y.square().sum() for y in ys), leaves) for ys in (found, want))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(one, other, strict=True))


@settings(max_examples=60)
@given(x=layers())
def test_every_slot_of_an_expert_is_where_its_weights_are_and_shares_are_as_planned(x):
    wide, rows = x.local + places_of(x), {e: dict(of) for e, of in x.rows}
    totals = {}
    for m in range(x.members):
        for e, of in enumerate(slot_shares(x, m)):
            for slot, n in of:
                at, there = divmod(slot, wide)
                assert (e // x.local, e % x.local) == (at, there) if there < x.local else held(x, at)[there - x.local] == e
                totals[e, at] = totals.get((e, at), 0) + n
    for e, of in rows.items():
        assert {m: totals.get((e, m), 0) for m in of} == {m: n * x.members for m, n in of.items()}


def test_rows_are_cut_at_whole_shares():
    index = torch.tensor([[0], [1], [0], [0], [0], [1]])
    assert expert_slots(index, [7, 9], [0, 0], [7, 3], [1, 4]).flatten().tolist() == [7, 9, 3, 3, 3, 9]
    assert expert_slots(index, [7, 9], [], [], []).flatten().tolist() == [7, 9, 7, 7, 7, 9]


@pytest.mark.parametrize("backward", [False, True])
def test_given_weights_and_their_gradients(backward):
    gate_up, down = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 3, 2, requires_grad=True)
    out = expert_given(gate_up, down, [1, 1], 3)
    assert torch.equal(out[0], torch.cat([gate_up[1].flatten(), down[1].flatten()])) and not out[2].any()
    if backward:
        out.sum().backward()
        assert gate_up.grad[1].eq(2).all() and not gate_up.grad[0].any() and down.grad[1].eq(2).all()
