"""Making a model's training step fit: its measured step graph, what a budget means, the largest batch, what would lower a minimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..capture.step import CapturedStep, capture_step_of
from ..decide.memory.auto import auto_plan, some_plan
from ..decide.memory.fusionaware.frontier import least_bytes
from ..decide.memory.lifetimes import lifetimes_of
from ..decide.memory.step import keep_everything, least_bound_bytes, size_text
from ..errors import Infeasible, UnknownName, UsageError
from ..io.quantity import parse_size_bytes
from ..probe.step_costs import StepCosts, costs_file, measure_step
from ..step_graph import StepGraph, StepPlan
from .step_choices import LOSSY, with_variants
from .step_optimizer import optimizer_named, with_optimizer

__all__ = [
    "LargestBatch", "MeasuredStep", "budget_bytes", "implementations_named", "largest_batch", "measured_step", "options_of", "planned",
    "refusal", "what_would_help",
]  # fmt: skip

BATCH_LIMIT = 1 << 20
IMPLEMENTATIONS = ("plain", "exact", "rounding", *LOSSY)
ANY, IN_ORDER = "any plan", "operators in the graph's order"  # scopes of a proof


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A captured step and its graph with measured costs, ended by the optimizer's update; `state_bytes`: the optimizer's, counted as resident.

    `graph` may hold other implementations of operators; `plain` is without them, as PyTorch runs the step.
    """

    step: CapturedStep
    graph: StepGraph
    plain: StepGraph
    batch_size: int
    state_bytes: int
    optimizer: str = "none"
    implementations: str = "plain"

    def bytes_by_kind(self) -> dict[str, int]:
        """What lives through the whole step, and the gradients at its end."""
        found = {"optimizer state": self.graph.resident_bytes}
        for s in self.graph.storages:
            if s.kind != "made":
                found[f"{s.kind}s"] = found.get(f"{s.kind}s", 0) + s.size_bytes
        made = {s for r in self.graph.results for s in self.graph.nodes[r].storages if self.graph.storages[s].kind == "made"}
        return {k: v for k, v in found.items() if v} | {"gradients and loss": sum(self.graph.storages[s].size_bytes for s in made)}


def measured_step(
    model: str, *, loss: str = "cross-entropy", batch_size: int | None = None, optimizer: str = "none", costs: Path | None = None, seed: int = 0,
    device: str = "fake", implementations: str = "plain",
) -> MeasuredStep:  # fmt: skip
    """Captures and measures the step of a model function; `costs`: file of measured costs (default: the user's cache). `implementations`: what
    operators may run as, by commas: plain (nothing else), exact (other ones with the same bits), rounding, bf16, int8 (those too); of a
    processor's step only.

    Raises: UnknownName, UsageError, CaptureError, Unsupported (dynamic shapes, sparse gradients), RunError.
    """
    optimizer_named(optimizer)
    kinds = implementations_named(implementations)
    step = capture_step_of(model, loss=loss, batch_size=batch_size, seed=seed, device=device)
    kind = "cpu" if device == "fake" else device.partition(":")[0]
    known = StepCosts(costs or costs_file(), device=kind)
    measured = measure_step(step.graph_module, step.step_graph, costs=known, device=kind)
    plain = graph = with_optimizer(step, measured, optimizer, known)
    if "plain" not in kinds and kind == "cpu":
        graph = with_optimizer(step, with_variants(step, measured, costs=known, **options_of(kinds)), optimizer, known)
    return MeasuredStep(
        step=step, graph=graph, plain=plain, batch_size=step.source.batch_size, state_bytes=graph.resident_bytes, optimizer=optimizer,
        implementations=implementations,
    )  # fmt: skip


def implementations_named(text: str) -> tuple[str, ...]:
    """Raises: UnknownName; UsageError for plain beside others."""
    kinds = tuple(dict.fromkeys(x.strip() for x in text.split(",")))
    for kind in kinds:
        if kind not in IMPLEMENTATIONS:
            raise UnknownName(f"there is no kind {kind[:64]!r}", where="--implementations", hint=f"there are: {', '.join(IMPLEMENTATIONS)}")
    if "plain" in kinds and len(kinds) > 1:
        raise UsageError("plain means no other implementations", where="--implementations", hint="plain, or the others without it")
    return kinds


def options_of(kinds: Sequence[str]) -> dict[str, Any]:
    """What `with_variants` is to offer."""
    return {"rounding": "rounding" in kinds, "lossy": [k for k in kinds if k in LOSSY]}


def budget_bytes(text: str, full_bytes: int, where: str = "--budget") -> int:
    """`"400MB"`, or a share of `full_bytes` as `"60%"` or `"0.6"`. Raises: UsageError."""
    share: Fraction | None
    try:
        share = Fraction(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = None  # not a share: bytes with a unit
    if share is not None and len(text) <= 32 and (text.strip().endswith("%") or 0 <= share <= 1):
        if not 0 <= share <= 1:
            raise UsageError(f"{text[:32]} is no share of the whole", where=where, hint="0 to 1, 0% to 100%, or bytes such as 4GB")
        return int(share * full_bytes)
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint="bytes such as 4GB, or a share of the peak without recomputation such as 60%") from None


