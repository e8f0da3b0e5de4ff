"""Rounds of a block without sockets, in plain Python: what goes on adds up to what came in, and waits where the next above asks for it.

And the times of ways.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.kernels import sparse_block
from meshwright.kernels.sparse_block import BLOCK, HOLD, WAITING, made_blocks
from meshwright.run.aggregate import sparse_reducer
from meshwright.run.aggregate import sparse_rounds as rounds
from meshwright.run.aggregate.sparse_reducer import TIMED, WAYS, Load, SparseReducer, link_bytes
from meshwright.run.aggregate.sparse_rounds import ARRAY, FRAME_WORDS, HOLDS, MORE

SPAN, WORKERS, NUMBER = 64, 3, 5
BASE = NUMBER * SPAN


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that only kernels may call, as they are written."""
    for module in (rounds, sparse_block):
        for name, value in [*vars(module).items()]:
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)


def packets(words: int, workers: int = WORKERS) -> Any:
    return np.zeros((workers, words), np.int32)


def filled(pool: Any, worker: int, pairs: list[tuple[int, float]], *, more: bool, number: int = NUMBER) -> None:
    pool[worker, :FRAME_WORDS] = rounds.pack(MORE if more else 0, len(pairs)), number
    for x, (index, value) in enumerate(pairs):
        pool[worker, 2 + 2 * x], pool[worker, 3 + 2 * x] = index, rounds.word_of(value)


