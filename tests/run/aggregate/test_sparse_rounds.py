"""Sparse sums over real sockets: numpy's sums, the simulator's pairs, one set of bits; bad networks, small tables, two levels; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from aggregate_rig import seat, switch, together

from meshwright.errors import GroupFailed, Unsupported, UsageError
from meshwright.run.aggregate.client import Stream
from meshwright.run.aggregate.control import Hop
from meshwright.run.aggregate.injector import injector
from meshwright.run.aggregate.sparse_client import SparseStream, pairs_of
from meshwright.run.aggregate.sparse_rounds import sparse_mode


def drawn(workers, elements, density, seed=0, *, whole=True):
    rng = np.random.default_rng(seed)
    made = np.zeros((workers, elements), np.float32)
    for row in made:
        keys = np.flatnonzero(rng.random(elements) < density)
        row[keys] = rng.integers(1, 50, len(keys)) if whole else rng.standard_normal(len(keys)) * np.exp2(rng.integers(-9, 9, len(keys)))
    return made


def summed(address, arrays, *, span=256, places=None, above=None, **more):
    """Every worker's results of one call per row of `arrays` [calls, workers, elements]; `address`, `above`: one, or one per worker."""
    workers = len(arrays[0])

    def work(worker):
        at = address[worker] if isinstance(address, list) else address
        extra = above[worker] if above is not None else {"worker": worker, "children": workers}
        seated = seat(**{"mode": sparse_mode(span), "workers": workers} | extra | more)
        with SparseStream.join(at, seated) as stream:
            return [stream.all_reduce_pairs(*pairs_of(call[worker]), call.shape[1]) for call in arrays]

    results = together(workers, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert all(a.tobytes() == b.tobytes() for a, b in zip(result, results[0], strict=True))
    return results[0]


def test_the_sum_is_numpys_at_every_density_and_in_call_after_call():
    sizes = [(5000, 0.01), (700, 0.0), (1, 1.0), (3000, 0.2), (2111, 1.0), (0, 0.5), (9000, 0.6)]
    calls = [drawn(3, n, p, seed) for seed, (n, p) in enumerate(sizes)]
    with switch() as up:
        for right, ours in zip(calls, summed(up.address, calls), strict=True):
            assert (ours == right.sum(axis=0)).all()
    with switch(words=4) as up:  # one pair, or one number, to a packet
        assert (summed(up.address, calls[:2], words=4, span=64)[0] == calls[0].sum(axis=0)).all()


def two_levels(top, leaves, workers):
    half = workers // len(leaves)
    seats = [{"worker": w % half, "children": half, "above": (Hop(str(top.address), w // half, len(leaves)),)} for w in range(workers)]
    return [leaves[w // half].address for w in range(workers)], seats


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_tables_that_spill_and_a_bad_network_change_nothing(density):
    calls = [drawn(4, 4000, density, seed, whole=False) for seed in range(2)]
    bits = []
    for bad in (0.0, 0.05):
        faults = [injector(4 * 64, lost=bad, doubled=bad, kept=bad / 2, seed=s) for s in range(3)]
        with switch(faults=faults[0]) as top, switch(faults=faults[1], places=16) as left, switch(faults=faults[2], places=16) as right:
            addresses, seats = two_levels(top, (left, right), 4)
            found = summed(addresses, calls, above=seats, span=512)
            assert faults[1].state[2] > 0 or not bad
        bits.append([x.tobytes() for x in found])
        for got, call in zip(found, calls, strict=True):
            assert np.allclose(got, call.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-3)
    assert bits[0] == bits[1]


def test_what_waits_never_overflows():
    """All pairs meet in one place of the table, so all but one wait: workers are held."""
    calls = [drawn(6, 1 << 14, 0.4, seed) for seed in range(1)]
    with switch() as top, switch(places=1) as left, switch(places=1) as right:
        addresses, seats = two_levels(top, (left, right), 6)
        found = summed(addresses, calls, above=seats, span=1 << 14)
    assert (found[0] == calls[0].sum(axis=0)).all()


def test_not_a_number_and_infinity_pass():
    call = np.zeros((2, 100), np.float32)
    call[0, [3, 7, 9]], call[1, [3, 8]] = [np.inf, np.nan, 1e-45], [-np.inf, 2.0]
    with switch() as up:
        found = summed(up.address, [call])[0]
    assert np.isnan(found[[3, 7]]).all() and found[8] == 2.0 and found[9] == np.float32(1e-45)


def test_what_is_refused():
    with switch(span=512) as up:
        for mode in ("sparse:513", "sparse:0", "sparse:x", "sparse"):
            with pytest.raises(Unsupported, match=r"no mode 'sparse.*sparse:SPAN with blocks of 1 to 512"):
                SparseStream.join(up.address, seat(0, 1, mode=mode))
        with SparseStream.join(up.address, seat(0, 1, mode=sparse_mode(512))) as stream:
            one = np.ones(1, np.float32)
            for keys, values, elements in [([2, 1], [1, 1], 5), ([5], [1], 5), ([-1], [1], 5), ([1, 2], [1], 5), ([0], [1], -1)]:
                with pytest.raises(UsageError, match="keys"):
                    stream.all_reduce_pairs(np.array(keys), np.array(values, np.float32), elements)
            with pytest.raises(UsageError, match="float32"):
                stream.all_reduce_pairs(np.array([0.5]), one, 5)
            with pytest.raises(UsageError, match="a job of mode 'sparse:512' cannot"):
                stream.all_reduce(one)
            assert stream.all_reduce_pairs(np.array([1]), one, 3).tolist() == [0, 1, 0]  # it goes on
        with Stream.join(up.address, seat(0, 1, job="dense")) as dense, pytest.raises(UsageError, match="takes no pairs"):
            SparseStream.all_reduce_pairs(dense, np.array([1]), one, 3)
    with switch(words=2) as up, pytest.raises(Unsupported, match="packets of 4 words or more"):
        SparseStream.join(up.address, seat(0, 1, mode=sparse_mode(8), words=2))


def test_calls_that_differ_end_the_job_at_every_worker():
    def work(worker):
        with SparseStream.join(up.address, seat(worker, 2, mode=sparse_mode(64))) as stream:
            return stream.all_reduce_pairs(np.array([1]), np.ones(1, np.float32), 100 + worker)

    with switch() as up:
        assert all(isinstance(e, GroupFailed) and "its call differs" in e.message for e in together(2, work))