def planned(
    measured: MeasuredStep, budget: int | None, strategy: str = "auto", *, seed: int = 0, any_will_do: bool = False
) -> tuple[StepPlan, dict[str, str]]:
    """(plan, what the other strategies give). `any_will_do`: whether there is one is what matters.

    Raises: Infeasible with the minimum and what would lower it; UnknownName.
    """
    from ..decide.memory.step import STEP_NAMES

    if strategy != "auto" and strategy not in STEP_NAMES:
        raise UnknownName(f"there is no strategy {strategy[:64]!r}", where="--strategy", hint=f"there are: {', '.join(STEP_NAMES)}, auto")
    rng = np.random.default_rng(seed)
    try:
        if strategy != "auto":
            return STEP_NAMES[strategy]().plan(measured.graph, budget, rng=rng), {}
        full = keep_everything(measured.graph)
        if budget is not None and full.peak_bytes <= budget and not any(n.alternatives for n in measured.graph.nodes):
            return msgspec.structs.replace(full, budget_bytes=budget), {}  # nothing is faster than computing nothing again
        if any_will_do and budget is not None:
            return (full if full.peak_bytes <= budget else some_plan(measured.graph, budget, rng=rng)), {}
        return auto_plan(measured.graph, budget, rng=rng)
    except Infeasible as error:
        data = {**error.data, "bound_bytes": least_bound_bytes(measured.graph), "bytes_by_kind": measured.bytes_by_kind()}
        if not any(n.alternatives for n in measured.graph.nodes):
            data["order_bound_bytes"] = least_bytes(lifetimes_of(measured.graph))
        raise Infeasible(error.message, where=error.where, hint=what_would_help(measured), data=data) from None


def what_would_help(measured: MeasuredStep) -> str:
    """What makes up the minimum, largest first, and what lowers each."""
    by_kind = measured.bytes_by_kind()
    advice = []
    if measured.state_bytes:
        advice.append(f"an optimizer without state saves {size_text(measured.state_bytes)}")
    if measured.batch_size > 1:
        advice.append(f"a batch below {measured.batch_size} makes activations and workspaces smaller")
    if "rounding" not in measured.implementations:
        advice.append("operators in smaller pieces, exact up to rounding, need less workspace (--implementations rounding)")
    least = ", ".join(f"{k} {size_text(v)}" for k, v in sorted(by_kind.items(), key=lambda i: -i[1])[:4])
    advice.append("parameters split over more devices (train plan)")
    return f"of the minimum: {least}; " + "; ".join(advice)


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """`batch_size` fits by `plan`; no batch of `refuted` rows or more fits (None: not found). `proved`: one more row does not fit.

    `scope`: of which plans that is proved: `any plan`, or those that run `operators in the graph's order` (again as often as they like). `why`: how
    one more row failed, in words. Steps of more rows are taken to need no less memory.
    """

    batch_size: int
    measured: MeasuredStep
    plan: StepPlan
    refuted: int | None
    proved: bool
    scope: str
    why: str
    tried: tuple[int, ...]


def largest_batch(at: Callable[[int], MeasuredStep], budget: int, strategy: str = "auto", *, seed: int = 0) -> LargestBatch:
    """The largest batch whose step fits, by doubling and halving. `at`: the measured step of a batch.

    A batch fits by any plan (`some_plan`); the largest one's is then made with all effort.
    One more row is proved not to fit when `least_bound_bytes` of its step exceeds the budget, or the strategy that refused it proved its least peak;
    and, for plans in the graph's order, when what stands beside one of its operators in that order does.
    Raises: Infeasible when one row does not fit.
    """
    fits: dict[int, tuple[MeasuredStep, StepPlan]] = {}
    fails: dict[int, Infeasible] = {}

    def ok(batch: int) -> bool:
        if batch not in fits and batch not in fails:
            step = at(batch)
            try:
                fits[batch] = (step, planned(step, budget, strategy, seed=seed, any_will_do=True)[0])
            except Infeasible as error:
                fails[batch] = error
        return batch in fits

    if not ok(1):
        raise fails[1]
    low, high = 1, 2
    while ok(high):
        low, high = high, 2 * high
        if high > BATCH_LIMIT:
            raise UsageError(f"a batch of {low} fits easily: the budget does not bind", where="--budget")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ok(middle) else (low, middle)
    error = fails[high]
    scope, why = refusal(high, error, budget)
    refuted = min((b for b, e in fails.items() if refusal(b, e, budget)[0]), default=None)
    step, plan = fits[low]
    with suppress(Infeasible):  # a longer search is another one: what the short one found stands
        plan = min(plan, planned(step, budget, strategy, seed=seed)[0], key=lambda p: (p.time_s, p.peak_bytes))
    return LargestBatch(
        batch_size=low, measured=step, plan=plan, refuted=refuted, proved=bool(scope), scope=scope, why=why, tried=tuple(sorted({*fits, *fails}))
    )


def refusal(rows: int, error: Infeasible, budget: int) -> tuple[str, str]:
    """(of which plans it is proved that a batch does not fit, "" for none; how it failed)."""
    bound, order = int(error.data.get("bound_bytes", 0)), int(error.data.get("order_bound_bytes", 0))
    if bound > budget:
        return ANY, f"no plan of {rows} rows needs less than {size_text(bound)}"
    if error.data.get("proved"):
        return ANY, error.message
    if order > budget:
        return IN_ORDER, f"no plan of {rows} rows that runs operators in the graph's order needs less than {size_text(order)}"
    return "", f"unproven: no strategy fits {rows} rows ({error.message}), but the bound is {size_text(max(bound, order))}"
