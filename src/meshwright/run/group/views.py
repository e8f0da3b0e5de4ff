"""A rank's own view of itself, from its recorder and the code that it walks. Made only when something is wrong, so it may take its time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from ...program.program import Program
from ..executor.lanes import channel_messages
from .rank_code import RankCode
from .recorder import Recorder
from .verdict import View
from .walk import Under

__all__ = ["needs_of", "partners", "view_of"]

MAX_OPEN_MESSAGES = 512  # under way that a view lists, which bounds its frame
_MAX_PROGRAMS = 8  # whose partners are kept: views are made while a failure is judged, and again for the same program
_known: dict[int, tuple[weakref.ref[Program], Mapping[int, int]]] = {}


def partners(program: Program) -> Mapping[int, int]:
    """Receiving step -> sending step. Kept for the last few programs."""
    kept = _known.get(id(program))
    if kept is not None and kept[0]() is program:  # numbers of objects that are gone are given out again
        return kept[1]
    sends, receives = channel_messages(program)
    found = {b: a for out, into in zip(sends, receives, strict=True) for a, b in zip(out, into, strict=True)}
    while len(_known) >= _MAX_PROGRAMS:
        _known.pop(next(iter(_known)))
    _known[id(program)] = weakref.ref(program), found
    return found


def needs_of(code: RankCode, step: int, receives: bool) -> int | None:
    """What a wait in `step` needs of the peer: its send of step s is s, its posted receive -1 - s."""
    sender = partners(code.unrolled)
    return sender.get(step) if receives else next((-1 - r for r, s in sender.items() if s == step), None)


def view_of(recorder: Recorder, rank: int, code: RankCode | None, under: Under | None = None, planning: bool = False) -> View:
    """`code`, `under`: of the collective under way, None between collectives."""
    history = [(n, *recorder.calls[n]) for n in sorted(recorder.calls)]
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
    view.needs = needs_of(code, step, receives) if waiting else None
    if under is not None:
        view.open, view.taken = list(under.open)[:MAX_OPEN_MESSAGES], list(under.taken)
    return view
