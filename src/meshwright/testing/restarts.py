"""Random restarts, for tests of which rank goes where and which byte comes from where."""

from __future__ import annotations

from hypothesis import strategies as st

from ..decide.restart import RestartProblem
from ..plan.regions import Region, TensorSpec, elements, region_along

__all__ = ["SHAPES", "TENSORS", "held", "problems"]

SHAPES = {"param:a": (6, 4), "param:b": (4,), "optimizer:a:step": (), "param:c": (2, 12)}
TENSORS = {n: TensorSpec(s, 8 if n == "param:b" else 4) for n, s in SHAPES.items()}


@st.composite
def held(draw: st.DrawFn, names: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Region]:
    """A rank's regions: of some tensors, all or two ranges of one dimension."""
    found: dict[str, Region] = {}
    for name in names:
        shape = SHAPES[name]
        if not draw(st.booleans()):
            continue
        axis = draw(st.integers(-1, len(shape) - 1))
        cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=4, max_size=4))) if axis >= 0 else []
        region = region_along(shape, axis, [(cuts[0], cuts[1]), (cuts[2], cuts[3])] if cuts else [])
        if elements(region):
            found[name] = region
    return found


@st.composite
def problems(draw: st.DrawFn) -> RestartProblem:
    """Old files on devices and on storage, and what new ranks need."""
    old, devices = draw(st.integers(1, 4)), ["d0", "d1", "d2", "d3"]
    files = {f"f{i}": draw(held()) for i in range(old)}
    homes = {f: (devices[i],) for i, f in enumerate(files) if draw(st.booleans())}
    ranks = draw(st.integers(1, 4))
    placement = tuple(draw(st.permutations(devices))[:ranks])
    stored = frozenset(f for f in files if draw(st.booleans()))
    return RestartProblem(
        tensors=TENSORS, needs=tuple(draw(held()) for _ in range(ranks)), files=files, homes=homes, placement=placement,
        servers=tuple("left" if d < "d2" else "right" for d in placement), stored=stored,
    )  # fmt: skip
