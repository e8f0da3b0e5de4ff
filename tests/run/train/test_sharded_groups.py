"""What data replicas divide of weights and gradients, at every level: together the ranks hold each element once, and views share what they are of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from levels_rig import rank_of
from tensor_rig import plan_case

from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.run.train.sharded_state import ParameterGroup, Reference, build_groups, referring
from meshwright.run.train.work import gradient_bytes

CPU = torch.device("cpu")
REPLICAS = 2


def groups_of(level: int) -> list[dict[str, ParameterGroup]]:
    case = plan_case("even", (REPLICAS, 1, 1), microbatch=1, sharding=DataSharding(level, True, 1500))
    found = []
    for rank in range(REPLICAS):
        module, *_ = rank_of(case, rank, "adamw")
        own = {n: torch.nn.Parameter(case.parameters[n].clone()) for n in module.parameters}
        held = {n: dataclasses.replace(p, tensor=own[n], gradient="", offset=0) for n, p in module.parameters.items()}
        found.append(build_groups(case.layout, rank, held, gradient_bytes(case.program, rank), CPU))
    return found


def values_of(group: ParameterGroup, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {p.name: flat[first : first + shape.numel()].view(shape) for p, first, shape in group.places}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_replicas_hold_every_element_once(level: int) -> None:
    case = plan_case("even", (REPLICAS, 1, 1), microbatch=1, sharding=DataSharding(level, True, 1500))
    ranks = groups_of(level)
    assert sorted(n for g in ranks[0].values() for n in values_of(g, torch.zeros(10**6))) == sorted(case.parameters)
    for name in ranks[0]:
        mine: list[ParameterGroup] = [of[name] for of in ranks]
        whole = torch.cat([g.shard for g in mine])
        for p, value in values_of(mine[0], whole).items():
            assert torch.equal(value, case.parameters[p])
        covered = dict.fromkeys((p.name for p, _, _ in mine[0].places), 0)
        for rank, g in enumerate(mine):
            assert g.name == name and g.level == level
            gradients = g.flats[f"{'gradients' if level == 1 else 'gradshard'}{name}"]
            assert len(gradients) == len(whole) // (1 if level == 1 else REPLICAS) and len(g.gradient) == len(g.shard) == len(whole) // REPLICAS
            start = rank * len(g.shard)
            for piece in g.pieces:
                first = next(at for p, at, _ in g.places if p is piece.of)
                covered[piece.of.name] += piece.stop - piece.first
                flat = case.parameters[piece.of.name].flatten()
                assert not piece.whole and torch.equal(piece.tensor.detach(), flat[piece.first : piece.stop])
                piece.tensor.grad.fill_(7.0)  # type: ignore[union-attr]  # the pieces' gradients are views of the group's
                assert bool((g.gradient[first + piece.first - start : first + piece.stop - start] == 7.0).all())
                with torch.no_grad():
                    piece.tensor.add_(1.0)  # and what is trained is the shard itself
                assert torch.equal(g.shard[first + piece.first - start : first + piece.stop - start], flat[piece.first : piece.stop] + 1.0)
            for p, first, _ in g.places:
                assert (p.gradient, p.offset) == (f"gradients{name}", first)
        assert covered == {p.name: case.parameters[p.name].numel() for p, _, _ in mine[0].places}


@pytest.mark.parametrize("level", [1, 2])
def test_whole_weights_are_views_of_the_flat_tensor(level: int) -> None:
    for name, g in groups_of(level)[1].items():
        flat = g.flats[f"weights{name}"]
        assert g.whole is flat and f"shard{name}" not in g.flats
        for p, first, shape in g.places:
            assert p.tensor.shape == shape and p.tensor.data_ptr() == flat[first:].data_ptr()
            assert (p.tensor.grad is not None) == (level == 1)
            if level == 1:
                assert p.tensor.grad.data_ptr() == g.flats[f"gradients{name}"][first:].data_ptr()
        g.collect(torch.arange(len(flat), dtype=flat.dtype))
        for p, first, shape in g.places:
            assert p.tensor.grad.shape == shape and float(p.tensor.grad.flatten()[0]) == first
        g.let_go()
        assert all(p.tensor.grad is None for p, _, _ in g.places)


def test_divided_weights_are_there_while_they_are_attached() -> None:
    ranks = groups_of(3)
    for name, g in ranks[0].items():
        assert f"weights{name}" not in g.flats and g.flats[f"shard{name}"] is g.shard
        assert g.whole is None and all(p.tensor.numel() == 0 for p, _, _ in g.places)
        whole = torch.cat([of[name].shard for of in ranks])
        outside = torch.zeros(3, dtype=whole.dtype)
        assert referring([g])(outside) is outside
        g.attach(whole)
        refer = referring([g, *(x for n, x in ranks[0].items() if n != name)])
        for p, first, shape in g.places:
            kept: Any = refer(p.tensor.data)
            assert isinstance(kept, Reference) and (kept.group, kept.size, kept.offset) == (g, tuple(shape), first)
            turned = refer(p.tensor.data.t() if len(shape) == 2 else p.tensor.data)
            assert turned.stride == (p.tensor.data.t() if len(shape) == 2 else p.tensor.data).stride()
            assert torch.equal(kept.tensor(), p.tensor.data) and kept.tensor().data_ptr() == p.tensor.data_ptr()
        assert refer(outside) is outside and refer(whole.view(torch.int64)).dtype == torch.int64
        g.detach()
        assert g.whole is None and all(p.tensor.numel() == 0 for p, _, _ in g.places)
        with pytest.raises(AssertionError, match="while its weights are gathered"):
            kept.tensor()
