"""Lines of a run's metrics: the mean loss of the ranks that compute it, rates, what is said again after resuming, TensorBoard where it is there."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from rig import TINY, lowered

from meshwright.errors import MissingExtra
from meshwright.run.steps.forward_graph import TensorInfo
from meshwright.run.train.metrics import METRICS, Metrics, last_line, loss_ranks

TOKENS = [TensorInfo((2, 16), "int64")]


def layout(*degrees):
    return lowered(TINY, degrees, microbatch=2, global_batch=8)[0]


def lines(folder):
    path = folder / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_losses_come_from_the_last_stage_of_every_replica(tmp_path):
    lay = layout(2, 1, 2)
    assert loss_ranks(lay) == [2, 3] and loss_ranks(layout(2, 2, 1)) == [0, 2]
    store = dist.HashStore()
    ranks = [Metrics(store, r, lay, TOKENS, tmp_path, 0) for r in range(4)]
    for step in range(3):
        ranks[0].written_s = 0.0  # long ago
        for r in (3, 2, 1, 0):
            ranks[r].step(step, {2: 1.0 + step, 3: 2.0 + step}.get(r), 0.5, learning_rate=0.1)
        assert [x["step"] for x in lines(tmp_path)] == list(range(step)), "the last step waits for the next"
        ranks[3].evaluated(step, 9.0) if step == 1 else None
        ranks[2].evaluated(step, 7.0) if step == 1 else None
        ranks[0].evaluated(step, None) if step == 1 else None
    ranks[0].close()
    assert [x.get("evaluation_loss") for x in lines(tmp_path)] == [None, 8.0, None]
    assert [x["loss"] for x in lines(tmp_path)] == [1.5, 2.5, 3.5]
    assert lines(tmp_path)[0] == {"step": 0, "loss": 1.5, "step_s": 0.5, "samples_per_s": 16.0, "tokens_per_s": 256.0, "learning_rate": 0.1}
    assert store.num_keys() == 0 and last_line(tmp_path)["step"] == 2


def test_short_steps_are_written_several_at_once(tmp_path):
    metrics = Metrics(None, 0, layout(1, 1, 1), TOKENS, tmp_path, 0)
    metrics.step(0, 1.0, 0.001)
    metrics.step(1, 2.0, 0.001)
    assert metrics.waiting and [x["step"] for x in lines(tmp_path)] == [], "the first had nothing to write, the second came too soon"
    metrics.leave()
    assert [x["step"] for x in lines(tmp_path)] == [0, 1], "but nothing is lost"


def test_steps_that_are_run_again_are_said_once(tmp_path):
    lay = layout(1, 1, 1)
    assert last_line(tmp_path) == {}
    first = Metrics(None, 0, lay, [TensorInfo((2, 3), "float32")], tmp_path, 0)
    for step in range(4):
        first.step(step, float("nan") if step == 3 else 1.0, 0.1)
    first.close()
    assert "tokens_per_s" not in lines(tmp_path)[0] and lines(tmp_path)[3]["loss"] == "nan"
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')  # the process was killed
    assert last_line(tmp_path)["step"] == 3
    again = Metrics(None, 0, lay, TOKENS, tmp_path, 2)
    again.step(2, 5.0, 0.1)
    again.close()
    assert [(x["step"], x["loss"]) for x in lines(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 5.0)]
    Metrics(None, 0, lay, TOKENS, tmp_path, 0)
    assert not (tmp_path / METRICS).exists(), "a new run begins anew, and leaves nothing before its first step is over"


def test_a_run_that_fails_leaves_the_steps_of_which_all_is_known(tmp_path):
    lay, store = layout(2, 1, 1), dist.HashStore()
    ranks = [Metrics(store, r, lay, TOKENS, tmp_path, 0) for r in range(2)]
    ranks[0].leave()
    assert not (tmp_path / METRICS).exists()
    for step in range(2):
        ranks[1].step(step, 2.0, 0.1) if step == 0 else None
        ranks[0].step(step, 1.0, 0.1) if step == 0 else ranks[0].waiting.append({"step": 1, "loss": 1.0})
    ranks[0].leave()
    ranks[0].leave()
    assert [(x["step"], x["loss"]) for x in lines(tmp_path)] == [(0, 1.5)], "of the second step the other rank's loss is not known"


def test_tensorboard_is_told_where_it_is_there(tmp_path, monkeypatch):
    lay = layout(1, 1, 1)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match="'tensorboard', which is not installed"):
        Metrics(None, 0, lay, TOKENS, tmp_path, 0, True)
    said = []
    writer = SimpleNamespace(add_scalar=lambda *a: said.append(a), close=lambda: said.append("closed"))
    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = lambda folder, purge_step: said.append((folder, purge_step)) or writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    made = Metrics(None, 0, lay, TOKENS, tmp_path, 0, True)
    made.step(0, 2.0, 1.0)
    made.close()
    assert said[0] == (str(tmp_path / "tensorboard"), 0) and ("loss", 2.0, 0) in said and said[-1] == "closed"
