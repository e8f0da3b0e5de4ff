"""A training plan in another system's words: what an exporter is, what it is given, what it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...plan.plan import Plan, TrainingLayout

__all__ = ["Exported", "Exporter", "LayerSplit", "Subject", "Written"]

Written = tuple[str, list[str], list[str]]  # the file's text, what the target has no words for, what its user must still say


@dataclass(frozen=True)
class LayerSplit:
    """Repeated blocks `prefix.0` ... by stage, other modules by stage, and blocks that a stage border cuts."""

    prefix: str
    blocks: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, ...], ...]
    torn: tuple[str, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(x) for x in self.blocks)


@dataclass(frozen=True)
class Subject:
    """What is exported. nodes: devices of each server that the plan uses; in_server_order: ranks of a server follow each other; again: the rule of
    recomputation and how many calls run again, "" and 0 where none do."""

    plan: Plan
    layout: TrainingLayout
    split: LayerSplit
    job: Mapping[str, Any]
    nodes: Mapping[str, int]
    in_server_order: bool
    again: tuple[str, int]

    @property
    def per_node(self) -> int:
        """Processes of a server; the most where servers have unlike numbers."""
        return max(self.nodes.values(), default=1)


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """name: as `--to` says it; version: of the tool whose parser or option list it was checked against, and how; own_models: the tool trains
    models of its own, so the plan's model does not carry over; launches: it starts the plan, and leaves the layout to what it starts; says: fields
    of a recipe that `write` writes, or names where it cannot."""

    name: str
    version: str
    write: Callable[[Subject], Written]
    own_models: bool = False
    launches: bool = False
    says: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Exported:
    """`text` of the file; the tool's version that it is for; what the target has no words for; what its user must still say (model, data)."""

    target: str
    version: str
    text: str
    not_expressed: tuple[str, ...]
    to_add: tuple[str, ...]
