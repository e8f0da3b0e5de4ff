"""Tables of strategies for pages, from what strategies say of themselves: name, the first line of their module, where they come from.

A page holds `<!-- strategies: DECISION [QUESTION] -->`, the table, `<!-- end of strategies -->`; `rewritten` puts the table of today there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..cite import FOLKLORE
from ..decide.strategies import answering
from ..drive.strategies import decisions

__all__ = ["rewritten", "strategy_table"]

PART = re.compile(r"(<!-- strategies: ([\w.]+) ?(\w*) -->\n).*?(<!-- end of strategies -->)", re.DOTALL)


def strategy_table(decision: str, question: str = "") -> str:
    """One row per module, with the names of its strategies."""
    kinds = decisions()[decision]
    lines = ["| strategy | what it is | from |", "|---|---|---|"]
    for module, own in groupby(answering(kinds, question) if question else kinds, key=lambda kind: kind.__module__):
        lines.append(_row((sys.modules[module].__doc__ or "").splitlines()[0], list(own)))
    return "\n".join(lines) + "\n"


def _row(what: str, kinds: Sequence[type[Any]]) -> str:
    cites = [k.cite for k in kinds if k.cite is not FOLKLORE]
    sources = dict.fromkeys(f"{c.title}, {c.venue}" + ("" if str(c.year) in c.venue else f" {c.year}") for c in cites)
    return f"| {', '.join(f'`{k.name}`' for k in kinds)} | {what.rstrip('.')} | {'; '.join(sources)} |"


def rewritten(page: str) -> str:
    """The page with its tables as they are today."""
    return PART.sub(lambda found: found[1] + strategy_table(found[2], found[3]) + found[4], page)
