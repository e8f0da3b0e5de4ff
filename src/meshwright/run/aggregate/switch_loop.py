"""The switch's loop: packets in, sums out, compiled. Control messages, and jobs whose workers disagree, are handed to Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels import sparse_block
from ...kernels.compile import called, fingerprint, inlined, kernel
from . import frames, injector, operators, protocol, sockets, sparse_rounds
from .frames import CONTRIBUTION, HEADER_BYTES, JOIN, MAGIC, MAX_CONTROL_BYTES, RESULT, VERSION, head, tail
from .injector import Injector, again, keep, strikes
from .operators import combine, fold
from .protocol import DOUBLE, FIRST, IGNORED, MAX_WORKERS, REPEAT, row_of, take
from .sockets import Outbox, flush, now_ns, put, receive
from .sparse_rounds import SPARSE, combine_round, heard_above, sane

__all__ = [
    "ABORTED", "COUNTERS", "FREE", "MAX_CONTROLS", "MAX_JOBS", "RUNNING", "Controls", "Jobs", "Rows", "serve",
]  # fmt: skip

MAX_JOBS = 64  # of one switch at a time: each packet's job is looked for among them
MAX_CONTROLS = 256  # control messages that wait for Python; more are lost, and will be sent again
FREE, RUNNING, ABORTED = 0, 1, 2
# columns of `Jobs.table`
WORLD, WORKERS, FIRST_ROW, SLOTS, KIND, FOLDS, FIRST_POOL, POOL_STEP, STATE, PARENT_WORLD, PARENT_WORKER, SPAN, BLAMED = range(13)
COUNTERS = ("contributions", "results", "repeats", "doubles", "stale", "foreign", "malformed")
_CONTRIBUTIONS, _RESULTS, _REPEATS, _DOUBLES, _STALE, _FOREIGN, _MALFORMED = range(7)
MIN_RESEND_NS, MAX_RESEND_NS = 30_000_000, 250_000_000  # until a sum is sent to the parent again, as a worker's packet (`worker_loop`)


class Rows(NamedTuple):
    """Per row: the protocol's state, the result's header, its bytes, call and exponent, the flush in which it was queued, when it was sent up and how
    often. `pool`: the sums, 32-bit words. `at`: addresses of headers, pool, job addresses. `blocks`: of sparse jobs, one per slot."""

    chunk: Any
    seen: Any
    ready: Any
    headers: Any
    size: Any
    call: Any
    exponent: Any
    queued: Any
    sent_ns: Any
    tries: Any
    pool: Any
    at: Any
    blocks: Any


class Jobs(NamedTuple):
    """`table[j]`: one job; `names[j, w]`: address of worker w, the last one the parent's; `heard[j, w]`: when it was last heard. `own`: the
    loop of the switch's own operator."""

    table: Any
    names: Any
    heard: Any
    counters: Any
    own: Any


class Controls(NamedTuple):
    """Control messages for Python: their words, bytes and senders. `state`: how many; whether a job was aborted."""

    words: Any
    size: Any
    names: Any
    state: Any


@inlined
def _job_of(jobs, column, world):  # type: ignore[no-untyped-def]
    for j in range(jobs.table.shape[0]):
        if jobs.table[j, STATE] == RUNNING and jobs.table[j, column] == world:
            return j
    return -1


