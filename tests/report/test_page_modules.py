"""The module tree of a run on the page: times counted by hand, parents hold their children, a plan's step in the words of the model."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bottleneck.breakdown import break_down
from meshwright.bottleneck.lanes import Activities, Kind, Meetings, RankView, Stage, Step
from meshwright.report.page.modules import module_times, modules_section

PATHS = ("", "encoder", "encoder.0", "encoder.0.norm", "encoder.1", "head", "<b>&.x")


def view(pieces: list[tuple[int, Kind, Stage, int]], *, steps: int = 1, rank: int = 0) -> RankView:
    """Pieces one after the other: (length in ns, kind, stage, module)."""
    length, kind, stage, module = (np.array([p[k] for p in pieces], np.int64) for k in range(4))
    end = np.cumsum(length)
    host = Activities(
        start=end - length, end=end, kind=kind.astype(np.int8), stage=stage.astype(np.int8), module=module.astype(np.int32),
        name=np.full(len(pieces), -1, np.int32), meeting=np.full(len(pieces), -1, np.int32),
    )  # fmt: skip
    edges = np.linspace(0, int(end[-1]) if len(end) else 1, steps + 1).astype(int).tolist()
    marks = [Step(number=i, start=a, end=b) for i, (a, b) in enumerate(pairwise(edges))]
    return RankView(rank=rank, source="run", steps=marks, host=host, device=None, meetings=Meetings(), modules=PATHS, names=())


PIECE = st.tuples(st.integers(1, 10**9), st.sampled_from(Kind), st.sampled_from(Stage), st.integers(0, len(PATHS) - 1))


@given(st.lists(st.lists(PIECE, min_size=1, max_size=30), min_size=1, max_size=3), st.integers(1, 4))
def test_a_module_has_its_own_time_and_that_of_those_inside(ranks: list[list[tuple[int, Kind, Stage, int]]], steps: int) -> None:
    found = {t.path: t for t in module_times([view(pieces, steps=steps, rank=r) for r, pieces in enumerate(ranks)])}
    assert next(iter(found)) == "" and found.keys() == {*PATHS, "<b>&"}  # `<b>&` is there for what is inside it
    for path, t in found.items():
        for stage in t.seconds:
            inside = [
                length for pieces in ranks for length, kind, at, module in pieces
                if kind == Kind.COMPUTE and at == stage and (not path or PATHS[module] == path or PATHS[module].startswith(path + "."))
            ]  # fmt: skip
            assert t.seconds[stage] == pytest.approx(sum(inside) / 1e9 / steps)
    order = list(found)
    assert all(order.index(p.rpartition(".")[0]) < order.index(p) for p in order if p)


def test_the_section_shows_the_tree_and_what_to_do() -> None:
    work = [(50, Kind.COMPUTE, Stage.FORWARD, 3), (900, Kind.DATA, Stage.DATA, 0), (100, Kind.COMPUTE, Stage.BACKWARD, 6)]
    html = modules_section(break_down([view([(n * 10**6, k, s, m) for n, k, s, m in work])], one_clock=True))
    assert "Bottlenecks" in html and "load" in html  # waiting for data is most of this step
    assert 'class="depth3" title="encoder.0.norm">norm<' in html and "&lt;b&gt;&amp;" in html and "<b>" not in html
    assert "50 ms" in html and "100 ms" in html and "66.7 %" in html


def test_a_run_without_modules_says_so() -> None:
    one = view([(10**6, Kind.COMPUTE, Stage.FORWARD, 0)])
    html = modules_section(break_down([msgspec.structs.replace(one, modules=("",))], one_clock=True))
    assert "recorded no modules" in html
