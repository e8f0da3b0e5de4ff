"""Checkpoints of one layout read by another: every parameter, state and buffer is the whole model's part."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tensor_rig import plan_case, whole_case

from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.errors import FormatError
from meshwright.plan import Plan
from meshwright.run.checkpoint import load_rank, make_index, save_rank
from meshwright.run.checkpoint_parts import Part, Parts
from meshwright.run.forward_graph import ForwardGraph
from meshwright.run.segments import build_rank_module
from meshwright.run.sharding import take_part
from meshwright.run.work import gradient_bytes

CPU = torch.device("cpu")


def ranks_of(case, scale):
    """(module, optimizer) of every rank, as after a step: Adam's first moment of a parameter is the parameter times two."""
    graph = ForwardGraph.from_json(case.graph)
    for rank in range(case.layout.ranks):
        whole = {n: torch.nn.Parameter(p * scale) for n, p in case.parameters.items()}
        sizes = gradient_bytes(case.program, rank)
        module = build_rank_module(graph, case.layout, rank, whole, case.buffers, device=CPU, gradient_bytes=sizes)
        optimizer = torch.optim.AdamW([p.tensor for p in module.trained()])
        for p in module.trained():
            optimizer.state[p.tensor].update(step=torch.tensor(3.0), exp_avg=2 * p.tensor.detach(), exp_avg_sq=3 * p.tensor.detach())
        yield rank, module, optimizer


def plan_of(case):
    return Plan(
        kind="training", job={"training": {"model": case.model}}, target_fabric={}, placement=(), programs={"p": case.program}, cycle=(),
        decisions={}, layout=case.layout,
    )  # fmt: skip


def saved(case, folder):
    parts = [save_rank(folder, rank, module, optimizer, case.layout, []) for rank, module, optimizer in ranks_of(case, 1.0)]
    return make_index(plan_of(case), 3, "d", [], parts)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("odd_tied", (1, 3, 1), (1, 2, 2)), ("odd_tied", (1, 2, 2), (2, 1, 1)), ("odd_tied", (1, 1, 1), (1, 4, 1)),
        ("grouped_expand", (1, 4, 1), (1, 2, 1)), ("grouped_expand", (1, 3, 1), (1, 4, 1)), ("grouped_packed", (1, 2, 1), (1, 1, 1)),
        ("weighted", (1, 2, 1), (1, 3, 1)),
    ],
)  # fmt: skip
def test_every_part_is_the_wholes(name, before, after, tmp_path):
    loss = "output" if name == "weighted" else "cross-entropy"
    resumed(name, *(plan_case(name, d, loss=loss) for d in (before, after)), tmp_path)


@pytest.mark.parametrize("along", [(True, False), (False, True), (True, True)])
def test_sequence_parallelism_does_not_change_a_checkpoint(along, tmp_path):
    """Parameters are held as without it: a run may take it up, or give it up, where it left off."""
    options = [TensorOptions(sequence=x) for x in along]
    source, target = (plan_case("odd_tied", d, options=x) for d, x in zip([(1, 3, 1), (1, 2, 2)], options, strict=True))
    assert (source.layout.sequence, target.layout.sequence) == along
    resumed("odd_tied", source, target, tmp_path)


def resumed(name, source, target, tmp_path):
    """A checkpoint of `source` read by `target`: every rank has the whole model's parts."""
    loss = source.loss
    index = saved(source, tmp_path)
    index = msgspec.json.decode(msgspec.json.encode(index), type=type(index))
    whole = dict(whole_case(name, 4, loss)[0].named_parameters())
    for rank, module, optimizer in ranks_of(target, 0.0):
        for state in optimizer.state.values():
            state.clear()
        load_rank(tmp_path, index, rank, module, optimizer, plan_of(target))
        for p in module.parameters.values():
            expected = whole[p.name].detach()
            if p.shard is not None:
                expected = take_part(expected, p.shard.axis, p.shard, target.layout.coordinates(rank)[2], target.layout.tensor)
            assert torch.equal(p.tensor, expected), p.name
            state = optimizer.state[p.tensor]
            assert torch.equal(state["exp_avg"], 2 * expected) and torch.equal(state["exp_avg_sq"], 3 * expected) and state["step"] == 3
        for name_, buffer in module.buffers.items():
            assert torch.equal(buffer, target.buffers[name_])


def test_what_does_not_make_up_a_tensor_is_refused(tmp_path):
    source, target = plan_case("even", (1, 2, 1)), plan_case("even", (1, 1, 1))
    index = saved(source, tmp_path)
    (rank, module, optimizer), *_ = ranks_of(target, 0.0)

    def load(parts):
        Parts(tmp_path, index.files, parts).load(module, optimizer, target.layout, rank)

    name = "param:tokens.weight"
    with pytest.raises(FormatError, match=r"tokens.weight is missing"):
        load({k: v for k, v in index.parts.items() if k != name})
    with pytest.raises(FormatError, match="lacks 16 of 32 rows"):
        load({**index.parts, name: {"rank-000.safetensors": index.parts[name]["rank-000.safetensors"]}})
    with pytest.raises(FormatError, match="not what the index says"):
        load({**index.parts, name: {"rank-000.safetensors": Part(shape=[32, 16], dtype="float64", axis=0, ranges=[(0, 32)])}})
    with pytest.raises(FormatError, match="expected"):
        load({**index.parts, name: {"rank-000.safetensors": Part(shape=[16, 16], dtype="float64")}})
    odd = {**index.parts, name: {"rank-000.safetensors": Part(shape=[32, 16], dtype="float64", axis=0, ranges=[(0, 16)])}}
    del index.files["rank-000.safetensors"]
    with pytest.raises(FormatError, match="digest differs"):
        load(odd)
    with pytest.raises(FormatError, match="cannot be read"):
        load({**index.parts, name: {"rank-009.safetensors": Part(shape=[32, 16], dtype="float64")}})
    index.files["rank-000.safetensors"] = saved(source, tmp_path).files["rank-000.safetensors"]
    broken = {"param:none": index.parts[name]}
    with pytest.raises(FormatError, match="cannot be read"):
        Parts(tmp_path, index.files, broken).whole("param:none")
    with pytest.raises(FormatError, match=r"norm.weight is \(16,\) torch.float64, expected \(3,\)"):
        Parts(tmp_path, index.files, index.parts).fitting("param:norm.weight", (3,), torch.float64)
