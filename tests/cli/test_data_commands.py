"""`data analyse` and `data bench` on a user's loader, and what they refuse."""

from __future__ import annotations

import json

import pytest

from meshwright.cli.frame import main
from meshwright.profile.input_rates import lru_hits

LOADER = """
import os
from torch.utils.data import DataLoader

class Files:
    def __init__(self):
        self.paths = sorted(os.path.join({folder!r}, name) for name in os.listdir({folder!r}))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return len(file.read())

class Hidden(Files):
    def __init__(self):
        super().__init__()
        self.where, self.paths = self.paths, None

    def __len__(self):
        return len(self.where)

    def __getitem__(self, index):
        with open(self.where[index], "rb") as file:
            return len(file.read())

def loader():
    return DataLoader(Files(), batch_size=3, shuffle=True)

def hidden():
    return DataLoader(Hidden(), batch_size=3, num_workers=1)

def where(index):
    return Hidden().where[index]

def step(batch):
    assert batch.sum() > 0

def broken():
    raise ValueError("no such bucket")
"""


@pytest.fixture
def user(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    folder = tmp_path / "items"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}").write_bytes(bytes(5000))
    file = tmp_path / "mine.py"
    file.write_text(LOADER.format(folder=str(folder)))
    return file


def run(capsys, *words: str) -> tuple[int, dict, str]:
    code = main([*words, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out.startswith("{") else {}, said.err


def test_analyse(user, capsys):
    code, found, _ = run(capsys, "data", "analyse", f"{user}:loader", "--step", f"{user}:step", "--memory", "20000", "--rounds", "1")
    assert code == 0 and found["schema"] == "meshwright.data.stalls"
    m = found["measured"]
    assert (m["items"], m["total_bytes"], m["workers"], m["sampled"]) == (10, 50_000, 0, 10) and m["device_s"] > 0 and m["prepare_s"] > 0
    assert found["share"] == pytest.approx(0.4) and found["cases"][0]["cached"] == pytest.approx(lru_hits(0.4))
    by = {row["what"]: row["items_per_s"] for row in found["cases"]}
    assert by["as it is"] <= by["files kept in memory"] <= by["all files in memory"]
    assert main(["data", "analyse", f"{user}:loader", "--device-time", "0.3", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "Fastest: " in text and "No way to feed it takes less than" in text
    assert "device       10 items/s" in text and "limited by" in text and "one thread" in text


def test_bench(user, capsys):
    code, found, _ = run(capsys, "data", "bench", f"{user}:hidden", "--files", f"{user}:where", "--keep", "20kB", "--epochs", "2")
    assert code == 0 and [e["items"] for e in found["epochs"]] == [10, 10]
    assert found["kept"]["members"] == 2 and found["kept"]["budget_bytes"] == 20_000
    assert main(["data", "bench", f"{user}:loader", "--epochs", "1"]) == 0
    assert "from storage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyse", "{}:hidden"], "the files of a Hidden are not known"), (["analyse", "{}:loader", "--memory", "900TB"], "memory limit"),
        (["analyse", "{}:loader", "--step", "{}:step", "--device-time", "1"], "give one of --step and --device-time"),
        (["analyse", "{}:loader", "--network", "fast"], "--network"),
        (["analyse", "{}:step"], "step() missing 1 required positional argument"), (["bench", "{}:broken"], "no such bucket"),
        (["analyse", "{}:where"], "missing 1 required"), (["bench", "{}:nothing"], "has no function 'nothing'"),
    ],
)  # fmt: skip
def test_what_is_refused(user, capsys, words, message):
    assert main(["data", *(w.format(user) for w in words)]) in (1, 2)
    assert message in capsys.readouterr().err
