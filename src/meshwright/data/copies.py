"""Copies of files in shared memory, for file systems whose pages the kernel does not hold: made by whoever reads a file first, used by all.

Copies of equal lists of files are shared by a user's processes. Each process holds a lock of the kernel's on their folder; what no living process
holds is removed by the next that makes copies, so that a killed process leaves nothing for long. Where shared memory is full, files that have no copy
yet are read where they lie, and `refused` counts them.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import hashlib
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import pages

__all__ = ["LISTS", "SHARED_MEMORY", "Copies", "redirected"]

SHARED_MEMORY = Path("/dev/shm")
LISTS = ("samples", "imgs", "files", "paths")  # where datasets list their paths
LOCK = "lock"


class Copies:
    """`sizes`: bytes of each file that may be copied. It can be pickled; forked and unpickled processes use the same copies."""

    def __init__(self, sizes: Mapping[str, int], seed: int, root: Path = SHARED_MEMORY) -> None:
        facts = repr((sorted(sizes.items()), seed))
        self.names = {path: str(n) for n, path in enumerate(sorted(sizes))}
        self.sizes, self.root = dict(sizes), root
        self.folder = root / f"{_begin()}{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"
        self.refused = 0
        self._end = weakref.finalize(self, _ended, self._held(), os.getpid(), root)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_end"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._end = weakref.finalize(self, _ended, self._held(), os.getpid(), self.root)

    def _held(self) -> int:
        """The folder's lock, shared, after the folders of the dead are gone."""
        swept(self.root)
        while True:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # another process was sweeping it away
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)
            try:
                if os.fstat(fd).st_ino == (self.folder / LOCK).stat().st_ino:
                    return fd
            except FileNotFoundError:  # it was swept away between
                pass
            os.close(fd)

    def path_of(self, path: str) -> str:
        """Its copy, made if it is not there yet; the path itself where it has none. Raises: OSError for a file that is gone."""
        name = self.names.get(path)
        if name is None:
            return path
        mine, found = self.folder / name, os.stat(path)  # noqa: PTH116  # by a text, for each item that is read
        if found.st_size != self.sizes[path]:  # it changed: its bytes were counted otherwise
            return path
        if not _is_of(mine, found) and not self._copied(path, mine, found):
            return path
        return str(mine)

    def _copied(self, path: str, mine: Path, found: os.stat_result) -> bool:
        """A copy carries its file's time of change from before it was made: one that is written meanwhile or later is copied again."""
        partial = mine.with_name(f".{mine.name}-{os.getpid()}")
        try:
            shutil.copyfile(path, partial)
            os.utime(partial, ns=(found.st_mtime_ns, found.st_mtime_ns))
            partial.rename(mine)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            self.refused += 1
            return False
        pages.drop(path)  # once is enough
        return True

    def has(self, path: str) -> bool:
        """Whether there is a copy of it as it is now. Raises: OSError for a file that is gone."""
        return path in self.names and _is_of(self.folder / self.names[path], os.stat(path))  # noqa: PTH116

    def close(self) -> None:
        """This process does without; the last one removes them."""
        self._end()


def _is_of(mine: Path, found: os.stat_result) -> bool:
    """Whether the copy is there, and the file was not written since."""
    try:
        made = mine.stat()
    except FileNotFoundError:
        return False
    return (made.st_size, made.st_mtime_ns) == (found.st_size, found.st_mtime_ns)


def _ended(lock: int, pid: int, root: Path) -> None:
    """Of a process that closes or ends, and of no child that inherited it."""
    if os.getpid() == pid:
        os.close(lock)
        swept(root)


def _begin() -> str:
    return f"meshwright-files-{os.getuid()}-"


def swept(root: Path) -> None:
    """Removes copies of this user that no living process uses."""
    for folder in root.glob(f"{_begin()}*"):
        try:
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # being made, or being removed
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(fd)


class _Redirected(Sequence[Any]):
    """A dataset's list of paths, or of rows that begin with one, with copies in their place."""

    def __init__(self, listed: Sequence[Any], copies: Copies) -> None:
        self.listed, self.copies = listed, copies

    def __len__(self) -> int:
        return len(self.listed)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        row = self.listed[index]
        if isinstance(index, slice):
            return [self._of(x) for x in row]
        return self._of(row)

    def _of(self, row: Any) -> Any:
        if isinstance(row, str | os.PathLike):
            return type(row)(self.copies.path_of(os.fspath(row)))  # type: ignore[call-arg]
        return (self.copies.path_of(os.fspath(row[0])), *row[1:])


def redirected(dataset: Any, copies: Copies) -> Any:
    """The dataset, with its lists of paths replaced. Raises: UsageError for one that lists none."""
    found = copy.copy(dataset)
    lists = [n for n in LISTS if isinstance(getattr(dataset, n, None), Sequence) and not isinstance(getattr(dataset, n), str)]
    lists = [n for n in lists if len(getattr(dataset, n)) == len(dataset)]
    if not lists:
        raise UsageError(
            f"a {type(dataset).__name__} does not list its paths, so it cannot be given copies", where="medium",
            hint=f"page-cache, or a dataset with {', '.join(LISTS)}",
        )  # fmt: skip
    for name in lists:
        setattr(found, name, _Redirected(getattr(dataset, name), copies))
    return found
