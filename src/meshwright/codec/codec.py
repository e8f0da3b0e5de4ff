"""A gradient codec as data: what is sent instead of a gradient, in how many bytes, with which error, and how ranks add it up.

`CodecSpec` is a name with options, written `topk:density=0.01` on the command line and in plans. What it states is tested against the code in
`run/codecs` that encodes and decodes: bytes exactly, bias and variance statistically, contraction by generated inputs.

The error of a codec C on a vector x of n elements (norms are 2-norms, expectations over its random numbers):
- `variance`: unbiased, E C(x) = x and E|C(x) - x|^2 <= variance * |x|^2.
- `contraction`: E|x - C(x)|^2 <= (1 - contraction) * |x|^2, contraction in (0, 1]. With error feedback such a codec converges like the dense
  gradient up to terms of higher order (Karimireddy et al., ICML 2019; Stich et al., NeurIPS 2018).
A value of None says that no bound holds for every input.

Sizes are for float32 gradients unless an element size is given; they are payload: no framing, no lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UnknownName, UsageError
from .kinds import CODECS
from .terms import Aggregation, Bias, CodecKind, CodecOptions, PayloadBytes, Shapes, Value, options_of

__all__ = ["CodecSpec", "parse_codec"]


@dataclass(frozen=True, kw_only=True)
class CodecSpec(CodecOptions):
    """A codec with its options, in the order of its kind, defaults included: equal specs are equal values and equal texts."""

    @classmethod
    def of(cls, name: str, **options: Value) -> CodecSpec:
        """Raises: UnknownName for a codec or option that does not exist, UsageError for a value out of range."""
        kind = _kind(name)
        known = {o.name: o for o in options_of(kind)}
        for key in options:
            if key not in known:
                raise UnknownName(f"no option {key!r}", where=f"codec {name}", hint=f"it has {', '.join(known) or 'none'}")
        values = {key: o.read(options.get(key, o.default), f"codec {name}") for key, o in known.items()}
        spec = cls(name=name, options=tuple(values.items()))
        if reason := kind.refusal(spec):
            raise UsageError(reason, where=f"codec {spec.text}")
        return spec

    @property
    def kind(self) -> CodecKind:
        return _kind(self.name)

    @property
    def text(self) -> str:
        """`name:option=value,...` with the options that differ from the default; `parse_codec` reads it back."""
        defaults = {o.name: o.default for o in options_of(self.kind)}
        changed = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.options if v != defaults[k]]
        return self.name + (":" + ",".join(changed) if changed else "")

    @property
    def aggregation(self) -> Aggregation:
        """all-reduce: the encoded form is summed, round by round; all-gather: every rank decodes every rank's payload."""
        return self.kind.aggregation

    @property
    def bias(self) -> Bias:
        return self.kind.bias(self)

    def variance(self, elements: int) -> float | None:
        return self.kind.variance(self, elements)

    def contraction(self, elements: int) -> float | None:
        return self.kind.contraction(self, elements)

    def rounds(self, shapes: Shapes, *, element_bytes: int = 4, step: int | None = None) -> tuple[PayloadBytes, ...]:
        """Payload of one rank per round for a fused group of tensors of these shapes; `step` None: after any warm-up.

        An all-gather codec has one round. A round may be empty (0 bytes), and still is one.
        """
        return self.kind.payload(self, shapes, element_bytes, step)

    def payload_bytes(self, elements: int, *, element_bytes: int = 4, step: int | None = None) -> PayloadBytes:
        """All rounds together, for one flat tensor of so many elements."""
        found = self.rounds([(elements,)], element_bytes=element_bytes, step=step)
        return PayloadBytes(lower=sum(r.lower for r in found), expected=sum(r.expected for r in found), upper=sum(r.upper for r in found))


def parse_codec(text: str) -> CodecSpec:
    """`topk:density=0.01` as a spec. Raises: UnknownName, UsageError."""
    name, _, rest = text.strip().partition(":")
    options: dict[str, Value] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or key in options:
            raise UsageError(f"{item!r} is not option=value, or stands twice", where=f"codec {text!r}", hint="write name:option=value,option=value")
        options[key] = value
    return CodecSpec.of(name, **options)


def _kind(name: str) -> CodecKind:
    kinds: Mapping[str, CodecKind] = {k.name: k for k in CODECS}
    if name not in kinds:
        raise UnknownName(f"no codec {name!r}", where="codec", hint=f"one of {', '.join(kinds)}")
    return kinds[name]
