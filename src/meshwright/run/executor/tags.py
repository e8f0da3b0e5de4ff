"""Tags of messages between ranks, on every transport that has tags.

A message of a program has tag channel * TAG_WINDOW + its number on the channel mod TAG_WINDOW. What goes beside programs has a tag of `ReservedTag`,
which no channel's tag reaches. gloo takes tags of TAG_BITS bits.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["TAG_BITS", "TAG_WINDOW", "ReservedTag"]

TAG_WINDOW = 16  # messages of a channel under way that can be told apart by tag; those of one tag are told apart by their order
TAG_BITS = 31


class ReservedTag(IntEnum):
    """MESSAGE_TIMES and BESIDE_PROGRAM are first tags, of as many as are needed; the others stand alone."""

    MESSAGE_TIMES = 1 << 20  # of a calibration, before any program runs
    BESIDE_PROGRAM = 1 << 30  # while a program runs: checksums of its messages, sums of a second-order optimizer
    BUILTIN_ABORT = (1 << TAG_BITS) - 9  # never sent: whoever waits for it times out, which ends the built-in backend's waits
    ABORT = (1 << TAG_BITS) - 7  # the same for the context of a group's own messages
