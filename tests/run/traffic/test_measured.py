"""Profiles from real steps, and plans that change between steps."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from traffic_rig import inputs, make_net, measured, one_call, planned_while_training, profile_of, replanned

from meshwright.drive.traffic import load_traffic_plan, plan_traffic
from meshwright.run.traffic.agreement import digest

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


def test_a_profile_from_steps_is_the_same_on_all_ranks_and_leaves_training_as_it_was(pool, tmp_path):
    found = pool.run(measured, 2, 2, str(tmp_path / "store"), ["topk:density=0.2", "powersgd:rank=1"])
    (profile, probes, left, gradients, settled), (other, *_, others) = found
    net = make_net()
    assert profile == other and profile.ranks == 2 and not left
    assert {(p.codec, p.groups) for p in probes} >= {("none", 1), ("topk:density=0.2", len(profile.tensors))}
    assert {t.name: t.shape for t in profile.tensors} == {n: tuple(p.shape) for n, p in net.named_parameters()}
    assert [c.codec for c in profile.codecs] == ["none", "topk:density=0.2", "powersgd:rank=1"]
    assert profile.tensors[0].name.startswith("last") and {t.name for t in profile.tensors[-2:]} == {"spare.weight", "spare.bias"}  # unused: last
    assert 0 < profile.tensors[0].ready_ns <= profile.compute_ns and profile.finish_ns > 0 and profile.plain_ns > 0
    assert all(c.evidence == "measured" and c.exchange.times_ns[0] > 0 for c in profile.codecs)
    for rank in range(2):
        x, y = inputs(rank, 0)
        (nn.functional.mse_loss(net(x, False), y) / 2).backward()
    ran, plan, code = settled
    assert plan == others[1] and plan.codecs == ("topk:density=0.2",) and (code, others[2]) == ("usage", "run")
    assert ran.codec == "topk:density=0.2" and ran.measured_ns > 0 and plan.profile != profile  # fitted again with its steps
    for way in gradients:
        assert all(torch.allclose(way[n], p.grad, atol=1e-6) for n, p in net.named_parameters() if p.grad is not None)


def test_a_new_plan_takes_over_what_was_not_sent(pool, tmp_path):
    first, second = (plan_traffic(profile_of(make_net(), 2, "topk:density=0.1", "none"), strategy=s, codecs=["topk:density=0.1"])
                     for s in ("layer-wise", "one-group"))  # fmt: skip
    alien = msgspec.structs.replace(first, profile=msgspec.structs.replace(first.profile, ranks=3))
    dense = plan_traffic(first.profile, strategy="one-group", codecs=["none"])
    for name, (others, code) in {"a": ([first, second], "plan-mismatch"), "b": ([alien, alien], "plan-mismatch"),
                                 "c": ([dense, dense], "plan-mismatch")}.items():  # fmt: skip
        found = pool.run(replanned, 2, 2, str(tmp_path / name), [first, second], others)
        for (before, after), met, weights in found:
            assert met == code
            assert any(v.any() for v in before.values()) and all(torch.equal(before[n], after[n]) for n in before)
            assert all(torch.equal(weights[n], found[0][2][n]) for n in weights)


def test_one_call_measures_plans_and_goes_on_or_fails_everywhere(pool, tmp_path):
    path = tmp_path / "plan.json"
    (leave, planned, gradients), other = pool.run(one_call, 2, 2, str(tmp_path / "a"), str(path))
    assert planned == other[1] == digest(load_traffic_plan(path)) and leave == other[0]
    net = make_net()
    for rank in range(2):
        x, y = inputs(rank, 0)
        (nn.functional.mse_loss(net(x, True), y) / 2).backward()
    assert all(torch.allclose(gradients[n], p.grad, rtol=2e-3, atol=1e-4) for n, p in net.named_parameters())  # half precision at worst
    found = pool.run(one_call, 2, 2, str(tmp_path / "b"), str(tmp_path / "missing" / "plan.json"))
    assert [code for code, _, _ in found] == ["usage", "run"]


def test_a_plan_made_while_training_loses_no_gradient(pool, tmp_path):
    codecs = ["topk:density=0.1", "powersgd:rank=1"]
    (settled, plan, made, off, measured), other = pool.run(planned_while_training, 2, 2, str(tmp_path / "a"), codecs, 14)
    assert settled == made + 1 and 12 <= made <= 14 and plan == other[1]  # a plan that has run already ends it sooner
    assert off < 1e-4 and other[3] < 1e-4 and measured >= 6
    assert pool.run(planned_while_training, 2, 2, str(tmp_path / "b"), codecs, 8) == ["usage", "usage"]
