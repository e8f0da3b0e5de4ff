"""Formulas against the paper's closed forms, its tables and each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import Infeasible, UsageError
from meshwright.ledger.advice import changes, require_memory, tightest
from meshwright.ledger.flops import step_flops, utilisation
from meshwright.ledger.layer import layer_ledger, total_bytes
from meshwright.ledger.stage import in_flight, kept_per_layer, parameters, stage_memory, stage_parameters
from meshwright.ledger.transformer import SplitLayout, Transformer, described, layout_described

# name, L, h, a, p, chunks, micro-batch, global batch: arXiv 2205.05198, table 3
CONFIGURATIONS = [
    ("22B", 48, 6144, 64, 1, 1, 4, 4), ("175B", 96, 12288, 96, 8, 3, 1, 64), ("530B", 105, 20480, 128, 35, 3, 1, 280),
    ("1T", 128, 25600, 160, 64, 1, 1, 512),
]  # fmt: skip
ITERATION_S = {"22B": (1.42, 1.10), "175B": (18.13, 13.75), "530B": (49.05, 37.83), "1T": (94.42, 71.49)}
PRINTED = {"22B": (41.5, 43.7), "175B": (51.4, 52.8), "530B": (56.0, 57.0), "1T": (56.3, 57.0)}  # MFU, HFU
A100 = 312e12


def configuration(name: str, **changes: Any) -> tuple[Transformer, SplitLayout]:
    _, layers, hidden, heads, p, chunks, micro, batch = next(c for c in CONFIGURATIONS if c[0] == name)
    model = Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=51200)
    fields = {"tensor": 8, "pipeline": p, "interleave": chunks, "microbatch_size": micro, "microbatches": batch // micro}
    return model, SplitLayout(**{**fields, **changes})


@pytest.mark.parametrize("name", PRINTED)
def test_mfu_and_hfu_are_the_papers(name: str) -> None:
    model, layout = configuration(name, sequence_parallel=True, recompute="selective")
    used = utilisation(step_flops(model, layout), step_time_s=ITERATION_S[name][1], devices=layout.ranks, peak_flops=A100)
    assert 100 * used.mfu == pytest.approx(PRINTED[name][0], abs=0.2)
    assert 100 * used.hfu_paper == pytest.approx(PRINTED[name][1], abs=0.2)
    assert used.mfu < used.hfu < used.hfu_paper


def test_530b_on_2240_devices() -> None:
    model, layout = configuration("530B", data=8, sequence_parallel=True, recompute="selective")
    assert layout.ranks == 2240
    used = utilisation(step_flops(model, layout), step_time_s=39.15, devices=2240, peak_flops=A100)
    assert 100 * used.mfu == pytest.approx(54.2, abs=0.2)


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_of_a_layer_are_the_papers_closed_forms(name: str, sequence_parallel: bool) -> None:
    model, layout = configuration(name, sequence_parallel=sequence_parallel)
    s, b, h, a, t = model.sequence, layout.microbatch_size, model.hidden, model.heads, 8
    sbh, scores = s * b * h, 5 * a * s / h
    forms = {
        "none": sbh / t * (34 + scores) if sequence_parallel else sbh * (10 + 24 / t + scores / t),
        "selective": 34 * sbh / t if sequence_parallel else sbh * (10 + 24 / t),
        "full": 2 * sbh / t if sequence_parallel else 2 * sbh,
    }
    for recompute, expected in forms.items():
        kept = kept_per_layer(model, msgspec.structs.replace(layout, recompute=recompute))[0]
        assert kept == pytest.approx(expected, rel=0.005)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 4), st.integers(1, 9))
def test_micro_batches_in_flight_by_walking_the_schedule(p: int, n: int, chunks: int, stage: int) -> None:
    """Interleaved 1F1B, counted: warm-up forwards, then one forward before each backward."""
    stage %= p
    layout = SplitLayout(pipeline=p, microbatches=n, interleave=chunks)
    total = n * chunks
    warm = p - stage - 1 if chunks == 1 else min(2 * (p - stage - 1) + (chunks - 1) * p, total)
    live = most = done = 0
    for _ in range(min(warm, total)):
        live, done = live + 1, done + 1
        most = max(most, live)
    for _ in range(total - done):
        live += 1
        most = max(most, live)
        live -= 1
    assert in_flight(layout, stage) * chunks == most


def test_the_first_stages_factor_is_the_papers() -> None:
    """L(1 + (p-1)/(pm)) layers on stage 0; all L without interleaving, whatever p."""
    for name in ("175B", "530B"):
        model, layout = configuration(name)
        p, m = layout.pipeline, layout.interleave
        layers = float(in_flight(layout, 0)) * model.layers / p
        assert layers == pytest.approx(model.layers * (1 + (p - 1) / (p * m)))
    model, layout = configuration("1T")
    assert in_flight(layout, 0) * model.layers / layout.pipeline == model.layers
    assert in_flight(msgspec.structs.replace(layout, microbatches=3), 0) == 3


def test_extras_and_state_of_the_ends() -> None:
    model, layout = configuration("22B")
    only = stage_memory(model, layout)[0]
    s, b, h, v = 2048, 4, 6144, 51200
    paper = s * b * h + 4 * s * b * h * (1 + v / h / 8)  # embedding mask; final norm and head inputs; fp32 logits over 8
    assert only.extras_bytes == pytest.approx(paper, rel=0.005)
    assert only.state_bytes == 18 * only.parameters
    shared = stage_memory(model, msgspec.structs.replace(layout, data=4, distributed_optimizer=True))[0]
    assert shared.state_bytes == (6 + 12 // 4) * only.parameters
    assert sum(parameters(model, SplitLayout())[:1]) == 12 * h * h + 13 * h
    split = msgspec.structs.replace(layout, pipeline=4)
    assert sum(stage_parameters(model, split)) == stage_parameters(model, layout)[0] + v * h // 8  # the tied head's copy


def test_22b_has_22_billion_parameters() -> None:
    for name, billions in (("22B", 22.0), ("175B", 175.0), ("530B", 530.0), ("1T", 1008.0)):
        model, _ = configuration(name)
        assert stage_parameters(model, SplitLayout())[0] == pytest.approx(billions * 1e9, rel=0.02)


def test_outputs_that_are_kept_cost_2sbh_each() -> None:
    model, layout = configuration("1T", microbatches=512)
    freed, kept = stage_memory(model, layout), stage_memory(model, msgspec.structs.replace(layout, deallocate_outputs=False))
    assert kept[0].total_bytes - freed[0].total_bytes == 64 * 2 * 2048 * 25600
    assert kept[-1].total_bytes == freed[-1].total_bytes


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(1, 4))
def test_recomputation_saves_memory_and_costs_operations(batch: int, tensor: int, sequence: bool, every: int) -> None:
    model = Transformer(layers=8, hidden=256, heads=8, sequence=128, vocabulary=1000)
    layout = SplitLayout(tensor=tensor, sequence_parallel=sequence and tensor > 1, microbatch_size=batch, every=every)
    kept, work = {}, {}
    for recompute in ("none", "selective", "block", "uniform", "full"):
        changed = msgspec.structs.replace(layout, recompute=recompute)
        kept[recompute], work[recompute] = stage_memory(model, changed)[0].layers_bytes, step_flops(model, changed).hardware
    assert kept["none"] > kept["selective"] > kept["full"] >= kept["uniform"] and kept["none"] > kept["block"] > kept["full"]
    assert work["none"] < work["selective"] < work["full"] == work["uniform"] and work["none"] < work["block"] < work["full"]
    assert kept["block"] == (8 - every) * kept["none"] // 8 + every * kept["full"] // 8


def test_uneven_layers_and_shares() -> None:
    model = Transformer(layers=10, hidden=60, heads=6, sequence=8, vocabulary=100)
    layout = SplitLayout(pipeline=4, tensor=4)
    assert layout.layers_of(model) == (2, 2, 3, 3)
    assert SplitLayout(pipeline=2, stage_layers=(4, 6)).layers_of(model) == (4, 6)
    q = next(k for k in layer_ledger(model, layout) if k.what == "Q")
    assert q.size_bytes == 2 * 8 * 2 * 10  # the fullest rank has two of the six heads


def test_causal_halves_and_flash_recomputes() -> None:
    model = Transformer(layers=2, hidden=64, heads=4, sequence=32, vocabulary=96)
    full, half = step_flops(model, SplitLayout()), step_flops(model, SplitLayout(), causal="half")
    core = 3 * 2 * 4 * 32 * 32 * 64
    assert full.model - half.model == core // 2 and full.attention_share == core / full.model
    flash = step_flops(msgspec.structs.replace(model, attention="flash"), SplitLayout())
    assert flash.model == full.model and flash.hardware == full.hardware + core // 6


def test_advice_names_the_nearest_change() -> None:
    model, layout = configuration("22B")
    need = tightest(stage_memory(model, layout)).total_bytes
    require_memory(model, layout, need)
    with pytest.raises(Infeasible, match="stage 0: each rank needs 114 GB and has 80 GB") as error:
        require_memory(model, layout, 80 * 10**9)
    assert error.value.data["limit_bytes"] == 80 * 10**9 and error.value.hint.startswith("sequence parallelism and recomputing core attention")
    with pytest.raises(Infeasible) as near:
        require_memory(model, layout, 100 * 10**9)  # several changes fit: first those that add least work
    assert near.value.hint.startswith("micro-batches of 2") and len(near.value.data["changes"]) > 2
    with pytest.raises(Infeasible) as hopeless:
        require_memory(model, layout, 10**6)
    assert hopeless.value.hint == f"devices with {need / 1e9:.4g} GB"
    offered = {c.what: c for c in changes(model, layout)}
    full = next(c for what, c in offered.items() if "every layer" in what)
    assert full.hardware_ratio == pytest.approx(4 / 3, rel=0.02)
    _, spread = configuration("175B", data=4, microbatch_size=2)
    assert {"tensor degree 16 instead of data 4", "pipeline degree 16 instead of data 4", "no interleaving", "micro-batches of 1",
            "a distributed optimizer"} <= {c.what for c in changes(model, spread)}  # fmt: skip
    assert all(c.devices == spread.ranks for c in changes(model, spread) if "instead of" in c.what)


def test_descriptions_are_read_strictly() -> None:
    model = described("layers=2,hidden=64,heads=4,sequence=32,vocabulary=96,kv-heads=2,dropout=false,activation=swiglu", layers=3)
    assert (model.layers, model.key_heads, model.dropout, model.gated) == (3, 2, False, True)
    assert layout_described({"tensor": "2", "sequence_parallel": True}).tensor == 2
    for bad in (
        "layers=2", "layers=2,layers=3", "layers", "layers=x,hidden=64,heads=4,sequence=32,vocabulary=96",
        "layers=2,hidden=64,heads=5,sequence=32,vocabulary=96", "layers=0,hidden=64,heads=4,sequence=32,vocabulary=96",
        "layers=2,hidden=64,heads=4,sequence=32,vocabulary=96,kv_heads=3", "layers=2,hidden=64,heads=4,sequence=32,vocabulary=96,colour=red",
    ):  # fmt: skip
        with pytest.raises(UsageError):
            described(bad)
    for fields in (
        {"tensor": 0}, {"sequence_parallel": True}, {"stage_layers": [1, 2]}, {"pipeline": 2, "stage_layers": [-1, 3]}, {"recompute": "some"},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            layout_described(fields)
    with pytest.raises(UsageError, match="add up to 3"):
        SplitLayout(pipeline=2, stage_layers=(1, 2)).layers_of(model.__class__(layers=4, hidden=8, heads=2, sequence=4, vocabulary=9))
    with pytest.raises(UsageError, match="cannot fill"):
        SplitLayout(pipeline=9).layers_of(model)
    with pytest.raises(UsageError, match="no utilisation"):
        utilisation(step_flops(model, SplitLayout()), step_time_s=0.0, devices=1, peak_flops=1e12)


def test_total() -> None:
    assert total_bytes(()) == 0
