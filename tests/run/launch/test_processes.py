"""Runs in real processes: same losses as serial, bits after a resume, and one typed error with nothing left behind when something breaks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rig import TINY, make_plan

from meshwright.cli.frame import main
from meshwright.errors import Interrupted, PortInUse, RankDied, RankFailed, RunTimeout, TooFewDevices, UsageError
from meshwright.io.plan.plan import write_plan
from meshwright.job import Training
from meshwright.plan.plan import Prediction
from meshwright.program.calls import inline
from meshwright.program.program import Kind
from meshwright.run.launch.elastic import _ElasticRank
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.run_folder import read_run
from meshwright.run.launch.train_run import train_run
from meshwright.testing.serial import serial_losses
from ports import free_port

FAILING = "tests/run/failing.py"
STEPS = 8  # of the curves that are compared: Adam has moved everything by then
pytestmark = pytest.mark.real


def _workers() -> set[int]:
    """Live workers and ranks (they are in sessions of their own, so they are known by their command line)."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if b"meshwright.run.ranks.worker" in line and state not in ("Z", "X"):
                found.add(int(path.name))
    return found


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path):
    torch.set_num_threads(1)
    before = _workers()
    yield
    deadline = time.monotonic() + 60
    while (left := {p for p in _workers() - before if _belongs_to(p, tmp_path)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not list(tmp_path.rglob(".partial-*"))


def _belongs_to(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def serial():
    return serial_losses(Training(model=TINY, global_batch=8), data="python-source", steps=STEPS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2)], ids=["DP4", "TP2xDP2", "PP2xDP2", "PP4", "TP2xPP2"])
def test_loss_curve_equals_serial(degrees, serial, tmp_path):
    result = train_run(make_plan(degrees), RunRequest(out=tmp_path / "run", steps=STEPS, calibrate=False))
    assert result.document.losses == pytest.approx(serial, rel=1e-5)
    assert result.document.steps == STEPS and result.document.ranks == 4
    ranks = [f"rank-00{r}.json" for r in range(4)]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint", "metrics.jsonl", "modules.json", "plan.json", *ranks, "run.json"]


def test_recordings_cover_every_step_and_costs_are_measured(tmp_path):
    plan = make_plan((2, 1, 1))
    result = train_run(plan, RunRequest(out=tmp_path / "run", steps=3))
    run = read_run(tmp_path / "run", plan)
    program = inline(plan.main, plan.programs).program
    assert len(run.steps) == 3 and run.profiled == (False, True, False)
    for timeline in run.steps:
        spans = timeline.spans
        assert sorted(spans.step.tolist()) == list(range(len(program.steps)))
        assert np.all(spans.end_s >= spans.start_s) and np.all(spans.start_s >= 0) and np.all(spans.end_s <= timeline.makespan_s)
        _respects_the_program(program, spans)
    compute = {program.ops.key(int(op)) for op in program.steps.op[program.steps.kind == Kind.COMPUTE]}
    assert compute <= set(run.cost.table)
    assert all(p.evidence == "measured" and p.time_s > 0 for p in run.cost.table.values())
    assert all(x.rate_Bps > 0 for x in run.fabric.links)
    # Weights, gradients and Adam's two moments are the least that can be alive at once.
    assert all(m > 4 * r.parameters_bytes > 0 for m, r in zip(result.document.memory_peak_bytes, run.recordings, strict=True))
    with pytest.raises(UsageError, match="another plan"):
        read_run(tmp_path / "run", make_plan((1, 1, 2)))
    write_plan(tmp_path / "plan.json", replace(plan, prediction=Prediction(target_fabric="rig", time_s=1.0)))
    assert main(["report", str(tmp_path / "plan.json"), str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(f'id="{part}"' in page for part in ("data-run", "data-target", "source-measured", "run", "modules"))
    assert "<h3>Modules</h3>" in page


def _respects_the_program(program, spans) -> None:
    end = dict(zip(spans.step.tolist(), spans.end_s.tolist(), strict=True))
    start = dict(zip(spans.step.tolist(), spans.start_s.tolist(), strict=True))
    for st in program.iter_steps():
        for before, _ in st.after:
            assert end[before] <= start[st.index] + 2e-7


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path):
    plan = make_plan((1, 2, 1))
    whole = train_run(plan, RunRequest(out=tmp_path / "whole", steps=4, calibrate=False)).document
    train_run(plan, RunRequest(out=tmp_path / "parts", steps=2, calibrate=False))
    resumed = train_run(plan, RunRequest(out=tmp_path / "parts", steps=4, resume=True, calibrate=False)).document
    assert resumed.losses == whole.losses and resumed.first_step == 2
    for rank in range(2):
        a, b = (tmp_path / name / "checkpoint/step-00000004" / f"rank-00{rank}.safetensors" for name in ("whole", "parts"))
        assert a.read_bytes() == b.read_bytes()
    with pytest.raises(UsageError, match="another plan or model"):
        train_run(make_plan((2, 1, 1), seed=1), RunRequest(out=tmp_path / "parts", steps=8, resume=True))
    with pytest.raises(UsageError, match="nothing left"):
        train_run(plan, RunRequest(out=tmp_path / "parts", steps=4, resume=True))
    with pytest.raises(UsageError, match="trained on 'python-source'"):
        train_run(plan, RunRequest(out=tmp_path / "parts", steps=8, resume=True, data="synthetic"))
    with pytest.raises(UsageError, match="no checkpoint"):
        train_run(plan, RunRequest(out=tmp_path / "nothing", steps=8, resume=True))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "then"), [((1, 2, 1), (1, 1, 2)), ((1, 3, 1), (2, 2, 1))], ids=["TP2>PP2", "TP3>TP2xDP2"])
