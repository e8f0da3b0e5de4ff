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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from typing import Literal

from .cite import Cite
from .errors import UnknownName, UsageError

__all__ = ["Aggregation", "Bias", "CodecKind", "CodecSpec", "Option", "PayloadBytes", "Shapes", "Value", "parse_codec"]

Value = float | int | str | bool
Aggregation = Literal["all-reduce", "all-gather"]
Bias = Literal["exact", "unbiased", "biased"]
Shapes = Sequence[tuple[int, ...]]  # of the tensors of a fused group, in the order in which they lie in it


@dataclass(frozen=True, kw_only=True)
class PayloadBytes:
    """What one rank puts into one round: bounds that always hold, and what is to be expected."""

    lower: int
    expected: int
    upper: int

    @classmethod
    def exactly(cls, size_bytes: int) -> PayloadBytes:
        return cls(lower=size_bytes, expected=size_bytes, upper=size_bytes)

    @property
    def exact(self) -> bool:
        return self.lower == self.upper


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a codec; its type is that of `default`. Numbers lie in `low`..`high` and are multiples of `multiple`; or one of `choices`."""

    name: str
    default: Value
    what: str
    low: float = -inf
    high: float = inf
    choices: tuple[Value, ...] = ()
    multiple: int = 1

    def read(self, value: Value, where: str) -> Value:
        """`value`, or the text of one, as this option's type. Raises: UsageError."""
        kind = type(self.default)
        found: Value
        try:
            if kind is bool:
                found = {"1": True, "true": True, "0": False, "false": False}[str(value).lower()]
            elif kind is int and isinstance(value, float):
                found = int(value) if value.is_integer() else int(str(value))
            else:
                found = kind(value)
        except (ValueError, KeyError, OverflowError):
            raise UsageError(f"{self.name}={value!r} is no {kind.__name__}", where=where, hint=self.what) from None
        if self.choices and found not in self.choices:
            raise UsageError(f"{self.name}={value!r} is none of {', '.join(map(str, self.choices))}", where=where, hint=self.what)
        if not isinstance(found, str) and not (isfinite(found) and self.low <= found <= self.high):
            raise UsageError(f"{self.name}={value!r} is outside {self.low:g} to {self.high:g}", where=where, hint=self.what)
        if isinstance(found, int) and found % self.multiple:
            raise UsageError(f"{self.name}={value!r} is no multiple of {self.multiple}", where=where, hint=self.what)
        return found


@dataclass(frozen=True, kw_only=True)
class CodecKind:
    """A published codec. The functions take the spec, then: the group's shapes, bytes per element and the training step (`payload`), or the
    number of elements (`variance`, `contraction`)."""

    name: str
    title: str
    cite: Cite | None
    aggregation: Aggregation
    bias: Callable[[CodecSpec], Bias]
    feedback: bool  # whether it is used with error feedback unless told otherwise
    payload: Callable[[CodecSpec, Shapes, int, int | None], tuple[PayloadBytes, ...]]
    options: tuple[Option, ...] = ()
    variance: Callable[[CodecSpec, int], float | None] = lambda spec, n: None
    contraction: Callable[[CodecSpec, int], float | None] = lambda spec, n: None
    refusal: Callable[[CodecSpec], str] = lambda spec: ""  # why options do not go together
    random: bool = False  # draws random numbers, from seed and step
    own_memory: bool = False  # keeps what it did not send in a state of its own: never wrapped into error feedback
    summand: Literal["float32", "float16", "bfloat16"] = "float32"  # what ranks add up, where the encoded form is summed
    keeps_loss: bool = True  # promises the dense loss within 1 % after the same number of steps (benchmarks/codec_convergence.py)


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec with its options, in the order of its kind, defaults included: equal specs are equal values and equal texts."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

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

    def __getitem__(self, key: str) -> Value:
        return dict(self.options)[key]

    def number(self, key: str) -> float:
        return float(self[key])

    def integer(self, key: str) -> int:
        return int(self[key])

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
    def feedback(self) -> bool:
        """Whether what is not sent is added to the next step's gradient."""
        return bool(dict(self.options).get("feedback", False))

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


def options_of(kind: CodecKind) -> Iterable[Option]:
    """Its own options, and `feedback` where error feedback can be switched."""
    yield from kind.options
    if not kind.own_memory:
        yield Option(name="feedback", default=kind.feedback, what="error feedback: what is not sent is added to the next step's gradient")


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
    from .codec_kinds import CODECS

    kinds: Mapping[str, CodecKind] = {k.name: k for k in CODECS}
    if name not in kinds:
        raise UnknownName(f"no codec {name!r}", where="codec", hint=f"one of {', '.join(kinds)}")
    return kinds[name]


def elements_of(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes)
