"""The terms in which a gradient codec is stated: its options, its payload in bytes, and the functions of a published kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from typing import Literal

from ..cite import Cite
from ..errors import UsageError

__all__ = ["Aggregation", "Bias", "CodecKind", "CodecOptions", "Option", "PayloadBytes", "Shapes", "Value", "elements_of", "options_of"]

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
class CodecOptions:
    """A codec's name and the values of its options, in the order of its kind."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def __getitem__(self, key: str) -> Value:
        return dict(self.options)[key]

    def number(self, key: str) -> float:
        return float(self[key])

    def integer(self, key: str) -> int:
        return int(self[key])

    @property
    def feedback(self) -> bool:
        """Whether what is not sent is added to the next step's gradient."""
        return bool(dict(self.options).get("feedback", False))


@dataclass(frozen=True, kw_only=True)
class CodecKind:
    """A published codec. The functions take the spec, then: the group's shapes, bytes per element and the training step (`payload`), or the
    number of elements (`variance`, `contraction`)."""

    name: str
    title: str
    cite: Cite | None
    aggregation: Aggregation
    bias: Callable[[CodecOptions], Bias]
    feedback: bool  # whether it is used with error feedback unless told otherwise
    payload: Callable[[CodecOptions, Shapes, int, int | None], tuple[PayloadBytes, ...]]
    options: tuple[Option, ...] = ()
    variance: Callable[[CodecOptions, int], float | None] = lambda spec, n: None
    contraction: Callable[[CodecOptions, int], float | None] = lambda spec, n: None
    refusal: Callable[[CodecOptions], str] = lambda spec: ""  # why options do not go together
    random: bool = False  # draws random numbers, from seed and step
    own_memory: bool = False  # keeps what it did not send in a state of its own: never wrapped into error feedback
    summand: Literal["float32", "float16", "bfloat16"] = "float32"  # what ranks add up, where the encoded form is summed
    keeps_loss: bool = True  # promises the dense loss within 1 % after the same number of steps (benchmarks/codec_convergence.py)


def options_of(kind: CodecKind) -> Iterable[Option]:
    """Its own options, and `feedback` where error feedback can be switched."""
    yield from kind.options
    if not kind.own_memory:
        yield Option(name="feedback", default=kind.feedback, what="error feedback: what is not sent is added to the next step's gradient")


def elements_of(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes)
