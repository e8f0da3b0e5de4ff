"""The way of a sparse sum: each gives it, all workers take one, the fastest by the times that were measured; hosts go on without a switch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from aggregate_rig import Switch, seat, switch, together

from meshwright.errors import LinkLost, UsageError
from meshwright.run.aggregate.fallback import GlooHosts
from meshwright.run.aggregate.sparse_reducer import TRIED, WAYS, Load, SparseReducer, Trials, link_bytes

WORKERS = 3


def gloo(workers: int) -> Any:
    """The hosts' own group over gloo, by worker."""
    import torch.distributed as dist

    store = dist.HashStore()

    def one(worker: int) -> GlooHosts:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        return GlooHosts(dist.ProcessGroupGloo(store, worker, workers, options))

    return one


def reducers(up: Switch, work: Any, **more: Any) -> list[Any]:
    hosts = gloo(WORKERS)
    return together(WORKERS, lambda w: work(SparseReducer.join(up.address, seat(w, WORKERS, **more), hosts(w), w, span=256), w))


def test_hosts_gather_as_many_words_as_each_gave() -> None:
    hosts = gloo(WORKERS)
    given = [np.arange(1, 1 + n, dtype=np.int32) for n in (0, 5, 2)]
    for found in together(WORKERS, lambda w: hosts(w).gather(given[w])):
        assert [x.tolist() for x in found] == [x.tolist() for x in given]


def part(worker: int, elements: int, density: float) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(worker)
    return np.where(rng.random(elements) < density, rng.integers(1, 9, elements), 0).astype(np.float32)


def test_every_way_gives_the_sum_and_all_take_the_fastest() -> None:
    parts = [part(w, 5000, 0.02) for w in range(WORKERS)]
    total = np.sum(parts, axis=0)

    def work(reducer: SparseReducer, worker: int) -> Any:
        assert set(reducer.pace) == set(WAYS) and all(fixed >= 0 and slope >= 0 for fixed, slope in reducer.pace.values())
        assert any(fixed or slope for fixed, slope in reducer.pace.values()), "seconds, not whole ones"
        found = [reducer.all_reduce(parts[worker].copy(), way=way) for way in (*WAYS, "auto")]
        with pytest.raises(UsageError, match="float32 array by one of auto"):
            reducer.all_reduce(parts[worker].astype(np.float64))
        with pytest.raises(UsageError, match="way 'quick'"):
            reducer.all_reduce(parts[worker].copy(), way="quick")
        square = reducer.all_reduce(parts[worker].reshape(50, 100).copy(), way="sparse")
        [tried] = reducer.trials.values()
        assert sum(map(len, tried.times_s.values())) == 1, "calls by a way that was named teach nothing"
        apart, reducer.pace = reducer.apart, dict.fromkeys(WAYS, (0.0, 1e-6))
        choices = [reducer.best(500_000, int(500_000 * p)) for p in (0.001, 0.5)]
        reducer.close()
        return [found, square, apart, choices, str(reducer.why)]

    with switch(slots=128) as up:
        results = reducers(up, work)
    for found, square, apart, choices, why in results:
        assert all(np.allclose(x, total, atol=1e-3) for x in found) and (square.reshape(-1) == total).all()
        assert apart == pytest.approx(WORKERS, rel=0.1) and choices[0] in ("hosts", "sparse") and choices[1] == "dense" and why == "None"
    assert len({str(r[3]) for r in results}) == 1


def test_close_ways_are_tried_and_the_medians_decide() -> None:
    """The lines promise `sparse`, which is 15 % slower than `hosts`; single calls differ by more than that. Ways far behind are never used."""
    promised = {"dense": 0.35, "sparse": 0.040, "hosts": 0.046, "ring": 0.6}
    true = {"sparse": 0.050, "hosts": 0.0435}
    right = 0
    for seed in range(50):
        rng, trials, taken = np.random.default_rng(seed), Trials(), []
        for _ in range(60):
            taken.append(trials.choose(promised))
            trials.times_s[taken[-1]].append(true[taken[-1]] * float(rng.lognormal(0.0, 0.12)))
        assert sorted(taken[: 2 * TRIED]) == ["hosts"] * TRIED + ["sparse"] * TRIED
        right += taken[-20:] == ["hosts"] * 20
        changes = sum(a != b for a, b in zip(taken[2 * TRIED :], taken[2 * TRIED + 1 :], strict=False))
        assert changes <= 3, "it stays with a way"
    assert right >= 45
    gone = {w: promised[w] for w in ("hosts", "ring")}
    assert trials.choose(gone) == "hosts"


