"""Every rule of form: a program that breaks exactly it, and the words that name the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.check.program.wellformed import check_wellformed
from meshwright.check.verdict import Verdict
from meshwright.errors import CheckFailed
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Contract, Part, Program


def base() -> tuple[ProgramBuilder, list[int], int]:
    b = ProgramBuilder(ranks=2)
    return b, [b.buffer(r, chunks=4, chunk_bytes=4, name=f"x{r}") for r in range(2)], b.channel(0, 1)


def one_step(**fields: int) -> Program:
    """A send and a receive; then fields of the send (step 0) are overwritten."""
    b, x, c = base()
    b.lane(0).send(c, x[0], 0)
    b.lane(1).recv(c, x[1], 0)
    p = b.build()
    steps = p.steps
    for name, value in fields.items():
        column = getattr(steps, name).copy()
        column[0] = value
        steps = replace(steps, **{name: column})
    return replace(p, steps=steps)


PART_RULES: list[tuple[str, dict[str, int]]] = [
    ("only transfers have parts", {"kind": 3}),
    ("a transfer with no part", {"parts": 0, "chan_out": -1}),
    ("reads, but names no source buffer", {"src_buffer": -1}),
    ("stores, but names no destination", {"parts": Part.READ | Part.STORE, "chan_out": -1}),
    ("names a source buffer that it does not read", {"parts": Part.SEND}),
    ("names a destination buffer that it does not store to", {"dst_buffer": 0}),
    ("sends, but neither receives nor reads", {"parts": Part.SEND, "src_buffer": -1}),
    ("takes data that goes nowhere", {"parts": Part.READ, "chan_out": -1}),
    ("stores, but neither receives nor reads", {"parts": Part.STORE, "dst_buffer": 0, "src_buffer": -1, "chan_out": -1}),
    ("adds, but has one operand only", {"parts": Part.ADD | Part.RECV | Part.STORE, "dst_buffer": 0, "src_buffer": -1, "chan_in": 0, "chan_out": -1}),
    ("receives and reads, but does not add", {"parts": Part.RECV | Part.READ | Part.SEND, "chan_in": 0}),
    ("adds to its destination, but does not store", {"parts": Part.READ | Part.ADD | Part.SEND}),
    ("names a channel set that it does not use", {"parts": Part.READ | Part.SEND | Part.IN_SET}),
]


@pytest.mark.parametrize(("words", "fields"), PART_RULES)
def test_parts_that_make_no_sense(words: str, fields: dict[str, int]) -> None:
    found = check_wellformed(one_step(**{k: int(v) for k, v in fields.items()}))
    assert any(words in f.message and f.witness["step"] == 0 for f in found), [f.message for f in found]


def unsized() -> Program:
    b, x, c = base()
    d = b.channel(1, 0)
    b.lane(0).send(c, x[0], 0)
    b.lane(1).transfer(recv=c, send=d)
    b.lane(0).recv(d, x[0], 1)
    return b.build()


def two_sizes() -> Program:
    b, x, _ = base()
    wide = b.buffer(0, chunks=1, chunk_bytes=8)
    b.lane(0).copy((x[0], 0), (wide, 0))
    return b.build()


def gather_without_add() -> Program:
    b, x, c = base()
    b.lane(0).send(c, x[0], 0)
    b.lane(1).transfer(recv=b.channel_set([c]), in_set=True, store=True, dst=(x[1], 0))
    return b.build()


def foreign_buffer() -> Program:
    b, x, _ = base()
    b.lane(0).copy((x[1], 0), (x[0], 0))
    return b.build()


def foreign_store() -> Program:
    b, x, _ = base()
    b.lane(0).copy((x[0], 0), (x[1], 0))
    return b.build()


def foreign_read() -> Program:
    b, x, _ = base()
    b.lane(0).compute(b.op("F", reads=[(x[1], 0, 1)]))
    return b.build()


def foreign_write() -> Program:
    b, x, _ = base()
    b.lane(0).compute(b.op("F", writes=[(x[1], 0, 1)]))
    return b.build()


def foreign_end() -> Program:
    b, x, _ = base()
    b.dies_after(x[1], b.lane(0).nop())
    return b.build()


def wrong_end() -> Program:
    b, x, c = base()
    b.lane(1).send(c, x[1], 0)
    return b.build()


def two_senders() -> Program:
    b, x, c = base()
    b.lane(0).send(c, x[0], 0)
    b.lane(0).send(c, x[0], 1)
    recv = b.lane(1)
    recv.recv(c, x[1], 0)
    recv.recv(c, x[1], 1)
    return b.build()


def no_partner() -> Program:
    b, x, c = base()
    b.lane(0).send(c, x[0], 0)
    return b.build()


def other_repeat() -> Program:
    b, x, c = base()
    b.lane(0, repeat=2).send(c, x[0], 0)
    b.lane(1, repeat=3).recv(c, x[1], 0)
    return b.build()


def other_bytes() -> Program:
    b, x, c = base()
    b.lane(0).send(c, x[0], 0, 2)
    b.lane(1).recv(c, x[1], 0, 3)
    return b.build()


def foreign_wait() -> Program:
    b, _, _ = base()
    b.lane(1).nop(after=[b.lane(0).nop()])
    return b.build()


def wait_across_repeats() -> Program:
    b, _, _ = base()
    b.lane(0).nop(after=[b.lane(0, repeat=2).nop()])
    return b.build()


def once_with_lag() -> Program:
    b, _, _ = base()
    b.lane(0, repeat=2).nop(after=[(b.lane(0).nop(), 1)])
    return b.build()


def alias(**fields: int) -> Callable[[], Program]:
    def make() -> Program:
        b = ProgramBuilder(ranks=2)
        of = b.buffer(0, chunks=4, chunk_bytes=4)
        b.buffer(fields.get("actor", 0), chunks=2, chunk_bytes=4, alias_of=of, alias_offset_bytes=fields.get("at", 0), window=fields.get("window", 0))
        return b.build(validate=False)

    return make


def alias_cycle() -> Program:
    b = ProgramBuilder(ranks=1)
    b.buffer(0, chunks=1, chunk_bytes=4, alias_of=1)
    b.buffer(0, chunks=1, chunk_bytes=4, alias_of=0)
    return b.build(validate=False)


def calls(sequences: list[list[str]], *, chunk_bytes: tuple[int, int] = (4, 4), group: tuple[int, ...] = (0, 1)) -> Callable[[], Program]:
    def make() -> Program:
        b = ProgramBuilder(ranks=2)
        comm = b.comm("dp", group)
        for r, names in enumerate(sequences):
            x = b.buffer(r, chunks=2, chunk_bytes=chunk_bytes[r])
            lane = b.lane(r)
            for name in names:
                lane.call(b.call(comm, name, [(0, x, 0)]))
        return b.build(validate=False)

    return make


def contract(**fields: object) -> Callable[[], Program]:
    def make() -> Program:
        b, x, _ = base()
        b.lane(0, repeat=int(str(fields.pop("repeat", 1)))).nop()
        if "window" in fields:
            x[0] = b.buffer(0, chunks=4, chunk_bytes=4, window=int(str(fields.pop("window"))))
        if "wide" in fields:
            x[0] = b.buffer(0, chunks=4, chunk_bytes=int(str(fields.pop("wide"))))
        whole = tuple((k, 0, 4) for k in x)
        b.contract = Contract(**{"op": "all-reduce", "inputs": whole, "outputs": whole, **fields})  # type: ignore[arg-type]
        return b.build(validate=False)

    return make


RULES: list[tuple[str, Callable[[], Program]]] = [
    ("moves chunks of no buffer", unsized),
    ("source and destination chunks differ in size", two_sizes),
    ("receives from a set, but does not add", gather_without_add),
    ("reads x1, which is on actor 1", foreign_buffer),
    ("stores to x1, which is on actor 1", foreign_store),
    ("reads x1, which is on actor 1", foreign_read),
    ("writes x1, which is on actor 1", foreign_write),
    ("ends the life of x1, which is on actor 1", foreign_end),
    ("sends on channel 0, whose end is actor 0", wrong_end),
    ("must have one lane at each end", two_senders),
    ("has 1 sends and 0 receives", no_partner),
    ("joins lanes of repeat 2 and 3", other_repeat),
    ("takes 12 bytes for message 0 of channel 0, which has 8", other_bytes),
    ("waits for a step of another actor", foreign_wait),
    ("another repeat", wait_across_repeats),
    ("the edge cannot have a lag", once_with_lag),
    ("lies in a buffer of actor 0", alias(actor=1)),
    ("ends at byte 20 of a buffer of 16", alias(at=12)),
    ("has window 2 inside window 0", alias(window=2)),
    ("form a cycle", alias_cycle),
    ("names a rank twice", calls([["a"], ["a"]], group=(0, 0))),
    ("of which it is no member", calls([["a"], ["a"]], group=(0,))),
    ("is never made by rank 1", calls([["a", "a"], ["a"]])),
    ("differs in callee or bytes", calls([["a", "b"], ["b", "a"]])),
    ("differs in callee or bytes", calls([["a"], ["a"]], chunk_bytes=(4, 8))),
    ("a broadcast needs a root among the 2 ranks", contract(op="broadcast", root=-1)),
    ("is no range of a buffer of that rank", contract(outputs=((0, 0, 4), (0, 0, 4)))),
    ("chunks of different sizes", contract(wide=8)),
    ("must hold every iteration", contract(window=2, repeat=3)),
]


@pytest.mark.parametrize(("words", "make"), RULES, ids=[words for words, _ in RULES])
def test_a_program_that_breaks_one_rule(words: str, make: Callable[[], Program]) -> None:
    found = check_wellformed(make())
    assert found and any(word in f.message for f in found for word in words.split("|")), [f.message for f in found]
    with pytest.raises(CheckFailed):
        Verdict(findings=tuple(found)).raise_if_wrong()


def test_a_table_out_of_range_is_a_finding_that_points() -> None:
    p = one_step(src_chunk=9)
    verdict = check_program(p)
    assert verdict.status == "wrong" and verdict.findings[0].witness["field"] == "program.steps.src_chunk[0]"


def test_a_sum_over_a_set_and_zero_byte_messages_are_legal() -> None:
    b = ProgramBuilder(ranks=2, switches=1)
    x = [b.buffer(r, chunks=1, chunk_bytes=4) for r in range(2)]
    hub = b.buffer(2, chunks=1, chunk_bytes=4, role="scratch")
    up, down = [b.channel(r, 2) for r in range(2)], [b.channel(2, r) for r in range(2)]
    for r in range(2):
        lane = b.lane(r)
        lane.send(up[r], x[r], 0)
        lane.recv(down[r], x[r], 0)
    lane = b.lane(2)
    lane.transfer(recv=b.channel_set(up), in_set=True, add=True, store=True, dst=(hub, 0))
    lane.transfer(send=b.channel_set(down), out_set=True, src=(hub, 0))
    whole = tuple((k, 0, 1) for k in x)
    b.contract = Contract(op="all-reduce", inputs=whole, outputs=whole)
    assert check_program(b.build()).ok
    b, _, c = base()
    b.lane(0).transfer(send=c, count=0)
    b.lane(1).transfer(recv=c, count=0)
    assert check_program(b.build()).ok


def test_only_so_many_findings_of_a_kind() -> None:
    b, x, c = base()
    lane = b.lane(0)
    for _ in range(50):
        lane.send(c, x[0], 0)
    p = b.build()
    p = replace(p, steps=replace(p.steps, parts=np.zeros(50, np.int32)))
    assert 1 <= len(check_wellformed(p)) <= 16
