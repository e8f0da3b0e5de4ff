"""The fusion search against brute force over all partitions, and its proof against the checker."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from meshwright.bound import Bound
from meshwright.check.traffic import check_traffic, replayed_ns
from meshwright.decide.traffic import NAMES, Cupcake, DdpBuckets, TrafficProblem, cupcake, groups_of, timeline
from meshwright.drive.traffic import compare_traffic, plan_traffic
from meshwright.errors import UsageError
from meshwright.kernels import effort
from meshwright.testing.traffic import traffic_profile as profile
from meshwright.traffic import CodecCost, Curve, GradientTensor, TrafficGroup, TrafficPlan, TrafficProfile


def shortest_ns(found: TrafficProfile) -> int:
    """Over all partitions and all codecs per group, priced by the checker's replay."""
    n, names = len(found.tensors), [c.codec for c in found.codecs]
    best = None
    for cuts in range(1 << (n - 1)):
        ends = [i + 1 for i in range(n - 1) if cuts >> i & 1] + [n]
        for codecs in itertools.product(names, repeat=len(ends)):
            step = replayed_ns(found, list(zip([0, *ends], ends, codecs, strict=False)))
            best = step if best is None else min(best, step)
    assert best is not None
    return best


@pytest.mark.parametrize(
    ("tensors", "codecs", "permille", "knee", "count"), [(7, 1, 0, False, 12), (7, 1, 300, True, 8), (4, 3, 0, True, 8), (4, 2, 500, False, 8)]
)
def test_no_partition_and_no_choice_of_codecs_is_shorter(tensors: int, codecs: int, permille: int, knee: bool, count: int) -> None:
    rng = random.Random(tensors * 1000 + permille)
    for _ in range(count):
        found = profile(rng, tensors, codecs, permille, knee=knee)
        fusion = Cupcake().plan(TrafficProblem.of(found))
        assert fusion.step_ns == fusion.least_ns == shortest_ns(found)


def test_codecs_that_another_beats_everywhere_are_left_out_and_nothing_is_longer_for_it() -> None:
    rng = random.Random(5)
    for _ in range(8):
        found = profile(rng, 5, 2)
        first, second = found.codecs

        def slower(curve: Curve, by: int) -> Curve:
            return msgspec.structs.replace(curve, times_ns=tuple(t + by for t in curve.times_ns))

        equal = msgspec.structs.replace(second, codec="fp16")
        beaten = msgspec.structs.replace(second, codec="bf16", exchange=slower(second.exchange, 1))
        more = msgspec.structs.replace(found, codecs=(beaten, first, second, equal))
        left = TrafficProblem.of(more).without_dominated()
        assert {more.codecs[c].codec for c in left.codecs} <= {first.codec, second.codec}
        assert plan_traffic(more).step_ns == plan_traffic(found).step_ns == shortest_ns(found)


def test_the_timeline_by_hand() -> None:
    line = Curve(sizes=(0, 100), times_ns=(10, 110))
    cost = CodecCost(codec="none", encode=line, exchange=line, decode=line, payload_bytes=(20, 40))
    tensors = (GradientTensor(name="a", shape=(4, 5), ready_ns=100), GradientTensor(name="b", shape=(40,), ready_ns=150))
    problem = TrafficProblem.of(TrafficProfile(tensors=tensors, codecs=(cost,), ranks=2))
    end, (first, second) = timeline(problem, groups_of([1, 2], "none"))
    assert (first.encode_start_ns, first.encode_end_ns, first.exchange_end_ns) == (100, 130, 160)
    assert (second.encode_start_ns, second.encode_end_ns, second.exchange_start_ns, second.exchange_end_ns) == (180, 230, 230, 280)
    assert (first.decode_start_ns, first.decode_end_ns, second.decode_end_ns, end) == (230, 260, 330, 330)
    slowed = TrafficProblem.of(msgspec.structs.replace(problem.profile, interference_permille=1000))
    assert timeline(slowed, groups_of([1, 2], "none"))[0] == 330 + 15  # half speed while 30 ns of exchange are under way


def test_the_optimum_is_never_longer_than_a_fixed_rule_and_large_lists_are_proved() -> None:
    found = profile(random.Random(3), 120)
    problem = TrafficProblem.of(found)
    best = Cupcake().plan(problem)
    assert best.least_ns == best.step_ns
    assert all(best.step_ns <= kind().plan(problem).step_ns for kind in NAMES.values())
    assert best.step_ns < DdpBuckets().plan(problem).step_ns


def test_a_search_cut_short_says_how_much_it_proved() -> None:
    problem = TrafficProblem.of(profile(random.Random(4), 60, 3))
    cut = Cupcake(states=1).plan(problem)
    whole = Cupcake().plan(problem)
    assert cut.least_ns <= whole.least_ns <= whole.step_ns <= cut.step_ns
    plan = plan_traffic(problem.profile, options={"states": 1})
    assert not check_traffic(plan)


def test_ddp_buckets_are_closed_by_the_tensor_that_reaches_the_cap() -> None:
    sizes = (200_000, 62_144, 1, 5_000_000, 1_553_599, 7)  # 1 MiB = 262,144 floats after the second, 25 MiB = 6,553,600 after the fifth
    line = Curve(sizes=(0,), times_ns=(1,))
    cost = CodecCost(codec="none", encode=line, exchange=line, decode=line, payload_bytes=(0,) * 6)
    tensors = tuple(GradientTensor(name=str(i), shape=(s,), ready_ns=i) for i, s in enumerate(sizes))
    fusion = DdpBuckets().plan(TrafficProblem.of(TrafficProfile(tensors=tensors, codecs=(cost,), ranks=2)))
    assert [g.last for g in fusion.groups] == [2, 5, 6]


