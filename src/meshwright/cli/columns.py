"""Lines that fit the terminal."""

from __future__ import annotations

import shutil
from textwrap import fill

__all__ = ["hung"]

WIDE = 1_000_000  # where no terminal and no COLUMNS say how wide lines may be: each stays one line
NARROWEST = 40


def hung(first: str, text: str) -> str:
    """`first` and `text` on one line; where the terminal is narrower, the text goes on below its beginning."""
    width = max(shutil.get_terminal_size((WIDE, 24)).columns, len(first) + NARROWEST)
    return fill(text, width, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False, break_on_hyphens=False)
