"""Bits of messages: brute force and HiGHS are the oracles of the exact assignment; bounds; partitions."""

from __future__ import annotations

import itertools

import highspy
import numpy as np
import pytest

from effort import few
from meshwright.decide.traffic.adaqp import Channel, Exchange, HaloProblem, epoch_bound, partition, strategy
from meshwright.decide.traffic.adaqp import choose as choosing
from meshwright.decide.traffic.adaqp.lower import stated_steps
from meshwright.decide.traffic.adaqp.strategy import AdaQP, Uniform, trade_prices
from meshwright.errors import Infeasible, MissingExtra, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.generate import nearest_neighbours, rmat

RNG = np.random.default_rng(0)


def problem(workers: int, rows: tuple[int, int], seed: int, *, layers: int = 1, dim: int = 16) -> HaloProblem:
    rng = np.random.default_rng(seed)
    devices = tuple(Device(name=f"w{i}", kind="cpu") for i in range(workers))
    links = tuple(
        Link(src=a.name, dst=b.name, rate_Bps=int(rng.integers(5, 20)) * 10**6, latency_s=1e-4) for a in devices for b in devices if a is not b
    )
    pairs = [(i, j) for i in range(workers) for j in range(workers) if i != j]
    exchanges = tuple(
        Exchange(f"forward{k}", dim, tuple(Channel(i, j, rng.pareto(1.5, int(rng.integers(*rows)))) for i, j in pairs)) for k in range(layers)
    )
    return HaloProblem(fabric=Fabric(name="full", devices=devices, links=links), ranks=tuple(d.name for d in devices), exchanges=exchanges)


def all_assignments(p: HaloProblem) -> np.ndarray:
    """[3^rows, 2]: seconds and variance of every one."""
    keys = [(x.name, c.src, c.dst, len(c.weight)) for x in p.exchanges for c in x.channels]
    found = []
    for bits in itertools.product((2, 4, 8), repeat=sum(k[3] for k in keys)):
        left, widths = list(bits), {}
        for name, src, dst, n in keys:
            widths[name, src, dst], left = np.array(left[:n]), left[n:]
        found.append((p.rounds_s(widths), p.variance(widths)))
    return np.array(found)


@pytest.mark.parametrize("seed", range(few(7)))
def test_no_assignment_is_better_than_the_chosen_one(seed):
    p = problem(2, (1, 3), seed, layers=1 + seed % 2) if seed % 3 else problem(3, (1, 2), seed)
    every = all_assignments(p)
    if len(p.exchanges) == 1:
        for trade in (0.0, 0.3, 0.5, 0.8, 1.0):
            prices = np.array(trade_prices(p, p.exchanges[0], trade))
            made = AdaQP(group=1, trade=trade).plan(p, rng=RNG)
            assert prices @ (made.rounds_s, made.variance) == pytest.approx((every @ prices).min(), rel=1e-9)
    for share in (0.05, 0.5, 0.95):
        limit = np.quantile(every[:, 1], share)
        made = AdaQP(group=1, max_variance=float(limit)).plan(p, rng=RNG)
        assert made.exact and made.variance <= limit * (1 + 1e-9)
        assert made.rounds_s == pytest.approx(every[every[:, 1] <= limit * (1 + 1e-12), 0].min(), rel=1e-9)
        limit = np.quantile(every[:, 0], share)
        made = AdaQP(group=1, max_rounds_s=float(limit)).plan(p, rng=RNG)
        assert made.exact and made.rounds_s <= limit * (1 + 1e-9)
        assert made.variance == pytest.approx(every[every[:, 0] <= limit * (1 + 1e-12), 1].min(), rel=1e-9)
    points, whole = AdaQP(group=1).pareto(p)
    best, front = np.inf, []
    for time_s, variance in sorted(map(tuple, every)):
        if variance < best * (1 - 1e-12):
            best = variance
            front.append((time_s, variance))
    assert whole and np.array(points) == pytest.approx(np.array(front), rel=1e-9)


