"""What a layout search says that a step takes, beside what its program takes in the simulator, at the same degrees and sharding level."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from alike_servers import boxes

from captured import captured
from meshwright.cost import assumed_cost
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.experts import experts_graph, tensor_part
from meshwright.decide.layout.grid import Grid
from meshwright.decide.layout.layer_costs import layer_table
from meshwright.decide.layout.mixed.candidate import Pool, Problem
from meshwright.decide.layout.mixed.grid import grid_candidates
from meshwright.decide.layout.mixed.search import uniform_choices
from meshwright.decide.layout.problem import LayoutProblem
from meshwright.decide.layout.profiled.predict import predict
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive.layout.search import runtime_of_servers
from meshwright.drive.training.collectives import CollectivePlanner
from meshwright.drive.training.folded import folded_step
from meshwright.drive.training.placements import placements_of, with_server_replicas
from meshwright.fabric.fabric import Fabric
from meshwright.fabric.servers import network_of, server_kinds
from meshwright.graph.graph import OpGraph
from meshwright.graph.liveness import segment_workspace
from meshwright.graph.scale import at_batch
from meshwright.plan.precision import FULL

EXAMPLES = Path(__file__).parents[2] / "examples"
MICROBATCHES = 4
SHARE = 0.05  # by which the two may differ
LESS_BY_BLOCKS = 0.08  # by which the program may be faster where a gather goes by blocks: (servers - 1) / servers over NICs, not (ranks - 1) / ranks


class Case(NamedTuple):
    model: str
    servers: int
    per: int  # devices of each
    data: int
    tensor: int
    pipeline: int
    expert: int
    level: int
    nic_Bps: int


CASES = [
    # large groups of experts between small ones, each over one rank of every server
    Case("experts.py:small", 4, 8, 32, 1, 1, 8, 3, 6 * 10**5), Case("experts.py:small", 4, 8, 32, 1, 1, 8, 3, 3 * 10**6),
    Case("experts.py:small", 4, 8, 32, 1, 1, 8, 2, 6 * 10**5), Case("experts.py:small", 4, 4, 8, 1, 2, 4, 3, 6 * 10**5),
    # the same without experts, and with tensor ranks
    Case("gpt.py:tiny", 8, 1, 8, 1, 1, 1, 3, 10**6), Case("gpt.py:tiny", 4, 2, 4, 2, 1, 1, 3, 10**6), Case("gpt.py:tiny", 4, 2, 4, 2, 1, 1, 0, 10**6),
    # replicas that fill servers
    Case("gpt.py:tiny", 4, 4, 16, 1, 1, 1, 3, 3 * 10**5), Case("gpt.py:tiny", 4, 4, 16, 1, 1, 1, 2, 3 * 10**5),
    Case("gpt.py:tiny", 4, 8, 16, 2, 1, 1, 3, 3 * 10**5),
]  # fmt: skip


@functools.cache
def slow(case: Case) -> Fabric:
    """Servers with links so slow, and devices with so few operations a second, that a small model takes as much of each as a large one."""
    made = boxes(case.servers, case.per)
    scale = case.nic_Bps / (25 * 10**9)
    links = tuple(replace(x, rate_Bps=round(x.rate_Bps * scale)) for x in made.links)
    return replace(made, devices=tuple(replace(d, memory_bytes=0, flops={"fp32": 10**7}) for d in made.devices), links=links)


def graph_of(case: Case, batch: int = 1) -> OpGraph:
    return at_batch(captured(str(EXAMPLES / case.model)), batch)


def searched_s(case: Case) -> float:
    fabric = slow(case)
    cost, kinds = assumed_cost(fabric), server_kinds(fabric)
    table = layer_table(
        lambda batch: graph_of(case, batch), kinds, cost, microbatches=[1], tensors=[case.tensor], precision=FULL, sequence=False, experts=case.expert
    )
    problem = Problem(
        table=table, pools=tuple(Pool(kind=k, memory_bytes=0) for k in kinds), network=network_of(kinds),
        runtime=runtime_of_servers(kinds, table, cost), global_batch=case.data * MICROBATCHES,
        choices=tuple(c for c in uniform_choices() if (c.sharding, c.recompute) == (case.level, "none")),
    )  # fmt: skip
    candidate = next(
        c for c in grid_candidates(problem, problem.pools[0], case.servers * case.per)
        if (c.layout.data, len(c.layout.stages)) == (case.data, case.pipeline)
    )  # fmt: skip
    return predict(problem.profile(candidate), candidate.layout, problem.network, problem.runtime, bars=False).time_s


def lowered_s(case: Case) -> float:
    fabric = slow(case)
    cost = assumed_cost(fabric)
    problem = LayoutProblem(
        graph_at=lambda batch: graph_of(case, batch), fabric=fabric, cost=cost, global_batch=case.data * MICROBATCHES,
        fixed=(case.data, case.tensor, case.pipeline, 1), expert=case.expert,
    )  # fmt: skip
    grid = Grid(workspace=segment_workspace, tensor_options=TensorOptions(sequence=False))
    layout = grid.sharded(problem, grid.plan(problem)[0].degrees, DataSharding(case.level, True, 0)).layout
    assert layout is not None
    graph = experts_graph(graph_of(case), case.expert, tensor=tensor_part(graph_of(case), layout))
    planner = CollectivePlanner(fabric=fabric, transport=cost.transport)
    places = next(placements_of(layout, fabric, alike=True))[1]
    return folded_step(graph, with_server_replicas(layout, places, fabric), fabric, cost, places, planner).timeline.makespan_s


def named(c: Case) -> str:
    return f"{c.model.partition('.')[0]}-{c.data}x{c.tensor}x{c.pipeline}-ep{c.expert}-zero{c.level}-{c.nic_Bps}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_step_as_searched_is_the_step_as_lowered(case: Case) -> None:
    """Rings of experts have one NIC of every server each, and gathers hide behind what is computed before them, in both."""
    less = LESS_BY_BLOCKS if case.level >= 2 and case.per > case.tensor else SHARE
    assert lowered_s(case) * (1 - SHARE) <= searched_s(case) <= lowered_s(case) * (1 + less)
