"""A worker's loop: one tensor through the switch, compiled. Returns to Python when it is done, when a control message came, or when time is up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.compile import called, fingerprint, inlined, kernel
from . import arithmetic, frames, protocol, sockets, sparse_rounds
from .arithmetic import from_steps, largest_exponent, to_steps
from .frames import CONTRIBUTION, HEADER_BYTES, JOIN, MAGIC, MAX_CONTROL_BYTES, RESULT, VERSION, head, tail
from .protocol import accept
from .sockets import flush, now_ns, put, receive
from .sparse_rounds import ARRAY, FRAME_WORDS, HOLDS, MORE, float_of, most_pairs, pack, sane, word_of

__all__ = [
    "CONTROL", "DONE", "FLOATS", "LATER", "MAX_TIMEOUT_NS", "MIN_TIMEOUT_NS", "NUMBERS", "PAIRS", "Flow", "Tensor", "collect", "fresh_flow",
    "patience_ns", "tensor_of",
]  # fmt: skip

DONE, LATER, CONTROL = 0, 1, 2  # why `collect` returned
NUMBERS, FLOATS, PAIRS = 0, 1, 2  # how words travel: as they are, floats as steps of a common exponent, floats as pairs with their indices
# Until a packet is sent again, at least: 64 packets of 1 KiB queue for 11 ms at 50 Mbit/s; with 20 ms, packets were sent twice without any loss, with
# 100 ms never, and each loss cost its slot that long.
MIN_TIMEOUT_NS = 30_000_000
# From the third time on it doubles, up to this: a packet that is lost a second time is not made to wait long (at 20 % loss each way every third is),
# and a worker that waits for one that computes sends 64 packets in a quarter of a second.
MAX_TIMEOUT_NS, MAX_DOUBLINGS = 250_000_000, 4
# places in `Flow.numbers`
WORLD, WORKER, SLOTS, FIRST, END, CALL, WORDS, SMOOTH_NS, SPREAD_NS, PROGRESS_NS, SENT, RESENT, RESULTS, LEFT, SPLIT, SPAN, BLOCKS = range(17)


class Flow(NamedTuple):
    """Per slot: `due` (the chunk it waits for), when it was sent and how often, its agreed exponent, its header, and its payload where that is made.

    `numbers`: figures of the stream and of the call, by the places above; `at`: addresses of headers and of staging, bytes of its row, address of the
    tensor, steps of a block; `control`: the last control message, its bytes in the first word. Of pairs, per slot: `block` in hand (-1: none
    any more, -2: none yet), `place` of the next pair, bytes of the packet.
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
    block: Any
    place: Any
    size: Any


class Tensor(NamedTuple):
    """The same memory as 32-bit words and as floats, what goes in and what comes out, which may be one. Of pairs: `keys` beside the words, and the
    `first` pair of every block."""

    words: Any
    floats: Any
    out: Any
    out_floats: Any
    keys: Any
    first: Any


