"""Damage to files: by bytes, by words and numbers, by structure (JSON, XML, lines of CSV and TOML). Operators take bytes and give others."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["DAMAGE", "MAX_DAMAGED_BYTES"]

Rng = np.random.Generator
Operator = Callable[[bytes, Rng], bytes]
MAX_DAMAGED_BYTES = 1 << 20  # readers are timed and measured for files up to this
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORD = re.compile(rb"[A-Za-z_][A-Za-z_0-9-]*")
QUOTED = re.compile(rb'"[^"\\]*"')
ATTRIBUTE = re.compile(rb"\s[A-Za-z_:]+=\"[^\"]*\"")
TAG = re.compile(rb"<[A-Za-z/][^<>]*>")
NUMBERS = (
    b"0", b"-1", b"1", b"-0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809",
    b"18446744073709551616", b"2147483648", b"1e-320", b"0.5", b"1" + b"0" * 400, b"1" + b"0" * 20, b"1e18", b"4294967296", b"0x10", b"1_0", b"65536",
)  # fmt: skip
TEXTS = (
    b"", b"../../etc/passwd", b"\x00", b"\xff\xfe", b"<!DOCTYPE x>", b"&amp;", b"&x;", b"%s%n", b"a" * 70_000, b"\xe2\x80\xae", b"null", b"true",
    b"//",
)  # fmt: skip
RUNS = (b" ", b'\\"', b"[", b"(", b"a", b"1", b"a=", b",", b"-", b'{"name":"', b"\n", b"a.", b"/", b"\t", b"0-9,", b"} ", b"<a>", b"#")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, 1e308, "", "x", "0", "a" * 5000, [], {}, [[]], [None], {"": 0}, [0] * 3000,
)  # fmt: skip


def _at(rng: Rng, count: int) -> int:
    return int(rng.integers(count)) if count else 0


# ---- bytes -------------------------------------------------------------------------------------------------------------------
def _flip(data: bytes, rng: Rng) -> bytes:
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if out:
            out[_at(rng, len(out))] = int(rng.integers(256))
    return bytes(out)


def _cut(data: bytes, rng: Rng) -> bytes:
    return data[: _at(rng, len(data) + 1)]


def _piece_out(data: bytes, rng: Rng) -> bytes:
    first = _at(rng, len(data) + 1)
    return data[:first] + data[first + int(rng.geometric(0.03)) :]


def _piece_again(data: bytes, rng: Rng) -> bytes:
    first = _at(rng, len(data) + 1)
    piece = data[first : first + int(rng.geometric(0.02))]
    return data[:first] + piece * int(rng.choice([2, 3, 400])) + data[first:]


def _piece_elsewhere(data: bytes, rng: Rng) -> bytes:
    first, to = _at(rng, len(data) + 1), _at(rng, len(data) + 1)
    return data[:to] + data[first : first + int(rng.geometric(0.02))] + data[to:]


def _run(data: bytes, rng: Rng) -> bytes:
    """One token very many times: what looks again at the same text for each of them takes hours."""
    at, token = _at(rng, len(data) + 1), RUNS[_at(rng, len(RUNS))]
    return data[:at] + token * (300_000 // len(token)) + data[at:]


def _head(data: bytes, rng: Rng) -> bytes:
    return [b"\xef\xbb\xbf", b"\x00", b" " * 5000, b"\n", b"#", b"[", b"\x1f\x8b"][_at(rng, 7)] + data


def _packed(data: bytes, rng: Rng) -> bytes:
    """gzip, whole, cut short, with another end, twice, or with much behind it."""
    out = gzip.compress(data, 1)
    way = _at(rng, 5)
    if way == 1:
        return out[: _at(rng, len(out))]
    if way == 2:
        return out[:-6] + b"\x00" * 6
    return gzip.compress(out, 1) if way == 3 else out + b"more" if way == 4 else out


# ---- words and numbers -------------------------------------------------------------------------------------------------------
def _replaced(pattern: re.Pattern[bytes], choose: Callable[[bytes, list[bytes], Rng], bytes]) -> Operator:
    def change(data: bytes, rng: Rng) -> bytes:
        found = list(pattern.finditer(data))
        if not found:
            return _flip(data, rng)
        one = found[_at(rng, len(found))]
        return data[: one.start()] + choose(one.group(), [m.group() for m in found], rng) + data[one.end() :]

    return change


def _number(old: bytes, others: list[bytes], rng: Rng) -> bytes:
    if rng.random() < 0.4:
        return others[_at(rng, len(others))]
    if rng.random() < 0.3 and old.lstrip(b"-").isdigit() and len(old) < 19:
        return str(int(old) + int(rng.choice([-1, 1, 2, 1000]))).encode()
    return NUMBERS[_at(rng, len(NUMBERS))]


def _word(old: bytes, others: list[bytes], rng: Rng) -> bytes:
    return others[_at(rng, len(others))] if rng.random() < 0.7 else TEXTS[_at(rng, len(TEXTS))]


def _text(old: bytes, others: list[bytes], rng: Rng) -> bytes:
    return others[_at(rng, len(others))] if rng.random() < 0.5 else b'"' + TEXTS[_at(rng, len(TEXTS))] + b'"'


# ---- structure ---------------------------------------------------------------------------------------------------------------
def _json(data: bytes, rng: Rng) -> bytes:
    """One place of the document is dropped, doubled, replaced or nested; keys may come twice."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _replaced(NUMBER, _number)(data, rng)
    places: list[tuple[Any, Any]] = []
    open_ = [document]
    while open_ and len(places) < 20_000:
        x = open_.pop()
        rows = list(x.items()) if isinstance(x, dict) else list(enumerate(x)) if isinstance(x, list) else []
        places += [(x, k) for k, _ in rows]
        open_ += [v for _, v in rows if isinstance(v, dict | list)]
    if not places:
        return json.dumps(VALUES[_at(rng, len(VALUES))]).encode()
    # Deep places are many: half of the time one near the root.
    x, key = places[_at(rng, min(len(places), 60) if rng.random() < 0.5 else len(places))]
    way = _at(rng, 6)
    if way == 0:
        del x[key]
    elif way == 1 and isinstance(x, list):
        x.insert(key, x[key])
    elif way == 2:
        other, there = places[_at(rng, len(places))]
        if isinstance(other, list) and there >= len(other):
            return json.dumps(document).encode()
        x[key], other[there] = json.loads(json.dumps(other[there])), json.loads(json.dumps(x[key]))
    elif way == 3 and isinstance(x, dict):
        text, name = json.dumps(document), json.dumps(key)
        return text.replace(name + ":", name + ": 0, " + name + ":", 1).encode()
    elif way == 4 and isinstance(x, dict):
        x[str(rng.choice(["", "x", "schema", key + "_", "strategy"]))] = x[key]
    else:
        x[key] = VALUES[_at(rng, len(VALUES))]
    return json.dumps(document).encode()


