"""Deferrable work in idle time: proofs on every schedule, brute force, the published capacity model, and what is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from meshwright.check import check_plan
from meshwright.check.fill import check_filling, fill_time
from meshwright.decide.pipeline import NAMES, Chimera, OneFOneB, PipelineProblem, PipelineStrategy
from meshwright.decide.pipeline.fill import Filling, Idle, fill_bubbles, idle_times, refresh_bound
from meshwright.decide.pipeline.fill_work import (
    KFACCosts,
    checkpoint_work,
    evaluation_work,
    gradient_work,
    joined,
    kfac_work,
    require_sound,
)  # fmt: skip
from meshwright.decide.pipeline.gpipe import GPipe
from meshwright.decide.pipeline.judge import judge
from meshwright.deferrable import Deferrable, FillWork
from meshwright.drive.citations import citations
from meshwright.drive.pipeline.fill import Filled, fill_plan
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.drive.plans import simulate_plan
from meshwright.errors import Infeasible, UsageError
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes

of = PipelineProblem.of
KFAC = KFACCosts(curvature_s=0.5, inverse_s=1.5, layers=6, error_bytes=3, factor_bytes=40)


def filled(problem: PipelineProblem, name: str, work: Any = KFAC, *, options: dict[str, Any] | None = None, **more: Any) -> Filled:
    plan = plan_pipeline(problem, name, options)
    make = (lambda p, s: kfac_work(p, s, work)) if isinstance(work, KFACCosts) else work
    return fill_plan(plan, make, **more)


def idle_of(problem: PipelineProblem, strategy: PipelineStrategy) -> Idle:
    j = judge(problem, strategy.plan(problem))
    return idle_times(j.program, j.timeline)


SHAPES = [(n, {}) for n in NAMES if n != "search"] + [  # that one may leave a device no idle time
    ("chimera", {"mode": "double"}), ("chimera", {"mode": "halve"}), ("chimera", {"split": True}),
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "options"), SHAPES)
def test_no_step_gets_longer(name: str, options: dict[str, Any]) -> None:
    problem = of(4, 8, forward_s=(1.0, 1.3, 0.9, 1.1), activation_bytes=10, p2p_rate_Bps=1000, p2p_latency_s=0.001)
    found = filled(problem, name, replace(KFAC, layers=40 if name == "1f1b" else 20), options=options)
    f = found.filling
    assert max(found.makespans_s) <= f.idle.step_s * (1 + 1e-9) and f.steps >= f.bound_steps >= 1
    assert len({p.item for p in f.placements}) == len(f.work.items) and f.used(filled=True) > f.used(filled=False)
    assert check_plan(found.plan).ok and len(found.plan.cycle) == f.steps
    assert plan_bytes(plan_from_bytes(plan_bytes(found.plan))) == plan_bytes(found.plan)
    for k in range(f.steps):
        assert simulate_plan(replace(found.plan, cycle=found.plan.cycle[k : k + 1])).makespan_s == found.makespans_s[k]
    assert [c.key for n, c in citations(found.plan) if n == "fill"] == ["osawa2023pipefisher"]


def test_a_schedule_without_bubbles_takes_no_work() -> None:
    with pytest.raises(Infeasible, match="at a stretch"):
        filled(of(4, 8), "chimera", options={"pipes": 2})


def test_replicas_and_their_sums() -> None:
    problem = of(2, 4, data=2, gradient_bytes=64, weight_bytes=64, p2p_rate_Bps=1e6, activation_bytes=8)
    found = filled(problem, "1f1b", replace(KFAC, sync_s=0.2))
    kinds = {i.kind for i in found.filling.work.items}
    assert kinds == {"curvature", "sync", "inverse"} and max(found.makespans_s) <= found.filling.idle.step_s
    inverses = [p.rank for p in found.filling.placements if p.item.startswith("inverse")]
    assert {inverses.count(r) for r in range(4)} == {6}  # the replicas of a stage share its layers out
    unsummed = filled(problem, "1f1b", replace(KFAC, factor_bytes=0, sync_s=0.0))
    assert unsummed.filling.steps <= found.filling.steps


def test_the_mean_time_of_a_ring_stands_for_sums_not_given() -> None:
    problem = of(4, 4, p2p_rate_Bps=100, p2p_latency_s=0.01)
    items = kfac_work(problem, Chimera().plan(problem), KFAC).items
    sync = [i for i in items if i.kind == "sync"]
    assert len(sync) == 8 and all(len(i.ranks) == 2 and i.together for i in sync)
    assert sum(i.duration_s for i in sync if i.name.endswith(" 0")) == pytest.approx(2 * (0.01 + 40 / 2 / 100))


# ---- the published capacity model ------------------------------------------------------------------------------------
# ms per block: forward, backward, curvature per micro-batch, inverses; as profiled by the authors on a P100, micro-batch 32 and 8
PROFILES = {
    "bert-base 32": (9.748101, 16.450238, 25.546599, 71.666884), "bert-base 8": (2.734089, 4.651046, 6.803917, 71.643567),
    "bert-large 32": (16.100359, 26.952887, 43.499517, 126.700855),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("depth", [4, 8])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("strategy", [GPipe(), OneFOneB(), Chimera()])
def test_the_capacity_model(strategy: PipelineStrategy, profile: str, depth: int) -> None:
    f, b, curvature, inverse = PROFILES[profile]
    problem = of(depth, depth, forward_s=f, backward_s=b)
    schedule = strategy.plan(problem)
    idle = idle_of(problem, strategy)
    forwards, backwards = (depth, 2 * depth - 2) if isinstance(strategy, Chimera) else (2 * depth - 1, 2 * depth - 1)
    assert idle.step_s == pytest.approx(forwards * f + backwards * b)
    bubble = idle.step_s - depth * (f + b)
    ratio = (depth * curvature + inverse) / bubble
    work = kfac_work(problem, schedule, KFACCosts(curvature_s=curvature, inverse_s=inverse, layers=24))
    found = fill_bubbles(problem, idle, work)
    assert found.bound_steps == -int(-ratio // 1) and found.bound_steps <= found.steps <= found.bound_steps + 2
    expected = (depth * (f + b) * found.steps + depth * curvature + inverse) / (found.steps * idle.step_s)
    assert found.used(filled=True) == pytest.approx(expected)


# ---- optimality ----------------------------------------------------------------------------------------------------
def fits(items: list[tuple[float, int]], gaps: list[list[float]], steps: int) -> bool:
    """Whether items (seconds, rank) fit into that many steps: all assignments to idle times."""
    bins = [[g for _ in range(steps) for g in own] for own in gaps]

    def put(n: int) -> bool:
        if n == len(items):
            return True
        seconds, rank = items[n]
        for i, room in enumerate(bins[rank]):
            if room >= seconds and room not in bins[rank][:i]:
                bins[rank][i] = room - seconds
                if put(n + 1):
                    return True
                bins[rank][i] = room
        return False

    return put(0)


@pytest.mark.parametrize("seed", range(25))
def test_few_items_take_as_few_steps_as_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    problem = of(2, 2)
    gaps = [[float(rng.randint(2, 9)) for _ in range(rng.randint(1, 3))] for _ in range(2)]
    rows, length = [], max(sum(g) + len(g) for g in gaps)
    for own in gaps:
        now, row = 0.0, []
        for i, g in enumerate(own):
            row.append((now, now + g, i))
            now += g + 1
        rows.append(tuple(row))
    idle = Idle(step_s=length, gaps=tuple(rows), action_end_s=({}, {}), busy_s=(0.0, 0.0))
    items = [(float(rng.randint(1, int(max(gaps[r])))), r) for r in (rng.randint(0, 1) for _ in range(rng.randint(2, 6)))]
    work = FillWork(items=tuple(Deferrable(name=f"i{n}", kind="x", duration_s=s, ranks=(r,)) for n, (s, r) in enumerate(items)))
    found = fill_bubbles(problem, idle, work)
    least = next(k for k in itertools.count(1) if fits(items, gaps, k))
    assert found.steps == least >= found.bound_steps


def test_pieces_fill_everything() -> None:
    problem = of(4, 4)
    idle = idle_of(problem, GPipe())
    seconds = float(idle.idle_s(0)) * 3
    work = FillWork(items=(Deferrable(name="w", kind="write", duration_s=seconds, ranks=(0,), piece_s=seconds / 9),))
    found = fill_bubbles(problem, idle, work)
    assert found.steps == found.bound_steps == 3 and found.work_s(0) == pytest.approx(seconds)
    with pytest.raises(Infeasible, match="at a stretch"):
        fill_bubbles(problem, idle, FillWork(items=(msgspec.structs.replace(work.items[0], piece_s=0.0),)))


# ---- other work ----------------------------------------------------------------------------------------------------
def test_evaluation_sees_one_state_of_the_weights() -> None:
    problem = of(4, 4, activation_bytes=50, p2p_rate_Bps=1000)
    found = filled(problem, "1f1b", lambda p, s: evaluation_work(p, s, 3))
    steps = {e: {p.step for p in found.filling.placements if p.item.endswith(e)} for e in ("e0", "e1", "e2")}
    assert all(len(s) == 1 for s in steps.values())
    sends = [n for p in found.plan.programs.values() for n in p.buffers.name if n.startswith("fillout:evaluate")]
    assert len(sends) == 9  # three borders, three micro-batches


def test_statistics_checkpoints_and_kfac_together() -> None:
    problem = of(4, 8, forward_s=1, weight_bytes=100, gradient_bytes=0, memory_cap_bytes=10_000)

    def work(p: PipelineProblem, s: Any) -> FillWork:
        shampoo = gradient_work(p, s, "shampoo", (("statistics", 0.5), ("roots", 2.0)), layers=4, kept_bytes=20)
        saved = checkpoint_work(p, s, write_s=3.0, snapshot_s=0.1, piece_s=0.25)
        return joined([shampoo, saved, kfac_work(p, s, KFAC)], p.devices)

    found = filled(problem, "interleaved", work, margin=0.05)
    f = found.filling
    end = {p.item: (p.step, p.end_s) for p in f.placements}
    assert all(end[i.name][0] == 0 for i in f.work.items if i.kind == "snapshot")
    assert min(p.step for p in f.placements if p.item.startswith("shampoo")) == 1
    assert found.margin == 0.05 and max(f.kept_bytes) >= 100
    assert [b + r + k for b, r, k in zip(found.judged.memory_bytes, f.work.resident_bytes, f.kept_bytes, strict=True)] == list(found.memory_bytes)
    again = filled(problem, "interleaved", work, margin=0.05)
    assert plan_bytes(again.plan) == plan_bytes(found.plan)


def test_a_wider_margin_leaves_room() -> None:
    problem = of(4, 4)
    idle = idle_of(problem, OneFOneB())
    for margin in (0.0, 0.5):
        f = fill_bubbles(problem, idle, kfac_work(problem, OneFOneB().plan(problem), KFAC), margin=margin)
        for p in f.placements:
            room = [e for s, e, _ in idle.gaps[p.rank] if s <= p.start_s and p.end_s <= e]
            assert room and p.start_s + (p.end_s - p.start_s) * (1 + margin) <= room[0] + 1e-9


# ---- the checker -----------------------------------------------------------------------------------------------------
def document() -> tuple[dict[str, Any], list[list[tuple[str, float, float]]], float]:
    problem = of(4, 2, memory_cap_bytes=1000)

    def work(p: PipelineProblem, s: Any) -> FillWork:
        items = kfac_work(p, s, replace(KFAC, layers=2)).items
        extra = (
            Deferrable(name="both", kind="sync", duration_s=0.1, ranks=(0, 1), together=True, deadline_steps=3),
            Deferrable(name="g0", kind="e", duration_s=0.1, ranks=(0,), group="g"),
            Deferrable(name="g1", kind="e", duration_s=0.1, ranks=(1,), group="g", after=("g0",), ready_step=0),
        )
        return FillWork(items=items + extra)

    found = filled(problem, "gpipe", work)
    spans = found.judged.timeline.spans
    p = found.judged.program
    rows: list[list[tuple[str, float, float]]] = [[], [], [], []]
    for step, s, e in zip(spans.step.tolist(), spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
        op = int(p.steps.op[step])
        if op >= 0:
            rows[int(spans.rank[list(spans.step).index(step)])].append((f"{int(p.ops.stage[op])}{p.ops.name[op]}{int(p.ops.microbatch[op])}", s, e))
    return dict(found.plan.job["fill"]), rows, found.filling.idle.step_s


def changed(d: dict[str, Any], item: str, **new: Any) -> dict[str, Any]:
    rows = [{**p, **{k: v(p[k]) if callable(v) else v for k, v in new.items()}} if p["item"].startswith(item) else p for p in d["placements"]]
    return {**d, "placements": rows}


def restated(d: dict[str, Any], item: str, **new: Any) -> dict[str, Any]:
    return {**d, "items": [{**i, **new} if i["name"].startswith(item) else i for i in d["items"]]}


def test_the_checker_accepts_and_refuses() -> None:
    d, actions, step_s = document()
    assert check_filling(d, actions, step_s) == []
    first = next(p for p in d["placements"] if p["item"].startswith("curvature B 0:m0"))
    wrong = {
        "a step takes": {**d, "step_s": step_s * 1.1},
        "overlap": changed(d, "inverse A 0.0", step=lambda _: next(p for p in d["placements"] if p["item"] == "inverse A 0.1")["step"],
                           start_s=lambda _: next(p for p in d["placements"] if p["item"] == "inverse A 0.1")["start_s"],
                           end_s=lambda _: next(p for p in d["placements"] if p["item"] == "inverse A 0.1")["end_s"]),
        "it may on": changed(d, "inverse A 0.0", rank=1),
        "gets": {**d, "placements": [p for p in d["placements"] if p is not first] + [{**first, "end_s": first["end_s"] - 0.01}]},
        "outside its step": changed(d, "both", step=d["steps"]),
        "misses its deadline": restated(changed(d, "both", step=1), "both", deadline_steps=1),
        "no item": {**d, "placements": [*d["placements"], {**first, "item": "x"}]},
        "before both is complete": restated(d, "curvature A 0:m0", after=["both"]),
        "before step 40": restated(d, "g0", ready_step=40),
        "before 0B1": restated(d, "curvature A 0:m0", actions=[[0, "0B1"]]),
        "does not run": restated(d, "curvature A 0:m0", actions=[[0, "9F9"]]),
        "which is no item": restated(d, "g0", after=["zz"]),
        "not in one": changed(d, "g1", step=lambda s: (s + 1) % d["steps"]),
        "holds up to": {**d, "memory_bytes": [1, 1]},
        "above its 5": {**d, "cap_bytes": [5, 5]},
        "one name": {**d, "items": [*d["items"], d["items"][0]]},
        "lacks or mangles": {k: v for k, v in d.items() if k != "bound"},
        "claimed is": {**d, "bound": {**d["bound"], "value": "999"}},
    }  # fmt: skip
    for says, bad in wrong.items():
        findings = check_filling(bad, actions, step_s)
        assert findings and says in findings[0].message, (says, findings)
    begins = next(p for p in d["placements"] if p["item"] == "inverse A 0.0")  # in two pieces, of which only the second is late enough
    pieces = [{**begins, "step": 0, "start_s": 0.0, "end_s": 0.0}, {**begins, "start_s": begins["start_s"]}]
    early = {**restated(d, "inverse A 0.0", piece_s=1e-3), "placements": [p for p in d["placements"] if p is not begins] + pieces}
    assert "inverse A 0.0 starts" in check_filling(early, actions, step_s)[0].message
    data = d["bound"]["certificate"]["data"]
    more = {**data, "work_s": "1000"}
    findings = check_filling({**d, "bound": {**d["bound"], "certificate": {"kind": "fill", "data": more}}}, actions, step_s)
    assert "other work or idle time" in findings[0].message
    apart = changed(d, "both", start_s=lambda s: s)
    for p in apart["placements"]:
        if p["item"] == "both" and p["rank"]:
            p.update(start_s=p["start_s"] + 0.01, end_s=p["end_s"] + 0.01)
    assert "at one time" in check_filling(apart, actions, step_s)[0].message


def test_certificates_of_the_bound() -> None:
    good = {"work_s": "7", "idle_s": "2", "step_s": "3", "rounding": "0"}
    assert fill_time(good) == 12 and fill_time({**good, "work_s": "0", "idle_s": "0"}) == 3
    for bad in ({"idle_s": "0"}, {"work_s": "-1"}, {"rounding": "1/2"}):
        with pytest.raises(ValueError, match=r"idle time at all|out of range"):
            fill_time({**good, **bad})
    idle = idle_of(of(4, 4), GPipe())
    assert refresh_bound(idle, FillWork(items=())).value == "21"


# ---- refusals --------------------------------------------------------------------------------------------------------
def item(**new: Any) -> Deferrable:
    return Deferrable(**{"name": "a", "kind": "x", "duration_s": 1.0, "ranks": (0,), **new})


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([item(), item()], "one name"), ([item(ranks=())], "runs on ranks"), ([item(ranks=(0, 9))], "runs on ranks"), ([item(ranks=(0, 0))], "runs"),
        ([item(duration_s=-1.0)], "negative or not finite"), ([item(keeps_bytes=-1)], "negative"), ([item(after=("b",))], "which is no item"),
        ([item(together=True, piece_s=0.1)], "cut into pieces"), ([item(after=("b",)), item(name="b", after=("a",))], "wait for each other"),
        ([item(actions=((0, "9F9"),))], "does not run it"), ([item(actions=((7, "0F0"),))], "does not run it"),
        ([item(group="g", after=("b",)), item(name="b", after=("c",)), item(name="c", group="g")], "of a group wait"),
    ],
)  # fmt: skip
def test_work_that_cannot_be(items: list[Deferrable], says: str) -> None:
    problem = of(2, 2)
    with pytest.raises(UsageError, match=says):
        fill_bubbles(problem, idle_of(problem, GPipe()), FillWork(items=tuple(items)))


def test_what_fits_nowhere() -> None:
    problem = of(2, 2)
    idle = idle_of(problem, GPipe())

    def fill(*items: Deferrable, **more: Any) -> Filling:
        return fill_bubbles(problem, idle, FillWork(items=items), **more)

    with pytest.raises(Infeasible, match="longest idle time") as found:
        fill(item(duration_s=50.0))
    assert found.value.data["longest_idle_s"] == 3
    with pytest.raises(Infeasible, match="within 2 steps"):
        fill(*[item(name=str(i), duration_s=3.0) for i in range(9)], most_steps=2)
    with pytest.raises(Infeasible, match="within 1 steps"):
        fill(item(actions=((0, "0B1"),), duration_s=2.0, deadline_steps=1))
    with pytest.raises(Infeasible, match="at a stretch"):
        fill(item(ranks=(0, 1), together=True, duration_s=50.0))
    with pytest.raises(Infeasible):
        fill(item(group="g", duration_s=3.0), item(name="b", group="g", after=("a",), duration_s=3.0))
    with pytest.raises(UsageError, match="margin"):
        fill(item(), margin=-0.1)
    require_sound(FillWork(items=(item(),)), 1)


def test_memory_and_messages_that_do_not_fit() -> None:
    with pytest.raises(Infeasible, match="would hold up to") as found:
        filled(of(4, 4, memory_cap_bytes=40), "1f1b")
    assert found.value.data["limit"] == "memory"
    done = filled(of(4, 4), "1f1b")
    with pytest.raises(UsageError, match="filled already"):
        fill_plan(done.plan, lambda p, s: FillWork(items=()))
    for bad in ({"layers": 0}, {"curvature_s": (1.0, 2.0)}):
        with pytest.raises(UsageError):
            filled(of(4, 4), "1f1b", KFACCosts(**{"curvature_s": 1.0, "inverse_s": 1.0, **bad}))
    with pytest.raises(UsageError):
        filled(of(4, 4), "1f1b", lambda p, s: evaluation_work(p, s, 0))
    with pytest.raises(UsageError):
        filled(of(4, 4), "1f1b", lambda p, s: gradient_work(p, s, "muon", (("x", 1.0),), layers=0))
