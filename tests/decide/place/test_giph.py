"""GiPH: its graph beside the definition, its net beside plain torch, its strategy, and training."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cases import makespan_s, message_s, random_problem, seconds

from effort import few
from meshwright.cost_models.moves import LAYERS, MoveNet
from meshwright.decide.place.giph.episodes import Episodes, random_start
from meshwright.decide.place.giph.generate import random_problem as published
from meshwright.decide.place.giph.strategy import Giph
from meshwright.decide.place.judge import simulated_s
from meshwright.decide.place.lists import Heft
from meshwright.decide.place.problem import PlaceProblem
from meshwright.errors import Unsupported, UsageError
from meshwright.graph.tasks import Task, TaskGraph

torch = pytest.importorskip("torch")


def untrained(seed=0):
    r = np.random.default_rng(seed)
    shapes = {f"{n}.weight": s for n, s in LAYERS.items()} | {f"{n}.bias": s[:1] for n, s in LAYERS.items()}
    return MoveNet({n: r.uniform(-0.5, 0.5, s).astype(np.float32) for n, s in shapes.items()})


def side_by_side(seed, count=3):
    problems = [random_problem(seed + i, tasks=5 + 2 * i, devices=2 + i % 3) for i in range(count)]
    r = np.random.default_rng(seed)
    return problems, Episodes(problems, [random_start(p, r) for p in problems])


def scaled(rows):
    x = np.array(rows, float)
    low, high = x.min(0), x.max(0)
    return np.where(high > low, (x - low) * 2 / np.where(high > low, high - low, 1) - 1, 0)


@pytest.mark.parametrize("seed", range(few(6)))
def test_the_graph_is_that_of_the_paper(seed):
    """Nodes are options; edges join an option with its parents' pivots, and one that is no pivot with its children's (section 4.2)."""
    problems, episodes = side_by_side(seed)
    for s in episodes.searches:
        s.move(0, int(np.flatnonzero(np.isfinite(s.problem.arrays.dur[0]))[-1]))
    graph = episodes.graph()
    found = {(int(a), int(b)): x for a, b, x in zip(graph.src, graph.dst, graph.x_edge, strict=True)}
    assert len(found) == len(graph.src)
    for b, p in enumerate(problems):
        s, node_of = episodes.searches[b], episodes.node_of[b]
        options = [(i, k) for i in range(len(s.on)) for k in range(len(p.fabric.devices)) if seconds(p, i, k) < float("inf")]
        assert [node_of[o] >= 0 for o in options] == [True] * len(options) and (node_of >= 0).sum() == len(options)
        wanted = {}
        for (i, j), e in zip(p.graph.pairs, p.graph.edges, strict=True):
            for k in range(len(p.fabric.devices)):
                pairs = ([(s.on[i], k)] if node_of[j, k] >= 0 else []) + ([(k, s.on[j])] if node_of[i, k] >= 0 and k != s.on[i] else [])
                for m, n in pairs:
                    took = message_s(p, e.size_bytes, m, n)
                    wanted[int(node_of[i, m]), int(node_of[j, n])] = (e.size_bytes, message_s(p, 0, m, n), took)
        mine = {pair: x for pair, x in found.items() if episodes.owner[pair[0]] == b}
        assert mine.keys() == wanted.keys()
        for column in range(3):
            assert np.allclose([x[column] for x in mine.values()], scaled([[wanted[pair][column]] for pair in mine])[:, 0], atol=1e-5)
        ready = {j: [(i, e.size_bytes) for (i, x), e in zip(p.graph.pairs, p.graph.edges, strict=True) if x == j] for j in range(len(s.on))}
        rows = []
        for i, k in options:
            arrives = [s.end[a] + message_s(p, size, s.on[a], k) for a, size in ready[i]]
            earlier = 0.0 if k == s.on[i] or not arrives else max(arrives) - s.start[i]
            work = p.graph.tasks[i].work
            rows.append([work, seconds(p, i, k) / work if work else 0, seconds(p, i, k), earlier])
        assert np.allclose(graph.x_node[[node_of[o] for o in options], :4], scaled(rows), atol=1e-5)


def test_sweeps_take_levels_and_nothing_else():
    graph = side_by_side(1)[1].graph()
    level = np.searchsorted(graph.node_ptr, np.arange(len(graph.x_node)), side="right") - 1
    into = np.searchsorted(graph.into_ptr, np.arange(len(graph.src)), side="right") - 1
    assert (level[graph.src] < level[graph.dst]).all() and (into == level[graph.dst]).all()
    assert sorted(graph.back) == list(range(len(graph.src)))
    assert (level[graph.src[graph.back]] == np.searchsorted(graph.out_ptr, np.arange(len(graph.src)), side="right") - 1).all()


def test_criticality_follows_the_last_message():
    """An edge of the critical path gains a tenth of what it lacks, its sibling loses a tenth (public code); tasks without parents have 1."""
    _, episodes = side_by_side(4, 1)
    s = episodes.searches[0]
    a = s.problem.arrays
    for p in set(a.parent.tolist()):
        assert s.edge_critical[s._out(p)].sum() == pytest.approx(1)
    assert all(s.critical[i] == 1 for i in np.flatnonzero(np.diff(a.ptr) == 0))
    path = s.path[: s.critical_tasks].tolist()
    assert s.end[path[0]] == s.end.max() and all((b, a) in s.problem.graph.pairs for a, b in pairwise(path))


def plain(net, graph):
    """The net by its formulas, node by node."""
    at = net.layers
    y0 = at["node_1"](torch.relu(at["node_0"](torch.from_numpy(graph.x_node))))
    both = []
    for way, src, dst in (("forward", graph.src, graph.dst), ("backward", graph.dst, graph.src)):
        y = [None] * len(y0)
        for v in range(len(y0)) if way == "forward" else reversed(range(len(y0))):
            said = [torch.relu(at[f"{way}_message"](torch.cat([y[src[e]], torch.from_numpy(graph.x_edge[e])]))) for e in np.flatnonzero(dst == v)]
            y[v] = torch.relu(at[f"{way}_update"](torch.stack(said).mean(0) if said else torch.zeros(10, dtype=y0.dtype))) + y0[v]
        both.append(torch.stack(y))
    return at["score_1"](torch.relu(at["score_0"](torch.cat(both, 1))))[:, 0]


@pytest.mark.parametrize("seed", range(few(3)))
def test_the_net_and_its_gradient_are_those_of_plain_torch(seed):
    from meshwright.decide.place.giph.net import ScoringNet

    graph = side_by_side(seed)[1].graph()
    graph = graph._replace(x_node=graph.x_node.astype(float), x_edge=graph.x_edge.astype(float))
    net, weights = ScoringNet.of(untrained(seed)).double(), torch.randn(len(graph.x_node), dtype=torch.double)
    found = []
    for forward in (net, lambda g: plain(net, g)):
        net.zero_grad()
        scores = forward(graph)
        (scores * weights).sum().backward()
        found.append([scores.detach(), *(p.grad.clone() for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_weights_go_out_and_in():
    from meshwright.decide.place.giph.net import ScoringNet

    net = untrained(3)
    again = ScoringNet.of(net).weights()
    assert again.keys() == net.weights.keys() and all((again[n] == net.weights[n]).all() for n in again)
    assert MoveNet(again).digest == net.digest != untrained(4).digest


def test_chances_are_a_softmax_of_each_problem():
    from meshwright.decide.place.giph.net import log_chances

    _, episodes = side_by_side(2)
    allowed = episodes.allowed()
    scores = torch.randn(len(allowed))
    found = log_chances(scores, allowed, episodes.owner, 3).exp()
    for b in range(3):
        here = torch.from_numpy(allowed & (episodes.owner == b))
        assert torch.allclose(found[here], torch.softmax(scores[here], 0)) and not found[torch.from_numpy(~allowed)].any()
        s = episodes.searches[b]
        assert not allowed[episodes.node_of[b][np.arange(len(s.on)), s.on]].any()
    s = episodes.searches[0]
    task = int(np.argmax(s.options))
    s.move(task, int(np.flatnonzero(np.isfinite(s.problem.arrays.dur[task]))[0]))
    assert not episodes.allowed()[episodes.node_of[0][task][episodes.node_of[0][task] >= 0]].any()


@pytest.mark.parametrize("seed", range(few(6)))
def test_never_longer_than_heft_and_says_its_moves(seed):
    problem = random_problem(seed, tasks=6 + 2 * seed, devices=1 + seed % 4, switch=bool(seed % 2))
    heft = Heft().plan(problem, rng=np.random.default_rng(0))
    for options in ({}, {"links": "own"}, {"start": "random", "evaluations": 20}):
        found = Giph(net=untrained(seed), **options).plan(problem, rng=np.random.default_rng(0))
        assert found == Giph(net=untrained(seed), **options).plan(problem, rng=np.random.default_rng(0))
        assert found.makespan_s == pytest.approx(makespan_s(problem, found.sequence, found.on), rel=1e-12)
        if options.get("links") == "own":
            assert found.makespan_s <= heft.makespan_s
        else:
            assert simulated_s(problem, found) <= simulated_s(problem, heft)
        for m in found.notes["moves"]:
            assert m["after_s"] < m["before_s"] and ("critical" in m["why"])


def test_it_counts_what_it_looks_at():
    problem = random_problem(3, tasks=8, devices=3)
    for evaluations, start, looked in ((40, "random", 40 + 3), (100, "heft", 100 + 3), (17, "heft", 17 + 3)):
        found = Giph(net=untrained(), evaluations=evaluations, start=start).plan(problem, rng=np.random.default_rng(0))
        assert looked - 8 <= found.evaluations <= looked


def test_refusals():
    problem = random_problem(0, tasks=4, devices=2)
    with pytest.raises(Unsupported, match="needs a trained net"):
        Giph().plan(problem, rng=np.random.default_rng(0))
    for options in ({"evaluations": -1}, {"start": "cold"}, {"links": "none"}):
        with pytest.raises(UsageError, match="giph"):
            Giph(net=untrained(), **options).plan(problem, rng=np.random.default_rng(0))
    tasks = tuple(Task(name=str(i), work=1.0) for i in range(20_001))
    many = PlaceProblem(graph=TaskGraph(tasks=tasks), fabric=random_problem(0, tasks=4, devices=1).fabric)
    with pytest.raises(Unsupported, match="too many for moves"):
        Giph(net=untrained()).plan(many, rng=np.random.default_rng(0))


def test_generated_problems_can_be_run():
    for seed in range(few(5)):
        problem = published(np.random.default_rng(seed), devices=3 + seed)
        order = set(problem.graph.order)
        assert len(order) == len(problem.graph.tasks) and np.isfinite(problem.arrays.dur).any(1).all()
        sources = [i for i in order if not any(b == i for _, b in problem.graph.pairs)]
        sinks = [i for i in order if not any(a == i for a, _ in problem.graph.pairs)]
        assert sources == [0] and sinks == [len(order) - 1]


def test_training_makes_searches_shorter():
    """On problems held back; equal seeds give equal nets."""
    from meshwright.decide.place.giph.train import fit_moves

    told = []
    net = fit_moves(lambda r: random_problem(int(r.integers(1000)), tasks=8, devices=4), updates=10, seed=1, told=lambda u, x: told.append((u, x)))
    assert [u for u, _ in told] == [0, 10] and net.trained["held_back"] == min(x for _, x in told)
    assert net.trained["held_back"] < 0.985 * net.trained["held_back_untrained"]
    again = fit_moves(lambda r: random_problem(int(r.integers(1000)), tasks=8, devices=4), updates=1, seed=1)
    assert again.digest == fit_moves(lambda r: random_problem(int(r.integers(1000)), tasks=8, devices=4), updates=1, seed=1).digest
