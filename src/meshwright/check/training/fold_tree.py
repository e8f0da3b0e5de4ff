"""Gradients that must be the fold over micro-batches, whatever the number of ranks: proved in two parts.

A replica folds its own micro-batches (`run.train.folds`): replica d has numbers d m .. d m + m - 1, in order, m a power of two, so its sum is one
node of the tree over all. The collective that adds the replicas' sums has a contract of its own, `tree`, proved for itself, over members in the
order of the replicas: the nodes above. Nothing else may add to a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...plan.plan import Plan, TrainingLayout
from ...program.program import REPRODUCIBLE_SUMS, Kind, Program
from ..verdict import Finding

__all__ = ["check_folds"]


def check_folds(plan: Plan) -> list[Finding]:
    """Of a training plan; nothing where the job asks for no fold."""
    job, layout = plan.job.get("training", {}), plan.layout
    recipe = job.get("recipe", {}) if isinstance(job, Mapping) else {}
    asked = isinstance(recipe, Mapping) and recipe.get("reproducible", "run") == "tree"
    if layout is None or not (asked or layout.step_end.folded):
        return []
    if not layout.step_end.folded or not asked:
        text = "the job asks for gradients that are folds, the layout does not" if asked else "the layout folds gradients, and the job asks for none"
        return [_wrong(text, "layout.end.folded")]
    return [*_of_layout(layout), *(found for program in plan.programs.values() for found in _of_program(program, plan.programs, layout))]


def _of_layout(layout: TrainingLayout) -> Iterator[Finding]:
    whole = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "zero_level": layout.zero_level + 1}
    for name, degree in whole.items():
        if degree != 1:
            yield _wrong(f"{name} divides what the fold over micro-batches wants whole", f"layout.{name}")
    m = layout.microbatches
    if layout.data > 1 and (layout.replica_microbatches or m & (m - 1)):
        yield _wrong(f"replicas with {layout.microbatch_counts} micro-batches have no aligned blocks of the tree", "layout.microbatches")


def _of_program(p: Program, programs: Mapping[str, Program], layout: TrainingLayout) -> Iterator[Finding]:
    """The calls of a step, and the order of each rank's micro-batches."""
    for call in range(len(p.calls)):
        name = p.calls.names[int(p.calls.callee[call])]
        members = p.comms.groups[int(p.calls.comm[call])].tolist()
        for c in programs[name].contracts if name in programs else ():
            if c.op in REPRODUCIBLE_SUMS and (c.reproducible != "tree" or c.numbers or members != sorted(members)):
                text = f"the {c.op} {programs[name].name or name[:12]!r} adds up replicas otherwise than the tree over micro-batches does"
                yield _wrong(text, "contract.reproducible", callee=name)
    if not len(p.calls) and not len(p.ops):
        return
    lane = p.lane_of_step()
    at = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    last: dict[int, int] = {}
    for step in at.tolist():
        op, rank = int(p.steps.op[step]), int(p.lanes.actor[lane[step]])
        if p.ops.name[op] not in ("B", "W"):
            continue
        number = int(p.ops.microbatch[op])
        if number < last.get(rank, 0):
            text = f"{p.describe(step)} comes after micro-batch {last[rank]}: a replica folds its micro-batches in order"
            yield _wrong(text, "ops.microbatch", rank=rank, step=step, fold_node=[number, number + 1])
            return
        last[rank] = number


def _wrong(text: str, field: str, **more: object) -> Finding:
    return Finding(check="values", message=text, witness={"field": field, **more})
