"""In which precision a layout trains: bytes of a value in computation, and of what a parameter needs. A property of layouts, not of captured graphs.

A layout search prices it, and a plan's layout says it (`TrainingLayout.precision`): buffers, messages and work are of it. `narrowed.in_precision`
gives the graph that such a layout is built of, from one captured in float32.
"""

from __future__ import annotations

import msgspec

from ..profile.state_bytes import StateBytes

__all__ = ["FULL", "MASTER_BYTES", "MIXED", "Precision"]

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


class Precision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`value_bytes`: of an activation or weight in computation, where the graph was captured with 4. `dtype` names the devices' peak. `state`: bytes
    per parameter."""

    dtype: str
    value_bytes: float
    state: StateBytes

    @property
    def torch_name(self) -> str:
        return TORCH_NAMES.get(self.dtype, "float32")

    @property
    def message_ratio(self) -> int:
        """Bytes of a gradient in a message per byte of its weight."""
        return round(self.state.message / self.state.weight)

    @property
    def master_ratio(self) -> int:
        """Bytes of what the optimizer updates per byte of its weight."""
        return round(MASTER_BYTES / self.state.weight)


MASTER_BYTES = 4  # optimizers compute in float32
FULL = Precision(dtype="fp32", value_bytes=4.0, state=StateBytes(4.0, 4.0, 8.0, 4.0))
MIXED = Precision(dtype="bf16", value_bytes=2.0, state=StateBytes(2.0, 4.0, 12.0, 2.0))
