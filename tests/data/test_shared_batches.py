"""Batches that several jobs share: each job gets each item once an epoch, whoever is killed; what jobs must agree on; what is left behind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from shared_job import Items

from effort import few
from meshwright.data import SharedLoader, board
from meshwright.data.batch_bytes import packed, unpacked
from meshwright.data.copies import SHARED_MEMORY
from meshwright.errors import RunError, RunTimeout, UsageError

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
JOB = Path(__file__).with_name("shared_job.py")


@pytest.fixture
def name():
    found = f"test-{uuid.uuid4().hex[:12]}"
    yield found
    left = SHARED_MEMORY / f"meshwright-data-{os.getuid()}-{found}"
    assert not left.exists(), [p.name for p in left.iterdir()]


def start(name: str, jobs: int, epochs: int, count: int, slow_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, str(JOB), name, str(jobs), str(epochs), str(count), str(slow_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def said(text: str) -> tuple[dict[int, list], bool]:
    """Items by epoch, and whether the job came to its end."""
    found: dict[int, list] = {}
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    for line in lines:
        if "epoch" in line:
            found.setdefault(line["epoch"], []).extend(line["items"])
    return found, any("ended" in line for line in lines)


def test_each_job_gets_each_item_once_and_it_is_prepared_once(name):
    started = [start(name, 3, 3, 32, 0.002) for _ in range(3)]
    told = [p.communicate(timeout=100) for p in started]
    assert [p.returncode for p in started] == [0, 0, 0], [t[1] for t in told]
    jobs = [said(out)[0] for out, _ in told]
    drawn = set()
    for epoch in range(3):
        for found in jobs:
            assert sorted(item[0] for item in found[epoch]) == list(range(32))
        assert {tuple(item) for item in jobs[0][epoch]} == {tuple(item) for item in jobs[1][epoch]} == {tuple(item) for item in jobs[2][epoch]}
        drawn |= {item[1] for item in jobs[0][epoch]}
    assert len(drawn) == 96  # new random numbers in each epoch
    assert len({item[3] for found in jobs for items in found.values() for item in items}) > 1  # of several processes
    orders = [[item[0] for item in jobs[0][epoch]] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("seed", range(few(5)))
def test_survivors_get_each_item_once(seed, name):
    """A job, or a process that prepares batches, is killed at a random moment."""
    rng = random.Random(seed)
    started = [start(name, 3, 2, 60, 0.01) for _ in range(3)]
    lines: list[list[str]] = [[], [], []]
    readers = [threading.Thread(target=lambda i=i, p=p: lines[i].extend(iter(p.stdout.readline, ""))) for i, p in enumerate(started)]
    for reader in readers:
        reader.start()
    when = rng.randrange(1, 35)
    while len(lines[0]) < when and started[0].poll() is None:
        time.sleep(0.002)
    victim = rng.randrange(3)
    killed_job = rng.random() < 0.6
    if killed_job:
        started[victim].kill()
    else:
        pid = json.loads(lines[0][0])["workers"][rng.randrange(2)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for p in started:
        p.wait(timeout=100)
    for reader in readers:
        reader.join()
    for i, p in enumerate(started):
        found, ended = said("".join(lines[i]))
        if killed_job and i == victim:
            assert all(len({item[0] for item in items}) == len(items) for items in found.values())  # never twice
            continue
        assert p.returncode == 0 and ended, p.stderr.read()
        assert [sorted(item[0] for item in found[e]) for e in range(2)] == [list(range(60))] * 2
    for p in started:
        p.stdout.close()
        p.stderr.close()


def test_what_a_dead_group_left_is_removed(name):
    started = [start(name, 2, 50, 60, 0.01) for _ in range(2)]
    dead = []
    for p in started:
        dead += json.loads(p.stdout.readline())["workers"]
        p.stdout.readline()
        p.kill()
    for p in started:
        p.communicate()  # its workers hold the other end: they are gone, too
    folder = SHARED_MEMORY / f"meshwright-data-{os.getuid()}-{name}"
    assert folder.exists()
    with SharedLoader(Items(4), 2, name=name, jobs=1, collate_fn=list) as loader:  # another dataset: the dead are not asked
        assert sorted(item[0] for batch in loader for item in batch) == [0, 1, 2, 3]
        assert not [path for path in folder.glob(".*") if int(path.name.rpartition("-")[2]) in dead]  # the living prepare the next epoch


def test_a_job_that_comes_later_begins_with_the_next_epoch(name):
    with SharedLoader(Items(12), 3, name=name, jobs=1, collate_fn=list, workers=1) as first:
        begun = iter(first)
        next(begun)
        with SharedLoader(Items(12), 3, name=name, jobs=1, collate_fn=list) as second:
            assert second._epoch >= 1
            rest = sum(1 for _ in begun)
            assert rest == 3
            got: list[list[int]] = []
            thread = threading.Thread(target=lambda: got.append([item[0] for batch in second for item in batch]))
            thread.start()
            while thread.is_alive():
                assert sorted(item[0] for batch in first for item in batch) == list(range(12))
            assert sorted(got[0]) == list(range(12))


def test_an_epoch_that_is_left_early(name):
    with SharedLoader(Items(30), 3, name=name, jobs=1, collate_fn=list) as loader:
        for _ in range(4):
            for _ in loader:
                break
        assert sorted(item[0] for batch in loader for item in batch) == list(range(30)) and len(loader) == 10
    with pytest.raises(UsageError, match="closed"):
        next(iter(loader))
    loader.close()


def test_what_jobs_must_agree_on(name):
    with SharedLoader(Items(12), 3, name=name, jobs=2, collate_fn=list):
        for other in ({"batch_size": 4}, {"seed": 1}, {"jobs": 3}, {"dataset": Items(13)}, {"collate_fn": tuple}):
            given = {"dataset": Items(12), "batch_size": 3, "jobs": 2, "collate_fn": list, **other}
            with pytest.raises(UsageError, match="or another dataset, batch size, seed or transform"):
                SharedLoader(given.pop("dataset"), given.pop("batch_size"), name=name, **given)


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def transformed(transform, **more):
    made = Items(12)
    made.transform = transform
    made.__dict__ |= more
    return made


def by(factor):
    return lambda x: x * factor


def test_jobs_prepare_in_the_same_way(name):
    """Each job would get batches of the other's transform, and nobody would see it."""
    with SharedLoader(transformed([Scaled(0.5), by(3)]), 3, name=name, jobs=2, collate_fn=list, timeout_s=5) as first:
        for other in ([Scaled(0.25), by(3)], [Scaled(0.5), by(4)], [Scaled(0.5)], [Scaled(0.5), abs], None):
            with pytest.raises(UsageError, match="or another dataset, batch size, seed or transform"):
                SharedLoader(transformed(other), 3, name=name, jobs=2, collate_fn=list)
        with SharedLoader(transformed([Scaled(0.5), by(3)]), 3, name=name, jobs=2, collate_fn=list):
            assert first is not None


