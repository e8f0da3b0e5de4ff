"""Steps for batches of other shapes, beside a plan for the largest: the same degrees, stages, buckets and devices, so that ranks keep one state.

What may differ by shape is decided anew: what is recomputed, the prices, the order of messages. A shape whose step would keep the state otherwise is
refused with the first difference; the checker (`check.training.shapes`) looks at the same of every finished plan.
"""

from __future__ import annotations

from dataclasses import replace

from ...check.training.shapes import state_differs
from ...errors import MeshwrightError, Unsupported
from ...plan.plan import Plan, TrainingLayout
from ...plan.vocabulary import base_node
from .compress import CompressWanted
from .pipeline import PipelineWanted, schedule_asked
from .sharding import ShardingWanted
from .wishes import LayoutWanted, PrecisionWanted, Wishes

__all__ = ["require_one_state", "require_sums", "wishes_beside"]


def require_sums(asked: Wishes) -> None:
    """Raises: Unsupported with gradient codecs, whose memory is a step's own."""
    if asked.of(CompressWanted).codec:
        raise Unsupported("gradient codecs keep what was not sent by steps of one shape", where="shapes", hint="plan without --compress")


def wishes_beside(plan: Plan, asked: Wishes) -> Wishes:
    """What is asked of the step for another shape, so that it keeps the state of `plan`. Raises: Unsupported with modules kept whole, which are known
    by their last trace."""
    layout = plan.layout
    assert layout is not None
    if told := plan.job.get("captured"):
        raise Unsupported(f"of several shapes every module must be traced: {told[0]}", where="shapes", hint="pad to one shape, and plan that")
    wanted = asked.of(LayoutWanted)
    options = replace(wanted.tensor_options, sequence=layout.sequence) if layout.tensor > 1 else wanted.tensor_options
    return asked.but(
        LayoutWanted(
            data=layout.data // layout.context, tensor=layout.tensor, pipeline=layout.pipeline, microbatch=layout.microbatch_size,
            context=layout.context, borders=_borders(layout), tensor_options=options, placement=plan.placement[: layout.ranks],
        ),
        ShardingWanted(level=layout.zero_level, overlap=layout.overlap, bucket_bytes=layout.bucket_bytes), _schedule(plan),
        PrecisionWanted.of(layout),
    )  # fmt: skip


def _borders(layout: TrainingLayout) -> tuple[str, ...]:
    """The calls that begin the stages after the first."""
    first = {s.key: base_node(s.nodes[0]) for s in layout.segments}
    return tuple(first[stage.segments[0]] for stage in layout.stages[1:])


def _schedule(plan: Plan) -> PipelineWanted:
    """The one that was chosen."""
    asked = schedule_asked(plan)
    words = str(plan.decisions.get("pipeline", {}).get("options", {}).get("schedule", "")).split()
    if asked.one or not words:
        return asked if asked.one else PipelineWanted(name="1f1b")
    options = {name: value or "true" for name, _, value in (w.partition("=") for w in words[1:])}
    return PipelineWanted(name=words[0], options=options)


def require_one_state(plan: Plan, other: Plan, shape: str) -> None:
    """Raises: Unsupported for a step of another shape that ranks cannot take turns with."""
    try:
        why = state_differs(plan, other)
    except MeshwrightError as error:  # programs too large to write out
        why = error.message
    if why:
        raise Unsupported(
            f"the step for {shape} would keep another state than the largest shape's: {why}", where="shapes",
            hint="fix degrees, level and buckets (data=, tensor=, pipeline=, zero=, microbatch=), or leave this shape out",
        )  # fmt: skip
