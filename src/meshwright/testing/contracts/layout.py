"""What every layout strategy must do, on generated problems: degrees of a job, choices per layer, states of every operator, layer profiles."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...check.sharding import check_sharding
from ...cost import Cost, Transport, assumed_cost
from ...decide.layout import LayoutProblem, LayoutStrategy
from ...decide.layout.autoddl.problem import ShardingProblem, ShardingStrategy
from ...decide.layout.mixed.candidate import Demands, Judged, LayersStrategy
from ...decide.layout.mixed.search import search_mixed
from ...decide.layout.problem import DegreesStrategy
from ...decide.layout.profiled.search import ProfileProblem, ProfileStrategy
from ...errors import Infeasible, Unsupported
from ...fabric.fabric import Device, Fabric, Link, Switch
from ...graph.scale import at_batch
from ...plan.sharding import ShardingPlan
from ...profile.layer_profile import Entry, LayerProfile, LayerSize, LayerTime
from ...profile.network import NetworkProfile, RateCurve, TrainingRuntime
from ..layer_tables import fabric, problem
from .chosen import named_and_cited, parametrized

EXAMPLES = settings(max_examples=6, deadline=None)
COST = Cost(per_call_s=1e-6, transport=Transport(per_message_s=1e-5))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "layout")


def test_name_and_citation(kind: type[LayoutStrategy]) -> None:
    named_and_cited(kind)
    assert kind.answers in ("degrees", "layers", "operators", "profile")


# ---- degrees of a captured job ----------------------------------------------------------------------------------------
def star(devices: int, *, memory: int = 0) -> Fabric:
    row = tuple(Device(name=f"n{i}", flops={"fp32": 10**11}, memory_bandwidth_Bps=10**10, memory_bytes=memory) for i in range(devices))
    links = tuple(x for d in row for x in (Link(src=d.name, dst="s", rate_Bps=10**8), Link(src="s", dst=d.name, rate_Bps=10**8)))
    return Fabric(name="star", devices=row, switches=(Switch(name="s"),), links=links)


@EXAMPLES
@given(devices=st.sampled_from([1, 2, 4, 6]), batch=st.sampled_from([4, 8, 12]), net=st.sampled_from(["chain", "residual"]))
def test_degrees_use_every_device_and_compute_every_sample_once(degrees_kind: type[DegreesStrategy], devices: int, batch: int, net: str) -> None:
    pytest.importorskip("torch")
    from ..nets import captured

    net_of = star(devices)
    asked = LayoutProblem(graph_at=lambda b: at_batch(captured(net), b), fabric=net_of, cost=assumed_cost(net_of), global_batch=batch)
    found, again = degrees_kind().plan(asked), degrees_kind().plan(asked)
    assert [str(c) for c in found] == [str(c) for c in again]
    fits = [c for c in found if c.layout is not None]
    assert fits and found[: len(fits)] == fits, "refused ones last"
    assert [c.estimate_s for c in fits] == sorted(c.estimate_s for c in fits) and all(c.why for c in found[len(fits) :])
    for c in fits:
        assert c.layout is not None
        assert c.degrees.ranks == c.layout.ranks == devices and (c.layout.data, c.layout.tensor) == (c.degrees.data, c.degrees.tensor)
        assert c.layout.microbatches * c.degrees.microbatch_size * c.degrees.data == batch
        staged = [p for stage in c.layout.stages for p in stage.params]
        assert {p.name for p in captured(net).parameters} <= set(staged)


# ---- choices per layer -------------------------------------------------------------------------------------------------
@st.composite
def fleets(draw: st.DrawFn) -> Any:
    boxes = [("fast", draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])))]
    if draw(st.booleans()):
        boxes.append(("slow", 1, 2))
    work = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    return problem(fabric(boxes), work, batch=draw(st.sampled_from([4, 8])))


@EXAMPLES
@given(asked=fleets())
def test_candidates_per_layer_are_whole_and_judged_beside_the_others(layers_kind: type[LayersStrategy], asked: Any) -> None:
    strategy, demands = layers_kind(), Demands()
    assert layers_kind(**asdict(strategy)) == strategy  # type: ignore[call-overload]
    others = search_mixed(asked, demands)
    judged: tuple[Judged, ...] = (*others.ranked, *others.others) if strategy.refines else ()
    found = list(strategy.plan(asked, demands, judged))
    assert [c.identity for c in strategy.plan(asked, demands, judged)] == [c.identity for c in found]
    for c in found:
        layout = c.layout
        assert c.source == strategy.name and len(c.choices) == asked.table.layers == sum(s.layers for s in layout.stages)
        assert layout.global_batch == asked.global_batch and asked.estimate(c).time_s > 0
        used: dict[tuple[str, str], int] = {}
        for replica in (r for stage in layout.stages for r in stage.replicas):
            used[replica.device, replica.zone] = used.get((replica.device, replica.zone), 0) + replica.tensor
        assert all(count <= {p.key: p.kind.devices for p in asked.pools}[key] for key, count in used.items())
        assert strategy.mixes or strategy.refines or len(used) == 1
    if not strategy.refines and any(asked.estimate(c).over_bytes <= 0 for c in found):
        alone = search_mixed(asked, demands, methods=(strategy.name,))
        bounds = (alone.bounds.universal_s, alone.bounds.family_s)
        assert alone.counts[strategy.name] >= 1 and max(bounds) <= alone.best.time_s * (1 + 1e-9)


# ---- states of every operator ------------------------------------------------------------------------------------------
def sharded(kind: type[ShardingStrategy], asked: ShardingProblem, **options: Any) -> ShardingPlan | None:
    """The plan, or None for a refusal, which must say what to do."""
    try:
        return kind(**options).plan(asked, seed=3)
    except (Unsupported, Infeasible) as refusal:
        assert refusal.message and refusal.hint
        return None


@EXAMPLES
@given(devices=st.sampled_from([1, 2, 4]), net=st.sampled_from(["chain", "residual"]), memory=st.sampled_from([0, 0, 10**5]))
def test_states_are_complete_and_never_below_the_bounds(operators_kind: type[ShardingStrategy], devices: int, net: str, memory: int) -> None:
    pytest.importorskip("torch")
    from ..nets import captured

    asked = ShardingProblem(graph=captured(net), fabric=star(devices), cost=COST, memory_bytes=memory)
    plan = sharded(operators_kind, asked)
    if plan is None:
        return
    assert check_sharding(plan, asked.graph).ok
    assert plan.strategy == operators_kind.name and int(np.prod(plan.mesh)) == devices == len(plan.devices)
    assert {n.name for n in asked.graph.nodes} >= set(plan.ops) and all(len(s) == len(plan.mesh) for s in plan.sources.values())
    assert plan.time_s >= plan.bound_time_s * (1 - 1e-9) and (not memory or plan.memory_bytes <= memory)
    known = {f.name for f in fields(operators_kind)}  # type: ignore[arg-type]
    again = sharded(operators_kind, asked, **{k: v for k, v in plan.options.items() if k in known and k != "search"})
    assert msgspec.json.encode(again) == msgspec.json.encode(plan)


# ---- layer profiles ----------------------------------------------------------------------------------------------------
def profile_problem(gpus: int, batch: int, memory: int) -> ProfileProblem:
    times = {Entry("A", m, t): tuple(LayerTime(1e-3 * m / t, 2e-3 * m / t, 1e-4) for _ in range(4)) for m in (1, 2) for t in (1, 2)}
    sizes = {t: tuple(LayerSize(1e7 / t, 4e6 / t, 1e6) for _ in range(4)) for t in (1, 2)}
    curve = RateCurve(c2=0.0, c1=0.0, c0=10.0, peak_Bps=1e10)
    return ProfileProblem(
        profile=LayerProfile(model="made-up", layers=4, times=times, sizes=sizes), runtime=TrainingRuntime(gpus_per_server={"A": 2}), device="A",
        network=NetworkProfile(inside={("A", 2): curve}, between={("", "A", 2, "", "A", 2): curve}), gpus=gpus, global_batch=batch,
        memory_bytes=memory,
    )  # fmt: skip


@EXAMPLES
@given(gpus=st.sampled_from([1, 2, 4]), batch=st.sampled_from([4, 8]), memory=st.sampled_from([0, 1 << 40]))
def test_profiled_layouts_use_every_gpu_fastest_first(profile_kind: type[ProfileStrategy], gpus: int, batch: int, memory: int) -> None:
    asked = profile_problem(gpus, batch, memory)
    found = profile_kind().plan(asked)
    assert [msgspec.json.encode(j.layout) for j in profile_kind().plan(asked)] == [msgspec.json.encode(j.layout) for j in found]
    times = [j.prediction.time_s for j in found if j.prediction is not None]
    assert times and times == sorted(times) and all(j.why for j in found if j.prediction is None)
    assert all(j.layout.gpus == gpus and j.layout.global_batch == batch for j in found)
    assert all(j.prediction.bound_s <= j.prediction.time_s * (1 + 1e-9) for j in found if j.prediction is not None)
