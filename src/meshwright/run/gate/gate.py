"""The gate: one step of a plan beside its owner's module, or the reason why not.

Both start from the same weights and see the same global batch: the owner's module all of it at once, the plan its micro-batches, replicas, stages
and shards. What is compared: the loss, every gradient, every buffer, every parameter after the optimizer; in double precision where the plan has a
double twin (`wide`), in the model's own else. A difference is an error that names what differs, where, and why as far as trials tell (`causes`): the
owner's module is run micro-batch by micro-batch, and a second time. What the owner says is meant (`Stated`) is compared with that instead.
Cost: one step of the owner's and one of the plan's, by one process; in place of a plan beyond `MAX_GATE_FLOPS` or `MAX_GATE_BYTES` a copy of it is
compared (`scaled`), and the report says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from ...capture.regions import REGION
from ...errors import Choice, DifferentTraining, Hint, MeshwrightError, Unsupported, UsageError
from ...job import Training
from ...plan.batch_statistics import batch_sums
from ...plan.optimizers import may_be_cut
from ...plan.plan import Plan, TrainingLayout
from ...program.calls import inline
from ..launch.outcome import forward_graph
from ..steps.forward_graph import OPAQUE, ForwardNode
from ..tensor.whole_batch import of_whole_batch
from ..train.data import Dataset
from ..train.loss_terms import loss_understood
from ..train.optimizer_trial import refuse_optimizer
from .case import COMPARED, Case
from .causes import (
    Cause,
    adds_samples_up,
    described,
    follows_rounding,
    keeps_state,
    mixes_samples,
    of_no_number,
    of_outside,
    of_the_optimizer,
    of_the_plan,
    random_numbers,
)  # fmt: skip
from .differences import Compared, Difference, differences, settled_elements
from .planned import RankStep
from .scaled import scaled_down
from .step import Owner, Part, Step
from .wide import can_widen, wide_graph, wide_layout, wide_program

__all__ = ["MAX_GATE_BYTES", "MAX_GATE_FLOPS", "GateReport", "Stated", "gate", "too_large"]

MAX_GATE_FLOPS = 200_000_000_000  # of the step, forward and backward: some seconds of a processor, in double precision
RANDOM_TRIALS = 3  # steps of the owner's with other random numbers, where a module runs as it is and may draw some
ROUNDINGS = 64  # by how many units in the last place gradients are changed, to see whether that is what moved parameters
# A parameter may move by so many times the change of its gradient, both relative to their largest: narrow types round by a tenth.
MAX_AMPLIFIED = 8.0
FEW_ROUNDINGS = 16  # the same where none moved: as much as the order of a sum makes, so that a gradient must be all but singular
MIN_NARROW_TOLERANCE = 1e-3  # of types of eight to eleven bits
MIXED_IN_DOUBLE = 1e-6  # share of the loss; rounding of any order of sums is below a millionth of that
MAX_GATE_BYTES = 4 << 30  # of weights, gradients and optimizer state of all ranks together


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
    copy: str = ""  # what was smaller in the copy that was compared in place of the plan; "" where it was the plan itself
    why_not: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"schema": "meshwright.gate", "version": 1, **found}

    def text(self) -> str:
        if self.why_not:
            return f"not compared with the owner's module: {self.why_not}"
        stated = f"; stated: {', '.join(self.stated)}" if self.stated else ""
        whose = f"a smaller copy of the plan was compared ({self.copy}): its step" if self.copy else "one step"
        return (
            f"{whose} is the owner's ({self.against}, {self.samples} samples, {self.precision}): {', '.join(self.compared)}; "
            f"{self.numbers} numbers, largest error {self.largest_error:.1e}{stated}"
        )


def gate(plan: Plan, *, data: str | Dataset, stated: Stated = Stated(), limited: bool = True) -> GateReport:
    """Compares one step of `plan` with the owner's module on the first global batch of `data`. `limited`: where that is not cheap, of a copy.

    Raises: DifferentTraining where the plan would train something else; Unsupported for a stated choice that the plan cannot keep; UsageError,
    CaptureError for what cannot be built at all.
    """
    layout = plan.layout
    assert layout is not None
    if stated.batch_statistics == "global" and layout.all_microbatches > 1 and not batch_sums(layout):
        raise Unsupported(
            f"the plan has {layout.all_microbatches} micro-batches, which share no statistics", where="--batch-statistics global",
            hint=Hint("make the plan with {}, or state {}", Choice("recipe.batch_statistics", "global"), Choice("stated.batch_statistics", "local")),
        )  # fmt: skip
    if limited and (why := too_large(plan, layout)):
        return _of_a_copy(plan, why, data, stated)
    return _compared(plan, layout, data, stated)


def _compared(plan: Plan, layout: TrainingLayout, data: str | Dataset, stated: Stated, traced: Any = None) -> GateReport:
    job = msgspec.convert(plan.job["training"], Training)
    graph = forward_graph(plan, layout, traced)
    owner = Owner(job, wide=False)
    owner.job = job = owner.moving()
    refuse_optimizer(job.optimizer, owner.parameters(), job.learning_rate, layout)
    narrow = Case(plan, layout, job, graph, inline(plan.main, plan.programs).program, data, owner)
    with torch.random.fork_rng(devices=[]):
        case, whole, planned, notes = _in_double(narrow)
        return _Trial(case, whole, stated, notes).report(planned)


def _of_a_copy(plan: Plan, why: str, data: str | Dataset, stated: Stated) -> GateReport:
    with TemporaryDirectory() as folder:
        try:
            small = scaled_down(plan, Path(folder))
        except MeshwrightError as error:
            return GateReport(why_not=f"{why}; there is no smaller copy: {error.message}")
        assert small.plan.layout is not None
        if too_large(small.plan, small.plan.layout):
            return GateReport(why_not=f"{why}; a copy with {small.said} is no cheaper")
        try:
            report = _compared(small.plan, small.plan.layout, small.data or data, stated, small.traced)
        except UsageError as error:
            return GateReport(why_not=f"{why}; a copy with {small.said} could not be compared: {error.message}")
        except DifferentTraining as error:
            said = f"{error.message} (of a smaller copy: {small.said})"
            raise DifferentTraining(said, where=error.where, hint=error.advice, data=error.data) from None
        return replace(report, copy=small.said, notes=(why, *report.notes))


def too_large(plan: Plan, layout: TrainingLayout) -> str:
    """Why a step is not compared by default; "" where it is cheap enough."""
    flops = 3 * sum(s.forward.flops for s in layout.segments) * layout.all_microbatches
    if flops > MAX_GATE_FLOPS:
        return f"a step has {flops / 1e9:.0f} GFLOP, the gate runs up to {MAX_GATE_FLOPS / 1e9:.0f} by itself (`train gate --whole` runs any)"
    b = plan.main.buffers
    kept = sum(int(c) * int(s) for c, s, n in zip(b.chunks, b.chunk_bytes, b.name, strict=False) if n.startswith(("gradients", "gradshard")))
    if 8 * kept > MAX_GATE_BYTES:  # weights, gradients and two moments, each twice as wide
        return f"all ranks together hold {kept / 1e9:.1f} GB of gradients (`train gate --whole` runs any)"
    return ""


def _in_double(narrow: Case) -> tuple[Case, Step, list[RankStep], list[str]]:
    """(the case in double precision where it has that form and both sides run so, else as it is; the owner's step; the plan's; notes)."""
    tensors = [*narrow.owner.parameters().values(), *narrow.owner.buffers().values()]
    notes: list[str] = []
    if can_widen(narrow.layout, narrow.graph, tensors):
        graph, layout = wide_graph(narrow.graph), wide_layout(narrow.layout)
        program = wide_program(narrow.program, narrow.layout)
        wide = Case(narrow.plan, layout, narrow.job, graph, program, narrow.data, Owner(narrow.job, wide=True), inputs=narrow.graph)
        try:
            return wide, wide.owner.step([wide.whole()]), wide.planned(), notes
        except MeshwrightError as error:
            notes.append(f"the module does not run in double precision: {error.message}")
        except RuntimeError as error:  # an operator without a double form, which the owner's code goes around
            notes.append(f"the plan's calls do not run in double precision: {(str(error).splitlines() or [''])[0]}")
    return narrow, narrow.owner.step([narrow.whole()]), narrow.planned(), notes


class _Trial:
    def __init__(self, case: Case, whole: Step, stated: Stated, notes: list[str]) -> None:
        self.case, self.whole, self.stated, self.notes = case, whole, stated, notes
        self.parts: list[Part] = []  # micro-batches, once they were asked for

    def report(self, planned: list[RankStep]) -> GateReport:
        """Raises: DifferentTraining."""
        case = self.case
        if not math.isfinite(self.whole.loss):
            self.notes.append(f"the owner's loss of the first batch is {self.whole.loss}")
        compared = differences(case.layout, planned, self.whole, case.tolerance, case.kinds)
        if not compared.found and case.layout.all_microbatches > 1 and not loss_understood(case.graph, of_whole_batch(case.graph)):
            self.look_ahead(compared)
        if not compared.found and (drawn := self.equal_by_chance()) is not None:
            if self.stated.dropout == "local":
                return self.drawn_by_rank()
            module = self.case.graph.modules.get(drawn.name, "")
            cause = random_numbers(self.case.opaque)
            cause = replace(cause, said=f"{cause.said} ({drawn.target} in module {module!r})", node=drawn.name)
            raise self.chance(cause, kind="loss", name="loss", module=module, operators=[drawn.target])
        if not compared.found and not may_be_cut(self.case.job.optimizer) and (moved := self.moved_by_rounding(FEW_ROUNDINGS)) is not None:
            module, operators = described(self.case.graph, moved[0])
            raise self.chance(moved[1], kind="parameter", name=moved[0], module=module, operators=operators)
        if not compared.found:
            return self.equal(compared, "the whole batch at once", ())
        return self.unequal(planned, compared)

    def equal_by_chance(self) -> ForwardNode | None:
        """A call that draws numbers of its own, so that this step says nothing of others; what runs as it is, is tried a few times."""
        drawn = self.case.drawn_otherwise
        for node in drawn:
            if node.target not in (OPAQUE, REGION):
                return node
        first = self.case.plan.seed + 1
        if drawn and any(self.apart(self.seeded_step(first + i), self.whole) for i in range(RANDOM_TRIALS)):
            return drawn[0]
        return None

    def chance(self, cause: Cause, **where: Any) -> DifferentTraining:
        """Nothing differs in the step that was compared, but in others it may."""
        return DifferentTraining(
            f"the plan trains something else than the owner's module, though not in this step: {cause.said}",
            where=self.line(cause, where["name"]), hint=cause.hint,
            data={"cause": cause.name, "model": self.case.job.model, **where, "notes": self.notes},
        )  # fmt: skip

    def drawn_by_rank(self) -> GateReport:
        why = "random numbers other than dropout's are drawn by rank, as was stated"
        return GateReport(why_not=why, stated=("dropout local",), dropout="local")

    def look_ahead(self, compared: Compared) -> None:
        """A loss that was not understood may be a mean over what happens to be equal in the first batch."""
        for whole, parts in self.case.later_losses():
            if math.isnan(whole) and math.isnan(parts):
                continue
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
        case, first = self.case, compared.found[0]
        random = self.is_random(compared)
        local = self.microbatch_by_microbatch(planned)
        alike = not local.found
        own = [("loss", self.whole.loss), (f"{first.kind} {first.name!r}", first.own)]
        if odd := [x for x in own if not math.isfinite(x[1])]:
            cause = of_no_number(*odd[0])
        elif random:
            drawn = case.drawn_otherwise
            cause = replace(random_numbers(case.opaque), node=drawn[0].name if drawn else "")
            if self.stated.dropout == "local":
                if alike:
                    return self.equal(local, "micro-batch by micro-batch, with the plan's random numbers", ("dropout local",))
                if not case.opaque:
                    return self.drawn_by_rank()
        elif alike:
            cause = self.of_the_samples(first)
            if self.stated.batch_statistics == "local":
                return self.equal(local, "micro-batch by micro-batch", ("batch statistics local",))
        elif first.kind == "parameter":
            cause = self.of_the_update(compared)
        elif batch_sums(case.layout) and (other := case.mixing()) is not None:  # beside what replicas share
            cause = mixes_samples(case.unmixed, other, shared=True)
        elif self.mixes_in_double():
            cause = mixes_samples(case.graph, case.mixing())
        elif self.changes_a_buffer() and (mixing := case.mixing()) is not None:  # which the micro-batches of a replica change in turn
            cause = mixes_samples(case.graph, mixing)
        else:
            cause = of_the_plan(case.graph, first.name)
        raise self.error(compared, cause)

    def changes_a_buffer(self) -> bool:
        before = self.case.owner.buffers()
        return any(not torch.equal(b, before[n]) for n, b in self.whole.buffers.items())

    def mixes_in_double(self) -> bool:
        """Whether the owner's loss of its micro-batches differs from that of the whole batch beyond all rounding. In narrow types micro-batches may
        round otherwise than the plan's parts of them, so that nothing seems to give the plan's numbers."""
        case = self.case
        if case.tolerance.relative < MIN_NARROW_TOLERANCE or any(p.loss is not None for p in self.parts):
            return False
        exact = msgspec.structs.replace(case.job, recipe=msgspec.structs.replace(case.job.asked, precision="fp32"))
        try:
            owner = Owner(exact, wide=True)
            whole, parts = (owner.loss([p.doubled() for p in x]) for x in ([case.whole()], self.parts))
        except (MeshwrightError, RuntimeError):
            return False
        return abs(whole - parts) > MIXED_IN_DOUBLE * abs(whole)

    def of_the_samples(self, first: Difference) -> Cause:
        """Micro-batch by micro-batch the owner's module is the plan: does it look at other samples, or at what it kept of those before?"""
        count = self.case.layout.all_microbatches
        if first.kind == "loss" and abs(first.own - count * first.planned) <= 10 * self.case.tolerance.relative * abs(first.own):
            return adds_samples_up(count)
        before = self.case.owner.buffers()
        changed = [n for n, b in self.whole.buffers.items() if not torch.equal(b, before[n])]
        if changed and first.kind != "buffer":
            afresh = self.case.owner.step([replace(p, afresh=True) for p in self.parts])
            if not self.apart(afresh, self.whole):
                return keeps_state(self.case.graph, changed[0])
        return mixes_samples(self.case.graph, self.case.mixing(), first.name if first.kind == "buffer" else "")

    def of_the_update(self, compared: Compared) -> Cause:
        """Gradients are equal, parameters are not: does the optimizer follow rounding, or was it given parts?"""
        case, layout = self.case, self.case.layout
        if (moved := self.moved_by_rounding(ROUNDINGS)) is not None:
            return moved[1]
        if layout.tensor > 1 or layout.pipeline > 1 or layout.zero_level:
            return of_the_optimizer(case.job.optimizer)
        return of_the_plan(case.graph, compared.found[0].name)

    def moved_by_rounding(self, roundings: int) -> tuple[str, Cause] | None:
        """The first parameter that the owner's own step moves elsewhere where gradients are changed by so many roundings, and that as a cause.

        They are changed one way and then the other: of what is rounding alone an update may keep no more than the sign.
        """
        case, settled = self.case, settled_elements(self.whole, self.case.tolerance)
        jitter = roundings * float(torch.finfo(case.dtype).eps)
        limit = max(case.tolerance.updated, MAX_AMPLIFIED * jitter)
        for changed in (jitter, -jitter):
            again = case.owner.step([case.whole()], jitter=changed).parameters
            for name, own in self.whole.parameters.items():
                apart = (again[name] - own).abs()
                if name in settled and bool((apart[settled[name]] > limit * own.abs().max()).any()):
                    return name, follows_rounding(case.job.optimizer, name, jitter)
        return None

    def is_random(self, compared: Compared) -> bool:
        """Whether the owner's own step is another one with other random numbers. Raises: DifferentTraining where it is with the same ones, too."""
        seed = self.case.plan.seed + 1
        again = self.seeded_step(seed)
        if not self.apart(again, self.whole):
            return False
        if self.apart(self.seeded_step(seed), again):
            raise self.error(compared, of_outside())
        return True

    def seeded_step(self, seed: int) -> Step:
        torch.manual_seed(seed)
        return self.case.owner.step([self.case.whole()])

    def apart(self, one: Step, other: Step) -> bool:
        tolerance = self.case.tolerance.relative
        return abs(one.loss - other.loss) > tolerance * abs(other.loss) or any(
            bool(((one.gradients[n] - g).abs() > tolerance * g.abs().max()).any()) for n, g in other.gradients.items()
        )

    def microbatch_by_microbatch(self, planned: list[RankStep]) -> Compared:
        """The plan's step beside the owner's module on its micro-batches; buffers as every replica's own samples leave them.

        Where a micro-batch's loss has no weight of its own, the traced calls stand for the module, if they are what it does.
        """
        case = self.case
        try:
            parts = case.parts()
        except Unsupported as error:
            self.notes.append(error.message)
            if not case.traced_as_owned():
                self.notes.append("the traced calls are not the module's, on a micro-batch by itself")
                return differences(case.layout, planned, self.whole, case.tolerance, case.kinds)
            parts = case.counted_parts()
        self.parts = parts = [replace(p, afresh=m == 0) for p, (_, m) in zip(parts, case.pieces(), strict=True)]
        together = case.owner.step(parts)
        steps = [together]
        if case.layout.data > 1 and together.buffers:
            by_replica = [[p for p, (d, _) in zip(parts, case.pieces(), strict=True) if d == r] for r in range(case.layout.data)]
            steps = [Step(together.loss, together.gradients, case.owner.step(mine).buffers, together.parameters) for mine in by_replica]
        return differences(case.layout, planned, steps, case.tolerance, case.kinds)

    def line(self, cause: Cause, name: str) -> str:
        return self.case.line(cause.node, name) or self.case.job.model

    def error(self, compared: Compared, cause: Cause) -> DifferentTraining:
        case, first = self.case, compared.found[0]
        module, operators = described(case.graph, first.name)
        what = "the loss" if first.kind == "loss" else f"{first.kind} {first.name!r}"
        return DifferentTraining(
            f"the plan trains something else than the owner's module: {what} is {first.planned:.10g}, not {first.own:.10g} "
            f"(off by {first.error:.1e}): {cause.said}", where=self.line(cause, first.name), hint=cause.hint,
            data={
                "model": case.job.model, "cause": cause.name, "kind": first.kind, "name": first.name, "module": module, "operators": operators,
                "rank": first.rank, "planned": first.planned, "own": first.own, "error": first.error,
                "precision": str(case.dtype).removeprefix("torch."), "differences": len(compared.found), "notes": self.notes,
            },
        )  # fmt: skip
