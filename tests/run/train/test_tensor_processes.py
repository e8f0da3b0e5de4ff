"""Tensor parallelism on real processes: loss, every gradient and every byte, against plain eager training and the plan."""

from __future__ import annotations

import pytest
import torch
from dtensor_peer import run_dtensor
from rig import fabric_of, graph_of
from tensor_models import BATCH, LENGTH
from tensor_rig import as_serial, compare, plan_case, run_case, serial_step, whole_case

from meshwright.cost import Cost, Priced
from meshwright.decide.layout.megatron import kept_notes, search_regions
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.layout.tensor_usable import usable_regions
from meshwright.plan.sizes import shard_bytes, training_works
from meshwright.probe.costs.node_prices import segment_prices
from meshwright.program.program import Kind
from meshwright.simulate.pricing import durations

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("even", (1, 2, 1)), ("even", (1, 4, 1)), ("odd_tied", (1, 2, 1)), ("odd_tied", (1, 3, 1)), ("odd_tied", (1, 4, 1)), ("odd_tied", (1, 2, 2)),
        ("odd_tied", (2, 2, 1)), ("odd_tied", (2, 1, 2)), ("grouped_expand", (1, 2, 1)), ("grouped_expand", (1, 4, 1)), ("grouped_expand", (1, 3, 1)),
        ("grouped_repeat", (1, 2, 1)), ("grouped_repeat", (1, 4, 1)), ("grouped_packed", (1, 2, 1)), ("grouped_packed", (1, 4, 1)),
        ("grouped_native", (1, 4, 1)), ("grouped_native", (1, 2, 1)), ("scanned", (1, 2, 1)),
    ],
)  # fmt: skip
def test_loss_gradients_and_bytes(pool, name, degrees):
    as_serial(pool, name, degrees, loss="mse" if name == "scanned" else "cross-entropy")


def test_what_was_split(pool):
    """The cases above do split what they are there for."""
    wanted = [("odd_tied", 3), ("grouped_expand", 4), ("grouped_expand", 3), ("grouped_packed", 2)]
    layouts = {(n, t): plan_case(n, (1, t, 1)).layout for n, t in wanted}
    shards = {key: {s.param: s for s in layout.shards} for key, layout in layouts.items()}
    odd = shards["odd_tied", 3]
    assert odd["tokens.weight"].shares == (13, 12, 12) and odd["blocks.0.attention.qkv.weight"].shares == (2, 2, 1)
    assert layouts["odd_tied", 3].losses[0].node == "cross_entropy_loss"
    for key, groups in ((("grouped_expand", 4), ((0, 1), (2, 3))), (("grouped_expand", 3), ((0, 1), (2,)))):
        partial = {p.param: p.groups for p in layouts[key].partial_gradients}
        assert partial == {f"blocks.0.attention.{x}.weight": groups for x in "kv"}
    assert shards["grouped_packed", 2]["blocks.0.attention.qkv.weight"].mixed == ((32, 0), (8, 2), (8, 2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["smoothed", "weighted", "every_loss", "summed"])
@pytest.mark.parametrize("tensor", [2, 3])
def test_losses_over_a_split_vocabulary(pool, name, tensor):
    case, _ = as_serial(pool, name, (1, tensor, 1), loss="output")
    assert case.layout.losses and any(s.param in ("head.weight", "tokens.weight") for s in case.layout.shards)


def test_megatrons_label_smoothing_on_request(pool):
    """Target 1-a, every other class a/(V-1): not torch's, and the same for every degree."""
    found = []
    for tensor in (2, 3):
        case = plan_case("smoothed", (1, tensor, 1), loss="output", options=TensorOptions(smoothing="megatron"))
        found.append(pool.run(run_case, tensor, case)[0].loss)
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    module, (tokens, target) = whole_case("smoothed", 4, "output")
    options, module.loss = module.loss, None
    total = 0.0
    for i in (0, 2):
        log_p = module(tokens[i : i + 2]).reshape(-1, 33).log_softmax(-1)
        classes = target[i : i + 2].reshape(-1)
        soft = torch.full_like(log_p, options["label_smoothing"] / 32).scatter(1, classes.unsqueeze(1), 1 - options["label_smoothing"])
        rows = -(soft * log_p).sum(-1)[classes != options["ignore_index"]]
        total += float(rows.mean().detach()) / 2
    assert found[0] == pytest.approx(total, rel=1e-12)
    assert found[0] != pytest.approx(serial_step(case, "smoothed")[0], rel=1e-4)


def test_shares_proportional_to_speed(pool):
    """A rank three times as fast gets three of four heads, and its bytes and work say so."""
    case, _ = as_serial(pool, "even", (1, 2, 1), options=TensorOptions(speeds=(3.0, 1.0), column_block=4))
    by_name = {s.param: s for s in case.layout.shards}
    assert by_name["blocks.0.attention.qkv.weight"].shares == (3, 1)
    assert by_name["blocks.0.mlp.both.weight"].shares == (18, 6) or by_name["blocks.0.mlp.both.weight"].shares == (3, 1)
    graph = graph_of(case.model, 2)
    sizes = [shard_bytes(graph, case.layout, t)["blocks.0.attention.qkv.weight"] for t in (0, 1)]
    assert sizes[0] == 3 * sizes[1] and sum(sizes) == 48 * 16 * 8
    works = training_works(graph, case.layout)
    split = next(s for s in case.layout.segments if s.shares == (3, 1) and s.params)
    assert works[f"{split.key}|F@0"].flops == 3 * works[f"{split.key}|F@1"].flops == works[f"{split.key}|F"].flops


def test_bytes_are_the_formulas(pool):
    """Two all-reduces forward and two backward per layer, one for the table, one backward for the head, and three numbers per target."""
    _, outcomes = as_serial(pool, "even", (1, 4, 1), global_batch=2)
    t, element = 4, 8
    activation, targets = BATCH * LENGTH * 16 * element, BATCH * LENGTH * element
    per_rank = 2 * (t - 1) / t * ((2 * 4 + 2) * activation + 3 * targets)
    assert [o.sent["tp:0.0"] for o in outcomes] == [per_rank] * 4


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2), (1, 2, 1)])
def test_dropout_is_the_serial_runs_in_later_steps_too(pool, degrees):
    case, _ = as_serial(pool, "grouped_repeat", degrees, microbatch=1, step=5)
    other = plan_case("grouped_repeat", degrees, microbatch=1, step=6)
    assert serial_step(case, "grouped_repeat")[0] != serial_step(other, "grouped_repeat")[0], "dropout is off"


