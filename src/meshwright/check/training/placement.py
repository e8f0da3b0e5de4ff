"""What a layout says about which pipeline index holds which stages, and which micro-batches run through which copy of them."""

from __future__ import annotations

from ...plan.plan import TrainingLayout

__all__ = ["placement_faults"]


def placement_faults(layout: TrainingLayout) -> list[str]:
    """Every copy has every stage on a pipeline index, no index has a stage twice, copies of a stage are on indices that share all their stages."""
    rows, bad = layout.placement, []
    if any(not 0 <= c < max(1, len(rows)) for c in layout.copy_of) or (layout.copy_of and len(layout.copy_of) != layout.microbatches):
        bad.append(f"{layout.microbatches} micro-batches run through one of {max(1, len(rows))} copies of the stages each, it says {layout.copy_of}")
    if len(rows) > 1 and not layout.copy_of:
        bad.append(f"there are {len(rows)} copies of the stages, and nothing says which micro-batch runs through which")
    if not rows:
        return bad
    held: dict[int, list[int]] = {p: [] for p in range(layout.pipeline)}
    for row in rows:
        if len(row) != len(layout.stages) or any(p not in held for p in row):
            return [*bad, f"a copy has {len(row)} of {len(layout.stages)} stages, or stages on an index that is not 0 to {layout.pipeline - 1}"]
        for stage, p in enumerate(row):
            held[p].append(stage)
    for p, stages in held.items():
        if len(set(stages)) < len(stages) or not stages:
            bad.append(f"pipeline index {p} holds stages {sorted(stages)}: each at most once, and one at least")
    for stage in range(len(layout.stages)):
        if len({frozenset(held[row[stage]]) for row in rows}) > 1:
            bad.append(f"copies of stage {stage} are on indices that hold other stages too")
    return bad
