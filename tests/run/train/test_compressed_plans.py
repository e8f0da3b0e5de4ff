"""What `--compress` decides and refuses, and that the checker follows payloads to where they belong."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from compress_rig import MODEL, planned, profile

from captured import captured
from meshwright.check import check_plan
from meshwright.check.training.step import check_training
from meshwright.cli import main
from meshwright.drive.citations import citations
from meshwright.drive.plans import fabric_of, read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.compress import CompressWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, UnknownName, Unsupported
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Training
from meshwright.program.calls import inline
from meshwright.program.program import Kind
from meshwright.program.tables import Csr
from meshwright.report.plan_text import explain_text, plan_text

TOPK = "topk:density=0.05"


def test_auto_compresses_on_a_slow_link_and_is_predicted_never_slower():
    plain = planned(None)
    for link in ("125kB/s", "12.5MB/s", "100GB/s"):
        plan = planned("auto", link=link)
        made, without = plan.decisions["compress"], planned(None, link=link).prediction.time_s
        assert plan.prediction.time_s <= without * (1 + 1e-9)
        assert made["step_s"] == pytest.approx(plan.prediction.time_s) and made["uncompressed_s"] == pytest.approx(without)
    slow = planned("auto")
    assert {b.codec for b in slow.layout.buckets} <= {"", "int8", "topk"} and any(b.codec for b in slow.layout.buckets)
    assert slow.prediction.time_s < plain.prediction.time_s / 2


def test_the_plan_says_what_is_sent_when_and_with_which_error():
    plan = planned(TOPK)
    made = plan.decisions["compress"]
    assert [g["codec"] for g in made["groups"]] == [b.codec for b in plan.layout.buckets]
    assert [g["params"] for g in made["groups"]] == [list(b.params) for b in plan.layout.buckets]
    for g in made["groups"]:
        assert g["payload_bytes"] > 0 and g["ready_s"] > 0 and min(g["encode_s"], g["exchange_s"], g["decode_s"]) > 0
    (risk,) = made["risks"]
    assert risk["feedback"] and risk["delay_steps"] == pytest.approx(0.95 / 0.05, rel=0.2)
    assert made["why"] in explain_text(plan, limit=3).replace("\n             ", " ") and "compress" in plan_text(plan)
    assert {part for part, _ in citations(plan)} >= {"compress", f"codec:{TOPK}"}
    assert plan_bytes(plan_from_bytes(plan_bytes(plan))) == plan_bytes(plan)


def test_memory_counts_residuals_and_slots():
    plain, plan = planned(None, overlap=False), planned(TOPK, overlap=False)
    elements = sum(g["elements"] for g in plan.decisions["compress"]["groups"])
    sent = 2 * sum(g["payload_bytes"] for g in plan.decisions["compress"]["groups"])
    more = plan.prediction.memory_peak_bytes[0] - plain.prediction.memory_peak_bytes[0]
    assert more >= 4 * elements + sent


@pytest.mark.parametrize(
    ("codec", "error", "says"),
    [
        ("signum", Unsupported, "of its own"), ("dgc", Unsupported, "of its own"), ("threshold", Unsupported, "depends on the data"),
        ("zip", UnknownName, "no codec"),
    ],
)  # fmt: skip
def test_codecs_that_training_steps_cannot_use_are_refused(codec, error, says):
    with pytest.raises(error, match=says):
        CompressWanted(codec=codec, profile=profile)


def asked(codec, fabric="star:2?link=125kB/s", sharding=None, **fixed):
    job = Training(model=MODEL, global_batch=8, loss="output", optimizer="sgd")
    wanted = CompressWanted(codec=codec, profile=profile)
    graph = captured(MODEL, loss="output")
    return plan_training(
        job, read_fabric(fabric), graph=graph, wishes=(LayoutWanted(microbatch=2, **fixed), CollectivesWanted("ring"), wanted, sharding),
    )  # fmt: skip


def test_layouts_that_codecs_do_not_go_with_are_refused_by_name_and_left_alone_by_auto():
    cases = [
        ({"data": 1, "tensor": 1, "pipeline": 2}, "one data replica"), ({"data": 2, "sharding": ShardingWanted(level=2)}, "level 1 divides"),
        ({"data": 2, "sharding": ShardingWanted(level=3)}, "sharding level 3 keeps no whole gradients"),
    ]  # fmt: skip
    for fixed, says in cases:
        with pytest.raises(Unsupported, match=says):
            asked(TOPK, **fixed)
        plan = asked("auto", **fixed)
        assert plan.decisions["compress"]["strategy"] == "none" and says in plan.decisions["compress"]["why"]
    with pytest.raises(Unsupported, match="run on processors"):
        asked(TOPK, fabric="dgx-a100:1", data=4, tensor=1)


def test_only_what_tensor_ranks_divide_goes_through_codecs():
    plan = planned(TOPK, tensor=2, batch=8)
    layout = plan.layout
    coded = {p for b in layout.buckets if b.codec for p in b.params}
    assert coded == {s.param for s in layout.shards} and coded < set(layout.stages[0].params)
    assert plan.decisions["compress"]["left_alone"] == len(set(layout.stages[0].params) - coded) > 0
    assert "parameters as they are" in plan.decisions["compress"]["why"]
    flat = flat_of(plan)
    alike = next(p for p in layout.stages[0].params if p not in coded)
    forged = tuple(msgspec.structs.replace(b, params=(*b.params, alike)) if b.codec else b for b in layout.buckets)
    said = check_training(flat, msgspec.structs.replace(layout, buckets=forged))
    assert said[0].message.endswith("tensor-parallel ranks hold it alike: they would not stay so")


@pytest.mark.parametrize(("rank", "replica"), [(0, 0), (3, 1)])
def test_a_sum_that_misses_a_replica_or_a_round_is_found(rank, replica):
    plan = planned("powersgd:rank=1", tensor=2, batch=8)
    p, layout = flat_of(plan), plan.layout
    assert layout.coordinates(rank)[1] == replica and not check_training(p, layout)
    of_rank = [i for i in range(len(p.steps)) if p.lanes.actor[p.lane_of_step()[i]] == rank]
    at = {p.ops.name[int(p.steps.op[i])]: int(p.steps.op[i]) for i in of_rank if p.steps.kind[i] == Kind.COMPUTE}

    def findings(column, op, edit):
        table = [getattr(p.ops, column)[i].copy() for i in range(len(p.ops.name))]
        table[op] = edit(table[op].reshape(-1, 3)).reshape(-1)
        return " ".join(f.message for f in check_training(replace(p, ops=replace(p.ops, **{column: Csr.of(table)})), layout))

    names = p.buffers.name
    assert "does not read the whole of sum0" in findings("reads", at["decode"], lambda t: t[[not names[b].startswith("sum0") for b in t[:, 0]]])
    assert "reads no sum of" in findings("reads", at["advance"], lambda t: t[[not names[b].startswith("sum") for b in t[:, 0]]])
    assert "does not write the whole of sum1" in findings("writes", at["advance"], lambda t: t[[not names[b].startswith("sum1") for b in t[:, 0]]])
    early = replace(p, steps=replace(p.steps, op=p.steps.op.copy()))
    swap = {at["advance"]: at["decode"], at["decode"]: at["advance"]}
    for i in of_rank:
        early.steps.op[i] = swap.get(int(p.steps.op[i]), int(p.steps.op[i]))
    assert check_training(early, layout)


def test_a_plan_with_a_codec_that_does_not_exist_is_refused_when_read():
    plan = planned(TOPK)
    odd = tuple(msgspec.structs.replace(b, codec="zip") for b in plan.layout.buckets)
    with pytest.raises(FormatError, match=r"buckets\[0\].codec: no codec 'zip'"):
        plan_from_bytes(plan_bytes(replace(plan, layout=msgspec.structs.replace(plan.layout, buckets=odd))))


def flat_of(plan):
    return inline(plan.main, plan.programs).program


def test_the_checker_accepts_the_plan_and_nothing_that_loses_or_mixes_payloads():
    plan = planned(TOPK)
    assert not check_plan(plan, fabric_of(plan)).findings
    p, layout = flat_of(plan), plan.layout
    assert not check_training(p, layout)
    names = p.ops.name
    encodes = [i for i, n in enumerate(names) if n == "encode"]
    decodes = [i for i, n in enumerate(names) if n == "decode"]

    def findings(program):
        return " ".join(f.message for f in check_training(program, layout))

    def changed(column, op, edit):
        rows = [getattr(p.ops, column)[i].copy() for i in range(len(names))]
        rows[op] = edit(rows[op].reshape(-1, 3)).reshape(-1)
        return replace(p, ops=replace(p.ops, **{column: Csr.of(rows)}))

    def other_slot(rows):
        rows[0, 1] = 0 if rows[0, 1] else rows[0, 2]
        return rows

    assert "must fill the slot of replica" in findings(changed("writes", encodes[0], other_slot))
    assert "does not spend gradients" in findings(changed("writes", encodes[0], lambda rows: rows[[0]]))
    assert "does not read the whole of sent" in findings(changed("reads", decodes[0], lambda rows: rows[:0]))
    assert "does not write the whole of gradients" in findings(changed("writes", decodes[0], lambda rows: rows[:0]))
    plain = tuple(msgspec.structs.replace(b, codec="") for b in layout.buckets)
    said = " ".join(f.message for f in check_training(p, msgspec.structs.replace(layout, buckets=plain)))
    assert "runs encode" in said
    assert len(encodes) == len(decodes) == layout.ranks * len(layout.buckets)


def test_the_command_takes_none_auto_and_a_name(tmp_path, capsys):
    out = tmp_path / "plan.json"
    common = ["train", "plan", "--model", MODEL, "--loss", "output", "--global-batch", "8", "--dp", "2", "--microbatch", "2", "--out", str(out)]
    assert main([*common, "--fabric", "star:2?link=125kB/s", "--compress", TOPK, "--collective", "ring"]) == 0
    assert f"{TOPK} in" in capsys.readouterr().out.replace("\n             ", " ")
    assert main([*common, "--fabric", "star:2?link=125kB/s", "--compress", "dgc"]) == 2
    assert "of its own" in capsys.readouterr().err
