"""Layer tables and searches whose replicas divide experts: exchanges, state and sums per layer against arithmetic, degrees beside each other."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from meshwright.capture.graph import capture
from meshwright.cli.frame import main
from meshwright.cost import assumed_cost
from meshwright.decide.layout.layer_costs import MIXED, layer_table
from meshwright.drive.layout.search import LayoutFindings, find_expert_layouts, find_layouts
from meshwright.drive.plans import read_fabric
from meshwright.errors import Unsupported, UsageError
from meshwright.fabric.servers import server_kinds
from meshwright.graph.scale import at_batch
from meshwright.plan.routing import Routing
from meshwright.profile.layer_table import LayerChoice

WIDTH, INNER, EXPERTS, LAYERS, TOKENS = 32, 64, 8, 4, 16


@cache
def graph():
    return capture(f"{Path(__file__).parents[3] / 'examples' / 'experts.py'}:small")


FABRIC = read_fabric("dgx-h100:4")


@cache
def table(experts, routing=None):
    return layer_table(
        lambda b: at_batch(graph(), b), server_kinds(FABRIC), assumed_cost(FABRIC), microbatches=(1,), tensors=(1,), precision=MIXED,
        least=2, experts=experts, **({} if routing is None else {"routing": routing}),
    )  # fmt: skip


def rows(experts, routing=None):
    (entry,) = table(experts, routing).rows
    return table(experts, routing).rows[entry]


def test_a_rank_holds_its_part_of_the_experts():
    whole, part = rows(1), rows(4)
    experts = LAYERS * EXPERTS * 3 * WIDTH * INNER
    assert sum(r.expert_parameters for r in whole) == 0 and sum(r.expert_parameters for r in part) == experts / 4
    assert sum(r.parameters for r in whole) - sum(r.parameters for r in part) == pytest.approx(experts * 3 / 4)


def test_exchanges_cost_what_travels():
    """Two of every layer, forward and backward, of its expected rows in bf16; counts are short."""
    whole, part = rows(1), rows(8)
    more = sum(r.forward_s for r in part) - sum(r.forward_s for r in whole)
    kind, transport = server_kinds(FABRIC)[0], assumed_cost(FABRIC).transport
    rows_bytes = 2 * TOKENS * WIDTH * 2  # of all ranks together: k tokens each
    one = rows_bytes * 7 / 8 / kind.inside_Bps[kind.gpus] + 7 * (kind.inside_latency_s + transport.per_message_s)
    assert LAYERS * 2 * one < more < LAYERS * 3 * one * 1.01  # counts are a third exchange, of a few bytes


def test_state_and_sums_are_those_of_the_experts_copies():
    made = table(4)
    (entry,) = made.rows
    p = np.array([r.parameters for r in made.rows[entry]])
    e = np.array([r.expert_parameters for r in made.rows[entry]])
    a = made.priced(entry, LayerChoice("none", 1), 16)
    state = made.state
    want = (p - e) * (state.weight + state.gradient + state.optimizer / 16) + e * (state.weight + state.gradient + state.optimizer / 4)
    assert np.allclose(a["state_bytes"], want, rtol=1e-12)
    ring = made.priced(entry, LayerChoice("none", 0), 16)["wire_bytes"] * 2 * 15 / 16
    assert np.allclose(ring, (p - e) * state.message * 2 * 15 / 16 + e * state.message * 2 * 3 / 4, rtol=1e-12)
    alone = made.priced(entry, LayerChoice("none", 0), 4)["wire_bytes"]
    assert np.allclose(alone, (p - e) * state.message, rtol=1e-12)  # nobody else has these experts


def test_a_hot_rank_takes_longer():
    hot = Routing(measured=(("*", (1, 1) + (0,) * (EXPERTS - 2)),))
    assert sum(r.forward_s for r in rows(4, hot)) > sum(r.forward_s for r in rows(4))


def find(experts):
    return find_layouts(
        lambda b: at_batch(graph(), b), FABRIC, assumed_cost(FABRIC), global_batch=64, precision=MIXED, microbatches=(1, 2), tensors=(1,),
        contexts=(1,), experts=experts, simulated=8, refine=1, methods=("grid",),
    )  # fmt: skip


def test_a_search_looks_at_several_degrees_and_keeps_the_loosest_bound():
    found, said = find_expert_layouts((1, 4, 8), find)
    each = {d: find(d) for d in (1, 4, 8)}
    assert found.found.best.time_s == min(x.found.best.time_s for x in each.values()) and set(said) == {1, 4, 8}
    assert found.found.bounds.universal_s == min(x.found.bounds.universal_s for x in each.values())
    assert all(j.candidate.layout.data % found.problem.table.experts == 0 for j in found.found.ranked)
    assert all(x.found.bounds.universal_s <= x.found.bounds.family_s <= x.found.best.time_s for x in each.values())


def test_degrees_that_do_not_divide_are_said():
    found, said = find_expert_layouts((3, 2), find)
    assert isinstance(found, LayoutFindings) and "do not divide" in said[3] and found.problem.table.experts == 2
    with pytest.raises(Unsupported, match="do not divide"):
        find_expert_layouts((3,), find)
    with pytest.raises(UsageError, match="no expert degree"):
        find_expert_layouts((), find)


def test_the_command_prints_every_degree_and_refuses_what_is_none(capsys):
    words = ["layout", "search", "--model", "examples/experts.py:tiny", "--fabric", "dgx-h100:1", "--devices", "0,1", "--global-batch", "8"]
    assert main([*words, "--ep", "1,2", "--routing", "zipf:1.2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["expert_degrees"]) == {"1", "2"} and document["expert_degree"] in (1, 2) and document["routing"] == "zipf:1.2"
    assert main([*words, "--ep", "1,zwei"]) == 2
    assert "--ep" in capsys.readouterr().err
