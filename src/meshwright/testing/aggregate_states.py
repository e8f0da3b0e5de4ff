"""Every state that an aggregation can reach where anything ever sent may be delivered again at any time, or never: is a wrong result ever taken,
and can the end be reached from everywhere?

What has been sent follows from the state of those who send (a worker that waits for a chunk has sent it and all before it), so a state is that of the
switch and of the workers alone. A value is the tuple of how often each worker is in it; right is (1, 1, ..., 1).
`take`: the rule of the switch, ours or another (`original`, the paper's); workers take a result that has the number they wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..run.aggregate import protocol
from ..run.aggregate.protocol import ADDED, DOUBLE, FIRST, REPEAT

__all__ = ["Explored", "explore", "original", "ours"]

Value = tuple[int, ...]
Row = tuple[int, int, int, Value]  # chunk, seen, ready (the paper's rule: how many came, modulo the workers), value
State = tuple[tuple[Row, ...], tuple[int, ...], frozenset[tuple[int, Value]]]  # rows, dues of worker after worker, results that were sent
Take = Callable[[list[Row], int, int, int, int], tuple[int, bool]]  # rows, row, slots, worker, chunk -> what to do, whether the sum is now complete
_take, _accept, _row_of, _first = (f.py_func for f in (protocol.take, protocol.accept, protocol.row_of, protocol.first_chunk))


@dataclass(frozen=True)
class Explored:
    """`states` reached; `wrong`: the shortest way to a wrong result taken, () if there is none; `stuck`: states that cannot reach the end."""

    states: int
    wrong: tuple[str, ...]
    stuck: int


def ours(rows: list[Row], row: int, slots: int, worker: int, number: int) -> tuple[int, bool]:
    """The rule of `protocol.take` on tuples."""
    chunk, seen, ready = (np.array([r[i] for r in rows], np.int64) for i in range(3))
    action = int(_take(chunk, seen, ready, row, slots, worker, number))
    workers = len(rows[row][3])
    complete = action in (FIRST, ADDED) and int(seen[row]) == (1 << workers) - 1
    rows[row] = (int(chunk[row]), int(seen[row]), int(ready[row]) or int(complete), rows[row][3])
    return action, complete


def original(rows: list[Row], row: int, slots: int, worker: int, number: int) -> tuple[int, bool]:
    """The published rule: a bit per worker and version, the other version's bit cleared, a count modulo the workers.

    Nothing says which chunk a row holds; the packet's own number goes with the result.
    """
    bit, other = 1 << worker, row ^ 1
    _, seen, count, value = rows[row]
    if seen & bit:
        return (REPEAT if count == 0 else DOUBLE), False
    count = (count + 1) % len(value)
    rows[row] = (number, seen | bit, count, value)
    rows[other] = (rows[other][0], rows[other][1] & ~bit, *rows[other][2:])
    return (ADDED if seen else FIRST), count == 0


def explore(workers: int, slots: int, chunks: int, take: Take = ours) -> Explored:
    """All states, breadth first; stops at the first wrong result that a worker takes."""
    rows = tuple((int(_first(row, slots)), 0, 0, (0,) * workers) for row in range(2 * slots))
    start: State = (rows, tuple(slot for _ in range(workers) for slot in range(slots)), frozenset())
    came: dict[State, tuple[State, str] | None] = {start: None}
    before: dict[State, list[State]] = {start: []}
    queue, alive = deque([start]), set[State]()
    while queue:
        state = queue.popleft()
        if all(due >= chunks for due in state[1]):
            alive.add(state)
        for said, after, wrong in _steps(state, workers, slots, chunks, take):
            if wrong:
                return Explored(len(came), (*_way(came, state), said), 0)
            if after not in came:
                came[after] = (state, said)
                before[after] = []
                queue.append(after)
            before[after].append(state)
    todo = list(alive)
    while todo:
        for earlier in before[todo.pop()]:
            if earlier not in alive:
                alive.add(earlier)
                todo.append(earlier)
    return Explored(len(came), (), len(came) - len(alive))


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    said: list[str] = []
    while (link := came[state]) is not None:
        state, word = link
        said.append(word)
    return said[::-1]


def _steps(state: State, workers: int, slots: int, chunks: int, take: Take) -> Iterator[tuple[str, State, bool]]:
    """(what happens, the state after, whether a worker took a wrong result)."""
    rows, dues, results = state
    for worker in range(workers):
        own = dues[worker * slots : (worker + 1) * slots]
        for number in range(chunks):
            if number <= own[number % slots]:  # sent at some time
                yield f"chunk {number} of worker {worker} comes", _up(state, slots, worker, number, take), False
        for number, value in sorted(results):
            due = np.array(own, np.int64)
            if _accept(due, slots, number):
                after = (*dues[: worker * slots], *map(int, due), *dues[(worker + 1) * slots :])
                yield f"worker {worker} takes {value} as chunk {number}", (rows, after, results), value != (1,) * workers


def _up(state: State, slots: int, worker: int, number: int, take: Take) -> State:
    rows, row, results = list(state[0]), int(_row_of(number, slots)), state[2]
    action, complete = take(rows, row, slots, worker, number)
    chunk, seen, ready, value = rows[row]
    if action == FIRST:
        value = tuple(int(i == worker) for i in range(len(value)))
    elif action == ADDED:
        value = tuple(x + (i == worker) for i, x in enumerate(value))
    rows[row] = (chunk, seen, ready, value)
    if complete or action == REPEAT:  # a repeated result has the number of the packet that asked for it
        results |= {(number, value)}
    return tuple(rows), state[1], results
