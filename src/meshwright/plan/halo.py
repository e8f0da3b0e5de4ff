"""What a plan of kind "halo" states: the messages of an epoch of distributed graph training, and at how many bits each row goes."""

from __future__ import annotations

import msgspec

__all__ = ["HaloGroup", "HaloJob", "HaloMessage", "HaloStep", "text_of_widths", "widths_of_text"]

LETTERS = {2: "2", 4: "4", 8: "8", 32: "f"}
_BITS = {letter: bits for bits, letter in LETTERS.items()}


class HaloGroup(msgspec.Struct, frozen=True, array_like=True):
    """Rows that share a width: how many, the sum of their weights, and the width in bits."""

    rows: int
    weight: float
    bits: int


class HaloMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`widths`: of each row in the order in which they are sent, a letter each: 2, 4, 8, or f for float32. `size_bytes`: of the message."""

    src: int
    dst: int
    widths: str
    groups: tuple[HaloGroup, ...]
    size_bytes: int


class HaloStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One exchange: `forward0`, ... `backward1`. `dim`: numbers in a row."""

    name: str
    dim: int
    messages: tuple[HaloMessage, ...]


class HaloJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`digest`: of the graph's columns and the parts, so that a run takes no other graph. `own`, `central`: nodes of each worker, and those of them
    without a neighbour elsewhere. `variance`: of all rows together."""

    graph: str
    digest: str
    nodes: int
    edges: int
    workers: int
    own: tuple[int, ...]
    central: tuple[int, ...]
    variance: float
    steps: tuple[HaloStep, ...]


def text_of_widths(bits: list[int]) -> str:
    return "".join(LETTERS[b] for b in bits)


def widths_of_text(text: str) -> list[int]:
    """Raises: KeyError for a letter that is no width."""
    return [_BITS[letter] for letter in text]
