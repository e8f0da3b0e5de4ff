"""Batches over sockets: each job gets each item once an epoch, whichever of worker, service, guard or job is killed; refusals; what is left."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from shared_job import Items

from effort import few
from meshwright.data import ServedLoader
from meshwright.data.batches import Batches
from meshwright.data.copies import SHARED_MEMORY
from meshwright.data.service import guarded, removed, serve
from meshwright.data.wire import HELLO, WORD, Hello, hello_bytes, listening, seen_of
from meshwright.errors import RunError, RunTimeout, UsageError

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
FORK = multiprocessing.get_context("fork")
ITEMS, EPOCHS = 45, 2


class Feed:
    """A guarded service in a process of its own, at a socket's file."""

    def __init__(self, folder: Path, jobs: int, items: int = ITEMS, slow_s: float = 0.004) -> None:
        self.at, self.jobs = str(folder / "feed.sock"), jobs
        self.of = Batches(dataset=Items(items, slow_s), batch_size=3, name=f"test-{uuid.uuid4().hex[:12]}", jobs=jobs, collate_fn=list, timeout_s=60)
        self.ends, self.lives = os.pipe()  # whatever descends from a guard holds `lives`
        self.process = self.up()

    def up(self):
        def main() -> None:
            os.close(self.ends)
            listener = listening(self.at)
            guarded([lambda again: serve(self.of, listener, workers=2, staged=6, again=again)])

        found = FORK.Process(target=main)
        found.start()
        return found

    def below(self, pid: int) -> list[int]:
        """Its children."""
        with contextlib.suppress(OSError):
            return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        os.close(self.lives)
        os.read(self.ends, 1)  # its services and their workers are killed with it, but not at once: they write until then
        os.close(self.ends)
        removed(self.of)


