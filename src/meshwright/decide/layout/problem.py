"""The layout decision: how a training job's operators, batch and stages are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from ...cost import Cost
from ...errors import Unsupported
from ...fabric.fabric import Device, Fabric
from ...graph.graph import OpGraph
from ...plan.copies import ExpertCopies
from ...plan.plan import TrainingLayout
from ...plan.routing import UNIFORM, Routing
from ..strategies import Listed
from .data_sharding import PLAIN, DataSharding
from .unlike_devices import EVEN, Division

__all__ = ["Degrees", "DegreesStrategy", "Fixed", "LayoutCandidate", "LayoutProblem", "LayoutStrategy", "Question"]

Question = Literal["degrees", "layers", "operators", "profile"]
Fixed = tuple[int | None, int | None, int | None, int | None]  # data, tensor, pipeline degree, micro-batch


@dataclass(frozen=True, order=True)
class Degrees:
    """`data`: replicas with samples of their own; `context`: ranks that share these and divide positions, by `exchange` ("ring", "ulysses");
    `expert`: neighbours among data x context ranks that divide experts, `copied`: and hold copies of hot ones. Raises: Unsupported for expert degrees
    that do not divide these.
    """

    data: int
    tensor: int
    pipeline: int
    microbatch_size: int
    sequence: bool = False  # sequence parallelism between the tensor-parallel regions
    context: int = 1
    expert: int = 1
    exchange: str = ""
    copied: bool = False

    def __post_init__(self) -> None:
        if self.expert > 1 and self.replicas % self.expert:
            raise Unsupported(f"expert degree {self.expert} does not divide {self.replicas} data x context ranks", hint="a divisor of these")

    @property
    def ranks(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks that sum gradients: `TrainingLayout.data`."""
        return self.data * self.context

    def __str__(self) -> str:
        context = f" x context {self.context} ({self.exchange})" if self.context > 1 else ""
        context += f" (experts over {self.expert}{', copies of hot ones' if self.copied else ''})" if self.expert > 1 else ""
        return f"data {self.data}{context} x tensor {self.tensor} x pipeline {self.pipeline}, micro-batch {self.microbatch_size}" + (
            ", sequence-parallel" if self.sequence else ""
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayoutProblem:
    """`graph_at(batch)` gives the captured graph at that micro-batch size. All devices of `fabric` are used."""

    graph_at: Callable[[int], OpGraph]
    fabric: Fabric
    cost: Cost
    global_batch: int
    fixed: Fixed = (None, None, None, None)
    max_microbatch: int = 64
    context: int | None = 1  # degree of context parallelism; None: every one that divides
    expert: int | None = 1  # likewise, of expert parallelism
    routing: Routing = UNIFORM  # how tokens choose experts
    copies: Callable[[OpGraph, int], Mapping[str, ExpertCopies]] | None = None  # of hot experts, for a rank's graph and a degree; None: none
    borders: tuple[str, ...] = ()  # operators that begin the stages, or a schedule's pieces, after the first, where the cuts are given

    @property
    def reference(self) -> Device:
        """The device that closed forms are for: one of the fastest."""
        return max(self.fabric.devices, key=lambda d: (d.flops.get(self.cost.dtype, 0) * (d.cpu_share or 1.0), d.cpu_share or 1.0))


@dataclass(frozen=True, kw_only=True)
class LayoutCandidate:
    """A layout or, if `layout` is None, why these degrees cannot be used. `estimate_s` is a closed form, for ordering only; `least_s`: no schedule of
    its micro-batches takes less, by the same prices."""

    degrees: Degrees
    layout: TrainingLayout | None = None
    estimate_s: float = 0.0
    least_s: float = 0.0
    memory_floor_bytes: int = 0  # weights, gradients and optimiser state of the fullest rank
    why: str = ""
    sharding: DataSharding = PLAIN
    division: Division = EVEN  # of work among devices of unlike speed
    schedule: str = ""  # of the pipeline, in words; "": 1F1B
    orders: tuple[tuple[tuple[str, int, int], ...], ...] = ()  # per pipeline index (phase, stage, micro-batch); empty: 1F1B's
    pairs: tuple[tuple[int, ...], ...] = ()  # per pipeline index, places in its order of forwards that run beside the backward behind them

    @property
    def what(self) -> str:
        """The candidate in words."""
        more = (*(() if self.sharding == PLAIN else (str(self.sharding),)), self.schedule, str(self.division))
        return ", ".join((str(self.degrees), *filter(None, more)))


class LayoutStrategy(Listed, Protocol):
    """A frozen dataclass of options. answers: which of the decision's questions its `plan` takes: "degrees" of a captured training job
    (`DegreesStrategy`), choices per layer on a fleet ("layers", `mixed.candidate.LayersStrategy`), states of every operator and tensor ("operators",
    `autoddl.problem.ShardingStrategy`), or degrees from a layer profile ("profile", `profiled.search.ProfileStrategy`)."""

    answers: ClassVar[Question]


class DegreesStrategy(LayoutStrategy, Protocol):
    answers: ClassVar[Question] = "degrees"

    def plan(self, problem: LayoutProblem) -> list[LayoutCandidate]:
        """All candidates, best estimate first, refused ones last with their reason."""
        ...
