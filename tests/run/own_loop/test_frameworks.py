"""Plans under other people's frameworks, with the real packages: their own step alone, ours on two ranks, and a resumed run of it.

They run in the interpreter that MESHWRIGHT_TEST_PEERS names, or in this one where it has the packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo_loops

import meshwright as mw
from meshwright.errors import MissingExtra

PACKAGES = ("transformers", "accelerate", "lightning")
PYTHON = os.environ.get("MESHWRIGHT_TEST_PEERS") or (sys.executable if all(map(importlib.util.find_spec, PACKAGES)) else "")
SCRIPT = str(Path(__file__).with_name("zoo_loops.py"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mw.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
STEPS = 5
peers = pytest.mark.skipif(not PYTHON, reason=f"no interpreter with {' and '.join(PACKAGES)}: name one with MESHWRIGHT_TEST_PEERS")


def run(which: str, folder: Path, *, ranks: int = 0, resume: bool = False, script: str = SCRIPT) -> tuple[list[float], dict[str, torch.Tensor]]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [PYTHON, *launcher, script, which, str(folder), str(STEPS), "resume" if resume else "fresh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    if which == "refused":
        return [], json.loads((folder / "refused.json").read_text())
    return json.loads((folder / "losses.json").read_text()), torch.load(folder / "state.pt", weights_only=True)


@peers
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("which", "degrees", "resumes"),
    [
        ("trainer", {"data": 2, "zero": 2}, True), ("best", {"pipeline": 2, "data": 1}, False), ("accelerate", {"data": 2}, True),
        ("lightning", {"data": 2, "zero": 3}, True),
    ],
    ids=["trainer-zero2", "trainer-pp2-best", "accelerate-dp2", "lightning-zero3"],
)  # fmt: skip
def test_two_ranks_train_what_the_framework_trains_alone(which, degrees, resumes, tmp_path):
    alone, planned = tmp_path / "alone", tmp_path / "planned"
    alone.mkdir()
    planned.mkdir()
    if which == "lightning":  # the module itself is Lightning's
        code = f"import zoo_loops, meshwright as mw; mw.write_plan({str(planned / 'plan.json')!r}, zoo_loops.lightning_plan(2, **{degrees}))"
        subprocess.run([PYTHON, "-c", code], check=True, timeout=250, cwd=Path(__file__).parent, env=ENVIRONMENT)
    else:
        mw.write_plan(planned / "plan.json", zoo_loops.plan_of(2, **degrees))
    losses, state = run(which, alone)
    found, weights = run(which, planned, ranks=2)
    assert found == pytest.approx(losses, rel=1e-5)
    assert set(weights) == set(state) and all(torch.allclose(weights[n], x, rtol=1e-4, atol=1e-6) for n, x in state.items())
    if resumes:
        again, same = run(which, planned, ranks=2, resume=True)
        if which == "lightning":  # goes on with the epoch's first batch, with our strategy as with its own
            expected = run(which, alone, resume=True)[0]
            assert again == pytest.approx(expected, rel=1e-5) and len(again) == STEPS - 3
        else:
            assert again[-2:] == found[-2:] and all(torch.equal(same[n], x) for n, x in weights.items())


@peers
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["trainer", "accelerate", "lightning"])
def test_batches_of_changing_length_are_padded_to_the_plans_shapes(which, tmp_path):
    """Beside the framework alone, whose batches are as long as their longest sample."""
    alone, planned = tmp_path / "alone", tmp_path / "planned"
    alone.mkdir()
    planned.mkdir()
    script = str(Path(SCRIPT).with_name("pad_loops.py"))
    code = f"import pad_loops, meshwright as mw; mw.write_plan({str(planned / 'plan.json')!r}, pad_loops.plan_for({which!r}, 2, data=2))"
    subprocess.run([PYTHON, "-c", code], check=True, timeout=250, cwd=Path(__file__).parent, env=ENVIRONMENT)
    losses, state = run(which, alone, script=script)
    found, weights = run(which, planned, ranks=2, script=script)
    assert len(found) >= STEPS and found[:STEPS] == pytest.approx(losses[:STEPS], rel=1e-5)
    assert set(weights) == set(state) and all(torch.allclose(weights[n], x, rtol=1e-4, atol=1e-6) for n, x in state.items())


@peers
@pytest.mark.real
@pytest.mark.timeout(300)
def test_arguments_that_would_train_something_else_are_refused(tmp_path):
    found = run("refused", tmp_path)[1]
    assert set(found) == {
        "gradient_accumulation_steps", "max_grad_norm", "bf16", "per_device_train_batch_size", "mixed_precision", "accumulation", "eval_dataset",
        "batch_idx", "self.global_step", "self.current_epoch",
    }  # fmt: skip
    assert found.pop("eval_dataset").startswith("unsupported: ")
    for name in ("batch_idx", "self.global_step", "self.current_epoch"):
        assert found.pop(name).startswith(f"unsupported: LightningModule.training_step: training_step reads {name}, which changes from step to step")
    assert all(text.startswith("usage: ") for text in found.values())
    assert "set it to 0.05" in found["max_grad_norm"] and "mixed_precision='bf16'" in found["mixed_precision"]


def test_a_module_that_says_that_it_returns_its_loss_is_planned_so_on_a_tuple():
    """As `TrainingStep` says, whose batches are mostly (inputs, target): the target was kept from it."""

    class Own(zoo_loops.Net):
        returns_loss = True

        def forward(self, features, labels):
            return super().forward(features, labels)["loss"]

    batch = zoo_loops.collate(zoo_loops.dataset()[:8])
    plan = mw.plan(Own(), (batch["features"], batch["labels"]), fabric="laptop:1", tensor=1, pipeline=1)
    assert plan.job["training"]["loss"] == "output"


@pytest.mark.parametrize(("name", "package"), [("PlannedTrainer", "transformers"), ("accelerated", "accelerate"), ("PlannedStrategy", "lightning")])
def test_without_the_package_the_extra_is_named(name, package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingExtra, match=package) as caught:
        getattr(mw.torch, name)
    assert f"meshwright[{package}]" in caught.value.hint


TWO_OF_A_CLASS = """
import warnings, torch, lightning.pytorch as lightning, meshwright as mw
class Own(lightning.LightningModule):
    def __init__(self, other=None):
        super().__init__()
        self.net, self.beside = torch.nn.Linear(2, 1), (other,)
    def training_step(self, batch):
        loss = self.net(batch).mean()
        self.log("loss", loss)
        if self.beside[0] is not None:
            print("beside", self.beside[0].global_step)
            print("size", float(loss.detach()) < 1e9)
        return loss
module = Own(Own())
step = mw.torch.TrainingStep(module)
step(torch.ones(3, 2))
assert type(module) is Own and Own.__dict__.keys().isdisjoint({"log", "global_step"})
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(step.to("meta").logs_of(torch.ones(3, 2, device="meta")), *(str(x.message) for x in said))
"""


@peers
def test_a_module_is_watched_alone_and_what_cannot_be_known_of_its_logs_is_said():
    done = subprocess.run([PYTHON, "-c", TWO_OF_A_CLASS], capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "beside 0" in done.stdout and "([], ['loss']) what training_step logs of its loss is not known" in done.stdout
