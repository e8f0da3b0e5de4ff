"""Members kept as copies in shared memory: read from there, made once, gone with the last process; full memory, changed files, other datasets."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest

from meshwright.data import Kept
from meshwright.data.copies import SHARED_MEMORY, Copies
from meshwright.errors import UsageError

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
FORK = multiprocessing.get_context("fork")


class Listed:
    """torchvision's form: rows of a path and a label."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(p), n) for n, p in enumerate(sorted(folder.iterdir()))]
        self.imgs = self.samples
        self.read = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        path, label = self.samples[index]
        self.read.append(path)
        return Path(path).read_bytes(), label


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "items"
    folder.mkdir()
    for n in range(6):
        (folder / f"{n}").write_bytes(bytes([n]) * 5000)  # two pages each
    yield folder


def becomes(true) -> bool:
    late = time.monotonic() + 120
    while not true() and time.monotonic() < late:
        time.sleep(0.01)
    return true()


def gone(folder: Path) -> bool:
    """Another process of this user may be the one that removes it."""
    return becomes(lambda: not folder.exists())


def test_members_are_read_from_copies_and_others_where_they_lie(files):
    kept = Kept(Listed(files), 3 * 8192, medium="shared-memory", seed=1)
    assert kept.members == 3 and not kept.check().holds  # nothing was read yet
    for _ in range(2):
        assert [kept[n] for n in range(6)] == [(bytes([n]) * 5000, n) for n in range(6)]
    read = kept.dataset.read[6:]
    copied = [p for p in read if p.startswith(str(SHARED_MEMORY))]
    assert len(copied) == 3 and len(read) == 6 and kept.check().holds and kept.readmit() == 0
    assert [row[1] for row in kept.samples[0:2]] == [0, 1] and len(list(kept.samples)) == 6  # attributes are handed on, with copies
    other = pickle.loads(pickle.dumps(kept))
    assert other[0] == kept[0] and other.check().holds
    other.close()
    folder = Path(copied[0]).parent
    assert folder.exists()
    kept.close()
    kept.close()
    assert gone(folder)


def test_a_file_that_changes_and_one_that_is_gone(files):
    kept = Kept(Listed(files), 6 * 8192, medium="shared-memory")
    (files / "2").write_bytes(b"grown" * 4000)
    assert kept[2][0] == b"grown" * 4000 and kept.check().changed == 1
    (files / "3").unlink()
    with pytest.raises(FileNotFoundError):
        kept[3]
    kept.close()


def test_a_file_that_is_written_anew_with_as_many_bytes(files):
    """As when labels or pictures are put right between epochs: what was copied before is not served any more."""
    kept = Kept(Listed(files), 6 * 8192, medium="shared-memory")
    assert kept[2][0] == bytes([2]) * 5000
    (files / "2").write_bytes(bytes([9]) * 5000)
    os.utime(files / "2", ns=(0, 1))  # another time than before, however coarse the clock of files is
    assert kept[2][0] == bytes([9]) * 5000 and kept.dataset.read[-1].startswith(str(SHARED_MEMORY))
    other = Kept(Listed(files), 6 * 8192, medium="shared-memory")  # a job that comes later takes the same copies
    assert other[2][0] == bytes([9]) * 5000
    (files / "2").write_bytes(bytes([8]) * 5000)
    os.utime(files / "2", ns=(0, 2))
    assert not kept._copies.has(str(files / "2")) and other.readmit() > 0
    kept.close()
    other.close()


def test_full_memory_is_done_without(files, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    copies = Copies({str(p): 5000 for p in files.iterdir()}, 0)
    monkeypatch.setattr(shutil, "copyfile", full)
    path = str(files / "0")
    assert copies.path_of(path) == path and copies.refused == 1 and not copies.has(path)
    monkeypatch.undo()
    assert copies.path_of(path) != path and copies.has(path)
    copies.close()


def test_what_a_killed_process_left_is_removed_by_the_next(files):
    def hold() -> None:
        held = Copies({str(files / "0"): 5000}, 7)
        held.path_of(str(files / "0"))
        time.sleep(100)

    process = FORK.Process(target=hold)
    process.start()
    mine = Copies({str(files / "0"): 5000}, 7)
    folder = mine.folder
    assert becomes((folder / "0").exists)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert mine.has(str(files / "0"))
    mine.close()
    assert gone(folder)


def test_what_cannot_be_given_copies_is_refused(files):
    class Own:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

        def files_of(self, index):
            return str(files / str(index))

    with pytest.raises(UsageError, match="does not list its paths"):
        Kept(Own(), 8192, medium="shared-memory")
    with pytest.raises(UsageError, match="a medium 'disk'"):
        Kept(Own(), 8192, medium="disk")