def test_what_cannot_be_split_is_named():
    notes = plan_case("scanned", (1, 2, 1), loss="mse").layout.notes
    assert any("first (linear)" in n and "aten.cumsum" in n for n in notes)


def test_an_index_that_no_rank_has_is_an_error(pool):
    case = plan_case("odd_tied", (1, 2, 1))
    case.batch[0][0, 0] = 37
    with pytest.raises(RuntimeError, match=r"an embedding index is not in \[0, 37\)"):
        pool.run(run_case, 2, case)
    case = plan_case("even", (1, 2, 1))
    case.batch[1][0, 0] = 32
    with pytest.raises(RuntimeError, match=r"a target is not in \[0, 32\)"):
        pool.run(run_case, 2, case)


def test_pytorchs_own_tensor_parallelism_agrees(pool, tmp_path):
    """The same model under DTensor's `parallelize_module`: loss and gradients to 1e-6 of the largest entry."""
    name = "grouped_native"
    case = plan_case(name, (1, 2, 1), global_batch=2)
    ours = pool.run(run_case, 2, case)
    theirs = pool.run(run_dtensor, 2, name, 2, str(tmp_path), 2)
    for loss, gradients in theirs:
        compare(case, ours, (loss, gradients), tolerance=1e-6)


def test_convolutions_are_named_and_few_classes_stay():
    graph = graph_of("examples/convnet.py:tiny", 2)
    regions, kept = search_regions(graph)
    (note, *_) = [n for n in kept_notes(kept) if "aten.conv2d" in n]
    assert note.startswith("stem (conv2d) is kept whole: aten.conv2d") and note.endswith("5 more like it")
    usable = usable_regions(graph, regions, 4)
    assert not usable.shares and any("10 rows are too few for 4 ranks" in n for n in usable.notes)
    assert usable_regions(graph, regions, 4, TensorOptions(vocabulary_rows=1)).shares
    assert not usable_regions(graph, regions, 4, TensorOptions(vocabulary_rows=1, vocabulary=False)).shares


def test_prices_of_shares_and_of_losses_in_parts():
    """Measured operators, GPU tables' products and the simulator agree on what a rank does: the captured loss once, the largest share."""
    case = plan_case("even", (1, 2, 1), options=TensorOptions(speeds=(3.0, 1.0), column_block=4))
    graph, layout = graph_of(case.model, 2), case.layout
    one = Priced(1.0, "measured", 1.0)
    prices = segment_prices({n.name: (one, one) for n in graph.nodes}, 2, layout)
    counted = 0.0
    for s in layout.segments:
        share = sum(s.shares) / max(s.shares) if s.shares else 2 if s.split else 1
        counted += prices[f"{s.key}|F"].time_s * share
    assert counted == pytest.approx(len(graph.nodes))
    works = training_works(graph, layout)
    fabric = fabric_of(2)
    placement = [d.name for d in fabric.devices[:2]]
    cost = Cost()
    seconds = durations(case.program, cost, fabric, placement, works)
    key = next(s.key for s in layout.segments if s.shares == (3, 1))
    p = case.program
    times = {
        int(p.ops.part[p.steps.op[i]]): seconds[i]
        for i in range(len(p.steps)) if p.steps.kind[i] == Kind.COMPUTE and p.ops.key(int(p.steps.op[i])) == f"{key}|F"
    }  # fmt: skip
    for part in (0, 1):
        expected = cost.roofline(works[f"{key}|F@{part}"], fabric.devices[part]).time_s + cost.transport.per_step_s
        assert times[part] == pytest.approx(expected)
    assert times[0] > times[1]
    measured = cost.with_table({f"{key}|F": Priced(5.0, "measured")}, source="here")
    again = durations(case.program, measured, fabric, placement, works)
    assert {float(again[i]) for i in range(len(p.steps)) if p.steps.kind[i] == Kind.COMPUTE and p.ops.key(int(p.steps.op[i])) == f"{key}|F"} == {
        5.0 + cost.transport.per_step_s
    }
