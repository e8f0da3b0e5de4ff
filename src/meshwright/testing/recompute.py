"""Random layers, for tests of what is computed again in the layers of pipeline stages."""

from __future__ import annotations

from hypothesis import strategies as st

from ..decide.memory.problem import Layer, Operator

__all__ = ["layers"]


@st.composite
def layers(draw: st.DrawFn, most: int = 9) -> Layer:
    """Random graphs of operators: chains, joins, several results, in-place writes, needed and unneeded results."""
    count = draw(st.integers(1, most))
    sizes = [draw(st.integers(0, 50))]
    operators: list[Operator] = []
    for i in range(count):
        reads = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True))
        makes = list(range(len(sizes), len(sizes) + draw(st.integers(1, 2))))
        sizes += [draw(st.integers(1, 50)) for _ in makes]
        if i and draw(st.integers(0, 5)) == 0:  # writes in place what an earlier operator made
            makes.append(draw(st.sampled_from(operators[draw(st.integers(0, i - 1))].makes)))
        time_s = draw(st.integers(0, 20)) / 8
        operators.append(Operator(name=f"op{i}", time_s=time_s, reads=tuple(s for s in reads if s not in makes), makes=tuple(makes)))
    needed = draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    return Layer(operators=tuple(operators), sizes=tuple(sizes), needed=tuple(needed))