def highs_objective(p: HaloProblem, group: int, trade: float) -> float:
    """The paper's mixed-integer programme, in units of time far above the solver's tolerance."""
    (x,) = p.exchanges
    of_time, of_variance = trade_prices(p, x, trade)
    unit_s = p.rounds_s(p.uniform(8)) / 1e3
    h = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 1e-9)):
        h.setOptionValue(option, value)
    rounds = len(p.ranks) - 1
    for r in range(rounds):
        h.addVar(0.0, h.getInfinity())
        h.changeColCost(r, of_time * unit_s)
    for c in x.channels:
        latency, per_byte = p.costs[c.src, c.dst] / unit_s
        heavy = np.sort(c.weight)[::-1]
        row, values = [p.round_of(c) - 1], [1.0]
        for first in range(0, len(heavy), group):
            part, start = heavy[first : first + group], h.getNumCol()
            for k, bits in enumerate((2, 4, 8)):
                h.addVar(0.0, 1.0)
                h.changeColIntegrality(start + k, highspy.HighsVarType.kInteger)
                h.changeColCost(start + k, of_variance * float(part.sum()) / (2**bits - 1) ** 2)
                row.append(start + k)
                values.append(-per_byte * len(part) * (x.dim * bits / 8 + 4))
            h.addRow(1.0, 1.0, 3, [start, start + 1, start + 2], [1.0, 1.0, 1.0])
        h.addRow(latency, h.getInfinity(), len(row), row, values)
    h.run()
    assert h.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(h.getInfo().objective_function_value)


@pytest.mark.parametrize(("seed", "trade"), [(1, 0.5), (2, 0.2), (3, 0.8)][: few(3, least=2)])
def test_highs_finds_nothing_better(seed, trade):
    p = problem(3, (35, 55), seed)  # groups of 10, the last one shorter
    prices = np.array(trade_prices(p, p.exchanges[0], trade))
    made = AdaQP(group=10, trade=trade).plan(p, rng=RNG)
    assert prices @ (made.rounds_s, made.variance) == pytest.approx(highs_objective(p, 10, trade), rel=1e-7)


def test_single_messages_are_no_worse_than_groups_and_equal_seeds_equal():
    p = problem(4, (300, 400), 5, layers=2)
    whole, single = (AdaQP(group=g, max_variance=2000.0).plan(p, rng=RNG) for g in (50, 1))
    assert single.rounds_s <= whole.rounds_s * (1 + single.gap + 1e-12)
    again = AdaQP(group=50, max_variance=2000.0).plan(p, rng=RNG)
    assert all((again.widths[key] == bits).all() for key, bits in whole.widths.items())


def test_where_too_many_choices_are_left_the_gap_is_stated(monkeypatch):
    p = problem(3, (20, 40), 9, layers=2)
    limit = AdaQP(group=1).plan(p, rng=RNG).variance * 1.0317
    exact = AdaQP(group=1, max_variance=limit).plan(p, rng=RNG)
    monkeypatch.setattr(choosing, "MAX_STATES", 1)
    cut = AdaQP(group=1, max_variance=limit).plan(p, rng=RNG)
    assert exact.exact and cut.variance <= limit * (1 + 1e-9)
    assert exact.rounds_s <= cut.rounds_s <= exact.rounds_s / (1 - cut.gap) * (1 + 1e-9)
    points, whole = AdaQP(group=1).pareto(p)
    assert not whole and all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))


def test_rows_without_weight_and_channels_without_rows():
    p = problem(3, (4, 5), 0)
    x = p.exchanges[0]
    quiet = Exchange(x.name, x.dim, tuple(Channel(c.src, c.dst, np.zeros(0 if c.src == 0 else 4)) for c in x.channels))
    p = HaloProblem(fabric=p.fabric, ranks=p.ranks, exchanges=(quiet,))
    for made in (AdaQP(group=3).plan(p, rng=RNG), AdaQP(group=3, trade=1.0).plan(p, rng=RNG), AdaQP(max_variance=0.0).plan(p, rng=RNG)):
        assert made.variance == 0 and set(map(len, made.widths.values())) == {0, 4}
    assert all((bits == 2).all() for bits in AdaQP(max_variance=0.0).plan(p, rng=RNG).widths.values()), "constant rows need no bits"


