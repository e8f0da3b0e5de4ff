"""Traffic plans under unmodified DDP on real processes, against DDP alone and against serial references."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from processes import RankPool
from torch import nn
from traffic_rig import inputs, killed, make_net, profile_of, refused, train

from meshwright.drive.traffic import plan_traffic

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


def plan_of(codec, strategy="layer-wise", ranks=2, grouped=None):
    plan = plan_traffic(profile_of(make_net(), ranks, *dict.fromkeys(("none", codec))), strategy=strategy, codecs=[codec])
    if grouped is None:
        return plan
    groups = [msgspec.structs.replace(plan.groups[0], first=a, last=b) for a, b in grouped]
    return msgspec.structs.replace(plan, groups=tuple(groups))


THREE = ((0, 2), (2, 3), (3, 7))  # across DDP's buckets and against parameter order


@pytest.mark.parametrize(
    "more", [{"view": True}, {"micro": 3}, {"spare": "none"}, {"spare": "some", "micro": 2}], ids="-".join
)  # fmt: skip
def test_without_compression_two_ranks_train_as_ddp_does_bit_for_bit(pool, tmp_path, more):
    plain = pool.run(train, 2, 2, str(tmp_path / "a"), None, 3, more)
    ours = pool.run(train, 2, 2, str(tmp_path / "b"), plan_of("none", grouped=THREE), 3, more)
    for (expected, _, _), (found, _, spans) in zip(plain, ours, strict=True):
        assert spans == 3
        assert all(torch.equal(a[k], b[k]) for a, b in zip(expected, found, strict=True) for k in a)


@pytest.mark.parametrize("grouped", [THREE, ((0, 7),), tuple((i, i + 1) for i in range(7))])
def test_topk_with_error_feedback_equals_a_serial_run(pool, store, grouped):
    plan = plan_of("topk:density=0.2", grouped=grouped)
    found = pool.run(train, 2, 2, store, plan, 4)
    net, residual = make_net(), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    named = dict(net.named_parameters())
    for step in range(4):
        grads = []
        for rank in range(2):
            net.zero_grad()
            x, y = inputs(rank, step)
            nn.functional.mse_loss(net(x, True), y).backward()
            grads.append({n: p.grad.clone() for n, p in named.items()})
        for first, last in grouped:
            names = [t.name for t in plan.profile.tensors[first:last]]
            total = None
            for rank in range(2):
                x = residual.get((rank, first), 0) + torch.cat([grads[rank][n].flatten() for n in names])
                kept = torch.zeros_like(x)
                chosen = x.abs().argsort(descending=True, stable=True)[: max(1, int(0.2 * x.numel()))]
                kept[chosen] = x[chosen]
                residual[rank, first] = x - kept
                total = kept if total is None else total + kept
            for n, piece in zip(names, (total / 2).split([named[n].numel() for n in names]), strict=True):
                named[n].grad = piece.view(named[n].shape).clone()
        optimizer.step()
        for weights, _, _ in found:
            assert all(torch.equal(weights[step][k], v) for k, v in net.state_dict().items())
    for rank, (_, state, _) in enumerate(found):
        for first, last in grouped:
            assert torch.equal(state[f"{grouped.index((first, last))}/residual"], residual[rank, first])


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(pool, tmp_path):
    plan = plan_of("topk:density=0.1", grouped=THREE)
    whole = pool.run(train, 2, 2, str(tmp_path / "a"), plan, 4)
    for rank, (weights, _, _) in enumerate(whole):
        assert len(weights) == 4 and rank < 2
    half = pool.run(train, 2, 2, str(tmp_path / "b"), plan, 2)
    again = pool.run(resumed, 2, 2, str(tmp_path / "c"), plan, [(w[-1], s, 2) for w, s, _ in half])
    for (weights, state, _), (more, after, _) in zip(whole, again, strict=True):
        assert all(torch.equal(weights[-1][k], more[-1][k]) for k in weights[-1])
        assert json.loads(after["meshwright"])["step"] == json.loads(state["meshwright"])["step"] == 4


def resumed(rank, group, world, store, plan, resume):
    return train(rank, group, world, store, plan, 4, resume=resume[rank])


def test_what_cannot_be_right_is_refused_on_every_rank(pool, tmp_path):
    good, other = plan_of("topk:density=0.1"), plan_of("topk:density=0.2")
    cases = {"plan-mismatch": [good, other], "not-finite": [good, good], "unsupported": [good, good]}
    for code, plans in cases.items():
        case = {"not-finite": "nan", "unsupported": "twice"}.get(code, "")
        for met, message, data in pool.run(refused, 2, 2, str(tmp_path / code), plans, case):
            assert met == code, message
            assert data.get("ranks", [1]) == [1]
    wrong = [
        ("for 3 ranks", plan_of("none", ranks=3)),
        ("no parameter", msgspec.structs.replace(good, profile=_renamed(good.profile))),
        ("has shape", msgspec.structs.replace(good, profile=_reshaped(good.profile))),
    ]
    for i, (text, plan) in enumerate(wrong):
        for code, message, _ in pool.run(refused, 2, 2, str(tmp_path / f"w{i}"), [plan, plan], ""):
            assert code == "plan-mismatch" and text in message


@pytest.mark.parametrize("codec", ["none", "fp16", "topk:density=0.1", "qsgd", "fp8", "efsign", "powersgd:rank=1", "threshold", "dgc"])
def test_a_gradient_that_one_rank_refuses_is_refused_by_all_at_once(pool, tmp_path, codec):
    plan = plan_of(codec, grouped=THREE)
    (other, said, _), (own, why, data) = pool.run(refused, 2, 2, str(tmp_path / "store"), [plan, plan], "nan on 1")
    assert other == own == "not-finite", (said, why)
    assert "element" in data and "element" in why and ("another rank" in said or "rank 1" in said)


def _renamed(profile):
    first, *others = profile.tensors
    return msgspec.structs.replace(profile, tensors=(msgspec.structs.replace(first, name="foreign"), *others))


def _reshaped(profile):
    first, *others = profile.tensors
    return msgspec.structs.replace(profile, tensors=(msgspec.structs.replace(first, shape=(*first.shape, 2)), *others))


def test_a_rank_that_dies_before_sending_is_told_to_the_others_and_nothing_is_lost(store, tmp_path):
    plan = plan_of("topk:density=0.1", ranks=3, strategy="one-group")
    pool = RankPool(3)
    try:
        with pytest.raises(EOFError):
            pool.run(killed, 3, 3, store, plan, str(tmp_path))
        pool.pipes[2].poll(30)
    finally:
        pool.close()
    for rank in (0, 2):
        met = json.loads((tmp_path / f"{rank}.json").read_text())
        assert met["code"] == "group-failed"
        assert met["data"]["step"] == 1 and met["data"]["rank"] == rank and met["data"]["kind"] == "closed"
        assert met["wrong"] < 1e-6  # the step's gradient is in the residual, whole
