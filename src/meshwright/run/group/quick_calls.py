"""Calls of the built-in backend that were made before, at the least cost.

What layers in front of a small collective cost is not their instructions but the memory that they touch: between two collectives of a real program
all of it has left the processor's caches, and an attribute of torch's options takes as long as ten lines of Python. So a call that is foreseen
(`consent`), and that went to the built-in backend when it was looked at in full, is found by one look into a table and handed on from here. Its
arguments were checked then: all that the checks depend on is in the key. Any other call goes to the class's own method.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .signatures import REDUCING, ROOTED, Signature
from .work import answered

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["METHODS", "QuickCalls"]

MAX_KEPT = 512  # distinct calls
# Methods of a process group: the operation, and the built-in backend's name for it. Not all-to-all: before it, ranks tell each other what they
# exchange (`arguments`).
METHODS = {
    "allreduce": ("all-reduce", "allreduce"),
    "broadcast": ("broadcast", "broadcast"),
    "reduce": ("reduce", "reduce"),
    "all_gather_single": ("all-gather", "_allgather_base"),
    "_allgather_base": ("all-gather", "_allgather_base"),
    "reduce_scatter_single": ("reduce-scatter", "_reduce_scatter_base"),
    "_reduce_scatter_base": ("reduce-scatter", "_reduce_scatter_base"),
    "allgather": ("all-gather", "allgather"),
    "reduce_scatter": ("reduce-scatter", "reduce_scatter"),
    "gather": ("gather", "gather"),
    "scatter": ("scatter", "scatter"),
}
IN_PLACE, PAIRS = ("allreduce", "broadcast", "reduce"), ("_allgather_base", "_reduce_scatter_base")
_KINDS = [kind for name, kind in dist.ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM"]  # which only NCCL has
# torch gives each operator its own hash, which is read much faster than operators are compared; without that nothing is quick.
TELLING = len({hash(dist.ReduceOp(kind)) for kind in _KINDS}) == len(_KINDS)

Count = list[int]
Key = tuple[Any, ...]


class QuickCalls:
    """`learn` a call that went to the built-in backend; `install` methods in front of a group's own that find it again."""

    def __init__(self, engine: Engine, builtin: Any) -> None:
        self.engine, self.builtin = engine, builtin
        self._known: dict[Key, tuple[Signature, Count]] = {}

    def learn(self, op: str, args: tuple[Any, ...], signature: Signature | None, count: Count) -> None:
        """The arguments of the built-in backend's call, options last; tensors without gaps. `count[0]` counts such calls. Not without a signature."""
        if signature is None:
            return
        if len(self._known) >= MAX_KEPT:
            self._known.clear()
        self._known[_key(op, args)] = signature, count

    def forget(self) -> None:
        """What a call is routed by is another."""
        self._known.clear()

    def install(self, group: Any) -> None:
        """Methods of this one object, in front of its class's."""
        if not TELLING or self.engine.size < 2:
            return
        itself = weakref.ref(group)

        def usual(name: str) -> Callable[..., Any]:
            def method(*args: Any, **named: Any) -> Any:
                here = itself()
                return getattr(type(here), name)(here, *args, **named)

            return method

        for name, (op, its_name) in METHODS.items():
            make = self._in_place if its_name in IN_PLACE else self._pair if its_name in PAIRS else self._lists
            setattr(group, name, make(op, getattr(self.builtin, its_name), usual(name)))

    def uninstall(self, group: Any) -> None:
        for name in METHODS:
            vars(group).pop(name, None)

    # One closure for each form of call: what they share would be another call, and another look at cold memory.
    def _in_place(self, op: str, run: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
        known, foreseen, consent, over, done = self._known, self.engine.consent.foreseen, self.engine.consent, self.engine.over, self._done()
        reduces, rooted = op in REDUCING, op in ROOTED

        def quick(tensors: Any, opts: Any = None) -> Any:
            if over:
                raise over[0]
            try:
                (tensor,) = tensors
                found = known.get((
                    op, tensor.dtype, tensor.nbytes, hash(opts.reduceOp) if reduces else -1, opts.rootRank if rooted else -1,
                )) if tensor.is_contiguous() else None  # fmt: skip
            except (TypeError, ValueError, AttributeError, RuntimeError):  # no such call: torch's words, or ours
                found = None
            if found is None or found[0] != foreseen.next or consent.pending:
                return usual(tensors, opts)
            return done(run(tensors, opts), found, opts)

        return quick

    def _pair(self, op: str, run: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
        known, foreseen, consent, over, done = self._known, self.engine.consent.foreseen, self.engine.consent, self.engine.over, self._done()
        reduces = op in REDUCING

        def quick(output: Any, input: Any, opts: Any = None) -> Any:
            if over:
                raise over[0]
            try:
                found = known.get((
                    op, output.dtype, output.nbytes, input.dtype, input.nbytes, hash(opts.reduceOp) if reduces else -1,
                )) if output.is_contiguous() and input.is_contiguous() else None  # fmt: skip
            except (TypeError, ValueError, AttributeError, RuntimeError):
                found = None
            if found is None or found[0] != foreseen.next or consent.pending:
                return usual(output, input, opts)
            return done(run(output, input, opts), found, opts)

        return quick

    def _lists(self, op: str, run: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
        known, foreseen, consent, over, done = self._known, self.engine.consent.foreseen, self.engine.consent, self.engine.over, self._done()

        def quick(outputs: Any, inputs: Any, opts: Any = None) -> Any:
            if over:
                raise over[0]
            try:
                found = known.get(_key(op, (outputs, inputs, opts)))
            except (TypeError, ValueError, AttributeError, RuntimeError):
                found = None
            if found is None or found[0] != foreseen.next or consent.pending:
                return usual(outputs, inputs, opts)
            return done(run(outputs, inputs, opts), found, opts)

        return quick

    def _done(self) -> Callable[[Any, tuple[Signature, Count], Any], Any]:
        """What follows when the built-in backend has taken the call: it is counted and recorded while its threads work, and waited for."""
        called, answer = self.engine.consent.called, answered(self.engine)

        def done(work: Any, found: tuple[Signature, Count], opts: Any) -> Any:
            signature, count = found
            count[0] += 1
            return answer(work, called(signature), opts.asyncOp)

        return done


def _key(op: str, args: tuple[Any, ...]) -> Key:
    """Raises where the arguments are none of such a call."""
    target, *_, opts = args
    kind, root = hash(opts.reduceOp) if op in REDUCING else -1, opts.rootRank if op in ROOTED else -1
    if len(args) == 2:
        return op, target[0].dtype, target[0].nbytes, kind, root
    if isinstance(target, list):
        rows = [t for given in args[:-1] for row in given for t in (row if isinstance(row, list) else (row,))]
        plain = all(t.is_contiguous() for t in rows)
        return op, kind, root, plain, tuple(len(given) for given in args[:-1]), *((t.dtype, t.nbytes) for t in rows)
    source = args[1]
    return op, target.dtype, target.nbytes, source.dtype, source.nbytes, kind
