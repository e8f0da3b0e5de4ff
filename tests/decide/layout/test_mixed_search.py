"""The whole search: what wins fits and was simulated, bounds hold, constraints and refusals say what they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.layout.mixed import search
from meshwright.decide.layout.mixed.bounds import family_bound_s, universal_bound
from meshwright.decide.layout.mixed.candidate import Candidate, Problem
from meshwright.decide.layout.mixed.nearest import nearest_feasible
from meshwright.decide.layout.mixed.search import Demands, search_mixed, uniform_choices
from meshwright.decide.layout.profiled.predict import predict
from meshwright.errors import Infeasible, UsageError
from meshwright.kernels.interrupts import interrupt
from meshwright.profile.layer_profile import Entry, ProfileEntryMissing
from meshwright.profile.layer_table import RECOMPUTE, LayerChoice, LayerTable
from meshwright.profile.network import ProfiledLayout, ProfiledStage, Replica
from meshwright.testing.layer_tables import fabric, problem, table

WORK = (1.5, 1.0, 1.0, 1.0, 1.0, 2.0)
TWO = fabric([("fast", 1, 2), ("slow", 1, 2)])


def any_layout(data: st.DataObject, p: Problem) -> Candidate:
    """Stages, cuts, kinds, degrees (of layers too), shares, recomputation at random; one sharding level."""
    stages, pipelines = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    microbatch = data.draw(st.sampled_from(p.microbatches))
    total = p.global_batch // microbatch
    counts = (total,) if pipelines == 1 else (first := data.draw(st.integers(1, total - 1)), total - first)
    cuts = sorted(data.draw(st.permutations(range(1, len(WORK))))[: stages - 1])
    ends = (0, *cuts, len(WORK))
    left = {pool.kind.name: pool.kind.devices for pool in p.pools}
    made = []
    for s in range(stages):
        row = []
        for _ in range(pipelines):
            kind = data.draw(st.sampled_from(sorted(k for k, n in left.items() if n)))
            tensor = data.draw(st.sampled_from([t for t in p.tensors(kind) if t <= left[kind]]))
            left[kind] -= tensor
            row.append(Replica(device=kind, tensor=tensor))
        made.append(ProfiledStage(layers=ends[s + 1] - ends[s], replicas=tuple(row)))
    level = data.draw(st.integers(0, 3)) if pipelines > 1 else 0
    degrees = {r.tensor for stage in made for r in stage.replicas}
    inner = [0, 1] if degrees == {microbatch} == {2} else [0]  # layers may share the samples inside their groups instead
    choices = tuple(LayerChoice(data.draw(st.sampled_from(RECOMPUTE)), level, data.draw(st.sampled_from(inner))) for _ in WORK)
    return Candidate(ProfiledLayout(stages=tuple(made), microbatch=microbatch, microbatches=counts), choices, "any")


BIG = problem(fabric([("fast", 2, 4), ("slow", 2, 4)]), WORK, batch=8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_simulated_layout_beats_a_bound(data: st.DataObject) -> None:
    c = any_layout(data, BIG)
    simulated = predict(BIG.profile(c), c.layout, BIG.network, BIG.runtime, bars=False)
    assert simulated.time_s >= universal_bound(BIG)[0] * (1 - 1e-9)
    assert simulated.time_s >= family_bound_s(BIG, c) * (1 - 1e-6)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_closed_form_memory_is_the_simulated_one(data: st.DataObject) -> None:
    c = any_layout(data, BIG)
    if any(len({r.tensor for r in s.replicas}) > 1 for s in c.layout.stages) and len(set(c.layout.microbatches)) > 1:
        return  # which rank of a stage is fullest then depends on both
    simulated = predict(BIG.profile(c), c.layout, BIG.network, BIG.runtime, bars=False)
    for ours, theirs in zip(BIG.estimate(c).memory_bytes, simulated.memory_peak_bytes, strict=True):
        assert ours == pytest.approx(theirs, abs=64)


def test_the_family_bound_is_reached_by_a_single_stage() -> None:
    p = problem(fabric([("fast", 1, 2)]), WORK)
    layout = ProfiledLayout.uniform((6,), device="fast", data=1, tensor=2, microbatch=1, microbatches=8)
    c = Candidate(layout, (LayerChoice(),) * 6, "one")
    simulated = predict(p.profile(c), layout, p.network, p.runtime, bars=False).time_s
    assert family_bound_s(p, c) == pytest.approx(simulated, rel=1e-3)


def test_the_family_bound_counts_degrees_of_single_layers() -> None:
    """Layers that share the samples inside their groups save the groups' collectives: no bound of the whole groups' degree may stand above that."""
    layout = ProfiledLayout.uniform((6,), device="fast", data=1, tensor=2, microbatch=2, microbatches=4)
    p = problem(fabric([("fast", 1, 2)]), WORK)
    whole, shared = (Candidate(layout, (LayerChoice(tensor=t),) * 6, "one") for t in (0, 1))
    times = [predict(p.profile(c), layout, p.network, p.runtime, bars=False).time_s for c in (whole, shared)]
    assert times[1] < times[0] and family_bound_s(p, shared) == pytest.approx(times[1], rel=1e-3)
    assert times[1] < family_bound_s(p, whole) == pytest.approx(times[0], rel=1e-3)


def test_short_memory_makes_the_universal_bound_infinite() -> None:
    p = problem(fabric([("fast", 1, 2)]), WORK, memory=10_000)
    assert universal_bound(p)[0] == float("inf")


def test_the_winner_uses_both_kinds_and_gives_the_fast_one_more() -> None:
    found = search_mixed(problem(TWO, WORK, batch=8), simulated=12, refine=2)
    best = found.best
    work: dict[str, float] = {}
    for s, stage in enumerate(best.candidate.layout.stages):
        first = best.candidate.layout.layers_of(s)[0]
        for d, r in enumerate(stage.replicas):
            share = sum(WORK[first : first + stage.layers]) * best.candidate.layout.microbatches[d]
            work[r.device] = work.get(r.device, 0.0) + share
    assert work["fast"] > work["slow"] > 0
    assert best.prediction is not None and best.time_s == min(j.time_s for j in found.ranked)
    alone = [j.time_s for j in found.ranked if len({r.device for s in j.candidate.layout.stages for r in s.replicas}) == 1]
    assert all(best.time_s < t for t in alone)
    universal, family = found.bounds.gaps(best.time_s)
    assert 0 <= family <= 1 and 0 <= universal <= 1
    assert all(j.why for j in found.ranked[1:]) and all(j.why for j in found.others)


def test_two_zones_exchange_little() -> None:
    """With a narrow trunk the layout that wins moves fewer bytes over it than one that sends every gradient."""
    net = fabric([("fast", 1, 2), ("slow", 1, 2)], trunk_Bps=10**6)
    p = problem(net, WORK, batch=8)
    found = search_mixed(p, simulated=16, refine=1)
    assert {r.zone for s in found.best.candidate.layout.stages for r in s.replicas} <= {"zone0", "zone1"}
    wide = search_mixed(problem(TWO, WORK, batch=8), simulated=16, refine=1)
    assert found.best.time_s >= wide.best.time_s


def test_the_winner_is_no_slower_than_any_even_layout_simulated_one_by_one() -> None:
    p = problem(fabric([("fast", 1, 2)]), WORK, batch=4)
    best = float("inf")
    for choice in p.choices:
        for microbatch in (1, 2):
            for data, tensor in ((1, 2), (2, 1), (1, 1)):
                for first in range(1, len(WORK)) if data * tensor == 1 else (0,):
                    layers = (first, len(WORK) - first) if first else (len(WORK),)
                    if choice.sharding and data == 1:
                        continue
                    layout = ProfiledLayout.uniform(
                        layers, device="fast", data=data, tensor=tensor, microbatch=microbatch, microbatches=4 // data // microbatch
                    )
                    c = Candidate(layout, (choice,) * len(WORK), "all")
                    best = min(best, predict(p.profile(c), layout, p.network, p.runtime, bars=False).time_s)
    assert search_mixed(p).best.time_s <= best * (1 + 1e-9)


def test_every_method_alone_finds_layouts_and_says_so() -> None:
    for method in ("grid", "inter-operator", "mixed"):
        found = search_mixed(problem(TWO, WORK), methods=(method,), simulated=4, refine=0)
        assert found.best.candidate.source == method
    both = search_mixed(problem(TWO, WORK, memory=400_000), methods=("grid", "per-layer"), simulated=6, refine=1)
    assert both.counts["per-layer"] >= 1


def test_less_memory_recomputes_or_shards_and_still_fits() -> None:
    roomy = search_mixed(problem(TWO, WORK), methods=("grid",), simulated=8, refine=1)
    assert roomy.best.prediction is not None
    limit = max(roomy.best.prediction.memory_peak_bytes) - 10_000
    tight = search_mixed(problem(TWO, WORK, memory=limit), simulated=8, refine=1)
    assert tight.best.prediction is not None
    assert max(tight.best.prediction.memory_peak_bytes) <= limit
    assert tight.best.time_s >= roomy.best.time_s or tight.best.candidate.source != "grid"


def test_nothing_fits_names_the_tightest_limit() -> None:
    with pytest.raises(Infeasible, match="no layout fits") as caught:
        search_mixed(problem(TWO, WORK, memory=20_000), simulated=4)
    assert caught.value.data["needed_bytes"] > caught.value.data["limit_bytes"] == 20_000
    assert caught.value.exit_code == 3 and str(caught.value.data["needed_bytes"]) in caught.value.hint


def test_nearest_changes_are_found_by_searching_with_them() -> None:
    roomy = search_mixed(problem(TWO, WORK), methods=("grid",), simulated=4, refine=0)
    limit = min(max(j.prediction.memory_peak_bytes) for j in roomy.ranked if j.prediction is not None) // 8
    tight = replace(problem(TWO, WORK, memory=limit), choices=tuple(c for c in uniform_choices() if c.sharding == 0))
    with pytest.raises(Infeasible) as caught:
        search_mixed(tight, methods=("grid",), simulated=4, refine=0)
    better = nearest_feasible(caught.value, tight, Demands(), smaller=lambda: tight, methods=("grid",))
    changes = {c["kind"]: c for c in better.data["changes"]}
    assert "nearest changes: " in better.hint and better.exit_code == 3
    pools = tuple(replace(p, memory_bytes=changes["memory"]["memory_bytes"]) for p in tight.pools)
    assert search_mixed(replace(tight, pools=pools), methods=("grid",), simulated=6, refine=0).best.time_s == changes["memory"]["time_s"]
    for kind in changes:
        assert changes[kind]["layout"] and changes[kind]["time_s"] > 0
    unwell = Infeasible("nothing", hint="none")
    assert nearest_feasible(unwell, replace(tight, pools=()), Demands()) is unwell


def test_more_servers_reach_a_throughput_and_one_fewer_does_not() -> None:
    p = problem(TWO, WORK)
    best = search_mixed(p, methods=("grid",), simulated=6, refine=0).best
    rate = 1.3 * p.global_batch / best.time_s
    wanted = Demands(samples_per_s=rate)
    with pytest.raises(Infeasible) as caught:
        search_mixed(p, wanted, methods=("grid",), simulated=6, refine=0)
    better = nearest_feasible(caught.value, p, wanted, methods=("grid",))
    found = [c for c in better.data.get("changes", ()) if c["kind"] == "servers"]
    for c in found:
        assert p.global_batch / c["time_s"] >= rate
        assert c["devices"] > sum(q.kind.devices for q in p.pools)


def test_budget_and_throughput() -> None:
    prices = {"fast": 3600.0, "slow": 360.0}
    p = problem(TWO, WORK)
    free = search_mixed(p, Demands(price_per_hour=prices), methods=("grid", "mixed"), simulated=10, refine=0)
    cheap = search_mixed(p, Demands(objective="cost", price_per_hour=prices), methods=("grid", "mixed"), simulated=10, refine=0)
    cost = Demands(price_per_hour=prices).cost
    assert cost(cheap.best.candidate, cheap.best.time_s) < cost(free.best.candidate, free.best.time_s)
    least = cost(cheap.best.candidate, cheap.best.time_s)
    with pytest.raises(Infeasible, match="a step costs") as caught:
        search_mixed(p, Demands(price_per_hour=prices, budget=least / 2), methods=("grid", "mixed"), simulated=10, refine=0)
    assert "budget of" in caught.value.hint
    with pytest.raises(Infeasible, match="samples/s, at least") as caught:
        search_mixed(p, Demands(samples_per_s=1e9), methods=("grid",), simulated=4, refine=0)
    assert "throughput" in caught.value.hint
    saving = search_mixed(p, Demands(objective="energy", watts={"fast": 700, "slow": 1}), methods=("grid",), simulated=10, refine=0)
    assert {r.device for s in saving.best.candidate.layout.stages for r in s.replicas} == {"slow"}


def test_refusals() -> None:
    p = problem(TWO, WORK)
    with pytest.raises(UsageError, match="no price of fast, slow"):
        search_mixed(p, Demands(objective="cost"))
    with pytest.raises(UsageError, match="no power of slow"):
        search_mixed(p, Demands(objective="energy", watts={"fast": 1.0}))
    with pytest.raises(UsageError, match="not >= 0"):
        search_mixed(p, Demands(price_per_hour={"fast": -1.0, "slow": 1.0}))
    with pytest.raises(UsageError, match="no method"):
        search_mixed(p, methods=("guess",))
    with pytest.raises(Infeasible, match="divides the global batch"):
        search_mixed(problem(TWO, WORK, batch=7, microbatches=(2,)))


# ---- the table ---------------------------------------------------------------------------------------------------------
def one_entry(choice: LayerChoice, *, replicas: int = 4, entry: Entry = Entry("fast", 2, 2)) -> tuple[float, float, float]:
    t: LayerTable = table(TWO, WORK)
    a = {name: float(column[1]) for name, column in t.priced(entry, choice, replicas).items()}
    return a["forward_s"] + a["backward_s"], a["state_bytes"], a["kept_bytes"]


def test_levels_and_recomputation_move_bytes_and_time() -> None:
    plain, state, kept = one_entry(LayerChoice())
    for level, share in ((1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)):
        _, sharded, _ = one_entry(LayerChoice("none", level))
        assert sharded == pytest.approx(state * share / 18)
    full = one_entry(LayerChoice("full"))
    assert full[0] > plain and full[2] == pytest.approx(0.1 * kept)
    overlapped = table(TWO, WORK).priced(Entry("fast", 1, 1), LayerChoice("none", 3), 4)
    blocking = replace(table(TWO, WORK), sharding_messages="blocking").priced(Entry("fast", 1, 1), LayerChoice("none", 3), 4)
    assert all((blocking[way] > overlapped[way]).all() for way in ("forward_s", "backward_s"))


@pytest.mark.parametrize("choices", [(LayerChoice("full", 3),) * 6, tuple(LayerChoice(RECOMPUTE[i % 3], i % 4) for i in range(6))])
def test_a_profile_says_what_the_table_does(choices: tuple[LayerChoice, ...]) -> None:
    t, entry = table(TWO, WORK, microbatches=(2,)), Entry("fast", 2, 2)
    p = t.profile([entry], choices, 4)
    for layer, choice in enumerate(choices):
        a = {name: float(column[layer]) for name, column in t.priced(entry, choice, 4).items()}
        size = p.sizes[2][layer]
        assert p.times[entry][layer] == (a["forward_s"], a["backward_s"], a["update_s"], a["weights_s"])
        assert size.parameters * t.state.message == pytest.approx(a["wire_bytes"]) and size.saved_values * 2 == pytest.approx(a["kept_bytes"])
        assert size.output_values * 2 == pytest.approx(a["output_bytes"])
        assert (size.state_bytes, size.working_bytes, size.left_values * 2) == (a["state_bytes"], a["working_bytes"], a["left_bytes"])


def test_a_smaller_tensor_degree_shares_the_samples() -> None:
    t = table(TWO, WORK)
    inner = t.priced(Entry("fast", 2, 2), LayerChoice("none", 0, 1), 1)
    alone = t.priced(Entry("fast", 1, 1), LayerChoice(), 1)
    assert inner["forward_s"][1] == alone["forward_s"][1] and inner["update_s"][1] > alone["update_s"][1]
    assert inner["state_bytes"][1] == 18 * 5000
    with pytest.raises(UsageError, match="cannot be shared"):
        t.priced(Entry("fast", 1, 2), LayerChoice("none", 0, 1), 1)


def test_table_refusals() -> None:
    t = table(TWO, WORK)
    with pytest.raises(ProfileEntryMissing, match="lacks"):
        t.row(Entry("fast", 7, 1))
    with pytest.raises(UsageError, match="choices for"):
        t.profile([Entry("fast", 1, 1)], [LayerChoice()], 1)
    with pytest.raises(UsageError, match="layers where the table has"):
        replace(t, names=("a",))
    with pytest.raises(UsageError, match="no rate outside"):
        replace(t, outside_Bps={}).priced(Entry("fast", 1, 1), LayerChoice("none", 3), 4)




@pytest.mark.parametrize(("demands", "option"), [(Demands(budget=-1.0), "--budget"), (Demands(samples_per_s=float("nan")), "--min-throughput")])
def test_demands_below_zero_are_refused(demands: Demands, option: str) -> None:
    with pytest.raises(UsageError, match="is not >= 0") as found:
        demands.require(["a100"])
    assert found.value.where == option


def test_an_interrupt_gives_the_best_of_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, done = search_mixed(BIG, methods=("grid",)), [0]

    def counted(*args: object, **options: object) -> object:
        done[0] += 1
        assert done[0] != 3 or interrupt()
        return predict(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "predict", counted)
    found = search_mixed(BIG, methods=("grid",))
    assert whole.cut is None and done[0] == 3 and found.cut is not None and found.cut.interrupted
    assert 1 <= len(found.ranked) <= 3 and found.best.time_s == min(j.time_s for j in found.ranked)
