"""Data, optimizers, checkpoints, blame and the dry run, without processes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch
from rig import make_plan

from meshwright.capture.resolve import build_model
from meshwright.errors import FormatError, MissingExtra, RankDied, RankFailed, RunTimeout, UnknownName, UsageError
from meshwright.run.checkpoint.checkpoint import commit_index, find_checkpoint, keep_latest, load_rank, make_index, save_rank
from meshwright.run.checkpoint.index import checkpoint_folder
from meshwright.run.executor.memory import StagingPool
from meshwright.run.launch.dry_run import dry_run
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.run_folder import read_run
from meshwright.run.launch.train_run import train_run
from meshwright.run.machine.process import FailureReport
from meshwright.run.ranks.blame import first_cause, timeout_error, typed
from meshwright.run.steps.forward_graph import TensorInfo
from meshwright.run.steps.storage_peak import peak_of
from meshwright.run.train.data import Batches, ByteWindows, Synthetic, open_data, source_files
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.segments import RankModule, random_seed
from meshwright.run.train.sharded_state import ParameterShard

TOKENS = (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))


# ---- data --------------------------------------------------------------------------------------------------------------
def test_windows_visit_every_place_once_before_any_repeats():
    data = ByteWindows(bytes(range(100)), 7)
    starts = [int(data.sample(i)[0][0]) for i in range(93)]
    assert sorted(starts) == list(range(93))
    inputs, targets = data.sample(5)
    assert torch.equal(inputs[1:], targets[:-1]) and inputs.dtype == torch.int64


def test_every_layout_reads_the_same_samples():
    seen = {}
    for degrees, microbatch in (((4, 1, 1), 2), ((2, 1, 2), 1), ((1, 1, 1), 8)):
        layout = make_plan(degrees, microbatch=microbatch).layout
        batches = Batches(Synthetic(TOKENS, 3), layout, [TensorInfo((microbatch, 8), "int64")] * 2, torch.device("cpu"))
        rows = [batches.microbatch(4, d, m)[0] for d in range(layout.data) for m in range(layout.microbatches)]
        seen[degrees] = torch.cat(rows)
    first = next(iter(seen.values()))
    assert len(first) == 8 and all(torch.equal(first, x) for x in seen.values())


@pytest.mark.parametrize("model", ["examples/gpt.py:tiny", "tests/run/tensor_models.py:odd_tied"])
def test_synthetic_samples_do_not_depend_on_the_micro_batch(model):
    """Integers are drawn up to the largest in the example: of the model function's own inputs, not of those cut to the micro-batch."""
    made = [open_data("synthetic", build_model(model, device="cpu", batch_size=b).examples, 0) for b in (1, 3, 8)]
    for i in range(4):
        assert all(torch.equal(x, y) for other in made[1:] for x, y in zip(made[0].sample(i), other.sample(i), strict=True))


def test_python_source_is_text_and_deterministic():
    a, b = open_data("python-source", TOKENS, 0), open_data("python-source", TOKENS, 0)
    assert torch.equal(a.sample(123)[0], b.sample(123)[0])
    assert len(a.text) > 1_000_000
    assert 0.02 < (a.text == ord("e")).float().mean() < 0.2  # English and Python, not noise