@pytest.fixture
def feed(tmp_path):
    made = []

    def start(**options) -> Feed:
        made.append(Feed(tmp_path, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()
        assert not each.of.folder.exists()


def consume(at: str, name: str, out: Path) -> None:
    with out.open("w", buffering=1) as file, ServedLoader(at, job=name, timeout_s=60, patience_s=30) as loader:
        for epoch in range(EPOCHS):
            for batch in loader:
                file.write(json.dumps([epoch, [item[0] for item in batch], batch[0][1]]) + "\n")
        file.write("end\n")


def consumers(feed: Feed, folder: Path) -> list:
    found = [FORK.Process(target=consume, args=(feed.at, f"job{i}", folder / f"{i}.txt")) for i in range(feed.jobs)]
    for p in found:
        p.start()
    return found


def items_of(path: Path) -> tuple[list[list[int]], bool]:
    lines = path.read_text().splitlines()
    rows = [json.loads(x) for x in lines if x.startswith("[")]
    return [[i for epoch, items, _ in rows if epoch == e for i in items] for e in range(EPOCHS)], lines[-1:] == ["end"]


@pytest.mark.parametrize("seed", range(few(8)))
def test_survivors_get_each_item_once(seed, feed, tmp_path):
    """Killed at random moments: a worker, the service, its guard (which is then started by hand), a job; several in a run."""
    rng = random.Random(seed)
    made = feed(jobs=3)
    started = consumers(made, tmp_path)
    dead = -1
    for _ in range(3):
        wanted, path = rng.randrange(2, 25), tmp_path / "0.txt"
        deadline = time.monotonic() + 100
        while (not path.exists() or path.read_text().count("\n") < wanted) and started[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.003)
        victim = rng.choice(["worker", "service", "guard", "job"])
        services = made.below(made.process.pid)
        workers = [w for s in services for w in made.below(s)]
        if victim == "guard":
            made.process.kill()
            made.process.join()
            made.process = made.up()
        elif victim == "job" and dead < 0:
            dead = rng.randrange(3)
            started[dead].kill()
        else:
            for pid in (workers if victim == "worker" else services)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    for p in started:
        p.join(100)
    for i, p in enumerate(started):
        found, ended = items_of(tmp_path / f"{i}.txt")
        if i == dead:
            assert all(len(set(epoch)) == len(epoch) for epoch in found)  # never twice
        else:
            assert p.exitcode == 0 and ended
            assert [sorted(epoch) for epoch in found] == [list(range(ITEMS))] * EPOCHS
    drawn = {}  # whoever made a batch, and however often: the same random numbers
    for path in tmp_path.glob("*.txt"):
        for line in path.read_text().splitlines():
            if line.startswith("["):
                epoch, items, number = json.loads(line)
                assert drawn.setdefault((epoch, tuple(items)), number) == number


def test_what_is_refused_and_who_is_not_waited_for(feed):
    made = feed(jobs=1, items=9, slow_s=0)
    with ServedLoader(made.at, job="one", timeout_s=30) as one:
        assert len(one) == 3 and len(list(one)) == 3
        with pytest.raises(UsageError, match="its name is taken"):
            ServedLoader(made.at, job="one")
        with pytest.raises(UsageError, match="other batches than the 3"):
            _hello(made.at, Hello("two", 1, b"\0\0"))
        late = FORK.Process(target=_late, args=(made.at,))
        late.start()
        while late.is_alive():
            assert len(list(one)) == 3
        assert late.exitcode == 0 and len(list(one)) == 3 and len(list(one)) == 3
        for bad in (b"GET / HTTP/1.1\r\n\r\n", HELLO.pack(WORD, 1 << 31), HELLO.pack(WORD, 3) + b"\xc1\xc1\xc1"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(made.at)
                stranger.sendall(bad)
                assert stranger.recv(10) == b""
        assert len(list(one)) == 3
    with pytest.raises(ValueError, match="seen"):
        seen_of(Hello("x", 0, b"\0"), 9)
    for text in ("nowhere", "host:port", "h:70000"):
        with pytest.raises(UsageError, match="is no address"):
            ServedLoader(text)


def _late(at: str) -> None:
    """Comes later, begins with an epoch that nobody has begun, and leaves it early: the others go on."""
    with ServedLoader(at, job="late", timeout_s=60) as late:
        iterator = iter(late)
        assert len(next(iterator)) == 3
        iterator.close()


def _hello(at: str, hello: Hello) -> None:
    """Says hello as a job that was there before; raises what `ServedLoader` would."""
    loader = ServedLoader.__new__(ServedLoader)
    loader.at, loader.job, loader.timeout_s, loader.patience_s, loader.batches, loader.returns = at, hello.job, 10, 1, 16, 0
    loader._family, loader._address, loader._channel, loader._epoch = socket.AF_UNIX, at, None, hello.epoch
    import numpy as np

    loader._seen = np.zeros(16, np.bool_)
    loader._reach()


def test_no_service_and_a_job_too_few(feed, tmp_path):
    with pytest.raises(RunError, match="no service"):
        ServedLoader(str(tmp_path / "none.sock"), patience_s=0.1)
    made = feed(jobs=2, items=9)
    with ServedLoader(made.at, job="alone", timeout_s=0.3) as loader, pytest.raises(RunTimeout, match="0 of 3 batches of epoch 0 came"):
        next(iter(loader))


def test_a_service_that_fails_and_one_that_ends(tmp_path):
    with pytest.raises(RunError, match="exit code 1"):
        guarded([lambda again: 1 // 0])
    kills = tmp_path / "kills"

    def twice(again: bool) -> None:
        with kills.open("a") as file:
            file.write("x")
        if kills.read_text() != "xxx":
            os.kill(os.getpid(), signal.SIGKILL)

    assert guarded([twice]) == 2
    assert guarded([lambda again: time.sleep(100)], ending=lambda: True) == 0
    with listening("127.0.0.1:0") as any_port:
        assert any_port.getsockname()[1] > 0
    at = str(tmp_path / "s.sock")
    listening(at).close()
    listening(at).close()  # nobody listens there any more: replaced
    with listening(at), pytest.raises(OSError, match="in use"):
        listening(at, patience_s=0)
    assert hello_bytes(Hello("a"))[:8] == WORD


def test_other_children_of_the_process_are_left_to_who_waits_for_them():
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as other:
        while not os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT):
            pass
        assert guarded([lambda again: time.sleep(0.1)]) == 0
        assert other.wait(60) == 3
