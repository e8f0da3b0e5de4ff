"""The gate: one step of a plan beside its owner's module, or the reason why not.

Both start from the same weights and see the same global batch: the owner's module all of it at once, the plan its micro-batches, replicas, stages
and shards. What is compared: the loss, every gradient, every buffer, every parameter after the optimizer; in double precision where the plan has a
double twin (`wide`), in the model's own else. A difference is an error that names what differs, where, and why as far as trials tell (`causes`): the
owner's module is run micro-batch by micro-batch, and a second time. What the owner says is meant (`Stated`) is compared with that instead.
Cost: one step of the owner's and one of the plan's, by one process; a plan beyond `MAX_GATE_FLOPS` or `MAX_GATE_BYTES` is not compared by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec
import torch

from ...capture.precision import PRECISIONS, trace_job
from ...capture.regions import REGION
from ...errors import DifferentTraining, MeshwrightError, Unsupported
from ...job import Training
from ...plan.plan import Plan, TrainingLayout
from ...program.calls import inline
from ...program.program import Program
from ..launch.outcome import forward_graph
from ..steps.forward_graph import OPAQUE, ForwardGraph
from ..train.data import Batches, open_data
from ..train.dropout import Draws, SerialDraws, random_places
from ..train.loss_counts import LossCounts
from ..train.loss_terms import loss_terms, loss_understood
from ..train.optimizer_trial import refuse_optimizer
from ..train.segments import random_seed
from .causes import Cause, described, mixes_samples, of_the_optimizer, of_the_plan, random_numbers
from .differences import Compared, Difference, Tolerance, differences, tolerance_of
from .planned import RankStep, planned_step
from .step import Owner, Part, Step
from .wide import can_widen, wide_graph, wide_layout, wide_program

__all__ = ["MAX_GATE_BYTES", "MAX_GATE_FLOPS", "GateReport", "Stated", "gate", "too_large"]

MAX_GATE_FLOPS = 200_000_000_000  # of the step, forward and backward: some seconds of a processor, in double precision
LATER_BATCHES = 4  # whose loss alone is looked at, where it is not understood
MAX_GATE_BYTES = 4 << 30  # of weights, gradients and optimizer state of all ranks together
COMPARED = {"loss": "loss", "gradient": "gradients", "buffer": "buffers", "parameter": "parameters after the optimizer"}


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What the owner says is meant. `batch_statistics`: "" | "local" | "global"; `dropout`: "serial" | "local" (all other random numbers too)."""

    batch_statistics: str = ""
    dropout: str = "serial"


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """What was compared with what, or `why_not`. `largest_error`: of all that was compared, relative to the largest entry of its tensor."""

    compared: tuple[str, ...] = ()
    samples: int = 0
    against: str = ""
    precision: str = ""
    numbers: int = 0
    largest_error: float = 0.0
    tolerance: float = 0.0
    dropout: str = "none"  # "serial": the bits that one process would draw; "local": others
    stated: tuple[str, ...] = ()  # choices without which this step would have been refused
    why_not: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"schema": "meshwright.gate", "version": 1, **found}

    def text(self) -> str:
        if self.why_not:
            return f"not compared with the owner's module: {self.why_not}"
        stated = f"; stated: {', '.join(self.stated)}" if self.stated else ""
        return (
            f"one step is the owner's ({self.against}, {self.samples} samples, {self.precision}): {', '.join(self.compared)}; "
            f"{self.numbers} numbers, largest error {self.largest_error:.1e}{stated}"
        )


def gate(plan: Plan, *, data: str, stated: Stated = Stated(), limited: bool = True) -> GateReport:
    """Compares one step of `plan` with the owner's module on the first global batch of `data`. `limited`: only where it is cheap.

    Raises: DifferentTraining where the plan would train something else; Unsupported for a stated choice that the plan cannot keep; UsageError,
    CaptureError for what cannot be built at all.
    """
    layout = plan.layout
    assert layout is not None
    if stated.batch_statistics == "global" and layout.all_microbatches > 1:
        raise Unsupported(
            f"statistics of the whole batch need one micro-batch, the plan has {layout.all_microbatches}", where="--batch-statistics global",
            hint="plan with --dp 1 and --microbatch as large as the global batch, or state --batch-statistics local",
        )  # fmt: skip
    if limited and (why := too_large(plan, layout)):
        return GateReport(why_not=why)
    job = msgspec.convert(plan.job["training"], Training)
    graph = forward_graph(plan, layout)
    owner = Owner(job, wide=False)
    refuse_optimizer(job.optimizer, owner.parameters(), job.learning_rate, layout)
    narrow = _Case(plan, layout, job, graph, inline(plan.main, plan.programs).program, data, owner)
    case, whole, notes = _in_double(narrow)
    return _Trial(case, whole, stated, notes).report()


