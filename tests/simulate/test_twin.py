"""The compiled engine against its plain twin: every start and end of every step, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import Case, random_case

from effort import few
from meshwright.program.program import Kind
from meshwright.simulate import compile_network
from meshwright.simulate.engine import run
from meshwright.simulate.tables import Processors, link_tables, make_state, program_tables
from meshwright.testing.engine_twin import simulate_twin


def both(case: Case, mode: str, segment_bytes: int | None, processors: Processors | None = None) -> tuple[bool, int]:
    """Run both; returns (deadlocked, messages sent)."""
    p = case.program
    network = compile_network(p, case.fabric, case.placement, mode=mode, segment_bytes=segment_bytes)
    t, messages = program_tables(p, case.durations_s, p.message_bytes(), p.channels.depth, processors)
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


def test_equal_bits_where_ranks_have_processors_with_quotas() -> None:
    """Durations, quotas and periods are binary fractions, so the twin's period after period must give the engine's formula exactly."""
    waited = 0
    for seed in range(few(300)):
        rng, case = np.random.default_rng(seed), random_case(seed)
        actors = case.program.ranks + case.program.switches
        period = rng.choice([0.5, 1.0, 4.0], actors)
        overrun = rng.choice([0.0, 1 / 32, 0.5], actors)
        quota = np.where(rng.random(actors) < 0.3, 0.0, period * rng.choice([1 / 16, 0.25, 0.625], actors))
        begin, waits_in = rng.integers(0, 3, actors) / 8, np.full(actors, -1)
        steps = np.flatnonzero(case.program.steps.kind == Kind.COMPUTE)
        waits_in[case.program.lanes.actor[case.program.lane_of_step()[steps]]] = steps
        case = replace(case, durations_s=np.round(case.durations_s * 1.3 * 32) / 32)
        taken, waits_s, sum_s = rng.random(actors) < 0.8, rng.integers(0, 8) / 4, rng.integers(0, 3) / 8
        processors = Processors(taken, quota, period, overrun, begin, waits_in, waits_s, sum_s, np.full(actors, True), 0.0)
        both(case, *MODES[seed % 2], processors)
        waited += bool((quota[processors.taken] > 0).any())
    assert waited > few(150)
