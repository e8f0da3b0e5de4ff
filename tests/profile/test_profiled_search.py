"""Splits against brute force, the search against all of its layouts simulated, refusals."""

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_cases import network, network_between, network_inside, profile, sailor_memory, sailor_times

from meshwright.cli import main
from meshwright.decide.layout.profiled.predict import in_flight_bytes, predict
from meshwright.decide.layout.profiled.search import balanced_stages, search_layouts
from meshwright.errors import Infeasible, UnknownName, UsageError
from meshwright.profile.layer_profile import Entry, LayerProfile, LayerTime, ProfileEntryMissing
from meshwright.profile.network import ProfiledLayout, TrainingRuntime

RUNTIME = TrainingRuntime(gpus_per_server={"A100": 4})


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_splits_are_the_best_of_all(times, stages):
    p = LayerProfile(model="m", layers=len(times), times={Entry("a", 1, 1): tuple(LayerTime(t, 2 * t, 0) for t in times)})
    if stages > len(times):
        with pytest.raises(UsageError, match="stages for"):
            balanced_stages(p, Entry("a", 1, 1), stages)
        return
    found = balanced_stages(p, Entry("a", 1, 1), stages)
    borders = [(0, *c, len(times)) for c in combinations(range(1, len(times)), stages - 1)]
    best = min(max(sum(times[a:b]) for a, b in pairwise(x)) for x in borders)
    ends = [sum(found[:i]) for i in range(stages + 1)]
    assert sum(found) == len(times) and min(found) >= 1
    assert max(sum(times[a:b]) for a, b in pairwise(ends)) == best


def test_a_light_embedding_lets_the_first_stage_hold_more():
    base = profile(layers=6).times[Entry("A100", 1, 1)]
    p = LayerProfile(model="m", layers=6, times={Entry("A100", 1, 1): (LayerTime(1e-5, 1e-5, 0), *base[1:5], LayerTime(0.002, 0.004, 0))})
    assert balanced_stages(p, Entry("A100", 1, 1), 2) == (4, 2)


def test_the_search_finds_the_fastest_of_all_that_fit():
    p, net = profile(), network()
    judged = search_layouts(p, net, RUNTIME, device="A100", gpus=8, global_batch=16)
    simulated = [j for j in judged if j.prediction is not None]
    every = [predict(p, j.layout, net, RUNTIME, bars=False).time_s for j in judged]
    assert simulated and min(every) == pytest.approx(judged[0].prediction.time_s)
    assert [j.prediction.time_s for j in simulated] == sorted(j.prediction.time_s for j in simulated)
    assert all(j.why for j in judged if j.prediction is None) and all(j.layout.gpus == 8 and j.layout.global_batch == 16 for j in judged)
    few = search_layouts(p, net, RUNTIME, device="A100", gpus=8, global_batch=16, limit=1)
    assert sum(j.prediction is not None for j in few) == 1 and any("not simulated" in j.why for j in few)


def test_memory_refuses_and_names_what_would_fit():
    p, net = profile(), network()
    judged = search_layouts(p, net, RUNTIME, device="A100", gpus=4, global_batch=8)
    needs = sorted(max(in_flight_bytes(p, j.layout, RUNTIME, s, 0) for s in range(len(j.layout.stages))) for j in judged)
    some = search_layouts(p, net, RUNTIME, device="A100", gpus=4, global_batch=8, memory_bytes=needs[len(needs) // 2])
    assert any("needs" in j.why for j in some) and max(some[0].prediction.memory_peak_bytes) <= needs[len(needs) // 2]
    with pytest.raises(Infeasible, match="the smallest of") as caught:
        search_layouts(p, net, RUNTIME, device="A100", gpus=4, global_batch=8, memory_bytes=needs[0] - 1)
    assert caught.value.data["least_bytes"] == needs[0]
    with pytest.raises(Infeasible, match="no measured degree and batch fits"):
        search_layouts(p, net, RUNTIME, device="A100", gpus=7, global_batch=3)
    with pytest.raises(UnknownName, match="'V100'"):
        search_layouts(p, net, RUNTIME, device="V100", gpus=4, global_batch=8)
    with pytest.raises(ProfileEntryMissing):
        balanced_stages(p, Entry("A100", 3, 1), 2)


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {"t.json": sailor_times(), "m.json": sailor_memory(), "i.json": network_inside(), "b.json": network_between()}
    for name, document in files.items():
        (tmp_path / name).write_text(json.dumps(document))
    words = ["profile", "plan", *files, "--gpu", "A100", "--zone", "z", "--gpus", "8", "--global-batch", "16", "--gpus-per-server", "4"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.profile-plan" and document["layouts"][0]["prediction"]["time_s"] > 0
    assert main([*words, "--show", "2"]) == 0
    assert "more (--show)" in capsys.readouterr().out
    assert main([*words, "--memory", "1MiB"]) == 3
    assert "GiB per GPU" in capsys.readouterr().err
    assert main([*words[:-6], "--gpus", "0", "--global-batch", "1"]) == 2
    assert "must be >= 1" in capsys.readouterr().err


def test_uniform_layouts_carry_their_name():
    assert ProfiledLayout.uniform((1,), device="a", name="x").name == "x"
