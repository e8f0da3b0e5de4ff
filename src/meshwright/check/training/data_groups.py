"""What a training layout says about weights and gradients that data replicas divide: names of buffers, who owns which cells, who must use them.

Written from the plan format alone (docs/formats.md): a group is a bucket of a stage or a parameter of several stages; replica r · n + c of n
neighbours (`near`) owns the r-th part of the c-th of n blocks of its cells. Of experts that neighbours divide (`@<bucket>%`), replicas count those
with the same experts, in order: d // degree of all / degree.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET

from ...plan.plan import TrainingLayout
from ...program.program import Program

__all__ = ["DataGroups", "Part", "in_blocks", "near", "part_of"]

EXPERTS = "%"  # ends names of groups of experts
KINDS = ("gradients", "gradshard", "weights", "shard")
NUMBERED = ("gathered", "gradfull")


class Part(NamedTuple):
    """`number`: of the micro-batch, or of the gather; -1 where there is none."""

    kind: str
    group: str
    number: int


def part_of(name: str) -> Part | None:
    """What a buffer is by its name; None for activations and the like."""
    head, colon, rest = name.partition(":")
    if head in NUMBERED and colon:
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        return Part(head, rest[len(digits) :], int(digits)) if digits else None
    for kind in KINDS:
        if name.startswith(kind) and (len(name) == len(kind) or name[len(kind)] in "@+:%"):
            return Part(kind, name[len(kind) :], -1)
    return None


def near(layout: TrainingLayout) -> int:
    """Neighbouring replicas that own a part of one block each: those that divide positions, else experts, else share a server; else one does."""
    if layout.context > 1 or layout.expert > 1:
        return layout.context if layout.context > 1 else layout.expert
    return layout.server_replicas or 1


def in_blocks(layout: TrainingLayout) -> int:
    """Blocks of a group, one of each neighbour; where the layout says that parts are in rank order, one."""
    return 1 if layout.copies_in_servers else near(layout)


class DataGroups:
    """Of a program with this layout. `parts`: by buffer; `held`: (rank, kind, group) -> buffer, of the buffers that live on."""

    def __init__(self, p: Program, layout: TrainingLayout) -> None:
        self.layout = layout
        self.parts = [part_of(name) for name in p.buffers.name]
        self.held: dict[tuple[int, str, str], int] = {}
        for b, part in enumerate(self.parts):
            if part is not None and part.number < 0:
                self.held[int(p.buffers.actor[b]), part.kind, part.group] = b
        self.of_rank: dict[int, dict[str, frozenset[str]]] = {}
        self._used: dict[tuple[int, tuple[str, ...]], list[str]] = {}

    def named(self, b: int, name: str) -> str:
        """The name of the gradient buffer whose cells buffer `b` holds some or copies of."""
        part = self.parts[b]
        return f"gradients{part.group}" if part is not None else name

    def groups(self, rank: int) -> dict[str, frozenset[str]]:
        """Parameters of every group of the rank's stage: those the layout's buckets ask for, and shared parameters that have buffers."""
        if rank not in self.of_rank:
            lay = self.layout
            stage, _, tensor = lay.coordinates(rank)
            found: dict[str, set[str]] = {}
            partial = {x.param: g for x in lay.partial_gradients if len(g := x.group_of(tensor)) > 1}
            suffix = {param: "+" + ".".join(map(str, g)) for param, g in partial.items()}
            suffix |= {s.param: EXPERTS for s in (() if lay.expert_shards is UNSET else lay.expert_shards)}
            for i, bucket in enumerate(lay.buckets_of(stage)):
                for param in bucket.params:
                    found.setdefault(f"@{i}{suffix.get(param, '')}", set()).add(param)
            for (actor, _, group), _b in self.held.items():
                if actor == rank and ":" in group:
                    found.setdefault(group, {group.partition(":")[2]})
            self.of_rank[rank] = {group: frozenset(params) for group, params in found.items()}
        return self.of_rank[rank]

    def used(self, rank: int, params: tuple[str, ...]) -> list[str]:
        """Groups that hold some of these parameters."""
        if (found := self._used.get((rank, params))) is None:
            found = self._used[rank, params] = [group for group, mine in self.groups(rank).items() if not mine.isdisjoint(params)]
        return found

    def missing(self, rank: int) -> list[str]:
        """Buffers that the rank must hold between steps, and does not."""
        level = self.layout.zero_level
        kinds = ["gradients" if level < 2 else "gradshard"] + (["weights" if level < 3 else "shard"] if level else [])
        return [f"{kind}{group}" for group in self.groups(rank) for kind in kinds if (rank, kind, group) not in self.held]

    def own(self, rank: int, cells: int, group: str) -> tuple[int, int]:
        """First and end of the cells of a group, of so many, that are the rank's to update."""
        if not self.layout.zero_level:
            return 0, cells
        owner, owners = self.owner(rank, group)
        each = cells // owners
        return owner * each, (owner + 1) * each

    def owner(self, rank: int, group: str) -> tuple[int, int]:
        """Which of how many replicas that divide the group a rank belongs to."""
        replica, data = self.layout.coordinates(rank)[1], self.layout.data
        if group.partition(":")[0].endswith(EXPERTS):
            return replica // self.layout.expert, data // self.layout.expert
        turn, member = divmod(replica, in_blocks(self.layout))
        return member * (data // in_blocks(self.layout)) + turn, data

    def shift(self, rank: int, b: int, cells: int) -> int:
        """Where the first cell of buffer `b`, of `cells` cells, stands in its group."""
        part = self.parts[b]
        return self.owner(rank, part.group)[0] * cells if part is not None and part.kind in ("gradshard", "shard") else 0
