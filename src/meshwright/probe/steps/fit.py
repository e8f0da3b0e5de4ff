"""Making a model's training step fit: what a budget means, the plan, the largest batch, what would lower a minimum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ...decide.memory import strategy as memory_strategy
from ...decide.memory.auto import auto_plan, some_plan
from ...decide.memory.fusionaware.frontier import least_bytes
from ...decide.memory.lifetimes import lifetimes_of
from ...decide.memory.step import keep_everything, least_bound_bytes, size_text
from ...errors import Infeasible, UsageError
from ...graph.step_graph import StepPlan
from ...io.quantity import parse_size_bytes
from .measured import MeasuredStep

__all__ = ["LargestBatch", "budget_bytes", "largest_batch", "planned", "planned_in_any", "refusal", "what_would_help"]

MAX_BATCH_SAMPLES = 1 << 20  # at which the search for the largest batch stops: a model that keeps nothing per sample has none
ANY, IN_ORDER = "any plan", "operators in the graph's order"  # scopes of a proof


def budget_bytes(text: str, full_bytes: int, where: str = "--budget") -> int:
    """`"400MB"`, bytes without a unit as `"15000000"`, or a share of `full_bytes` as `"60%"`, `"0.6"` or `"1"`. Raises: UsageError."""
    share: Fraction | None
    try:
        share = Fraction(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = None  # not a share: bytes with a unit
    if share is not None and len(text) <= 32 and (text.strip().endswith("%") or 0 <= share <= 1):
        if not 0 <= share <= 1:
            raise UsageError(f"{text[:32]} is not a share", where=where, hint="give 0 to 1, 0% to 100%, or bytes such as 4GB")
        return int(share * full_bytes)
    try:
        return int(text) if text.strip().isascii() and text.strip().isdigit() and len(text) <= 20 else parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint="bytes such as 4GB, or a share of the peak without recomputation such as 60%") from None


def planned(
    measured: MeasuredStep, budget: int | None, strategy: str = "auto", *, seed: int = 0, any_will_do: bool = False
) -> tuple[StepPlan, dict[str, str]]:
    """(plan, what the other strategies give). `any_will_do`: whether there is one is what matters.

    Raises: Infeasible with the minimum and what would lower it; UnknownName.
    """
    asked = None if strategy == "auto" else memory_strategy(strategy, "step", where="--strategy", also=("auto",))
    rng = np.random.default_rng(seed)
    try:
        if asked is not None:
            return asked().plan(measured.graph, budget, rng=rng), {}
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


def planned_in_any(
    steps: Sequence[MeasuredStep], budget: int | None, strategy: str = "auto", *, seed: int = 0, any_will_do: bool = False
) -> tuple[MeasuredStep, StepPlan, dict[str, str]]:
    """`planned` of the first of these (one step in several layouts, the faster first) that fits.

    Raises: Infeasible of the one that needs least, where none fits; with `others`, what refused the others.
    """
    refused: list[Infeasible] = []
    for step in steps:
        try:
            plan, others = planned(step, budget, strategy, seed=seed, any_will_do=any_will_do)
        except Infeasible as error:
            refused.append(error)
        else:
            return step, plan, others
    least = min(refused, key=lambda e: float(e.data.get("least_bytes", "inf")))
    rest = [{**e.data, "message": e.message} for e in refused if e is not least]
    raise Infeasible(least.message, where=least.where, hint=least.hint, data=least.data | ({"others": rest} if rest else {}))


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


def largest_batch(at: Callable[[int], Sequence[MeasuredStep]], budget: int, strategy: str = "auto", *, seed: int = 0) -> LargestBatch:
    """The largest batch whose step fits, by doubling and halving. `at`: the measured step of a batch, in all layouts that it may have.

    A batch fits by any plan (`some_plan`); the largest one's is then made with all effort.
    One more row is proved not to fit when, in every layout, `least_bound_bytes` of its step exceeds the budget, or the strategy that refused it
    proved its least peak; and, for plans in the graph's order, when what stands beside one of its operators in that order does.
    Raises: Infeasible when one row does not fit.
    """
    fits: dict[int, tuple[MeasuredStep, StepPlan]] = {}
    fails: dict[int, Infeasible] = {}

    def ok(batch: int) -> bool:
        if batch not in fits and batch not in fails:
            try:
                step, plan, _ = planned_in_any(at(batch), budget, strategy, seed=seed, any_will_do=True)
                fits[batch] = (step, plan)
            except Infeasible as error:
                fails[batch] = error
        return batch in fits

    if not ok(1):
        raise fails[1]
    low, high = 1, 2
    while ok(high):
        low, high = high, 2 * high
        if high > MAX_BATCH_SAMPLES:
            raise UsageError(f"the budget is no limit: a batch of {low} still fits", where="--budget")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ok(middle) else (low, middle)
    scope, why = refusal(high, fails[high], budget)
    refuted = min((b for b, e in fails.items() if refusal(b, e, budget)[0]), default=None)
    step, plan = fits[low]
    with suppress(Infeasible):  # a longer search is another one: what the short one found stands
        plan = min(plan, planned(step, budget, strategy, seed=seed)[0], key=lambda p: (p.time_s, p.peak_bytes))
    return LargestBatch(
        batch_size=low, measured=step, plan=plan, refuted=refuted, proved=bool(scope), scope=scope, why=why, tried=tuple(sorted({*fits, *fails}))
    )


def refusal(rows: int, error: Infeasible, budget: int) -> tuple[str, str]:
    """(of which plans it is proved that a batch does not fit, "" for none; how it failed). Of several layouts, the one where least is proved."""
    found = [_refusal(rows, x, budget) for x in ({**error.data, "message": error.message}, *error.data.get("others", ()))]
    return min(found, key=lambda x: ("", IN_ORDER, ANY).index(x[0]))


def _refusal(rows: int, data: Mapping[str, Any], budget: int) -> tuple[str, str]:
    bound, order = int(data.get("bound_bytes", 0)), int(data.get("order_bound_bytes", 0))
    if bound > budget:
        return ANY, f"no plan of {rows} rows needs less than {size_text(bound)}"
    if data.get("proved"):
        return ANY, str(data["message"])
    if order > budget:
        return IN_ORDER, f"no plan of {rows} rows that runs operators in the graph's order needs less than {size_text(order)}"
    return "", f"unproven: no strategy fits {rows} rows ({data['message']}), but the bound is {size_text(max(bound, order))}"