def test_budgets_that_nothing_fits():
    p = problem(2, (5, 9), 1)
    with pytest.raises(Infeasible, match="8 bits everywhere leave variance") as refused:
        AdaQP(max_variance=1e-9).plan(p, rng=RNG)
    least = refused.value.data["least"]
    assert least == pytest.approx(p.variance(p.uniform(8))) and f"--max-variance {least:.6g}" in refused.value.hint
    with pytest.raises(Infeasible, match="2 bits everywhere take"):
        AdaQP(max_rounds_s=1e-9).plan(p, rng=RNG)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: AdaQP(group=0).plan(p, rng=RNG), "groups of 0 rows"), (lambda p: AdaQP(trade=1.5).plan(p, rng=RNG), "from 0 to 1"),
        (lambda p: AdaQP(max_variance=1.0, max_rounds_s=1.0).plan(p, rng=RNG), "a budget of variance and one"),
        (lambda p: AdaQP(max_variance=float("nan")).plan(p, rng=RNG), "from 0 on"), (lambda p: Uniform(bits=3).plan(p, rng=RNG), "at 3 bits"),
        (lambda p: HaloProblem(fabric=p.fabric, ranks=("nobody",), exchanges=()), "no device"),
        (lambda p: HaloProblem(fabric=p.fabric, ranks=p.ranks, exchanges=(Exchange("forward0", 2, (Channel(0, 1, np.array([-1.0])),)),)), "finite"),
        (lambda p: partition(rmat(10, 20), 11), "10 nodes on 11 workers"),
    ],
)  # fmt: skip
def test_what_is_refused(make, text):
    with pytest.raises(UsageError, match=text):
        make(problem(2, (3, 4), 0))


def test_strategies_by_name():
    assert strategy("adaqp") is AdaQP and strategy("uniform") is Uniform


@pytest.mark.parametrize("seed", range(few(5)))
def test_no_assignment_within_the_variance_leaves_sooner_than_the_bound(seed):
    p = problem(2, (2, 3), seed)
    rate = [sum(x.rate_Bps for x in p.fabric.links if x.src == name) for name in p.ranks]
    for limit in (p.variance(p.uniform(8)), p.variance(p.uniform(4)), 0.0):
        steps = stated_steps(p, Uniform(bits=8).plan(p, rng=RNG), 1)
        bound = float(epoch_bound(p, steps, limit))
        for bits in itertools.product((2, 4, 8, 32), repeat=4):
            widths = {("forward0", 0, 1): np.array(bits[:2]), ("forward0", 1, 0): np.array(bits[2:])}
            if p.variance(widths) <= limit:
                size = [sum(p.size_bytes(p.exchanges[0], c, widths) for c in p.exchanges[0].channels if c.src == i) for i in range(2)]
                assert bound <= max(s / r for s, r in zip(size, rate, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_partitions_are_balanced_and_cut_few_edges(workers):
    points = np.random.default_rng(1).standard_normal((600, 2)).astype(np.float32)
    for graph in (nearest_neighbours(points, 6), rmat(500, 3000, seed=1)):
        parts = partition(graph, workers, method="own", seed=2)
        assert max(parts.sizes) <= np.ceil(graph.nodes / workers * 1.03) and min(parts.sizes) > 0 and sum(parts.sizes) == graph.nodes
        s = graph.symmetric
        assert parts.cut == sum(parts.of[a] != parts.of[b] for a, b in zip(s.rows, s.indices, strict=True)) // 2
        assert parts.cut <= 0.85 * s.edges / 2 * (1 - 1 / workers), "well below parts at random"
        assert (parts.of == partition(graph, workers, method="own", seed=2).of).all()


def test_metis_where_it_is_installed():
    graph = rmat(300, 2000)
    try:
        import pymetis  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtra, match="pymetis"):
            partition(graph, 3, method="pymetis")
        assert partition(graph, 3).method == "own"
        return
    assert partition(graph, 3).method == "pymetis" and len(set(partition(graph, 3).of.tolist())) == 3
