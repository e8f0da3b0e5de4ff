"""A training plan in another system's words: its text, what the system has no words for, what its user must still say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Exported", "TARGETS", "Target"]

Target = Literal["torchtitan", "megatron", "deepspeed"]
TARGETS: tuple[Target, ...] = ("torchtitan", "megatron", "deepspeed")


@dataclass(frozen=True)
class Exported:
    """`text` of the file; what the target has no words for; what its user must still say (model, data)."""

    target: Target
    text: str
    not_expressed: tuple[str, ...]
    to_add: tuple[str, ...]
