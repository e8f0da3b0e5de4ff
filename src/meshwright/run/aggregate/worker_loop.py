"""A worker's loop: one tensor through the switch, compiled. Returns to Python when it is done, when a control message came, or when time is up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.compile import called, fingerprint, inlined, kernel
from . import arithmetic, frames, protocol, sockets
from .arithmetic import from_steps, largest_exponent, to_steps
from .frames import CONTRIBUTION, HEADER_BYTES, JOIN, MAGIC, MAX_CONTROL_BYTES, RESULT, VERSION, head, tail
from .protocol import accept
from .sockets import flush, now_ns, put, receive

__all__ = ["CONTROL", "DONE", "FLOATS", "LATER", "MAX_TIMEOUT_NS", "MIN_TIMEOUT_NS", "NUMBERS", "Flow", "Tensor", "collect", "patience_ns"]

DONE, LATER, CONTROL = 0, 1, 2  # why `collect` returned
NUMBERS, FLOATS = 0, 1  # how words travel: as they are, or floats as steps of a common exponent
# Until a packet is sent again, at least: 64 packets of 1 KiB queue for 11 ms at 50 Mbit/s; with 20 ms, packets were sent twice without any loss, with
# 100 ms never, and each loss cost its slot that long.
MIN_TIMEOUT_NS = 30_000_000
# From the third time on it doubles, up to this: a packet that is lost a second time is not made to wait long (at 20 % loss each way every third is),
# and a worker that waits for one that computes sends 64 packets in a quarter of a second.
MAX_TIMEOUT_NS, MAX_DOUBLINGS = 250_000_000, 4
# places in `Flow.numbers`
WORLD, WORKER, SLOTS, FIRST, END, CALL, WORDS, SMOOTH_NS, SPREAD_NS, PROGRESS_NS, SENT, RESENT, RESULTS, LEFT, SPLIT = range(15)


class Flow(NamedTuple):
    """Per slot: `due` (the chunk it waits for), when it was sent and how often, its agreed exponent, its header, and its payload where that is made.

    `numbers`: figures of the stream and of the call, by the places above; `at`: addresses of headers and of staging, bytes of its row, address of the
    tensor, steps of a block; `control`: the last control message, its bytes in the first word.
    """

    due: Any
    sent_ns: Any
    tries: Any
    agreed: Any
    headers: Any
    staging: Any
    numbers: Any
    at: Any
    control: Any


class Tensor(NamedTuple):
    """The same memory as 32-bit words and as floats, what goes in and what comes out, which may be one."""

    words: Any
    floats: Any
    out: Any
    out_floats: Any


@inlined
def _span(flow, tensor, number, coded):  # type: ignore[no-untyped-def]
    """(first element, elements) of a chunk's data; coded: the first turn of slots carries none, it agrees on exponents."""
    each = flow.numbers[WORDS] if flow.numbers[SPLIT] == 0 else flow.numbers[WORDS] // 2
    index = number - flow.numbers[FIRST] - (flow.numbers[SLOTS] if coded else 0)
    first = index * each
    if index < 0:
        return np.int64(0), np.int64(0)
    return first, min(each, tensor.words.shape[0] - first)


@called
def _post(fd, flow, tensor, number, coded, out, now):  # type: ignore[no-untyped-def]
    """Make a chunk's packet and queue it."""
    slot = number % flow.numbers[SLOTS]
    first, count = _span(flow, tensor, number, coded)
    exponent = np.int64(0)
    if coded:
        after, more = _span(flow, tensor, number + flow.numbers[SLOTS], coded)
        if number + flow.numbers[SLOTS] < flow.numbers[END]:
            exponent = largest_exponent(tensor.words, after, more)
        to_steps(tensor.floats, first, count, flow.agreed[slot], flow.at[4], flow.numbers[SPLIT], flow.staging, slot)
    flow.headers[slot, 0] = head(CONTRIBUTION, flow.numbers[WORKER], flow.numbers[WORLD])
    flow.headers[slot, 1] = tail(number, exponent, flow.numbers[CALL])
    flow.tries[slot] = 0
    _send(fd, flow, tensor, number, coded, out, now)


@called
def _send(fd, flow, tensor, number, coded, out, now):  # type: ignore[no-untyped-def]
    slot = number % flow.numbers[SLOTS]
    first, count = _span(flow, tensor, number, coded)
    if coded:
        payload = flow.at[1] + slot * flow.at[2]
        count = count * (2 if flow.numbers[SPLIT] else 1)
    else:
        payload = flow.at[3] + 4 * first
    put(fd, out, 0, flow.at[0] + slot * HEADER_BYTES, payload, 4 * count)
    flow.sent_ns[slot] = now
    flow.tries[slot] += 1
    flow.numbers[SENT] += 1


