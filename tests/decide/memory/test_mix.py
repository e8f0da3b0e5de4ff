"""The mix of policies over several classes of layers against all mixes, at budgets that fit exactly and budgets that do not."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.memory.mix import Members, fractional_mix, leanest_bytes, whole_mix
from meshwright.decide.memory.problem import LayerPolicy
from meshwright.errors import Infeasible

SIZES = st.integers(0, 60) | st.integers(10**11, 10**11 + 3)  # of single bytes, and of so many that a solver's tolerance hides some


@st.composite
def policies(draw: st.DrawFn) -> LayerPolicy:
    return LayerPolicy(recompute=(), keep=(), kept_bytes=draw(SIZES), workspace_bytes=draw(SIZES), time_s=draw(st.integers(0, 30)) / 1000)


@st.composite
def classes(draw: st.DrawFn) -> list[Members]:
    return [
        Members(count=draw(st.integers(1, 3)), copies=draw(st.integers(1, 2)), policies=tuple(draw(st.lists(policies(), min_size=1, max_size=3))))
        for _ in range(draw(st.integers(1, 2)))
    ]


def every_mix(given_classes: list[Members]) -> list[tuple[int, float]]:
    """(bytes held, time) of every assignment of members to policies."""
    slots = [(m, range(len(m.policies))) for m in given_classes for _ in range(m.count)]
    found = []
    for choice in product(*[s for _, s in slots]):
        used = [(m.copies, m.policies[i]) for (m, _), i in zip(slots, choice, strict=True)]
        held = sum(copies * p.kept_bytes for copies, p in used) + max(p.workspace_bytes for _, p in used)
        found.append((held, sum(p.time_s for _, p in used)))
    return found


@settings(max_examples=60, deadline=None)
@given(given_classes=classes(), data=st.data())
def test_the_mix_is_the_best_of_all_that_fit(given_classes: list[Members], data: st.DataObject) -> None:
    mixes = every_mix(given_classes)
    least = min(held for held, _ in mixes)
    assert leanest_bytes(given_classes) == least
    budget = data.draw(st.sampled_from(sorted({held for held, _ in mixes})))
    counts = whole_mix(given_classes, budget)
    assert [sum(mine) for mine in counts] == [m.count for m in given_classes]
    used = [(c, m.copies, p) for m, mine in zip(given_classes, counts, strict=True) for c, p in zip(mine, m.policies, strict=True) if c]
    assert sum(c * copies * p.kept_bytes for c, copies, p in used) + max(p.workspace_bytes for *_, p in used) <= budget
    best = min(time for held, time in mixes if held <= budget)
    time_s = sum(c * p.time_s for c, _, p in used)
    # Sizes beyond the solver's tolerance may cost the mix that fits to the byte, never one with room to spare.
    roomy = [time for held, time in mixes if held <= budget - 10]
    assert best - 1e-9 <= time_s <= (min(roomy) if roomy and budget > 10**10 else best if budget < 10**10 else max(t for _, t in mixes)) + 1e-9
    relaxed = fractional_mix(given_classes, budget)
    bound = sum(x * p.time_s for m, mine in zip(given_classes, relaxed, strict=True) for x, p in zip(mine, m.policies, strict=True))
    assert bound <= best + 1e-7


def test_less_than_the_leanest_is_refused() -> None:
    one = LayerPolicy(recompute=(), keep=(), kept_bytes=10, workspace_bytes=4, time_s=1.0)
    with pytest.raises(Infeasible):
        whole_mix([Members(count=3, policies=(one,))], 33)
    with pytest.raises(Infeasible):
        fractional_mix([Members(count=3, policies=(one,))], 20)
    assert leanest_bytes([]) == 0
