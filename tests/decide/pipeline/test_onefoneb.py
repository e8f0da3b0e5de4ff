"""1F1B against its closed forms; the makespan comes from a longest-path recursion written here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.decide.pipeline import one_f_one_b_order, peak_in_flight
from meshwright.errors import UsageError


def makespan(stages: int, microbatches: int, forward: int, backward: int) -> int:
    """Earliest finish of the order with free communication: repeat passes over the stages until all work has a time."""
    orders = [one_f_one_b_order(stages, microbatches, s) for s in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    at, clock = [0] * stages, [0] * stages
    progress = True
    while progress:
        progress = False
        for s in range(stages):
            while at[s] < len(orders[s]):
                phase, i = orders[s][at[s]]
                need = []
                if phase == "F" and s > 0:
                    need.append(("F", s - 1, i))
                if phase == "B":
                    need.append(("F", s, i))
                    if s < stages - 1:
                        need.append(("B", s + 1, i))
                if any(n not in done for n in need):
                    break
                start = max([clock[s], *(done[n] for n in need)])
                clock[s] = start + (forward if phase == "F" else backward)
                done[(phase, s, i)] = clock[s]
                at[s] += 1
                progress = True
    assert len(done) == 2 * stages * microbatches, "the order deadlocks"
    return max(clock)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 5), st.integers(1, 5))
def test_closed_form_makespan(stages: int, microbatches: int, forward: int, backward: int) -> None:
    assert makespan(stages, microbatches, forward, backward) == (microbatches + stages - 1) * (forward + backward)


@given(st.integers(1, 12), st.integers(1, 24), st.data())
def test_every_microbatch_once_and_memory(stages: int, microbatches: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    order = one_f_one_b_order(stages, microbatches, stage)
    assert [i for phase, i in order if phase == "F"] == list(range(microbatches))
    assert [i for phase, i in order if phase == "B"] == list(range(microbatches))
    held = peak = 0
    for phase, i in order:
        held += 1 if phase == "F" else -1
        peak = max(peak, held)
        assert held >= 0 and (phase == "F" or order.index(("F", i)) < order.index(("B", i)))
    assert peak == peak_in_flight(stages, microbatches, stage) == min(microbatches, stages - stage)


@pytest.mark.parametrize(
    ("stages", "microbatches", "stage", "where"), [(0, 1, 0, "stages"), (2, 0, 0, "microbatches"), (2, 2, 2, "stage"), (2, 2, -1, "stage")]
)
def test_refuses(stages: int, microbatches: int, stage: int, where: str) -> None:
    with pytest.raises(UsageError) as error:
        one_f_one_b_order(stages, microbatches, stage)
    assert error.value.where == where