def fresh_flow(slots: int, words: int) -> Flow:
    """Of a stream of so many slots, of packets of so many words; `numbers` and the address of the tensor are still to be set."""
    headers, staging = np.zeros((slots, 2), np.int64), np.zeros((slots, words), np.int32)
    tries, sent_ns, agreed, place, size = (np.zeros(slots, np.int64) for _ in range(5))
    at, numbers = np.array([headers.ctypes.data, staging.ctypes.data, 4 * words, 0, 0]), np.zeros(BLOCKS + 1, np.int64)
    numbers[[SLOTS, WORDS]] = slots, words
    control = np.zeros(1 + MAX_CONTROL_BYTES // 8, np.int64)
    return Flow(np.arange(slots), sent_ns, tries, agreed, headers, staging, numbers, at, control, np.full(slots, -1), place, size)


def tensor_of(into: Any, out: Any = None, keys: Any = None, first: Any = None) -> Tensor:
    """Arrays of 32-bit words, of which `out` may be the first."""
    out = into if out is None else out
    none, nowhere = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return Tensor(into.view(np.int32), into.view(np.float32), out.view(np.int32), out.view(np.float32), none if keys is None else keys,
                  nowhere if first is None else first)  # fmt: skip


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
    put(fd, out, np.int64(0), flow.at[0] + slot * HEADER_BYTES, payload, 4 * count)
    flow.sent_ns[slot] = now
    flow.tries[slot] += 1
    flow.numbers[SENT] += 1


@called
def _post_pairs(fd, flow, tensor, number, holds, out, now):  # type: ignore[no-untyped-def]
    """Make the next packet of a slot's block and queue it; `holds`: without pairs, the switch has no room."""
    slot = number % flow.numbers[SLOTS]
    block, at, words = flow.block[slot], flow.place[slot], flow.numbers[WORDS]
    end, flags, count, size = tensor.first[block + 1], 0, 0, FRAME_WORDS
    if not holds and at < end:
        start = tensor.keys[at]
        bound = min(start + words - FRAME_WORDS - 1, (block + 1) * flow.numbers[SPAN])
        while at + count < end and tensor.keys[at + count] < bound:
            count += 1
        run = tensor.keys[at + count - 1] - start + 1
        if count > most_pairs(words) or (at + count == end and 1 + run < 2 * count):  # numbers in a row take fewer bytes
            for x in range(run):
                flow.staging[slot, 3 + x] = 0
            for x in range(count):
                flow.staging[slot, 3 + tensor.keys[at + x] - start] = word_of(tensor.floats[at + x])
            flow.staging[slot, 2] = start - block * flow.numbers[SPAN]
            flags, size, at, count = ARRAY, FRAME_WORDS + 1 + run, at + count, run
        else:
            count = min(most_pairs(words), end - at)
            for x in range(count):
                flow.staging[slot, 2 + 2 * x], flow.staging[slot, 3 + 2 * x] = tensor.keys[at + x], word_of(tensor.floats[at + x])
            size, at = FRAME_WORDS + 2 * count, at + count
    if at < end:
        flags |= MORE
    flow.staging[slot, 0], flow.staging[slot, 1] = pack(flags, count), block
    flow.place[slot], flow.size[slot], flow.tries[slot] = at, 4 * size, 0
    flow.headers[slot, 0] = head(CONTRIBUTION, flow.numbers[WORKER], flow.numbers[WORLD])
    flow.headers[slot, 1] = tail(number, np.int64(0), flow.numbers[CALL])
    _send_pairs(fd, flow, slot, out, now)


@called
def _send_pairs(fd, flow, slot, out, now):  # type: ignore[no-untyped-def]
    put(fd, out, np.int64(0), flow.at[0] + slot * HEADER_BYTES, flow.at[1] + slot * flow.at[2], flow.size[slot])
    flow.sent_ns[slot] = now
    flow.tries[slot] += 1
    flow.numbers[SENT] += 1


@called
def _begin_block(fd, flow, tensor, slot, block, out, now):  # type: ignore[no-untyped-def]
    """The first packet of a block; beyond the last one the slot rests."""
    flow.block[slot] = block if block < flow.numbers[BLOCKS] else -1
    if flow.block[slot] >= 0:
        flow.place[slot] = tensor.first[block]
        _post_pairs(fd, flow, tensor, flow.due[slot], np.int64(0), out, now)


@called
def _pairs_result(fd, box, i, flow, tensor, out, now):  # type: ignore[no-untyped-def]
    """Whether it is the next part of a block's sum; it is added, and the slot's next packet sent."""
    words = ((box.heads[i, 7] & 0xFFFFFFFF) - HEADER_BYTES) // 4
    number, call = box.words[i, 1] & (1 << 40) - 1, box.words[i, 1] >> 48 & 0xFFFF
    slot, span = number % flow.numbers[SLOTS], flow.numbers[SPAN]
    if call != flow.numbers[CALL] or not sane(box.numbers, i, 4, words, span) or box.numbers[i, 5] != flow.block[slot]:
        return False
    if not accept(flow.due, flow.numbers[SLOTS], number):
        return False
    flow.numbers[RESULTS] += 1
    flow.numbers[PROGRESS_NS] = now
    if flow.tries[slot] == 1:
        _timed(flow, slot, now)
    flags, count = box.numbers[i, 4] & 255, box.numbers[i, 4] >> 8
    other = slot + -(-flow.numbers[SLOTS] // 2)
    if other < flow.numbers[SLOTS] and flow.block[other] == -2 and (count or not flags & MORE):
        _begin_block(fd, flow, tensor, other, other, out, now)  # staggered: half of the slots send their pairs while sums of the others come down
    for x in range(count):
        if flags & ARRAY:
            index, value = flow.block[slot] * span + box.numbers[i, 6] + x, float_of(box.numbers[i, 7 + x])
        else:
            index, value = np.int64(box.numbers[i, 6 + 2 * x]), float_of(box.numbers[i, 7 + 2 * x])
        if index < tensor.out_floats.shape[0]:
            tensor.out_floats[index] += value
    if flags & MORE:
        _post_pairs(fd, flow, tensor, flow.due[slot], flags & HOLDS, out, now)
    else:
        flow.numbers[LEFT] -= 1
        _begin_block(fd, flow, tensor, slot, flow.block[slot] + flow.numbers[SLOTS], out, now)
    return True


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
            if how == PAIRS:
                for slot in range(slots):
                    flow.block[slot] = -2
                for slot in range(-(-slots // 2)):
                    _begin_block(fd, flow, tensor, slot, slot, out, now)
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
                    if how == PAIRS:
                        _pairs_result(fd, box, i, flow, tensor, out, now)
                        continue
                    _result(fd, box, i, flow, tensor, coded, out, now)
            if flow.control[0]:
                return CONTROL
            if now - checked > 5_000_000:
                checked = now
                for slot in range(slots):
                    patience = patience_ns(flow.numbers[SMOOTH_NS], flow.numbers[SPREAD_NS], flow.tries[slot])
                    if now - flow.sent_ns[slot] <= patience:
                        continue
                    if how == PAIRS:
                        if flow.block[slot] >= 0:
                            flow.numbers[RESENT] += 1
                            _send_pairs(fd, flow, slot, out, now)
                    elif flow.due[slot] < flow.numbers[END]:
                        flow.numbers[RESENT] += 1
                        _send(fd, flow, tensor, flow.due[slot], coded, out, now)
            if now > until_ns:
                flush(fd, out)
                return LATER
        flush(fd, out)
        return DONE

    return collect


collect = _entry(fingerprint(*(str(m.__file__) for m in (arithmetic, frames, protocol, sockets, sparse_rounds))))