def test_python_source_is_read_in_sorted_order_without_entering_what_is_left_out(tmp_path):
    for name in ("b.py", "a-b.py", "a/b.py", "a/c.txt", "a/tests/d.py", "a.b/site-packages.py", "site-packages/x/y.py", "a/test/e.py", "z/a/.f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    walked = [p for p in sorted(tmp_path.rglob("*.py")) if not left_out & set(p.relative_to(tmp_path).parts[:-1])]
    assert source_files(tmp_path) == walked and len(walked) == 5


def test_data_errors(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(UsageError, match="windows of 8 need more"):
        open_data(str(tmp_path / "short.txt"), TOKENS, 0)
    with pytest.raises(UsageError, match="no data 'nonsense'"):
        open_data("nonsense", TOKENS, 0)
    with pytest.raises(UsageError, match="text gives"):
        open_data("python-source", (torch.zeros(2, 3, 4), torch.zeros(2, 1)), 0)
    (tmp_path / "own.py").write_text("def empty():\n    return []\ndef three():\n    return [(1, 2)] * 3\n")
    with pytest.raises(UsageError, match="empty"):
        open_data(f"{tmp_path}/own.py:empty", TOKENS, 0)
    layout = make_plan((1, 1, 1), microbatch=2).layout
    with pytest.raises(UsageError, match="the model takes 3"):
        data = open_data(f"{tmp_path}/own.py:three", TOKENS, 0)
        Batches(data, layout, [TensorInfo((2,), "int64")] * 3, torch.device("cpu")).microbatch(0, 0, 0)


def test_seeds_depend_on_every_coordinate():
    seeds = {random_seed(s, step, mb, key) for s in (0, 1) for step in (0, 1) for mb in (0, 1) for key in ("s0.0", "s0.1")}
    assert len(seeds) == 16 and all(0 <= s < 1 << 63 for s in seeds)


# ---- optimizers --------------------------------------------------------------------------------------------------------
def test_optimizers_by_name(tmp_path):
    p = torch.nn.Parameter(torch.ones(2))
    assert isinstance(make_optimizer("sgd", [("p", p)], 0.1), torch.optim.SGD)
    assert make_optimizer("adamw", [("p", p)], 0.1).param_groups[0]["lr"] == 0.1
    with pytest.raises(UnknownName, match="no optimizer 'lion'"):
        make_optimizer("lion", [("p", p)], 0.1)
    (tmp_path / "mine.py").write_text(
        "import torch\ndef f(named, lr):\n    return torch.optim.Adagrad([p for _, p in named], lr)\ndef g(named, lr):\n    return 3\n"
    )
    assert isinstance(make_optimizer(f"{tmp_path}/mine.py:f", [("p", p)], 0.1), torch.optim.Adagrad)
    with pytest.raises(UsageError, match="returned a int"):
        make_optimizer(f"{tmp_path}/mine.py:g", [("p", p)], 0.1)


# ---- checkpoints -------------------------------------------------------------------------------------------------------
def small_rank(value: float):
    p = torch.nn.Parameter(torch.full((3, 2), value))
    flat = torch.ones(6)
    p.grad = flat.view(3, 2)
    module = RankModule({}, {"w": ParameterShard("w", p, (3, 2), gradient="gradients")}, {"b": torch.full((2,), value)}, {"gradients": flat}, "loss")
    return module, torch.optim.AdamW([p], lr=0.1)


def saved(folder: Path, plan):
    module, optimizer = small_rank(1.0)
    optimizer.step()
    target = checkpoint_folder(folder, 7)
    commit_index(target, make_index(plan, 7, "d", [1.5], [save_rank(target, 0, module, optimizer, plan.layout, [1.5])]))
    return module, optimizer


def test_checkpoints_restore_parameters_buffers_and_optimizer(tmp_path):
    plan = make_plan((1, 1, 1))
    module, optimizer = saved(tmp_path, plan)
    folder, index = find_checkpoint(tmp_path, plan, "d")
    other, its = small_rank(5.0)
    load_rank(folder, index, 0, other, its, plan)
    assert index.step == 7 and index.losses == [1.5]
    assert torch.equal(other.parameters["w"].tensor, module.parameters["w"].tensor) and torch.equal(other.buffers["b"], module.buffers["b"])
    optimizer.step()
    its.step()
    assert torch.equal(other.parameters["w"].tensor, module.parameters["w"].tensor)


def test_the_newest_checkpoint_is_found_and_older_ones_go(tmp_path):
    plan = make_plan((1, 1, 1))
    module, optimizer = small_rank(1.0)
    for step in (9, 100, 20):
        target = checkpoint_folder(tmp_path, step)
        commit_index(target, make_index(plan, step, "d", [1.5], [save_rank(target, 0, module, optimizer, plan.layout, [1.5])]))
    for unfinished in (8, 101):
        checkpoint_folder(tmp_path, unfinished).mkdir()
    folder, index = find_checkpoint(tmp_path, plan, "d")
    assert folder == checkpoint_folder(tmp_path, 100) and index.step == 100
    keep_latest(tmp_path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {checkpoint_folder(tmp_path, k).name for k in (20, 100, 101)}


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    plan = make_plan((1, 1, 1))
    saved(tmp_path, plan)
    folder, index = find_checkpoint(tmp_path, plan, "d")
    with pytest.raises(UsageError, match="another plan"):
        find_checkpoint(tmp_path, make_plan((2, 1, 1), seed=1), "d")
    with pytest.raises(UsageError, match="was trained on 'd'"):
        find_checkpoint(tmp_path, plan, "other")
    path = folder / "rank-000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FormatError, match="digest differs"):
        load_rank(folder, index, 0, *small_rank(0.0), plan)
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        load_rank(folder, index, 0, *small_rank(0.0), plan)
    (folder / "index.json").write_text('{"schema": "meshwright.checkpoint"}')
    with pytest.raises(FormatError, match="missing required field"):
        find_checkpoint(tmp_path, plan, "d")
    (folder / "index.json").unlink()
    with pytest.raises(UsageError, match="no checkpoint"):
        find_checkpoint(tmp_path, plan, "d")


# ---- blame -------------------------------------------------------------------------------------------------------------
def report(rank, kind="transport", peer=-1, at=1.0, **more):
    return FailureReport(rank=rank, kind=kind, training_step=3, program_step=0, peer=peer, error="RuntimeError", message="closed", time_s=at, **more)


def describe(rank, position):
    return f"rank {rank} step {position}"


PLACES = [(3, 4, 2, 3), (3, 5, 0, 3), (3, 4, 1, 3)]  # rank 0 waits for 1, rank 2 for 0


def test_the_dead_rank_is_blamed_not_those_that_left_after_it():
    error = first_cause({1: -9, 0: 70, 2: 70}, {0: report(0, peer=1), 2: report(2, peer=0, at=0.5)}, PLACES, describe, {})
    assert isinstance(error, RankDied) and error.data["rank"] == 1 and error.data["peer"] == 0
    assert "rank 1 was killed by SIGKILL in training step 3; rank 0 was waiting for it" in error.message


def test_an_exception_is_blamed_before_broken_connections():
    error = first_cause({0: 70, 2: 70}, {0: report(0, peer=2, at=0.1), 2: report(2, "exception", at=0.9)}, PLACES, describe, {})
    assert isinstance(error, RankFailed) and error.data["rank"] == 2


def test_a_silent_exit_is_a_death_with_its_last_words():
    error = first_cause({1: 3}, {0: report(0, peer=1)}, PLACES, describe, {1: "Fatal: disk\n[rank1]:[W1 notice"})
    assert isinstance(error, RankDied) and "exit code 3" in error.message and "Fatal: disk" in error.hint


def test_only_broken_connections_name_the_first_and_who_waits_for_nobody():
    error = first_cause({0: 70}, {0: report(0, peer=1), 2: report(2, peer=0, at=2.0)}, PLACES, describe, {})
    assert isinstance(error, RankFailed) and error.data["peer"] == 1 and "rank 0 lost rank 1" in error.message


def test_silence_names_the_stopped_rank_or_the_one_that_waits_for_nobody():
    error = timeout_error(PLACES, describe, 5, [])
    assert isinstance(error, RunTimeout) and error.data["rank"] == 1 and error.data["peer"] == 0
    assert timeout_error(PLACES, describe, 5, [2]).data["rank"] == 2
    circle = [(0, 0, 2, 3), (0, 0, 1, 3)]
    assert "wait for each other" in timeout_error(circle, describe, 5, []).message


def test_a_typed_error_before_training_is_raised_as_itself():
    early = FailureReport(
        rank=0, kind="exception", training_step=-1, program_step=-1, peer=-1, error="UsageError", message="no", code="usage", hint="h"
    )
    assert isinstance(typed(early), UsageError)
    assert typed(msgspec.structs.replace(early, training_step=2)) is None
    assert typed(report(0)) is None


# ---- memory, dry run, requests -------------------------------------------------------------------------------------------
def test_staging_is_as_large_as_what_is_staged_at_once():
    """Messages grow from bucket to bucket: what is too short for the next makes room for it."""
    pool = StagingPool(torch.device("cpu"))
    for numel in (10, 30, 20, 80, 5):
        first, second = pool.take(numel, torch.float32), pool.take(numel, torch.float32)
        assert first.numel() == second.numel() == numel and first.data_ptr() != second.data_ptr()
        pool.give(first)
        pool.give(second)
    assert sorted(n for (n, _), free in pool.free.items() for _ in free) == [80, 80]
    assert pool.take(3, torch.float64).dtype == torch.float64


def test_peak_counts_what_lives_at_once():
    kept = torch.zeros(1000)

    def work():
        a = torch.zeros(5000)
        b = a[:10]  # a view has no storage of its own
        del a
        c = torch.zeros(3000)
        del b
        torch.zeros(6000)
        del c

    assert 4 * 10_000 <= peak_of(work, [kept, kept[:5]]) <= 4 * 10_000 + 1024


def test_dry_run_lists_what_is_needed_and_writes_nothing(tmp_path):
    plan = make_plan((2, 1, 2), microbatch=1)
    document, text = dry_run(plan, RunRequest(out=tmp_path / "run", steps=7, port=4711))
    assert [r["stage"] for r in document["ranks"]] == [0, 0, 1, 1] and all(r["memory_bytes"] > 0 for r in document["ranks"])
    assert document["ports"]["rendezvous"] == 4711 and document["time_s"] > 7 * document["step_s"] > 0
    assert "rank 3: stage 1, replica 1" in text
    assert document["cuda_calls"]["ranks"] == 4 and document["cuda_calls"]["groups"] >= document["cuda_calls"]["messages"] > 0
    assert re.search(r"on CUDA devices: \d+ messages in \d+ groups of calls, and by NCCL's rules all of them end", text)
    assert list(tmp_path.iterdir()) == []


def test_requests_that_make_no_sense(tmp_path):
    plan = make_plan((1, 1, 1))
    for wrong, why in (({"steps": 0}, "at least 1"), ({"timeout_s": 0}, "positive"), ({"device": "tpu"}, "unknown device")):
        with pytest.raises(UsageError, match=why):
            train_run(plan, RunRequest(out=tmp_path / "run", **wrong))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a folder"):
        train_run(plan, RunRequest(out=tmp_path / "file"))
    with pytest.raises(UsageError, match=r"no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(FormatError):
        read_run(tmp_path)
    assert MissingExtra("torch", extra="torch", needed_for="training").exit_code == 2
