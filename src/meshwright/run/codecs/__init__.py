"""Gradient codecs on tensors: `make_codec(spec, shapes)` gives the code behind a `CodecSpec`. How to use one: `base`."""

from __future__ import annotations

from collections.abc import Mapping

from ...codec import CodecSpec, Shapes
from .base import At, Codec, NonFinite, Payload, State
from .casts import Half, Plain
from .feedback import ErrorFeedback
from .sparse import TopK

__all__ = ["IMPLEMENTED", "At", "Codec", "ErrorFeedback", "Payload", "State", "make_codec"]

IMPLEMENTED: Mapping[str, type[Codec]] = {"none": Plain, "fp16": Half, "bf16": Half, "topk": TopK}


def make_codec(spec: CodecSpec, shapes: Shapes, *, name: str = "", nonfinite: NonFinite = "refuse") -> Codec:
    """The codec of a fused group of tensors of these shapes, with error feedback where the spec asks for it."""
    codec = IMPLEMENTED[spec.name](spec, shapes, name=name, nonfinite=nonfinite)
    return ErrorFeedback(codec) if spec.feedback else codec
