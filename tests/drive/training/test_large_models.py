"""Large models are judged with less: the plan is the one that judging everything gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from captured import captured
from meshwright.drive.plans import check_plan, read_fabric
from meshwright.drive.training import context, evaluate, order, training
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.decisions import context_of
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.job import Training

MODEL = "examples/gpt.py:tiny"
DEGREES = LayoutWanted(data=2, tensor=2, pipeline=1)


def fabric(memory_bytes):
    boxes = read_fabric("dgx-h100:1", "0-3")
    return replace(boxes, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in boxes.devices))


@cache
def graph():
    return captured(MODEL)


def planned(memory_bytes, given=True, **wanted):
    job = Training(model=MODEL, global_batch=8)
    wishes = (replace(DEGREES, **wanted), CollectivesWanted("ring"))
    return plan_training(job, fabric(memory_bytes), graph=graph() if given else None, wishes=wishes)


def test_what_surely_does_not_fit_is_judged_by_one_rank(monkeypatch):
    roomy = planned(1 << 40)
    limit = max(roomy.prediction.memory_worst_bytes) * 9 // 10
    whole = planned(limit, microbatch=4)
    assert whole.decisions["recompute"]["strategy"] != "none"
    monkeypatch.setattr(evaluate, "MAX_SMALL_OPERATORS", 0)
    seen = []
    own = evaluate.Evaluator._surely_unfit
    monkeypatch.setattr(evaluate.Evaluator, "_surely_unfit", lambda *a: seen.append(own(*a)) or seen[-1])
    found = planned(limit, microbatch=4)
    assert any(e is not None and e.folded and not e.fits for e in seen) and None in seen
    assert found.cycle == whole.cycle and found.placement == whole.placement
    assert found.prediction.time_s == whole.prediction.time_s and found.layout == whole.layout


UNLIKE = LayoutWanted(data=4, tensor=2, pipeline=1)  # on two boxes of four: at two of its places the ring of replicas leaves its box


@cache
def boxes():
    return read_fabric("dgx-h100:2", "0-3,8-11")


def test_placements_without_symmetry_are_scouted_with_each_sum_alone(monkeypatch):
    def made():
        return plan_training(Training(model=MODEL, global_batch=8), boxes(), graph=graph(), wishes=(UNLIKE, CollectivesWanted("ring")))

    whole = made()
    for module in (evaluate, context):
        monkeypatch.setattr(module, "MAX_SMALL_STEPS", 0)
    alone, own = [], evaluate.step_of_lone_sums
    monkeypatch.setattr(evaluate, "step_of_lone_sums", lambda *a, **k: alone.append(1) or own(*a, **k))
    found = made()
    assert alone and found.layout == whole.layout and found.placement == whole.placement and found.cycle == whole.cycle
    assert found.prediction == whole.prediction and any(a.why.endswith("each sum timed alone") for a in found.alternatives)


def test_a_layout_is_judged_by_one_rank_once(monkeypatch):
    for module, names in ((evaluate, ("MAX_SMALL_OPERATORS", "MAX_SMALL_STEPS")), (context, ("MAX_SMALL_OPERATORS", "MAX_SMALL_STEPS"))):
        for name in names:
            monkeypatch.setattr(module, name, 0)
    scouted, own = [], evaluate.Evaluator._scouted

    def noting(self, candidate, graph, placement, name, policy):
        scouted.append((candidate, placement, str(policy)))  # kept, so that ids stay theirs
        return own(self, candidate, graph, placement, name, policy)

    monkeypatch.setattr(evaluate.Evaluator, "_scouted", noting)
    plan_training(Training(model=MODEL, global_batch=8), boxes(), graph=graph(), wishes=(replace(UNLIKE, microbatch=1), CollectivesWanted("ring")))
    keys = [(id(c), placement, policy) for c, placement, policy in scouted]
    assert keys and len(keys) == len({*keys})


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_scout_that_wins_is_written_out_once(spoilt, monkeypatch):
    """And where it turns out to be none, all is judged again with every winner written out."""
    whole = planned(1 << 40)
    for module in (evaluate, context):
        monkeypatch.setattr(module, "MAX_SMALL_STEPS", 0)
    lowered, judged, own, again = [], [], evaluate.Evaluator._lowered, evaluate.Evaluator.again

    def judged_again(self, found, *more):
        judged.append(found.folded)
        return replace(again(self, found, *more), timeline=None) if spoilt and len(judged) == 1 else again(self, found, *more)

    monkeypatch.setattr(evaluate.Evaluator, "_lowered", lambda *a: lowered.append(1) or own(*a))
    monkeypatch.setattr(evaluate.Evaluator, "again", judged_again)
    found = planned(1 << 40)
    assert judged[0] and (len(lowered) == 1) != spoilt
    assert found.layout == whole.layout and found.placement == whole.placement and found.cycle == whole.cycle
    assert found.prediction == whole.prediction


def test_a_scout_of_few_micro_batches_tells_the_step_of_all():
    wishes = (replace(UNLIKE, microbatch=1), CollectivesWanted("ring"))
    asked = context_of(Training(model=MODEL, global_batch=64), boxes(), graph=graph(), wishes=wishes)
    candidate = next(c for c in asked.grid().plan(asked.problem) if c.layout is not None)
    judge, (name, placement) = asked.evaluator, next(asked.placements(candidate.layout))
    made = [
        judge._evaluate_folded(candidate, judge.graph_for(candidate.layout), placement, name, evaluate.KEEP_ALL, lone_sums=True, whole=whole)
        for whole in (False, True)
    ]  # fmt: skip
    assert made[0].extrapolated_s and made[0].time_s == pytest.approx(made[1].time_s, rel=1e-9) and not made[1].extrapolated_s
    written = judge.evaluate(candidate, placement, name)
    assert not written.folded and made[1].time_s == pytest.approx(written.time_s, rel=0.1)
    assert made[1].peak_bytes == pytest.approx(written.peak_bytes, rel=0.05)


def test_the_chosen_layout_alone_is_judged_on_the_graph_of_one_sample(monkeypatch):
    pytest.importorskip("torch")
    whole = planned(1 << 40, given=False, microbatch=1)
    monkeypatch.setattr(context.Context, "is_large", lambda *_: True)
    begun = []
    own = training.begin
    monkeypatch.setattr(training, "begin", lambda c: begun.append(c.graph.batch_size) or own(c))
    found = planned(1 << 40, given=False, microbatch=1)
    assert len(begun) == 1 and begun[0] > 1, "the search ran once, on the graph that was captured first"
    assert found.layout == whole.layout and found.job["graph_fingerprint"] == whole.job["graph_fingerprint"]
    assert found.cycle == whole.cycle and check_plan(found).ok


def test_regions_are_looked_for_once(monkeypatch):
    calls = []
    own = order.steps_of
    monkeypatch.setattr(order, "steps_of", lambda *a, **b: calls.append(1) or own(*a, **b))
    plan_training(Training(model=MODEL, global_batch=64), read_fabric("dgx-h100:1"), graph=graph(), wishes=(CollectivesWanted("ring"),))
    assert len(calls) <= 3
