"""Prices of a framework's kernels on measured GPUs, against what the kernels' own numbers and the graph's sums say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from meshwright.cost import assumed_cost
from meshwright.cost_models.gpu_rates import GPU_RATES
from meshwright.decide.layout.layer_costs import layer_table
from meshwright.decide.layout.operator_times import OperatorTimes
from meshwright.drive.layout.search import find_layouts
from meshwright.errors import UnknownName
from meshwright.fabric.servers import server_kinds
from meshwright.graph.graph import OpGraph
from meshwright.graph.scale import at_batch
from meshwright.io.fabric.name import load_fabric
from meshwright.plan.narrowed import with_optimizer
from meshwright.plan.precision import FULL, MIXED
from meshwright.profile.frameworks import FRAMEWORKS, TIME_ERROR, framework
from meshwright.profile.layer_profile import Entry
from meshwright.profile.layer_table import LayerChoice, LayerTable

ROOT = Path(__file__).parents[3]
MODEL = f"{ROOT / 'examples' / 'gpt.py'}:small"


def table(graph: OpGraph, spec: str = "dgx-a100:1", **options: object) -> LayerTable:
    net = load_fabric(spec)
    return layer_table(
        lambda b: at_batch(graph, b), server_kinds(net), assumed_cost(net), microbatches=[4], tensors=options.pop("tensors", [1]), **options
    )  # type: ignore[arg-type]


def total(made: LayerTable, field: str, entry: Entry | None = None) -> float:
    return sum(getattr(r, field) for r in made.rows[entry or next(iter(made.rows))])


def times(graph: OpGraph, name: str) -> OperatorTimes:
    kind = server_kinds(load_fabric("dgx-a100:1"))[0]
    return OperatorTimes(at_batch(graph, 4), kind.device, GPU_RATES["a100"], framework(name), "bf16", 2.0)


def test_products_are_their_kernels_and_no_faster_than_the_clock(graph: OpGraph) -> None:
    made = times(graph, "torchtitan")
    rates, device = GPU_RATES["a100"], made.device
    clock = device.flops["bf16"] * rates.sustained_clock
    model = rates.products(device.flops["bf16"], device.memory_bandwidth_Bps)
    products = [n for n in made.graph.nodes if n.forward.flops and "linear" in n.target]
    for n in products:
        seconds = made.time_s(n, backward=False, part=1.0, row=False)
        assert seconds > n.forward.flops / clock
        columns = n.outputs[0].shape[-1]
        rows = n.forward.flops / 2 / columns
        k = next(p.size_bytes for p in graph.parameters if f"param:{p.name}" in n.inputs) / 4 / columns
        assert seconds == pytest.approx(float(model.time_s(rows / k, columns, k)))
        # halves of a product along its columns and along its sum are other shapes, neither slower than the whole nor faster than half the operations
        for row in (False, True):
            half = made.time_s(n, backward=False, part=0.5, row=row)
            assert n.forward.flops / 2 / clock < half <= seconds
    assert products


def test_causal_attention_computes_half_and_eager_scores_move(graph: OpGraph) -> None:
    flash, eager = times(graph, "torchtitan"), times(graph, "megatron-2021")
    node = next(n for n in flash.graph.nodes if "scaled_dot_product" in n.target)
    share = GPU_RATES["a100"].attention_share("flash-2", node.outputs[0].shape[-2])
    assert flash.time_s(node, backward=False, part=1.0, row=False) == pytest.approx(node.forward.flops / 2 / (flash.peak * share))
    assert flash.time_s(node, backward=True, part=1.0, row=False) > flash.time_s(node, backward=False, part=1.0, row=False)
    scores = 4 * 8 * 128 * 128  # samples, heads, positions
    assert eager.time_s(node, backward=False, part=1.0, row=False) > 4 * 2 * scores / eager.memory_Bps


def test_fused_runs_move_less_than_operators_alone(graph: OpGraph) -> None:
    fused, eager = times(graph, "torchtitan"), times(graph, "composer")
    light = [n for n in fused.graph.nodes if n.name in fused._moved]
    assert light
    for backward in (False, True):
        sums = [sum(t.time_s(n, backward=backward, part=1.0, row=False) for n in light) for t in (fused, eager)]
        assert 0 < sums[0] < sums[1]
    # a residual sum is used again after products, so it is written and read though its neighbours are fused
    residual = [n for n in light if "add" in n.target]
    assert any(fused._moved[n.name][0] > 0 for n in residual)


def test_a_board_without_measured_kernels_stays_on_the_roofline(graph: OpGraph) -> None:
    plain, made = table(graph, "mi300x"), table(graph, "mi300x", framework=framework("torchtitan"))
    assert total(made, "forward_s") == total(plain, "forward_s") and total(made, "backward_s") == total(plain, "backward_s")


def test_a_lower_power_limit_slows_products(graph: OpGraph) -> None:
    made = framework("megatron-core")
    full, low = (table(graph, "dgx-h100:1", framework=made, watts=w) for w in (None, {"h100": 350.0}))
    assert total(full, "forward_s") < total(low, "forward_s")
    assert GPU_RATES["h100"].limited(5000.0).sustained_clock == 1.0


def test_tensor_collectives_are_those_that_are_not_hidden(graph: OpGraph) -> None:
    whole = framework("megatron-core")
    none = msgspec.structs.replace(whole, tensor_overlap=0.0)
    shown = [sum(r.tensor_s[0] for r in table(graph, framework=f, tensors=[2]).rows[Entry("a100", 4, 2)]) for f in (whole, none)]
    assert shown[0] == pytest.approx(shown[1] / 2) and shown[1] > 0


def test_the_loss_holds_its_logits_as_the_framework_does(graph: OpGraph) -> None:
    logits = 4 * 128 * 256
    kept = {name: total_kept(table(graph, framework=framework(name))) for name in ("torchtitan", "composer")}
    assert kept["composer"] - kept["torchtitan"] == pytest.approx((12 - 4) * logits, rel=1e-9)


def total_kept(made: LayerTable) -> float:
    return sum(r.kept_bytes[0] for r in next(iter(made.rows.values())))


@pytest.mark.parametrize(("precision", "adamw", "sgd"), [(MIXED, 12.0, 4.0), (FULL, 8.0, 0.0)])
def test_sgd_and_adamw_differ_in_state_and_update(graph: OpGraph, precision: object, adamw: float, sgd: float) -> None:
    made = {name: with_optimizer(precision, name) for name in ("adamw", "sgd")}  # type: ignore[arg-type]
    assert made["adamw"].state == precision.state and made["sgd"].state.optimizer == sgd  # type: ignore[attr-defined]
    rows = {name: table(graph, precision=p) for name, p in made.items()}
    entry = Entry("a100", 4, 1)
    state = {name: float(t.priced(entry, LayerChoice(), 1)["state_bytes"].sum()) for name, t in rows.items()}
    parameters = total(rows["sgd"], "parameters")
    assert state["adamw"] - state["sgd"] == pytest.approx((adamw - sgd) * parameters)
    assert total(rows["sgd"], "update_s") < total(rows["adamw"], "update_s")
    assert with_optimizer(MIXED, "mine:optimizer") == MIXED


def test_names() -> None:
    assert {"megatron-2021", "megatron-core", "torchtitan", "deepspeed"} <= set(FRAMEWORKS)
    assert all(f.source for f in FRAMEWORKS.values())
    with pytest.raises(UnknownName, match="no framework 'horovod'"):
        framework("horovod")
    assert GPU_RATES["a100"].attention_share("flash-9", 4096) == GPU_RATES["a100"].attention_share("flash-2", 4096)
    assert replace(GPU_RATES["a100"], sustained_clock=0.5).products(1e12, 1e12).peaks.flops == 5e11


def test_a_search_prices_as_the_framework_and_says_how_sure_it_is(graph: OpGraph) -> None:
    net, made = load_fabric("dgx-a100:1"), framework("megatron-core")
    options = {"global_batch": 32, "precision": MIXED, "microbatches": (4,), "tensors": (1, 2), "methods": ("grid",), "simulated": 2, "refine": 0}
    found = find_layouts(lambda b: at_batch(graph, b), net, assumed_cost(net), framework=made, **options)  # type: ignore[arg-type]
    runtime = found.problem.runtime
    assert (runtime.overlap_gradients, runtime.compute_error) == (True, TIME_ERROR) and "megatron-core" in runtime.source
    plain = find_layouts(lambda b: at_batch(graph, b), net, assumed_cost(net), **options)  # type: ignore[arg-type]
    assert found.found.best.time_s != plain.found.best.time_s and plain.problem.runtime.compute_error == 0.05


def test_gathers_between_servers_use_all_their_nics(graph: OpGraph) -> None:
    """Eight replicas in a server have eight NICs between them: a group of sixteen gathers at eight times one NIC, or as fast as inside."""
    made = table(graph, "dgx-a100:2", sharding_messages="blocking")
    entry, rate = Entry("a100", 4, 1), min(made.inside_Bps["a100"], 8 * made.outside_Bps["a100"])
    plain, sharded = (made.priced(entry, LayerChoice("none", z), 16) for z in (0, 3))
    hops = 2 * made.outside_hop_s["a100"] + 13 * made.inside_hop_s["a100"]
    parameters = [r.parameters for r in made.rows[entry]]
    gather = [15 / 16 * p * made.state.weight / rate + hops for p in parameters]
    assert (sharded["forward_s"] - plain["forward_s"]).tolist() == pytest.approx(gather)
