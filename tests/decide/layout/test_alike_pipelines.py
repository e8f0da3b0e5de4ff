"""A few alike pipelines stand for all of them: times and memory are those of the whole layout simulated."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.layout.mixed.candidate import Candidate, Problem
from meshwright.decide.layout.profiled.iteration import build_iteration
from meshwright.decide.layout.profiled.predict import predict
from meshwright.decide.layout.profiled.servers import place
from meshwright.decide.layout.profiled.symmetric import alike_part
from meshwright.profile.layer_table import RECOMPUTE, LayerChoice
from meshwright.profile.network import ProfiledLayout, ProfiledStage, Replica
from meshwright.simulate import simulate_program
from meshwright.testing.layer_tables import fabric, problem

WORK = (1.5, 1.0, 1.0, 1.0, 1.0, 2.0)
CASE = problem(fabric([("fast", 24, 4), ("slow", 24, 4)]), WORK, batch=96)


def whole(p: Problem, c: Candidate) -> tuple[float, list[int]]:
    servers = place(c.layout, p.network, p.runtime)
    made = build_iteration(p.profile(c), c.layout, p.runtime, servers)
    found = simulate_program(made.program, servers.fabric, [d.name for d in servers.fabric.devices], made.cost, network="fair", record=False)
    return found.makespan_s, [int(x) for x in found.memory_peak_bytes]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_part_takes_as_long_as_the_whole(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 3))
    pipelines = data.draw(st.sampled_from((2, 4, 6, 8, 12, 16)))
    rows = []
    for _ in range(stages):
        kind, tensor = data.draw(st.sampled_from(("fast", "slow"))), data.draw(st.sampled_from((1, 2)))
        rows.append(Replica(device=kind, tensor=tensor))
    cuts = (0, *sorted(data.draw(st.permutations(range(1, len(WORK))))[: stages - 1]), len(WORK))
    made = tuple(ProfiledStage(layers=cuts[s + 1] - cuts[s], replicas=(r,) * pipelines) for s, r in enumerate(rows))
    count = data.draw(st.integers(1, 4))
    layout = ProfiledLayout(stages=made, microbatch=data.draw(st.sampled_from((1, 2))), microbatches=(count,) * pipelines)
    level = data.draw(st.integers(0, 3))
    c = Candidate(layout, tuple(LayerChoice(data.draw(st.sampled_from(RECOMPUTE)), level) for _ in WORK), "any")
    time_s, memory = whole(CASE, c)
    found = predict(CASE.profile(c), layout, CASE.network, CASE.runtime, bars=False)
    assert found.time_s == pytest.approx(time_s, rel=1e-9)
    assert list(found.memory_peak_bytes) == [max(memory[s * pipelines : (s + 1) * pipelines]) for s in range(stages)]
    assert found.samples_per_s * found.time_s == pytest.approx(layout.global_batch)


def test_what_is_alike_and_what_is_not() -> None:
    runtime = CASE.runtime
    even = ProfiledLayout.uniform((3, 3), device="fast", data=16, tensor=2, microbatches=2)
    assert alike_part(even, runtime).data == 4  # two servers of two replicas
    assert alike_part(ProfiledLayout.uniform((3, 3), device="fast", data=2, tensor=2), runtime).data == 2  # one server holds the ring
    assert alike_part(ProfiledLayout.uniform((3, 3), device="fast", data=6, tensor=2), runtime).data == 6  # three servers: no ring of two is a part
    assert alike_part(ProfiledLayout.uniform((3, 3), device="fast", data=6, tensor=1), runtime).data == 6  # a stage ends inside a server
    uneven = ProfiledLayout(stages=even.stages, microbatch=1, microbatches=(3, *(2,) * 15))
    assert alike_part(uneven, runtime) is uneven
    other = (*even.stages[0].replicas[:15], Replica(device="slow", tensor=2))
    mixed = ProfiledLayout(stages=(ProfiledStage(layers=6, replicas=other),), microbatch=1, microbatches=(2,) * 16)
    assert alike_part(mixed, runtime) is mixed
    named = tuple(Replica(device="fast", tensor=2, server=f"s{i // 2}") for i in range(16))
    assert alike_part(ProfiledLayout(stages=(ProfiledStage(layers=6, replicas=named),), microbatch=1, microbatches=(2,) * 16), runtime).data == 16
