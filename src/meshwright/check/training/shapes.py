"""Steps of one plan for batches of several shapes: every rank keeps the same weights, gradients and optimizer state from one to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...plan.plan import Plan, TrainingLayout
from ...program.calls import inline
from ...program.program import BUFFER_ROLES
from ..verdict import Finding

__all__ = ["check_same_state", "state_differs"]

KEPT = ("weight", "gradient", "state")  # roles of buffers that live on from step to step
FIELDS = (
    "data", "tensor", "pipeline", "context", "global_batch", "placement", "zero_level", "whole_parameters", "buckets", "shards", "partial_gradients",
    "frozen",
)  # fmt: skip


def check_same_state(plans: Iterable[Plan]) -> list[Finding]:
    """The first plan, and each other beside it."""
    first, *others = plans
    found = []
    for number, other in enumerate(others):
        if why := state_differs(first, other):
            found.append(Finding(check="plan", message=f"shapes[{number}] keeps another state than the plan: {why}", witness={"shape": number}))
    return found


def state_differs(one: Plan, other: Plan) -> str:
    """Why ranks that have done a step of one cannot go on with a step of the other; nothing where they can."""
    a, b = one.layout, other.layout
    if a is None or b is None:
        return "it has no layout"
    for name in FIELDS:
        if getattr(a, name) != getattr(b, name):
            return f"{name} is {_short(getattr(b, name))}, not {_short(getattr(a, name))}"
    if _samples(a) != _samples(b):
        return f"replicas take {_samples(b)} samples, not {_samples(a)}"
    if a.step_end != b.step_end:
        return f"its steps end with {b.step_end}, not {a.step_end}"
    for pipeline in range(a.pipeline):
        if set(a.held(pipeline).params) != set(b.held(pipeline).params):
            odd = sorted(set(a.held(pipeline).params) ^ set(b.held(pipeline).params))[0]
            return f"pipeline index {pipeline} holds {odd!r} in one of them only"
    kept = [_kept(one), _kept(other)]
    for where in sorted(kept[0].keys() | kept[1].keys()):
        sizes = [x.get(where, 0) for x in kept]
        if sizes[0] != sizes[1]:
            rank, name = where
            return f"{name} of rank {rank} has {sizes[1]} bytes, not {sizes[0]}"
    return ""


def _samples(layout: TrainingLayout) -> list[int]:
    return [layout.microbatches_of(d) * layout.microbatch_size for d in range(layout.data)]


def _kept(plan: Plan) -> Mapping[tuple[int, str], int]:
    """Bytes of what lives on, by rank and name; of a program with folds, of its representatives."""
    program = plan.main if plan.main.fold is not None else inline(plan.main, plan.programs).program
    b = program.buffers
    found: dict[tuple[int, str], int] = {}
    for i in (b.persistent > 0).nonzero()[0].tolist():
        if BUFFER_ROLES[int(b.role[i])] in KEPT and int(b.alias_of[i]) < 0:
            where = int(b.actor[i]), b.name[i] if b.name else f"#{i}"
            found[where] = found.get(where, 0) + int(b.chunks[i]) * int(b.chunk_bytes[i])
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
