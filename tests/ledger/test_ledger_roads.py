"""Three roads to the same bytes: formulas, captured graph, hooks on the real module."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from ledger_blocks import SHAPES, Block, build

from captured import captured
from meshwright.decide.memory.captured import core_attention, layer_nodes
from meshwright.ledger.captured import captured_flops
from meshwright.ledger.flops import step_flops
from meshwright.ledger.layer import embedding_ledger, head_ledger, layer_ledger, total_bytes
from meshwright.ledger.transformer import SplitLayout, Transformer
from meshwright.probe.costs.saved_bytes import saved_bytes

BLOCKS = Path(__file__).with_name("ledger_blocks.py")


def layer_bytes(model: Transformer, layout: SplitLayout) -> int:
    torch.manual_seed(0)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[model.element_bytes]
    block = Block(model, layout).to(dtype)
    rows = model.sequence // (layout.tensor if layout.sequence_parallel else 1)
    x = torch.randn(layout.microbatch_size, rows, model.hidden, dtype=dtype, requires_grad=True)
    return saved_bytes(block, lambda: block(x)).total


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_layer_keeps_what_the_formulas_say(name: str, batch: int) -> None:
    layout = SplitLayout(microbatch_size=batch)
    assert layer_bytes(SHAPES[name], layout) == total_bytes(layer_ledger(SHAPES[name], layout))


@pytest.mark.parametrize("name", ["paper", "noise_masks", "plain", "llama", "relu"])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_rank_of_a_split_layer(name: str, tensor: int, sequence_parallel: bool) -> None:
    if name == "llama" and tensor == 4:
        model = msgspec.structs.replace(SHAPES[name], kv_heads=4)
    else:
        model = SHAPES[name]
    layout = SplitLayout(tensor=tensor, sequence_parallel=sequence_parallel, microbatch_size=2)
    assert layer_bytes(model, layout) == total_bytes(layer_ledger(model, layout))


def test_the_papers_coefficients() -> None:
    """sbh(34 + 5as/h) with boolean masks, sbh(36 + 6as/h) with masks of the activations' dtype, plus the statistics of the norms."""
    s, h, a = SHAPES["paper"].sequence, SHAPES["paper"].hidden, SHAPES["paper"].heads
    statistics = 2 * 2 * 2 * s
    assert layer_bytes(SHAPES["paper"], SplitLayout()) == s * h * 34 + 5 * a * s * s + statistics
    assert layer_bytes(SHAPES["noise_masks"], SplitLayout()) == s * h * 36 + 6 * a * s * s + statistics


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SHAPES)
def test_captured_graph_and_hooks_and_formulas_agree(name: str) -> None:
    model = SHAPES[name]
    graph = captured(f"{BLOCKS}:{name}", loss="output", scalable=False)
    assert graph.method == "export"
    module, inputs = build(model)
    real = saved_bytes(module, lambda: module(*inputs))
    by_module = {m: sum(graph.storages[s].size_bytes for n in graph.nodes if n.module == m for s in n.saved) for m in {n.module for n in graph.nodes}}
    assert {m: size for m, size in by_module.items() if size} == real.by_module
    assert sum(by_module.values()) == graph.saved_bytes == real.total
    layout = SplitLayout(microbatch_size=2)
    parts = (*embedding_ledger(model, layout), *head_ledger(model, layout))
    assert real.total == model.layers * total_bytes(layer_ledger(model, layout)) + total_bytes(parts)


@pytest.mark.parametrize("name", ["paper", "llama", "relu"])
def test_operations_of_the_graph_are_those_of_the_formulas(name: str) -> None:
    model = SHAPES[name]
    graph = captured(f"{BLOCKS}:{name}", loss="output", scalable=False)
    counted, formula = captured_flops(graph), step_flops(model, SplitLayout(microbatch_size=2))
    assert counted.model == formula.model
    assert counted.hardware == formula.hardware
    blocks = [n.name for n in graph.nodes if n.module.startswith("blocks")]
    assert captured_flops(graph, blocks).hardware == step_flops(model, SplitLayout(microbatch_size=2, recompute="full")).hardware
    if model.attention == "eager":
        core = [n for k in range(model.layers) for n in core_attention(layer_nodes(graph, f"blocks.{k}"))]
        assert captured_flops(graph, core).hardware == step_flops(model, SplitLayout(microbatch_size=2, recompute="selective")).hardware
    if model.attention == "flash":
        assert counted.halved().model == step_flops(model, SplitLayout(microbatch_size=2), causal="half").model
        assert counted.scaled(6, 2).model == 3 * counted.model


def test_a_storage_counts_once_and_parameters_never() -> None:
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    found = saved_bytes(linear, lambda: linear(x) + linear(x[:2]).sum())
    assert found.by_module == {"": 48}
