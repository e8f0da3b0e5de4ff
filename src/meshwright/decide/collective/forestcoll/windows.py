"""How many servers a tree serves at once (`trees.lower`, `Lowering.window`), where there are so many that their program leaves few pieces.

One message at a time per link would need the fewest pieces, but such a program is fast only in perfect step: with rates off by a hundredth, eight
servers reach 0.78 of the bound. With several at once links share out what others leave: with 8 of 32 servers at once and rates off by a hundredth
0.944 of the bound are left of 0.971, with 16 at once 0.937 of 0.948, so a window costs nothing even there.
Source: the rounds of direct exchange (Thakur and Gropp, EuroPVM/MPI 2003), several at once; where windows begin is ours.
"""

from __future__ import annotations

from ....errors import Unsupported
from ..trees.parts import turns_of
from .prepared import Prepared

__all__ = ["WINDOW_SERVERS", "in_windows", "most_folded_steps", "require_window"]

MAX_PIECES_WITHOUT = 512  # programs of fewer pieces take windows: at the end of the last, a part in so many is still passed on inside
WINDOW_SERVERS = 32
MAX_FOLDED_STEPS = 1 << 21  # executed by the stored lanes of a folded program, which a simulator and a checker look at alone: seconds of a core
MAX_FOLDED_STEPS_OF_STAYING = 1 << 23  # of one root, as many pieces as fill the pipeline: 4 s of a core. Twice as many: a report takes 5 GB
MIN_TURNS = 512  # windows times pieces that are enough: 0.991 of the bound of an all-gather on 1,024 servers, where half as many reach 0.989


def most_folded_steps(ready: Prepared) -> int:
    """Steps up to which more pieces are chosen. Where many servers stand beside some that differ, two thirds are trees of the latter."""
    return MAX_FOLDED_STEPS_OF_STAYING if ready.fixed and (not ready.limbs or ready.servers > WINDOW_SERVERS) else MAX_FOLDED_STEPS


def in_windows(ready: Prepared, pieces: int, window: int | None, *, fixed: bool) -> tuple[int, int]:
    """Servers at once (0 = all) and pieces: those asked for, else windows, and fewer pieces, where so many servers leave few."""
    if window is None:
        many = pieces < MAX_PIECES_WITHOUT and ready.servers > WINDOW_SERVERS
        window = WINDOW_SERVERS if many and _enters_from_one(ready) else 0
    # What has come from one root is passed on a piece later, however it is split then.
    if not window or fixed or (ready.fixed and not ready.limbs):
        return window, pieces
    return window, min(pieces, -(-MIN_TURNS // turns_of(ready.servers, window)))


def require_window(ready: Prepared, window: int | None) -> None:
    """Raises: Unsupported where one is asked for and the trees take none."""
    if window and not _enters_from_one(ready):
        text = "these trees take no window: they are not folded, or enter a server several times or from several others"
        raise Unsupported(text, hint="leave window out", where="forestcoll")


def _enters_from_one(ready: Prepared) -> bool:
    """Folded, and every tree enters each server once, from the first of the alike ones; that one itself, if it is not the root's."""
    moving = [v for v in range(ready.ranks) if v not in set(ready.fixed)]
    size = len(moving) // ready.servers
    server = {v: i // size for i, v in enumerate(moving)}
    for tree in {id(x): x for part in ready.parts for x in (part.up, part.down) if x is not None}.values() if ready.servers > 1 else ():
        into = [v for v in tree.order[1:] if server.get(tree.parent[v], -1) != server.get(v, -1)]
        from_one = all(server.get(tree.parent[v], -1) == (0 if server.get(v, -1) else -1) for v in into)
        if not from_one or len({server.get(v, -1 - v) for v in into}) < len(into):
            return False
    return ready.servers > 1
