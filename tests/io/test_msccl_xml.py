"""MSCCL XML: what is read is what is written; bad files are refused by a message that names GPU, block and step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msccl_executor_twin import replays
from msccl_files import FILES, relay_all_gather, ring_all_reduce

from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.interop.from_msccl import import_msccl, root_of, waits_of
from meshwright.interop.msccl import ExecutorLimits, MscclBlock, MscclGpu, MscclStep
from meshwright.io.msccl.xml import msccl_text, parse_msccl, read_msccl, write_msccl
from meshwright.program.program import Kind, Part

# Other formatting: a declaration, comments, single quotes, another order of attributes, attributes nobody reads.
FORMATTED = b"""<?xml version="1.0"?>
<!-- Copyright (c) Somebody. -->
<algo coll='allreduce' name="two &amp; &quot;more&quot;" proto="LL" nchannels="1" nchunksperloop="2" ngpus="2" inplace="1" outofplace="0"
      minBytes="0" maxBytes="4096" redop="sum" maxcount="1">
 <gpu s_chunks="0" o_chunks="0" i_chunks="2" id="0">
  <tb id="0" send="1" recv="1" chan="0" rcclgroup="7">
   <!-- swap -->
   <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0" why="first"/>
   <step s="1" type="rrcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="2" type="r" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"></step>
  </tb></gpu>
 <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="0">
  <tb id="0" send="0" recv="0" chan="0">
   <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="1" type="rrcs" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
   <step s="2" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
  </tb></gpu>
