"""In which precision a model is trained, and what its optimizer keeps: data type of computation, bytes of a value, state per parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...profile.frameworks import MOMENT_BYTES
from ...profile.layer_table import StateBytes

__all__ = ["FULL", "MIXED", "Precision", "with_optimizer"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`value_bytes`: of an activation or weight in computation, where the graph was captured with 4. `dtype` names the devices' peak."""

    dtype: str
    value_bytes: float
    state: StateBytes


FULL = Precision(dtype="fp32", value_bytes=4.0, state=StateBytes(4.0, 4.0, 8.0, 4.0))
MIXED = Precision(dtype="bf16", value_bytes=2.0, state=StateBytes(2.0, 4.0, 12.0, 2.0))


def with_optimizer(precision: Precision, optimizer: str) -> Precision:
    """What `optimizer` keeps instead of AdamW's two moments: the state that this precision has beside them stays. One that is not known by name
    (a user's own) is taken to keep as much as AdamW."""
    if optimizer not in MOMENT_BYTES:
        return precision
    state = precision.state
    return replace(precision, state=state._replace(optimizer=state.optimizer - MOMENT_BYTES["adamw"] + MOMENT_BYTES[optimizer]))
