"""Plans made before a job: what the job asks for lies there; a model's sizes are those of DDP's buckets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.cli import main
from meshwright.errors import UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.plans import Chosen, GroupPlans
from meshwright.run.group.settings import Settings
from meshwright.run.group.warm import ddp_buckets, warm

FABRIC = load_fabric("two-islands:2")
NAMES = [d.name for d in FABRIC.devices]


def test_a_job_finds_what_was_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache=str(tmp_path), strategies=("ring", "rooted-tree"))
    wanted = [("all-reduce", 1 << 20), ("all-reduce", (1 << 20) + 4), ("broadcast", 3 << 20), ("all-reduce", 1 << 10)]
    said: list[str] = []
    rows = warm(FABRIC, NAMES, wanted, settings, say=lambda row: said.append(row.op))
    assert [(r.op, r.size_bytes, r.kept) for r in rows] == [
        ("all-reduce", 1 << 10, False), ("all-reduce", 1 << 20, False), ("broadcast", 1 << 22, False),
    ]  # fmt: skip
    assert said == [r.op for r in rows] and "below" in str(rows[0].answer) and not isinstance(rows[2].answer, str)
    assert [r.kept for r in warm(FABRIC, NAMES, wanted, settings)] == [False, True, True]  # what is not planned is not kept
    monkeypatch.setattr(GroupPlans, "_plan", lambda *_: pytest.fail("planned again"))
    for share in (0.1, 1.0):  # fewer ranks than cores ask what as many do
        job = GroupPlans(settings, dist.HashStore(), 0, 4, devices=NAMES, fabric=FABRIC, timeout_s=1.0)
        job.ranks_per_core = share
        found = job.choose("broadcast", 0, 3 << 20)
        assert isinstance(found, Chosen) and isinstance(rows[2].answer, Chosen) and found.name == rows[2].answer.name


def test_nothing_can_be_kept_or_planned(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the cache is off"):
        warm(FABRIC, NAMES, [("all-reduce", 1 << 20)], Settings(cache="0"))
    with pytest.raises(UsageError, match="at least 2 ranks"):
        warm(FABRIC, NAMES[:1], [("all-reduce", 1 << 20)], Settings(cache=str(tmp_path)))


class Layers(nn.Module):
    """21 to 51 MB in layers of 1.7 to 3.1 MB, two of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 700 + 300 * (i % 3)) for i in range(24))
        for layer in (self.layers[2], self.layers[7]):
            layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def test_buckets_are_those_of_ddp() -> None:
    seen: list[int] = []

    def count(_, bucket):  # type: ignore[no-untyped-def]  # DDP takes annotations only as types, and here they are text
        seen.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        twin = DistributedDataParallel(Layers())
        twin.register_comm_hook(None, count)
        for _ in range(2):
            twin(torch.ones(1, 600)).backward()
    finally:
        dist.destroy_process_group()
    with torch.device("meta"):
        found = ddp_buckets(Layers())
    assert len(found) > 3 and found[0] == sum(found[1:]) and sorted(found) == sorted(seen)
    assert ddp_buckets(nn.ReLU()) == []


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_STRATEGIES", "ring,rooted-tree")
    words = ["collective", "warm", "--fabric", "two-islands:2"]
    assert main([*words, "--model", "examples/gpt.py:tiny", "--json"]) == 0
    out = capsys.readouterr()
    document = json.loads(out.out)
    assert document["schema"] == "meshwright.collective-warm" and document["devices"] == NAMES and document["rows"]
    assert out.err.count("all-reduce") == len(document["rows"])
    assert main([*words, "--sizes", "1MiB,2MiB", "--ranks", "3"]) == 0
    assert "2 size classes for 3 ranks" in capsys.readouterr().out
    for wrong, said in (
        ([], "name sizes or a model"), (["--sizes", "1MiB", "--ops", "all-sum"], "no collective 'all-sum'"),
        (["--sizes", "1KiB"], "nothing of at least 32768 bytes"), (["--sizes", "1MiB", "--ranks", "9"], "must be 2..4"),
        (["--sizes", "1MiB", "--ranks-per-core", "0"], "must be > 0"), (["--sizes", "1MiB", "--devices", "x,y"], "'x'"),
    ):  # fmt: skip
        assert main([*words, *wrong]) == 2 and said in capsys.readouterr().err
