"""`parallelize` in one process: what is asked of the owner's objects, and what a step does with them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.errors import DifferentTraining, FormatError, PlanMismatch, RankFailed, RunError, Unsupported, UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, features, labels=None):
        out = self.net(features)
        return {"logits": out} if labels is None else {"loss": F.cross_entropy(out, labels), "logits": out}


class Branches(ByName):
    """Cannot be traced: it looks at values."""

    def forward(self, features, labels=None):
        return super().forward(features if features.sum() > 0 else 1.0 * features, labels)


class Checked(ByName):
    """Says what it is given wrong."""

    def forward(self, features, labels=None):
        if labels is not None and labels.max() >= 4:
            raise ValueError("no such class")
        return super().forward(features, labels)


def batch(seed=0, rows=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randint(4, (rows,), generator=generator)


def made(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def doubled(output, given):
    return 2 * F.cross_entropy(output["logits"], given["labels"])


@cache
def plan_of(kind=Net, loss=None, by_name=False):
    x, y = batch()
    given = {"features": x, "labels": y} if by_name else (x, y)
    return mw.plan(made(kind), given, fabric="laptop:1", loss=loss, microbatch=2)


def stepping(kind=Net, optimizer=None, **options):
    model = made(kind)
    own = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
    plan = options.pop("plan", None) or plan_of(kind, **options)
    return model, own, mw.torch.parallelize(model, own, plan)


def plain(kind, steps, loss, optimizer=None):
    model = made(kind)
    own = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
    losses = []
    for i in range(steps):
        own.zero_grad()
        found = loss(model, batch(i))
        found.backward()
        own.step()
        losses.append(found.item())
    return losses, model.state_dict(), own.state_dict()


def cross_entropy(model, given):
    return F.cross_entropy(model(given[0]), given[1])


@pytest.mark.parametrize("optimizer", [None, lambda p: torch.optim.RMSprop(p, lr=1e-3)], ids=["adamw", "rmsprop"])
def test_one_rank_needs_no_world_and_equals_a_plain_loop(optimizer):
    losses, state, kept = plain(Net, 3, cross_entropy, optimizer)
    model, own, step = stepping(optimizer=optimizer)
    assert [float(step(batch(i))) for i in range(3)] == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(model.state_dict()[n], x, rtol=1e-5, atol=1e-6) for n, x in state.items())
    full = step.state_dict(full=True)
    assert list(full) == list(state) and all(torch.equal(full[n], x) for n, x in model.state_dict().items())
    assert step.optimizer_state_dict(full=True)["param_groups"][0]["params"] == kept["param_groups"][0]["params"]
    assert step.steps == 3 and not torch.distributed.is_initialized()
    own.zero_grad()


def test_batches_by_name_and_losses_of_the_owner():
    losses, state, _ = plain(ByName, 2, lambda m, given: m(*given)["loss"])
    model, _, step = stepping(ByName, by_name=True)
    found = [float(step({"features": x, "labels": y, "other": None})) for x, y in map(batch, range(2))]
    assert found == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(model.state_dict()[n], x, atol=1e-6) for n, x in state.items())
    x, y = batch()
    plan = plan_of(ByName, loss=doubled, by_name=True)
    assert float(stepping(ByName, plan=plan)[2]({"features": x, "labels": y})) == pytest.approx(2 * losses[0], rel=1e-6)


def test_a_model_that_cannot_be_traced_runs_as_it_is():
    losses, state, _ = plain(Branches, 2, lambda m, given: m(*given)["loss"])
    with pytest.warns(UserWarning, match="the model is kept whole, so that its loss is not known to be a mean over samples"):
        model, _, step = stepping(Branches, by_name=True)
    x, y = batch(7)
    assert float(step.evaluate({"features": x, "labels": y})) == pytest.approx(float(made(Branches).eval()(x, y)["loss"].detach()), rel=1e-6)
    assert [float(step({"features": x, "labels": y})) for x, y in map(batch, range(2))] == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(model.state_dict()[n], x, atol=1e-6) for n, x in state.items())


def test_the_owner_does_not_update_again():
    model, own, step = stepping()
    step(batch())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="has updated the parameters already") as caught:
        own.step()
    assert "give step all samples of an update at once" in caught.value.hint
    step.optimizer.ignore_calls = True
    own.step()
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())


@pytest.mark.parametrize("scaled", [lambda x: x, lambda x: x / 4, lambda x: 1024.0 * x.to(torch.float32)])
def test_gradients_are_not_accumulated_around_a_step(scaled):
    loss = stepping()[2](batch())
    with pytest.raises(UsageError, match=r"loss.backward: step\(batch\) has computed the gradients") as caught:
        scaled(loss).backward()
    assert "give step all samples of an update at once" in caught.value.hint
    assert all(type(x) is torch.Tensor for x in (copy.deepcopy(loss), loss.detach(), loss + loss, torch.stack([loss, loss])))
    assert repr(loss) == repr(loss.detach()) and not loss.requires_grad


def test_states_are_loaded_whole_or_by_part_and_refused_by_name():
    _, _, step = stepping()
    step(batch())
    full, sharded = step.state_dict(full=True), copy.deepcopy(step.state_dict())
    kept, part = step.optimizer_state_dict(full=True), copy.deepcopy(step.optimizer_state_dict())
    expected = float(step(batch(1)))
    for state, own in ((full, kept), (sharded, part)):
        _, _, other = stepping()
        other.load_state_dict(state)
        other.load_optimizer_state_dict(own)
        assert float(other(batch(1))) == expected
    plain_model = made(seed=5)
    plain_model.load_state_dict(full)
    plain_optimizer = torch.optim.AdamW(plain_model.parameters())
    plain_optimizer.load_state_dict(kept)
    assert plain_optimizer.param_groups[0]["lr"] == 1e-2
    less = {n: x for n, x in full.items() if n != "up.weight"}
    other_shape = full | {"up.bias": torch.zeros(3)}
    for state, text in ((less, "lacks 'up.weight'"), (full | {"x": torch.zeros(1)}, "has 'x'"), (other_shape, r"up.bias is \(3,\)")):
        with pytest.raises(UsageError, match=text):
            other.load_state_dict(state)
    for whose in ({"rank": 1}, {"plan": "0"}):
        with pytest.raises(PlanMismatch, match="the state is a part of"):
            other.load_state_dict(sharded | {"meshwright": sharded["meshwright"] | whose})
        with pytest.raises(PlanMismatch):
            other.load_optimizer_state_dict(part | {"meshwright": part["meshwright"] | whose})
    with pytest.raises(UsageError, match="0 parameter groups"):
        other.load_optimizer_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(UsageError, match="has 1 parameters"):
        other.load_optimizer_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def test_what_a_step_would_leave_out_is_refused():
    plan = plan_of()
    hooked = made()
    hooked.up.weight.register_hook(lambda g: g * 2)
    late = made()
    late.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with torch.device("meta"):
        described = Net()
    cases = [
        (hooked, lambda m: torch.optim.SGD(m.parameters()), Unsupported, r"test_one_rank.py:\d+: .*up.weight. has a hook"),
        (late, lambda m: torch.optim.SGD(m.parameters()), Unsupported, r"test_one_rank.py:\d+: .*has a hook"),
        (described, lambda m: torch.optim.SGD(m.parameters()), UsageError, "meta device"),
        (made(), lambda m: torch.optim.LBFGS(m.parameters()), Unsupported, "evaluates the loss again"),
        (made(), lambda m: torch.optim.SGD(made().parameters()), UsageError, "that the model does not have"),
        (nn.Sequential(nn.Linear(8, 4)), lambda m: torch.optim.SGD(m.parameters()), UsageError, "not the one that was planned"),
        (nn.Sequential(), lambda m: torch.optim.SGD([torch.zeros(1)]), UsageError, "has no parameters"),
        (3, lambda m: torch.optim.SGD([torch.zeros(1)]), UsageError, "a int was given"),
        (made(), lambda m: 3, UsageError, "a int was given"),
    ]
    for model, optimizer, error, text in cases:
        with pytest.raises(error, match=text):
            mw.torch.parallelize(model, optimizer(model), plan)
    model = made()
    with pytest.raises(UsageError, match="the plan is of a collective"):
        mw.torch.parallelize(model, torch.optim.SGD(model.parameters()), replace(plan, kind="collective", layout=None))
    with pytest.raises(FormatError):
        mw.torch.parallelize(model, torch.optim.SGD(model.parameters()), replace(plan, job={}))


def test_parallelize_compares_its_first_step_where_it_is_given_a_batch():
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
    plan = mw.plan(normed, (x, y), fabric="laptop:1", optimizer=optimizer, microbatch=2)
    with pytest.raises(DifferentTraining, match="batch_norm of module '1'") as caught:
        mw.torch.parallelize(normed, optimizer, plan, batch=(x, y))
    assert 'batch_statistics="local"' in caught.value.hint and 'batch_statistics="local"' in caught.value.__notes__[0]
    for more in ({"batch": (x, y), "compare": False}, {}):
        other = copy.deepcopy(normed)
        more |= {"batch_statistics": "local"}
        assert mw.torch.parallelize(other, torch.optim.SGD(other.parameters(), lr=0.1), plan, **more).compared is None
    step = mw.torch.parallelize(normed, optimizer, plan, batch=(x, y), batch_statistics="local")
    assert step.compared["stated"] == ["batch statistics local"] and step.compared["largest_error"] < 1e-9 and step((x, y)) > 0


def test_a_step_is_compared_with_the_owners_objects_before_they_are_taken():
    """Of two ranks, in this process: equal, stated, refused with what to say in Python, and with the hint taken."""
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    for model, make in ((made(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)), (made(), lambda m: torch.optim.Rprop([m.up.weight]))):
        optimizer, before = make(model), copy.deepcopy(model.state_dict())
        plan = mw.plan(model, (x, y), fabric="laptop:2", optimizer=optimizer, data=2, tensor=1, pipeline=1, zero=1)
        report = mw.torch.compare_step(model, optimizer, plan, (x, y))
        assert report.samples == 8 and report.compared[-1] == "parameters after the optimizer" and report.largest_error < 1e-12
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items()) and not optimizer.state
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
    degrees = {"fabric": "laptop:2", "optimizer": optimizer, "data": 2, "tensor": 1, "pipeline": 1}
    plan = mw.plan(normed, (x, y), **degrees)
    with pytest.raises(DifferentTraining, match="batch_norm of module '1'") as caught:
        mw.torch.compare_step(normed, optimizer, plan, (x, y))
    assert 'recipe=Recipe(batch_statistics="global")' in caught.value.hint and "--" not in caught.value.hint
    assert mw.torch.compare_step(normed, optimizer, plan, (x, y), batch_statistics="local").stated == ("batch statistics local",)
    shared = mw.plan(normed, (x, y), **degrees, recipe=mw.Recipe(batch_statistics="global"))
    assert not mw.torch.compare_step(normed, optimizer, shared, (x, y)).stated
    with pytest.raises(UsageError, match=r"a batch of \(8, 7\), \(8,\) was given"):
        mw.torch.compare_step(normed, optimizer, plan, (x[:, :7], y))
    with pytest.raises(UsageError, match="holds no values"):
        mw.torch.compare_step(normed.to("meta"), optimizer, plan, (x, y))
    with pytest.raises(UsageError, match="the plan is of a collective"):
        mw.torch.compare_step(made(), optimizer, replace(plan, kind="collective", layout=None), (x, y))


def test_two_ranks_need_a_world(monkeypatch):
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    plan = mw.plan(made(), batch(), fabric="laptop:2", data=2, tensor=1, pipeline=1, zero=0)
    model = made()
    with pytest.raises(UsageError, match="this process is alone") as caught:
        mw.torch.parallelize(model, torch.optim.SGD(model.parameters()), plan)
    assert "torchrun --nproc-per-node 2" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (batch(rows=3), "has 3 samples, the plan was made for 4 samples"),
        ((batch()[0], batch(rows=3)[1]), r"tensor 1 of the batch is \(3,\)"),
        ((batch()[0][:, :7], batch()[1]), r"tensor 0 of the batch is \(4, 7\) .* the plan was made for \(4, 8\)"),
        ((batch()[0].double(), batch()[1]), "torch.float64"),
        ((batch()[0],), "has 1 tensors"),
        (batch()[0], "is a Tensor, the plan was made for a tuple"),
    ],
    ids=range(6),
)
def test_other_batches_are_refused_before_anything_happens(given, text):
    model, _, step = stepping()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=text):
        step(given)
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())
    step(batch())


def test_a_failed_step_is_named_and_stays_failed():
    _, _, step = stepping()
    x, y = batch()
    with pytest.raises(RankFailed, match="rank 0 failed in training step 0: IndexError"):
        step((x, y + 100))
    with pytest.raises(RunError, match="an earlier step failed: IndexError"):
        step((x, y))


LOOP = """
import json, sys, torch
sys.path.insert(0, {folder!r})
import meshwright as mw
from test_one_rank import batch, made
model = made()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = mw.torch.parallelize(model, optimizer, {plan!r})
losses = [float(step(batch(i))) for i in range(3)]
state = step.state_dict(full=True)
if step.rank == 0:
    torch.save(state, {out!r} + ".pt")
    open({out!r}, "w").write(json.dumps(losses))
