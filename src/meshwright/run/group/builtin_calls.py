"""Handing collectives to the built-in backend, at the least cost.

A collective that was foreseen (`consent`) is counted, recorded and run in the caller's thread, and its failure is looked into; nothing is copied,
queued or given to another thread. Between two collectives of a real program all of this has left the processor's caches, so it costs not its
instructions (about 2 us when
repeated at once) but the memory that it touches: hence closures over the few objects that they need, and nothing in between where a group can have
no plan at all (`METHODS`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .record_file import pack_call
from .routes import side_by_side
from .signatures import Signature, signing
from .work import BuiltinWork

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["METHODS", "Hand", "Tally", "install_builtin_calls", "uninstall_builtin_calls", "builtin_call"]

Hand = Callable[..., Any]

# Methods of a process group: the operation, how many arguments torch passes (options last), the built-in backend's name for it. Not all-to-all:
# before it, ranks tell each other what they exchange (`arguments`).
METHODS = {
    "allreduce": ("all-reduce", 2, "allreduce"),
    "broadcast": ("broadcast", 2, "broadcast"),
    "reduce": ("reduce", 2, "reduce"),
    "all_gather_single": ("all-gather", 3, "_allgather_base"),
    "_allgather_base": ("all-gather", 3, "_allgather_base"),
    "reduce_scatter_single": ("reduce-scatter", 3, "_reduce_scatter_base"),
    "_reduce_scatter_base": ("reduce-scatter", 3, "_reduce_scatter_base"),
    "allgather": ("all-gather", 3, "allgather"),
    "reduce_scatter": ("reduce-scatter", 3, "reduce_scatter"),
    "gather": ("gather", 3, "gather"),
    "scatter": ("scatter", 3, "scatter"),
}


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
    engine: Engine, op: str, run: Callable[..., Any], count: list[int], sign: Callable[[tuple[Any, ...]], Signature] | None = None, *, width: int = 0,
    otherwise: Hand | None = None,
) -> Hand:  # fmt: skip
    """`hand(*args)` makes the built-in backend's own call `run(*args)`; the last argument is torch's options. `count[0]` counts.
    `sign(args)` says what is called, for the recorder and the other ranks, unless `signed` is given with the call.

    torch's synchronous calls (`asyncOp` off; never from C++) wait at once, so they are waited for here, and the built-in backend's work is the
    answer. Otherwise the answer is a work that looks into failures when it is waited for. With `otherwise`, calls that have not `width`
    arguments by position, or tensors with gaps, go there.
    Raises: what ended the group, now or before; what the built-in backend has to say about the arguments.
    """
    over, inside, consent, alone = engine.over, engine.inside, engine.consent, engine.health is None
    foreseen, called = consent.foreseen, consent.called
    plain = pack_call(op, -1, "", ""), 0

    def hand(*args: Any, signed: Signature | None = None, **named: Any) -> Any:
        if otherwise is not None and (named or len(args) != width or not side_by_side(args)):
            return otherwise(*args, **named)
        if over:
            raise over[0]
        try:
            signature = signed or (plain if sign is None else sign(args))
        except (IndexError, AttributeError, TypeError):  # no arguments of such a call: torch's words, or ours
            return (otherwise or run)(*args)
        if not alone and (signature != foreseen.next or consent.pending):
            if otherwise is not None:  # which looks at the arguments before the other ranks hear of the call
                return otherwise(*args)
            if (entered := consent.enter(signature, run, args)) is not None:
                count[0] += 1
                return entered
        # gloo looks at the arguments and queues: a call that it refuses is none of the group's, whose ranks count alike
        work = run(*args)
        count[0] += 1
        number = called(signature)
        if alone or work is None:
            return work
        if args[-1].asyncOp:
            return BuiltinWork(work, engine, number)
        inside[0] = number
        try:
            work.wait()
        except RuntimeError as error:
            engine.explain(error)
            raise
        finally:
            inside[0] = 0
        return work

    return hand


def install_builtin_calls(group: Any, engine: Engine, builtin: Any, tally: Tally, reason: str) -> None:
    """Nothing can have a plan: give `group` methods that hand on and do nothing else, in front of its class's."""
    itself = weakref.ref(group)

    def usual(name: str) -> Hand:
        def method(*args: Any, **named: Any) -> Any:
            here = itself()
            return getattr(type(here), name)(here, *args, **named)

        return method

    for name, (op, width, its_name) in METHODS.items():
        count, sign = tally.count(op, reason), signing(op, engine.size)
        setattr(group, name, builtin_call(engine, op, getattr(builtin, its_name), count, sign, width=width, otherwise=usual(name)))


def uninstall_builtin_calls(group: Any) -> None:
    for name in METHODS:
        vars(group).pop(name, None)