def _nested(data: bytes, rng: Rng) -> bytes:
    way, deep = _at(rng, 3), int(rng.choice([100, 3000, 100_000]))
    at = _at(rng, len(data) + 1)
    opening, closing = ((b"[", b"]"), (b'{"a":', b"}"), (b"<a>", b"</a>"))[way]
    return data[:at] + opening * deep + (closing * deep if rng.random() < 0.5 else b"") + data[at:]


def _line(data: bytes, rng: Rng) -> bytes:
    lines = data.split(b"\n")
    at, other = _at(rng, len(lines)), _at(rng, len(lines))
    way = _at(rng, 5)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(other, lines[at])
    elif way == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif way == 3:
        lines[at] = lines[at] * 50
    else:
        cells = re.split(rb"([,\t ])", lines[at])
        cells[_at(rng, len(cells))] = NUMBERS[_at(rng, len(NUMBERS))]
        lines[at] = b"".join(cells)
    return b"\n".join(lines)


def _tag(data: bytes, rng: Rng) -> bytes:
    return _replaced(TAG, lambda old, others, rng: (b"", old + old, others[_at(rng, len(others))])[_at(rng, 3)])(data, rng)


def _attribute(data: bytes, rng: Rng) -> bytes:
    return _replaced(ATTRIBUTE, lambda old, others, rng: (b"", old + old, others[_at(rng, len(others))])[_at(rng, 3)])(data, rng)


DAMAGE: Mapping[str, Operator] = {
    "other bytes": _flip, "cut": _cut, "a piece less": _piece_out, "a piece again": _piece_again, "a piece elsewhere": _piece_elsewhere,
    "another head": _head, "packed": _packed, "another number": _replaced(NUMBER, _number), "another word": _replaced(WORD, _word),
    "another text": _replaced(QUOTED, _text), "another document": _json, "nested": _nested, "other lines": _line, "other tags": _tag,
    "other attributes": _attribute, "a long run": _run,
}  # fmt: skip
