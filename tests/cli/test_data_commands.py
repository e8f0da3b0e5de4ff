"""`data analyse`, `plan`, `bench` and `serve` on a user's loader, and what they refuse."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.data import ServedLoader
from meshwright.data.copies import SHARED_MEMORY
from meshwright.errors import CaptureError
from meshwright.profile.input_rates import lru_hits

LOADER = """
import os
from torch.utils.data import DataLoader, IterableDataset

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

def odd():
    return DataLoader(Files(), batch_sampler=[[0, 1], [2]])

def gone():
    made = DataLoader(Files(), batch_size=3)
    made.dataset.paths[7] = "/gone.bin"
    return made

class Stream(IterableDataset):
    def __iter__(self):
        yield from range(20)

    def __len__(self):
        return 20

def stream():
    return DataLoader(Stream(), batch_size=2)

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


def test_plan_and_the_epochs_that_follow_it(user, capsys, tmp_path):
    feed, rates = str(tmp_path / "feed.json"), tmp_path / "rates.json"
    where = ["--memory", "30000", "--rounds", "1"]
    code, analysis, _ = run(capsys, "data", "analyse", f"{user}:loader", "--device-time", "0.003", *where)
    assert code == 0
    m = analysis["measured"] | {"miss_s": 0.01, "hit_s": 1e-5, "storage_Bps": 1e6, "prepare_s": 1e-4, "cpu_s": 1e-4, "workers": 1, "held": 1.0}
    rates.write_text(json.dumps(analysis | {"measured": m}))  # a slow disk
    code, found, _ = run(capsys, "data", "plan", str(rates), "--memory", "30000", "--out", feed)
    plan = found["plan"]
    assert code == 0 and (plan["kept"], plan["medium"], plan["kept_bytes"]) == ("here", "page-cache", 30_000) and found["ratio"] >= 1
    assert plan["storage_bytes"] == 20_000 and found["cached"] == pytest.approx(0.6) and found["written"] == feed
    assert main(["data", "plan", str(rates), "--memory", "30000", "--jobs", "2"]) == 0
    text = capsys.readouterr().out
    assert "bound" in text and "wait at most" in text and "next: meshwright data serve" in text
    code, ran, _ = run(capsys, "data", "bench", f"{user}:loader", "--plan", feed, "--epochs", "1", "--device-time", "0.001")
    assert code == 0 and ran["planned"]["storage_bytes"] == 20_000 and ran["kept"]["budget_bytes"] == 30_000 and ran["epochs"][0]["items"] == 10
    code, here, _ = run(capsys, "data", "plan", f"{user}:loader", "--device-time", "0.003", *where)
    assert code == 0 and here["plan"]["rates"]["items"] == 10


def test_serve_until_its_jobs_have_left(user, capsys, tmp_path):
    """The command itself, with two jobs in processes of their own; then what it says."""
    at = str(tmp_path / "feed.sock")
    jobs = [multiprocessing.get_context("fork").Process(target=_job, args=(at, f"j{i}", tmp_path / f"{i}.txt")) for i in range(2)]
    for job in jobs:
        job.start()
    code, found, said = run(capsys, "data", "serve", f"{user}:loader", "--jobs", "2", "--at", at, "--workers", "1", "--once")
    for job in jobs:
        job.join(60)
    assert code == 0 and (found["jobs"], found["batches"], found["started_again"]) == (2, 4, 0)
    assert "serving 4 batches of 3 items an epoch to 2 jobs" in said and not Path(at).exists()
    assert [(tmp_path / f"{i}.txt").read_text() for i in range(2)] == ["[3, 3, 3, 1]"] * 2
    assert not list(SHARED_MEMORY.glob(f"meshwright-data-{os.getuid()}-serve-*"))


def _job(at, name, out):
    with ServedLoader(at, job=name, timeout_s=60, patience_s=60) as loader:
        out.write_text(str(sorted((len(batch) for batch in loader), reverse=True)))


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
        (["plan", "{}:loader", "--step", "{}:step", "--device-time", "1"], "give one of"), (["plan", "no.json"], "cannot read"),
        (["plan", "rates.json", "--files", "x:y"], "measured already"), (["plan", "{}:loader", "--margin", "2"], "a margin of 2"),
        (["plan", "{}:loader", "--network", "x"], "--network"),
        (["bench", "{}:loader", "--plan", "no.json"], "cannot read"), (["bench", "{}:loader", "--plan", "x", "--keep", "1kB"], "give one of"),
        (["serve", "{}:loader"], "nothing to serve"), (["serve", "{}:loader", "--jobs", "2"], "give both"),
        (["serve", "{}:loader", "--jobs", "2", "--at", "here"], "is no address"),
        (["serve", "{}:loader", "--jobs", "1", "--at", "/no/x"], "cannot listen"),
        (["serve", "{}:loader", "--nodes", "a:1,b"], "is no address"), (["serve", "{}:loader", "--nodes", "a:1", "--node", "3"], "node 3 of 1"),
        (["serve", "{}:odd", "--jobs", "1", "--at", "127.0.0.1:0"], "an order of its own"),
        *(([verb, "{}:stream", "--files", "{}:where", *more], "a Stream, hands out items in an order of its own")
          for verb, *more in (["analyse"], ["plan"], ["bench"], ["bench", "--keep", "20kB"], ["serve", "--jobs", "1", "--at", "127.0.0.1:0"])),
        (["analyse", "{}:where"], "missing 1 required"), (["bench", "{}:nothing"], "has no function 'nothing'"),
    ],
)  # fmt: skip
def test_what_is_refused(user, capsys, words, message):
    assert main(["data", *(w.format(user) for w in words)]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench", "{}:gone"], ["bench", "{}:gone", "--keep", "20kB"], ["analyse", "{}:gone"],
                                   ["plan", "{}:gone"]])  # fmt: skip
def test_a_file_that_is_gone_is_not_our_mistake(user, capsys, words):
    """The user's line and the file are named; nobody is sent to look for a bug of ours."""
    assert main(["data", *(w.format(user) for w in words)]) in (1, 2)
    said = capsys.readouterr().err
    assert "No such file" in said and "/gone.bin" in said and "bug in meshwright" not in said
    assert words[0] != "bench" or "--keep" in words or f"{user.name}:13" in said


def test_an_error_in_a_worker_of_the_loader_has_its_cause_and_line(tmp_path):
    """A worker hands on its traceback as text: the first line of it says nothing."""
    torch_utils = pytest.importorskip("torch._utils", reason="torch is not installed")
    from meshwright.capture.resolve import user_code

    file = tmp_path / "mine.py"
    try:
        exec(compile("\n\nopen('/gone.bin')", str(file), "exec"))
    except OSError:
        handed_on = torch_utils.ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(CaptureError) as caught, user_code("mine.py:loader", str(file)):
        handed_on.reraise()
    assert str(caught.value.where).endswith("mine.py:3") and "No such file or directory: '/gone.bin' (in a worker" in caught.value.message
