"""`check_msccl` on right and wrong files: every rule of the executor, deadlock at depth 2, races, delivery, and where the fault is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msccl_executor_twin import Hang, Machine, hangs, replays
from msccl_files import FILES, all_pairs_all_reduce, chain_broadcast, direct, relay_all_gather, ring_all_reduce, steps, with_block, with_step

from meshwright.check import Verdict
from meshwright.check.foreign.msccl import smallest_fifo
from meshwright.drive.handover.verdicts import check_msccl
from meshwright.errors import CheckFailed, Deadlock
from meshwright.interop.from_msccl import import_msccl
from meshwright.interop.msccl import ExecutorLimits, MscclAlgo, MscclBlock, MscclGpu
from meshwright.io.msccl.xml import msccl_text

RING = ring_all_reduce(3)
PAIRS = all_pairs_all_reduce(3)


@pytest.mark.parametrize("name", FILES)
def test_right_files_are_right(name: str) -> None:
    """For the checker, and for the interpreter of the executor's rules that shares no code with it."""
    algo = FILES[name]()
    verdict = check_msccl(algo)
    assert verdict.ok, verdict.findings
    assert verdict.facts["smallest_fifo"] in (1, 2)
    replays(msccl_text(algo), root=1 if "from 1" in name else 0)


def only(verdict: Verdict) -> Any:
    assert verdict.status == "wrong", verdict
    return verdict.findings[0]


def gpu(algo: MscclAlgo, number: int, **values: Any) -> MscclAlgo:
    return replace(algo, gpus=tuple(replace(g, **values) if g.id == number else g for g in algo.gpus))


def block(algo: MscclAlgo, g: int, b: int, **values: Any) -> MscclAlgo:
    return with_block(algo, g, b, lambda x: replace(x, **values))


