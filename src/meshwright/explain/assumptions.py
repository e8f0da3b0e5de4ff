"""What a prediction rests on: every assumed, interpolated or measured number with its error bar, and the step if it alone were that wrong.

The errors are relative, by kind of evidence; `ERRORS` where nothing better is stated. Each number is changed up and down by its error and the
plan simulated again. What no number stands for (stragglers, data loading, jitter) is named by the report, not bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from ..cost import Cost
from ..drive.training.folded import Steady
from ..fabric.fabric import Fabric
from .breakdown import Simulated
from .rivals import scaled_links

__all__ = ["ERRORS", "NOT_MODELLED", "Assumption", "ErrorBars", "assumptions_of"]

# Measured: sums of operators timed in place against whole steps (benchmarks/op_cost: 0.1 to 6.5 %). Interpolated: rows of GPU tables held back
# (benchmarks/gpu_tables: medians 2 to 5 %, tails 10 to 20 %). Assumed: a roofline at a guessed efficiency, where real kernels lie between a third and
# nine tenths of peak. Links: nominal rates against what messages get (benchmarks/predicted: median 6 %).
ERRORS: Mapping[str, float] = {"measured": 0.05, "interpolated": 0.10, "assumed": 0.40, "links": 0.10}
NOT_MODELLED = "stragglers, data loading, clock changes of the devices, other jobs on the network, allocator fragmentation"


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """`low_s` and `high_s`: the step if only this were wrong by its error; equal to the prediction where it does not matter."""

    what: str
    value: str
    evidence: str
    error: float
    low_s: float
    high_s: float
    source: str


class ErrorBars(msgspec.Struct, frozen=True, kw_only=True):
    """`low_s` to `high_s`: the step if all compute and all communication are wrong the same way, each by its error."""

    assumptions: tuple[Assumption, ...]
    low_s: float
    high_s: float


class _Number(NamedTuple):
    """`changed(factor)`: cost and fabric with this number times `factor`."""

    what: str
    value: str
    evidence: str
    changed: Callable[[float], tuple[Cost, Fabric]]
    source: str


def assumptions_of(run: Simulated, errors: Mapping[str, float], steady: Steady) -> tuple[Assumption, ...]:
    """One per number that the plan's cost and fabric hold, in the order: prices, roofline, runtime, links. `steady`: of the plan."""
    from ..drive.plans import works_of

    works, found, at = works_of(run.plan), [], run.plan.placement
    now = 1.0 if len(steady.programs) == 1 else run.timeline.makespan_s / steady.time_s(run.fabric, at, run.cost, works)
    for number in _numbers(run):
        error = errors[number.evidence if number.evidence in errors else "links"]
        times = []
        for factor in (1 - error, 1 + error):
            cost, fabric = number.changed(factor)
            times.append(now * steady.time_s(fabric, at, cost, works))
        found.append(
            Assumption(
                what=number.what, value=number.value, evidence=number.evidence, error=error, low_s=min(times), high_s=max(times), source=number.source
            )
        )
    return tuple(found)


def _numbers(run: Simulated) -> Iterator[_Number]:
    cost, fabric = run.cost, run.fabric
    for kind in sorted({p.evidence for p in cost.table.values()}):
        count = sum(p.evidence == kind for p in cost.table.values())

        def prices(factor: float, kind: str = kind) -> tuple[Cost, Fabric]:
            table = {k: msgspec.structs.replace(p, time_s=p.time_s * factor) if p.evidence == kind else p for k, p in cost.table.items()}
            return msgspec.structs.replace(cost, table=table), fabric

        yield _Number("prices of steps", f"{count}", kind, prices, cost.source)
    for name, what, value in (
        ("flops_efficiency", "arithmetic", f"{cost.flops_efficiency:.3g} of the {cost.dtype} peak"),
        ("memory_efficiency", "memory traffic", f"{cost.memory_efficiency:.3g} of the bandwidth"),
        ("per_call_s", "launch of an operator", f"{1e6 * cost.per_call_s:.3g} us"),
    ):

        def part(factor: float, name: str = name) -> tuple[Cost, Fabric]:
            return msgspec.structs.replace(cost, **{name: getattr(cost, name) * factor}), fabric

        yield _Number(what, value, cost.evidence, part, cost.source)
    t = cost.transport
    for name, what, value in (
        ("per_message_s", "runtime, a message", f"{1e6 * t.per_message_s:.3g} us"),
        ("per_byte_s", "runtime, a byte", f"{1e9 * t.per_byte_s:.3g} ns"),
        ("per_step_s", "runtime, a step", f"{1e6 * t.per_step_s:.3g} us"),
    ):

        def transport(factor: float, name: str = name) -> tuple[Cost, Fabric]:
            return msgspec.structs.replace(cost, transport=msgspec.structs.replace(t, **{name: getattr(t, name) * factor})), fabric

        if getattr(t, name):
            yield _Number(what, value, t.evidence, transport, cost.source)
    if fabric.links:
        source = "; ".join(f"{p.what}: {p.source}" for p in fabric.provenance[:3]) or "as the fabric states"
        yield _Number("rates of links", f"{len(fabric.links)} links", "stated", lambda f: (cost, scaled_links(fabric, f)), source)
