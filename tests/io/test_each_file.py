"""One function over many files in several processes: the same answers in the same order, errors as they were, nothing left running."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from meshwright.errors import FormatError, RunError
from meshwright.io import each_file as module
from meshwright.io.each_file import each_file, processes_for, unpacked_bytes


@pytest.fixture(autouse=True)
def forking(monkeypatch):
    """Test runners may have threads of their own, which the children here do not touch."""
    monkeypatch.setattr(module, "_may_fork", lambda: True)
    yield
    assert not multiprocessing.active_children()


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{i}.json" for i in range(7)]
    for i, path in enumerate(paths):
        path.write_text(str(i) * (i + 1))
    return paths


@pytest.mark.parametrize("processes", [1, 2, 3, 20])
def test_the_order_is_that_of_the_files_whatever_ends_first(files, processes):
    def read(i, path):
        time.sleep(0.02 * (len(files) - i))
        return path.read_text(), os.getpid()

    found = each_file(read, files, processes=processes)
    assert [text for text, _ in found] == [str(i) * (i + 1) for i in range(7)]
    assert len({pid for _, pid in found}) == min(processes, 7) and (os.getpid() in {pid for _, pid in found}) == (processes == 1)


def test_the_first_files_error_is_raised_as_it_was(files):
    def read(i, path):
        time.sleep(0.1 if i == 1 else 0.0)
        if i in (1, 2):
            raise FormatError("is odd", where=path.name, hint="mend it", data={"i": i})

    for processes in (1, 3):
        with pytest.raises(FormatError) as caught:
            each_file(read, files, processes=processes)
        assert (caught.value.where, caught.value.hint, caught.value.data) == ("1.json", "mend it", {"i": 1})


def test_a_killed_process_is_an_error_that_names_the_file(files):
    def read(i, path):
        if i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    with pytest.raises(RunError, match=r"2\.json: the process that read it was killed by signal 9") as caught:
        each_file(read, files, processes=2)
    assert "memory" in caught.value.hint


def test_an_interrupted_wait_ends_the_processes(files, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.connection.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        each_file(lambda i, path: time.sleep(30), files, processes=2)


def test_processes_end_when_nobody_asks_them_any_more(tmp_path, files):
    """The one who asks is killed: the others finish the file at hand and see that nobody is left, though they inherited each other's ends."""
    asker = os.fork()
    if asker == 0:

        def read(i, path):
            (tmp_path / f"pid-{i}").write_text(str(os.getpid()))
            time.sleep(0.3)

        try:
            each_file(read, files, processes=3)
        finally:
            os._exit(0)
    until = time.monotonic() + 60
    while not all((tmp_path / f"pid-{i}").is_file() and (tmp_path / f"pid-{i}").read_text() for i in range(3)) and time.monotonic() < until:
        time.sleep(0.01)
    pids = [int((tmp_path / f"pid-{i}").read_text()) for i in range(3)]
    os.kill(asker, signal.SIGKILL)
    os.waitpid(asker, 0)
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_how_many_at_once(monkeypatch):
    monkeypatch.setattr("meshwright.fabric.preset_nets.usable_cores", lambda: 4)
    monkeypatch.setattr(module, "free_bytes", lambda: 64 << 30)
    large = 100 << 20
    assert processes_for([large] * 8) == 4 and processes_for([large] * 3) == 3
    assert processes_for([large]) == 1 and processes_for([]) == 1
    assert processes_for([1000] * 8) == 1 and processes_for([large, 1000]) == 1, "small files are not worth a process"
    monkeypatch.setattr(module, "free_bytes", lambda: 2 << 30)
    assert processes_for([large] * 8) == 2, "two times 400 MiB fit into half of what is free"
    monkeypatch.setattr(module, "free_bytes", lambda: 0)
    assert processes_for([large] * 8) == 1


def test_sizes_of_files(tmp_path):
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_bytes(b"x" * 100)
    packed.write_bytes(b"x" * 100)
    assert unpacked_bytes(plain) == 100 and unpacked_bytes(packed) == 1200 and unpacked_bytes(tmp_path / "none") == 0
