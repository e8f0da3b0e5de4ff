"""Where the members of a tar archive lie, grouped to samples as WebDataset names them.

`a/0001.jpg` and `a/0001.CLS` are one sample, `a/0001`, with `jpg` and `cls`. Names without an extension, those that begin with a dot (`.DS_Store`,
`._0001.jpg`) and what lies in `__name__` are no samples. Headers alone are read. Only plain files count; links, devices and folders are passed over.
Compressed archives are refused: members have no offset.
"""

from __future__ import annotations

import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import FormatError, UsageError

__all__ = ["TarSample", "read_tar_index"]

SAMPLE = re.compile(r"(?!__[^/]*__(?:$|/))(?P<key>(?:.*/)?[^./]+)\.(?P<extension>[^/]*)", re.DOTALL)
MAX_MEMBERS = 20_000_000  # of an archive: some gigabytes of index


@dataclass(frozen=True)
class TarSample:
    """A sample's key, and of each of its files: extension (all after the first dot of its name, in small letters), offset and length."""

    key: str
    files: tuple[tuple[str, int, int], ...]

    @property
    def span(self) -> tuple[int, int]:
        """Offset and length of the bytes from its first file to its last."""
        begin = min(offset for _, offset, _ in self.files)
        return begin, max(offset + length for _, offset, length in self.files) - begin


def read_tar_index(path: str | os.PathLike[str]) -> list[TarSample]:
    """The samples of an archive, in its order. Raises: UsageError where it cannot be opened; FormatError for what is no plain tar archive."""
    where = Path(path).name
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            size = Path(path).stat().st_size
            for count, member in enumerate(archive):
                if count >= MAX_MEMBERS:
                    raise FormatError(f"more than {MAX_MEMBERS} members", where=where, hint="divide the archive")
                if not member.isreg() or member.sparse is not None:
                    continue
                if member.offset_data + member.size > size:
                    raise FormatError(f"{member.name} ends beyond the file", where=where, hint="the archive is cut short: copy it again")
                if named := SAMPLE.fullmatch(member.name):
                    files, extension = found.setdefault(named["key"], {}), named["extension"].lower()
                    if extension in files:
                        raise FormatError(f"{member.name} is there twice", where=where, hint="a sample has one file of an extension")
                    files[extension] = member.offset_data, member.size
                archive.members = []  # type: ignore[attr-defined]  # tarfile keeps all headers otherwise
    except tarfile.TarError as error:
        raise FormatError(f"not a plain tar archive: {error}", where=where, hint="unpack .tar.gz first; items are read at their offsets") from error
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), hint="check the path") from error
    return [TarSample(key, tuple((extension, *at) for extension, at in files.items())) for key, files in found.items()]
