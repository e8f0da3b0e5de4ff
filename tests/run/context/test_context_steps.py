"""Steps of context-parallel layouts on real messages: loss, every gradient and every byte against plain eager training and the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rig import in_threads
from tensor_rig import Case, Outcome, compare, plan_case, run_case, serial_step

from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.plan.context import exchange_of, layout_exchanges
from meshwright.program.program import Program

MODELS = "tests/run/context_models.py:"


def agree(name: str, degrees: tuple[int, int, int], context: tuple[int, str], **options: Any) -> tuple[Case, list[Outcome]]:
    case = plan_case(name, degrees, models=MODELS, context=context, **options)
    assert case.layout.context == context[0] and exchange_of(case.layout) == context[1]
    outcomes = in_threads(case.layout.ranks, lambda rank, group: run_case(rank, group, case))
    compare(case, outcomes, serial_step(case, name))
    return case, outcomes


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("name", "degrees", "context"),
    [
        ("llama", (1, 1, 1), (2, "ring")), ("llama", (1, 1, 1), (2, "ulysses")), ("llama", (1, 1, 1), (4, "ring")),
        ("llama", (1, 1, 1), (4, "ulysses")), ("three", (1, 1, 1), (3, "ring")), ("gpt", (1, 1, 1), (2, "ring")),
        ("gpt", (2, 1, 1), (2, "ulysses")), ("llama", (2, 1, 1), (2, "ring")),
        ("llama", (1, 1, 2), (2, "ring")), ("llama", (1, 1, 2), (2, "ulysses")), ("llama", (1, 2, 1), (2, "ring")),
        ("gpt", (1, 2, 1), (2, "ulysses")),
        ("interleaved", (1, 1, 1), (2, "ring")), ("expanded", (1, 1, 1), (2, "ring")), ("expanded", (1, 1, 1), (2, "ulysses")),
        ("both_ways", (1, 1, 1), (2, "ring")), ("both_ways", (1, 1, 1), (2, "ulysses")),
        ("window", (1, 1, 1), (2, "ring")), ("window", (1, 1, 1), (2, "ulysses")),
    ],
)  # fmt: skip
def test_loss_gradients_and_bytes(name: str, degrees: tuple[int, int, int], context: tuple[int, str]) -> None:
    """Rotary and learned positions, grouped heads, dropout, tied heads; alone, with replicas, stages and tensor-parallel ranks."""
    agree(name, degrees, context)


@pytest.mark.parametrize(
    ("degrees", "context", "options"),
    [
        ((1, 2, 1), (2, "ring"), {"options": TensorOptions(sequence=True)}), ((1, 1, 1), (2, "ring"), {"recompute": "full"}),
        ((1, 1, 2), (2, "ring"), {"schedule": ("zb1p", {})}), ((1, 1, 1), (2, "ring-again"), {"recompute": "full"}),
        ((1, 1, 2), (2, "ring-again"), {"schedule": ("zb1p", {})}),
    ],
    ids=["sequence", "recompute", "zero bubble", "recompute, received again", "zero bubble, received again"],
)  # fmt: skip
def test_with_other_decisions(degrees: tuple[int, int, int], context: tuple[int, str], options: dict[str, Any]) -> None:
    """Sequence parallelism between regions, layers computed again, backward in two parts."""
    agree("llama", degrees, context, **options)


@pytest.mark.parametrize(("name", "split"), [("separate", True), ("shared_head", False)])
def test_heads_of_a_region_go_round_the_ring(name: str, split: bool) -> None:
    """Each tensor-parallel rank sends the key-value heads that its queries read; where ranks share one, attention stays whole."""
    case, _ = agree(name, (1, 2, 1), (2, "ring"))
    blocks = [v for v in case.layout.values if "/kv" in v.name]
    assert blocks and all((v.split is not None and v.split.dim == 1) == split for v in blocks)


@pytest.mark.parametrize(("name", "context"), [("gpt", (2, "ring-again")), ("llama", (2, "ulysses"))])
def test_segments_beside_the_rounds_run_planned_steps(name: str, context: tuple[int, str]) -> None:
    """Rounds run as they are, each rank's with other parts of the mask; all other segments by plans that keep least, with dropout in one of them."""
    degrees = (1, 1, 1)
    case, _ = agree(name, degrees, context, recompute="steps")
    exchanged = {v for x in layout_exchanges(case.layout) for v in (x.source, x.target)}
    planned = {s.key for s in case.layout.segments if s.step is not None}
    rounds = {s.key for s in case.layout.segments if exchanged & {*s.reads}}
    assert planned and rounds and not planned & rounds
    kept = [sum(s.saved_bytes for s in lay.segments) for lay in (case.layout, plan_case(name, degrees, models=MODELS, context=context).layout)]
    assert kept[0] < kept[1]


def read_by_backward(p: Program) -> Iterator[bool]:
    """Of every block that came in forward: whether it lives until a step of backward."""
    for b, name in enumerate(p.buffers.name):
        if name.startswith("act:") and "/kv" in name and "/kv0:" not in name:
            steps = p.buffers.last.values[p.buffers.last.ptr[b] : p.buffers.last.ptr[b + 1]].tolist()
            assert steps
            yield any(p.steps.op[s] >= 0 and p.ops.name[p.steps.op[s]] == "B" for s in steps)


@pytest.mark.parametrize(("name", "degrees", "parts"), [("llama", (1, 1, 1), 4), ("three", (1, 1, 2), 3), ("separate", (1, 2, 1), 2)])
def test_blocks_that_are_received_again(name: str, degrees: tuple[int, int, int], parts: int) -> None:
    """Exact as without; a rank holds fewer blocks, and sends each n - 1 times more. Alone, in stages, a ring of every tensor rank's heads."""
    case, _ = agree(name, degrees, (parts, "ring-again"))
    kept = plan_case(name, degrees, models=MODELS, context=(parts, "ring"))
    again, once = (sum(p.message_bytes()[p.steps.chan_out >= 0].sum() for p in (c.program,)) for c in (case, kept))
    blocks = sum(v.size_bytes // (degrees[1] if v.split else 1) for v in case.layout.values if "/kv" in v.name and not v.name.endswith("/kv0"))
    assert again - once == blocks * case.layout.ranks // case.layout.pipeline * case.layout.microbatches
    assert not any(read_by_backward(case.program)) and all(read_by_backward(kept.program))


@pytest.mark.parametrize("context", [(2, "ring"), (4, "ulysses")])
def test_labels_that_the_model_shifts_cross_borders_of_chunks(context: tuple[int, str]) -> None:
    agree("shifted", (1, 1, 1), context, loss="output")
