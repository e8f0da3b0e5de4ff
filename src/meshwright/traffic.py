"""Gradient traffic as data: tensors as their gradients become ready, what a codec costs, and groups of tensors that are sent together.

A training step has one compute stream (backward, encode, decode) and one network that serves messages in order. Times are whole nanoseconds,
so that planner and checker agree to the last one. A group of the tensors `first` .. `last - 1` (in ready order), sent with one codec:

    its encode begins on the compute stream when the gradient of its last tensor is ready, and delays the backward behind it;
    its exchange begins when the encode is over and the network is free;
    decodes begin when backward and all encodes are over, in order, each when its exchange is over.

While the network is busy the compute stream loses `interference_permille` / (1000 + interference_permille) of its speed until backward is over:
communication threads take processor time. The step ends `finish_ns` after the last decode, when gradients are handed back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from .bound import Bound
from .errors import UsageError

__all__ = ["MAX_TENSORS", "CodecCost", "Curve", "GradientTensor", "TrafficGroup", "TrafficPlan", "TrafficProfile", "TrafficTime"]

MAX_TENSORS = 4096  # gradients that one plan groups: the search's work grows faster than their number
_MAX_NS = 10**15  # a time beyond eleven days is a mistake, and sums of such times would leave 64 bits


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time over size, linear between `sizes` and beyond the last; below the first it is `times_ns[0]`. Sizes rise; times do not fall.

    `r2`: share of the variance of the measured times that the curve explains; None where nothing was measured.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[int, ...]
    r2: float | None = None

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.times_ns):
            raise UsageError(f"{len(self.sizes)} sizes for {len(self.times_ns)} times", where="curve", hint="give a time for every size")
        if any(a >= b for a, b in pairwise(self.sizes)) or self.sizes[0] < 0:
            raise UsageError("sizes must rise from 0 or more", where="curve.sizes")
        if any(a > b for a, b in pairwise(self.times_ns)) or not 0 <= self.times_ns[0] <= self.times_ns[-1] <= _MAX_NS:
            raise UsageError("times must be 0 or more, below eleven days, and not fall with the size", where="curve.times_ns")


class CodecCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a codec costs on this machine and fabric: `encode`, `decode` over the group's elements, `exchange` over its payload bytes.

    `payload_bytes[i]`: what one rank sends for tensor i alone, all rounds; a group's payload is the sum. `decode` covers all that a rank decodes:
    every rank's payload where payloads are gathered.
    """

    codec: str  # as `codec.parse_codec` reads it
    encode: Curve
    exchange: Curve
    decode: Curve
    payload_bytes: tuple[int, ...]
    evidence: Literal["measured", "assumed"] = "measured"


class GradientTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`ready_ns`: compute time from the start of the step until the gradient is there, with nothing encoded and nothing sent."""

    name: str
    shape: tuple[int, ...]
    ready_ns: int

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class TrafficProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training step of one rank: its gradients in ready order, the codecs to choose from, `ranks` that exchange."""

    tensors: tuple[GradientTensor, ...]
    codecs: tuple[CodecCost, ...]
    ranks: int
    interference_permille: int = 0
    element_bytes: int = 4
    backward_ns: int = 0  # end of the backward where it is later than the last gradient
    finish_ns: int = 0  # what every step does after its last decode
    plain_ns: int = 0  # a step whose gradients torch's DDP exchanges by itself, as measured; 0: not known
    source: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise UsageError(f"{len(self.tensors)} tensors; 1 to {MAX_TENSORS} can be planned", where="tensors")
        if not self.codecs:
            raise UsageError("no codec to choose from", where="codecs", hint="`none` is one")
        if len({c.codec for c in self.codecs}) < len(self.codecs):
            raise UsageError("a codec stands twice", where="codecs")
        if len({t.name for t in self.tensors}) < len(self.tensors):
            raise UsageError("a tensor stands twice", where="tensors", hint="a shared parameter is one tensor, ready when its last part is")
        if self.ranks < 1 or not 0 <= self.interference_permille <= 100_000:
            raise UsageError("ranks >= 1, interference from 0 to 100000 per mille", where="profile")
        ready = [0, *(t.ready_ns for t in self.tensors)]
        ends = (ready[-1], self.backward_ns, self.finish_ns, self.plain_ns)
        if any(a > b for a, b in pairwise(ready)) or not 0 <= min(ends) <= max(ends) <= _MAX_NS:
            raise UsageError("tensors must stand in the order in which they become ready, within eleven days", where="tensors.ready_ns")
        for t in self.tensors:
            if any(extent < 0 for extent in t.shape) or t.elements > 1 << 40:
                raise UsageError(f"{t.name!r} has shape {t.shape}", where="tensors.shape", hint="extents are 0 or more, 2^40 elements at most")
        for c in self.codecs:
            if len(c.payload_bytes) != len(self.tensors) or any(not 0 <= b <= 1 << 44 for b in c.payload_bytes):
                raise UsageError("needs a payload of 0 to 2^44 bytes for every tensor", where=f"codecs.{c.codec}.payload_bytes")

    @property
    def compute_ns(self) -> int:
        """From the start of the step to the end of its backward, with nothing encoded."""
        return max(self.tensors[-1].ready_ns, self.backward_ns)

    def position(self, codec: str) -> int:
        """Raises: UsageError for a codec that was not measured."""
        for i, c in enumerate(self.codecs):
            if c.codec == codec:
                return i
        raise UsageError(f"no costs of codec {codec!r}", where="codec", hint=f"the profile has {', '.join(c.codec for c in self.codecs)}")


class TrafficGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tensors `first` .. `last - 1` of the profile, sent as one with `codec`."""

    first: int
    last: int
    codec: str


class TrafficTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted times of one group, in nanoseconds from the start of the step."""

    encode_start_ns: int
    encode_end_ns: int
    exchange_start_ns: int
    exchange_end_ns: int
    decode_start_ns: int
    decode_end_ns: int


class TrafficPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Groups that cover the profile's tensors in order, with the predicted step and a lower bound of every plan that chooses among `codecs`.

    `uncompressed`: bound of the best plan without compression. `codecs`: what the strategy chose from. `leave`: gradients are left to DDP, which was
    measured (`profile.plain_ns`) to be about as fast as the groups would be; these then say what was compared with it.
    """

    profile: TrafficProfile
    groups: tuple[TrafficGroup, ...]
    strategy: str
    options: dict[str, str | int | float | bool]
    codecs: tuple[str, ...]
    step_ns: int
    payload_bytes: int
    bound: Bound
    uncompressed: Bound
    leave: bool = False
    version: str = ""