@pytest.fixture(scope="module")
def plan() -> TrafficPlan:
    made = plan_traffic(profile(random.Random(14), 9, 2))
    assert not check_traffic(made) and len(made.groups) > 1
    return made


def test_the_checker_refuses_wrong_plans(plan: TrafficPlan) -> None:
    change = msgspec.structs.replace
    first, *others = plan.groups
    wrong = {
        "the next tensor is": change(plan, groups=tuple(others)),
        "of 9 tensors": change(plan, groups=plan.groups[:-1]),
        "does not choose from": change(plan, groups=(change(first, codec="bf16"), *others)),
        "the step takes": change(plan, step_ns=plan.step_ns - 1),
        "a rank sends": change(plan, payload_bytes=plan.payload_bytes + 1),
        "for other codecs": change(plan, bound=plan.uncompressed),
        "whole nanoseconds": change(plan, bound=change(plan.bound, unit="bytes")),
    }
    for text, one in wrong.items():
        assert any(text in f.message for f in check_traffic(one)), text


def test_the_checker_refuses_a_bound_that_its_states_do_not_prove(plan: TrafficPlan) -> None:
    def claimed(bound: Bound, labels: list[list[int]], ns: int) -> list[str]:
        certificate = msgspec.structs.replace(bound.certificate, data={**bound.certificate.data, "labels": labels})
        value = f"{ns}/1000000000"
        one = msgspec.structs.replace(plan, bound=msgspec.structs.replace(bound, certificate=certificate, value=value))
        return [f.message for f in check_traffic(one)]

    labels, ns = plan.bound.certificate.data["labels"], int(plan.bound.exact * 10**9)
    assert not claimed(plan.bound, labels, ns)
    assert "does not close" in claimed(plan.bound, labels, ns + 1)[0]  # what is optimal is proved to the nanosecond
    assert "empty state" in claimed(plan.bound, labels[1:], ns)[0]
    assert any("does not close" in m for i in range(1, len(labels)) for m in claimed(plan.bound, labels[:i] + labels[i + 1 :], ns))
    assert "no state" in claimed(plan.bound, [*labels, [99, 0, 0, 0, 0]], ns)[0]
    assert "no state" in claimed(plan.bound, [*labels, [1, -5, 0, 0, 0]], ns)[0]


def test_every_candidate_is_compared_and_none_is_among_them() -> None:
    rows, _ = compare_traffic(profile(random.Random(12), 8, 2))
    assert [r.plan.step_ns for r in rows] == sorted(r.plan.step_ns for r in rows)
    assert {(r.strategy, r.codecs) for r in rows} >= {("cupcake", ("none",)), ("cupcake", ("none", "topk")), ("layer-wise", ("topk",))}
    best = rows[0].plan
    assert all(float(r.plan.bound) * 1e9 <= r.plan.step_ns for r in rows)
    assert best.step_ns <= min(r.plan.step_ns for r in rows if r.codecs == ("none",))


def test_what_is_no_profile_is_refused() -> None:
    good = profile(random.Random(1), 3)
    cost, tensor = good.codecs[0], good.tensors[0]
    change = msgspec.structs.replace
    line = cost.encode
    for text, make in {
        "rise": lambda: Curve(sizes=(3, 3), times_ns=(1, 2)), "fall": lambda: Curve(sizes=(1, 3), times_ns=(3, 2)),
        "2 sizes for 1": lambda: Curve(sizes=(1, 3), times_ns=(3,)), "order": lambda: change(good, tensors=good.tensors[::-1]),
        "0 tensors": lambda: change(good, tensors=()), "codec to choose": lambda: change(good, codecs=()),
        "codec stands twice": lambda: change(good, codecs=(cost, cost)), "payload": lambda: change(good, codecs=(change(cost, payload_bytes=(1,)),)),
        "tensor stands twice": lambda: change(good, tensors=(tensor, tensor, tensor)), "ranks": lambda: change(good, ranks=0),
        "shape": lambda: change(good, tensors=(change(tensor, shape=(-1,)), *good.tensors[1:])), "no costs": lambda: good.position("topk"),
        "groups must": lambda: timeline(TrafficProblem.of(good), [TrafficGroup(first=1, last=3, codec="none")]),
        "gap 1.0": lambda: Cupcake(gap=1.0).plan(TrafficProblem.of(good)),
        "bucket caps": lambda: DdpBuckets(first_MiB=0).plan(TrafficProblem.of(good)),
        "no codec": lambda: TrafficProblem.of(good, []), "unexpected keyword": lambda: plan_traffic(good, options={"speed": 1}),
        "no strategy": lambda: plan_traffic(good, strategy="magic"),
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=text):
            make()
    assert line.r2 is None and replayed_ns(good, [(0, 3, "none")]) > 0


def test_what_is_proved_does_not_depend_on_whether_kernels_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of the search's kernel takes longer than all of the time limit, as compiling does on a busy machine."""
    clock, calls, real = [0.0], [0], cupcake.extend

    def extend(*arguments: object) -> object:
        clock[0] += 1000.0 if not calls[0] else 0.0
        calls[0] += 1
        return real(*arguments)

    monkeypatch.setattr(effort, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cupcake, "extend", extend)
    found = profile(random.Random(3), 6, 2)
    fusion = Cupcake().plan(TrafficProblem.of(found))
    assert calls[0] > 6 and fusion.step_ns == fusion.least_ns == shortest_ns(found)
