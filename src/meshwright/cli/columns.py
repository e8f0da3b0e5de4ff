"""Lines that fit the terminal."""

from __future__ import annotations

import shutil
from textwrap import fill, wrap

__all__ = ["folded", "hung"]

WIDE = 1_000_000  # where no terminal and no COLUMNS say how wide lines may be: each stays one line
NARROWEST = 40
DEEPER = 4  # blanks before what follows of a line that is folded, beyond its own


def hung(first: str, text: str) -> str:
    """`first` and `text` on one line; where the terminal is narrower, the text goes on below its beginning."""
    width = max(shutil.get_terminal_size((WIDE, 24)).columns, len(first) + NARROWEST)
    return fill(text, width, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False, break_on_hyphens=False)


def folded(text: str) -> str:
    """Lines that are wider than the terminal go on below, between words: a terminal would break them anywhere."""
    columns, lines = shutil.get_terminal_size((WIDE, 24)).columns, []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip()) + DEEPER
        fits = len(line) <= columns or columns < indent + NARROWEST
        lines += [line] if fits else wrap(
            line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False, expand_tabs=False
        )  # fmt: skip
    return "\n".join(lines)
