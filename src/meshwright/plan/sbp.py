"""SBP types of a tensor on a device mesh, and the local pieces they mean.

One type per mesh axis, as text (so that plans are JSON):

- `S<d>`: split along tensor dimension d; `S<d>/<b>`: the dimension consists of b equal blocks and every device holds its share of each (packed
  q, k, v projections); pieces are those of `torch.chunk`: all of size ceil(n/p) but the last;
- `R`: broadcast, and the gradient that arrives here is complete on every device;
- `B`: broadcast, and what the devices hold of the gradient are summands of it;
- `P`: the devices' tensors add up to the tensor; `M`: their elementwise maximum is the tensor (values without a gradient only).

As values `R` and `B` are the same; they differ in the gradient rule, `GRADIENT`. Splits of one dimension on several axes nest in axis order,
axis 0 outermost, as in DTensor.
Source: Yuan et al., OneFlow (SBP), as used by AutoDDL. Deviation: the paper's rule grad(B) = P is one of two choices here, because a gradient that
every device has computed completely needs no reduction (Megatron's operators f and g).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

__all__ = [
    "State", "chunk_of", "coordinates", "gradient_of", "kind_of", "local_shape", "local_slices", "smallest_extent", "split_of",
    "valid", "value_of",
]  # fmt: skip

State = tuple[str, ...]  # one type per mesh axis


@cache
def split_of(kind: str) -> tuple[int, int] | None:
    """(dimension, blocks) of a split type, None for the others."""
    if not kind.startswith("S"):
        return None
    dim, _, blocks = kind[1:].partition("/")
    return int(dim), int(blocks or 1)


def value_of(state: State) -> State:
    """The state as a value: `R` and `B` are both broadcast."""
    return tuple("B" if k == "R" else k for k in state)


def gradient_of(state: State) -> State:
    """Where the gradient of a tensor in `state` lies, as a value."""
    return tuple(k if k[0] == "S" else "P" if k == "B" else "B" for k in state)


def kind_of(source: str, target: str) -> str:
    """The collective that takes one type to another on an axis; "local" when nothing is sent."""
    a, b = source[0], target[0]
    if a == "S":
        return {"S": "all-to-all", "B": "all-gather"}.get(b, "local")
    if a in "PM":
        return {"S": "reduce-scatter", "B": "all-reduce"}.get(b, "local")
    return "local"


def coordinates(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Mesh coordinates of ranks 0, 1, ...: the last axis runs fastest."""
    return product(*(range(p) for p in sizes))


def chunk_of(extent: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of a piece as torch.chunk cuts it; length 0 where there are fewer pieces than parts."""
    step = -(-extent // parts)
    start = min(index * step, extent)
    return start, min(step, extent - start)


def local_shape(shape: Sequence[int], state: State, sizes: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """Shape of the piece at mesh coordinates `at`; `sizes` are the mesh's."""
    found = list(shape)
    for axis, kind in enumerate(state):
        split = split_of(kind)
        if split is not None:
            dim, blocks = split
            found[dim] = blocks * chunk_of(found[dim] // blocks, sizes[axis], at[axis])[1]
    return tuple(found)


def smallest_extent(shape: Sequence[int], state: State, sizes: Sequence[int]) -> int:
    """The least extent of a split dimension over all devices (0 if some device would hold nothing)."""
    least = 1
    extents: dict[int, set[int]] = {}
    for axis, kind in enumerate(state):
        split = split_of(kind)
        if split is None:
            continue
        dim, blocks = split
        before = extents.get(dim, {shape[dim]})
        extents[dim] = {blocks * chunk_of(e // blocks, sizes[axis], i)[1] for e in before for i in range(sizes[axis])}
        least = min(extents[dim]) if min(extents[dim]) < least else least
    return least


def valid(shape: Sequence[int], state: State, sizes: Sequence[int]) -> bool:
    """Whether every device holds something, blocks divide evenly, and a dimension in blocks is split on one axis only."""
    seen: dict[int, int] = {}
    for axis, kind in enumerate(state):
        split = split_of(kind)
        if split is None:
            continue
        dim, blocks = split
        if dim >= len(shape) or (seen.get(dim, 1) > 1) or (dim in seen and blocks > 1):
            return False
        if blocks > 1 and shape[dim] % (blocks * sizes[axis]):
            return False
        seen[dim] = blocks
    return smallest_extent(shape, state, sizes) > 0


def local_slices(shape: Sequence[int], state: State, sizes: Sequence[int], at: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Per dimension the runs (start, stop) of the whole tensor that the device at `at` holds, in order."""
    runs: list[tuple[tuple[int, int], ...]] = [((0, n),) for n in shape]
    for axis, kind in enumerate(state):
        split = split_of(kind)
        if split is None:
            continue
        dim, blocks = split
        if blocks > 1:
            width = shape[dim] // blocks
            start, length = chunk_of(width, sizes[axis], at[axis])
            runs[dim] = tuple((b * width + start, b * width + start + length) for b in range(blocks))
        else:
            (low, high) = runs[dim][0]
            start, length = chunk_of(high - low, sizes[axis], at[axis])
            runs[dim] = ((low + start, low + start + length),)
    return runs
