"""Plans of process groups, kept between the runs of a user, so that only the first run of a job waits for planning.

A file per question: what was asked (fabric, devices, operation, size class, settings, this package's own files) is hashed to its name; the answer
lies in it behind a header with its length and hash. Whatever is damaged, of another version, too large or not readable counts as not there. Files
are written all or nothing, and those not used for longest go when the folder grows beyond `MAX_FOLDER_BYTES`, so runs side by side need no lock.

The folder is the user's own (mode 0700): MESHWRIGHT_CACHE, or `meshwright/plans` where the system keeps caches. What is read is checked like a
plan file before it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ...errors import MeshwrightError
from ...io.atomic import write_bytes
from ...io.strict_json import decode, read_at_most, refuse_ambiguous
from ...kernels.kept import user_cache

__all__ = ["MAX_FILE_BYTES", "MAX_FOLDER_BYTES", "PlanCache", "cache_folder"]

VERSION = 1
MAX_FILE_BYTES = 64 << 20  # of one answer: a larger one is planned again, which bounds what a damaged file can make a reader hold
MAX_FOLDER_BYTES = 256 << 20  # of all answers: those used longest ago go first
SUFFIX = ".plans"
_MAX_HEADER_BYTES = 512  # of the first line: schema, version, two hashes of 64 characters and a length take less
OFF = ("0", "off")


class _Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    question: str
    length: int
    sha256: str


_HEADER = msgspec.json.Decoder(_Header)
_SCHEMA = "meshwright.plan-cache"


def cache_folder(named: str) -> Path | None:
    """The folder for the setting `named` (a path, "" for the default, "0" for none)."""
    if named in OFF:
        return None
    if named:
        return Path(named)
    folder = user_cache("meshwright")
    return None if folder is None else folder / "plans"


class PlanCache:
    """`get` and `put` never fail: what cannot be kept is planned again."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, question: Mapping[str, Any]) -> bytes | None:
        name = _name(question)
        folder = self._own()
        if folder is None:
            return None
        try:
            where, data = read_at_most(folder / f"{name}{SUFFIX}", MAX_FILE_BYTES)
            head, _, answer = data.partition(b"\n")
            if len(data) > MAX_FILE_BYTES or len(head) > _MAX_HEADER_BYTES:
                return None
            header = decode(head, _HEADER, where)
            refuse_ambiguous(head, where)
        except MeshwrightError:
            return None
        wanted = _Header(schema=_SCHEMA, version=VERSION, question=name, length=len(answer), sha256=hashlib.sha256(answer).hexdigest())
        if header != wanted:
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / f"{name}{SUFFIX}")  # used last
        return answer

    def put(self, question: Mapping[str, Any], answer: bytes) -> None:
        name = _name(question)
        header = _Header(schema=_SCHEMA, version=VERSION, question=name, length=len(answer), sha256=hashlib.sha256(answer).hexdigest())
        data = msgspec.json.encode(header) + b"\n" + answer
        if len(data) > MAX_FILE_BYTES or (folder := self._own(make=True)) is None:
            return
        with contextlib.suppress(MeshwrightError, OSError):
            write_bytes(folder / f"{name}{SUFFIX}", data)
            _sweep(folder)

    def _own(self, *, make: bool = False) -> Path | None:
        """The folder, if it is this user's alone."""
        folder = self.folder
        if folder is None:
            return None
        try:
            if make:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            return None
        private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022
        return folder if private else None


def _name(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode([VERSION, _package(), question], order="deterministic")).hexdigest()


@cache
def _package() -> str:
    """Of this package's files: another version of a planner is another question."""
    root = Path(__file__).parents[2]
    rows = []
    for path in sorted(root.rglob("*.py")):
        found = path.stat()
        rows.append((str(path.relative_to(root)), found.st_size, found.st_mtime_ns))
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _sweep(folder: Path) -> None:
    """The files used last stay, as many as fit."""
    rows = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another run sweeps too
            found = path.stat()
            rows.append((found.st_mtime_ns, found.st_size, path))
    total = 0
    for _, size, path in sorted(rows, reverse=True):
        total += size
        if total > MAX_FOLDER_BYTES:
            path.unlink(missing_ok=True)
