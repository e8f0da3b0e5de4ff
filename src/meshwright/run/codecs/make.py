"""The code behind every codec's name, and a codec with error feedback where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from ...codec.codec import CodecSpec
from ...codec.terms import Shapes
from .base import Codec, NonFinite
from .casts import Half, Plain
from .dgc import DGC
from .feedback import ErrorFeedback
from .float8 import BlockFloat8
from .levels import QSGD, BlockInt8, TernGrad
from .powersgd import PowerSGD
from .randomk import RandomK
from .signs import EFSign, OneBit, SignSGD, Signum
from .threshold import Threshold
from .topk import TopK

__all__ = ["IMPLEMENTED", "make_codec"]

IMPLEMENTED: Mapping[str, type[Codec]] = {
    "none": Plain, "fp16": Half, "bf16": Half, "fp8": BlockFloat8, "int8": BlockInt8, "topk": TopK, "threshold": Threshold, "randomk": RandomK,
    "dgc": DGC,
    "efsign": EFSign, "onebit": OneBit, "signsgd": SignSGD, "signum": Signum, "terngrad": TernGrad, "qsgd": QSGD, "powersgd": PowerSGD,
}  # fmt: skip


def make_codec(spec: CodecSpec, shapes: Shapes, *, name: str = "", nonfinite: NonFinite = "refuse") -> Codec:
    """The codec of a fused group of tensors of these shapes, with error feedback where the spec asks for it."""
    codec = IMPLEMENTED[spec.name](spec, shapes, name=name, nonfinite=nonfinite)
    return ErrorFeedback(codec) if spec.feedback else codec
