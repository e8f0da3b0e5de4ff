"""Checkpoints of one layout read by another: every parameter, state and buffer is the whole model's part."""

from __future__ import annotations

import os
import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_rig import plan_case, whole_case

from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.errors import FormatError
from meshwright.io.shard_file import ShardFile, crc32_of, digest_of, require_digest, runs
from meshwright.plan.plan import CycleEntry, Plan
from meshwright.plan.regions import Lying
from meshwright.run.checkpoint.checkpoint import load_rank, make_index, save_rank
from meshwright.run.checkpoint.parts import Part
from meshwright.run.checkpoint.restore import restore
from meshwright.run.steps.forward_graph import ForwardGraph
from meshwright.run.tensor.sharding import take_part
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import gradient_bytes

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
        kind="training", job={"training": {"model": case.model}}, target_fabric={}, placement=(), programs={"p": case.program},
        cycle=(CycleEntry(program="p"),), decisions={}, layout=case.layout,
    )  # fmt: skip


def saved(case, folder):
    parts = [save_rank(folder, rank, module, optimizer, case.layout, []) for rank, module, optimizer in ranks_of(case, 1.0)]
    return make_index(plan_of(case), 3, "d", [], parts)


@pytest.mark.sample(3)
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
        counted = load_rank(tmp_path, index, rank, module, optimizer, plan_of(target))
        states = [v for state in optimizer.state.values() for v in state.values()]
        kept = [p.tensor for p in module.parameters.values()] + list(module.buffers.values()) + states
        assert counted is not None
        assert counted.stored_bytes == counted.needed_bytes == sum(t.numel() * t.element_size() for t in kept), "not only what it needs"
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

    def load(**changed):
        restore(module, optimizer, plan_of(target), rank, msgspec.structs.replace(index, **changed), tmp_path)

    name, files = "param:tokens.weight", sorted(index.files)
    one, two = (index.parts[name][f] for f in files)
    load()
    with pytest.raises(FormatError, match=r"tokens.weight is missing"):
        load(parts={k: v for k, v in index.parts.items() if k != name})
    with pytest.raises(FormatError, match=r"tokens.weight lacks 2048 of 4096 bytes, \[16:32, 0:16\]"):
        load(parts={**index.parts, name: {files[0]: one}})
    for wrong in ({"shape": [16, 16]}, {"ranges": [(16, 33)]}, {"axis": 2}):
        other = msgspec.structs.replace(two, **wrong)
        with pytest.raises(FormatError, match="contradicts the other files"):
            load(parts={**index.parts, name: {files[0]: one, files[1]: other}})
    with pytest.raises(FormatError, match="unknown type 'float7'"):
        load(parts={**index.parts, name: {files[0]: msgspec.structs.replace(one, dtype="float7")}})
    with pytest.raises(FormatError, match=r"tokens.weight is \(32, 17\) torch.float64, expected"):
        load(parts={**index.parts, name: {f: msgspec.structs.replace(p, shape=[32, 17]) for f, p in index.parts[name].items()}})
    with pytest.raises(FormatError, match="not what the index says"):
        load(parts={**index.parts, name: {files[0]: Part(shape=[32, 16], dtype="float64", axis=0, ranges=[(0, 32)])}})


def test_a_damaged_missing_or_foreign_shard_is_named(tmp_path):
    source, target = plan_case("even", (1, 2, 1)), plan_case("even", (1, 1, 1))
    index = saved(source, tmp_path)
    (rank, module, optimizer), *_ = ranks_of(target, 0.0)
    path = tmp_path / "rank-001.safetensors"
    good = path.read_bytes()

    def load():
        restore(module, optimizer, plan_of(target), rank, index, tmp_path)

    with ShardFile(path) as file:
        at = file.stored["optimizer:norm.weight:exp_avg"]
        assert file.read_bytes == 0
    path.write_bytes(good[: at.start + 9] + bytes([good[at.start + 9] ^ 1]) + good[at.start + 10 :])
    with pytest.raises(FormatError, match=rf"digest differs\): optimizer:norm.weight:exp_avg, bytes {at.start}-{at.stop}") as caught:
        load()
    assert caught.value.where == str(path) and caught.value.data["file"] == path.name
    path.write_bytes(good[:-8])
    with pytest.raises(FormatError, match=r"digest differs\): .* is not in the file"):
        load()
    path.write_bytes((tmp_path / "rank-000.safetensors").read_bytes())
    with pytest.raises(FormatError, match=r"digest differs\): .*bytes"):
        load()
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        load()


def test_files_that_are_no_shards_are_refused(tmp_path):
    path = tmp_path / "rank-000.safetensors"

    def written(header: bytes, data: bytes = b"") -> None:
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)

    entry = b'{"a": {"dtype": "%s", "shape": [2], "data_offsets": [0, %d]}}'
    for header, said in (
        (b"", "no safetensors file"), (b"[1]", "broken header"), (b'{"a": 1}', "broken header"), (entry % (b"F99", 8), "is not in the file"),
        (entry % (b"F32", 64), "is not in the file"), (entry % (b"F32", 7), "7 bytes for F32"),
    ):  # fmt: skip
        written(header, bytes(8))
        with pytest.raises(FormatError, match=said):
            ShardFile(path)
    written(entry % (b"F32", 8), torch.tensor([1.0, 2.0]).numpy().tobytes())
    require_digest(path, digest_of(path), {"a": 1})
    for sums, damaged in (({"a": crc32_of(torch.tensor([1.0, 2.0]))}, "^$"), ({"a": 1}, "^a, bytes "), ({}, "was not saved"), (None, "^$")):
        with pytest.raises(FormatError, match="its digest differs") as refused:
            require_digest(path, "0" * 64, sums)
        assert re.search(damaged, refused.value.data["damaged"]) and refused.value.data["file"] == path.name
    got = bytearray(4)
    with ShardFile(path) as file:
        file.read("a", (2,), torch.float32, Lying(0, (2,), ((1, 2),)), got)
        assert file.read_bytes == 4 and torch.frombuffer(got, dtype=torch.float32).item() == 2.0
        with pytest.raises(FormatError, match="b is not in the file"):
            file.read("b", (2,), torch.float32, Lying(0, (2,), ((1, 2),)), got)
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(FormatError, match="ends at byte"):
            file.read("a", (2,), torch.float32, Lying(0, (2,), ((1, 2),)), got)


BOXES = st.lists(st.integers(1, 4), max_size=4).flatmap(
    lambda s: st.tuples(st.just(s), st.tuples(*(st.tuples(st.integers(0, d - 1), st.integers(1, d)) for d in s)))
)


@given(BOXES)
def test_runs_are_the_elements_of_a_box(case):
    shape, ends = case
    box = tuple((a, max(a + 1, b)) for a, b in ends)
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    expected = numbers[tuple(slice(a, b) for a, b in box)].reshape(-1).tolist()
    found = list(runs(shape, box))
    assert [i for first, count in found for i in range(first, first + count)] == expected
    assert len(found) <= max(1, len(expected))
