"""MSCCL++ plans: written ones replay in an interpreter of their own; read ones are checked; damaged ones are refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msccl_files import FILES
from mscclpp_executor_twin import Hang, replays

from meshwright.check import Verdict
from meshwright.decide.collective import NAMES, CollectiveProblem
from meshwright.drive.handover.msccl import export_mscclpp
from meshwright.drive.handover.verdicts import check_mscclpp
from meshwright.errors import FormatError, TimeLimit, Unsupported
from meshwright.interop.from_mscclpp import import_mscclpp
from meshwright.interop.mscclpp import MscclppPlan
from meshwright.interop.to_mscclpp import COLLECTIVES, to_mscclpp
from meshwright.io.fabric.name import load_fabric
from meshwright.io.msccl.mscclpp_json import mscclpp_bytes, parse_mscclpp, read_mscclpp, write_mscclpp


def program_of(name: str, op: str) -> Any:
    return NAMES[name]().plan(CollectiveProblem.on(load_fabric("two-islands"), op, 1 << 12), rng=np.random.default_rng(0)).program


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("name", ["ring", "forestcoll", "double-tree", "halving-doubling", "direct", "bruck", "pat", "hierarchical"])
def test_every_exported_plan_replays(name: str, op: str) -> None:
    try:
        program = program_of(name, op)
    except (Unsupported, TimeLimit):
        return
    for server in (None, {r: "left" if r < 2 else "right" for r in range(4)}):
        plan = export_mscclpp(program, server=server)
        data = mscclpp_bytes(plan)
        assert parse_mscclpp(data) == plan
        replays(data)
        kinds = {c.channel_type for g in plan.gpus for c in g.channels}
        assert kinds <= ({"memory"} if server is None else {"memory", "port"}) and ("port" in kinds) == (server is not None)


@pytest.mark.parametrize("name", FILES)
def test_foreign_files_become_plans(name: str) -> None:
    algo = FILES[name]()
    for mode in algo.modes:
        if algo.collective in ("gather", "scatter", "broadcast"):
            with pytest.raises(Unsupported, match="MSCCL\\+\\+ plans have no"):
                to_mscclpp(algo, in_place=mode)
            continue
        plan = to_mscclpp(algo, in_place=mode)
        assert check_mscclpp(plan).ok
        replays(mscclpp_bytes(plan), seeds=2)


def op(name: str, src: Any = (), dst: Any = (), **more: Any) -> dict[str, Any]:
    """src and dst: "i0+2" own chunks, "r0@1+2" remote buffer 0 from chunk 1 on."""

    def ref(text: str) -> dict[str, Any]:
        head, size = text.split("+") if "+" in text else (text, "1")
        if head[0] == "r":
            number, index = head[1:].split("@")
            return {"buffer_id": int(number), "index": int(index), "size": int(size)}
        return {"type": head[0], "index": int(head[1:]), "size": int(size)}

    made: dict[str, Any] = {"name": name}
    if src:
        made["src_buff"] = [ref(x) for x in src]
    if dst:
        made["dst_buff"] = [ref(x) for x in dst]
    return made | more


MEMORY = {"channel_type": "memory"}
SIGNAL, WAIT, NOP = op("signal", channel_ids=[0], **MEMORY), op("wait", channel_ids=[0], **MEMORY), op("nop")


def pair() -> dict[str, Any]:
    """All-reduce of two gpus in place, by reading from the peer: gpu 0 sums the first half, gpu 1 the second, each puts its half."""
    gpus = []
    for r in range(2):
        mine, other = 2 * r, 2 * (1 - r)
        ops = [
            op("copy", [f"i{other}+2"], [f"s{other}+2"]), NOP, SIGNAL, NOP, WAIT, NOP,
            op("rres", [f"i{mine}", f"r0@{mine}"], [f"i{mine}", f"r1@{mine}"], reduce_op="sum", **MEMORY),
            op("get", [f"r0@{mine + 1}"], [f"s{mine + 1}"], channel_ids=[0], **MEMORY), NOP,
            op("res", [f"i{mine + 1}", f"s{mine + 1}"], [f"i{mine + 1}", f"r1@{mine + 1}"], reduce_op="sum", **MEMORY), NOP, SIGNAL, NOP, WAIT, NOP,
        ]  # fmt: skip
        block = {
            "id": 0, "ops": ops, "channels": [{"channel_type": "memory", "channel_ids": [0]}],
            "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0, 1]}],
        }  # fmt: skip
        gpus.append({
            "id": r, "input_chunks": 4, "output_chunks": 4, "scratch_chunks": 4, "threadblocks": [block],
            "channels": [{"channel_type": "memory", "connected_to": [1 - r]}],
            "remote_buffers": [{"rank": 1 - r, "type": t, "access_channel_types": ["memory"]} for t in "si"], "semaphores": [],
        })  # fmt: skip
    return {
        "name": "pair", "collective": "allreduce", "protocol": "Simple", "inplace": True, "reuse_resources": False, "gpus": gpus,
        "num_threads_per_block": 1024, "use_double_scratch_buffer": False, "buffer_alignment": 16, "min_message_size": 0,
        "max_message_size": (1 << 64) - 1,
    }  # fmt: skip


def barriers() -> dict[str, Any]:
    """All-gather of two gpus out of place: two blocks each, the second waits at a barrier and copies what the first got."""
    gpus = []
    for r in range(2):
        first = [
            SIGNAL, op("put", ["i0"], ["r0@0"], **MEMORY), NOP, op("signal", channel_ids=[1], **MEMORY), op("wait", channel_ids=[1], **MEMORY),
            op("wait", channel_ids=[0], **MEMORY), op("barrier", barrier_id=0, num_threadblocks=2),
        ]  # fmt: skip
        second = [op("copy", ["i0"], [f"o{r}"]), op("barrier", barrier_id=0, num_threadblocks=2), op("copy", ["s0"], [f"o{1 - r}"])]
        blocks = [
            {"id": 0, "ops": first, "channels": [{"channel_type": "memory", "channel_ids": [0, 1]}],
             "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}]},
            {"id": 1, "ops": second},
        ]  # fmt: skip
        gpus.append({
            "id": r, "input_chunks": 1, "output_chunks": 2, "scratch_chunks": 1, "threadblocks": blocks,
            "channels": [{"channel_type": "memory", "connected_to": [1 - r, 1 - r]}],
            "remote_buffers": [{"rank": 1 - r, "type": "s", "access_channel_types": ["memory"]}],
        })  # fmt: skip
    return {"name": "barriers", "collective": "allgather", "inplace": False, "gpus": gpus}


def parse(document: dict[str, Any]) -> MscclppPlan:
    return parse_mscclpp(json.dumps(document).encode(), "p.json")


@pytest.mark.parametrize("make", [pair, barriers])
def test_plans_as_others_write_them(make: Any) -> None:
    plan = parse(make())
    verdict = check_mscclpp(plan)
    assert verdict.ok, verdict.findings
    replays(json.dumps(make()).encode(), seeds=20)
    again = parse_mscclpp(mscclpp_bytes(plan))
    assert again == plan
    made = import_mscclpp(plan)
    assert len(made.gpu) == len(made.program.steps)


def damaged(make: Any, change: Any) -> Verdict:
    document = json.loads(json.dumps(make()))  # its parts are shared
    change(document)
    return check_mscclpp(parse(document))


def ops(document: dict[str, Any], gpu: int = 0, block: int = 0) -> list[dict[str, Any]]:
    return document["gpus"][gpu]["threadblocks"][block]["ops"]


PAIR_FAULTS = [
    ("no nop before the signal", lambda d: ops(d).pop(1), "op 1 (signal) may tell of op 0 (copy) before it is done"),
    ("no nop after the wait", lambda d: ops(d).pop(5), "op 5 (rres) may run before the wait of op 4 has ended"),
    ("no nop before the sum", lambda d: ops(d).pop(8), "op 8 (res) and op 7 (get) touch the same chunks"),
    ("one signal less", lambda d: ops(d).pop(2), "waits 2 times for a signal that comes 1 times: it never goes on"),
    ("one wait less", lambda d: ops(d).pop(4), "neither happens before the other"),
    ("another chunk", lambda d: ops(d)[0]["src_buff"][0].update(index=1), "is spoilt"),
    ("not put", lambda d: ops(d)[9]["dst_buff"].pop(), "lacks the contribution"),
    ("beyond", lambda d: ops(d)[0]["dst_buff"][0].update(index=3), "chunks 3..4 of 's' of gpu 0, which has 4"),
    ("sizes", lambda d: ops(d)[0]["dst_buff"][0].update(size=1), "needs source and destination of one size"),
    ("no such channel", lambda d: ops(d)[2].update(channel_ids=[1]), "channel 1 of type memory does not exist"),
    ("no such buffer", lambda d: ops(d)[7]["src_buff"][0].update(buffer_id=2), "remote buffer 2 does not exist"),
    ("own buffer", lambda d: d["gpus"][0]["remote_buffers"][0].update(rank=0), "remote buffer 0 is of gpu 0"),
    ("remote sum only", lambda d: ops(d)[6]["src_buff"].pop(0), "sums need a source of the gpu itself"),
    ("remote first", lambda d: ops(d)[6]["dst_buff"].pop(0), "must be a buffer of the gpu itself"),
    ("places", lambda d: d["gpus"].reverse(), "gpu 1 stands at place 0"),
    ("collective", lambda d: d.update(collective="sendrecv"), "promises is not known"),
    ("chunks", lambda d: d["gpus"][1].update(input_chunks=2), "cuts its buffers into 2 and 4 chunks"),
    ("whole", lambda d: d.update(collective="allgather"), "are not those of a whole all-gather among 2"),
    ("scratch", lambda d: d["gpus"][1].update(scratch_chunks=-1), "has -1 scratch chunks"),
    ("peer", lambda d: d["gpus"][1]["channels"][0].update(connected_to=[1]), "gpu 1 connects to gpu 1"),
    ("one-sided", lambda d: d["gpus"][1]["channels"][0].update(connected_to=[0, 0]), "memory connections to gpu 1, which has 2 back"),
    ("ids", lambda d: d["gpus"][1]["threadblocks"][0].update(id=1), "blocks must be numbered 0..0 in order, got [1]"),
    ("sizes of messages", lambda d: d.update(max_message_size=1, min_message_size=2), "no message has a size from 2 to 1"),
    ("no gpu", lambda d: d.update(gpus=[]), "the plan has no gpu"),
    ("not in place", lambda d: d.update(inplace=False), "only lends for reading"),
    ("no semaphore", lambda d: ops(d).insert(0, {"name": "sem_release", "semaphore_ids": [0]}), "semaphore 0 does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [f[1:] for f in PAIR_FAULTS], ids=[f[0] for f in PAIR_FAULTS])
def test_damaged_plans(change: Any, message: str) -> None:
    verdict = damaged(pair, change)
    assert verdict.status == "wrong"
    assert any(message in f.message for f in verdict.findings), [f.message for f in verdict.findings]
    first = verdict.findings[0]
    assert {"gpu", "field", "where"} & first.witness.keys() and "lane" not in first.message
    json.dumps(verdict.to_json())


def test_barriers_and_counters() -> None:
    bad = damaged(barriers, lambda d: ops(d, 0, 1)[1].update(num_threadblocks=3))
    assert "barrier 0 is for 3 blocks" in bad.findings[0].message
    bad = damaged(barriers, lambda d: ops(d, 0, 1)[1].pop("barrier_id"))
    assert "needs barrier_id" in bad.findings[0].message or "barrier 0 is for 2 blocks" in bad.findings[0].message
    assert damaged(barriers, lambda d: ops(d, 1, 0).pop(5)).status == "ok"  # the wait for the peer's readiness guards the next run only
    assert damaged(barriers, lambda d: ops(d, 1, 0).pop(4)).status == "wrong"

    def share(d: dict[str, Any]) -> None:
        blocks = d["gpus"][0]["threadblocks"]
        blocks[1]["ops"][:0] = [WAIT, NOP]
        blocks[1]["channels"] = blocks[0]["channels"]

    shared = damaged(barriers, share)
    assert shared.status == "unknown" and "is shared by blocks" in shared.findings[0].message

    def circle(d: dict[str, Any]) -> None:
        d["gpus"][0]["semaphores"] = [{"init_value": 0}, {"init_value": 0}]
        for block, (mine, theirs) in enumerate(((0, 1), (1, 0))):
            ops(d, 0, block)[:0] = [{"name": "sem_acquire", "semaphore_ids": [mine]}, NOP]
            ops(d, 0, block).append({"name": "nop"})
            ops(d, 0, block).append({"name": "sem_release", "semaphore_ids": [theirs]})

    stuck = damaged(barriers, circle)
    assert stuck.findings[0].check == "deadlock" and {"gpu", "tb", "step"} <= stuck.findings[0].witness["cycle"][0].keys()


def test_accepted_damage_is_harmless() -> None:
    """Operations dropped one by one from exported plans: what the checker accepts, the interpreter runs rightly."""
    for plan in (to_mscclpp(FILES["ring all-reduce 3"](), in_place=False), to_mscclpp(FILES["all pairs all-reduce 3"](), in_place=True)):
        document = json.loads(mscclpp_bytes(plan))
        for gpu in range(2):
            for block in range(len(document["gpus"][gpu]["threadblocks"])):
                for k in range(len(ops(document, gpu, block))):
                    hurt = json.loads(json.dumps(document))
                    gone = ops(hurt, gpu, block).pop(k)
                    if check_mscclpp(parse(hurt)).ok:
                        try:
                            replays(json.dumps(hurt).encode(), seeds=6)
                        except (Hang, AssertionError) as error:
                            raise AssertionError(f"accepted without gpu {gpu} tb {block} op {k} {gone}: {error!r}") from error


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "p.json: not JSON"),
        (b"[]", "p.json: Expected `object`"),
        (b"{}", "p.json: Object missing required field"),
        (b'{"name": "a", "name": "b", "collective": "allreduce", "inplace": true, "gpus": []}', "the key 'name' occurs twice"),
        (b'{"name": "a", "collective": "allreduce", "inplace": true, "gpus": [], "surprise": 1}', "unknown field `surprise`"),
        (b'{"name": "a", "collective": "allreduce", "inplace": true, "gpus": [], "protocol": "LL"}', "packets are not read"),
        (b'{"name": "a", "collective": "allreduce", "inplace": 1, "gpus": []}', "p.json: inplace: Expected `bool`"),
        (json.dumps({**pair(), "gpus": [{**pair()["gpus"][0], "channels": [{"channel_type": "switch"}]}]}).encode(), "Invalid enum value 'switch'"),
        (json.dumps(pair()).replace('"rres"', '"rrcs"').encode(), "Invalid enum value 'rrcs'"),
        (json.dumps(pair()).replace('"index": 0', '"index": "0"', 1).encode(), "src_buff[0].index: Expected `int`"),
        (b"[" * 100_000, "p.json"),
    ],
)
def test_bad_documents(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_mscclpp(data, "p.json")
    assert message in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_or_refused(data: st.DataObject) -> None:
    text = bytearray(json.dumps(barriers()).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text[at] = data.draw(st.integers(0, 255))
    else:
        del text[at : at + data.draw(st.integers(1, 30))]
    try:
        check_mscclpp(parse_mscclpp(bytes(text), "p.json"))
    except FormatError as error:
        assert str(error).startswith("p.json")


def test_files(tmp_path: Any) -> None:
    plan = parse(pair())
    write_mscclpp(tmp_path / "p.json", plan)
    assert read_mscclpp(tmp_path / "p.json") == plan
    assert msgspec.json.decode((tmp_path / "p.json").read_bytes())["gpus"][0]["input_chunks"] == 4


def test_exports_that_are_refused() -> None:
    with pytest.raises(Unsupported, match="not for both"):
        export_mscclpp(program_of("ring", "all-reduce"), place="both")
    with pytest.raises(Unsupported, match=r"MSCCL\+\+ plans have no broadcast"):
        export_mscclpp(program_of("ring", "broadcast"))
