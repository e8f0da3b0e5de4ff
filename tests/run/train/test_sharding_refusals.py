"""Plans whose groups of weights do not belong to the model, or to the program: refused before anything runs."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from levels_rig import rank_of
from tensor_rig import plan_case

from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.errors import Unsupported
from meshwright.lower.training import lower_training
from meshwright.plan.shards import local_values
from meshwright.run.executor.memory import RankMemory
from meshwright.run.train.sharded_state import build_groups
from meshwright.run.train.work import gradient_bytes

replace = msgspec.structs.replace


def case_of(level):
    return plan_case("even", (2, 1, 1), microbatch=1, sharding=DataSharding(level, True, 1500))


@pytest.mark.parametrize("level", [1, 3])
def test_a_trained_parameter_without_a_bucket(level):
    case = case_of(level)
    name = case.layout.buckets[0].params[0]
    buckets = tuple(replace(b, params=tuple(p for p in b.params if p != name)) for b in case.layout.buckets)
    with pytest.raises(Unsupported, match=f"no bucket for the trained parameter '{name}'"):
        rank_of(dataclasses.replace(case, layout=replace(case.layout, buckets=buckets)), 0, "adamw")


def test_lowering_wants_every_parameter_in_a_bucket():
    from rig import graph_of

    case = case_of(1)
    graph = graph_of(case.model, 1)
    with pytest.raises(Unsupported, match="is in no bucket"):
        lower_training(graph, replace(case.layout, buckets=case.layout.buckets[1:]), one_f_one_b_order, lambda *_: pytest.fail("planned"))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_groups_that_do_not_fit(level):
    case = case_of(level)
    module, *_ = rank_of(case, 0, "adamw")
    sizes = gradient_bytes(case.program, 0)

    def held(**others):
        return {n: dataclasses.replace(p, tensor=torch.nn.Parameter(others.get(n, case.parameters[n]).clone())) for n, p in module.parameters.items()}

    assert build_groups(case.layout, 0, held(), sizes, torch.device("cpu"))
    with pytest.raises(Unsupported, match=r"buffers of group '@\d+' hold \d+ elements, its \d+ parameters have \d+"):
        build_groups(case.layout, 0, held(), {n: x // 2 // 8 * 8 for n, x in sizes.items()}, torch.device("cpu"))
    name = next(b.params[0] for b in case.layout.buckets if len(b.params) > 1)
    mixed = held(**{name: case.parameters[name].float()})
    with pytest.raises(Unsupported, match=r"parameters of one bucket are \['torch.float32', 'torch.float64'\]"):
        build_groups(case.layout, 0, mixed, sizes, torch.device("cpu"))


@pytest.mark.parametrize(("level", "kind"), [(3, "shard"), (2, "gradshard"), (3, "gradshard")])
def test_gathered_groups_that_the_rank_has_no_part_of(level, kind):
    case = case_of(level)
    module, *_ = rank_of(case, 0, "adamw")
    flats = {name: flat for name, flat in module.flats.items() if not name.startswith(f"{kind}@0")}
    with pytest.raises(Unsupported, match="holds a group that rank 0 has no part of"):
        RankMemory(case.program, 0, torch.device("cpu"), local_values(case.layout, 0), flats, layout=case.layout)
