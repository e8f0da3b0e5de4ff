"""A candidate layout with its choice per layer, and its closed form: seconds, bytes of every stage, without simulating anything.

The closed form is 1F1B with ring all-reduces (the cost model that planners share): fill and drain of the pipeline, the slowest stage for all
other micro-batches, the slowest stage's gradients and update. Other schedules are timed by their orders (`Schedules`), a stage's gradients and update
after its own last action. It orders candidates; `predict` judges them.
Memory is exact: state, what the micro-batches in flight keep, what one layer computes again, the device's constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....fabric.servers import ServerKind
from ....plan.orders import peak_in_flight
from ....profile.layer_profile import Entry, LayerProfile
from ....profile.layer_table import LayerChoice, LayerTable
from ....profile.network import NetworkProfile, PieceOrder, ProfiledLayout, Replica, TrainingRuntime
from ....program.program import Program
from ..problem import LayoutStrategy, Question
from ..profiled.predict import ProfilePrediction
from .schedules import Forecast, Schedules

__all__ = ["Candidate", "Demands", "Estimate", "Judged", "LayersStrategy", "Pool", "Problem"]

F64 = NDArray[np.float64]
SUMMED = ("forward_s", "backward_s", "weights_s", "update_s", "wire_bytes", "state_bytes", "kept_bytes", "left_bytes")  # over a stage's layers
Objective = Literal["time", "cost", "energy"]


@dataclass(frozen=True)
class Candidate:
    """`choices`: one per layer. `source`: the method that proposed it."""

    layout: ProfiledLayout
    choices: tuple[LayerChoice, ...]
    source: str

    @property
    def identity(self) -> tuple[object, ...]:
        stages = tuple((s.layers, s.replicas) for s in self.layout.stages)
        return (stages, self.layout.schedule, self.layout.microbatch, self.layout.microbatches, self.layout.context, self.choices)


@dataclass(frozen=True)
class Estimate:
    """`memory_bytes`: of each stage's fullest rank; `over_bytes`: most by which a rank exceeds its device, negative when all fit."""

    time_s: float
    memory_bytes: tuple[int, ...]
    over_bytes: int
    fullest: int


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Servers of one kind in one zone that a search may use."""

    kind: ServerKind
    memory_bytes: int  # per device, 0 = no limit

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind.name, self.kind.zone)


@dataclass
class Problem:
    """What every method is given."""

    table: LayerTable
    pools: tuple[Pool, ...]
    network: NetworkProfile
    runtime: TrainingRuntime
    global_batch: int
    choices: tuple[LayerChoice, ...]
    schedules: Schedules | None = None  # beside 1F1B
    shapes: dict[tuple[object, ...], Program] = field(default_factory=dict)  # simulated programs, `build_iteration`

    def pool(self, replica: Replica) -> Pool:
        return self._by_key[replica.device, replica.zone]

    @cached_property
    def _by_key(self) -> Mapping[tuple[str, str], Pool]:
        return {p.key: p for p in self.pools}

    def tensors(self, device: str) -> list[int]:
        return sorted({e.tensor for e in self.table.rows if e.device == device})

    @property
    def microbatches(self) -> list[int]:
        return sorted({e.microbatch for e in self.table.rows})

    def choices_of(self, candidate: Candidate, also: Iterable[int] = ()) -> list[LayerChoice]:
        """What its layers may choose within its sharding levels, and those in `also`, and its context degree."""
        levels = {*(c.sharding for c in candidate.choices), *also}
        return [c._replace(context=candidate.layout.context) for c in self.choices if c.sharding in levels]

    def profile(self, candidate: Candidate) -> LayerProfile:
        return self.table.profile(candidate.layout.entries(), candidate.choices, candidate.layout.data)

    def parts_s(self, layout: ProfiledLayout) -> tuple[float, float, float]:
        """Seconds of forward, input's and weights' gradients of all layers on the layout's first device, nothing computed again."""
        r = layout.stages[0].replicas[0]
        a = self.table.priced(Entry(r.device, layout.microbatch, r.tensor), LayerChoice(context=layout.context), layout.data)
        forward, backward, weights = (float(a[name].sum()) for name in ("forward_s", "backward_s", "weights_s"))
        return forward, backward - weights, weights

    def orders(self, layout: ProfiledLayout) -> PieceOrder | None:
        """Of a layout with a schedule, for the event simulation; None where its actions are too many."""
        assert layout.schedule is not None and self.schedules is not None
        return self.schedules.orders(layout.schedule.name, len(layout.stages), max(layout.microbatches), self.parts_s(layout))

    def in_flight(self, layout: ProfiledLayout, stage: int) -> tuple[F64, F64] | None:
        """Of a stage with a schedule, by layer: most micro-batches kept at once, and left between the two parts of a backward; None with 1F1B.

        Each piece's own most, which they may not reach at the same time: never too little."""
        forecast = self._forecast(layout)
        if forecast is None:
            return None
        mine = [(k, count) for k, (s, _, count) in enumerate(layout.pieces) if s == stage]
        one, none = np.eye(len(layout.pieces)), np.zeros(len(layout.pieces))
        kept = [np.full(n, forecast.held_bytes(one[k], none)[stage]) for k, n in mine]
        left = [np.full(n, forecast.held_bytes(none, one[k])[stage]) for k, n in mine]
        return np.concatenate(kept), np.concatenate(left)

    def _forecast(self, layout: ProfiledLayout) -> Forecast | None:
        if layout.schedule is None or self.schedules is None:
            return None
        return self.schedules.forecast(layout.schedule.name, len(layout.stages), max(layout.microbatches), self.parts_s(layout))

    # ---- closed form -------------------------------------------------------------------------------------------------
    def hop_s(self, a: Replica, b: Replica, size_bytes: float) -> float:
        """One message between stages. Same kind and room in one server: inside it; else through the NICs."""
        x, y = self.pool(a).kind, self.pool(b).kind
        per_message = self.runtime.per_message_s
        if a.tensor == b.tensor and x == y and 2 * a.tensor <= x.gpus and len(x.servers) == 1:
            return size_bytes / self.network.inside_curve(x.name, x.gpus).peak_Bps + per_message
        if not (x.nics and y.nics):
            return per_message
        return size_bytes / self.far_Bps(x, y) + per_message

    def far_Bps(self, a: ServerKind, b: ServerKind) -> float:
        """What one device of each gets when all devices of their servers talk."""
        way = self.network.between_curve((a.zone, a.name, a.gpus), (b.zone, b.name, b.gpus)).peak_Bps
        return min(a.device_nic_Bps, b.device_nic_Bps, way)

    def ring_s(self, replicas: Sequence[Replica], wire_bytes: Sequence[float]) -> float:
        """All-reduce over the replicas of a stage; the slowest hop decides."""
        n = len(replicas)
        if n == 1:
            return 0.0
        counts = _counts(replicas)
        pools = {self.pool(r).key: self.pool(r).kind for r in counts}
        one = len(pools) == 1 and sum(r.tensor * k for r, k in counts.items()) <= next(iter(pools.values())).gpus
        if one:
            kind = next(iter(pools.values()))
            rate = self.network.inside_curve(kind.name, kind.gpus).peak_Bps
        else:
            kinds = [k for k in pools.values() if k.nics]
            rate = min((self.far_Bps(a, b) for a in kinds for b in kinds), default=float("inf"))
        return 2 * (n - 1) * (max(wire_bytes) / n / rate + self.runtime.per_message_s)

    def estimate(self, c: Candidate) -> Estimate:
        """Raises: ProfileEntryMissing, UsageError as `LayerTable.priced`."""
        layout, p = c.layout, len(c.layout.stages)
        if layout.schedule is not None:
            return self._scheduled(c)
        ends = np.cumsum([s.layers for s in layout.stages])
        starts = np.concatenate(([0], ends[:-1]))
        sums: dict[Replica, Mapping[str, F64]] = {}
        step, syncs, memory, over = 0.0, [0.0] * p, [0] * p, []
        distinct: list[dict[Replica, float]] = [{} for _ in range(p)]
        for column, count in _pipelines(layout):
            total, slowest, fill = 0.0, 0.0, 0.0
            for s, replica in enumerate(column):
                if replica not in sums:
                    sums[replica] = self._by_stage(c, replica, starts, ends)
                a = sums[replica]
                time = float(a["time_s"][s]) + 2 * self.runtime.per_action_s
                total, slowest = total + time, max(slowest, time)
                distinct[s][replica] = float(a["wire_bytes"][s])
                syncs[s] = max(syncs[s], float(a["update_s"][s]))
                if s + 1 < p:
                    fill += 2 * self.hop_s(replica, column[s + 1], float(a["output_bytes"][s]))
                need = round(float(a["state_bytes"][s])) + round(float(a["kept_bytes"][s])) * peak_in_flight(p, count, s)
                need += round(float(a["working_bytes"][s])) + self.runtime.constant_memory_bytes.get(replica.device, 0)
                memory[s] = max(memory[s], need)
                limit = self.pool(replica).memory_bytes
                over.append((need - limit if limit else -1, s))
            # 1F1B in closed form: one micro-batch all the way, the others at the pace of the slowest stage, messages of the way once
            step = max(step, total + (count - 1) * slowest + fill)
        rings = [self.ring_s(st.replicas, list(w.values())) for st, w in zip(layout.stages, distinct, strict=True)]
        tail = max(r + u for r, u in zip(rings, syncs, strict=True)) + self.runtime.per_iteration_s
        worst, fullest = max(over, key=lambda x: (x[0], -x[1]))
        return Estimate(step + tail, tuple(memory), worst, fullest)

    def _scheduled(self, c: Candidate) -> Estimate:
        """As `estimate`, of a layout with a schedule, whose pipelines are alike. Infinite where its orders are not planned."""
        layout, p = c.layout, len(c.layout.stages)
        forecast, (column, _) = self._forecast(layout), *_pipelines(layout)
        if forecast is None:
            return Estimate(float("inf"), (0,) * p, -1, 0)
        stage_of, found = self.by_piece(c)
        hops = [
            self.hop_s(column[a], column[b], float(size)) if a != b else 0.0
            for a, b, size in zip(stage_of, stage_of[1:], found["output_bytes"], strict=False)
        ]  # fmt: skip
        seconds = (found["forward_s"] + self.runtime.per_action_s, found["backward_s"] + self.runtime.per_action_s, found["weights_s"])
        done = forecast.ends_s(*seconds, np.array(hops * 2))
        sums = {name: np.bincount(stage_of, found[name], p) for name in ("update_s", "wire_bytes", "state_bytes")}
        rings = np.array([self.ring_s(s.replicas, [wire]) for s, wire in zip(layout.stages, sums["wire_bytes"], strict=True)])
        need = sums["state_bytes"] + forecast.held_bytes(found["kept_bytes"], found["left_bytes"])
        np.maximum.at(working := np.zeros(p), stage_of, found["working_bytes"])
        constant = [self.runtime.constant_memory_bytes.get(r.device, 0) for r in column]
        memory = [round(x) for x in need + working + constant]
        limits = [self.pool(r).memory_bytes for r in column]
        worst, fullest = max(((m - x if x else -1, -s) for s, (m, x) in enumerate(zip(memory, limits, strict=True))))
        return Estimate(float((done + rings + sums["update_s"]).max()) + self.runtime.per_iteration_s, tuple(memory), worst, -fullest)

    def by_piece(self, c: Candidate) -> tuple[NDArray[np.int64], dict[str, F64]]:
        """Of a layout whose pipelines are alike: the stage of every piece, and its numbers as `_by_stage`."""
        column, _ = _pipelines(c.layout)[0]
        stage_of, starts, count = np.array(c.layout.pieces).T
        found: dict[str, F64] = {}
        for replica in dict.fromkeys(column):
            mine = np.array([column[s] == replica for s in stage_of])
            for name, numbers in self._by_stage(c, replica, starts, starts + count).items():
                found[name] = np.where(mine, numbers, found.get(name, 0.0))
        return stage_of, found

    def _by_stage(self, c: Candidate, replica: Replica, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Mapping[str, F64]:
        """A replica's numbers of every stage, were it there: sums over the stage's layers, the largest working bytes, the last output."""
        a = self.table.priced_each(Entry(replica.device, c.layout.microbatch, replica.tensor), c.choices, c.layout.data)
        found = {name: np.add.reduceat(a[name], starts) for name in SUMMED}
        found["time_s"] = found["forward_s"] + found["backward_s"]
        found["working_bytes"], found["output_bytes"] = np.maximum.reduceat(a["working_bytes"], starts), a["output_bytes"][ends - 1]
        return found


def _counts(replicas: Sequence[Replica]) -> dict[Replica, int]:
    """How many of each, in order."""
    found: dict[Replica, int] = {}
    left = len(replicas)
    for r in replicas:
        if r not in found:
            found[r] = replicas.count(r)
            left -= found[r]
            if not left:
                break
    return found


def _pipelines(layout: ProfiledLayout) -> list[tuple[tuple[Replica, ...], int]]:
    """The pipelines that differ: their replicas and micro-batches."""
    heads = tuple(s.replicas[0] for s in layout.stages)
    if all(s.replicas.count(head) == layout.data for s, head in zip(layout.stages, heads, strict=True)):
        return [(heads, m) for m in dict.fromkeys(layout.microbatches)]
    columns = (tuple(s.replicas[d] for s in layout.stages) for d in range(layout.data))
    return list(dict.fromkeys(zip(columns, layout.microbatches, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Prices per device and hour, watts per device, by kind of device. `budget`: the most a step may cost; `samples_per_s`: the least throughput."""

    objective: Objective = "time"
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    watts: Mapping[str, float] = field(default_factory=dict)
    budget: float = 0.0
    samples_per_s: float = 0.0

    def require(self, devices: Iterable[str]) -> None:
        """Raises: UsageError naming every kind of device that lacks a price or a power the objective needs, or a demand below zero."""
        for option, demand in (("budget", self.budget), ("min-throughput", self.samples_per_s)):
            if not demand >= 0:
                raise UsageError(f"{demand:g} is not >= 0", where=f"--{option}", hint="0 means no limit")
        for needed, table, option in (
            (self.objective == "cost" or self.budget > 0, self.price_per_hour, "price"),
            (self.objective == "energy", self.watts, "power"),
        ):
            missing = sorted(set(devices) - set(table)) if needed else []
            if missing:
                raise UsageError(f"no {option} of {', '.join(missing)}", where=f"--{option}", hint=f"give --{option} {missing[0]}=NUMBER")
        for name, table in (("price", self.price_per_hour), ("power", self.watts)):
            if any(not v >= 0 for v in table.values()):
                raise UsageError(f"a {name} is not >= 0", where=f"--{name}")

    def cost(self, candidate: Candidate, time_s: float) -> float:
        return sum(self.price_per_hour.get(r.device, 0.0) * r.tensor for s in candidate.layout.stages for r in s.replicas) * time_s / 3600

    def joules(self, candidate: Candidate, time_s: float) -> float:
        return sum(self.watts.get(r.device, 0.0) * r.tensor for s in candidate.layout.stages for r in s.replicas) * time_s

    def value(self, candidate: Candidate, time_s: float) -> float:
        if self.objective == "cost":
            return self.cost(candidate, time_s)
        return self.joules(candidate, time_s) if self.objective == "energy" else time_s

    def broken(self, candidate: Candidate, time_s: float) -> str:
        """The constraint that a step of that time breaks, or nothing."""
        if self.budget > 0 and self.cost(candidate, time_s) > self.budget:
            return f"a step costs {self.cost(candidate, time_s):.6g}, the budget is {self.budget:.6g}"
        rate = candidate.layout.global_batch / time_s
        if self.samples_per_s > 0 and rate < self.samples_per_s:
            return f"{rate:.6g} samples/s, at least {self.samples_per_s:.6g} wanted"
        return ""


@dataclass(frozen=True)
class Judged:
    """`prediction` is None where a candidate was not simulated; `why` says why it is not the winner."""

    candidate: Candidate
    estimate: Estimate
    prediction: ProfilePrediction | None = None
    why: str = ""

    @property
    def time_s(self) -> float:
        return self.prediction.time_s if self.prediction is not None else self.estimate.time_s


class LayersStrategy(LayoutStrategy, Protocol):
    """mixes: one candidate may have several kinds of device; the others are asked for one pool at a time. refines: asked after the others, with what
    they proposed. quick: cheap enough to look for the nearest change with when nothing fits."""

    answers: ClassVar[Question] = "layers"
    mixes: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    quick: ClassVar[bool] = False

    def plan(self, problem: Problem, demands: Demands, judged: Sequence[Judged] = ()) -> Iterable[Candidate]:
        """Candidates, of which `source` is the strategy's name; they are judged by the search. None where it has nothing to propose."""
        ...
