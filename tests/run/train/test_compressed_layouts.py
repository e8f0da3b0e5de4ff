"""Codecs beside tensor-parallel ranks, pipeline stages, their schedules and copies, and a divided optimizer state: equal to the serial steps."""

from __future__ import annotations

import pytest
import torch
from compress_oracle import agree, by_codec, largest, owed, serial
from compress_rig import MODEL, Rank, graph_of, planned, prepare, profile, ran
from rig import in_threads

from meshwright.drive.training.replan import replan_training
from meshwright.errors import UsageError

TOPK = "topk:density=0.1"
ODD, TOKENS = "tests/run/compress_model.py:odd", "tests/run/compress_model.py:tokens"
CASES = {
    "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "state divided": {"zero": 1}, "state divided, sums after backward": {"zero": 1, "overlap": False},
    "state divided, tensor": {"zero": 1, "tensor": 2}, "odd": {"model": ODD}, "odd, state divided": {"model": ODD, "zero": 1},
    "odd, pipeline": {"model": ODD, "pipeline": 2},
    "along the sequence": {"model": TOKENS, "tensor": 2, "sequence": True},
    "along the sequence, pipeline": {"model": TOKENS, "tensor": 2, "sequence": True, "pipeline": 2},
    "backward in two parts": {"pipeline": 2, "schedule": ("zb1p", ()), "overlap": None},
    "several stages per rank": {"pipeline": 2, "schedule": ("interleaved", (("chunks", 2),)), "overlap": None},
    "copies of stages": {"ranks": 1, "pipeline": 2, "schedule": ("chimera", ()), "overlap": None},
    "replicas of copies": {"ranks": 2, "pipeline": 2, "schedule": ("chimera", ()), "overlap": None},
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_topk_with_error_feedback_equals_the_serial_steps(case):
    plan = planned(TOPK, **case)
    assert any(b.codec for b in plan.layout.buckets) and plan.layout.sequence == case.get("sequence", False)
    agree(plan, ran(plan, 3), serial(plan, 3, largest(0.1)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("codec", ["powersgd:rank=2", "fp16", "randomk:density=0.3", "int8"])
@pytest.mark.parametrize("name", ["tensor and pipeline", "copies of stages", "odd, state divided", "along the sequence"])
def test_summed_and_gathered_codecs_equal_the_serial_steps(codec, name):
    plan = planned(codec, **CASES[name])
    assert {b.codec for b in plan.layout.buckets} - {""} == {codec}
    agree(plan, ran(plan, 3), serial(plan, 3, by_codec(plan)), tolerance=1e-3 if codec == "fp16" else 2e-5)


MOVES = [
    ({"tensor": 2}, {"pipeline": 2, "ranks": 1, "schedule": ("chimera", ()), "overlap": None, "tensor": 2}), ({"ranks": 4}, {"ranks": 2, "zero": 1}),
    ({"tensor": 2, "pipeline": 2}, {"ranks": 4, "tensor": 2}), ({"pipeline": 2}, {"ranks": 3, "batch": 12}),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("before", "after"), MOVES, ids=["tensor to copies", "fewer replicas", "stages to replicas", "more replicas"])
def test_what_was_not_sent_goes_on_under_another_layout(tmp_path, before, after):
    old, new = planned(TOPK, **before), planned("topk:density=0.3", **after)

    def body(rank, group):
        made = Rank(old, rank, group)
        made.run(0, 2)
        return made, made.work.compressed.save(tmp_path, 2)

    prepare(old)
    found = in_threads(old.layout.ranks, body)
    digests = {name: digest for _, written in found for name, digest in written.items()}
    assert len(digests) == old.layout.ranks
    mass = owed([made for made, _ in found], old)
    heirs = [Rank(new, rank, None) for rank in range(new.layout.ranks)]
    for made in heirs:
        made.work.compressed.load(tmp_path, digests, drop_residual=True)
    got = owed(heirs, new)
    for name, value in got.items():  # of parameters that the new plan leaves alone nothing can go on
        torch.testing.assert_close(value, mass.get(name, torch.zeros_like(value)), rtol=1e-6, atol=1e-6)
    lost = [n for n, value in mass.items() if n not in got and value.any()]
    for made in heirs[:1] if lost else ():
        with pytest.raises(UsageError, match="has no place"):
            made.work.compressed.load(tmp_path, digests, drop_residual=False)
    for made in () if lost else heirs:
        made.work.compressed.load(tmp_path, digests, drop_residual=False)
    assert any(value.any() for value in got.values())


def test_replanning_keeps_codecs_and_what_was_not_sent(tmp_path):
    old = planned(TOPK, pipeline=2)
    with pytest.raises(UsageError, match="sends gradients through topk"):
        replan_training(old, lost=old.placement[-1:], graph=graph_of(MODEL), keep=["dp"])
    found = replan_training(old, lost=old.placement[-1:], graph=graph_of(MODEL), keep=["dp", "tp", "microbatch"], profile=profile).plan
    assert {b.codec for b in found.layout.buckets} == {TOPK} and (found.layout.data, found.layout.pipeline) == (2, 1)
    assert found.decisions["compress"]["step_s"] == pytest.approx(found.prediction.time_s)

    def body(rank, group):
        made = Rank(old, rank, group)
        made.run(0, 2)
        return made, made.work.compressed.save(tmp_path, 2)

    prepare(old)
    ranks = in_threads(4, body)
    heirs = [Rank(found, rank, None) for rank in range(2)]
    for made in heirs:
        made.work.compressed.load(tmp_path, {n: d for _, written in ranks for n, d in written.items()}, drop_residual=False)
    before, after = owed([made for made, _ in ranks], old), owed(heirs, found)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-6)


def test_replanning_for_one_replica_says_that_nothing_is_exchanged():
    old = planned(TOPK)
    found = replan_training(old, lost=old.placement[-1:], graph=graph_of(MODEL), profile=profile).plan
    assert not any(b.codec for b in found.layout.buckets) and "one data replica" in found.decisions["compress"]["why"]
