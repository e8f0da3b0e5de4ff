"""Scaling of hand-made graphs: exact where sizes are affine, refused where they are not. Real captures: tests/capture."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import Unsupported, UsageError
from meshwright.graph.graph import GraphValue, OpGraph, OpNode, Parameter, Scaling, Storage, Work
from meshwright.graph.scale import at_batch, scaling_between


def graph(batch: int, *, width: int = 3, extra: int = 0, rows: int | None = None, name: str = "linear", exponent: int = 1) -> OpGraph:
    """One linear call whose sizes follow the batch: `rows` rows per sample, `extra` rows that do not depend on it."""
    count = batch**exponent * (rows or 1) + extra
    value = GraphValue(shape=(count, width), dtype="float32", storage=1)
    node = OpNode(
        name=name, target="aten.linear.default", module="", inputs=("input:0", "param:w"), args=[{"value": "input:0"}, [count, True, 0.5]],
        outputs=(value,), forward=Work(flops=2 * count * width * width, bytes_read=4 * width * (count + width), bytes_written=4 * count * width),
        saved=(0,),
    )  # fmt: skip
    return OpGraph(
        model="m:f", method="export", batch_size=batch, loss="output", inputs=(GraphValue(shape=(batch, width), dtype="float32", storage=0),),
        parameters=(Parameter(name="w", shape=(width, width), dtype="float32", size_bytes=4 * width * width),), nodes=(node,),
        storages=(Storage(size_bytes=4 * batch * width, owner="input:0"), Storage(size_bytes=4 * count * width, owner=name)), outputs=(name,),
    )  # fmt: skip


def scalable(batch: int, other: int, **options: int) -> OpGraph:
    scaling = scaling_between(graph(batch, **options), graph(other, **options))
    assert isinstance(scaling, Scaling)
    return msgspec.structs.replace(graph(batch, **options), scaling=scaling)


SMALL = st.integers(1, 9)


@given(batch=SMALL, step=SMALL, wanted=st.integers(1, 40), width=st.integers(1, 4), rows=st.integers(1, 5), extra=st.integers(0, 3))
def test_affine_sizes_are_exact_at_every_batch(batch: int, step: int, wanted: int, width: int, rows: int, extra: int) -> None:
    base = scalable(batch, batch + step, width=width, rows=rows, extra=extra)
    got = at_batch(base, wanted)
    assert msgspec.structs.replace(got, scaling=None) == graph(wanted, width=width, rows=rows, extra=extra)
    assert got.scaling == base.scaling and at_batch(got, batch) == base
    assert got.parameters == base.parameters and got.fingerprint() == base.fingerprint()


def test_notes_and_booleans_stay() -> None:
    base = msgspec.structs.replace(scalable(2, 4), notes=("built at batch 2",))
    got = at_batch(base, 6)
    assert got.notes == base.notes and got.nodes[0].args[1] == [6, True, 0.5] and at_batch(base, 2) is base


def test_reasons_why_two_captures_give_no_scaling() -> None:
    assert "same batch size" in scaling_between(graph(2), graph(2))
    assert "differ in 'linear' and 'addmm'" in scaling_between(graph(2), graph(4, name="addmm"))
    longer = msgspec.structs.replace(graph(4), outputs=("linear", "linear"))
    assert "calls differ" in scaling_between(graph(2), longer)
    assert "not affine" in scaling_between(graph(2, extra=1), graph(5))
    squared = [msgspec.structs.replace(graph(b), nodes=(_square(graph(b).nodes[0], b),)) for b in (2, 4)]
    assert "[2, 2] at batch 2 has [4, 4] at 4" in scaling_between(*squared)


@given(batch=SMALL, wanted=st.integers(1, 40), constant=st.integers(0, 5), each=st.integers(0, 5), pairs=st.integers(1, 5))
def test_sizes_of_rows_by_rows_are_exact_at_every_batch(batch: int, wanted: int, constant: int, each: int, pairs: int) -> None:
    def compared(b: int) -> OpGraph:
        found = graph(b)
        storages = (found.storages[0], Storage(size_bytes=constant + each * b + pairs * b * b, owner="linear"))
        return msgspec.structs.replace(found, nodes=(_square(found.nodes[0], b),), storages=storages)

    assert "not affine" in scaling_between(compared(batch), compared(2 * batch))
    scaling = scaling_between(compared(batch), compared(2 * batch), compared(3 * batch))
    assert isinstance(scaling, Scaling) and pairs in (scaling.square or ())
    base = msgspec.structs.replace(compared(batch), scaling=scaling)
    got = at_batch(base, wanted)
    assert msgspec.structs.replace(got, scaling=None) == compared(wanted) and at_batch(got, batch) == base


def _square(node: OpNode, batch: int) -> OpNode:
    return msgspec.structs.replace(node, outputs=(GraphValue(shape=(batch, batch), dtype="float32", storage=1),))


def test_refusals() -> None:
    with pytest.raises(UsageError, match="must be >= 1"):
        at_batch(scalable(2, 4), 0)
    with pytest.raises(Unsupported, match="captured at batch 2 only") as caught:
        at_batch(graph(2), 3)
    assert "train capture --model m:f --batch 3" in caught.value.hint
    changed = msgspec.structs.replace(scalable(2, 4), inputs=())
    with pytest.raises(Unsupported, match="it was changed"):
        at_batch(changed, 3)
    shrinking = msgspec.structs.replace(graph(4), scaling=Scaling(integers=scalable(4, 8).scaling.integers, index=(1,), slope=(9,)))
    with pytest.raises(Unsupported, match="would be -"):
        at_batch(shrinking, 1)
