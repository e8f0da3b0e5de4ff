"""The journal of a run: what was decided and what an engine was told, one flushed line each, in a folder that one process at a time may drive."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from ...errors import UsageError
from ...io.cluster.journal import SCHEMA, VERSION, Record, read_journal, record_bytes

__all__ = ["Journal"]


class Journal:
    """`records`: all so far; `run`: the name of the run, which its jobs' names on the engine begin with. `fresh`: nothing stood there before.

    Raises: UsageError where another process drives the folder, or the journal is another engine's; FormatError."""

    def __init__(self, folder: Path, *, engine: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.jsonl"
        self._file = self.path.open("ab")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError("another process drives this run", where=str(folder), hint="wait for it, or name another --folder") from None
            self.fresh = self.path.stat().st_size == 0
            if self.fresh:
                self.records: list[Record] = []
                self.say(Record(what="run", time_s=time.time(), text=f"{engine} {secrets.token_hex(4)}", schema=SCHEMA, version=VERSION))
            else:
                self.records = read_journal(self.path)
                self._cut()
            kind, _, self.run = self.records[0].text.partition(" ")
            if kind != engine:
                raise UsageError(f"this run is on the engine {kind[:32]!r}", where=str(folder), hint=f"--engine {kind[:32]}, or another --folder")
        except BaseException:
            self._file.close()
            raise

    def _cut(self) -> None:
        """Remove a last line that a kill cut short."""
        data = self.path.read_bytes()
        os.ftruncate(self._file.fileno(), data.rfind(b"\n") + 1)

    def say(self, record: Record) -> None:
        self._file.write(record_bytes(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(record)

    def note(self, text: str) -> None:
        self.say(Record(what="note", time_s=time.time(), text=text))

    def close(self) -> None:
        self._file.close()