def too_large(plan: Plan, layout: TrainingLayout) -> str:
    """Why a step is not compared by default; "" where it is cheap enough."""
    flops = 3 * sum(s.forward.flops for s in layout.segments) * layout.all_microbatches
    if flops > MAX_GATE_FLOPS:
        return f"a step has {flops / 1e9:.0f} GFLOP, the gate runs up to {MAX_GATE_FLOPS / 1e9:.0f} by itself (`meshwright train gate PLAN` runs any)"
    b = plan.main.buffers
    kept = sum(int(c) * int(s) for c, s, n in zip(b.chunks, b.chunk_bytes, b.name, strict=False) if n.startswith(("gradients", "gradshard")))
    if 8 * kept > MAX_GATE_BYTES:  # weights, gradients and two moments, each twice as wide
        return f"all ranks together hold {kept / 1e9:.1f} GB of gradients (`meshwright train gate PLAN` runs any)"
    return ""


def _in_double(narrow: _Case) -> tuple[_Case, Step, list[str]]:
    """(the step in double precision where it has that form and the owner's code runs so, else as it is; the owner's step; notes)."""
    tensors = [*narrow.owner.parameters().values(), *narrow.owner.buffers().values()]
    notes: list[str] = []
    if not narrow.opaque and can_widen(narrow.layout, narrow.graph, tensors):
        graph, layout = wide_graph(narrow.graph), wide_layout(narrow.layout)
        program = wide_program(narrow.program, narrow.layout)
        wide = _Case(narrow.plan, layout, narrow.job, graph, program, narrow.data, Owner(narrow.job, wide=True), inputs=narrow.graph)
        try:
            return wide, wide.owner.step([wide.whole()]), notes
        except MeshwrightError as error:
            notes.append(f"the module does not run in double precision: {error.message}")
    return narrow, narrow.owner.step([narrow.whole()]), notes


