"""An explained plan: what it says about time, memory, rivals and changes holds when simulated again."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from captured import captured
from meshwright.cli import main
from meshwright.cost import Priced, assumed_cost
from meshwright.drive import plans as drive
from meshwright.drive.training.changes import more_memory, one_more_device, one_more_nic, what_ifs
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible, UsageError
from meshwright.explain.breakdown import PathShare, StageShare, breakdown, simulated
from meshwright.explain.explanation import Explanation, explain_plan
from meshwright.explain.numbers import seconds_text
from meshwright.explain.opening import opening
from meshwright.explain.recomputation import recompute_advice
from meshwright.explain.rivals import FACTOR_PRECISION, Scenario, crossings, scaled_compute, scaled_links
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.io.model.graph import write_graph
from meshwright.job import Training
from meshwright.kernels.effort import Budget
from meshwright.plan.plan import Plan
from meshwright.report.explain_text import explain_document, explain_text

MODEL = str(Path(__file__).parents[2] / "examples" / "gpt.py:tiny")


@functools.cache
def graph() -> OpGraph:
    return captured(MODEL)


@functools.cache
def made(memory_bytes: int = 0, pipeline: int = 2) -> Plan:
    fabric = drive.read_fabric("two-islands")
    if memory_bytes:
        fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in fabric.devices))
    job = Training(model=MODEL, global_batch=16)
    return plan_training(job, fabric, graph=graph(), wishes=(LayoutWanted(data=4 // pipeline, tensor=1, pipeline=pipeline, microbatch=4),))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(path, graph())
    return explain_plan(made(), graph_path=path, time_limit_s=280)  # ends by itself long before


def test_time_and_memory_add_up(whole: Explanation) -> None:
    found, plan = whole.breakdown, made()
    assert plan.prediction is not None and found.time_s == plan.prediction.time_s
    for s in found.stages:
        assert sum(s.seconds.values()) == pytest.approx(found.time_s)
        assert sum(v for k, v in s.memory_bytes.items() if k != "peak") == s.memory_bytes["peak"]
        assert s.memory_bytes["peak"] == max(plan.prediction.memory_peak_bytes[r] for r in s.ranks)
        assert s.memory_bytes["gradients"] == s.memory_bytes["weights"] and s.memory_bytes["states"] == 2 * s.memory_bytes["weights"]
    assert [s.ranks for s in found.stages] == [(0, 1), (2, 3)]
    assert sum(p.share for p in found.path) == pytest.approx(1.0)
    assert sum(p.seconds for p in found.path) == pytest.approx(found.time_s)
    assert found.path[0].seconds == max(p.seconds for p in found.path)
    assert "is the bottleneck" in found.bottleneck and found.bottleneck.count(".") == 1


def test_a_page_opens_with_what_limits_by_how_much_and_what_to_do() -> None:
    plan = made()
    found = breakdown(simulated(plan))
    what, much, do = opening(plan, found)
    kinds = {"compute": sum(p.seconds for p in found.path if p.phase in ("forward", "backward", "optimizer"))}
    for p in found.path:
        if p.phase not in ("forward", "backward", "optimizer"):
            name = "pipeline waiting" if p.phase == "idle" else f"{p.phase} communication"
            kinds[name] = kinds.get(name, 0.0) + p.seconds
    most = max(kinds, key=lambda k: kinds[k])
    assert what.startswith(f"{most.capitalize()} limits this step, most of all ") and seconds_text(kinds[most]) in much and "faster" in much
    assert do.startswith("To do: ") and all(s.endswith(".") for s in (what, much, do))
    empty = msgspec.structs.replace(found, path=())
    assert opening(plan, empty)[0] == "This step does nothing."


@pytest.mark.parametrize(
    ("phase", "said"),
    [("gradient", "a larger batch per step"), ("tensor", "inside a server"), ("forward", "a lower precision"), ("pipeline", "fewer stages")],
)
def test_what_to_do_follows_what_limits(phase: str, said: str) -> None:
    found = breakdown(simulated(made()))
    path = (PathShare(stage=0, phase=phase, seconds=1.0, share=1.0),)
    quiet = tuple(msgspec.structs.replace(s, seconds={**dict.fromkeys(s.seconds, 0.0), "forward": 1.0}) for s in found.stages)
    assert said in opening(made(), msgspec.structs.replace(found, path=path, stages=quiet))[2]
    idle = tuple(msgspec.structs.replace(s, seconds={**s.seconds, "idle": 100.0}) for s in found.stages)
    layout = made().layout
    assert layout is not None
    few = replace(made(), layout=msgspec.structs.replace(layout, microbatches=2))
    assert "a larger --global-batch" in opening(few, msgspec.structs.replace(found, path=path, stages=idle))[2]


def test_slow_links_become_the_bottleneck() -> None:
    plan = made(pipeline=1)
    slow = simulated(replace(plan, target_fabric=_document(scaled_links(drive.fabric_of(plan), 0.02))))
    text = breakdown(slow).bottleneck
    assert text.startswith("Gradient communication is the bottleneck") and "busiest link" in text


def _document(fabric: Fabric) -> dict[str, object]:
    from meshwright.io.fabric.document import fabric_document

    return fabric_document(fabric)


def test_utilisation_counts_the_model(whole: Explanation) -> None:
    flops, plan = whole.flops, made()
    one_pass = sum(n.forward.flops + n.backward.flops for n in graph().nodes)
    assert flops.hardware == one_pass * 16 // graph().batch_size
    assert 0 < flops.model < flops.hardware  # fused attention computes its scores twice
    assert flops.mfu == flops.model / (flops.step_time_s * flops.peak_flops)
    slower = explain_plan(plan, quick=True, step_time_s=2 * flops.step_time_s).flops
    assert slower.measured and slower.hfu == pytest.approx(flops.hfu / 2) and slower.model == 0


def test_every_assumption_has_its_bar(whole: Explanation) -> None:
    assert {a.what for a in whole.assumptions} >= {"arithmetic", "memory traffic", "launch of an operator", "rates of links"}
    for a in whole.assumptions:
        assert a.low_s <= whole.breakdown.time_s <= a.high_s
    assert whole.low_s < whole.breakdown.time_s < whole.high_s
    certain = explain_plan(made(), quick=True, errors={"assumed": 0.0, "links": 0.0})
    assert certain.low_s == pytest.approx(certain.high_s)
    assert all(a.low_s == a.high_s for a in certain.assumptions)


def test_rivals_lose_and_crossings_cross(whole: Explanation) -> None:
    assert len(whole.rivals) >= 3
    assert all(r.time_s == pytest.approx(r.ratio * whole.breakdown.time_s) for r in whole.rivals)
    fitting = [r.time_s for r in whole.rivals if r.fits]
    assert fitting == sorted(fitting)
    assert all(0.25 <= c.factor <= 4 for c in whole.crossings)


def test_a_crossing_is_where_the_rival_starts_to_win() -> None:
    from meshwright.drive.training.decisions import choose, context_of

    fabric = drive.read_fabric("two-islands")
    cost = assumed_cost(fabric)
    wishes = (LayoutWanted(tensor=1, microbatch=4), CollectivesWanted("ring"))
    layouts = choose(context_of(Training(model=MODEL, global_batch=16), fabric, cost, graph=graph(), wishes=wishes), ("layout",))
    best, judged = layouts.winner, layouts.judged
    rivals = [e for e in judged if e.timeline is not None and e is not best]
    found = crossings(Scenario(fabric), best, rivals, Budget(100))
    assert found
    for c in found:
        back = min(2 * FACTOR_PRECISION, abs(math.log(c.factor)))  # towards what is believed, where all of them lose
        fresh, moved = Scenario(fabric), math.exp(math.log(c.factor) - math.copysign(back, math.log(c.factor)))
        assert any(fresh.time_s(r, c.axis, c.factor) < fresh.time_s(best, c.axis, c.factor) for r in rivals)  # type: ignore[arg-type]
        assert all(fresh.time_s(r, c.axis, moved) >= fresh.time_s(best, c.axis, moved) for r in rivals)  # type: ignore[arg-type]
    assert crossings(Scenario(fabric), best, rivals, Budget(100, time_limit_s=-1.0)) == ()


def test_scaled_rates_scale_times() -> None:
    fabric = drive.read_fabric("two-islands")
    cost = assumed_cost(fabric).with_table({"x|F": Priced(2.0, "measured", 2.0)}, source="test")
    work = graph().nodes[-1].forward
    twice, faster = scaled_compute(fabric, cost, 2.0)
    assert faster.price("x|F", None, twice.devices[0]).time_s == 1.0
    before = cost.roofline(work, fabric.devices[0]).time_s
    assert faster.roofline(work, twice.devices[0]).time_s == pytest.approx(before / 2)
    assert [x.rate_Bps for x in scaled_links(fabric, 0.5).links] == [x.rate_Bps // 2 for x in fabric.links]


def test_one_more_of_each() -> None:
    boxes = drive.read_fabric("dgx-a100:2")
    found = one_more_nic(boxes)
    assert found is not None and "9 instead of 8" in found[0]
    ratios = {round(new.rate_Bps / old.rate_Bps, 6) for old, new in zip(boxes.links, found[1].links, strict=True)}
    assert ratios == {1.0, 1.125}
    islands = drive.read_fabric("two-islands")
    wider = one_more_nic(islands)
    assert wider is not None and "no NICs" in wider[0]
    assert one_more_nic(replace(islands, devices=islands.devices[:1], switches=(), links=())) is None
    what, more = one_more_device(islands)
    again = one_more_device(more)[1]
    assert len(again.devices) == 6 and len({d.name for d in again.devices}) == 6 and islands.devices[-1].name in what
    again.require_connected()
    grown = more_memory(replace(islands, devices=tuple(replace(d, memory_bytes=100) for d in islands.devices)))
    assert grown is not None and {d.memory_bytes for d in grown[1].devices} == {110}
    assert more_memory(replace(islands, devices=tuple(replace(d, memory_bytes=0) for d in islands.devices))) is None


def test_what_if_reports_gains_losses_and_refusals(whole: Explanation) -> None:
    assert [w.gain >= 0 for w in whole.what_ifs] == [True] * 3
    faster = next(w for w in whole.what_ifs if "links" in w.what)
    assert faster.gain > 0 and faster.time_s == pytest.approx((1 - faster.gain) * whole.breakdown.time_s)
    fabric = drive.read_fabric("two-islands")
    bare = replace(fabric, devices=tuple(replace(d, memory_bytes=0) for d in fabric.devices))

    def refused(where: Fabric) -> tuple[float, str]:
        raise Infeasible("five devices do not divide")

    found = what_ifs(bare, 1.0, refused, Budget(3))
    assert [w.why.partition(":")[0] for w in found] == ["the devices state no memory limit", "no plan", "no plan"]
    assert all("the time limit was reached" in w.why for w in what_ifs(fabric, 1.0, refused, Budget(3, time_limit_s=-1.0)))
    worse = what_ifs(fabric, 1.0, lambda _: (2.0, "x"), Budget(3))
    assert all(w.time_s == 1.0 and w.gain == 0 and w.why for w in worse)


def test_recomputing_is_priced_and_budgets_are_kept(whole: Explanation) -> None:
    advice = whole.recompute
    assert advice is not None and advice.layers == 4 and advice.layer == "blocks.0"
    shares = [p.kept_share for p in advice.points]
    assert shares[0] == 1.0 and shares[-1] == min(shares) and all(p.gap >= 0 for p in advice.points)
    assert all(s.recomputed == 0 and not s.why for s in advice.stages)
    plan, layout = made(), made().layout
    assert layout is not None
    from meshwright.graph.scale import at_batch

    at = at_batch(graph(), layout.microbatch_size)
    device = drive.fabric_of(plan).devices[0]

    def stage(limit: int) -> tuple[StageShare, ...]:
        return tuple(msgspec.structs.replace(s, limit_bytes=limit) for s in whole.breakdown.stages)

    peak = whole.breakdown.stages[0].memory_bytes["peak"]
    tight = recompute_advice(at, layout, stage(peak - advice.layer_bytes), drive.cost_of(plan), device)
    assert tight is not None and 0 < tight.stages[0].recomputed <= tight.stages[0].slots and tight.stages[0].time_share > 0
    assert tight.stages[0].kept_bytes <= tight.stages[0].budget_bytes
    hopeless = recompute_advice(at, layout, stage(1), drive.cost_of(plan), device)
    assert hopeless is not None and "may keep" in hopeless.stages[0].why


def test_the_graph_of_another_model_is_refused(tmp_path: Path) -> None:
    other = captured(MODEL.replace(":tiny", ":tiny_tied"), scalable=False)
    path = tmp_path / "other.json"
    write_graph(path, other)
    with pytest.raises(UsageError, match="another model"):
        explain_plan(made(), graph_path=path)


def test_a_plan_of_steps_that_were_priced_fits_the_roofline(tmp_path: Path) -> None:
    plan = made()
    cost = drive.cost_of(plan)
    works = drive.works_of(plan)
    device = drive.fabric_of(plan).devices[0]
    table = {k: Priced(3 * cost.roofline(w, device).time_s, "measured") for k, w in works.items()}
    priced = replace(plan, job={**plan.job, "cost": msgspec.to_builtins(cost.with_table(table, source="test"))})
    path = tmp_path / "graph.json"
    write_graph(path, graph())
    found = explain_plan(priced, graph_path=path, time_limit_s=0.1)
    assert any("take 3 times its time" in n for n in found.notes)
    assert any(a.what == "prices of steps" and a.evidence == "measured" and a.error == 0.05 for a in found.assumptions)


def test_without_the_model_the_rest_is_still_said() -> None:
    plan = made()
    training = {**plan.job["training"], "model": "nowhere.py:net"}
    found = explain_plan(replace(plan, job={**plan.job, "training": training}))
    assert not found.rivals and any("cannot be captured here" in n for n in found.notes)
    changed = explain_plan(replace(plan, job={**plan.job, "graph_fingerprint": "other"}))
    assert any("has changed" in n for n in changed.notes)
    with pytest.raises(UsageError, match="not of a training step"):
        explain_plan(replace(plan, layout=None))


def test_text_and_document(whole: Explanation) -> None:
    text = explain_text(made(), whole, limit=3)
    parts = ("is the bottleneck", "critical path:", "error bar:", "runners-up", "how wrong the rates may be", "what would change it")
    for part in (*parts, "not modelled:", "recomputing instead of keeping", "decisions"):
        assert text.count(part) == 1, part
    document = explain_document(made(), whole, limit=3)
    assert document["schema"] == "meshwright.train.plan" and len(document["alternatives"]) <= 3
    assert document["explanation"]["breakdown"]["stages"][1]["stage"] == 1
    json.dumps(document)
    quick = explain_text(made(), explain_plan(made(), quick=True), limit=3)
    assert "how wrong" not in quick and "runners-up" in quick  # the plan's own list


SHAPE = "layers=48,hidden=6144,heads=64,sequence=2048,vocabulary=51200"
SPLIT = ["--tp", "8", "--microbatch", "4", "--device", "a100"]


def test_a_described_transformer_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "explain", "--transformer", SHAPE, *SPLIT, "--sequence-parallel", "--recompute", "selective", "--step-time", "1.10"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.train.ledger"
    assert round(100 * document["mfu"], 1) == 41.7 and round(100 * document["hfu_paper"], 1) == 43.8
    assert document["layer_bytes"] == sum(k["size_bytes"] for k in document["layer"] if k["kept"])
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "MFU 41.7 %, HFU 43.8 % as the paper counts" in text and "recomputed" in text
    assert main(["train", "explain", "--transformer", SHAPE, *SPLIT]) == 3
    error = capsys.readouterr().err
    assert "stage 0: each rank needs 114 GB and has 80 GB" in error and "hint: sequence parallelism and recomputing core attention" in error
    path = tmp_path / "model.toml"
    fields = "\n".join(SHAPE.split(","))
    path.write_text(f"[transformer]\n{fields}\nattention = 'flash'\n[layout]\ntensor = 8\n")
    more = ["--global-batch", "32", "--pp", "4", "--stage-layers", "11,12,12,13", "--interleave", "1", "--dp", "2", "--distributed-optimizer",
            "--keep-outputs", "--recompute", "block:2", "--peak-flops", "1e14", "--memory", "80GB"]  # fmt: skip
    assert main(["train", "explain", "--transformer", str(path), *more, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"]["microbatches"] == 16 and document["layout"]["stage_layers"] == [11, 12, 12, 13]
    assert document["layout"]["every"] == 2 and not document["layout"]["deallocate_outputs"]
    assert main(["train", "explain", "--transformer", str(path)]) == 0
    assert "saves its log-sum-exp only" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [], ["plan.json", "--transformer", SHAPE], ["--transformer", SHAPE, "--svg", "x.svg"],
        ["--transformer", "layers"], ["--transformer", SHAPE, "--step-time", "0"],
        ["--transformer", SHAPE, "--device", "abacus"], ["--transformer", SHAPE, "--device", "v100", "--dtype", "bf16"],
        ["--transformer", SHAPE, "--memory", "lots"], ["--transformer", SHAPE, "--global-batch", "7", "--dp", "2"],
        ["--transformer", SHAPE, "--recompute", "some"], ["--transformer", "none.toml"], ["none.json"],
    ],
)  # fmt: skip
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "explain", *words]) in (1, 2)
    assert capsys.readouterr().err.startswith("error: ")


def test_wrong_error_bars_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive.write_plan(tmp_path / "plan.json", made())
    for bad in ("assumed", "assumed=2", "luck=0.1", "links=x"):
        assert main(["train", "explain", str(tmp_path / "plan.json"), "--quick", "--error", bad]) == 2
        assert "KIND=E" in capsys.readouterr().err
    assert main(["train", "explain", str(tmp_path / "plan.json"), "--quick", "--error", "assumed=0.5,links=0.2"]) == 0
    assert "+-50 %" in capsys.readouterr().out