def test_what_is_alike_in_every_process():
    """The digest of equal datasets is equal in a fresh interpreter with other hashes, whatever handles, locks and generators they hold."""
    text = (
        "import functools, random, sys, threading; sys.path.insert(0, 'tests/data'); import numpy as np; from pathlib import Path\n"
        "from meshwright.data.alike import digest\n"
        "class Own:\n"
        "    __slots__ = ('a', '__dict__')\n"
        "    def __init__(self):\n"
        "        self.a, self.names, self.root = {'x', 'y', 3}, [f'{i}.jpg' for i in range(5000)], Path('/data')\n"
        "        self.lock, self.rng, self.other = threading.Lock(), np.random.default_rng(), random.Random()\n"
        "        self.values, self.me, self.f = np.arange(10**6).reshape(1000, -1).T, self, functools.partial(sorted, key=lambda x: -x)\n"
        "    def __getitem__(self, i): return self.f(i)\n"
        "class Left(Own):\n"
        "    def __init__(self, now): super().__init__(); self.now = now\n"
        "    def __getstate__(self): return {k: v for k, v in self.__dict__.items() if k != 'now'}\n"
        "import os; print(digest((Own(), Own.__getitem__, Left(os.getpid()))).hex())"
    )
    made = {subprocess.run([sys.executable, "-c", text], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")}  # fmt: skip
    assert len(made) == 1 and len(made.pop().strip()) == 16
    from meshwright.data.alike import digest

    values = np.zeros(100_000)
    one = digest(values)
    values[-1] = 1.0
    assert digest(values) != one and digest(values.astype(np.float32)) != digest(values) and digest({"a": 1}) != digest({"a": 2})


def test_jobs_that_never_come(name):
    loader = SharedLoader(Items(12), 3, name=name, jobs=2, collate_fn=list, timeout_s=0.3)
    with loader, pytest.raises(RunTimeout, match="1 of 2 jobs are there"):
        next(iter(loader))


class Broken(Items):
    def __getitem__(self, index):
        if index == 7:
            raise ValueError("no such picture")
        return index


def test_an_item_that_cannot_be_prepared(name):
    with SharedLoader(Broken(12), 12, name=name, jobs=1, collate_fn=list, shuffle=False) as loader, pytest.raises(RunError) as caught:
        next(iter(loader))
    assert "item 7: ValueError: no such picture" in str(caught.value) and "epoch 0, batch 0" in str(caught.value)


class Deadly(Items):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_all_die(name):
    loader = SharedLoader(Deadly(12), 3, name=name, jobs=1, collate_fn=list)
    with loader, pytest.raises(RunError, match="all processes of this job that prepare"):
        next(iter(loader))


def test_a_job_that_was_taken_for_dead(name):
    with SharedLoader(Items(12), 3, name=name, jobs=1, collate_fn=list) as loader:
        loader._board.jobs[0, 0] = 0
        with pytest.raises(RunError, match="taken for dead"):
            next(iter(loader))


def test_too_many_jobs(name, monkeypatch):
    monkeypatch.setattr(board, "MAX_JOBS", 1)
    with SharedLoader(Items(12), 3, name=name, jobs=1, collate_fn=list), pytest.raises(UsageError, match="more than 1 jobs share batches"):
        SharedLoader(Items(12), 3, name=name, jobs=1, collate_fn=list)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"name": "a/b"}, "names no group"), ({"jobs": 0}, "0 jobs"), ({"jobs": 33}, "33 jobs"), ({"workers": 0}, "0 workers"),
        ({"batch_size": 0}, "0 batch_size"), ({"batch_size": 13, "drop_last": True}, "12 items make no batch of 13"),
    ],
)  # fmt: skip
def test_arguments(over, message):
    given = {"name": "x", "jobs": 1, "batch_size": 3, **over}
    with pytest.raises(UsageError, match=message):
        SharedLoader(Items(12), given.pop("batch_size"), collate_fn=list, **given)


