"""Ranks that read their parts of the weights from files, or draw them, hold the bits that they hold of a whole model, and no more is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from levels_rig import CPU
from safetensors.torch import save_file
from tensor_rig import plan_case

from meshwright.capture import drawn
from meshwright.capture.resolve import build_model
from meshwright.capture.weight_files import SINGLE, weight_files
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.run.steps.forward_graph import ForwardGraph
from meshwright.run.tensor.sharding import take_part
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.work import gradient_bytes

MODELS = "tests/run/recipe_models.py:"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "degrees", "level"),
    [("tied", (1, 2, 2), 0), ("grouped", (1, 4, 1), 0), ("tied", (2, 1, 1), 1), ("tied", (2, 1, 2), 2), ("shared", (2, 2, 1), 3)],
)
def test_parts_have_the_bits_of_the_whole(tmp_path: Any, name: str, degrees: tuple[int, int, int], level: int) -> None:
    sharding = {"sharding": DataSharding(level, True, 1500)} if level else {}
    case = plan_case(name, degrees, microbatch=1, global_batch=4, models=MODELS, **sharding)
    graph = ForwardGraph.from_json(case.graph)
    whole = {n: torch.nn.Parameter(p.clone()) for n, p in case.parameters.items()}
    save_file({n: p.detach() for n, p in whole.items()}, tmp_path / SINGLE)
    empty = {n: torch.nn.Parameter(p.to("meta")) for n, p in whole.items()}
    for rank in range(case.layout.ranks):
        files = weight_files(tmp_path)
        files.known_as = {n: n for n in whole}
        read: list[int] = []
        part = files.part
        files.part = lambda *a, part=part, read=read: read.append(x.numel()) or x if (x := part(*a)) is not None else None  # type: ignore[method-assign]
        sizes = gradient_bytes(case.program, rank)
        expected, found = (
            build_rank_module(graph, case.layout, rank, parameters, case.buffers, device=CPU, gradient_bytes=sizes, values=values)
            for parameters, values in ((whole, None), (empty, files))
        )
        assert sum(read) == sum(part_of(case, rank, p).numel() for p in expected.parameters.values())
        for (p, a, _), (q, b, _) in zip(expected.kept(), found.kept(), strict=True):
            assert p.name == q.name and torch.equal(a, b) and a.requires_grad == b.requires_grad
        for (p, a, x), (q, b, y) in zip(expected.updated(), found.updated(), strict=True):
            assert p.name == q.name and torch.equal(a, b) and torch.equal(a.grad, b.grad) and (x is None or (x.first, x.stop) == (y.first, y.stop))
        assert {n: f.shape for n, f in expected.flats.items()} == {n: f.shape for n, f in found.flats.items()}
        assert not any(p.tensor.is_meta for p in found.parameters.values())


@pytest.mark.parametrize(("name", "degrees", "level"), [("tied", (1, 2, 2), 0), ("shared", (2, 2, 1), 3)])
def test_drawn_parts_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, name: str, degrees: tuple[int, int, int], level: int) -> None:
    monkeypatch.setattr(drawn, "MIN_BYTES", 256)
    sharding = {"sharding": DataSharding(level, True, 1500)} if level else {}
    case = plan_case(name, degrees, microbatch=1, global_batch=4, models=MODELS, **sharding)
    graph = ForwardGraph.from_json(case.graph)
    whole, lazy = (build_model(f"{MODELS}{name}", device="cpu", seed=11, batch_size=1, lazy=x) for x in (False, True))
    assert whole.weights is None and lazy.weights is not None
    assert [p.is_meta for p in lazy.module.parameters()] == [4 * p.numel() >= 256 for p in whole.module.parameters()]
    assert all(torch.equal(x, y) for x, y in zip(whole.inputs, lazy.inputs, strict=True))
    for rank in range(case.layout.ranks):
        expected, found = (
            build_rank_module(
                graph, case.layout, rank, dict(source.module.named_parameters()), dict(source.module.named_buffers()), device=CPU,
                gradient_bytes=gradient_bytes(case.program, rank), values=source.weights,
            )
            for source in (whole, lazy)
        )  # fmt: skip
        for (p, a, _), (q, b, _) in zip(expected.kept(), found.kept(), strict=True):
            assert p.name == q.name and torch.equal(a, b) and a.requires_grad == b.requires_grad
        for (p, a, _), (q, b, _) in zip(expected.updated(), found.updated(), strict=True):
            assert p.name == q.name and torch.equal(a, b) and torch.equal(a.grad, b.grad)
        assert not any(p.tensor.is_meta for p in found.parameters.values())


def part_of(case: Any, rank: int, p: Any) -> torch.Tensor:
    whole = case.parameters[p.name]
    return whole if p.shard is None else take_part(whole, p.shard.axis, p.shard, case.layout.coordinates(rank)[2], case.layout.tensor)