TWO = ring_all_reduce(3, rings=2)
WRONG: list[tuple[str, MscclAlgo, str, dict[str, int]]] = [
    ("channels", replace(RING, channels=33), "nchannels is 33, the executor has 1..32", {}),
    ("no channel", replace(RING, channels=0), "nchannels is 0", {}),
    ("no chunk", replace(RING, chunks_per_loop=0), "nchunksperloop is 0", {}),
    ("no gpu", replace(RING, ranks=0, gpus=()), "ngpus is 0", {}),
    ("spelling", replace(direct(3, "allgather"), collective="all_gather"), "coll is 'all_gather', which the executor refuses; it says allgather", {}),
    ("dialect", replace(RING, collective="reduce_scatter"), "it says reducescatter", {}),
    ("parts", replace(relay_all_gather(2), chunks_per_loop=5), "nchunksperloop is 5, which are not 2 equal parts", {}),
    ("flag", replace(RING, in_place=2), "inplace is 2, it must be 0 or 1", {}),
    ("no mode", replace(RING, in_place=0, out_of_place=0), "the executor never chooses this file", {}),
    ("sizes", replace(RING, min_bytes=9, max_bytes=8), "minBytes 9 and maxBytes 8", {}),
    ("root", replace(chain_broadcast(3), root=3), "root is 3, there are 3 gpus", {}),
    ("name", replace(RING, name="x" * 256), "name has 256 characters, the executor reads 255", {}),
    ("twice", replace(RING, gpus=(*RING.gpus, RING.gpus[1])), "gpu 1 is described twice", {"gpu": 1}),
    ("stranger", gpu(RING, 2, id=7), "gpu 7 is none of the 3", {"gpu": 7}),
    ("missing", replace(RING, gpus=RING.gpus[:2]), "gpu 2 is missing", {"gpu": 2}),
    ("negative", gpu(RING, 1, s_chunks=-1), "gpu 1: s_chunks is -1", {"gpu": 1}),
    ("tb twice", block(TWO, 1, 1, id=0), "gpu 1 tb 0 is described twice", {"gpu": 1, "tb": 0}),
    ("tb gap", block(TWO, 1, 1, id=2), "but no tb 1: ids must be 0..1", {"gpu": 1, "tb": 1}),
    ("own peer", block(RING, 1, 0, send=1), "gpu 1 tb 0: send names its own gpu", {"gpu": 1, "tb": 0}),
    ("far peer", block(RING, 1, 0, recv=3), "gpu 1 tb 0: recv is 3, there are 3 gpus", {"gpu": 1, "tb": 0}),
    ("chan", block(RING, 1, 0, channel=1), "gpu 1 tb 0: chan is 1, nchannels is 1", {"gpu": 1, "tb": 0}),
    ("numbers", with_step(RING, 1, 0, 2, number=4), "step 2 of 5 is numbered 4", {"gpu": 1, "tb": 0, "step": 2}),
    ("shared", block(TWO, 1, 1, channel=0), "is tb 0's connection too", {"gpu": 1, "tb": 1}),
    ("one-sided", block(RING, 1, 0, send=-1), "gpu 2 tb 0: recv 1 on channel 0, where gpu 1 has no block with send 2", {"gpu": 1, "tb": 0}),
    ("hasdep", with_step(RING, 1, 0, 2, hasdep=2), "hasdep is 2, it must be 0 or 1", {"gpu": 1, "tb": 0, "step": 2}),
    ("depid", with_step(RING, 1, 0, 2, depid=-2), "depid is -2", {"step": 2}),
    ("idle nop", with_step(PAIRS, 1, 0, 0, depid=-1), "a nop without depid", {"gpu": 1, "tb": 0, "step": 0}),
    ("no send peer", with_step(relay_all_gather(3), 1, 0, 0, type="rcs"), "sends, but its block has no peer to send to", {"gpu": 1, "tb": 0}),
    ("no recv peer", with_step(relay_all_gather(3), 1, 1, 0, type="r"), "receives, but its block has no peer to receive from", {"tb": 1}),
    ("count", with_step(RING, 1, 0, 2, chunks=0), "cnt is 0, the executor moves 1..71 chunks", {"step": 2}),
    ("count 72", with_step(RING, 1, 0, 2, chunks=72), "cnt is 72", {"step": 2}),
    ("beyond", with_step(RING, 1, 0, 2, dst_offset=3), "dstoff 3 with cnt 1 lies outside the 3 chunks of o", {"gpu": 1, "tb": 0, "step": 2}),
    ("before", with_step(RING, 1, 0, 0, src_offset=-1), "srcoff -1 with cnt 1 lies outside", {"step": 0}),
    ("16 bits", gpu(with_step(RING, 1, 0, 2, dst_offset=40000), 1, o_chunks=50000), "dstoff 40000 does not fit the executor's 16 bits", {"step": 2}),
    ("one more", with_block(RING, 1, 0, lambda b: replace(b, steps=(*b.steps, b.steps[0]._replace(number=5)))), "sends message 4", {"step": 5}),
    ("sizes differ", gpu(with_step(RING, 1, 0, 0, chunks=2), 1, i_chunks=9), "takes 1 chunks as message 0", {"gpu": 2, "tb": 0, "step": 1}),
    ("no such block", with_step(PAIRS, 1, 0, 1, depid=7), "waits for tb 7, but gpu 1 has no such block", {"gpu": 1, "tb": 0, "step": 1}),
    ("before all", with_step(PAIRS, 1, 0, 1, deps=-1), "deps is -1: that holds before anything has run", {"step": 1}),
    ("no flag", with_step(PAIRS, 1, 1, 1, hasdep=0), "which sets no flag from there on", {"gpu": 1, "tb": 0}),
    ("nop chain", with_step(PAIRS, 1, 0, 1, depid=-1), "which has no depid of its own: the executor refuses the file", {"gpu": 1, "tb": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "message", "witness"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_the_executors_rules(algo: MscclAlgo, message: str, witness: dict[str, int]) -> None:
    verdict = check_msccl(algo)
    assert verdict.status == "wrong"
    assert {f.check for f in verdict.findings} == {"executor"}
    assert any(message in f.message for f in verdict.findings), [f.message for f in verdict.findings]
    assert any(witness.items() <= f.witness.items() for f in verdict.findings), [f.witness for f in verdict.findings]
    with pytest.raises(CheckFailed):
        verdict.raise_if_wrong()


def local(*blocks: tuple, scratch: int = 30) -> MscclAlgo:
    """Two gpus with local blocks only, to test rules that look at one block."""
    made = tuple(MscclBlock(k, -1, -1, 0, steps(*rows)) for k, rows in enumerate(blocks))
    return replace(RING, ranks=1, chunks_per_loop=9, gpus=(MscclGpu(0, 9, 9, scratch, made),))


def test_reductions_that_fuse() -> None:
    chain = [("re", f"s{k}", "o0", 1) for k in range(20)]
    assert check_msccl(local(tuple(chain[:16]))).findings[0].check != "executor"
    assert check_msccl(local(tuple(chain))).findings[0].check != "executor"  # the executor starts anew after the 16th of a block
    first = [("re", "s0", f"o{k % 2}", 1) for k in range(16)]
    found = only(check_msccl(local((*first, *chain[:17]))))
    assert "more than 16 operands" in found.message and found.witness["step"] == 32
    found = only(check_msccl(local((("re", "s0", "o0", 1), ("re", "s1", "o0", 2)))))
    assert "fuses with the reduction of step 0, which has cnt 1" in found.message
    between = (("re", "s0", "o0", 1), ("nop", "", "", 0, 1, 0), ("re", "s1", "o0", 1))
    found = only(check_msccl(local(between, (("cpy", "i0", "s1", 1, -1, -1, 1),))))
    assert "a nop between reductions that fuse into one: step 2 does not wait for it" in found.message
    found = only(check_msccl(local((("cpy", "i0", "o0", 1), ("nop", "", "", 0, 1, 0)), (("cpy", "i0", "s1", 1, -1, -1, 1),))))
    assert "a nop at the end of its block" in found.message


def test_sizes_of_the_executors_tables() -> None:
    long = tuple(("cpy", "i0", "o0", 1) for _ in range(65))
    found = only(check_msccl(local(long)))
    assert found.message == "gpu 0 tb 0 has 65 steps, the executor was built for 64"
    assert "executor" not in {f.check for f in check_msccl(local(long), limits=ExecutorLimits(steps=256)).findings}
    many = tuple((("cpy", "i0", "o0", 1, *((k - 1, 0) if k == 129 else ()), *((1,) if k == 129 else ())),) for k in range(130))
    wait = check_msccl(local(*(((("cpy", "i0", "o0", 1, -1, -1, 1),) if k == 128 else row) for k, row in enumerate(many))))
    assert "waits for tb 128, but the executor keeps that number in 8 bits (at most 127)" in only(wait).message
    crowd = tuple(tuple(("cpy", "i0", "o0", 1) for _ in range(64)) for _ in range(64))
    assert "elements, the executor's parser holds 4095" in only(check_msccl(local(*crowd))).message
    blocks = check_msccl(local(*([(("cpy", "i0", "o0", 1),)] * 1100)))
    assert any("1100 blocks, the executor's parser holds 1024" in f.message for f in blocks.findings)
    crowded = check_msccl(direct(35, "alltoall"))
    assert any("gpu 3: more than 32 blocks send on channel 0" in f.message for f in crowded.findings)


def test_what_a_call_does_not_give() -> None:
    """Out of place the input is read only; the root's buffers are nobody else's; what is declared may exceed what there is."""
    found = only(check_msccl(with_step(replace(RING, in_place=0), 1, 0, 2, dst_buffer="i")))
    assert "gpu 1 tb 0 step 2" in found.message and "only lends for reading" in found.message
    assert check_msccl(with_step(replace(RING, out_of_place=0), 1, 0, 2, dst_buffer="i")).ok
    chain = chain_broadcast(3)
    found = only(check_msccl(with_step(chain, 1, 0, 0, type="rrcs", src_buffer="i", src_offset=0)))
    assert "an out-of-place broadcast gives this gpu no such buffer" in found.message
    found = only(check_msccl(replace(direct(3, "alltoall"), chunks_per_loop=9)))
    assert found.check == "values"  # three times the chunks, so most are never written
    wide = with_step(gpu(RING, 1, o_chunks=99), 1, 0, 4, dst_offset=98)
    assert "uses o[98..98]; an out-of-place all-reduce has 3 chunks there" in only(check_msccl(wide)).message
    assert "cannot be judged" in only(check_msccl(replace(RING, collective="send"))).message
    idle = replace(chain, ranks=4, gpus=(*chain.gpus, MscclGpu(3, 4, 4, 0, ())))
    assert "2 ranks could be the root" in only(check_msccl(idle)).message


def waves(n: int, ahead: int) -> MscclAlgo:
    """All-gather in which every gpu sends its part, in `ahead` chunks, before it receives: needs channels that hold them all."""
    gpus = []
    for r in range(2):
        rows = [("s", f"i{k}", f"o{r * ahead + k}", 1) for k in range(ahead)] + [("r", "", f"o{(1 - r) * ahead + k}", 1) for k in range(ahead)]
        own = MscclBlock(1, -1, -1, 0, steps(("cpy", "i0", f"o{r * ahead}", ahead)))
        gpus.append(MscclGpu(r, ahead, 2 * ahead, 0, (MscclBlock(0, 1 - r, 1 - r, 0, steps(*rows)), own)))
    return MscclAlgo(
        name="waves", protocol="Simple", channels=1, chunks_per_loop=2 * ahead, ranks=2, collective="allgather", in_place=0, out_of_place=1,
        gpus=tuple(gpus),
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [1, 2, 3, 5])
def test_deadlock_at_depth_two_and_the_smallest_depth_that_works(ahead: int) -> None:
    algo = waves(2, ahead)
    verdict = check_msccl(algo)
    assert verdict.facts["smallest_fifo"] == ahead
    assert verdict.ok == (ahead <= 2)
    for depth in range(1, 7):
        assert check_msccl(algo, limits=ExecutorLimits(depth=depth)).ok == (depth >= ahead)
        run = Machine(msccl_text(algo), in_place=False, depth=depth)
        if depth >= ahead:
            assert not run.run().wrong()
        else:
            with pytest.raises(Hang):
                run.run()
    if ahead > 2:
        found = only(verdict)
        assert found.check == "deadlock" and found.witness["smallest_fifo"] == ahead and {"gpu", "tb", "step"} <= found.witness["cycle"][0].keys()
        assert f"it needs channels of depth {ahead}" in found.message and "gpu 0 tb 0 step" in found.message
        with pytest.raises(Deadlock):
            verdict.raise_if_wrong()


@pytest.mark.parametrize(("ranks", "width", "depth"), [(4, 1, 2), (4, 2, 3), (3, 3, 4), (2, 2, 3)])
def test_fused_steps_hold_what_they_received_until_they_can_send(ranks: int, width: int, depth: int) -> None:
    """A ring whose ranks begin with `width` messages: where a fused step follows, one more must fit or all wait for room in a circle."""
    algo = ring_all_reduce(ranks, width=width)
    verdict = check_msccl(algo)
    assert verdict.facts["smallest_fifo"] == depth and verdict.ok == (depth <= 2)
    text = msccl_text(algo)
    assert hangs(text, depth - 1)
    replays(text, depth=depth)
    if depth > 2:
        assert only(verdict).check == "deadlock" and {only(verdict).witness["smallest_fifo"]} == {depth}


def test_steps_of_many_chunks_fill_channels_when_messages_are_small() -> None:
    """Public all-pairs files send eight chunks before they receive: right up to their maxBytes, a deadlock beyond."""
    algo = all_pairs_all_reduce(3, 8)
    assert check_msccl(algo).ok and check_msccl(algo).facts["batch"] >= 8
    endless = replace(algo, max_bytes=0)
    verdict = check_msccl(endless)
    assert only(verdict).check == "deadlock" and verdict.facts["smallest_fifo"] == 8
    with pytest.raises(Hang):
        replays(msccl_text(endless))


def test_no_depth_helps_against_waits_in_a_circle() -> None:
    algo = with_step(PAIRS, 1, 1, 0, depid=0, deps=2)
    verdict = check_msccl(algo)
    assert only(verdict).check == "deadlock" and verdict.facts["smallest_fifo"] is None
    assert smallest_fifo(import_msccl(algo, in_place=True, batch=1).program) == 0


def test_races_name_both_steps() -> None:
    verdict = check_msccl(with_step(relay_all_gather(4), 2, 1, 1, depid=-1, deps=-1))
    found = only(verdict)
    assert found.check == "races" and "gpu 2 tb 0 step 0" in found.message and "gpu 2 tb 1 step 1" in found.message
    assert found.witness["other_step"] | {} and {found.witness["tb"], found.witness["other_step"]["tb"]} == {0, 1}


def test_wrong_values_name_gpu_block_and_step() -> None:
    found = only(check_msccl(with_step(RING, 1, 0, 2, type="rcs")))
    assert found.check == "values" and found.witness["gpu"] in (0, 1, 2) and "tb 0 step" in found.message and "rank 1 lane" not in found.message


def test_copies_are_the_runtimes_business() -> None:
    """In place they change nothing; out of place a file that counts on them is wrong for the executor and right for a runtime with them."""
    algo = relay_all_gather(3)
    assert check_msccl(algo).notes == ("6 <copy> elements: the executor ignores them",)
    out = replace(algo, in_place=0, out_of_place=1)
    found = only(check_msccl(out))
    assert found.check == "values" and "never written" in found.message
    rows = check_msccl(out, run_copies=True)
    assert rows.ok and rows.notes == ("6 <copy> elements: made before the first step",)
    lost = gpu(out, 1, copies=((0, 0), (1, 3)))
    assert only(check_msccl(lost, run_copies=True)).check in ("races", "values")


def test_verdicts_are_json() -> None:
    import json

    for algo in (RING, with_step(RING, 1, 0, 2, type="rcs"), waves(2, 3), with_step(relay_all_gather(4), 2, 1, 1, depid=-1, deps=-1)):
        json.dumps(check_msccl(algo).to_json(), allow_nan=False)
