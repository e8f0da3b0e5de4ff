"""Plans of live models: what the owner gives, in every form; the model stays as it is."""

from __future__ import annotations

import collections
import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.capture.live import LIVE, form_of, live_name, standing, stands_for
from meshwright.capture.live_job import live_again, live_job
from meshwright.capture.resolve import build_model
from meshwright.drive.training.own_model import optimizer_name
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.errors import FormatError, Infeasible, PlanMismatch, UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class ByName(nn.Module):
    """Returns its loss as transformers' classes do."""

    def __init__(self, form="attribute") -> None:
        super().__init__()
        self.net, self.form = Net(), form

    def forward(self, features=None, labels=None):
        out = self.net(features)
        loss = F.cross_entropy(out, labels)
        if self.form == "tuple":
            return loss, out
        return {"loss": loss, "logits": out} if self.form == "mapping" else collections.namedtuple("Output", "logits loss")(out, loss)


def batch(rows=4):
    return torch.randn(rows, 8), torch.randint(4, (rows,))


def own_loss(output, target):
    return F.cross_entropy(output, target)


def planned(model, given, **options):
    return mw.plan(model, given, fabric="laptop:2", **{"data": 2, "tensor": 1, "pipeline": 1, "zero": 0} | options)


@functools.cache
def named_plan():
    return mw.plan("examples/gpt.py:tiny", fabric="laptop:2", global_batch=4, data=2, tensor=1, pipeline=1, zero=0)


def test_a_module_is_planned_as_it_is_named_and_stays_as_it_was(tmp_path):
    torch.manual_seed(0)
    net = Net()
    before = copy.deepcopy(net.state_dict())
    plan = planned(net, batch(), optimizer=torch.optim.AdamW(net.parameters(), lr=0.25))
    assert all(torch.equal(before[k], v) and v.device.type == "cpu" for k, v in net.state_dict().items())
    assert "forward" not in vars(net)
    job = plan.job["training"]
    assert (job["model"], job["loss"], job["optimizer"], job["learning_rate"]) == ("live:Net", "cross-entropy", "adamw", 0.25)
    assert job["global_batch"] == 4 and plan.layout.data == 2
    assert plan.job["batch"] == {"names": [], "single": False, "inputs": [([4, 8], "float32"), ([4], "int64")], "loss": ""}
    mw.check_plan(plan)
    assert mw.simulate_plan(plan).makespan_s == plan.prediction.time_s
    mw.write_plan(tmp_path / "plan.json", plan)
    assert mw.read_plan(tmp_path / "plan.json").job["batch"]["inputs"] == [[[4, 8], "float32"], [[4], "int64"]]


def test_every_form_of_model_gives_the_same_plan():
    torch.manual_seed(0)
    given = batch()
    with torch.device("meta"):
        described = Net()
    plans = [planned(m, given) for m in (Net(), described, Net, lambda: (Net(), None))]
    assert len({p.job["graph_fingerprint"] for p in plans}) == 1
    assert len({tuple(sorted(p.programs)) for p in plans}) == 1
    assert all(p.is_meta for p in described.parameters())


@pytest.mark.parametrize("form", ["attribute", "mapping", "tuple"])
def test_a_dictionary_is_given_by_name_and_the_model_returns_its_loss(form):
    x, y = batch()
    # the target comes last in the row of tensors, however the dictionary has it
    plan = planned(ByName(form), {"labels": y, "features": x} if form == "mapping" else {"features": x, "mask": None, "labels": y})
    assert plan.job["training"]["loss"] == "output" and plan.job["batch"]["names"] == ["features", "labels"]
    assert {"net.up.weight", "net.down.bias"} <= {p for s in plan.layout.stages for p in s.params}


