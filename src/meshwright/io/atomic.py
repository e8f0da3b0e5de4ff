"""Writing a file so that a reader sees the old content or the new, never half of it.

The data goes to a temporary file in the same folder, is flushed to the disk and takes the name in one step (POSIX rename).
Killed or full-disk writes leave the old file; the temporary one is removed on every error.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import MeshwrightError, UsageError

__all__ = ["write_bytes", "write_chunks", "write_text"]


_WAYS_ON = {
    errno.ENOSPC: "free space, or name a place on another disk",
    errno.EDQUOT: "the quota is used up: remove files, or name a place on another disk",
    errno.EROFS: "this file system can only be read: name a place on another one",
    errno.EACCES: "you may not write there: check permissions, or name another place",
}


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`, all or nothing. A symbolic link is followed; devices and pipes (`/dev/stdout`) are written directly.

    Raises: UsageError when the folder does not exist or `path` is a folder; MeshwrightError when the system refuses the write.
    """
    write_chunks(path, (data,))


def write_chunks(path: str | os.PathLike[str], chunks: Iterable[bytes]) -> None:
    """`write_bytes` of what `chunks` yields one after the other; if it raises, nothing is written."""
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(path), hint="check the path") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError("is a folder, not a file", where=str(path), hint="name a file in it")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", where=str(path), hint="make it first, or name another place")
    try:
        if mode is not None and not stat.S_ISREG(mode):
            with Path(path).open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            return
        _replace(target, chunks, stat.S_IMODE(mode) if mode is not None else 0o666 & ~_umask())
    except OSError as error:
        way_on = _WAYS_ON.get(error.errno or 0, "check permissions and free space")
        raise MeshwrightError(f"cannot write: {error.strerror}", where=str(path), hint=way_on) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode())


def _replace(target: Path, chunks: Iterable[bytes], mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:  # also Ctrl-C between the two steps: leave nothing behind
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's umask, read without changing it where Linux shows it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    current = os.umask(0o077)
    os.umask(current)
    return current
