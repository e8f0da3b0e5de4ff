"""A rank is killed, the job is planned again on what is left, and training goes on as if nothing had happened: real processes, real bytes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from captured import captured
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.replan import OldShards, replan_training
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, Infeasible, PlanMismatch, UsageError
from meshwright.io.plan.plan import write_plan
from meshwright.job import Training
from meshwright.run.checkpoint.index import find_index, tensors_of
from meshwright.run.checkpoint.restore import device_folder, local_shards
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from meshwright.testing.serial import serial_losses

pytestmark = pytest.mark.real
MODEL = "tests/run/tensor_models.py:even"
DATA = "tests/run/replan_data.py:windows"
BATCH = 8


def job() -> Training:
    return Training(model=MODEL, global_batch=BATCH)


@cache
def graph():
    return captured(MODEL)


@cache
def old_plan(data: int, tensor: int, pipeline: int, level: int = 0):
    return plan_training(
        job(), read_fabric("laptop:4"), graph=graph(),
        wishes=(
            LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=2), CollectivesWanted("ring"),
            ShardingWanted(level=level, overlap=level > 0, bucket_bytes=1500),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def serial():
    torch.set_num_threads(1)
    return serial_losses(job(), data=DATA, steps=7)


def shards_in(folder: Path) -> OldShards:
    found, index = find_index(folder)
    tensors, files = tensors_of(index, str(found))
    return OldShards(tensors=tensors, files=files, stored=frozenset(f for f in files if (found / f).is_file()), step=index.step)


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank -> process number of the ranks of a run whose worker was started with a setup in this folder."""
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            line = (path / "cmdline").read_bytes()
            output = (path / "fd/1").readlink().name
        except OSError:
            continue
        if b"meshwright.run.ranks.worker" in line and str(folder).encode() in line and output.startswith("output-"):
            found[int(output.removeprefix("output-"))] = int(path.name)
    return found