@dataclass
class _Case:
    """A plan's step in one precision. `inputs`: the graph whose inputs the data has the types of."""

    plan: Plan
    layout: TrainingLayout
    job: Training
    graph: ForwardGraph
    program: Program
    data: str
    owner: Owner
    inputs: ForwardGraph | None = None

    @property
    def opaque(self) -> bool:
        return any(n.target == OPAQUE for n in self.graph.nodes)

    @cached_property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.owner.parameters().values() if p.dtype.is_floating_point), torch.float32)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is compared: codecs change gradients by intent."""
        return ("loss", "buffer") if any(b.codec for b in self.layout.buckets) else tuple(COMPARED)

    @cached_property
    def tolerance(self) -> Tolerance:
        """Of the coarsest type that anything is computed in: autocast and the owner's code may go below that of the parameters."""
        kinds = {getattr(torch, o.dtype) for n in self.graph.nodes for o in n.outputs if o is not None}
        kinds |= {p.dtype for p in self.owner.parameters().values()}
        if (cast := PRECISIONS[self.job.asked.precision]) is not None:
            kinds.add(cast)
        return tolerance_of(max((k for k in kinds if k.is_floating_point), key=lambda k: float(torch.finfo(k).eps), default=self.dtype))

    @cached_property
    def draws(self) -> bool:
        return bool(random_places(self.graph))

    @cached_property
    def _batches(self) -> Batches:
        dataset = open_data(self.data, self.owner.initial.examples, self.job.seed, self.job.global_batch)
        return Batches(dataset, self.layout, (self.inputs or self.graph).inputs, torch.device("cpu"))

    def microbatch(self, step: int, replica: int, microbatch: int) -> Sequence[torch.Tensor]:
        found = self._batches.microbatch(step, replica, microbatch)
        return [x.to(self.dtype) if x.is_floating_point() and self.inputs is not None else x for x in found]

    def pieces(self) -> list[tuple[int, int]]:
        """(replica, micro-batch) in the order of samples."""
        return [(d, m) for d in range(self.layout.data) for m in range(self.layout.microbatches_of(d))]

    def whole(self, step: int = 0) -> Part:
        """The global batch at once, with the dropout that the plan's ranks draw."""
        columns = zip(*(self.microbatch(step, d, m) for d, m in self.pieces()), strict=True)
        return Part([torch.cat(column) for column in columns], random=self.serial(0, self.layout.global_batch))

    def serial(self, first: int, samples: int) -> Callable[[], AbstractContextManager[object]]:
        if not self.draws:
            return nullcontext
        places = list(random_places(self.graph).values())
        return lambda: SerialDraws(Draws(seed=self.plan.seed, step=0, first=first, samples=samples), places)

    def own(self, replica: int, microbatch: int) -> Callable[[], AbstractContextManager[object]]:
        """The dropout of a micro-batch."""
        return self.serial(self.layout.first_sample(replica, microbatch), self.layout.microbatch_size)

    def parts(self) -> list[Part]:
        """Micro-batch by micro-batch, each counting for what it counts in the plan; random numbers of an opaque model as its rank draws them."""
        weights = self.weights()
        found = []
        for (d, m), weight in zip(self.pieces(), weights, strict=True):
            random = self.own(d, m)
            if self.opaque:
                random = partial(_seeded, random_seed(self.plan.seed, 0, d, m, self.layout.segments[0].key))
            found.append(Part(self.microbatch(0, d, m), weight, random))
        return found

    def later_losses(self) -> Iterator[tuple[float, float]]:
        """(of the whole batch, of its micro-batches as the plan weighs them) by the owner's module, of a few batches after the first."""
        share = 1.0 / self.layout.all_microbatches
        for step in range(1, 1 + LATER_BATCHES):
            with torch.random.fork_rng(devices=[]):
                parts = [Part(self.microbatch(step, d, m), share, self.own(d, m)) for d, m in self.pieces()]
                yield self.owner.loss([self.whole(step)]), self.owner.loss(parts)

    def weights(self) -> list[float]:
        """Raises: Unsupported where micro-batches have no weight of their own."""
        terms, count = loss_terms(self.graph), self.layout.all_microbatches
        if not terms:
            return [1.0 / count] * count
        if [*terms] != [*self.graph.outputs[:1]]:
            raise Unsupported("the loss has several terms that are not means over samples")
        divisors = {n: torch.ones((), dtype=torch.float64) for n in terms}
        constants = {
            n: torch.tensor(c.data, dtype=getattr(torch, c.dtype)).reshape(c.shape) for n, c in self.graph.constants.items()
        }
        counts = LossCounts(self.graph, terms, divisors, constants, self.owner.buffers())
        batches = [self.microbatch(0, d, m) for d, m in self.pieces()]
        counts.fill(batches, count)
        return [counts.weight(x, count) for x in batches]

    def planned(self) -> list[RankStep]:
        opaque = None
        if any(n.target == REGION for n in self.graph.nodes):  # tracing makes the modules that are kept whole known here
            trace_job(self.job, batch_size=self.layout.microbatch_size, device="cpu")
        if self.opaque:
            traced = trace_job(self.job, batch_size=self.layout.microbatch_size, device="cpu", opaque=True)
            opaque = next(n.target for n in traced.graph_module.graph.nodes if n.op == "call_function")
        return planned_step(
            self.program, self.layout, self.graph, self.job, parameters=self.owner.parameters(), buffers=self.owner.buffers(), data=self,
            seed=self.plan.seed, dtype=self.dtype, opaque=opaque,
        )  # fmt: skip


def _seeded(seed: int) -> AbstractContextManager[object]:
    torch.manual_seed(seed)
    return nullcontext()


