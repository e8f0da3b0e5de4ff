"""Sharding levels and overlapped gradient sums on real processes: losses and weights against eager training, bytes and memory against the plan."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import msgspec
import pytest
import torch
from levels_rig import rank_of, same_as_serial, serial, train
from tensor_rig import plan_case, predicted_sends, whole_case

from meshwright.check.program.memory import worst_order_peaks
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.errors import FormatError
from meshwright.plan.plan import CycleEntry, Plan
from meshwright.plan.regions import TensorSpec, divided_bytes, holdings, local_shape, lying
from meshwright.plan.shards import part_ranges
from meshwright.run.checkpoint.checkpoint import load_rank, make_index, save_rank

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
BUCKET = 1500  # bytes: these models then have 3 to 10 buckets


def case_of(name, degrees, level, overlap, whole=False, **options):
    sharding = DataSharding(level, overlap, BUCKET, whole=whole)
    return plan_case(name, degrees, microbatch=1, global_batch=2 * degrees[0], sharding=sharding, **options)


def agree(pool, case, name, *, steps=2, optimizer="adamw", **more):
    found = pool.run(train, case.layout.ranks, case, steps, optimizer, *more.values())
    same_as_serial(case, found, serial(case, name, steps, optimizer))
    for rank, outcome in enumerate(found):
        assert all(sent == predicted_sends(case, rank) for sent in outcome.sent)
    return found


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("name", "degrees"), [("even", (2, 1, 1)), ("even", (3, 1, 1)), ("odd_tied", (2, 1, 1)), ("odd_tied", (2, 1, 2)), ("grouped_expand", (2, 2, 1))]
)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_steps_equal_the_serial_run(pool, name, degrees, level):
    """Uneven divisions, tied embeddings in one stage and in two, shared key-value heads, two micro-batches each."""
    case = case_of(name, degrees, level, True)
    assert len(case.layout.buckets) >= 3 and case.layout.zero_level == level
    agree(pool, case, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_not_overlapped_and_with_tensor_and_pipeline(pool, level):
    agree(pool, case_of("odd_tied", (2, 1, 2), level, False), "odd_tied")
    agree(pool, case_of("odd_tied", (2, 2, 1), level, False), "odd_tied", optimizer="sgd")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "level", "degrees", "optimizer", "steps"),
    [("odd_tied", 3, (2, 1, 2), "lars", 20), ("odd_tied", 1, (3, 1, 1), "lars", 2), ("grouped_expand", 2, (2, 1, 1), "newton_schulz", 2),
     ("grouped_expand", 1, (2, 1, 2), "rows", 2), ("grouped_expand", 3, (3, 1, 1), "adafactor", 2)],
)  # fmt: skip
def test_whole_parameters_for_optimizers_that_look_at_them(pool, name, level, degrees, optimizer, steps):
    """A trust ratio, an orthogonal matrix, factors by row and column: each parameter is one replica's, and steps are the serial run's."""
    case = case_of(name, degrees, level, level > 1, whole=True)
    agree(pool, case, name, steps=steps, optimizer=optimizer if optimizer == "adafactor" else f"tests/run/gate_models.py:{optimizer}")
    owners = {}
    for rank in range(case.layout.ranks):
        pipeline, data, _ = case.layout.coordinates(rank)
        for p, tensor, piece in rank_of(case, rank, "adamw")[0].updated():
            assert tuple(tensor.shape) == p.full_shape and piece.whole
            assert owners.setdefault((pipeline, p.name), data) == data, "two replicas update it"
    assert len({*owners.values()}) == degrees[0]


def _buffers(program):
    b = program.buffers
    return b.chunks.tolist(), b.chunk_bytes.tolist(), b.name


def test_memory_and_bytes_per_level(pool):
    """Each level needs less than the one before; the optimizer state is divided from level 1 on; bytes are the formulas'."""
    found = {}
    for level in range(4):
        case = case_of("even", (3, 1, 1), level, level > 0)
        found[level] = agree(pool, case, "even", steps=2, measure=True)
    peaks = [found[level][0].peak_bytes for level in range(4)]
    assert all(a > b for a, b in pairwise(peaks)), peaks
    for level in range(4):  # beyond the plan's worst order there are only messages that are still on their way, of one bucket at most
        case = case_of("even", (3, 1, 1), level, level > 0)
        whole = ("gradients", "gradfull:", "gathered:")
        largest = max(int(c) * int(b) for c, b, n in zip(*_buffers(case.program), strict=True) if n.startswith(whole))
        for t, worst in zip(found[level], worst_order_peaks(case.program), strict=True):
            assert t.peak_bytes <= worst + largest + 4 * len(t.kept), (level, t.peak_bytes, worst)
    states = [sum(t.state_bytes for t in found[level]) for level in range(4)]
    assert states[0] == 3 * states[1] or states[1] <= states[0] // 3 + 2 * 3 * 8 * 16
    weights = sum(x.numel() * 8 for _, _, x in found[0][0].weights)
    sent = [[sum(t.sent[0].values()) for t in found[level]] for level in range(4)]
    padding = 16 * 3 * 8  # of the buckets, at most
    assert sent[0] == [2 * 2 * weights // 3] * 3 or abs(sent[0][0] - 4 * weights / 3) <= padding
    for times, level in ((2, 1), (3, 2)):  # level 2 sums each of the two micro-batches
        assert all(0 <= x - times * 2 * weights / 3 <= times * padding for x in sent[level]), (level, sent[level])
    assert all(x > y for x, y in zip(sent[3], sent[2], strict=True))
    assert sum(x.numel() for t in found[3] for _, _, x in t.weights) * 8 == weights, "level 3 keeps every element once"


# ---- checkpoints ---------------------------------------------------------------------------------------------------------------
def plan_of(case):
    return Plan(
        kind="training", job={"training": {"model": case.model}}, target_fabric={}, placement=tuple(f"d{r}" for r in range(case.layout.ranks)),
        programs={"p": case.program}, cycle=(CycleEntry(program="p"),), decisions={}, layout=case.layout,
    )  # fmt: skip


def saved(case, folder):
    """Every rank's file, as after a step in which Adam's moments are two and three times the parameter."""
    parts = []
    for rank in range(case.layout.ranks):
        module, optimizer, _, _ = rank_of(case, rank, "adamw")
        for _, tensor, _ in module.updated():
            optimizer.state[tensor].update(step=torch.tensor(3.0), exp_avg=2 * tensor.detach(), exp_avg_sq=3 * tensor.detach())
        parts.append(save_rank(folder, rank, module, optimizer, case.layout, []))
    index = make_index(plan_of(case), 3, "d", [], parts)
    return msgspec.json.decode(msgspec.json.encode(index), type=type(index))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((2, 1, 1), 3), ((3, 1, 1), 0)), (((3, 1, 1), 1), ((2, 1, 2), 3)), (((2, 2, 1), 2), ((2, 1, 1), 1)), (((1, 1, 1), 0), ((2, 2, 1), 3)),
        (((2, 1, 2), 3), ((2, 1, 2), 3)), (((3, 1, 1), 2, True), ((2, 1, 2), 3)), (((2, 2, 1), 3), ((2, 1, 1), 1, True)),
        (((3, 1, 1), 3, True), ((2, 1, 2), 3, True)),
    ],
)  # fmt: skip
def test_checkpoints_load_at_every_level(before, after, tmp_path):
    name = "odd_tied"
    source, target = (case_of(name, degrees, level, level > 0, *whole) for degrees, level, *whole in (before, after))
    index = saved(source, tmp_path)
    whole = {n: p.detach() for n, p in whole_case(name, 4, "cross-entropy")[0].named_parameters()}
    for rank in range(target.layout.ranks):
        module, optimizer, _, _ = rank_of(target, rank, "adamw")
        with torch.no_grad():
            for _, tensor, _ in module.kept():
                tensor.zero_()
        load_rank(tmp_path, index, rank, module, optimizer, plan_of(target))
        for (p, tensor, piece), factor in [(x, 1) for x in module.kept()] + [(x, 2) for x in module.updated()]:
            expected = whole[p.name]
            if p.shard is not None:
                cut = part_ranges(expected.shape[p.shard.axis], p.shard, target.layout.coordinates(rank)[2], target.layout.tensor)
                expected = torch.cat([expected.narrow(p.shard.axis, a, b - a) for a, b in cut], p.shard.axis)
            if piece is not None:
                expected = expected.reshape(-1)[piece.first : piece.stop].view(tensor.shape)
            have = tensor if factor == 1 else optimizer.state[tensor]["exp_avg"]
            assert torch.equal(have, factor * expected), p.name
        assert all(optimizer.state[t]["step"] == 3 for _, t, _ in module.updated())


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "degrees"), [("odd_tied", (2, 1, 2)), ("grouped_expand", (2, 2, 1)), ("even", (3, 1, 1))])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_ranks_hold_follows_from_the_plan(name, degrees, level, whole=False):
    """`holdings`, without torch, against the tensors that the ranks made."""
    case = case_of(name, degrees, level, True, whole)
    whole = {n: p.detach() for n, p in whole_case(name, 4, "cross-entropy")[0].named_parameters()}
    tensors = {f"param:{n}": TensorSpec(tuple(x.shape), 8) for n, x in whole.items()}
    tensors |= {f"optimizer:{n}:exp_avg": spec for n in whole for spec in [tensors[f"param:{n}"]]}
    tensors |= {f"optimizer:{n}:step": TensorSpec((), 4) for n in whole}
    for rank, divided in enumerate(divided_bytes(case.program, case.layout)):
        module, *_ = rank_of(case, rank, "adamw")
        held = holdings(case.layout, rank, tensors, divided)
        for kind, state, mine in (("param", "", module.kept()), ("optimizer", ":exp_avg", module.updated())):
            assert {f"{kind}:{p.name}{state}" for p, _, _ in mine} == {n for n in held if n.startswith(kind) and not n.endswith(":step")}
            for p, tensor, _ in mine:
                region = held[f"{kind}:{p.name}{state}"]
                assert local_shape(region) == tuple(tensor.shape)
                for box in region:
                    first, shape, inside = lying(region, box)
                    view = tensor.detach().reshape(-1)[first : first + prod(shape)].view(shape)
                    there = tuple(slice(a, b) for a, b in box)
                    assert torch.equal(view[tuple(slice(a, b) for a, b in inside)], whole[p.name][there]), p.name
        assert {n for n in held if n.endswith(":step")} == {f"optimizer:{p.name}:step" for p, _, _ in module.updated()}


def test_what_ranks_hold_of_whole_parameters():
    for name, degrees, level in (("odd_tied", (2, 1, 2), 3), ("grouped_expand", (2, 2, 1), 1)):
        test_what_ranks_hold_follows_from_the_plan(name, degrees, level, whole=True)


def test_a_checkpoint_that_lacks_elements_is_refused(tmp_path):
    source, target = case_of("even", (2, 1, 1), 3, True), case_of("even", (3, 1, 1), 0, False)
    index = saved(source, tmp_path)
    for files in index.parts.values():
        files.pop("rank-001.safetensors", None)
    module, optimizer, _, _ = rank_of(target, 0, "adamw")
    with pytest.raises(FormatError, match=r"lacks \d+ of \d+ bytes|is missing"):
        load_rank(tmp_path, index, 0, module, optimizer, plan_of(target))
