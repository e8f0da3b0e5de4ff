"""Gradient traffic from a profile: one checked plan, or every candidate beside each other and beside the best step without compression."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..bound import Bound, Certificate
from ..check.traffic import check_traffic
from ..cite import Cite
from ..codec.codec import CodecSpec, parse_codec
from ..decide.strategies import cite_of
from ..decide.traffic import STRATEGIES, Cupcake, Fusion, TrafficProblem, timeline
from ..decide.traffic import strategy as named
from ..errors import CheckFailed, UsageError
from ..io.plan.traffic import read_traffic_plan
from ..kernels.effort import Budget, Cut
from ..kernels.stages import stage
from ..traffic import TrafficGroup, TrafficPlan, TrafficProfile

__all__ = [
    "UNCOMPRESSED", "Risk", "TrafficRow", "codecs_alone", "compare_traffic", "cut_of_traffic", "load_traffic_plan", "plan_traffic", "risk_of",
    "risks_of", "traffic_citations", "with_groups",
]

UNCOMPRESSED = "none"
# Share of the step that DDP takes by itself which a fusion without codecs must gain: gradients are left to it for less.
MIN_GAIN_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Risk:
    """What a codec states about its error on the largest group of a plan; None where no bound holds for every input.

    delay_steps: with error feedback, steps until what was not sent has been sent, at most and on average: (1 - contraction) / contraction.
    """

    codec: str
    bias: str
    feedback: bool
    variance: float | None
    contraction: float | None
    delay_steps: float | None


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """A candidate: `strategy` and the codecs it chose from, as a plan."""

    strategy: str
    codecs: tuple[str, ...]
    plan: TrafficPlan
    risks: tuple[Risk, ...]


@stage("choosing codecs and groups")
def plan_traffic(
    profile: TrafficProfile, *, strategy: str = Cupcake.name, codecs: Sequence[str] | None = None, options: Mapping[str, Any] | None = None,
    bounds: tuple[Bound, Bound] | None = None, time_limit_s: float = float("inf"),
) -> TrafficPlan:  # fmt: skip
    """A plan that chooses among `codecs`, checked; by default among all of the profile and, where DDP's own step was measured, to leave it at that.

    `bounds`: of these codecs and uncompressed, where known already. Where the clock cuts one of the three searches, the plan's options say so.

    Raises: UnknownName (strategy, codec), UsageError (options, a codec without costs), CheckFailed.
    """
    wanted = named(strategy, where="--strategy")
    problem = TrafficProblem.of(profile, None if codecs is None else [parse_codec(c).text for c in codecs])
    names = tuple(profile.codecs[c].codec for c in problem.codecs)
    try:
        kind = wanted(**(options or {}))
    except TypeError as error:
        raise UsageError(f"{strategy}: {str(error).partition('() ')[2] or error}", where="options") from None
    budget = Budget(3, time_limit_s=time_limit_s)
    budget.spend()
    with budget.net():
        found = kind.plan(problem)
    least, uncompressed = bounds or (None, None)
    budget.spend()
    with budget.net():
        if least is None:
            least = _bound(found if found.least_ns else Cupcake().plan(problem), names)
    budget.spend()
    with budget.net():
        if uncompressed is None:
            uncompressed = least if names == (UNCOMPRESSED,) else _uncompressed(profile, options if wanted is Cupcake else None)
    told = dict(found.options) | (budget.cut.to_json() if budget.cut else {})
    leave = codecs is None and 0 < profile.plain_ns * (1 - MIN_GAIN_SHARE) < found.step_ns
    return _checked(TrafficPlan(
        leave=leave, profile=profile, groups=found.groups, strategy=strategy, options=told, codecs=names, step_ns=found.step_ns,
        payload_bytes=_payload(profile, found.groups), bound=least, uncompressed=uncompressed, version=__version__,
    ))  # fmt: skip


def cut_of_traffic(plan: TrafficPlan) -> Cut | None:
    """Whether the clock cut the searches that the plan rests on."""
    return Cut(int(plan.options["looked"]), int(plan.options["of"])) if "looked" in plan.options else None


def with_groups(plan: TrafficPlan, groups: tuple[TrafficGroup, ...]) -> TrafficPlan:
    """The plan with other groups, checked. Raises: UsageError when they do not cover the tensors, CheckFailed."""
    step_ns = timeline(TrafficProblem.of(plan.profile), groups)[0] + plan.profile.finish_ns
    return _checked(msgspec.structs.replace(plan, groups=groups, step_ns=step_ns, payload_bytes=_payload(plan.profile, groups)))


def _checked(plan: TrafficPlan) -> TrafficPlan:
    if findings := check_traffic(plan):
        raise CheckFailed(findings[0].message, where=f"traffic plan by {plan.strategy}", data={"witness": dict(findings[0].witness)})
    return plan


def load_traffic_plan(path: str | os.PathLike[str]) -> TrafficPlan:
    """A plan from a file, checked like one that was made here.

    Raises: UsageError (no such file), FormatError naming the field, CheckFailed when groups, prediction or a bound are wrong.
    """
    plan = read_traffic_plan(path)
    if findings := check_traffic(plan):
        raise CheckFailed(findings[0].message, where=Path(path).name, hint="the file was changed, or is of another version: plan again")
    return plan


def traffic_citations(plan: TrafficPlan) -> list[tuple[str, Cite]]:
    """(what, Cite) of the strategy and of every published codec that the plan uses."""
    known = cite_of("traffic", STRATEGIES, plan.strategy)
    found = [("traffic", known)] if known is not None else []
    for codec in dict.fromkeys(g.codec for g in plan.groups):
        cite = parse_codec(codec).kind.cite
        found += [(f"codec:{codec}", cite)] if cite is not None else []
    return found


@stage("codecs beside each other")
def compare_traffic(
    profile: TrafficProfile, *, options: Mapping[str, Any] | None = None, time_limit_s: float = float("inf")
) -> tuple[list[TrafficRow], Cut | None]:
    """All candidates by predicted step: the choice among all codecs, and for each codec its best fusion and the fixed ones.

    Raises: UsageError when the profile lacks the codec `none`, what `plan_traffic` raises.
    """
    budget = Budget(len(profile.codecs) + 1, time_limit_s=time_limit_s)
    fixed = [kind.name for kind in STRATEGIES if not kind.proves]
    rows: list[TrafficRow] = []
    if len(profile.codecs) > 1 and budget.spend():
        with budget.net():
            rows.append(_row(plan_traffic(profile, options=options)))
    for cost in profile.codecs:
        if not budget.spend():
            break
        with budget.net():
            alone = _row(plan_traffic(profile, codecs=[cost.codec], options=options))
            known = (alone.plan.bound, alone.plan.uncompressed)
            rows += [alone, *(_row(plan_traffic(profile, strategy=name, codecs=alone.codecs, bounds=known)) for name in fixed)]
    return sorted(rows, key=lambda r: r.plan.step_ns), budget.cut


def codecs_alone(profile: TrafficProfile, *, options: Mapping[str, Any] | None = None) -> list[TrafficRow]:
    """Every codec for all groups, in its best groups, by predicted step. Raises: what `plan_traffic` raises."""
    rows = [_row(plan_traffic(profile, codecs=[cost.codec], options=options)) for cost in profile.codecs]
    return sorted(rows, key=lambda r: r.plan.step_ns)


def _row(plan: TrafficPlan) -> TrafficRow:
    return TrafficRow(strategy=plan.strategy, codecs=plan.codecs, plan=plan, risks=risks_of(plan))


def risks_of(plan: TrafficPlan) -> tuple[Risk, ...]:
    """Of every codec that the plan uses, on its largest group with it."""
    largest: dict[str, int] = {}
    for g in plan.groups:
        size = sum(t.elements for t in plan.profile.tensors[g.first : g.last])
        largest[g.codec] = max(size, largest.get(g.codec, 0))
    return tuple(risk_of(parse_codec(codec), elements) for codec, elements in largest.items())


def risk_of(spec: CodecSpec, elements: int) -> Risk:
    """What the codec states for one group of so many elements."""
    contraction = spec.contraction(elements)
    delay = 0.0 if not spec.feedback or spec.bias == "exact" else (1 - contraction) / contraction if contraction else None
    return Risk(
        codec=spec.text, bias=spec.bias, feedback=spec.feedback, variance=spec.variance(elements), contraction=contraction, delay_steps=delay,
    )  # fmt: skip


def _payload(profile: TrafficProfile, groups: Sequence[TrafficGroup]) -> int:
    return sum(sum(profile.codecs[profile.position(g.codec)].payload_bytes[g.first : g.last]) for g in groups)


def _uncompressed(profile: TrafficProfile, options: Mapping[str, Any] | None) -> Bound:
    return _bound(Cupcake(**(options or {})).plan(TrafficProblem.of(profile, [UNCOMPRESSED])), (UNCOMPRESSED,))


def _bound(fusion: Fusion, codecs: tuple[str, ...]) -> Bound:
    data = {"codecs": list(codecs), "labels": [list(row) for row in fusion.labels]}
    quantity = "step time without compression" if codecs == (UNCOMPRESSED,) else "step time"
    return Bound(quantity=quantity, value=str(Fraction(fusion.least_ns, 10**9)), unit="s", certificate=Certificate(kind="fusion", data=data))