class _Trial:
    def __init__(self, case: _Case, whole: Step, stated: Stated, notes: list[str]) -> None:
        self.case, self.whole, self.stated, self.notes = case, whole, stated, notes

    def report(self) -> GateReport:
        """Raises: DifferentTraining."""
        case = self.case
        with torch.random.fork_rng(devices=[]):
            planned = case.planned()
            compared = differences(case.layout, planned, self.whole, case.tolerance, case.kinds)
            if not compared.found and case.layout.all_microbatches > 1 and not loss_understood(case.graph):
                self.look_ahead(compared)
            if not compared.found:
                return self.equal(compared, "the whole batch at once", ())
            return self.unequal(planned, compared)

    def look_ahead(self, compared: Compared) -> None:
        """A loss that was not understood may be a mean over what happens to be equal in the first batch."""
        for whole, parts in self.case.later_losses():
            error = abs(whole - parts) / abs(whole) if whole else abs(parts)
            if not error <= 10 * self.case.tolerance.relative:
                compared.found.append(Difference(kind="loss", name="loss", rank=-1, planned=parts, own=whole, error=error))
                return

    def equal(self, compared: Compared, against: str, stated: tuple[str, ...]) -> GateReport:
        case = self.case
        return GateReport(
            compared=tuple(COMPARED[k] for k in case.kinds), samples=case.layout.global_batch, against=against,
            precision=str(case.dtype).removeprefix("torch."), numbers=compared.numbers, largest_error=compared.largest,
            tolerance=case.tolerance.relative, dropout="serial" if case.draws else "local" if "dropout local" in stated else "none", stated=stated,
            notes=tuple(self.notes),
        )  # fmt: skip

    def unequal(self, planned: list[RankStep], compared: Compared) -> GateReport:
        case = self.case
        random = self.is_random()
        local = self.microbatch_by_microbatch(planned)
        alike = local is not None and not local.found
        if random:
            cause = random_numbers(case.opaque)
            if self.stated.dropout == "local":
                if local is not None and alike:
                    return self.equal(local, "micro-batch by micro-batch, with the plan's random numbers", ("dropout local",))
                if not case.opaque:
                    why = "random numbers other than dropout's are drawn by rank, as was stated"
                    return GateReport(why_not=why, stated=("dropout local",), dropout="local")
        elif local is not None and alike:
            cause = mixes_samples(case.graph)
            if self.stated.batch_statistics == "local":
                return self.equal(local, "micro-batch by micro-batch", ("batch statistics local",))
        elif compared.found[0].kind == "parameter":
            cause = of_the_optimizer(case.job.optimizer)
        else:
            cause = of_the_plan(case.graph, compared.found[0].name)
        raise self.error(compared, cause)

    def is_random(self) -> bool:
        """Whether the owner's own step is another one the second time."""
        torch.manual_seed(self.case.plan.seed + 1)
        again = self.case.owner.step([self.case.whole()])
        tolerance = self.case.tolerance.relative
        return abs(again.loss - self.whole.loss) > tolerance * abs(self.whole.loss) or any(
            bool(((again.gradients[n] - g).abs() > tolerance * g.abs().max()).any()) for n, g in self.whole.gradients.items()
        )

    def microbatch_by_microbatch(self, planned: list[RankStep]) -> Compared | None:
        """The plan's step beside the owner's module on its micro-batches; buffers as every replica's own samples leave them."""
        case = self.case
        try:
            parts = case.parts()
        except Unsupported as error:
            self.notes.append(error.message)
            return None
        together = case.owner.step(parts)
        steps = [together]
        if case.layout.data > 1 and together.buffers:
            by_replica = [[p for p, (d, _) in zip(parts, case.pieces(), strict=True) if d == r] for r in range(case.layout.data)]
            steps = [Step(together.loss, together.gradients, case.owner.step(mine).buffers, together.parameters) for mine in by_replica]
        return differences(case.layout, planned, steps, case.tolerance, case.kinds)

    def error(self, compared: Compared, cause: Cause) -> DifferentTraining:
        case, first = self.case, compared.found[0]
        module, operators = described(case.graph, first.name)
        what = "the loss" if first.kind == "loss" else f"{first.kind} {first.name!r}"
        return DifferentTraining(
            f"the plan trains something else than the owner's module: {what} is {first.planned:.10g}, not {first.own:.10g} "
            f"(off by {first.error:.1e}): {cause.said}", where=case.job.model, hint=cause.hint,
            data={
                "cause": cause.name, "kind": first.kind, "name": first.name, "module": module, "operators": operators, "rank": first.rank,
                "planned": first.planned, "own": first.own, "error": first.error, "precision": str(case.dtype).removeprefix("torch."),
                "differences": len(compared.found), "notes": self.notes,
            },
        )  # fmt: skip
