"""The handler switch: service times in the card's limits, memory of the tree by order of arrival, staggered windows, and what is refused."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from meshwright.errors import UsageError
from meshwright.simulate.handlers import HandlerSwitch, arrivals, simulate_handlers

ADD = 1024


def closed_form(switch: HandlerSwitch, design: str, gap_cycles: Fraction) -> float:
    """Mean service of a packet where a block's packets come `gap_cycles` apart and blocks one by one; `multi`: buffers divide the cores."""
    n, cores, add = switch.children, switch.cores, switch.add_cycles
    if design == "tree":
        return add * (n - 1) / n
    buffers = 1 if design == "single" else switch.buffers
    late = max(Fraction(0), add - buffers * gap_cycles)
    waits = sum(min(add + (-(-i // buffers) - 1) * late, Fraction(cores * add, buffers)) for i in range(1, n + 1))
    return float((waits + (buffers - 1) * add) / n)


def one_block(switch: HandlerSwitch, design: str, gap: int, order: list[int] | None = None) -> tuple[float, int]:
    children = order or list(range(switch.children))
    found = simulate_handlers(switch, design, [(Fraction(gap * i), 0, child) for i, child in enumerate(children)])
    return found.service_cycles, found.held


def test_a_burst_at_one_lock_is_the_published_figure() -> None:
    """L (C + 1) / 2 for as many packets as cores."""
    switch = HandlerSwitch(children=8)
    assert switch.add_cycles == ADD
    assert one_block(switch, "single", 0)[0] == ADD * 4.5
    assert one_block(HandlerSwitch(children=64), "single", 0)[0] == 7.5625 * ADD


@pytest.mark.parametrize(("gap", "figure"), [(0, 2032), (128, 2000), (512, 1072), (4096, 1072)])
def test_several_buffers(gap: int, figure: float) -> None:
    switch = HandlerSwitch(children=64, buffers=4)
    assert closed_form(switch, "multi", Fraction(gap)) == figure
    assert one_block(switch, "multi", gap)[0] == pytest.approx(figure, rel=0.05)


@pytest.mark.parametrize("children", [3, 8, 16, 64])
@pytest.mark.parametrize("gap", [0, 100, 900, 1024, 5000])
def test_one_buffer_is_its_closed_form(children: int, gap: int) -> None:
    switch = HandlerSwitch(children=children)
    assert one_block(switch, "single", gap)[0] == pytest.approx(closed_form(switch, "single", Fraction(gap)), rel=1e-9)


@pytest.mark.parametrize("children", [1, 3, 8, 13, 64])
def test_the_tree_adds_once_less_than_there_are_children_and_never_waits(children: int) -> None:
    switch = HandlerSwitch(children=children)
    for seed in range(5):
        order = random.Random(seed).sample(range(children), children)
        for gap in (0, 300, 5000):
            assert one_block(switch, "tree", gap, order)[0] == pytest.approx(ADD * (children - 1) / children)


@pytest.mark.parametrize(("children", "ordered", "worst"), [(4, 2, 2), (8, 3, 4), (16, 4, 8)])
def test_the_trees_memory_depends_on_the_order(children: int, ordered: int, worst: int) -> None:
    """Beside the packet in hand."""
    switch = HandlerSwitch(children=children)
    even = [*range(0, children, 2), *range(1, children, 2)]
    assert one_block(switch, "tree", 10 * ADD)[1] <= ordered and one_block(switch, "tree", 10 * ADD, even)[1] == worst
    assert all(one_block(switch, "tree", 10 * ADD, random.Random(s).sample(range(children), children))[1] <= worst for s in range(50))


def test_staggered_windows_spread_a_blocks_packets() -> None:
    """Without, all children's packets of a block meet at its lock; with windows of as many blocks as children, they come a window apart."""
    switch = HandlerSwitch(children=16, clusters=8, cores=8, gap_cycles=Fraction(ADD, 32))
    together = simulate_handlers(switch, "single", arrivals(switch, 128))
    apart = simulate_handlers(switch, "single", arrivals(switch, 128, window=64))
    assert together.service_cycles > 3 * ADD and apart.service_cycles == ADD
    assert apart.open_blocks == 4 * together.open_blocks  # what it costs: memory
    tree = simulate_handlers(switch, "tree", arrivals(switch, 128))
    assert tree.service_cycles == pytest.approx(ADD * 15 / 16) and tree.total_cycles < together.total_cycles


def test_every_child_sends_every_block_once() -> None:
    switch = HandlerSwitch(children=4, gap_cycles=Fraction(3))
    for window in (0, 8):
        packets = arrivals(switch, 16, window)
        assert sorted((b, c) for _, b, c in packets) == [(b, c) for b in range(16) for c in range(4)]
        assert [t for t, _, _ in packets] == [3 * i for i in range(64)]


def test_what_is_refused() -> None:
    for wrong in ({"children": 0}, {"children": 4, "element_bytes": 3}, {"children": 4, "gap_cycles": Fraction(-1)}):
        with pytest.raises(UsageError):
            HandlerSwitch(**wrong)  # type: ignore[arg-type]
    switch = HandlerSwitch(children=4)
    for blocks, window in ((0, 0), (1 << 20, 0), (12, 8)):
        with pytest.raises(UsageError):
            arrivals(switch, blocks, window)
    with pytest.raises(UsageError, match="design"):
        simulate_handlers(switch, "double", arrivals(switch, 1))
