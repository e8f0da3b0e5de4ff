"""Hypothesis strategies for fabrics, for our own tests and for those of anyone who writes a strategy or a checker.

Needs the `test` extra; nothing else in meshwright imports this module.

    from hypothesis import given
    from meshwright.testing import fabrics

    @given(fabrics(max_devices=5))
    def test_never_beats_the_bound(fabric): ...

Shapes: trees, rings (one way or both), stars around a switch, islands of switches with a trunk, and random digraphs with
one-way and parallel links. Rates are small multiples of 1 MB/s, or integers without common factors, so that brute force
stays exact and least common multiples get large. Latencies include 0. Unless `connected=False`, every device reaches every other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ..errors import MissingExtra
from ..fabric.fabric import Device, Fabric, Link, Switch

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy
except ImportError as error:
    raise MissingExtra("hypothesis", extra="test", needed_for="meshwright.testing") from error

__all__ = ["SHAPES", "fabrics", "rates"]

SHAPES = ("tree", "ring", "star", "islands", "digraph")

_LATENCY = st.sampled_from([0.0, 1e-6, 5e-6, 1e-4])


@functools.cache
def rates() -> SearchStrategy[int]:
    """Link rates in bytes/s: mostly small multiples of 1 MB/s, sometimes integers that share no factor."""
    return st.one_of(st.integers(1, 12).map(lambda x: x * 1_000_000), st.sampled_from([999_983, 1_299_709, 15_485_863, 12_500_000, 125_000_000]))


@st.composite
def fabrics(
    draw: DrawFn,
    *,
    min_devices: int = 1,
    max_devices: int = 6,
    shapes: Sequence[str] = SHAPES,
    symmetric: bool | None = None,
    connected: bool = True,
    zero_latency: bool = False,
) -> Fabric:
    """A random fabric.

    Args:
        min_devices, max_devices: how many devices.
        shapes: which of SHAPES to draw from; `tree`, `ring` and `digraph` have no switch.
        symmetric: True = every link has a twin of equal rate the other way (so every actor sends what it can receive);
            False = rates of the two directions are drawn apart; None = either.
        connected: False adds a device (or an island) that no link reaches.
        zero_latency: all latencies 0.
    """
    n = draw(st.integers(min_devices, max_devices))
    shape = draw(st.sampled_from(list(shapes)))
    twin = draw(st.booleans()) if symmetric is None else symmetric
    islands = draw(st.integers(2, 3)) if shape == "islands" else 1 if shape == "star" else 0
    devices = [Device(name=f"d{i}", group=f"host{i % max(1, islands)}", memory_bytes=1 << 30, flops={"fp32": 10**9}) for i in range(n)]
    switches = [Switch(name=f"s{i}", group=f"host{i}") for i in range(islands)]
    links: list[Link] = []

    def one_way(src: str, dst: str, rate: int) -> None:
        latency = 0.0 if zero_latency else draw(_LATENCY)
        links.append(Link(src=src, dst=dst, rate_Bps=rate, latency_s=latency))

    def both_ways(a: str, b: str) -> None:
        rate = draw(rates())
        one_way(a, b, rate)
        one_way(b, a, rate if twin else draw(rates()))

    names = [d.name for d in devices]
    if shape == "tree":
        for i in range(1, n):
            both_ways(names[draw(st.integers(0, i - 1))], names[i])
    elif shape in ("star", "islands"):
        for i, name in enumerate(names):
            both_ways(name, f"s{i % islands}")
        for i in range(1, islands):
            both_ways(f"s{draw(st.integers(0, i - 1))}", f"s{i}")
    elif n > 1:
        _ring_and_chords(draw, names, shape, twin, one_way, both_ways)
    if not connected:
        devices.append(Device(name="alone", group="alone", memory_bytes=1 << 30))
        if draw(st.booleans()):  # it can be heard by no one but hears: a one-way cut
            one_way(names[0], "alone", draw(rates()))
    return Fabric(name=f"random-{shape}", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def _ring_and_chords(
    draw: DrawFn,
    names: list[str],
    shape: str,
    twin: bool,
    one_way: Callable[[str, str, int], None],
    both_ways: Callable[[str, str], None],
) -> None:
    """A directed ring (which connects everyone), then for `digraph` up to n further links: chords, duplicates, one-way."""
    n = len(names)
    reverse = twin or draw(st.booleans())
    for i in range(n):
        if reverse:
            both_ways(names[i], names[(i + 1) % n])
        else:
            one_way(names[i], names[(i + 1) % n], draw(rates()))
    if shape == "digraph":
        pairs = st.tuples(st.integers(0, n - 1), st.integers(1, n - 1))
        for src, step in draw(st.lists(pairs, max_size=n)):
            if twin:
                both_ways(names[src], names[(src + step) % n])
            else:
                one_way(names[src], names[(src + step) % n], draw(rates()))
