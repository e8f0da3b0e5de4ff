"""A gradient codec as data: bytes, error, and how ranks add it up; and the codecs that exist."""

from .codec import CodecSpec, parse_codec
from .kinds import CODECS
from .terms import CodecKind

__all__ = ["CODECS", "CodecKind", "CodecSpec", "parse_codec"]