def test_another_layout_resumes_from_the_same_checkpoint(first, then, tmp_path):
    """A tied, unevenly split, dropping model: the second half on other degrees continues the serial run's losses."""
    model = "tests/run/tensor_models.py:odd_tied"
    expected = serial_losses(Training(model=model, global_batch=4), data="synthetic", steps=6)
    plans = [make_plan(degrees, model=model, microbatch=2, global_batch=4) for degrees in (first, then)]
    train_run(plans[0], RunRequest(out=tmp_path / "run", steps=3, calibrate=False, data="synthetic"))
    result = train_run(plans[1], RunRequest(out=tmp_path / "run", steps=6, resume=True, calibrate=False, data="synthetic"))
    assert result.document.first_step == 3
    assert result.document.losses == pytest.approx(expected, rel=1e-9)


def _fails(data: str, tmp_path: Path, error, **options):
    out = tmp_path / "run"
    with pytest.raises(error) as caught:
        train_run(make_plan((2, 1, 1), microbatch=4), RunRequest(out=out, steps=6, data=data, calibrate=False, **options))
    assert not out.exists()
    return caught.value


def test_an_exception_on_one_rank_is_named(tmp_path):
    error = _fails(f"{FAILING}:raises", tmp_path, RankFailed)
    assert "rank 1 failed in training step 2: ValueError: sample 20 is damaged" in error.message
    assert error.data["rank"] == 1 and error.data["step"] == 2
    assert "failing.py" in error.where


def test_a_killed_rank_is_named(tmp_path):
    error = _fails(f"{FAILING}:dies", tmp_path, RankDied)
    assert "rank 1 was killed by SIGKILL in training step 2" in error.message
    assert error.data["rank"] == 1 and error.data["step"] == 2 and error.data["peer"] in (0, -1)
    assert error.exit_code == 1


def test_a_stopped_rank_is_named_after_the_timeout(tmp_path):
    error = _fails(f"{FAILING}:stops", tmp_path, RunTimeout, timeout_s=20.0)
    assert "rank 1 is stopped" in error.message
    assert error.data["rank"] == 1


def test_wrong_data_is_the_users_error(tmp_path):
    error = _fails(f"{FAILING}:wrong_shape", tmp_path, UsageError)
    assert "tensor 0 of sample 0 is (5,) torch.int64, the model takes (32,)" in error.message


