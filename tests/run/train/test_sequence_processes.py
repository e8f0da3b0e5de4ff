"""Sequence parallelism on real processes: loss, every gradient and every byte against plain eager training and the plan; what is kept."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from rig import graph_of
from sequence_rig import planned_bytes, run_counting
from tensor_models import BATCH, LENGTH
from tensor_rig import as_serial, plan_case, run_case

from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.lower.kept_values import kept_values
from meshwright.plan.shards import local_values, part_ranges
from meshwright.run.executor.sequence_parts import PartsForm

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
ALONG = TensorOptions(sequence=True)


def agree(pool, name, degrees, **options):
    return as_serial(pool, name, degrees, **{"options": ALONG, **options})


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("even", (1, 2, 1)), ("even", (1, 4, 1)), ("even", (1, 2, 2)), ("odd_tied", (1, 4, 1)), ("odd_tied", (1, 2, 2)), ("odd_tied", (2, 2, 1)),
        ("grouped_repeat", (1, 4, 1)), ("flat", (1, 4, 1)), ("turned", (1, 2, 1)), ("scaled", (1, 3, 1)), ("pooled", (1, 2, 2)),
        ("partly_frozen", (2, 2, 1)),
    ],
)  # fmt: skip
def test_loss_gradients_and_bytes(pool, name, degrees):
    """Tied heads, dropout, positions that do not divide, flattened and transposed tokens, frozen parameters; alone, with replicas, in a pipeline."""
    case, _ = agree(pool, name, degrees)
    assert case.layout.sequence and any(s.sequence for s in case.layout.segments)


@pytest.mark.parametrize("name", ["smoothed", "every_loss"])
def test_losses_over_a_split_vocabulary(pool, name):
    case, _ = agree(pool, name, (1, 2, 1), loss="output")
    assert case.layout.losses and case.layout.sequence


def test_shares_proportional_to_speed(pool):
    """Positions follow the ranks' speeds as heads and columns do."""
    case, _ = agree(pool, "scaled", (1, 2, 1), options=TensorOptions(sequence=True, speeds=(2.0, 1.0), column_block=4))
    assert {s.shares for s in case.layout.segments if s.sequence} == {(2, 1)}


def test_bytes_are_the_formulas(pool):
    """Two all-gathers and two reduce-scatters per pair of linears as one all-reduce each way, one more all-gather of what backward needs again;
    the table's reduce-scatter and the gather of its gradient, the head's two gathers and reduce-scatter; at the end one all-reduce of what
    norms, row biases and the table of positions have summed up."""
    case, outcomes = agree(pool, "even", (1, 2, 1), global_batch=2)
    t, element, width = 2, 8, 16
    activation, targets = BATCH * LENGTH * width * element, BATCH * LENGTH * element
    params = (2 * 2 * 2 + 2 + 2 * 2 + LENGTH) * width * element  # norms of two blocks, the last norm, row biases, positions
    assert sum(len(p.groups) for p in case.layout.partial_gradients) == 8 + 2 + 4 + 1
    per_rank = (t - 1) / t * activation * (4 * (2 + 3) + 2 + 3) + 2 * (t - 1) / t * 3 * targets
    assert [o.sent["tp:0.0"] for o in outcomes] == [per_rank] * t
    assert [o.sent["tp:0.0:0.1"] for o in outcomes] == [2 * (t - 1) / t * params] * t


@pytest.mark.parametrize(("name", "norms", "masks"), [("even", 5, 0), ("grouped_packed", 3, 3)])
def test_kept_for_backward_is_what_the_plan_says(pool, name, norms, masks):
    """Counted where autograd saves: exactly the plan's bytes, with and without. With, a rank keeps 1/t of each norm's input, statistics and output
    (the next linear's input) and of each mask between regions, as Korthikanti et al. have it: nothing of a layer is kept whole."""
    t, found = 2, {}
    for wanted in (False, True):
        case = plan_case(name, (1, t, 1), global_batch=2, options=TensorOptions(sequence=wanted))
        outcomes = pool.run(run_counting, t, case)
        keeps, local = kept_values(graph_of(case.model, 2), case.layout), local_values(case.layout, 0)
        again = {v for s in case.layout.segments for v in s.gathers if v in keeps[s.key]}
        ends = BATCH * LENGTH * (8 + 1)  # targets of the split loss and which of them are ignored
        held = sum(local[v].size_bytes for v in again)  # parts of what is gathered again: in the executor's buffers, not autograd's
        for rank, (_, kept) in enumerate(outcomes):
            assert kept - ends + held == planned_bytes(case, rank)
        found[wanted] = outcomes[0][1] + held
        assert len(again) == (norms if wanted else 0)
    activation, statistics = BATCH * LENGTH * 16 * 8, 2 * BATCH * LENGTH * 8
    assert found[False] - found[True] == (t - 1) / t * (norms * (2 * activation + statistics) + masks * activation)


def test_what_was_gathered_is_not_kept(pool):
    """The whole value dies when forward has used it; its part and another gather serve backward."""
    case, _ = agree(pool, "even", (1, 2, 1), global_batch=2)
    names = case.program.buffers.name
    last = case.program.buffers.last
    gathered = [i for i, n in enumerate(names) if n.startswith("actall:")]
    assert gathered and len([n for n in names if n.startswith("actagain:")]) == len(gathered)
    ops = case.program.ops
    for b in gathered:
        assert {ops.name[int(case.program.steps.op[s])] for s in last[b].tolist()} == {"F"}


def test_gradients_that_nothing_adds_up_are_refused(pool):
    """A norm, a row bias: a rank builds no segment whose parameters would keep the gradient of its own positions."""
    case = plan_case("even", (1, 2, 1), options=ALONG)
    for param in ("blocks.0.norm1.weight", "blocks.0.attention.out.bias", "positions.weight"):
        kept = tuple(p for p in case.layout.partial_gradients if p.param != param)
        broken = replace(case, layout=msgspec.structs.replace(case.layout, partial_gradients=kept))
        with pytest.raises(RuntimeError, match="partial sum over the tensor-parallel ranks"):
            pool.run(run_case, 2, broken)


@pytest.mark.parametrize("shape, dim, blocks", [((2, 5, 3), 1, 1), ((1, 6, 4), 1, 1), ((6, 3), 0, 2), ((4, 2, 3), 0, 1)])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_form_is_invertible(shape, dim, blocks, parts):
    from meshwright.plan.plan import ValueInfo, ValueSplit

    extent = shape[dim] // blocks
    shares = tuple(extent // parts + (i < extent % parts) for i in range(parts))
    value = ValueInfo(name="x", shape=shape, dtype="float32", size_bytes=0, split=ValueSplit(dim=dim, blocks=blocks, shares=shares))
    form = PartsForm(value, parts)
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    slot = max(s.numel() for s in map(torch.Size, form.shapes))
    flat = form.put(x, slot * parts)
    assert torch.equal(form.take(flat), x)
    for t in range(parts):
        ranges = part_ranges(shape[dim], value.split, t, parts)
        own = torch.cat([x.narrow(dim, a, b - a) for a, b in ranges], dim)
        assert torch.equal(flat[t * slot : t * slot + own.numel()].view(own.shape), own)
