"""A switch's operators over real sockets against numpy and torch; claims of an owner's operator are tried before they are believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aggregate_rig import seat, switch, together

from meshwright.errors import GroupFailed, NotFinite, Unsupported, UsageError
from meshwright.run.aggregate.client import Stream
from meshwright.run.aggregate.control import Hop
from meshwright.run.aggregate.injector import injector
from meshwright.run.aggregate.operators import ARGMAX_PAIR, own_operator


def combined(address, parts, mode, **more):
    def work(worker):
        with Stream.join(address, seat(worker, len(parts), mode=mode, **more)) as stream:
            return [stream.combine(parts[worker].copy()) for _ in range(2)]

    results = together(len(parts), work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert all(x.tobytes() == results[0][0].tobytes() for x in result)
    return results[0][0]


def folded(parts, add):
    while len(parts) > 1:
        parts = [add(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def parts_of(mode, workers, elements, seed=0):
    rng = np.random.default_rng(seed)
    if mode == "int8":
        return [rng.integers(-128, 128, elements, dtype=np.int8) for _ in range(workers)]
    if mode == "bf16":
        made = torch.from_numpy(rng.standard_normal((workers, elements)) * np.exp2(rng.integers(-9, 9, (workers, elements)))).to(torch.bfloat16)
        made[:, ::17] = float("inf")
        made[0, ::34] = float("-inf")  # beside infinity: not a number
        return [x.view(torch.uint16).numpy().copy() for x in made]
    made = np.zeros((workers, elements), ARGMAX_PAIR)
    made["value"], made["payload"] = rng.integers(-3, 4, (workers, elements)) / 2, rng.integers(0, 1 << 30, (workers, elements))
    made["value"][made["value"] == 0] *= rng.choice([-1.0, 1.0])
    return list(made)


def expected(mode, parts):
    if mode == "int8":
        return folded(parts, lambda a, b: np.clip(a.astype(np.int32) + b, -128, 127).astype(np.int8))
    if mode == "bf16":
        return folded([torch.from_numpy(x).view(torch.bfloat16) for x in parts], torch.add).view(torch.uint16).numpy()
    rows = np.stack(parts)
    best = [min(range(len(rows)), key=lambda w: (-rows["value"][w, i], rows["payload"][w, i])) for i in range(rows.shape[1])]
    return np.array([rows[w, i] for i, w in enumerate(best)], ARGMAX_PAIR)


def same(mode, ours, right):
    if mode != "bf16":
        return ours.tobytes() == right.tobytes()
    a, b = (torch.from_numpy(x.copy()).view(torch.bfloat16) for x in (ours, right))
    return bool((a.isnan() == b.isnan()).all()) and bool(torch.equal(a[~a.isnan()], b[~b.isnan()]))


@pytest.mark.parametrize("mode", ["int8", "bf16", "argmax"])
@pytest.mark.parametrize(("workers", "elements"), [(1, 5), (3, 63), (5, 64 * 9 + 3)])
def test_operators_are_those_of_numpy_and_torch(mode: str, workers: int, elements: int) -> None:
    parts = parts_of(mode, workers, elements)
    with switch() as up:
        assert same(mode, combined(up.address, parts, mode), expected(mode, parts))


@pytest.mark.parametrize("mode", ["int8", "argmax"])
def test_a_bad_network_and_two_levels_change_no_bit(mode: str) -> None:
    parts = parts_of(mode, 4, 64 * 12, seed=3)
    faults = [injector(4 * 64, lost=0.05, doubled=0.05, kept=0.02, seed=s) for s in range(3)]
    with switch(faults=faults[0]) as top, switch(faults=faults[1]) as left, switch(faults=faults[2]) as right:

        def work(rank):
            above = (Hop(str(top.address), rank // 2, 2),)
            place = seat(rank % 2, 2, workers=4, mode=mode, above=above)
            with Stream.join((left, right)[rank // 2].address, place) as stream:
                return stream.combine(parts[rank].copy())

        assert all(same(mode, result, expected(mode, parts)) for result in together(4, work))


def far(a, b):
    return a if abs(a) > abs(b) or (abs(a) == abs(b) and a > b) else b


def mean(a, b):
    return (a + b) / np.float32(2)


@pytest.mark.parametrize("free", [True, False])
def test_an_operator_of_ones_own(free: bool) -> None:
    own = own_operator(far, name="far", dtype="int32", commutative=free, associative=free)
    assert own.order_free is free and own.mode == "own:far:int32"
    rng = np.random.default_rng(1)
    parts = [rng.integers(-1000, 1000, 500, dtype=np.int32) for _ in range(3)]
    with switch(own=own) as up:
        ours = combined(up.address, parts, own.mode)
    assert (ours == folded(parts, np.vectorize(far, otypes=[np.int32]))).all()


def test_an_operator_that_is_not_associative_folds() -> None:
    own = own_operator(mean, commutative=True)
    parts = [x.astype(np.float32) for x in np.random.default_rng(2).standard_normal((5, 200))]
    with switch(own=own) as up:
        ours = combined(up.address, parts, own.mode)
    assert (ours == folded(parts, mean)).all()


@pytest.mark.parametrize(
    ("function", "claim", "options"),
    [
        (mean, "to be associative", {"commutative": True, "associative": True}),
        (lambda a, b: a + b, "to be associative", {"commutative": True, "associative": True}),
        (lambda a, b: a - b, "to be commutative", {"commutative": True}),
        (lambda a, b: max(abs(a), abs(b)), "to be commutative", {"commutative": True}),  # unless one of them is no number
    ],
)  # fmt: skip
def test_a_claim_that_does_not_hold_is_refused_with_its_numbers(function, claim: str, options: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match=f"claims {claim}") as refusal:
        own_operator(function, name="mine", **options)
    assert refusal.value.data["claim"] == claim
    numbers = refusal.value.data["numbers"]
    assert len(numbers) == (2 if claim == "to be commutative" else 3)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(UsageError, match="does not compile"):
        own_operator(lambda a, b: a.missing, name="bad")
    with pytest.raises(UsageError, match="operator 'a-b'"):
        own_operator(far, name="a-b")
    with pytest.raises(UsageError, match="on 'int16'"):
        own_operator(far, dtype="int16")


def test_jobs_and_arrays_that_do_not_fit_their_operator() -> None:
    with switch() as up:
        with pytest.raises(Unsupported, match=r"no mode 'own:far:int32'.*argmax"):
            Stream.join(up.address, seat(0, 1, mode="own:far:int32"))
        with Stream.join(up.address, seat(0, 1, mode="int8")) as stream:
            with pytest.raises(UsageError, match="an array of float32 where int8"):
                stream.combine(np.zeros(4, np.float32))
            with pytest.raises(UsageError, match="a job of mode 'int8' cannot"):
                stream.all_reduce(np.zeros(4, np.int32))
            assert stream.combine(np.array([], np.int8)).size == 0
        with Stream.join(up.address, seat(0, 1, job="sums")) as stream, pytest.raises(UsageError, match="sums"):
            stream.combine(np.zeros(4, np.int32))
        stream = Stream.join(up.address, seat(0, 1, job="largest", mode="argmax"))
        pairs = np.zeros(3, ARGMAX_PAIR)
        pairs["value"][1] = np.nan
        with pytest.raises(NotFinite, match="element 1"):
            stream.combine(pairs)
        with pytest.raises(GroupFailed, match="closed"):
            stream.combine(pairs)