def test_interrupt_ends_all_ranks(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.setenv("MESHWRIGHT_TEST_MARK", str(mark))
    ended: list[float] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        ended.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        train_run(make_plan((2, 1, 1), microbatch=4), RunRequest(out=tmp_path / "run", steps=500, data=f"{FAILING}:slow", calibrate=False))
    thread.join()
    assert caught.value.exit_code == 130
    assert not (tmp_path / "run").exists()


def test_port_in_use_and_too_few_devices(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse, match="is in use"):
            train_run(make_plan((2, 1, 1)), RunRequest(out=tmp_path / "run", port=taken.getsockname()[1]))
    with pytest.raises(TooFewDevices, match="needs 2 ranks, 1 are allowed"):
        train_run(make_plan((2, 1, 1)), RunRequest(out=tmp_path / "run", max_ranks=1))
    if not torch.cuda.is_available():
        with pytest.raises(TooFewDevices, match="CUDA devices"):
            train_run(make_plan((2, 1, 1)), RunRequest(out=tmp_path / "run", device="cuda"))
    assert not (tmp_path / "run").exists()


# ---- torchrun ----------------------------------------------------------------------------------------------------------
def _torchrun(tmp_path: Path, agents: int, per_agent: int, plan_file: Path, *words: str) -> list[subprocess.CompletedProcess[str]]:
    program = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(agents), "--nproc-per-node", str(per_agent)]
    program += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    started = []
    for node in range(agents):
        command = [*program, "--node-rank", str(node), "-m", "meshwright", "train", "run", str(plan_file), "--out", str(tmp_path / "run"), *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True))
    done = []
    for p in started:
        try:
            out, err = p.communicate(timeout=280)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the agent's workers are of its group and may outlive it
                os.killpg(p.pid, signal.SIGKILL)
        done.append(subprocess.CompletedProcess(p.args, p.returncode, out, err))
    return done


@pytest.mark.sample(1)
@pytest.mark.parametrize("agents", [1, 2])
def test_under_torchrun(agents, tmp_path, serial):
    write_plan(tmp_path / "plan.json", make_plan((2, 1, 1), microbatch=4))
    done = _torchrun(tmp_path, agents, 2 // agents, tmp_path / "plan.json", "--steps", "3", "--no-calibration", "--json")
    assert [d.returncode for d in done] == [0] * agents, done[0].stderr[-2000:]
    document = json.loads((tmp_path / "run/run.json").read_text())
    assert document["losses"] == pytest.approx(serial[:3], rel=1e-5)
    assert document["launcher"] == "torchrun" and document["ranks"] == 2
    printed = [d.stdout for d in done if d.stdout.strip()]
    assert len(printed) == 1 and json.loads(printed[0])["losses"] == document["losses"]


def test_the_summary_of_torchrun_shows_the_typed_error(tmp_path):
    """torchrun prints the failing rank's error file: rank, step and what happened, not `<N/A>`."""
    write_plan(tmp_path / "plan.json", make_plan((2, 1, 1), microbatch=4))
    (done,) = _torchrun(tmp_path, 1, 2, tmp_path / "plan.json", "--steps", "6", "--no-calibration", "--data", f"{FAILING}:raises")
    assert done.returncode != 0
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "<N/A>" not in summary, summary
    assert re.search(r"traceback : RankFailed: .*rank 1 failed in training step 2: ValueError: sample 20 is damaged", summary), summary
    assert re.search(r"\(rank 1, step 2(, peer \d+)?\)", summary), summary
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    said = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in said] in ([0], [0, 1]) and all(x["loss"] > 0 for x in said)  # of the last, the dead rank may have said nothing


def test_a_rank_that_fails_before_a_step_takes_its_empty_folder_away(tmp_path):
    kept, out = tmp_path / "kept", tmp_path / "run"
    for made in (True, False):
        kept.mkdir(exist_ok=True)
        out.mkdir(exist_ok=True)
        (kept / "of another").touch()
        for folder in (kept, out):
            _ElasticRank(None, SimpleNamespace(out=folder), 0, 2, None, made_folder=made).leave()
        assert kept.is_dir() and out.exists() != made


def test_the_summary_of_torchrun_shows_the_users_error(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan((2, 1, 1), microbatch=4))
    (done,) = _torchrun(tmp_path, 1, 1, tmp_path / "plan.json", "--steps", "6", "--no-calibration")
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "traceback : UsageError: torchrun: torchrun started 1 ranks, the plan needs 2" in summary and "<N/A>" not in summary
    assert "exitcode  : 2" in summary


def test_a_killed_rank_under_torchrun_is_one_error(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan((2, 1, 1), microbatch=4))
    (done,) = _torchrun(tmp_path, 1, 2, tmp_path / "plan.json", "--steps", "6", "--no-calibration", "--data", f"{FAILING}:dies")
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr[-3000:]
    assert "rank 1 was killed" in errors[0]
    assert not (tmp_path / "run/run.json").exists() and not list((tmp_path / "run").glob("rank-*"))