def test_shared_memory_that_is_full(name, monkeypatch):
    """Writing fails as it does there; the jobs are told how large a batch is."""
    real = Path.open

    def full(self, *args, **kwargs):
        if self.name.startswith(".0-"):
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with SharedLoader(Items(3), 3, name=name, jobs=1, collate_fn=list, timeout_s=1.0) as loader, pytest.raises(RunTimeout):
        next(iter(loader))  # nobody can write, not even what is wrong


def test_a_table_that_does_not_fit_into_shared_memory(tmp_path):
    """The kernel ends a process with SIGBUS where it writes to a page that there is no room for: the room is taken before."""
    code = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from meshwright.data.board import Board
        from meshwright.errors import RunError
        try:
            Board(Path(sys.argv[1]) / "x", 1000, 7, 2, os.getpid())
        except RunError as error:
            print(error.data["needed_bytes"], os.listdir(sys.argv[1]))
    """)
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8k none "$1" && exec "$2" -c "$3" "$1"', "sh"]
    done = subprocess.run([*words, str(tmp_path), sys.executable, code], capture_output=True, text=True, timeout=600)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system of one's own: {done.stderr.strip()[:200]}")
    assert (done.returncode, done.stdout) == (0, f"{8 * (8 + 32 * 4 + 3 * 1001)} []\n"), done.stderr


def test_a_folder_that_the_last_job_takes_away_is_made_again(tmp_path, monkeypatch):
    """A job that came while another ended waited for a lock on what was then removed: it begins anew, and holds no file of the old one."""
    real, seen = board.Board._removed, []

    def removed(self) -> bool:
        if not seen:
            seen.append(self._fd)
            shutil.rmtree(self.folder)
        return real(self)

    monkeypatch.setattr(board.Board, "_removed", removed)
    before = len(list(Path("/proc/self/fd").iterdir()))
    table = board.Board(tmp_path / "x", 4, 7, 1, os.getpid())
    assert table.present() == 1 and table.begun and (tmp_path / "x" / "board").exists()
    table.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before and len(seen) == 1


def test_batches_arrive_as_they_were():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    batch = {
        "image": torch.arange(24).view(2, 3, 4), "half": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor([True, False]),
        "one": torch.tensor(2.5), "none": torch.empty(0, 5), "turned": torch.arange(6).view(2, 3).t(), "array": np.arange(5, dtype=np.int16),
        "text": ["a", None, b"\xff", (1, -2.5, True)], "scalar": np.float32(1.5), 3: {"deep": {}}, "leaf": torch.nn.Linear(1, 1).weight,
    }  # fmt: skip
    got = unpacked(bytearray(b"".join(packed(batch))), "x")
    assert all(t.data_ptr() % 8 == 0 for t in got.values() if isinstance(t, torch.Tensor) and t.numel())
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[key], value) and got[key].dtype == value.dtype and got[key].shape == value.shape
            got[key].add_(1) if value.dtype != torch.bool else got[key].logical_not_()  # a job may change its copy
    assert np.array_equal(got["array"], batch["array"]) and got["text"] == batch["text"] and got[3] == {"deep": {}}
    assert got["scalar"] == 1.5 and type(got["scalar"]) is np.float32


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.array([None]), [1, {"x": lambda: 0}], 1j])
def test_a_batch_of_other_things_is_refused(thing):
    with pytest.raises(UsageError, match="a batch holds a ") as caught:
        packed(thing)
    assert "collate_fn" in str(caught.value.hint)


def test_the_default_collate_is_torchs(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Pairs(Items):
        def __getitem__(self, index):
            return torch.full((2,), float(index)), index

    with SharedLoader(Pairs(4), 4, name=name, jobs=1, shuffle=False) as loader:
        x, y = next(iter(loader))
    assert torch.equal(x, torch.arange(4.0).repeat_interleave(2).view(4, 2)) and y.tolist() == [0, 1, 2, 3]


def test_a_loader_in_a_forked_child_is_not_its_parents(name):
    """Each process locks by a file of its own: two processes that count under the lock lose nothing."""
    folder = SHARED_MEMORY / f"meshwright-data-{os.getuid()}-{name}"

    def count() -> None:
        own = board.Board(folder, 4, 1, 1)
        for _ in range(200):
            with own.locked():
                value = int(own._all[5])
                time.sleep(1e-5)
                own._all[5] = value + 1

    first = board.Board(folder, 4, 1, 1, os.getpid())
    children = [multiprocessing.get_context("fork").Process(target=count) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert first._all[5] == 600
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
