"""Handing collectives to the built-in backend, at the least cost.

A collective that was foreseen (`consent`) is counted, recorded and run in the caller's thread, and its failure is looked into; nothing is copied,
queued or given to another thread. What was called before in the same way does not even come here (`quick_calls`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .record_file import pack_call
from .signatures import Signature
from .work import answered

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Hand", "Tally", "builtin_call"]

Hand = Callable[..., Any]


class Tally:
    """What became of the collectives of a group: `planned[op, strategy]`, `builtin[op, reason]`: how often."""

    def __init__(self) -> None:
        self.planned: Counter[tuple[str, str]] = Counter()
        self.counts: dict[tuple[str, str], list[int]] = {}

    def count(self, op: str, reason: str) -> list[int]:
        """To be counted up in its one place."""
        return self.counts.setdefault((op, reason), [0])

    @property
    def builtin(self) -> Mapping[tuple[str, str], int]:
        return {what: count[0] for what, count in self.counts.items() if count[0]}


def builtin_call(
    engine: Engine, op: str, run: Callable[..., Any], count: list[int], sign: Callable[[tuple[Any, ...]], Signature] | None = None,
) -> Hand:  # fmt: skip
    """`hand(*args)` makes the built-in backend's own call `run(*args)`; the last argument is torch's options. `count[0]` counts.
    `sign(args)` says what is called, for the recorder and the other ranks, unless `signed` is given with the call.

    torch's synchronous calls (`asyncOp` off; never from C++) wait at once, so they are waited for here, and the built-in backend's work is the
    answer. Otherwise the answer is a work that looks into failures when it is waited for.
    Raises: what ended the group, now or before; what the built-in backend has to say about the arguments.
    """
    over, answer, consent, alone = engine.over, answered(engine), engine.consent, engine.health is None
    foreseen, called = consent.foreseen, consent.called
    plain = pack_call(op, -1, "", ""), 0

    def hand(*args: Any, signed: Signature | None = None) -> Any:
        if over:
            raise over[0]
        try:
            signature = signed or (plain if sign is None else sign(args))
        except (IndexError, AttributeError, TypeError):  # no arguments of such a call: torch's words, or ours
            return run(*args)
        known = alone or (signature == foreseen.next and not consent.pending)
        if not known and (entered := consent.enter(signature, run, args)) is not None:
            count[0] += 1
            return entered
        # gloo looks at the arguments and queues: a call that it refuses is none of the group's, whose ranks count alike
        work = run(*args)
        count[0] += 1
        number = called(signature)
        if alone or work is None:
            return work
        return answer(work, number, args[-1].asyncOp)

    return hand
