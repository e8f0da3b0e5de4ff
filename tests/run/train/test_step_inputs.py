"""A step's example inputs: which of them a rank holds, in the program and for real."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from schedule_models import BATCH, LENGTH
from tensor_rig import Case, graph_of, plan_case

from meshwright.check.training.step import check_training
from meshwright.plan.sizes import inputs_read
from meshwright.program.first_microbatches import first_microbatches
from meshwright.program.program import BUFFER_ROLES, Program
from meshwright.run.train.work import TrainingWork

MODELS = "tests/run/schedule_models.py:"
IDS = 8 * LENGTH  # bytes of a row of tokens, and of one of targets


def case_of(degrees: tuple[int, int, int], schedule: tuple[str, dict[str, Any]] | None, microbatches: int = 4) -> Case:
    options: dict[str, Any] = {"microbatch": BATCH, "global_batch": degrees[0] * BATCH * microbatches, "schedule": schedule}
    return plan_case("net", degrees, models=MODELS, **options)


def held(program: Program, rank: int) -> dict[int, int]:
    """Bytes by micro-batch."""
    b = program.buffers
    mine = [i for i, name in enumerate(b.name) if name.startswith("inputs:") and b.actor[i] == rank]
    assert all(b.persistent[i] and BUFFER_ROLES[b.role[i]] == "input" for i in mine)
    return {int(b.name[i].partition(":")[2]): int(b.chunks[i]) * int(b.chunk_bytes[i]) for i in mine}


def fetched(case: Case, rank: int) -> dict[int, set[int]]:
    """The numbers of the inputs that a rank fetches, by micro-batch."""
    lay, graph = case.layout, graph_of(case.model, BATCH)
    of = inputs_read(graph, lay)
    number = {x.storage: i for i, x in enumerate(graph.inputs)}
    mine = [key for k, _ in lay.hosted(lay.coordinates(rank)[0]) for key in lay.stages[k].segments]
    segments = {key: SimpleNamespace(inputs=tuple(number[s] for s in of[key])) for key in mine}
    tensors = [torch.zeros(BATCH, LENGTH, dtype=torch.int64)] * 2
    data = SimpleNamespace(microbatch=lambda step, replica, mb: tensors)
    module = SimpleNamespace(segments=segments, groups={}, counts=None, once={})
    work = TrainingWork(case.program, lay, rank, module, data, None)  # type: ignore[arg-type]
    work.begin(0)
    return {mb: {*found} for mb, found in work._batches.items()}


@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [((1, 1, 1), None), ((2, 1, 2), None), ((1, 2, 2), None), ((1, 1, 2), ("chimera", {})), ((1, 1, 2), ("interleaved", {"chunks": 2}))],
)
def test_a_rank_holds_what_its_segments_read(degrees: tuple[int, int, int], schedule: tuple[str, dict[str, Any]] | None) -> None:
    case = case_of(degrees, schedule)
    for rank in range(case.layout.ranks):
        sizes, numbers = held(case.program, rank), fetched(case, rank)
        assert sizes == {mb: BATCH * IDS * len(found) for mb, found in numbers.items()}
        hosted = case.layout.hosted(case.layout.coordinates(rank)[0])
        ends = {(c, i) for k, c in hosted for i, end in ((0, 0), (1, len(case.layout.stages) - 1)) if k == end}
        assert {(case.layout.copy(mb), i) for mb, found in numbers.items() for i in found} == ends


def test_an_inner_rank_fetches_nothing() -> None:
    case = case_of((1, 1, 3), None)
    assert not held(case.program, 1) and not fetched(case, 1)


def test_another_micro_batchs_inputs_are_refused() -> None:
    case = case_of((1, 1, 2), None)
    p = case.program
    names = {name: i for i, name in enumerate(p.buffers.name)}
    assert not check_training(p, case.layout)
    values = p.ops.reads.values.copy()
    triples = values.reshape(-1, 3)
    where = np.flatnonzero(triples[:, 0] == names["inputs:0"])
    assert len(where)
    triples[where, 0] = names["inputs:1"]
    wrong = replace(p, ops=replace(p.ops, reads=replace(p.ops.reads, values=values)))
    assert any("reads inputs:1, which is not of micro-batch 0" in f.message for f in check_training(wrong, case.layout))


def test_fewer_micro_batches_have_fewer_inputs() -> None:
    case = case_of((1, 1, 2), None)
    assert [*held(first_microbatches(case.program, 2), 0)] == [0, 1]