@inlined
def _timed(flow, slot, now):  # type: ignore[no-untyped-def]
    """A round trip, of a packet that was sent once: Jacobson's smoothing, as TCP's."""
    took = now - flow.sent_ns[slot]
    if flow.numbers[SMOOTH_NS] == 0:
        flow.numbers[SMOOTH_NS], flow.numbers[SPREAD_NS] = took, took // 2
    else:
        flow.numbers[SPREAD_NS] += (abs(took - flow.numbers[SMOOTH_NS]) - flow.numbers[SPREAD_NS]) // 4
        flow.numbers[SMOOTH_NS] += (took - flow.numbers[SMOOTH_NS]) // 8


@inlined
def patience_ns(smooth_ns, spread_ns, tries):  # type: ignore[no-untyped-def]
    """How long after its last sending a packet is sent again.

    The cap holds for the measured round trip, too. That includes waiting for other workers, and while one waits long it measures longer ones: without
    a cap, at 20 % loss, a worker came to wait for minutes.
    """
    wait = max(smooth_ns + 4 * spread_ns, MIN_TIMEOUT_NS)
    return min(wait << min(max(tries - 2, 0), MAX_DOUBLINGS), MAX_TIMEOUT_NS)


@called
def _result(fd, box, i, flow, tensor, coded, out, now):  # type: ignore[no-untyped-def]
    """Whether it is a result that was due; it is stored, and the slot's next chunk sent."""
    size = (box.heads[i, 7] & 0xFFFFFFFF) - HEADER_BYTES
    number, exponent, call = box.words[i, 1] & (1 << 40) - 1, box.words[i, 1] >> 40 & 255, box.words[i, 1] >> 48 & 0xFFFF
    if call != flow.numbers[CALL] or not flow.numbers[FIRST] <= number < flow.numbers[END]:
        return False
    slots, slot = flow.numbers[SLOTS], number % flow.numbers[SLOTS]
    first, count = _span(flow, tensor, number, coded)
    if size != 4 * count * (2 if coded and flow.numbers[SPLIT] else 1) or not accept(flow.due, slots, number):
        return False
    flow.numbers[RESULTS] += 1
    flow.numbers[LEFT] -= 1
    flow.numbers[PROGRESS_NS] = now
    if flow.tries[slot] == 1:
        _timed(flow, slot, now)
    if coded:
        from_steps(box.numbers, i, 4, count, flow.agreed[slot], flow.at[4], flow.numbers[SPLIT], tensor.out_floats, first)
        flow.agreed[slot] = exponent
    else:
        for x in range(count):
            tensor.out[first + x] = box.numbers[i, 4 + x]
    if number + slots < flow.numbers[END]:
        _post(fd, flow, tensor, number + slots, coded, out, now)
    return True


def _entry(sources: int) -> Any:
    """Closes over the sources of what it uses: code that was kept for others is not taken."""

    @kernel
    def collect(fd, box, out, flow, tensor, how, begin, until_ns):  # type: ignore[no-untyped-def]
        """Go on with the call until all chunks `FIRST`..`END` are there. `begin`: send the first turn of slots."""
        if sources < 0:
            return LATER
        coded = how == FLOATS
        now = now_ns(out)
        slots = flow.numbers[SLOTS]
        if begin:
            flow.numbers[PROGRESS_NS] = now
            for number in range(flow.numbers[FIRST], min(flow.numbers[FIRST] + slots, flow.numbers[END])):
                _post(fd, flow, tensor, number, coded, out, now)
        checked = now
        while flow.numbers[LEFT] > 0:
            flush(fd, out)
            got = receive(fd, box)
            now = now_ns(out)
            for i in range(got):
                word = box.words[i, 0]
                kind, size = word >> 16 & 15, box.heads[i, 7] & 0xFFFFFFFF
                if size < HEADER_BYTES or word & 0xFFFF != MAGIC or word >> 20 & 15 != VERSION:
                    continue
                if kind >= JOIN and size <= MAX_CONTROL_BYTES:
                    flow.control[0] = size
                    for x in range(-(-size // 8)):
                        flow.control[1 + x] = box.words[i, x]
                if kind == RESULT and (word >> 32 & 0xFFFFFFFF) == flow.numbers[WORLD]:
                    _result(fd, box, i, flow, tensor, coded, out, now)
            if flow.control[0]:
                return CONTROL
            if now - checked > 5_000_000:
                checked = now
                for slot in range(slots):
                    patience = patience_ns(flow.numbers[SMOOTH_NS], flow.numbers[SPREAD_NS], flow.tries[slot])
                    if flow.due[slot] < flow.numbers[END] and now - flow.sent_ns[slot] > patience:
                        flow.numbers[RESENT] += 1
                        _send(fd, flow, tensor, flow.due[slot], coded, out, now)
            if now > until_ns:
                flush(fd, out)
                return LATER
        flush(fd, out)
        return DONE

    return collect


collect = _entry(fingerprint(*(str(m.__file__) for m in (arithmetic, frames, protocol, sockets))))