def killed_in_training(plan_file: Path, out: Path, rank: int, *more: str, ready) -> str:
    """Starts `train run`, waits until `ready()`, kills one rank with SIGKILL, and returns what the command said."""
    command = [
        sys.executable, "-m", "meshwright", "train", "run", str(plan_file), "--out", str(out), "--steps", "60", "--checkpoint-every", "2",
        "--data", "tests/run/replan_data.py:slow", "--no-calibration", "--pacing", "none", *more,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        while not (ready() and rank in ranks_of(out)):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(ranks_of(out)[rank], signal.SIGKILL)
        said = process.communicate(timeout=120)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 1
    return said


def relabelled(folder: Path) -> None:
    """The checkpoints' data has another name, `windows`, and the same samples."""
    for path in folder.rglob("index.json"):
        path.write_bytes(path.read_bytes().replace(b"replan_data.py:slow", b"replan_data.py:windows"))


def test_a_killed_rank_is_planned_around_with_local_shards(serial, tmp_path):
    """Pipeline of two with two replicas each: what rank 3 held, rank 2 has too; the node's own shards are gone with it."""
    plan, out, pattern = old_plan(2, 1, 2), tmp_path / "run", str(tmp_path / "disks" / "{device}")
    write_plan(tmp_path / "old.json", plan)
    disks = [device_folder(pattern, d) for d in plan.placement]
    said = killed_in_training(
        tmp_path / "old.json", out, 3, "--local-shards", pattern, ready=lambda: all(list(d.glob("step-*/index.json")) for d in disks)
    )
    assert "rank 3 was killed" in said or "SIGKILL" in said, said
    assert not (out / "checkpoint").exists()
    relabelled(tmp_path / "disks")
    shutil.rmtree(disks[3])
    known = shards_in(disks[0])
    survivors = OldShards(tensors=known.tensors, files=known.files)
    found = replan_training(plan, lost=[plan.placement[3]], graph=graph(), shards=survivors, keep=("microbatch",))
    assert plan.placement[3] not in found.plan.placement
    steps = local_shards([(d, device_folder(pattern, d)) for d in found.plan.placement]).index.step
    assert 2 <= steps < 7
    request = RunRequest(out=out, data=DATA, steps=7, resume=True, calibrate=False, local_shards=pattern, pacing="none")
    document = train_run(found.plan, request).document
    assert document.first_step == steps
    assert document.losses == pytest.approx(serial, rel=1e-9)
    restart, t = document.restart, found.chosen.transfers
    assert restart["as_planned"] is True and restart["planned"]["needed_bytes"] == list(t.needed_bytes)
    assert [restart[f"{k}_bytes"] for k in ("needed", "reused", "received", "sent", "stored")] == [
        list(x) for x in (t.needed_bytes, t.reused_bytes, t.received_bytes, t.sent_bytes, t.stored_bytes)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("before", "keep"),
    [((1, 4, 1), ()), ((1, 2, 2), ("pp",)), ((4, 1, 1, 3), ()), ((2, 2, 1, 2), ("tp",)), ((2, 1, 2, 1), ())],
    ids=["TP4", "TP2xPP2", "DP4 level 3", "TP2xDP2 level 2", "DP2xPP2 level 1"],
)  # fmt: skip
def test_a_replanned_run_reads_what_was_planned(before, keep, serial, tmp_path):
    plan, out = old_plan(*before), tmp_path / "run"
    train_run(plan, RunRequest(out=out, data=DATA, steps=3, calibrate=False, pacing="none"))
    found = replan_training(plan, lost=[plan.placement[2]], graph=graph(), shards=shards_in(out), keep=keep)
    document = train_run(found.plan, RunRequest(out=out, data=DATA, steps=6, resume=True, calibrate=False, pacing="none")).document
    assert document.losses == pytest.approx(serial[:6], rel=1e-9)
    assert document.restart["stored_bytes"] == list(found.chosen.transfers.needed_bytes) == document.restart["planned"]["needed_bytes"]
    assert document.restart["as_planned"] is True
    files = find_index(out)[0].glob("rank-*.safetensors")
    assert all(p.is_file() for p in files)


def test_ranks_send_what_others_lack_and_storage_gives_what_is_lost(serial, tmp_path):
    """Pipeline of four without replicas: the lost stage comes from the shared checkpoint, the rest from disks over the group."""
    plan, out, pattern = old_plan(1, 1, 4), tmp_path / "run", str(tmp_path / "disks" / "{device}")
    train_run(plan, RunRequest(out=out, data=DATA, steps=3, calibrate=False, pacing="none", local_shards=pattern, also_shared=True))
    shards = shards_in(out)
    found = replan_training(plan, lost=[plan.placement[1]], graph=graph(), shards=shards)
    shutil.rmtree(device_folder(pattern, plan.placement[1]))
    request = RunRequest(out=out, data=DATA, steps=5, resume=True, calibrate=False, pacing="none", local_shards=pattern, also_shared=True)
    document = train_run(found.plan, request).document
    assert document.losses == pytest.approx(serial[:5], rel=1e-9)
    assert document.restart["as_planned"] is True
    assert sum(document.restart["stored_bytes"]) == sum(found.chosen.transfers.stored_bytes) > 0
    # the same layout again: every byte is in place
    again = train_run(found.plan, dataclasses.replace(request, steps=6)).document
    assert sum(again.restart["received_bytes"]) == sum(again.restart["stored_bytes"]) == 0
    assert again.restart["reused_bytes"] == again.restart["needed_bytes"]
    assert again.losses == pytest.approx(serial[:6], rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after"), [((4, 1, 1, 3), (2, 2, 1, 2)), ((2, 1, 2, 2), (4, 1, 1, 3)), ((2, 2, 1, 1), (1, 2, 2, 0))],
    ids=["DP4 level 3 to TP2xDP2 level 2", "DP2xPP2 level 2 to DP4 level 3", "TP2xDP2 level 1 to TP2xPP2"],
)  # fmt: skip
def test_shards_of_levels_are_sent_to_those_that_need_them(before, after, serial, tmp_path):
    """Disks of the ranks' own only: pieces of the old levels become pieces of the new ones over the group."""
    out, pattern = tmp_path / "run", str(tmp_path / "disks" / "{device}")
    train_run(old_plan(*before), RunRequest(out=out, data=DATA, steps=3, calibrate=False, pacing="none", local_shards=pattern))
    request = RunRequest(out=out, data=DATA, steps=6, resume=True, calibrate=False, pacing="none", local_shards=pattern)
    document = train_run(old_plan(*after), request).document
    assert document.first_step == 3 and document.losses == pytest.approx(serial[:6], rel=1e-9)
    restart = document.restart
    assert not sum(restart["stored_bytes"]) and sum(restart["received_bytes"]) == sum(restart["sent_bytes"]) > 0
    assert sum(restart["reused_bytes"]) + sum(restart["received_bytes"]) == sum(restart["needed_bytes"])


def test_a_replica_that_is_lost_takes_its_pieces_with_it(serial, tmp_path):
    """Level 2: weights are on every replica, the optimizer state of a part on one only; a shared checkpoint has it."""
    plan, out, pattern = old_plan(4, 1, 1, 2), tmp_path / "run", str(tmp_path / "disks" / "{device}")
    train_run(plan, RunRequest(out=out, data=DATA, steps=3, calibrate=False, pacing="none", local_shards=pattern, also_shared=True))
    shards = shards_in(out)
    with pytest.raises(Infeasible, match=rf"tensors are lost: optimizer:.*only rank 1 \({plan.placement[1]}\) had them"):
        replan_training(plan, lost=[plan.placement[1]], graph=graph(), shards=dataclasses.replace(shards, stored=frozenset()))
    found = replan_training(plan, lost=[plan.placement[1]], graph=graph(), shards=shards)
    shutil.rmtree(device_folder(pattern, plan.placement[1]))
    request = RunRequest(out=out, data=DATA, steps=5, resume=True, calibrate=False, pacing="none", local_shards=pattern, also_shared=True)
    document = train_run(found.plan, request).document
    assert document.losses == pytest.approx(serial[:5], rel=1e-9) and document.restart["as_planned"] is True
    assert sum(document.restart["stored_bytes"]) == sum(found.chosen.transfers.stored_bytes) > 0


def test_lost_damaged_and_foreign_shards_are_named(tmp_path):
    plan, out, pattern = old_plan(1, 1, 4), tmp_path / "run", str(tmp_path / "disks" / "{device}")
    train_run(plan, RunRequest(out=out, data=DATA, steps=2, calibrate=False, pacing="none", local_shards=pattern))
    folders = {d: device_folder(pattern, d) for d in plan.placement}
    request = RunRequest(out=out, data=DATA, steps=4, resume=True, calibrate=False, pacing="none", local_shards=pattern)
    shard = folders[plan.placement[2]] / "step-00000002" / "rank-002.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-3] + bytes([good[-3] ^ 255]) + good[-2:])
    with pytest.raises(FormatError, match=r"digest differs\): [\w:.]+, bytes \d+-\d+") as caught:
        train_run(plan, request)
    assert caught.value.where == str(shard)
    shard.unlink()
    with pytest.raises(Infeasible, match=rf"tensors are lost.*only rank 2 \({plan.placement[2]}\) had them"):
        train_run(plan, request)
    index = folders[plan.placement[0]] / "step-00000002" / "index.json"
    text = index.read_bytes()
    _, known = find_index(folders[plan.placement[0]])
    index.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, seed=5)))
    with pytest.raises(PlanMismatch, match="shards of another run"):
        train_run(plan, request)
    index.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, files={**known.files, "rank-000.safetensors": "0"})))
    with pytest.raises(PlanMismatch, match="different checkpoints of step 2"):
        train_run(plan, request)
    name = next(n for n in known.parts if n.startswith("param:"))
    for flat in ([0], [3, 2], [0, 10**9]):
        wrong = {f: msgspec.structs.replace(p, flat=flat) for f, p in known.parts[name].items()}
        damaged = msgspec.structs.replace(known, parts={**known.parts, name: wrong})
        with pytest.raises(FormatError, match="cannot hold elements"):
            tensors_of(damaged, "index.json")
    index.write_bytes(b"{")
    with pytest.raises(FormatError, match=r"index.json of"):
        train_run(plan, request)
    index.write_bytes(text)
    with pytest.raises(UsageError, match="no device has shards"):
        train_run(plan, dataclasses.replace(request, local_shards=str(tmp_path / "nothing" / "{device}")))
    with pytest.raises(UsageError, match="a folder of its own"):
        train_run(plan, dataclasses.replace(request, local_shards=str(tmp_path / "one")))
    with pytest.raises(UsageError, match="about local shards"):
        train_run(plan, dataclasses.replace(request, local_shards="", also_shared=True))
    with pytest.raises(UsageError, match="there is no checkpoint"):
        find_index(tmp_path / "nothing")
