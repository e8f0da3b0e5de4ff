"""A rank's own view of itself, from its recorder and the code that it walks. Made only when something is wrong, so it may take its time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from ...program import Program
from ..lanes import channel_messages
from .code import Op, RankCode
from .recorder import Recorder
from .verdict import HISTORY, View

__all__ = ["partners", "progress", "view_of"]

MOST_OPEN = 512


_MOST_KNOWN = 8
_known: dict[int, tuple[weakref.ref[Program], Mapping[int, int]]] = {}


def partners(program: Program) -> Mapping[int, int]:
    """Receiving step -> sending step. Kept for the last few programs."""
    kept = _known.get(id(program))
    if kept is not None and kept[0]() is program:  # numbers of objects that are gone are given out again
        return kept[1]
    sends, receives = channel_messages(program)
    found = {b: a for out, into in zip(sends, receives, strict=True) for a, b in zip(out, into, strict=True)}
    while len(_known) >= _MOST_KNOWN:
        _known.pop(next(iter(_known)))
    _known[id(program)] = weakref.ref(program), found
    return found


def progress(code: RankCode, step: int, receives: bool, waiting: bool) -> tuple[int | None, list[int], list[int]]:
    """(what the wait needs of the peer, what is under way here, the last sends that the transport took) of a walk that is at `step`.

    A send of step s is s, a posted receive of it -1 - s.
    """
    at = len(code.instructions)
    for row, i in enumerate(code.instructions):
        if i.step == step and i.op == (Op.TAKE if receives else Op.DONE):
            at = row
            break
    else:
        if step < 0:
            at = 0
    begun: dict[int, None] = {}
    taken: list[int] = []
    for i in code.instructions[:at]:
        if i.op in (Op.SEND, Op.POST):
            begun[i.key if i.op == Op.SEND else -1 - i.key] = None
        elif i.op in (Op.TAKE, Op.DONE):
            begun.pop(i.key if i.op == Op.DONE else -1 - i.key, None)
            if i.op == Op.DONE:
                taken.append(i.key)
    needs: int | None = None
    if waiting:
        sender = partners(code.unrolled)
        needs = sender.get(step) if receives else next((-1 - r for r, s in sender.items() if s == step), None)
    return needs, list(begun)[:MOST_OPEN], taken[-MOST_OPEN:]


def view_of(recorder: Recorder, rank: int, code: RankCode | None, planning: bool = False) -> View:
    """`code`: of the collective under way, None between collectives."""
    history = [(n, *recorder.calls[n]) for n in sorted(recorder.calls)[-HISTORY:]]
    view = View(rank=rank, asked=recorder.number, history=history)
    if code is None:
        view.state = "planning" if planning else "idle"
        view.number = recorder.last
        return view
    step, peer, receives, waiting, since = recorder.position()
    view.state, view.number = "walking", recorder.running or recorder.last
    view.step, view.waiting = step, waiting
    if waiting:
        view.peer, view.receives, view.waited_s = peer, receives, round(since, 3)
    if 0 <= step < len(code.unrolled.steps):
        view.text = code.unrolled.describe(step)
    view.needs, view.open, view.taken = progress(code, step, receives, waiting)
    return view