def read(row: Any) -> tuple[int, list[tuple[int, float]]]:
    """(flags, numbers with their indices) of a packet."""
    flags, count = int(row[0]) & 255, int(row[0]) >> 8
    if flags & ARRAY:
        return flags, [(BASE + int(row[2]) + x, float(rounds.float_of(row[3 + x]))) for x in range(count)]
    return flags, [(int(row[2 + 2 * x]), float(rounds.float_of(row[3 + 2 * x]))) for x in range(count)]


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_what_goes_on_adds_up_to_what_came_in(top: bool, density: float) -> None:
    words = 12
    draw = np.random.default_rng(int(10 * density))
    given = [[(BASE + i, float(draw.integers(1, 9))) for i in range(SPAN) if draw.random() < density] for _ in range(WORKERS)]
    total = np.zeros(SPAN)
    for row in given:
        for index, value in row:
            total[index - BASE] += value
    blocks, most = made_blocks(1, span=SPAN, places=16, waiting=8 * WORKERS * words), rounds.most_pairs(words)
    found, passed = np.zeros(SPAN), 0
    while True:
        pool = packets(words)
        for w, row in enumerate(given):
            filled(pool, w, row[passed * most : (passed + 1) * most], more=len(row) > (passed + 1) * most)
        size = rounds.combine_round(blocks, 0, pool, 0, WORKERS, SPAN, top)
        flags, sent = read(pool[0])
        assert int(pool[0, 1]) == NUMBER and size == 4 * (FRAME_WORDS + (1 + len(sent) if flags & ARRAY else 2 * len(sent)))
        assert rounds.sane(pool, 0, 0, size // 4, SPAN)
        for index, value in sent:
            found[index - BASE] += value
        passed += 1
        if not flags & MORE:
            break
        assert passed < 100
    assert found.tolist() == total.tolist() and passed >= -(-max(map(len, given)) // most)
    assert (int(blocks.state[0, BLOCK]) == 0) == top, "one below the top is not over before the answer comes"


def test_a_block_waits_while_the_next_above_asks_for_it() -> None:
    words, blocks = 8, made_blocks(1, span=SPAN, places=16, waiting=200)
    pool = packets(words)
    filled(pool, 0, [(BASE + 1, 2.0)], more=True)
    filled(pool, 1, [(BASE + 1, 3.0)], more=False)
    filled(pool, 2, [(BASE + 9, 4.0)], more=False)
    flags, sent = (rounds.combine_round(blocks, 0, pool, 0, WORKERS, SPAN, False), read(pool[0]))[1]
    assert flags == MORE and not sent, "pairs wait for a full packet while more comes"
    answer = packets(words, 1)
    answer[0, :2] = rounds.pack(HOLDS | MORE, 0), NUMBER
    rounds.heard_above(blocks, 0, answer, 0, WORKERS)
    assert blocks.state[0, HOLD] and int(answer[0, 0]) & HOLDS and blocks.state[0, BLOCK] == NUMBER + 1
    for w in range(WORKERS):
        filled(pool, w, [], more=False)
    flags, sent = (rounds.combine_round(blocks, 0, pool, 0, WORKERS, SPAN, False), read(pool[0]))[1]
    assert not sent and flags & MORE, "all is there, and nothing may go"
    answer[0, 0] = rounds.pack(MORE, 0)
    rounds.heard_above(blocks, 0, answer, 0, WORKERS)
    assert not blocks.state[0, HOLD] and not int(answer[0, 0]) & HOLDS
    for w in range(WORKERS):
        filled(pool, w, [], more=False)
    flags, sent = (rounds.combine_round(blocks, 0, pool, 0, WORKERS, SPAN, False), read(pool[0]))[1]
    assert dict(sent) == {BASE + 1: 5.0, BASE + 9: 4.0} and not flags & MORE
    answer[0, 0] = rounds.pack(0, 0)
    rounds.heard_above(blocks, 0, answer, 0, WORKERS)
    assert blocks.state[0, BLOCK] == 0, "over"


def test_workers_of_other_blocks_and_full_waiting_rooms() -> None:
    words, blocks = 8, made_blocks(1, span=1 << 12, places=1, waiting=2 * WORKERS * 8 + 3)
    pool = packets(words)
    for w in range(WORKERS):
        filled(pool, w, [], more=False, number=NUMBER + (w == 2))
    assert rounds.combine_round(blocks, 0, pool, 0, WORKERS, SPAN, False) == -1
    base = NUMBER << 12
    for w in range(WORKERS):
        filled(pool, w, [(base + 3 * w + x, 1.0) for x in range(3)], more=True)
    blocks.state[0, BLOCK], blocks.state[0, HOLD] = NUMBER + 1, HOLDS
    rounds.combine_round(blocks, 0, pool, 0, WORKERS, 1 << 12, False)
    assert blocks.state[0, WAITING] == 8 and int(pool[0, 0]) & HOLDS, "another round might not fit"
    answer = packets(words, 1)
    answer[0, :2] = rounds.pack(MORE, 0), NUMBER
    rounds.heard_above(blocks, 0, answer, 0, WORKERS)
    assert int(answer[0, 0]) & HOLDS


def test_a_way_s_line_goes_through_its_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"dense": (2e-3, 4e-9), "sparse": (1e-3, 8e-9), "ring": (5e-3, 1e-9), "hosts": (1e-4, 3e-8)}
    assert set(lines) == set(WAYS)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(sparse_reducer.time, "perf_counter", lambda: clock.now)
    calls: list[tuple[int, str]] = []
    made: Any = object.__new__(SparseReducer)
    made.rank, made.workers, made.span, made.words, made.pace, made.stream = 1, 4, 256, 90, {}, object()
    made.last, made.hosts = np.zeros(1, np.float32), SimpleNamespace(most=lambda value, other: (value, other))

    def all_reduce(array: Any, *, way: str) -> None:
        density = next(d for n, d in TIMED if n == array.size)
        array[: array.size // 4] = 1.0  # the sum has other numbers than the worker's own
        load = Load(4, array.size, array.size * density, float(np.count_nonzero(array)))
        fixed, byte = lines[way]
        slower = 1.0 if calls.count((array.size, way)) == 1 else 1.5  # of three calls the second is the quickest
        clock.now += slower * (fixed + byte * link_bytes(way, load, words=90, span=256))
        calls.append((array.size, way))

    made.all_reduce = lambda array, way: all_reduce(array, way=way)
    for way in WAYS:
        made._time(way)
    for way, (fixed, byte) in lines.items():
        assert made.pace[way] == pytest.approx((fixed, byte), rel=1e-3), way
    made.pace, made.stream = {}, None
    calls.clear()
    for way in WAYS:
        made._time(way)
    assert set(made.pace) == set(WAYS[2:]), "without a switch its ways have no pace"
