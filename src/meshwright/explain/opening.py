"""A step in three sentences for whoever has never seen such a page: what limits it, by how much, what to do about it.

The advice follows from the kind of work that most of the critical path is, and from what the plan has not used up yet (micro-batches, overlap,
memory). It names options and commands; what they would change is for `meshwright train explain` to price.
"""

from __future__ import annotations

from ..plan.plan import Plan
from .breakdown import Breakdown
from .numbers import seconds_text, share_text

__all__ = ["opening"]

COMPUTE = ("forward", "backward", "optimizer")
WAITING = ("pipeline", "idle")
MUCH_WAITING = 0.2  # of the devices' time
MANY_MICROBATCHES = 4  # to a stage: beyond that, more of them shorten the waiting little


def opening(plan: Plan, found: Breakdown) -> tuple[str, str, str]:
    """Raises: nothing; a step without work gets three sentences that say so."""
    kinds: dict[str, float] = {}
    for part in found.path:
        kinds[_kind(part.phase)] = kinds.get(_kind(part.phase), 0.0) + part.seconds
    if not kinds:
        return "This step does nothing.", "It takes no time.", "Plan a job with work in it."
    kind = max(kinds, key=lambda k: kinds[k])
    whole = sum(kinds.values())
    top = max((p for p in found.path if _kind(p.phase) == kind), key=lambda p: p.seconds)
    stage = next((s.name for s in found.stages if s.stage == top.stage), f"stage {top.stage}")
    what = f"{kind.capitalize()} limits this step, most of all {top.phase} on {stage}."
    much = f"It is {seconds_text(kinds[kind])} of the {seconds_text(whole)} that the longest chain of work takes ({share_text(kinds[kind] / whole)})"
    if plan.bound is not None and float(plan.bound) > 0 and found.time_s > 0:
        above = found.time_s / float(plan.bound) - 1
        much += f"; no plan of this kind can be more than {share_text(above / (1 + above))} faster" if above > 0.0005 else "; no plan can be faster"
    return what, much + ".", _advice(plan, found, kind)


def _kind(phase: str) -> str:
    return "compute" if phase in COMPUTE else "pipeline waiting" if phase == "idle" else f"{phase} communication"


def _advice(plan: Plan, found: Breakdown, kind: str) -> str:
    layout = plan.layout
    spent = sum(sum(s.seconds.values()) for s in found.stages) or 1.0
    waiting = sum(s.seconds.get(phase, 0.0) for s in found.stages for phase in WAITING) / spent
    if layout is not None and layout.pipeline > 1 and waiting > MUCH_WAITING and layout.microbatches < MANY_MICROBATCHES * layout.pipeline:
        said = f"{layout.microbatches} micro-batches on {layout.pipeline} stages leave devices idle {share_text(waiting)} of the time"
        return f"To do: {said}, so plan with a larger --global-batch or smaller micro-batches."
    if kind == "compute":
        return "To do: use more devices, or a lower precision with `train plan --precision bf16`; faster links would change little."
    if kind == "gradient communication":
        gentle = "" if layout is None or layout.overlap else "let sums overlap the backward pass (`train plan --overlap`), "
        less = "use a larger batch per step, or send less with `meshwright traffic plan`"
        return f"To do: {gentle}{less}; faster links between servers help, more FLOP/s do not."
    if kind.startswith("tensor"):
        return "To do: keep tensor parallelism inside a server, or lower its degree (`train plan --tp`), and give the devices to data parallelism."
    return "To do: fewer stages (`train plan --pp`) or more micro-batches; `meshwright pipeline compare` shows which schedule waits least."
