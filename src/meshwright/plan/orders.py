"""The order of work and the memory of one-forward-one-backward, in closed form: what its strategy plans, and what predictions of layouts assume."""

from __future__ import annotations

from typing import Literal

from ..errors import UsageError

__all__ = ["RECEIVES_AHEAD", "Phase", "one_f_one_b_order", "peak_in_flight"]

Phase = Literal["F", "B"]
# Messages that a receiver may hold unused per connection and direction: one may arrive while the one before is read.
RECEIVES_AHEAD = 2


def one_f_one_b_order(stages: int, microbatches: int, stage: int) -> list[tuple[Phase, int]]:
    """Order of work on `stage` (0 = first): a list of ("F" | "B", micro-batch) of length 2 · microbatches.

    Raises: UsageError when a count is below 1 or the stage does not exist.
    """
    _require(stages, microbatches, stage)
    warmup = min(stages - stage - 1, microbatches)
    order: list[tuple[Phase, int]] = [("F", i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        order += [("F", warmup + i), ("B", i)]
    order += [("B", i) for i in range(microbatches - warmup, microbatches)]
    return order


def peak_in_flight(stages: int, microbatches: int, stage: int) -> int:
    """Most micro-batches whose activations `stage` holds at once: min(microbatches, stages - stage)."""
    _require(stages, microbatches, stage)
    return min(microbatches, stages - stage)


def _require(stages: int, microbatches: int, stage: int) -> None:
    if stages < 1:
        raise UsageError(f"a pipeline needs at least 1 stage, got {stages}", where="stages")
    if microbatches < 1:
        raise UsageError(f"a pipeline needs at least 1 micro-batch, got {microbatches}", where="microbatches", hint="raise the global batch")
    if not 0 <= stage < stages:
        raise UsageError(f"there is no stage {stage} in a pipeline of {stages}", where="stage", hint=f"stages are 0-{stages - 1}")