</algo>
"""


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_read_again(name: str) -> None:
    algo = FILES[name]()
    assert parse_msccl(msccl_text(algo).encode()) == algo


def test_formatting_does_not_matter_and_nothing_is_lost() -> None:
    algo = parse_msccl(FORMATTED)
    assert (algo.name, algo.protocol, algo.collective, algo.max_bytes) == ('two & "more"', "LL", "allreduce", 4096)
    assert algo.extra == (("redop", "sum"), ("maxcount", "1"))
    assert algo.gpus[0].blocks[0].extra == (("rcclgroup", "7"),) and algo.gpus[0].blocks[0].steps[0].extra == (("why", "first"),)
    text = msccl_text(algo)
    assert parse_msccl(text.encode()) == algo
    assert "'" not in re.sub(r'"[^"]*"', "", text)  # the executor's parser knows double quotes only
    replays(text)


def test_files(tmp_path) -> None:
    algo = ring_all_reduce(3)
    write_msccl(tmp_path / "ring.xml", algo)
    assert read_msccl(tmp_path / "ring.xml") == algo
    with pytest.raises(UsageError, match="cannot read"):
        read_msccl(tmp_path / "none.xml")


RING = msccl_text(ring_all_reduce(2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<algo", "<system", "not XML: mismatched tag"),
        (' cnt="1"', "", "ring.xml: gpu 0 tb 0 step 0: cnt: is missing (line 4)"),
        (' cnt="1"', ' cnt="1.5"', "ring.xml: gpu 0 tb 0 step 0: cnt: must be a whole number, got '1.5'"),
        (' cnt="1"', ' cnt=""', "ring.xml: gpu 0 tb 0 step 0: cnt: must be a whole number, got ''"),
        (' cnt="1"', ' cnt="9999999999"', "ring.xml: gpu 0 tb 0 step 0: cnt: must be -2147483648..2147483647, got 9999999999"),
        (' cnt="1"', ' cnt="' + "9" * 400 + '"', "ring.xml: gpu 0 tb 0 step 0: cnt: must be a whole number, got '999"),
        (' cnt="1"', ' cnt="1" cnt="1"', "ring.xml: line 4: not XML: duplicate attribute"),
        ('type="s"', 'type="send"', "ring.xml: gpu 0 tb 0 step 0: type: must be one of s, r, cpy, re, rrc, rrs, rcs, rrcs, nop, got 'send'"),
        ('srcbuf="i"', 'srcbuf="x"', "ring.xml: gpu 0 tb 0 step 0: srcbuf: must be one of i, o, s, got 'x'"),
        ('recv="1"', 'recv="one"', "ring.xml: gpu 0 tb 0: recv: must be a whole number, got 'one'"),
        ('chan="0"', "", "ring.xml: gpu 0 tb 0: chan: is missing"),
        ('<tb id="0"', "<tb", "ring.xml: gpu 0: id: is missing"),
        ('i_chunks="2"', "", "ring.xml: gpu 0: i_chunks: is missing"),
        ('<gpu id="0"', '<gpu id="x"', "ring.xml: id: must be a whole number, got 'x'"),
        ('proto="Simple"', 'proto="LL256"', "ring.xml: proto: must be one of Simple, LL, LL128, got 'LL256'"),
        ('coll="allreduce"', 'coll="allredoce"', "ring.xml: coll: must be one of allreduce,"),
        (' maxBytes="0"', "", "ring.xml: maxBytes: is missing"),
        ("<tb ", "stray <tb ", "ring.xml: gpu 0: text between elements is not allowed: 'stray'"),
        ("    <tb ", '    <nic x="1"/><tb ', "ring.xml: gpu 0: unknown element <nic> (line 3)"),
        ("  <gpu ", '  <cpu x="1"/><gpu ', "ring.xml: unknown element <cpu> (line 2)"),
        ("      <step ", "      <stop/><step ", "ring.xml: gpu 0 tb 0: unknown element <stop>"),
        ("/>", "><a/></step>", "ring.xml: gpu 0 tb 0 step 0: unknown element <a>"),
        ("    <tb ", '    <copy i_off="0"/><tb ', "ring.xml: gpu 0 copy 0: o_off: is missing"),
    ],
)
def test_refused_where_it_is_wrong(old: str, new: str, message: str) -> None:
    assert old in RING
    with pytest.raises(FormatError) as caught:
        parse_msccl(RING.replace(old, new, 1).encode(), "ring.xml")
    assert message in str(caught.value)


def test_other_documents_are_refused() -> None:
    with pytest.raises(FormatError, match=r"t\.xml: must be an <algo> document, got <system>"):
        parse_msccl(b'<system version="1"/>', "t.xml")
    with pytest.raises(FormatError, match="DOCTYPE"):
        parse_msccl(b"<!DOCTYPE algo [<!ENTITY a 'b'>]>" + RING.encode(), "t.xml")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_truncated_and_damaged_files_are_read_or_refused(data: st.DataObject) -> None:
    text = bytearray(RING.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["cut", "change", "drop"]))
        if kind == "cut":
            del text[at:]
        elif kind == "change":
            text[at] = data.draw(st.integers(0, 255))
        else:
            del text[at : at + data.draw(st.integers(1, 40))]
        if not text:
            text = bytearray(b" ")
    try:
        algo = parse_msccl(bytes(text), "ring.xml")
    except FormatError as error:
        assert str(error).startswith("ring.xml")
    else:
        assert parse_msccl(msccl_text(algo).encode()) == algo


# ---- the executor's numbers --------------------------------------------------------------------------------------------
def test_waits_are_counted_as_the_executor_counts() -> None:
    """A wait for step d ends with the first step numbered d or more that publishes; nops count when they carry a wait."""
    step = MscclStep
    block = MscclBlock(0, -1, -1, 0, (
        step(0, "cpy", "i", 0, "o", 0, 1), step(1, "nop", "i", -1, "o", -1, 0, 1, 0), step(2, "cpy", "i", 1, "o", 1, 1, 1, 1, 1),
        step(3, "cpy", "i", 0, "o", 0, 1, -1, -1, 1),
    ))  # fmt: skip
    other = MscclBlock(1, -1, -1, 0, (
        step(0, "re", "i", 0, "s", 0, 1), step(1, "re", "i", 1, "s", 0, 1, -1, -1, 1), step(2, "cpy", "s", 0, "o", 0, 1, 0, 3),
    ))  # fmt: skip
    rows = waits_of(MscclGpu(0, 2, 2, 1, (block, other)))
    assert [r.number for r in rows[0]] == [0, -1, 2, 3]
    assert rows[0][2].waits == ((1, 1), (1, 1)) and not rows[0][2].missing  # steps 0 and 1 of block 1 fuse, the second publishes
    assert [r.fused for r in rows[1]] == [False, True, False]
    assert rows[1][2].waits == ((0, 3),)
    assert waits_of(MscclGpu(0, 2, 2, 1, (block, replace(other, steps=other.steps[:1]))))[0][2].missing == ((1, 0), (1, 1))


def test_fusion_ends_at_sixteen_and_at_published_sums() -> None:
    sums = tuple(MscclStep(k, "re", "s", k, "o", 0, 1, -1, -1, int(k == 3)) for k in range(20))
    fused = [r.fused for r in waits_of(MscclGpu(0, 1, 1, 20, (MscclBlock(0, -1, -1, 0, sums),)))[0]]
    assert [k for k, f in enumerate(fused) if not f] == [0, 4, 16]


@pytest.mark.parametrize(("in_place", "aliases"), [(False, 0), (True, 4)])
def test_lanes_steps_and_places(in_place: bool, aliases: int) -> None:
    """One lane per block, one step per step; program.md's table of parts; in place the buffers lie in each other."""
    algo = replace(relay_all_gather(4), out_of_place=1)
    made = import_msccl(algo, in_place=in_place)
    p = made.program
    assert len(p.lanes) == 8 and len(p.steps) == 24 and int((p.buffers.alias_of >= 0).sum()) == aliases
    for k, (gpu, block, position) in enumerate(zip(made.gpu.tolist(), made.block.tolist(), made.position.tolist(), strict=True)):
        s = algo.gpus[gpu].blocks[block].steps[position]
        parts = {"R": Part.RECV, "X": Part.READ, "A": Part.ADD, "D": Part.STORE, "S": Part.SEND}
        assert p.steps.kind[k] == Kind.TRANSFER and int(p.steps.parts[k]) == sum(parts[x] for x in s.parts)
        assert int(p.steps.count[k]) == s.chunks
    if in_place:
        i = next(b for b in range(len(p.buffers)) if p.buffers.name[b] == "i:2")
        assert p.buffers.name[int(p.buffers.alias_of[i])] == "o:2" and int(p.buffers.alias_offset_bytes[i]) == 2 * 2 * 4


