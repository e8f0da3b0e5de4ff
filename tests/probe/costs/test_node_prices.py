"""Prices of segments from operators measured here."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from captured import captured
from meshwright.check import check_plan
from meshwright.cli import main
from meshwright.cost import Cost, Priced
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive import plans as drive
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted, StepPrices
from meshwright.graph.graph import OpGraph
from meshwright.job import Training
from meshwright.plan.on_schedule import on_schedule, split_prices, weight_roles
from meshwright.plan.plan import TrainingLayout
from meshwright.probe.costs.node_prices import MeasuredPrices, as_measured, measured_prices, segment_prices

MODEL = str(Path(__file__).parents[3] / "examples" / "gpt.py") + ":tiny"


@functools.cache
def graph() -> OpGraph:
    return captured(MODEL)


def layout(tensor: int, microbatch: int, pipeline: int = 1) -> TrainingLayout:
    """Of four devices; collectives are not searched for, and nothing is proved: only the cuts count here."""
    degrees = {"data": 4 // tensor // pipeline, "tensor": tensor, "pipeline": pipeline, "microbatch": microbatch}
    job = Training(model=MODEL, global_batch=16)
    made = plan_training(
        job, drive.read_fabric("two-islands"), graph=graph(),
        wishes=(
            LayoutWanted(tensor_options=TensorOptions(sequence=False), **degrees), CollectivesWanted("ring"), ShardingWanted(level=0, overlap=False),
        ),
    )  # fmt: skip
    assert made.layout is not None
    return made.layout


def test_a_plan_with_measured_prices_says_so_and_stays_above_its_bound() -> None:
    job = Training(model=MODEL, global_batch=16)
    prices = measured_prices(job, batch_size=4, repeats=1)
    fabric = as_measured(drive.read_fabric("two-islands"), prices.peak_flops(graph()), "fp32")
    plan = plan_training(
        job, fabric, graph=graph(), wishes=(LayoutWanted(data=4, tensor=1, pipeline=1, microbatch=4), StepPrices(prices), CollectivesWanted("ring")),
    )  # fmt: skip
    assert plan.prediction is not None and plan.prediction.evidence["measured"] > 0
    assert check_plan(plan, fabric).status == "ok"


def test_prices_scale_with_micro_batch_and_split_and_lose_their_rank_of_evidence() -> None:
    nodes = {n.name: (Priced(1.0, "measured", 1.0), Priced(2.0, "measured", 2.0)) for n in graph().nodes}
    whole, half, split = layout(1, 4), layout(1, 2), layout(4, 4)
    count = len(graph().nodes)
    assert segment_prices(nodes, 4, whole) == {"s0.0|F": Priced(count, "measured", count), "s0.0|B": Priced(2 * count, "measured", 2 * count)}
    assert segment_prices(nodes, 4, half, share=0.5)["s0.0|F"] == Priced(count, "interpolated", count / 2)
    first = next(s for s in split.segments if s.split)
    assert segment_prices(nodes, 4, split)[f"{first.key}|F"] == Priced(len(first.nodes) / 4, "interpolated", len(first.nodes) / 4)


def test_a_split_backward_is_priced_by_the_measured_shares_of_weights() -> None:
    """A half where nothing was measured; all of it where an operator takes parameters alone; what runs again belongs to the first part."""
    whole = layout(1, 4, 2)
    split = on_schedule(whole, graph(), name="zb1p", pipeline=2, placement=((0, 1),), split=True)
    nodes = {n.name: (Priced(1.0, "measured", 1.0), Priced(2.0, "measured", 2.0)) for n in graph().nodes}
    roles = weight_roles(graph(), split)
    assert {*roles.values()} == {True, False}
    shared = [n for n, all_of_it in roles.items() if not all_of_it]
    for shares, each in (({}, 0.5), (dict.fromkeys(shared, 0.25), 0.25)):
        priced = MeasuredPrices(nodes, 4, weights=shares)(graph(), split)
        for s in split.segments:
            later = sum((2.0 if roles[n] else 2.0 * each) for n in s.nodes if n in roles)
            assert priced[f"{s.key}|W"].time_s == pytest.approx(later)
            assert priced[f"{s.key}|I"].time_s + later == pytest.approx(segment_prices(nodes, 4, whole)[f"{s.key}|B"].time_s)
        assert split_prices(priced, split, Cost(), drive.read_fabric("two-islands").devices[0]) == priced


def test_a_fabric_that_is_fast_enough_is_left_alone() -> None:
    fabric = drive.read_fabric("two-islands")
    assert as_measured(fabric, 1, "fp32") is fabric
    faster = as_measured(fabric, 10**15, "fp32")
    assert faster.devices[0].flops["fp32"] == 10**15 and "measured here" in faster.provenance[-1].source


@pytest.mark.parametrize("words", [["--fabric", "dgx-h100:1", "--model", MODEL], ["--fabric", "two-islands", "--model", "graph.json"]])
def test_measured_costs_are_refused_where_they_mean_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "plan", "--global-batch", "16", "--cost", "measured", *words]) == 2
    assert "measured costs" in capsys.readouterr().err