def test_losses_of_the_owner():
    x, y = batch()
    plan = planned(Net(), (x, y), loss=own_loss)
    assert plan.job["training"]["loss"] == "live:loss:own_loss"
    weighted = planned(Net(), (x, y), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="sum"))
    assert {p for s in weighted.layout.stages for p in s.params} == set(dict(Net().named_parameters()))
    named = planned(Net(), {"x": x}, loss=lambda out, given: F.mse_loss(out, given["x"][:, :4]))
    assert named.job["training"]["loss"] == "output" and named.job["batch"]["loss"].startswith("live:loss:")
    single = planned(nn.Sequential(nn.Linear(8, 1), nn.Flatten(0), Mean()), x)
    assert single.job["training"]["loss"] == "output" and single.job["batch"]["single"]


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class SampleBySample(nn.Module):
    """Other calls at every batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return torch.stack([self.net(row) for row in x])


@pytest.mark.parametrize(("asked", "rows"), [({}, 4), ({"microbatch": 2}, 2), ({"data": 1, "pipeline": 2, "microbatch": 4}, 4), ({"data": None}, 4)])
def test_a_loop_over_samples_is_planned_at_the_size_of_its_microbatches(asked, rows):
    model, given = SampleBySample(), batch(8)
    plan = planned(model, given, optimizer="sgd", **asked)
    assert plan.layout.microbatch_size == rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert mw.torch.compare_step(model, optimizer, plan, given).largest_error < 1e-12


class ByValue(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x[:, :4]


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"pipeline": 2}])
def test_the_line_that_keeps_a_model_whole_is_named_where_it_cannot_be_split(degrees):
    line = 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if text.endswith("else x[:, :4]"))
    with pytest.raises(Infeasible, match=f"torch.export refused the module: .*test_own_model.py:{line}: "):
        planned(ByValue(), batch(), **{"data": 1} | degrees)


def test_wishes_take_the_place_of_arguments():
    plan = planned(Net(), batch(), zero=None, wishes=[ShardingWanted(level=2)])
    assert plan.layout.zero_level == 2


def test_a_name_is_planned_as_on_the_command_line():
    plan = named_plan()
    assert plan.job["training"]["model"] == "examples/gpt.py:tiny" and "batch" not in plan.job
    with pytest.raises(UsageError, match="by name brings its example inputs"):
        mw.plan("examples/gpt.py:tiny", fabric="laptop:2")


@pytest.mark.parametrize(
    ("model", "given", "options", "message"),
    [
        (3, batch(), {}, "the model is a int"),
        (lambda: 3, batch(), {}, "made a int"),
        (Net(), None, {}, "the batch is a NoneType"),
        (Net(), {}, {}, "empty"),
        (Net(), (torch.zeros(4, 8), 3), {}, "tensor 1 of the batch is a int"),
        (Net(), (torch.zeros(4, 8), torch.zeros(3)), {}, r"tensor 1 of the batch has shape \(3,\)"),
        (Net(), (torch.zeros(4, 8), torch.zeros(())), {}, "has shape"),
        (Net(), torch.zeros(4, 8), {"loss": "mse"}, "the batch has no target"),
        (Net(), torch.zeros(4, 8), {"loss": own_loss}, "needs a target"),
        (Net(), batch(), {"optimizer": 3}, "the optimizer is a int"),
    ],
    ids=range(10),
)
def test_what_cannot_be_planned_is_said(model, given, options, message):
    with pytest.raises(UsageError, match=message):
        planned(model, given, **options)


def test_a_module_that_cannot_be_copied_is_named():
    net = Net()
    net.lock = __import__("threading").Lock()
    with pytest.raises(UsageError, match="cannot be copied") as caught:
        planned(net, batch())
    assert caught.value.where == "live:Net" and "function that makes" in caught.value.hint


def test_optimizers_are_named_by_what_planning_wants_to_know():
    p = [nn.Parameter(torch.zeros(2))]
    assert optimizer_name(torch.optim.SGD(p, lr=0.5)) == ("sgd", 0.5)
    assert optimizer_name(torch.optim.SGD(p, lr=0.5, momentum=0.9)) == ("adamw", 0.5)
    assert optimizer_name(torch.optim.RAdam)[0] == "adamw"
    assert optimizer_name(torch.optim.LBFGS(p))[0] == "live:LBFGS"
    assert optimizer_name("sgd")[0] == "sgd"


def test_a_live_name_means_something_only_where_it_stands_for_something():
    name = live_name(Net)
    assert name == f"{LIVE}Net" and stands_for("examples/gpt.py:tiny") is None
    with standing({name: Net}):
        assert stands_for(name) is Net
        with standing({name: ByName}):
            assert stands_for(name) is ByName
        assert stands_for(name) is Net
    with pytest.raises(UsageError, match="an object of the program that planned it") as caught:
        build_model(name, device="cpu")
    assert "parallelize" in caught.value.hint


def test_copies_keep_ties_and_values():
    net = Net()
    net.twin = net.up
    net.register_buffer("scale", torch.tensor(3.0))
    live = live_job(net, batch(), None, optimizer="sgd", learning_rate=0.1, global_batch=None, seed=0)
    with standing(live.stands_for):
        made = build_model(live.job.model, device="cpu").module
    assert made.twin.weight is made.up.weight and made.up.weight is not net.up.weight
    assert torch.equal(made.up.weight, net.up.weight) and made.up.weight.data_ptr() != net.up.weight.data_ptr()
    assert float(made.scale) == 3.0
    with torch.device("meta"):
        described = Net()
    live = live_job(described, batch(), None, optimizer="sgd", learning_rate=0.1, global_batch=None, seed=0)
    with standing(live.stands_for), pytest.raises(UsageError, match="on the meta device"):
        build_model(live.job.model, device="cpu")


def test_the_job_comes_back_from_the_plan():
    x, y = batch()
    plan = planned(Net(), (x, y), loss=own_loss)
    again = live_again(Net(), plan.job, None)
    with standing(again.stands_for):
        made = build_model(again.job.model, device="meta")
        assert [tuple(i.shape) for i in made.inputs] == [(4, 8), (4,)] and stands_for("live:loss:own_loss") is own_loss
    other = {**plan.job, "training": {**plan.job["training"], "loss": "live:loss:nobody"}}
    with pytest.raises(PlanMismatch, match="function of the program that planned"):
        live_again(Net(), other, None)
    assert live_again(Net(), other, own_loss).stands_for["live:loss:nobody"] is own_loss
    planned(Net(), (x, y), loss=lambda a, b: F.cross_entropy(a, b))
    twice = planned(Net(), (x, y), loss=lambda a, b: 2 * F.cross_entropy(a, b))
    with pytest.raises(PlanMismatch, match="lambda"):  # two functions of one name: which is not known
        live_again(Net(), twice.job, None)
    by_name = named_plan()
    with pytest.raises(PlanMismatch, match="does not say how batches are given"):
        live_again(Net(), by_name.job, None)
    assert live_again(Net(), by_name.job, None, batch=(x, y)).batch.inputs[0] == ([4, 8], "float32")
    for broken in ({}, {**plan.job, "batch": {"inputs": 3}}, {**plan.job, "batch": {"inputs": [[[4], "float33"]]}}):
        with pytest.raises(FormatError):
            live_again(Net(), broken, own_loss)


def test_batches_have_one_form():
    x, y = batch()
    by_name, pair, single = form_of({"x": x, "y": y, "z": None}), form_of([x, y]), form_of(x)
    assert [t.shape for t in by_name.tensors({"y": y, "x": x})] == [x.shape, y.shape]
    assert single.tensors((x,))[0] is x and form_of((x,)) == single
    for form, given in ((by_name, (x, y)), (by_name, {"x": x}), (by_name, {"x": x, "y": 3}), (pair, x), (pair, {"x": x}), (single, 3)):
        with pytest.raises(UsageError):
            form.tensors(given)