torch.distributed.destroy_process_group()
"""


@pytest.mark.real
@pytest.mark.timeout(200)
def test_under_torchrun_with_a_plan_file(tmp_path):
    plan = mw.plan(made(), batch(), fabric="laptop:2", data=2, tensor=1, pipeline=1, zero=2)
    mw.write_plan(tmp_path / "plan.json", plan)
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(folder=str(Path(__file__).parent), plan=str(tmp_path / "plan.json"), out=str(tmp_path / "out.json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=190, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    losses, state, _ = plain(Net, 3, cross_entropy)
    assert json.loads((tmp_path / "out.json").read_text()) == pytest.approx(losses, rel=1e-5)
    found = torch.load(tmp_path / "out.json.pt", weights_only=True)
    assert all(torch.allclose(found[n], x, atol=1e-5) for n, x in state.items())


def test_a_batch_with_which_forward_raises_is_refused_with_the_owners_line():
    """The net is traced, not kept whole; each micro-batch is looked at before the step changes anything."""
    model = made(Checked)
    names = dict(zip(("features", "labels"), batch(), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = mw.plan(model, names, fabric="laptop:1", optimizer=optimizer, microbatch=2)
    step, before = mw.torch.parallelize(model, optimizer, plan), [p.detach().clone() for p in model.parameters()]
    float(step(names))
    after = [p.detach().clone() for p in model.parameters()]
    assert len(plan.layout.segments[0].nodes) > 4 and any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(UsageError, match=r"forward raises for this batch: it checks `if labels is not None and labels\.max") as caught:
        step({**names, "labels": torch.tensor([0, 1, 2, 4])})
    assert caught.value.where.startswith("tests/run/own_loop/test_one_rank.py:")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), after, strict=True))
