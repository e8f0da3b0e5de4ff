"""Files that stay in the page cache: which, what an epoch then reads, and what happens to files that change. The kernel is the oracle, and what it
takes by itself meanwhile counts as there."""

from __future__ import annotations

import os
import pickle
import random
import tarfile
from pathlib import Path

import pytest
from page_cache import as_if_nothing_was_taken

from effort import few
from meshwright.data import FileRange, Kept, TarSamples, pages
from meshwright.data.kept import files_of
from meshwright.errors import UsageError

SIZE = 40_000  # of a file, ten pages


class Files:
    """A dataset as a user writes it."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()


def written(path: Path, data: bytes) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # pages that are not on the disk yet cannot leave the page cache
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "resident_bytes", pages.resident_bytes)  # puts it back at the end
    as_if_nothing_was_taken()
    probe = written(tmp_path / "probe", bytes(SIZE))
    pages.drop(probe)
    if pages.resident_bytes(probe):
        pytest.skip("this file system keeps all files in memory")
    return tmp_path


def some_files(folder: Path, count: int = 12, sizes: tuple[int, ...] = (SIZE,)) -> list[str]:
    made = [written(folder / f"{i:03d}", bytes([i % 251]) * sizes[i % len(sizes)]) for i in range(count)]
    for path in made:
        pages.drop(path)
    return made


def in_memory(paths: list[str]) -> set[str]:
    return {path for path in paths if pages.resident_bytes(path) == pages.file_bytes(path)}


@pytest.mark.parametrize("seed", range(few(4)))
def test_members_stay_and_others_go_in_any_order(folder, seed):
    rng = random.Random(seed)
    paths = some_files(folder, 12, (SIZE, 1, 4096, 9000, 70_000))
    budget = rng.randrange(0, 12 * SIZE)
    kept = Kept(Files(paths), budget, seed=seed)
    found = kept.check()
    assert found.member_bytes <= budget and found.total_bytes == sum(map(pages.rounded, map(pages.file_bytes, paths)))
    members: set[str] = set()
    for epoch in range(3):
        order = rng.sample(range(12), 12)
        for index in order:
            before = in_memory([paths[index]])
            assert kept[index] == Path(paths[index]).read_bytes() if epoch == 2 and not before else kept[index]
            if epoch:
                assert bool(before) == (paths[index] in members)  # as many bytes from memory as the members have, every epoch
        if epoch == 2:
            kept.readmit()  # the comparison above read them once more
        now = in_memory(paths)
        assert epoch == 0 or now == members
        members = now
    found = kept.check()
    assert len(members) == found.members == kept.members and found.resident_bytes == sum(pages.rounded(pages.file_bytes(p)) for p in members)
    assert found.others_resident_bytes == 0 and found.changed == 0 and found.holds == (found.resident_bytes >= 0.98 * found.member_bytes)
    left = [p for p in paths if p not in members]  # nothing more would have fitted
    assert not left or min(pages.rounded(pages.file_bytes(p)) for p in left) > budget - found.member_bytes


def test_all_processes_choose_the_same_members(folder):
    paths = some_files(folder)
    first, second = Kept(Files(paths), 5 * 40_960, seed=3), Kept(Files(paths), 5 * 40_960, seed=3)
    other = Kept(Files(paths), 5 * 40_960, seed=4)
    copy = pickle.loads(pickle.dumps(first))
    assert first.members == 5 and (first._member == second._member).all() and (first._member == copy._member).all()
    assert (first._member != other._member).any()
    assert len(copy) == 12 and copy[0] == first[0] and copy.paths == paths  # other attributes are the dataset's own
    larger = Kept(Files(paths), 7 * 40_960, seed=3)
    assert (larger._member >= first._member).all()  # a larger budget adds members


def test_a_batch_at_once(folder):
    paths = some_files(folder)

    class Batched(Files):
        def __getitems__(self, indices):
            return [("batch", self[i]) for i in indices]

    kept = Kept(Batched(paths), 0)
    assert kept.__getitems__([3, 1]) == [("batch", Path(paths[3]).read_bytes()), ("batch", Path(paths[1]).read_bytes())]
    kept.__getitems__([3, 1])
    assert not in_memory(paths) and Kept(Files(paths), 0).__getitems__([2]) == [Path(paths[2]).read_bytes()]


def test_a_file_that_grows_is_no_member_any_more(folder):
    paths = some_files(folder)
    kept = Kept(Files(paths), 12 * 40_960)
    for index in range(12):
        kept[index]
    assert kept.check().changed == 0 and kept.members == 12
    written(Path(paths[5]), b"x" * (SIZE + 1))
    found = kept.check()  # what is left holds: a change is no lack of memory
    assert found.changed == 1 and "1 items have changed" in str(found) and found.holds and (found.members, found.member_bytes) == (11, 11 * 40_960)
    assert kept[5] == b"x" * (SIZE + 1)
    assert kept.members == 11 and pages.resident_bytes(paths[5]) == 0
    Path(paths[7]).unlink()
    with pytest.raises(FileNotFoundError):
        kept[7]
    with pytest.raises(FileNotFoundError):
        kept.check()


def test_what_others_took_is_read_again(folder):
    paths = some_files(folder)
    kept = Kept(Files(paths), 6 * 40_960)
    for index in range(12):
        kept[index]
    assert kept.check().holds and kept.readmit() == 0
    for path in paths:
        pages.drop(path)
    found = kept.check()
    assert not found.holds and "0 would stay" in str(found) and found.resident_bytes == 0
    assert kept.readmit() == 6 * SIZE and kept.check().resident_bytes == 6 * 40_960


def test_items_inside_archives(folder):
    archives = []
    for a in range(3):
        with tarfile.open(folder / f"{a}.tar", "w") as archive:
            for i in range(8):
                for name, data in ((f"d/{a}{i}.bin", bytes([i]) * 20_000), (f"d/{a}{i}.cls", str(i).encode())):
                    source = written(folder / "member", data)
                    archive.add(source, arcname=name)
        archives.append(str(folder / f"{a}.tar"))
    for archive in archives:
        written(Path(archive), Path(archive).read_bytes())
        pages.drop(archive)
    samples = TarSamples(archives, transform=lambda item: (item["__key__"], item["bin"], int(item["cls"])))
    whole = pages.rounded(pages.file_bytes(archives[0]))
    kept = Kept(samples, whole + whole // 2)
    assert 8 < kept.members < 16  # one archive and the beginning of another
    for _ in range(2):
        for index in random.Random(1).sample(range(24), 24):
            assert kept[index] == (f"d/{index // 8}{index % 8}", bytes([index % 8]) * 20_000, index % 8)
    found = kept.check()
    assert found.holds and found.others_resident_bytes <= 24 * 2 * pages.PAGE  # edges of pages that a member and another share
    lengths = [samples.files_of(i).length for i in range(24)]
    assert sum(n for i, n in enumerate(lengths) if kept._member[i]) <= whole + whole // 2


def test_how_a_dataset_says_its_files(folder):
    paths = some_files(folder, 3)

    class Folder(Files):
        def __init__(self) -> None:
            self.samples = [(p, 0) for p in paths]

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> bytes:
            return Path(self.samples[index][0]).read_bytes()

    assert files_of(Folder())(1) == paths[1] and files_of(Files(paths))(2) == paths[2]
    with pytest.raises(UsageError, match="files of a list are not known") as caught:
        Kept([1, 2, 3], 10)
    assert "files=function" in str(caught.value.hint)
    pairs = Kept([0, 1], 40_960, files=lambda i: (paths[i], FileRange(paths[2], 8192 * i, 8192)))
    assert len(pairs) == 2 and pairs.ranges(1) == [FileRange(paths[1]), FileRange(paths[2], 8192, 8192)] and pairs[1] == 1


def test_no_items_and_absent_files(folder):
    with pytest.raises(UsageError, match="0 items"):
        Kept(Files([]), 10, files=str)
    with pytest.raises(FileNotFoundError):
        Kept(Files([str(folder / "gone")]), 10)


def test_a_loader_with_workers(folder):
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed")
    paths = some_files(folder)
    loader = data.DataLoader(Kept(Files(paths), 4 * 40_960), batch_size=5, shuffle=True, num_workers=2, collate_fn=list, persistent_workers=True)
    for _ in range(2):
        found = [x for batch in loader for x in batch]
        assert len(in_memory(paths)) == 4
    assert sorted(found) == sorted(Path(p).read_bytes() for p in paths)
