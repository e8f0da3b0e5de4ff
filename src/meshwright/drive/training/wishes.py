"""What is asked of the decisions on a training job: one frozen record per decision that has options, by the record's type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from ...cost import Priced
from ...decide.layout.problem import Fixed
from ...decide.layout.tensor_shares import LEVEL, TensorOptions
from ...errors import UsageError
from ...graph.graph import OpGraph
from ...plan.plan import TrainingLayout
from ...plan.precision import Precision
from ...plan.routing import UNIFORM, Routing

__all__ = ["LayoutWanted", "PrecisionWanted", "StepPrices", "Wishes"]

W = TypeVar("W")


@dataclass(frozen=True, kw_only=True)
class LayoutWanted:
    """Degrees and micro-batch size that are fixed; None leaves them to the search (`context`, `expert`: 1 unless asked for). `routing`: how tokens
    choose experts, as predictions are to take it; `spare`: places of a rank for copies of hot ones. `borders`: the operators that begin the stages,
    or the pieces of the schedule, after the first; none leaves the cuts to the search. `tensor_options`: shares of tensor-parallel ranks, label
    smoothing of split losses. `placement`: the devices of the ranks; none leaves them to the search."""

    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    microbatch: int | None = None
    context: int | None = 1
    expert: int | None = 1
    routing: Routing = UNIFORM
    spare: int = 0
    borders: tuple[str, ...] = ()
    tensor_options: TensorOptions = LEVEL
    placement: tuple[str, ...] = ()

    @property
    def fixed(self) -> Fixed:
        return self.data, self.tensor, self.pipeline, self.microbatch


@dataclass(frozen=True)
class PrecisionWanted:
    """The precision of every layout; None: that of the captured graph."""

    precision: Precision | None = None

    @classmethod
    def of(cls, layout: TrainingLayout | None) -> PrecisionWanted:
        """That of a plan's layout."""
        return cls((layout.precision or None) if layout is not None else None)


@dataclass(frozen=True)
class StepPrices:
    """Better prices than the cost's for a layout's steps, by the keys of `Cost.table` (e.g. `probe.costs.node_prices`)."""

    of: Callable[[OpGraph, TrainingLayout], dict[str, Priced]] | None = None


@dataclass(frozen=True)
class Wishes:
    """At most one record of a type (None says nothing); what is asked of no decision has its defaults. Raises: UsageError for two of a type."""

    given: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        kinds = [type(x) for x in self.given]
        if twice := [k.__name__ for k in {*kinds} if kinds.count(k) > 1]:
            raise UsageError(f"{twice[0]} is given twice", where="wishes", hint="give one record of a kind")

    def of(self, kind: type[W]) -> W:
        return next((x for x in self.given if isinstance(x, kind)), None) or kind()

    def but(self, *changed: object) -> Wishes:
        """The same, with these instead of what is there of their types."""
        return Wishes((*(x for x in self.given if type(x) not in {type(c) for c in changed}), *changed))

    @staticmethod
    def these(given: Iterable[object]) -> Wishes:
        return given if isinstance(given, Wishes) else Wishes(tuple(x for x in given if x is not None))
