"""Gradient codecs on tensors: `make_codec(spec, shapes)` gives the code behind a `CodecSpec`. How to use one: `base`."""

from .base import At, Codec, Payload, State
from .feedback import ErrorFeedback
from .make import IMPLEMENTED, make_codec

__all__ = ["IMPLEMENTED", "At", "Codec", "ErrorFeedback", "Payload", "State", "make_codec"]
