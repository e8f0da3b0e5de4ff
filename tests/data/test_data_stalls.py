"""What a loop waits for: the model against simulated caches and pipelines, the measurement on a loader."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import pytest

from effort import few
from meshwright.data.stalls import measure_stalls
from meshwright.decide.data import least_item_s, ways
from meshwright.errors import UsageError
from meshwright.profile.input_plan import Place
from meshwright.profile.input_rates import InputRates, cache_for_no_fetch_stall, lru_hits, speed_at

BASE = InputRates(
    items=1000, total_bytes=1_000_000_000, workers=4, cores=4, device_s=0.001, prepare_s=0.002, cpu_s=0.008, miss_s=0.02, hit_s=0.0005,
    storage_Bps=1e8, sampled=100, rounds=3,
)  # fmt: skip


@pytest.mark.parametrize(("share", "published"), [(0.25, 0.0340), (0.4, 0.0936), (0.6, 0.2329), (0.9, 0.6717)])
def test_what_a_cache_that_exchanges_finds(share, published):
    """A simulated LRU cache under independent permutations; the card's figures."""
    assert lru_hits(share) == pytest.approx(published, abs=6e-3)
    rng, n, hits = random.Random(1), 2000, 0
    cache: OrderedDict[int, None] = OrderedDict()
    for epoch in range(6):
        for item in rng.sample(range(n), n):
            hits += item in cache and epoch > 0
            cache[item] = None
            cache.move_to_end(item)
            if len(cache) > share * n:
                cache.popitem(last=False)
    assert hits / (5 * n) == pytest.approx(lru_hits(share), abs=0.02)
    assert lru_hits(0) == 0 and lru_hits(1) == 1


@pytest.mark.parametrize("seed", range(few(50)))
def test_more_of_anything_is_never_slower(seed):
    rng = random.Random(seed)
    m = InputRates(
        items=100, total_bytes=rng.randrange(10**5, 10**9), workers=rng.randrange(5), cores=2, device_s=rng.choice([0, rng.uniform(0, 0.01)]),
        prepare_s=rng.uniform(1e-4, 0.01), cpu_s=rng.uniform(1e-4, 0.01), miss_s=rng.uniform(1e-3, 0.1), hit_s=rng.uniform(1e-6, 1e-3),
        storage_Bps=rng.uniform(1e6, 1e9), sampled=10, rounds=1,
    )  # fmt: skip
    shares = sorted(rng.random() for _ in range(5))
    speeds = [speed_at(m, x).items_per_s for x in shares]
    assert speeds == sorted(speeds)
    for change in ({"device": 2}, {"cores": 2}, {"disk": 2}):
        assert speed_at(m, shares[2], **change).items_per_s >= speeds[2]
    assert speed_at(m, shares[2], jobs=2).items_per_s <= speeds[2]
    needed = cache_for_no_fetch_stall(m)
    assert speed_at(m, needed).items_per_s == pytest.approx(speed_at(m, 1).items_per_s, rel=1e-6)
    assert needed == 0 or speed_at(m, needed * 0.99).items_per_s < speed_at(m, 1).items_per_s


def test_each_limit_is_named():
    assert speed_at(BASE, 0).limit == "storage" and speed_at(BASE, 0).items_per_s == pytest.approx(100)
    assert speed_at(BASE, 0, disk=100).limit == "waiting" or speed_at(BASE, 0, disk=100).limit == "preparation"
    assert speed_at(BASE, 1).limit == "waiting" and speed_at(BASE, 1).items_per_s == pytest.approx(4 / 0.0085)
    slow = InputRates(**{**BASE.__dict__, "prepare_s": 0.004})
    assert speed_at(slow, 1).limit == "preparation" and speed_at(slow, 1, cores=2).limit == "waiting"
    device = InputRates(**{**BASE.__dict__, "device_s": 0.05})
    assert speed_at(device, 0.5).limit == "device" and cache_for_no_fetch_stall(device) == 0
    alone = InputRates(**{**BASE.__dict__, "workers": 0})
    assert speed_at(alone, 1).limit == "in turn" and speed_at(alone, 1).items_per_s == pytest.approx(1 / 0.003)
    assert speed_at(alone, 0).items_per_s == pytest.approx(1 / (0.001 + 0.002 + 0.0195))


@pytest.mark.parametrize("seed", range(few(60)))
def test_no_way_beats_the_bound_and_the_best_is_the_best(seed):
    rng = random.Random(seed)
    m = InputRates(
        items=100, total_bytes=rng.randrange(10**5, 10**9), workers=rng.randrange(5), cores=rng.choice([0.5, 2, 16]), device_s=rng.choice([0, 0.003]),
        prepare_s=rng.uniform(1e-3, 0.02), cpu_s=rng.uniform(1e-4, 1e-3), miss_s=rng.uniform(1e-3, 0.1), hit_s=rng.uniform(1e-6, 1e-3),
        storage_Bps=rng.uniform(1e6, 1e9), sampled=10, rounds=1,
    )  # fmt: skip
    memory, jobs, nodes = rng.randrange(1, 2 * m.total_bytes), rng.randint(1, 4), rng.randint(1, 3)
    place = Place(memory_bytes=memory, jobs=jobs, nodes=nodes, network_Bps=rng.choice([1e6, 1e9]))
    found = ways(m, place)
    least_s, _ = least_item_s(m, place)
    assert all(w.speed.items_per_s * least_s <= 1 + 1e-9 for w in found)
    assert [w.speed.items_per_s for w in found] == sorted((w.speed.items_per_s for w in found), reverse=True)
    assert len(found) == len({(w.kept, w.shared, w.workers) for w in found})
    same = next(w for w in found if (w.kept, w.shared, w.workers) == ("", False, m.workers))
    share = min(place.memory_bytes / m.total_bytes, 1)
    assert same.speed.items_per_s == pytest.approx(speed_at(m, lru_hits(share), jobs=place.jobs).items_per_s, rel=1e-6)
    kept = next(w for w in found if (w.kept, w.shared, w.workers) == ("here", False, m.workers))
    assert kept.speed.items_per_s >= same.speed.items_per_s


def test_which_way_is_chosen():
    fast = InputRates(**{**BASE.__dict__, "storage_Bps": 1e12, "miss_s": 0.0005})
    assert ways(fast, Place(memory_bytes=0))[0].words == "files as they are, 4 workers"  # nothing else is faster
    best = ways(BASE, Place(memory_bytes=400_000_000, jobs=4, nodes=3))[0]
    assert (best.kept, best.shared) == ("nodes", True) and "files kept by all nodes, batches shared" in best.words
    slow = ways(BASE, Place(memory_bytes=400_000_000, nodes=3, network_Bps=1e6))
    assert slow[0].kept == "here" and {w.speed.limit for w in slow if w.kept == "nodes"} == {"network"}
    alone = InputRates(**{**BASE.__dict__, "workers": 0, "cores": 2})
    assert ways(alone, Place(memory_bytes=0))[0].workers == 2


def test_what_cannot_be_measured(tmp_path):
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed")

    class Stream(data.IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(UsageError, match="not a DataLoader over a map-style dataset"):
        measure_stalls(data.DataLoader(Stream(), batch_size=None))
    (tmp_path / "a").write_bytes(b"1")

    class One:
        paths = [str(tmp_path / "a")]

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return Path(self.paths[index]).read_bytes()

    with pytest.raises(UsageError, match="1 items are too few"):
        measure_stalls(data.DataLoader(One(), batch_size=1))