@called
def _control(box, i, size, controls):  # type: ignore[no-untyped-def]
    at = controls.state[0]
    if at < MAX_CONTROLS and size <= MAX_CONTROL_BYTES:
        for x in range(-(-size // 8)):
            controls.words[at, x] = box.words[i, x]
        controls.size[at] = size
        controls.names[at, 0] = box.names[i, 0]
        controls.state[0] += 1


@called
def _to_all(fd, rows, jobs, j, row, out, chaos):  # type: ignore[no-untyped-def]
    """The result is there: to every worker."""
    rows.ready[row] = 1
    rows.headers[row, 0] = head(RESULT, np.int64(0), jobs.table[j, WORLD])
    rows.headers[row, 1] = tail(rows.chunk[row], rows.exponent[row], rows.call[row])
    for worker in range(jobs.table[j, WORKERS]):
        _to_one(fd, rows, jobs, j, row, worker, out, chaos)


@called
def _to_one(fd, rows, jobs, j, row, worker, out, chaos):  # type: ignore[no-untyped-def]
    jobs.counters[_RESULTS] += 1
    pool = jobs.table[j, FIRST_POOL] + (row - jobs.table[j, FIRST_ROW]) * jobs.table[j, POOL_STEP]
    copies = 1
    if chaos.rates[0] > 0.0:
        copies = strikes(chaos)
        if keep(chaos):
            chaos.kept[chaos.state[0], 0], chaos.kept[chaos.state[0], 1] = rows.headers[row, 0], rows.headers[row, 1]
            size = rows.size[row] // 4
            for x in range(size):
                chaos.numbers[chaos.state[0], 4 + x] = rows.pool[pool, x]
            again(chaos, np.int64(0), j, worker, rows.chunk[row], HEADER_BYTES + rows.size[row])
    for _ in range(copies):
        name = rows.at[2] + (j * (MAX_WORKERS + 1) + worker) * 16
        put(fd, out, name, rows.at[0] + row * 16, rows.at[1] + pool * rows.at[3], rows.size[row])
        rows.queued[row] = out.state[1]


@called
def _up(fd, rows, jobs, j, row, out, now):  # type: ignore[no-untyped-def]
    """The sum of this switch's workers to its parent, as a worker of that."""
    rows.headers[row, 0] = head(CONTRIBUTION, jobs.table[j, PARENT_WORKER], jobs.table[j, PARENT_WORLD])
    rows.headers[row, 1] = tail(rows.chunk[row], rows.exponent[row], rows.call[row])
    pool = jobs.table[j, FIRST_POOL] + (row - jobs.table[j, FIRST_ROW]) * jobs.table[j, POOL_STEP]
    name = rows.at[2] + (j * (MAX_WORKERS + 1) + MAX_WORKERS) * 16
    put(fd, out, name, rows.at[0] + row * 16, rows.at[1] + pool * rows.at[3], rows.size[row])
    rows.queued[row] = out.state[1]
    rows.sent_ns[row] = now
    rows.tries[row] += 1


@inlined
def _abort(jobs, controls, j, worker):  # type: ignore[no-untyped-def]
    """The workers' calls differ: Python tells them."""
    jobs.table[j, STATE], jobs.table[j, BLAMED] = ABORTED, worker
    controls.state[1] = 1


@called
def _contribution(fd, words, numbers, i, size, rows, jobs, j, worker, out, controls, chaos, now):  # type: ignore[no-untyped-def]
    first, slots, workers = jobs.table[j, FIRST_ROW], jobs.table[j, SLOTS], jobs.table[j, WORKERS]
    number, exponent, call = words[i, 1] & (1 << 40) - 1, words[i, 1] >> 40 & 255, words[i, 1] >> 48 & 0xFFFF
    row, kind = first + row_of(number, slots), jobs.table[j, KIND]
    if kind == SPARSE and not sane(numbers, i, 4, size // 4, jobs.table[j, SPAN]):
        jobs.counters[_MALFORMED] += 1
        return
    jobs.counters[_CONTRIBUTIONS] += 1
    jobs.heard[j, worker] = now
    action = take(rows.chunk[first:], rows.seen[first:], rows.ready[first:], row - first, slots, worker, number)
    if action == IGNORED:
        jobs.counters[_STALE] += 1
        return
    if action == DOUBLE:
        jobs.counters[_DOUBLES] += 1
        return
    if action == REPEAT:
        jobs.counters[_REPEATS] += 1
        _to_one(fd, rows, jobs, j, row, worker, out, chaos)
        return
    pool = jobs.table[j, FIRST_POOL] + (row - first) * jobs.table[j, POOL_STEP]
    if action == FIRST:
        if rows.queued[row] == out.state[1]:
            flush(fd, out)  # before what waits to be sent is overwritten
        rows.size[row], rows.call[row], rows.exponent[row], rows.tries[row] = size, call, exponent, 0
    elif (rows.size[row] != size and kind != SPARSE) or rows.call[row] != call:
        _abort(jobs, controls, j, worker)
        return
    rows.exponent[row] = max(rows.exponent[row], exponent)
    count = size // 4
    folds = jobs.table[j, FOLDS]
    if folds or action == FIRST:
        into = pool + (worker if folds else 0)
        for x in range(count):
            rows.pool[into, x] = numbers[i, 4 + x]
        if folds and kind != SPARSE:
            fold(kind, jobs.own, rows.pool, pool, workers, rows.seen[row], worker, count)
    else:
        combine(kind, jobs.own, rows.pool, pool, numbers, i, np.int64(4), count)
    if rows.seen[row] == (1 << workers) - 1:
        if kind == SPARSE:
            rows.size[row] = combine_round(
                rows.blocks, row // 2, rows.pool, pool, workers, jobs.table[j, SPAN], jobs.table[j, PARENT_WORLD] < 0
            )
            if rows.size[row] < 0:
                _abort(jobs, controls, j, worker)
                return
        if jobs.table[j, PARENT_WORLD] >= 0:
            _up(fd, rows, jobs, j, row, out, now)
        else:
            _to_all(fd, rows, jobs, j, row, out, chaos)


@called
def _from_parent(fd, words, numbers, i, size, rows, jobs, j, out, chaos):  # type: ignore[no-untyped-def]
    first = jobs.table[j, FIRST_ROW]
    number = words[i, 1] & (1 << 40) - 1
    row = first + row_of(number, jobs.table[j, SLOTS])
    full = rows.seen[row] == (1 << jobs.table[j, WORKERS]) - 1
    sparse = jobs.table[j, KIND] == SPARSE
    fits = sane(numbers, i, 4, size // 4, jobs.table[j, SPAN]) if sparse else size == rows.size[row]
    if rows.chunk[row] != number or not full or rows.ready[row] or not fits:
        jobs.counters[_STALE] += 1
        return
    if rows.queued[row] == out.state[1]:
        flush(fd, out)
    pool = jobs.table[j, FIRST_POOL] + (row - first) * jobs.table[j, POOL_STEP]
    for x in range(size // 4):
        rows.pool[pool, x] = numbers[i, 4 + x]
    if sparse:
        rows.size[row] = size
        heard_above(rows.blocks, row // 2, rows.pool, pool, jobs.table[j, WORKERS])
    rows.exponent[row] = words[i, 1] >> 40 & 255
    _to_all(fd, rows, jobs, j, row, out, chaos)


@called
def _packet(fd, box, i, rows, jobs, out, controls, chaos, now):  # type: ignore[no-untyped-def]
    size = (box.heads[i, 7] & 0xFFFFFFFF) - HEADER_BYTES
    word = box.words[i, 0]
    if size < 0 or word & 0xFFFF != MAGIC or word >> 20 & 15 != VERSION:
        jobs.counters[_MALFORMED] += 1
        return
    kind, worker, world = word >> 16 & 15, word >> 24 & 255, word >> 32 & 0xFFFFFFFF
    if kind >= JOIN:
        _control(box, i, size + HEADER_BYTES, controls)
        return
    j = _job_of(jobs, WORLD if kind == CONTRIBUTION else PARENT_WORLD, world)
    if kind == RESULT:
        worker = MAX_WORKERS
    elif j >= 0 and worker >= jobs.table[j, WORKERS]:
        j = -1
    if j < 0 or box.names[i, 0] != jobs.names[j, worker, 0]:
        jobs.counters[_FOREIGN] += 1
        if kind == CONTRIBUTION and j < 0:
            _control(box, i, np.int64(HEADER_BYTES), controls)  # Python tells a worker of a job that is over
        return
    if size % 4 or size > rows.at[3]:
        jobs.counters[_MALFORMED] += 1
        return
    if kind == RESULT:
        _from_parent(fd, box.words, box.numbers, i, size, rows, jobs, j, out, chaos)
        return
    copies = 1
    if chaos.rates[0] > 0.0:
        copies = strikes(chaos)
        if keep(chaos):
            for x in range(-(-(size + HEADER_BYTES) // 8)):
                chaos.kept[chaos.state[0], x] = box.words[i, x]
            again(chaos, np.int64(1), j, worker, box.words[i, 1] & (1 << 40) - 1, size + HEADER_BYTES)
    for _ in range(copies):
        _contribution(fd, box.words, box.numbers, i, size, rows, jobs, j, worker, out, controls, chaos, now)


@called
def _late(fd, rows, jobs, out, controls, chaos, now):  # type: ignore[no-untyped-def]
    """Send again what was kept and whose slot has gone on for long enough, from the newest back."""
    i = np.int64(0)
    while i < chaos.state[0]:
        up, j, worker, number, size = chaos.about[i, 0], chaos.about[i, 1], chaos.about[i, 2], chaos.about[i, 3], chaos.about[i, 4]
        slots = jobs.table[j, SLOTS]
        first = jobs.table[j, FIRST_ROW]
        row = first + 2 * (number % slots)
        over = jobs.table[j, STATE] != RUNNING
        if not over and max(rows.chunk[row], rows.chunk[row + 1]) < number + injector.LATE_TURNS * slots:
            i += 1
            continue
        if not over and up:
            _contribution(fd, chaos.kept, chaos.numbers, i, size - HEADER_BYTES, rows, jobs, j, worker, out, controls, chaos, now)
            chaos.state[1] += 1
        elif not over:
            name = rows.at[2] + (j * (MAX_WORKERS + 1) + worker) * 16
            put(fd, out, name, chaos.at[0] + i * chaos.at[1], chaos.at[0] + i * chaos.at[1] + HEADER_BYTES, size - HEADER_BYTES)
            flush(fd, out)
            chaos.state[1] += 1
        last = chaos.state[0] - 1
        for x in range(chaos.kept.shape[1]):
            chaos.kept[i, x] = chaos.kept[last, x]
        for x in range(5):
            chaos.about[i, x] = chaos.about[last, x]
        chaos.state[0] = last


@called
def _timers(fd, rows, jobs, out, now):  # type: ignore[no-untyped-def]
    """Sums whose parent has not answered are sent again."""
    for j in range(jobs.table.shape[0]):
        if jobs.table[j, STATE] == RUNNING and jobs.table[j, PARENT_WORLD] >= 0:
            first, everyone = jobs.table[j, FIRST_ROW], (1 << jobs.table[j, WORKERS]) - 1
            for row in range(first, first + 2 * jobs.table[j, SLOTS]):
                wait = min(MIN_RESEND_NS << min(max(rows.tries[row] - 2, 0), 4), MAX_RESEND_NS)
                if rows.seen[row] == everyone and not rows.ready[row] and now - rows.sent_ns[row] > wait:
                    _up(fd, rows, jobs, j, row, out, now)


def _entry(sources: int) -> Any:
    """Closes over the sources of what it uses: code that was kept for others is not taken."""

    @kernel  # type: ignore[untyped-decorator]
    def serve(fd, box, rows, jobs, out: Outbox, controls, chaos: Injector, until_ns):  # type: ignore[no-untyped-def]
        """Until the time, or until there is something for Python."""
        if sources < 0:
            return
        checked = np.int64(0)
        while True:
            got = receive(fd, box)
            now = now_ns(out)
            for i in range(got):
                _packet(fd, box, i, rows, jobs, out, controls, chaos, now)
            if chaos.rates[0] > 0.0:
                _late(fd, rows, jobs, out, controls, chaos, now)
            if now - checked > 5_000_000:
                _timers(fd, rows, jobs, out, now)
                checked = now
            flush(fd, out)
            if controls.state[0] or controls.state[1] or now > until_ns:
                return

    return serve


serve = _entry(fingerprint(*(str(m.__file__) for m in (frames, injector, operators, protocol, sockets, sparse_block, sparse_rounds))))
