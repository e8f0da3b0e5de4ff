"""Sums over real sockets: exact whatever the sizes, the faults and the tree of switches; floats within their bound and to the same bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from aggregate_rig import floats, fold, numbers, reduced, seat, switch, together

from meshwright.errors import GroupFailed, NotFinite, RunError, Unsupported, UsageError
from meshwright.run.aggregate.client import Stream
from meshwright.run.aggregate.control import Hop
from meshwright.run.aggregate.injector import injector

WORDS = 64


@pytest.mark.parametrize(("workers", "elements"), [(1, 1000), (2, 0), (2, 1), (3, 63), (3, 64), (4, 65), (5, 64 * 8 + 1), (8, 5001)])
def test_whole_numbers_are_exact(workers: int, elements: int) -> None:
    parts = numbers(workers, elements)
    with switch() as up:
        results = reduced(up.address, parts, times=3)
        counters = dict(up.aggregator.status().counters)
    total = np.sum(parts, axis=0, dtype=np.int64)
    assert all((x == total).all() for result in results for x in result)
    chunks = 3 * -(-elements // WORDS)
    resent = counters["repeats"] + counters["doubles"] + counters["stale"]
    assert counters["contributions"] == workers * chunks + resent and counters["results"] == workers * chunks + counters["repeats"]


@pytest.mark.parametrize("loss", [0.01, 0.2])
def test_lost_doubled_and_late_packets_change_no_bit(loss: float) -> None:
    parts = numbers(4, 64 * 40)
    faults = injector(4 * WORDS, lost=loss, doubled=loss, kept=0.05, seed=3)
    with switch(faults=faults) as up:
        results = reduced(up.address, parts, times=3, slots=8)
        doubles = up.aggregator.status().counters["doubles"]
    total = np.sum(parts, axis=0, dtype=np.int64)
    assert all((x == total).all() for result in results for x in result)
    assert faults.state[1] > 0 and faults.state[2] > 0 and faults.state[3] > 0 and doubles > 0  # late, lost, doubled


@pytest.mark.parametrize("arithmetic", ["exact", "two-limb", "tree"])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_floats_are_within_their_bound_and_equal_everywhere(workers: int, arithmetic: str) -> None:
    parts = floats(workers, 64 * 11 + 5)
    mode = "tree" if arithmetic == "tree" else "sum"
    with switch() as up:
        results = reduced(up.address, parts, arithmetic=arithmetic, mode=mode)
    ours = results[0][0]
    assert all((result[0].view(np.int32) == ours.view(np.int32)).all() for result in results)
    if arithmetic == "tree":
        assert (ours.view(np.int32) == fold(parts).view(np.int32)).all()
        return
    true = [sum(map(Fraction, map(float, row)), Fraction(0)) for row in zip(*parts, strict=True)]
    each = WORDS // (2 if arithmetic == "two-limb" else 1)
    for i in range(0, len(ours), each):
        most = max(abs(Fraction(float(x))) for p in parts for x in p[i : i + each])
        bound = workers**2 * most / 2 ** (31 if arithmetic == "exact" else 50)
        for x, y in zip(ours[i : i + each], true[i : i + each], strict=True):
            assert abs(Fraction(float(x)) - y) <= bound * Fraction(1001, 1000) + abs(y) / 2**24


@pytest.mark.parametrize("arithmetic", ["exact", "tree"])
def test_a_tree_of_switches_sums_as_one_and_repairs_every_hop(arithmetic: str) -> None:
    parts = floats(4, 64 * 20)
    mode = "tree" if arithmetic == "tree" else "sum"
    with switch() as one:
        flat = reduced(one.address, parts, arithmetic=arithmetic, mode=mode)[0][0]
    lossy = [injector(4 * WORDS, lost=0.05, doubled=0.05, kept=0.02, seed=s) for s in range(3)]
    with switch(faults=lossy[0]) as top, switch(faults=lossy[1]) as left, switch(faults=lossy[2]) as right:

        def work(rank: int) -> np.ndarray:
            leaf = (left, right)[rank // 2]
            above = (Hop(str(top.address), rank // 2, 2),)
            with Stream.join(leaf.address, seat(rank % 2, 2, workers=4, mode=mode, above=above)) as stream:
                return stream.all_reduce(parts[rank].copy(), arithmetic=arithmetic)

        results = together(4, work)
    assert all((x.view(np.int32) == flat.view(np.int32)).all() for x in results)
    assert all(f.state[2] > 0 for f in lossy)


def test_blocks_of_zeros_and_denormals() -> None:
    tiny = np.full(64, np.float32(1e-42))
    parts = [np.concatenate([np.zeros(64, np.float32), tiny, np.ones(64, np.float32)]) for _ in range(2)]
    with switch() as up:
        found = reduced(up.address, parts, arithmetic="two-limb")[0][0]
    assert (found == 2 * parts[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_everyone_told(bad: float) -> None:
    parts = floats(3, 200)
    parts[1][77] = bad
    with switch() as up:
        results = reduced(up.address, parts)
    assert isinstance(results[1], NotFinite) and "element 77" in str(results[1])
    assert all(isinstance(results[w], GroupFailed) and results[w].data == {"code": "not-finite", "worker": 1} for w in (0, 2))


def test_what_may_leave_32_bits_is_refused_before_it_is_sent() -> None:
    parts = numbers(2, 100)
    parts[0][3] = -(2**30)
    with switch() as up:
        results = reduced(up.address, parts)
        sent = up.aggregator.status().counters
    assert isinstance(results[0], Unsupported) and isinstance(results[1], GroupFailed) and results[1].data["code"] == "overflow"
    assert sent["results"] == 0


def test_calls_that_differ_end_the_job_for_all() -> None:
    with switch() as up:
        results = reduced(up.address, [np.ones(100, np.int32), np.ones(101, np.int32)])
    assert all(isinstance(x, GroupFailed) and x.data["code"] == "mismatch" for x in results)


def test_wrong_arrays_are_refused_and_nothing_is_lost() -> None:
    with switch() as up, Stream.join(up.address, seat(0, 1)) as stream:
        for array in (np.zeros(3), np.zeros((4, 4), np.float32).T, np.zeros(8, np.int32)[::2]):
            with pytest.raises(UsageError):
                stream.all_reduce(array)
        with pytest.raises(UsageError, match="arithmetic"):
            stream.all_reduce(np.zeros(3, np.float32), arithmetic="quick")
        with pytest.raises(UsageError, match="mode"):
            stream.all_reduce(np.zeros(3, np.float32), arithmetic="tree")
        assert stream.all_reduce(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]
    with pytest.raises(RunError, match="closed"):
        stream.all_reduce(np.arange(3, dtype=np.int32))
