"""The compiled engine against its plain twin: every start and end of every step, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import Case, random_case

from effort import few
from meshwright.simulate import compile_network
from meshwright.simulate.engine import run
from meshwright.simulate.tables import link_tables, make_state, program_tables
from meshwright.testing.engine_twin import simulate_twin


def both(case: Case, mode: str, segment_bytes: int | None) -> tuple[bool, int]:
    """Run both; returns (deadlocked, messages sent)."""
    p = case.program
    network = compile_network(p, case.fabric, case.placement, mode=mode, segment_bytes=segment_bytes)
    t, messages = program_tables(p, case.durations_s, p.message_bytes(), p.channels.depth)
    k = link_tables(network)
    s = make_state(t, k, messages, record=True)
    run(t, k, s, True)
    twin = simulate_twin(t, k)
    assert np.flatnonzero(s.lane["turn"] < t.lane_repeat).tolist() == twin.deadlocked
    for (step, turn), time in twin.start.items():
        assert s.instance["start"][t.record_at[step] + turn] == time, ("start", step, turn)
    for (step, turn), time in twin.end.items():
        assert s.instance["end"][t.record_at[step] + turn] == time, ("end", step, turn)
    assert s.step["done"].sum() == len(twin.end)
    assert s.link["busy"].tolist() == [x.busy for x in twin.links]
    assert s.channel["arrived"].tolist() == [c.arrived for c in twin.channels]
    # nothing was written past the end, nothing is left over
    assert s.heap.queued[0] == 0 and np.all(s.heap.place < 0)
    assert s.number[4] <= len(s.order)
    return bool(twin.deadlocked), int(s.channel["sent"].sum())


MODES = [("exclusive", None), ("exclusive", 3), ("fair", None)]


@pytest.mark.parametrize(("mode", "segment_bytes"), MODES)
def test_equal_bits_on_seeded_programs(mode: str, segment_bytes: int | None) -> None:
    deadlocks = sent = 0
    for seed in range(few(700)):
        dead, messages = both(random_case(seed), mode, segment_bytes)
        deadlocks += dead
        sent += messages
    assert few(5) < deadlocks < few(350), "the generator should make both live and dead programs"
    assert sent > few(4000)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(MODES))
def test_equal_bits(seed: int, how: tuple[str, int | None]) -> None:
    both(random_case(seed), *how)
