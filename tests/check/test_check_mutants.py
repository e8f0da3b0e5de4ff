"""Every mutant of a correct program is refused with a witness, or an independent replay shows that it still does the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from check_programs import (
    Training,
    chain_broadcast,
    direct_exchange,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    training_layout,
    tree_all_reduce,
    two_groups,
    windowed_reduce,
)

from meshwright.check import Verdict, check_program
from meshwright.program.builder import ProgramBuilder
from meshwright.program.calls import inline
from meshwright.program.program import Program
from meshwright.testing.interpreter import Deadlocked, Machine, collective_is_right
from meshwright.testing.mutate import OPERATORS, mutants, mutate

REPLAYS = 25
COLLECTIVES: dict[str, Callable[[], Program]] = {
    **{f"ring all-reduce {n}": lambda n=n: ring_all_reduce(n) for n in (2, 3, 4, 5)},
    "ring all-reduce 3 x 3": lambda: ring_all_reduce(3, repeat=3),
    **{f"ring all-gather {n}": lambda n=n: ring_all_gather(n) for n in (2, 4)},
    **{f"ring reduce-scatter {n}": lambda n=n: ring_reduce_scatter(n) for n in (2, 3)},
    **{f"tree all-reduce {n}": lambda n=n: tree_all_reduce(n) for n in (3, 5)},
    "chain broadcast 4 x 3": lambda: chain_broadcast(4),
    "windowed reduce 3 x 4": lambda: windowed_reduce(3),
    "direct all-to-all 3": lambda: direct_exchange("all-to-all", 3),
    "direct scatter, uneven": lambda: direct_exchange("scatter", 4, root=2, counts=(2, 0, 3, 1)),
    "direct gather 3": lambda: direct_exchange("gather", 3, root=1),
    "permute 4": lambda: direct_exchange("permute", 4, peers=(2, 0, -1, 3)),
    "groups at once": two_groups,
    "windowed reduce 2 x 3, one slot": lambda: windowed_reduce(2, repeat=3, window=1),
}
LAYOUTS = {"data 2": {"data": 2}, "tensor 2": {"data": 1, "tensor": 2, "microbatches": 2}, "pipeline only": {"data": 1, "microbatches": 4}}


def assert_names_the_place(verdict: Verdict, what: str) -> None:
    """Rank, step and chunk are named wherever the fault has a step; tables name their entry."""
    first = next(f for f in verdict.findings if f.status == "wrong")
    if first.check == "format":
        assert "[" in str(first.witness["field"]) or "program." in str(first.witness["field"]), (what, first)
    elif "step" in first.witness:
        assert first.witness["rank"] >= 0 and {"step", "chunk", "lane", "iteration"} <= first.witness.keys(), (what, first)
    else:
        assert {"rank", "buffer", "comm", "size", "callee"} & first.witness.keys(), (what, first)
    assert first.message


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_mutant_of_a_collective_is_refused_or_equivalent(name: str) -> None:
    program = COLLECTIVES[name]()
    assert check_program(program).ok
    assert all(collective_is_right(program, seed) for seed in range(REPLAYS))
    killed, same = Counter(), Counter()
    for m in mutants(program, np.random.default_rng(1), per_operator=8):
        verdict = check_program(m.program)
        assert verdict.status != "unknown", (m.operator, m.what, verdict.findings)
        if verdict.status == "wrong":
            assert_names_the_place(verdict, f"{m.operator}: {m.what}")
            killed[m.operator] += 1
        else:
            assert all(collective_is_right(m.program, seed) for seed in range(REPLAYS)), f"accepted, but wrong: {m.operator}: {m.what}"
            same[m.operator] += 1
    assert killed["drop step"] and killed["duplicate step"] and killed["redirect send"] + killed["shrink buffer"]


def weights(program: Program, training: Training, seed: int) -> list[list[int]] | None:
    """What every rank's weights are after the step; None when it deadlocks."""
    try:
        m = Machine(program, seed=seed, replica=lambda rank: training.layout.coordinates(rank)[1]).run()
    except Deadlocked:
        return None
    return [m.result(b, 0, 1, 0) for b in range(len(program.buffers)) if program.buffers.role[b] == 2]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_mutant_of_a_training_step_is_refused_or_equivalent(name: str) -> None:
    t = Training(training_layout(**LAYOUTS[name]))
    assert check_program(t.program, programs=t.programs, layout=t.layout).ok
    right = weights(inline(t.program, t.programs).program, t, 0)
    assert right is not None
    assert all(weights(inline(t.program, t.programs).program, t, seed) == right for seed in range(1, 6))
    killed = Counter()
    for m in mutants(t.program, np.random.default_rng(2), per_operator=6):
        verdict = check_program(m.program, programs=t.programs, layout=t.layout)
        assert verdict.status != "unknown", (m.operator, m.what, verdict.findings)
        if verdict.status == "wrong":
            assert_names_the_place(verdict, f"{m.operator}: {m.what}")
            killed[m.operator] += 1
        else:
            flat = inline(m.program, t.programs).program
            assert all(weights(flat, t, seed) == right for seed in range(8)), f"accepted, but wrong: {m.operator}: {m.what}"
    for operator in ("drop backward", "double accumulate", "skip optimizer read", "wrong micro-batch", "drop accumulate"):
        assert killed[operator], operator


def test_every_operator_applies_somewhere_and_is_caught() -> None:
    """No operator is idle, and none makes only harmless changes."""
    assert len(OPERATORS) >= 22
    tensor = Training(training_layout(data=2, tensor=2, microbatches=2))
    rng = np.random.default_rng(3)
    pool = [(make(), None) for make in COLLECTIVES.values()] + [(tensor.program, tensor)]

    def is_caught(operator: str) -> bool:
        for program, t in pool:
            for _ in range(6):
                m = mutate(program, operator, rng)
                if m is None:
                    break
                if check_program(m.program, programs=t.programs if t else None, layout=t.layout if t else None).status == "wrong":
                    return True
        return False

    assert [operator for operator in OPERATORS if not is_caught(operator)] == ["lower depth"]  # these programs run at any depth
    assert check_program(needs_depth_two()).ok
    m = mutate(needs_depth_two(), "lower depth", rng)
    assert m is not None and check_program(m.program).findings[0].check == "deadlock"


def needs_depth_two() -> Program:
    """Two messages must be under way before the other lane of the receiver looks at the first."""
    b = ProgramBuilder(ranks=2, name="needs depth two")
    x, y = b.buffer(0, chunks=3, chunk_bytes=4), b.buffer(1, chunks=3, chunk_bytes=4)
    data, signal = b.channel(0, 1, depth=2), b.channel(0, 1)
    send, recv = b.lane(0), b.lane(1)
    send.send(data, x, 0)
    send.send(data, x, 1)
    send.send(signal, x, 2)
    recv.recv(signal, y, 2)
    recv.recv(data, y, 0)
    recv.recv(data, y, 1)
    return b.build()


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(KeyError):
        mutate(ring_all_reduce(2), "no such operator", np.random.default_rng(0))