def test_messages_are_as_small_as_the_biggest_call_makes_them() -> None:
    algo = ring_all_reduce(4, width=4)
    assert [len(import_msccl(algo, in_place=True, batch=b).program.steps) for b in (0, 1, 3, 4)] == [28, 112, 56, 28]
    limits = ExecutorLimits()
    assert limits.batch(algo) == 1  # no upper size
    assert limits.batch(replace(algo, max_bytes=16 << 20)) == 2  # 1 MiB chunks, 2 MiB fit
    assert limits.batch(replace(algo, max_bytes=1 << 10)) == 71
    assert limits.batch(replace(algo, protocol="LL", max_bytes=16 << 20)) == 1


def test_roots_are_stated_or_plain() -> None:
    algo = FILES["chain broadcast 3 from 1"]()
    assert algo.root == -1 and root_of(algo) == 1
    assert root_of(replace(algo, root=2)) == 2
    idle = replace(algo, ranks=4, gpus=(*algo.gpus, MscclGpu(3, 5, 5, 0, ())))
    with pytest.raises(Unsupported, match="2 ranks could be the root"):
        root_of(idle)
    with pytest.raises(Unsupported, match="promises is not known"):
        import_msccl(replace(algo, collective="alltoallv"), in_place=False)


def test_what_cannot_be_a_program_is_refused() -> None:
    algo = ring_all_reduce(3)
    lost = replace(algo.gpus[0].blocks[0], send=9)
    with pytest.raises(FormatError, match="no channel leads from gpu 0 to gpu 9"):
        import_msccl(replace(algo, gpus=(replace(algo.gpus[0], blocks=(lost,)), *algo.gpus[1:])), in_place=True)
    with pytest.raises(FormatError, match=r"chunks 2\.\.2 of 'i', which has 2"):
        import_msccl(replace(algo, chunks_per_loop=2), in_place=False)
