"""Quantities as people write them: `1Gbit/s`, `100 MB/s`, `80GiB`, `5us`, `312 TFLOP/s`. Exact, never through floats.

k M G T P are powers of 1000, Ki Mi Gi Ti Pi powers of 1024; B is a byte, bit a bit. Rates and sizes must come out as whole
bytes. `Gbps` and `GBps` are refused, because people mean different things by them.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["parse_flops", "parse_rate_Bps", "parse_size_bytes", "parse_time_s", "show_rate", "show_size", "show_time"]

_FACTOR = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_FACTOR |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_SECONDS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "µs": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
_SECONDS |= {"min": Fraction(60), "h": Fraction(3600)}
_NUMBER = re.compile(r"(\d{1,19}(?:\.\d{1,19})?(?:e[+-]?\d{1,2})?)\s*([A-Za-zµ/]*)\Z")


def _split(text: str, example: str) -> tuple[Fraction, str]:
    match = _NUMBER.match(text.strip()) if len(text) <= 64 else None
    if match is None:
        raise ValueError(f"must be a number with a unit, such as {example!r}, got {text[:64]!r}")
    return Fraction(match[1]), match[2]


def _whole(value: Fraction, unit: str) -> int:
    if value.denominator != 1:
        raise ValueError(f"is not a whole number of {unit}: {float(value):g}")
    return value.numerator


def _scaled(text: str, endings: dict[str, Fraction], example: str) -> Fraction:
    number, unit = _split(text, example)
    for ending, scale in endings.items():
        if unit.endswith(ending) and unit.removesuffix(ending) in _FACTOR:
            return number * _FACTOR[unit.removesuffix(ending)] * scale
    raise ValueError(_unit_refused(unit, example))


def _unit_refused(unit: str, example: str) -> str:
    if not unit:
        return f"has no unit; write it like {example!r}"
    if unit.casefold().endswith("bps") and example.endswith("bit/s"):
        return f"{unit!r} is read in two ways; write 1Gbit/s for bits, 1GB/s for bytes"
    return f"unknown unit {unit!r}; write it like {example!r}"


def parse_rate_Bps(text: str) -> int:
    """`"1Gbit/s"` -> 125000000. Raises ValueError."""
    return _whole(_scaled(text, {"bit/s": Fraction(1, 8), "B/s": Fraction(1)}, "1Gbit/s"), "bytes/s")


def parse_size_bytes(text: str) -> int:
    """`"80GiB"` -> 85899345920. Raises ValueError."""
    return _whole(_scaled(text, {"B": Fraction(1)}, "80GB"), "bytes")


def parse_flops(text: str) -> int:
    """`"312 TFLOP/s"` -> 312000000000000. Raises ValueError."""
    return _whole(_scaled(text, {"FLOP/s": Fraction(1), "OP/s": Fraction(1)}, "50GFLOP/s"), "operations/s")


def parse_time_s(text: str) -> float:
    """`"5us"` -> 5e-06, the nearest float. Raises ValueError."""
    number, unit = _split(text, "5us")
    if unit not in _SECONDS:
        raise ValueError(_unit_refused(unit, "5us"))
    return float(number * _SECONDS[unit])


def _short(value: float, unit: str) -> str:
    for letter in ("", "k", "M", "G", "T", "P"):
        if value < 999.95 or letter == "P":
            break
        value /= 1000
    return f"{value:.4g} {letter}{unit}"


def show_rate(rate_Bps: int) -> str:
    """For people: `12.5 GB/s`."""
    return _short(rate_Bps, "B/s")


def show_flops(flops: float) -> str:
    """Operations per second."""
    return _short(flops, "FLOP/s")


def show_size(size_bytes: int) -> str:
    """For people: `80 GB`."""
    return _short(size_bytes, "B")


def show_time(time_s: float) -> str:
    """For people: `350 ns`, `1.3 us`, `20 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time_s * scale >= 0.9995 or time_s == 0:
            return f"{time_s * scale:.4g} {unit}"
    return f"{time_s * 1e9:.4g} ns"