def test_bytes_of_a_way_are_those_of_the_union() -> None:
    load = Load(8, 1 << 20, 10_000, 77_000)
    dense, ring, hosts = (link_bytes(way, load, words=256, span=4096) for way in ("dense", "ring", "hosts"))
    assert dense == pytest.approx((1 << 22) * (1 + 58 / 1024)) and ring == pytest.approx(1.75 * (1 << 22), rel=0.05)
    assert hosts == pytest.approx(7 * 80_000, rel=0.05)
    assert 8 * 77_000 < link_bytes("sparse", load, words=256, span=4096) < 1.3 * 8 * 77_000
    full = Load(8, 1 << 20, 1 << 19, 1 << 20)
    assert (1 << 22) < link_bytes("sparse", full, words=256, span=4096) < 1.3 * (1 << 22)


@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_the_hosts_go_on_when_the_switch_dies(way: str) -> None:
    """Worker 1's answers go nowhere from some call on, so others are a call ahead when the switch dies."""
    parts = [part(w, 3000, 0.1) for w in range(WORKERS)]
    up = Switch(slots=128, words=64)

    def work(reducer: SparseReducer, worker: int) -> Any:
        found = [reducer.all_reduce(parts[worker].copy(), way=way)]
        if worker == 1:
            stream = reducer.sparse if way == "sparse" else reducer.stream
            assert stream is not None
            stream.box.heads[:, 2] = 0
            threading.Timer(0.4, up.stop, kwargs={"silently": True}).start()
        found += [reducer.all_reduce(parts[worker] * (k + 2), way=way) for k in range(2)]
        found.append(reducer.all_reduce(parts[worker].copy()))
        reducer.close()
        return [found, reducer.why, set(reducer.pace)]

    total = np.sum(parts, axis=0)
    for found, why, ways in reducers(up, work, silence_s=2.0):
        assert all(np.allclose(x, total * k, atol=1e-2) for x, k in zip(found, (1, 2, 3, 1), strict=True))
        assert why is not None and ways == {"hosts", "ring"}


def test_a_worker_that_lost_a_call_gets_its_result_from_those_that_are_in_the_next() -> None:
    parts = [part(w, 900, 0.1) for w in range(WORKERS)]
    total = np.sum(parts, axis=0)

    def work(reducer: SparseReducer, worker: int) -> Any:
        stream = reducer.stream
        assert stream is not None
        if worker == 1:
            whole = stream.all_reduce

            def lost(array: Any, **more: Any) -> None:
                whole(array.copy(), **more)
                stream.abandon("for the test")
                raise LinkLost("no answer", where="switch")

            stream.all_reduce = lost  # type: ignore[method-assign]
        found = [reducer.all_reduce(parts[worker] * (k + 1), way=way) for k, way in enumerate(("dense", "auto", "hosts"))]
        reducer.close()
        return found, reducer.why

    with switch(slots=128) as up:
        for found, why in reducers(up, work):
            assert why is not None and all(np.allclose(x, total * k, atol=1e-2) for x, k in zip(found, (1, 2, 3), strict=True))


def test_a_switch_without_room_for_pairs_is_done_without() -> None:
    with switch(slots=8) as up:  # the dense job takes all
        for x, why in reducers(up, lambda r, w: (r.all_reduce(part(w, 900, 0.1)), r.why)):
            assert np.allclose(x, sum(part(k, 900, 0.1) for k in range(WORKERS))) and why is not None
