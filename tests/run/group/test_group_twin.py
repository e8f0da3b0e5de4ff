"""The deterministic twin: fault schedules by the thousand, every interleaving of small programs, and the twin's own honesty."""

from __future__ import annotations

from collections import Counter

import fault_cases as fc
import pytest
import torch

from effort import few
from meshwright.testing.group_twin import FAULTS, Fault, VirtualWorld

CASES = few(2000)


@pytest.mark.timeout(280)
def test_thousands_of_faults_end_right_or_are_named() -> None:
    torch.set_num_threads(1)
    every = fc.cells(80)
    assert {c.op for c in every} == set(fc.OPS) and {c.ranks for c in every} >= {2, 3, 4, 5} and len({c.strategy for c in every}) >= 7
    found: Counter[tuple[str, bool]] = Counter()
    for seed in range(CASES):
        kind, code, _ = fc.check_case(every[seed % len(every)], seed)
        found[kind, bool(code)] += 1
    for kind in fc.KINDS:  # the planted fault really fired, often enough to mean something
        assert found[kind, True] >= CASES / len(fc.KINDS) / 8, (kind, found)
    assert {k for k, _ in found} == set(fc.KINDS)
    assert set(FAULTS) <= set(fc.KINDS)


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    made = fc.cell("ring", "all-reduce", "ring:4", 64)
    assert made is not None
    fault = (Fault("freeze", 2, 3),)

    def told(seed: int) -> list[tuple[str, float, str]]:
        outcomes, _ = fc.run(made, seed, fault)
        return [(o.state, o.error_s, str(o.error)) for o in outcomes]

    assert told(1) == told(1)
    assert told(1) != told(2)


def paths(made: fc.Cell, most: int) -> list[list[str]]:
    """A path to every reachable state of a healthy run."""

    def replay(path: list[str]) -> VirtualWorld:
        world = fc.world(made, 0)
        for label in path:
            world.choose(label)
        return world

    frontier: list[list[str]] = [[]]
    seen = {replay([]).state()}
    out = [[]] if seen else []
    while frontier:
        path = frontier.pop()
        for label in replay(path).choices():
            after = [*path, label]
            state = replay(after).state()
            if state not in seen:
                seen.add(state)
                frontier.append(after)
                out.append(after)
                assert len(out) <= most, "more states than expected"
    return out


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("strategy", "op", "fabric", "elements"), [("ring", "all-reduce", "star:2", 2), ("ring", "all-gather", "star:3", 1)])
def test_every_interleaving_of_small_programs(strategy: str, op: str, fabric: str, elements: int) -> None:
    """In every state that two or three ranks can be in: going on ends right, and killing any rank there is named by all others."""
    made = fc.cell(strategy, op, fabric, elements)
    assert made is not None
    every = paths(made, 4000)
    assert len(every) > 20
    for path in every:
        for victim in [-1, *range(made.ranks)]:
            world = fc.world(made, 0)
            for label in path:
                world.choose(label)
            if victim >= 0:
                world.kill(world.ranks[victim])
            outcomes = world.run()
            rest = [o for r, o in enumerate(outcomes) if r != victim]
            if victim < 0:
                assert all(o.state == "done" and o.finished == fc.COLLECTIVES for o in rest)
                continue
            assert all(o.error is not None and o.error.code == "rank-died" and o.error.data["rank"] == victim for o in rest), (path, victim)
            assert len({str(o.error) for o in rest}) == 1


def test_two_faults_at_once_still_end_with_typed_errors() -> None:
    every = fc.cells(30)
    for seed in range(few(300)):
        made = every[seed % len(every)]
        _, first, a = fc.schedule(made, seed)
        _, second, b = fc.schedule(made, seed + 10_000)
        faults = tuple(f for f in (first, second) if f is not None)
        if a == b or any(f.kind == "late" for f in faults):
            continue
        outcomes, world = fc.run(made, seed, faults, checks=any(f.kind == "corrupt" for f in faults))
        for rank, outcome in enumerate(outcomes):
            assert outcome.state in ("done", "failed", "killed") or world.ranks[rank].frozen, (seed, faults, outcome)


def test_without_checksums_a_flipped_bit_is_a_wrong_result() -> None:
    """So the invariant of the campaign can fail."""
    made = fc.cell("ring", "all-reduce", "star:3", 64)
    assert made is not None
    with pytest.raises(AssertionError):
        fc.run(made, 3, (Fault("corrupt", 0, 1, peer=1),), checks=False)
    outcomes, _ = fc.run(made, 3, (Fault("corrupt", 0, 1, peer=1),), checks=True)
    assert {o.error.code for o in outcomes if o.error is not None} == {"message-damaged"}


def test_a_world_that_does_not_come_to_rest_is_an_error() -> None:
    made = fc.cell("ring", "all-reduce", "star:2", 2)
    assert made is not None
    world = fc.world(made, 0)

    def again() -> None:
        world.at(world.now + 1.0, again)

    again()
    with pytest.raises(AssertionError, match="come to rest"):
        world.run(most_events=1000)
