"""The aggregation protocol: all reachable states, drawn schedules, and the published rule where it goes wrong."""

from __future__ import annotations

import pytest

from effort import few
from meshwright.run.aggregate import worker_loop
from meshwright.testing.aggregate_states import explore, original
from meshwright.testing.aggregate_twin import DONE, Faults, run_schedule

# (workers, slots, chunks) -> states, counted by another program before this one was written
STATES = {(1, 1, 3): 7, (2, 1, 3): 23, (2, 1, 6): 47, (3, 1, 4): 93, (2, 2, 6): 529}


@pytest.mark.parametrize("size", STATES)
def test_every_reachable_state_is_safe_and_the_end_within_reach(size: tuple[int, int, int]) -> None:
    found = explore(*size)
    assert (found.states, found.wrong, found.stuck) == (STATES[size], (), 0)


@pytest.mark.parametrize("size", [size for size in STATES if size[0] > 1])
def test_the_published_rule_takes_a_wrong_sum(size: tuple[int, int, int]) -> None:
    trace = explore(*size, take=original).wrong
    assert trace[-1].startswith("worker 0 takes (1, 0")
    first = f"chunk {size[1]} of worker 0 comes"  # of the second turn: it counts twice, after a late copy of the first turn's has cleared its bit
    assert trace.count(first) == size[0] and "chunk 0 of worker 0 comes" in trace[trace.index(first) :]


def test_sums_are_right_whatever_the_network_does() -> None:
    replayed = 0
    for seed in range(few(2000)):
        faults = Faults(lost=(0.0, 0.05, 0.2)[seed % 3], doubled=0.1, kept=0.1)
        tally = run_schedule(seed, workers=1 + seed % 5, slots=1 + seed % 3, chunks=seed % 14, tensors=1 + seed % 3, faults=faults)
        assert tally.verdict == DONE, seed
        replayed += tally.replayed
    assert replayed > few(2000)


def test_a_schedule_is_a_function_of_its_seed() -> None:
    one, same, other = (run_schedule(seed, workers=3, slots=2, chunks=9) for seed in (1, 1, 2))
    assert one == same != other


def test_no_packet_waits_longer_than_the_cap_however_long_a_round_trip_was() -> None:
    patience_ns = worker_loop.patience_ns.py_func
    assert patience_ns(0, 0, 1) == worker_loop.MIN_TIMEOUT_NS
    assert patience_ns(40_000_000, 5_000_000, 1) == 60_000_000 and patience_ns(40_000_000, 5_000_000, 3) == 120_000_000
    for smooth_ns in (10**9, 60 * 10**9):
        assert {patience_ns(smooth_ns, smooth_ns // 2, tries) for tries in range(1, 90)} == {worker_loop.MAX_TIMEOUT_NS}
