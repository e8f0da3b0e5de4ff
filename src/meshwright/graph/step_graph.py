"""A training step's joint forward-and-backward graph counted by storage, and a plan of what it keeps, drops and computes again.

Every FX node of the joint graph (placeholders too) is one `StepNode`, in execution order; its result lies in `storages`. A call that makes no storage
of its own is a view and costs no memory. Optional nodes are not part of the original graph: what other implementations need besides (packed signs, a
narrower copy); they may run, and an `Alternative` of another node reads them.

A `StepPlan` is a straight line: node numbers in the order they run, forward nodes possibly again in the backward part. After each of them the results
named in `drops` are let go; a storage is free when no result that is held lies in it. Running a node again makes its storages anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ..errors import UsageError

__all__ = [
    "Alternative", "StepAction", "StepGraph", "StepNode", "StepPlan", "StepStorage", "plain_target", "renumbered",
    "replaced_target", "replacement",
]  # fmt: skip

Kind = Literal["parameter", "buffer", "input", "tangent", "made"]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    pass


class StepStorage(_Record, frozen=True, kw_only=True):
    """One allocation; `made` ones are freed when nobody holds them, the others live through the step."""

    size_bytes: int
    owner: str
    kind: Kind = "made"


class Alternative(_Record, frozen=True, kw_only=True):
    """Another implementation of a node: the results it reads instead of `StepNode.inputs`, what it costs, and whether it is exact.

    `over`: the input (a node) whose storage it writes its result over, -1 for none: that input and its views are gone afterwards.
    """

    name: str
    inputs: tuple[int, ...]
    time_s: float
    workspace_bytes: int = 0
    over: int = -1
    lossless: bool = True


class StepNode(_Record, frozen=True, kw_only=True):
    """`inputs`: nodes whose results it reads. `makes`: storages it allocates, a part of `storages`. `writes`: storages of its inputs that it changes.

    `time_s` and `workspace_bytes` (inner, beyond operands and result) are those of its plain implementation.
    """

    name: str
    target: str  # "placeholder", or e.g. "aten.mm.default"; "images 8|aten.convolution.default" where that implementation has taken its place
    phase: Literal["input", "forward", "backward"]
    module: str = ""
    inputs: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    time_s: float = 0.0
    workspace_bytes: int = 0
    random: bool = False
    optional: bool = False
    alternatives: tuple[Alternative, ...] = ()


def replaced_target(target: str, implementation: str) -> str:
    """The target of a node whose plain implementation another one has taken the place of."""
    return f"{implementation}|{plain_target(target)}"


def plain_target(target: str) -> str:
    return target.rpartition("|")[2]


def replacement(target: str) -> str:
    """The implementation that has taken the plain one's place; "" for none."""
    return target.rpartition("|")[0]


def renumbered(node: StepNode, number: Callable[[int], int]) -> StepNode:
    """The node when the nodes that it reads get other numbers."""
    ways = tuple(
        msgspec.structs.replace(a, inputs=tuple(number(x) for x in a.inputs), over=number(a.over) if a.over >= 0 else -1) for a in node.alternatives
    )
    return msgspec.structs.replace(node, inputs=tuple(number(x) for x in node.inputs), alternatives=ways)


class StepGraph(_Record, frozen=True, kw_only=True):
    """`nodes` in execution order, `boundary`: the first backward node. `results`: nodes whose results the step gives (loss and other outputs,
    gradients); they are never dropped. `resident_bytes`: what lives beside the graph's storages all the time (optimiser state, inputs held
    elsewhere). `evidence`: where times and workspaces come from. `in_flight`: micro-batches that are between their forward and their backward pass
    while one of them runs, that one among them (a pipeline stage has several): each of the others holds, all the time, what a plan holds when
    backward begins.

    Raises: UsageError for a node that reads a later one, a storage that does not exist or is made twice, or fewer than one micro-batch.
    """

    name: str
    nodes: tuple[StepNode, ...]
    storages: tuple[StepStorage, ...]
    boundary: int
    results: tuple[int, ...]
    resident_bytes: int = 0
    evidence: str = ""
    notes: tuple[str, ...] = ()
    in_flight: int = 1

    def __post_init__(self) -> None:
        maker: dict[int, str] = {}
        for i, n in enumerate(self.nodes):
            wrong = [s for s in (*n.storages, *n.writes) if not 0 <= s < len(self.storages)]
            if wrong:
                raise UsageError(f"names storage {wrong[0]} of {len(self.storages)}", where=n.name)
            read = [*n.inputs, *(x for a in n.alternatives for x in a.inputs)]
            late = [x for x in read if not 0 <= x < len(self.nodes) or x >= i]
            if late:
                raise UsageError(f"reads node {late[0]}, which does not run before it", where=n.name)
            for s in n.makes:
                if s in maker or s not in n.storages:
                    raise UsageError(f"makes storage {s}, which {maker.get(s, 'is not its result')} made", where=n.name)
                maker[s] = n.name
        if self.in_flight < 1:
            raise UsageError(f"{self.in_flight} micro-batches in flight", where=self.name)
        if any(not 0 <= r < len(self.nodes) for r in self.results):
            raise UsageError("a result of the step is no node", where=self.name)

    def fixed_bytes(self) -> int:
        """Alive through the whole step, whatever is planned."""
        return self.resident_bytes + sum(s.size_bytes for s in self.storages if s.kind != "made")


class StepAction(_Record, frozen=True, kw_only=True):
    """Run `node` (by `alternative` of its alternatives, -1: plainly), then let go of the results of `drops`."""

    node: int
    alternative: int = -1
    drops: tuple[int, ...] = ()


class StepPlan(_Record, frozen=True, kw_only=True):
    """`actions[:boundary]` are the forward pass. `peak_bytes`: most bytes alive, fixed ones and workspaces included, while action `peak_at` runs.

    Of plans that run forward nodes and backward nodes each in the graph's order: `floor_s`: none within `budget_bytes` takes less (None: not
    bounded), `least_bytes`: none needs less (None: unknown), `optimal`: proved. `time_s`: all actions. `saved`: forward results (placeholders aside)
    that are held when the backward pass begins.
    """

    strategy: str
    options: dict[str, Any]
    actions: tuple[StepAction, ...]
    boundary: int
    saved: tuple[int, ...]
    peak_bytes: int
    peak_at: int
    time_s: float
    budget_bytes: int | None = None
    floor_s: float | None = None
    least_bytes: int | None = None
    optimal: bool = False
    notes: tuple[str, ...] = ()
