"""Whether members stay in memory while they are read: with a budget that the machine does not leave, every epoch reads some of them again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable

from ..io.quantity import show_size
from ..profile.input_plan import MIN_HELD_SHARE
from . import pages

__all__ = ["Watch"]

MAX_WATCHED_FILES = 256  # the first members that this process reads, which the kernel would take first
MIN_READS = 64  # until the first look; from then on twice as many each time, as a loader's workers may read few each
MAX_READS = 4096  # from one look to the next


class Watch:
    """Of one process. A look costs some 20 us a file."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.look_at = budget_bytes, MIN_READS
        self.until: dict[str, int] = {}
        self.reads, self.warned = 0, False

    def __call__(self, read: Iterable[tuple[str, int]]) -> None:
        """These beginnings of files, members, were read. Warns once, when a look finds them gone."""
        self.reads += 1
        if len(self.until) < MAX_WATCHED_FILES:
            self.until.update(read)
        if self.reads < self.look_at or self.warned:
            return
        self.look_at += min(self.reads, MAX_READS)
        there = 0
        for path, until in list(self.until.items()):
            with contextlib.suppress(OSError):  # gone: its reader says so
                there += pages.resident_bytes(path, 0, until)
        asked = sum(self.until.values())
        if there < MIN_HELD_SHARE * asked:
            self.warned = True
            stays = show_size(int(self.budget_bytes * there / asked))
            warnings.warn(
                f"a cache of {show_size(self.budget_bytes)} does not stay in memory: of {len(self.until)} kept files that were read"
                f" {there / asked:.0%} of the bytes are there; ask for at most {stays}, or for a larger memory limit",
                stacklevel=4,
            )
