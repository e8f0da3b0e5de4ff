"""Plans of input pipelines: the planner's are right and the least of a sweep; every edit that makes one wrong is named; files come back whole."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from effort import few
from meshwright.bound import Bound, Certificate
from meshwright.check.input_plan import check_input_plan
from meshwright.decide.data import FeedProblem, strategy, ways
from meshwright.decide.data.coordl import Coordl
from meshwright.decide.data.ways import cached_share, speed_of
from meshwright.errors import FormatError, UnknownName, UsageError
from meshwright.io.data.input_plan import read_input_plan, read_input_rates, write_input_plan
from meshwright.profile.input_plan import Place
from meshwright.profile.input_rates import InputRates

BASE = InputRates(
    items=1000, total_bytes=1_000_000_000, workers=4, cores=4, device_s=0.004, prepare_s=0.002, cpu_s=0.008, miss_s=0.01, hit_s=0.0005,
    storage_Bps=1e8, sampled=100, rounds=3, batch_bytes=1_000_000,
)  # fmt: skip
RNG = np.random.default_rng(0)


def made(m: InputRates = BASE, margin: float = 0.0, **where):
    return Coordl(margin=margin).plan(FeedProblem(rates=m, place=Place(**{"memory_bytes": 800_000_000, **where})), rng=RNG)


def test_the_cache_is_the_smallest_that_is_as_fast():
    """10 ms of storage for each item that misses beside a device of 4 ms: 60 % must be kept, and nothing more gains."""
    plan = made()
    assert (plan.kept, plan.medium, plan.limit) == ("here", "page-cache", "device") and plan.epoch_s == pytest.approx(4.0)
    assert plan.kept_bytes == pytest.approx(600_000_000, rel=1e-6) and plan.storage_bytes == pytest.approx(400_000_000, rel=1e-6)
    assert float(plan.bound) == pytest.approx(4.0) and check_input_plan(plan).facts["ratio"] == pytest.approx(1)
    assert made(margin=0.1).kept_bytes == pytest.approx(640_000_000, rel=1e-6)  # a device of 3.6 ms
    short = made(memory_bytes=300_000_000)
    assert (short.kept_bytes, short.limit) == (300_000_000, "storage") and short.epoch_s == pytest.approx(7.0)
    idle = made(replace(BASE, storage_Bps=1e12, miss_s=0.0005))
    assert (idle.kept, idle.kept_bytes, idle.words) == ("", 0, "files as they are, 4 workers")


def test_nodes_jobs_and_shared_memory():
    """Two nodes keep half of what one would; four jobs share; where a page cache holds nothing, shared memory does, as far as it is free."""
    both = made(memory_bytes=350_000_000, nodes=2)
    assert both.kept == "nodes" and both.kept_bytes == pytest.approx(300_000_000, rel=1e-6)
    assert both.network_bytes == pytest.approx(300_000_000, rel=1e-6)
    four = made(jobs=4)
    assert four.shared and four.staged == 16 and four.kept_bytes + 16 * 1_000_000 <= 800_000_000
    assert not made(jobs=4, shared_bytes=0).shared  # no batch fits
    lost = made(replace(BASE, held=0.1), shared_bytes=200_000_000)
    assert (lost.medium, lost.kept_bytes) == ("shared-memory", 200_000_000)
    for plan in (both, four, lost):
        assert check_input_plan(plan).ok


@pytest.mark.parametrize("seed", range(few(40)))
def test_no_smaller_cache_of_a_sweep_is_as_fast(seed):
    r = random.Random(seed)
    m = replace(BASE, device_s=r.choice([0, 0.004]), prepare_s=r.uniform(1e-3, 0.01), miss_s=r.uniform(1e-3, 0.1), storage_Bps=r.uniform(1e7, 1e9),
                workers=r.randrange(1, 5), held=r.choice([1, 0.1]))  # fmt: skip
    place = Place(memory_bytes=r.randrange(10**8, 2 * 10**9), jobs=r.randint(1, 3), nodes=r.randint(1, 3), shared_bytes=r.choice([10**8, 10**10]))
    plan = Coordl(margin=0).plan(FeedProblem(rates=m, place=place), rng=RNG)
    assert check_input_plan(plan).ok
    best = ways(m, place)[0]
    assert plan.epoch_s == pytest.approx(m.items / best.speed.items_per_s)
    if plan.kept_bytes > 1000:
        for share in (0.25, 0.9, 0.999):
            cached = cached_share(m, place, plan.kept, int(plan.kept_bytes * share))
            slower = m.items / speed_of(m, place, plan.kept, cached, plan.shared, plan.workers).items_per_s
            assert slower > plan.epoch_s * (1 + 1e-12)


def bound(value: str, limit: str) -> Bound:
    return Bound(quantity="epoch time", value=value, unit="s", certificate=Certificate(kind="feeding", data={"limit": limit}))


EDITS = [
    ({"epoch_s": 3.9}, "by the rates"), ({"limit": "preparation"}, "does not limit"), ({"storage_bytes": 1}, "storage_bytes"),
    ({"network_bytes": 7}, "network_bytes"), ({"kept_bytes": 900_000_000}, "are planned, there are"), ({"medium": ""}, "are kept here, in nothing"),
    ({"kept": "nodes"}, "no others"), ({"staged": 3}, "wait for nobody"), ({"shared": True}, "shared by 1 jobs"), ({"workers": -1}, "below 0"),
    ({"rates": replace(BASE, held=0.5)}, "nothing can be kept there"), ({"kept_bytes": 500_000_000}, "by the rates"),
    ({"bound": bound("5", "device")}, "proves 4 s"), ({"bound": bound("1", "luck")}, "not one of an epoch"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), EDITS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_wrong_is_named(edit, message):
    verdict = check_input_plan(msgspec.structs.replace(made(), **edit))
    assert verdict.status == "wrong" and any(message in f.message for f in verdict.findings), verdict.findings


def test_files(tmp_path):
    plan, path = made(jobs=2), tmp_path / "feed.json"
    write_input_plan(path, plan)
    assert read_input_plan(path) == plan
    assert check_input_plan(msgspec.structs.replace(plan, bound=None)).notes == ("the plan states no bound",)
    for before, after, message in (('"value":"', '"value":"x', "not an exact rational"), ('"jobs":2', '"jobs":0', "at least 1"),
                                   ('"items":1000', '"items":0', "at least 1"), ('"kept":"here"', '"kept":"there"', "Invalid enum")):  # fmt: skip
        text = path.read_text()
        assert before in text
        (tmp_path / "bad.json").write_text(text.replace(before, after))
        with pytest.raises(FormatError) as refused:
            read_input_plan(tmp_path / "bad.json")
        assert message in str(refused.value) + refused.value.hint
    with pytest.raises(FormatError, match=r"is a 'meshwright\.input-plan' document"):
        read_input_rates(path)
    with pytest.raises(UsageError, match="network_Bps"):
        Place(memory_bytes=1, network_Bps=float("nan"))
    with pytest.raises(UsageError, match="margin"):
        Coordl(margin=1.0)
    assert strategy("coordl") is Coordl
    with pytest.raises(UnknownName):
        strategy("nothing")
