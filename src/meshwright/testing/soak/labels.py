"""False claims: plans whose label says something else than what they are. Each operator changes one claim at a random place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ...bound import Bound
from ...plan.plan import Plan

__all__ = ["LABELS", "LAYOUTS", "claims_of"]

Rng = np.random.Generator
Operator = Callable[[Plan, Rng], "tuple[Plan, str] | None"]


def claims_of(plan: Plan) -> tuple[object, ...]:
    """What the plan says of its worth: two plans with the same programs and claims claim nothing else, whatever shows that they hold."""
    bound = plan.bound and (plan.bound.quantity, plan.bound.value, plan.bound.unit)
    names = [(k, v.get("strategy")) for k, v in plan.decisions.items()]
    return bound, plan.prediction and plan.prediction.time_s, names, plan.job, plan.kind, plan.placement, plan.target_fabric, plan.layout


def _bound(plan: Plan, **values: Any) -> Plan:
    assert plan.bound is not None
    return replace(plan, bound=msgspec.structs.replace(plan.bound, **values))


def _value(factor: Fraction) -> Operator:
    def change(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        if plan.bound is None or not plan.bound.exact:
            return None
        value = plan.bound.exact * factor
        return _bound(plan, value=f"{value.numerator}/{value.denominator}"), f"bound {value}"

    return change


def _unit(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
    return None if plan.bound is None else (_bound(plan, unit=str(rng.choice(["bytes", "s/byte"]))), "another unit")


def _quantity(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
    if plan.bound is None:
        return None
    other = str(rng.choice([x for x in ("all-gather time", "all-reduce time", "step time", "memory", "broadcast time") if x != plan.bound.quantity]))
    return _bound(plan, quantity=other), f"a bound on {other}"


def _field(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
    """One leaf of the certificate is another: numbers one more or less, texts another name, lists one entry less."""
    if plan.bound is None:
        return None
    document = msgspec.to_builtins(plan.bound.certificate.data)
    changed, what = _leaf(document, rng)
    return None if what is None else (_certificate(plan.bound, plan, data=changed), f"certificate {what}")


def _certificate(bound: Bound, plan: Plan, **values: Any) -> Plan:
    return _bound(plan, certificate=msgspec.structs.replace(bound.certificate, **values))


def _leaf(x: Any, rng: Rng) -> tuple[Any, str | None]:
    if isinstance(x, dict) and x:
        key = sorted(x)[int(rng.integers(len(x)))]
        value, what = _leaf(x[key], rng)
        return {**x, key: value}, what and f"{key} {what}"
    if isinstance(x, list) and x:
        at = int(rng.integers(len(x)))
        if rng.random() < 0.3:
            return x[:at] + x[at + 1 :], f"without entry {at}"
        value, what = _leaf(x[at], rng)
        return [*x[:at], value, *x[at + 1 :]], what and f"[{at}] {what}"
    if isinstance(x, bool):
        return not x, f"{not x}"
    if isinstance(x, int | float):
        value = x + int(rng.choice([-1, 1]))
        return value, f"{value}"
    if isinstance(x, str):
        number = x.replace("/", "").isdigit()
        value = str(Fraction(x) * 2 + 1) if number else x + "?"
        return value, value
    return x, None


def _without(name: str) -> Operator:
    def drop(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        data = plan.bound.certificate.data if plan.bound is not None else {}
        if plan.bound is None or name not in data:
            return None
        return _certificate(plan.bound, plan, data={k: v for k, v in data.items() if k != name}), f"certificate without {name}"

    return drop


def _kind(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
    if plan.bound is None:
        return None
    kinds = ("cut", "partition", "metric", "packing", "latency", "roofline", "memory", "pipeline", "sum")
    other = str(rng.choice([k for k in kinds if k != plan.bound.certificate.kind]))
    return _certificate(plan.bound, plan, kind=other), f"a {other} certificate"


def _time(factor: float) -> Operator:
    def change(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        if plan.prediction is None or not plan.prediction.time_s:
            return None
        return replace(plan, prediction=msgspec.structs.replace(plan.prediction, time_s=plan.prediction.time_s * factor)), f"{factor} times the time"

    return change


def _strategy(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
    keys = sorted(k for k in plan.decisions if k.startswith(("collective", "pipeline", "fill", "layout")))
    if not keys:
        return None
    key = keys[int(rng.integers(len(keys)))]
    return replace(plan, decisions={**plan.decisions, key: {**plan.decisions[key], "strategy": "quicksilver"}}), f"{key}: quicksilver"


def _job(field: str, change: Callable[[Any, Rng], Any]) -> Operator:
    def make(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        job = plan.job.get("collective")
        if not isinstance(job, dict) or field not in job:
            return None
        value = change(job, rng)
        changed = {**plan.job, "collective": {**job, field: value}}
        return None if value == job[field] else (replace(plan, job=changed), f"job {field} {str(value)[:40]}")

    return make


def _other_op(job: Mapping[str, Any], rng: Rng) -> str:
    return str(rng.choice([x for x in ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all") if x != job["op"]]))


def _swapped(job: Mapping[str, Any], rng: Rng) -> list[str]:
    ranks = list(job["ranks"])
    i, k = rng.choice(len(ranks), 2, replace=False).tolist()
    ranks[i], ranks[k] = ranks[k], ranks[i]
    return ranks


def _schedule(field: str) -> Operator:
    """A pipeline's stated schedule or problem says something else than what its program does."""

    def change(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        part = "problem" if field in ("microbatches", "message_bytes", "activation_bytes", "data") else "schedule"
        if plan.kind != "pipeline" or field not in plan.job.get(part, {}):
            return None
        doc = msgspec.to_builtins(plan.job[part])
        if field == "orders":
            row = int(rng.integers(len(doc[field])))
            words = doc[field][row].split()
            at = int(rng.integers(len(words)))
            words[at] = words[at].replace("F", "B") if "F" in words[at] else words[at].replace("B", "F").replace("I", "W")
            doc[field][row] = " ".join(words)
            what = f"order of device {row}: {words[at]}"
        elif isinstance(doc[field], bool):
            doc[field], what = not doc[field], f"{field} {not doc[field]}"
        else:
            doc[field], changed = _leaf(doc[field], rng)
            what = str(changed)
        return replace(plan, job={**plan.job, part: doc}), f"{part}.{field} {what}"

    return change


LABELS: Mapping[str, Operator] = {
    "bound raised": _value(Fraction(11, 10)), "bound lowered": _value(Fraction(9, 10)), "bound in another unit": _unit,
    "bound of something else": _quantity, "certificate figure": _field, "certificate of another kind": _kind,
    "certificate without its demand": _without("demand"), "certificate without its devices": _without("devices"),
    "prediction ten times longer": _time(10.0), "prediction ten times shorter": _time(0.1), "prediction a hundredth longer": _time(1.01),
    "strategy that does not exist": _strategy, "job of another operation": _job("op", _other_op),
    "job of another size": _job("size_bytes", lambda job, rng: job["size_bytes"] * 2), "job with ranks swapped": _job("ranks", _swapped),
    "another order": _schedule("orders"), "other copies": _schedule("copy_of"), "another placement": _schedule("placement"),
    "backward split or whole": _schedule("split"), "other micro-batches": _schedule("microbatches"), "other messages": _schedule("message_bytes"),
    "other activations": _schedule("activation_bytes"), "other replicas": _schedule("data"),
}  # fmt: skip


# ---- layouts -----------------------------------------------------------------------------------------------------------
def _layout(plan: Plan, **values: Any) -> Plan:
    assert plan.layout is not None
    return replace(plan, layout=msgspec.structs.replace(plan.layout, **values))


def _number(field: str, by: int) -> Operator:
    def change(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        if plan.layout is None:
            return None
        value = getattr(plan.layout, field) + by
        return _layout(plan, **{field: value}), f"{field} {value}"

    return change


def _segment(change: Callable[[Any, Rng], dict[str, Any] | None]) -> Operator:
    def make(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
        if plan.layout is None:
            return None
        at = int(rng.integers(len(plan.layout.segments)))
        values = change(plan.layout.segments[at], rng)
        if values is None:
            return None
        rows = [msgspec.structs.replace(s, **values) if i == at else s for i, s in enumerate(plan.layout.segments)]
        return _layout(plan, segments=tuple(rows)), f"segment {at}: {str(values)[:60]}"

    return make


def _split_or_whole(plan: Plan, rng: Rng) -> tuple[Plan, str] | None:
    """Over one part both are the same."""
    if plan.layout is None or plan.layout.tensor < 2:
        return None
    return _segment(lambda s, rng: {"split": not s.split})(plan, rng)


def _fewer(field: str) -> Callable[[Any, Rng], dict[str, Any] | None]:
    def drop(segment: Any, rng: Rng) -> dict[str, Any] | None:
        row = getattr(segment, field)
        if not row:
            return None
        at = int(rng.integers(len(row)))
        return {field: row[:at] + row[at + 1 :]}

    return drop


LAYOUTS: Mapping[str, Operator] = {
    **{f"{field} {by:+d}": _number(field, by) for field in ("data", "tensor", "pipeline", "microbatches", "global_batch") for by in (-1, 1)},
    "segment reads less": _segment(_fewer("reads")), "segment writes less": _segment(_fewer("writes")),
    "segment in another stage": _segment(lambda s, rng: {"stage": s.stage + 1}), "segment split or whole": _split_or_whole,
    "segment sums less": _segment(_fewer("sum_writes")), "segment of another name": _segment(lambda s, rng: {"key": s.key + "x"}),
}  # fmt: skip
