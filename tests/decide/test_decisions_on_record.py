"""What the smaller decisions choose on small problems is as on record, from clusters and placements to restarts and feeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshwright.cluster.generate import synthetic
from meshwright.cluster.generate_vms import synthetic_vms
from meshwright.cluster.servers import Server, Servers
from meshwright.cluster.vms import VmHosts
from meshwright.decide.cluster import ALLOCATIONS, ORDERS, Book, Waiting, resize, vms
from meshwright.decide.cluster.problem import ranking
from meshwright.decide.cluster.vms import forecast
from meshwright.decide.data import STRATEGIES as FEEDS
from meshwright.decide.data import FeedProblem
from meshwright.decide.experts import Choice, DictionarySearch, ExpertProblem, ExpertShape, Tutel
from meshwright.decide.place import STRATEGIES as PLACES
from meshwright.decide.place import place_bound
from meshwright.decide.restart.placement import MostInPlace
from meshwright.decide.restart.problem import PlacementProblem, RestartProblem
from meshwright.decide.restart.transfers import plan_transfers
from meshwright.decide.tables import STRATEGIES as TABLES
from meshwright.decide.tables import table_bound
from meshwright.decide.topology import STRATEGIES as TOPOLOGIES
from meshwright.decide.topology import TopologyProblem
from meshwright.decide.traffic import STRATEGIES as TRAFFIC
from meshwright.decide.traffic import TrafficProblem
from meshwright.decide.traffic.adaqp.problem import Channel, Exchange, HaloProblem
from meshwright.decide.traffic.adaqp.strategy import AdaQP, Uniform
from meshwright.drive.cluster import plan_allocation
from meshwright.drive.resize import resize_simulated
from meshwright.drive.vms import place_vms
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.plan.regions import region_along, whole_region
from meshwright.profile.input_plan import Place
from meshwright.profile.input_rates import InputRates
from meshwright.testing.contracts.cluster_resize import PROBLEMS as RESIZED
from meshwright.testing.contracts.place import PROBLEMS as PLACED
from meshwright.testing.contracts.tables import PROBLEMS as TABLED
from meshwright.testing.restarts import SHAPES, TENSORS
from meshwright.testing.traffic import traffic_profile
from on_record import made, numbers_in, require_on_record

Found = dict[str, dict[str, Any]]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def joined(count: int, **of_device: Any) -> Fabric:
    devices = tuple(Device(name=f"d{i}", kind="cpu", **of_device) for i in range(count))
    links = tuple(
        Link(src=a.name, dst=b.name, rate_Bps=10**6 * (5 + i), latency_s=1e-4) for i, a in enumerate(devices) for b in devices if a is not b
    )
    return Fabric(name="joined", devices=devices, links=links)


def clusters() -> Found:
    found: Found = {}
    for seed, kinds in enumerate(([(8, 24, 500)], [(4, 12, 250), (8, 24, 500)])):
        shapes = [kinds[n % len(kinds)] for n in range(2 + seed)]
        servers = Servers(servers=tuple(
            Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(g)), cores=c, memory_bytes=m * 10**9) for n, (g, c, m) in enumerate(shapes)
        ))  # fmt: skip
        queue = synthetic(12 + 8 * seed, per_hour=20, split=(40, 30, 30), seed=seed, most_gpus=4)
        jobs = np.arange(len(queue.jobs))
        waiting = Waiting(
            servers=servers, queue=queue, book=Book(servers, queue.profiles), now_s=1e6, jobs=jobs, left_s=queue.duration_s * (jobs % 3 + 1) / 3,
            attained_s=(jobs * 7 % 11).astype(np.float64), contention=2.0,
        )  # fmt: skip
        for order in ORDERS:
            found[f"{seed} {order.name}"] = made(lambda o=order, w=waiting: {"ranking": ranking(o(), w)})
            for kind in ALLOCATIONS:
                found[f"{seed} {order.name} {kind.name}"] = made(
                    lambda o=order, k=kind, s=servers, q=queue: {"plan": plan_allocation(s, q, o(), k())}
                )
    return found


def machines() -> Found:
    found: Found = {}
    trace = synthetic_vms(6, days=2, before_days=1, load=0.8, owners=20, warm_days=0.5, low=0.2, seed=1)
    for kind in vms.STRATEGIES:
        for predictor in ("perfect", "kaplan-meier") if kind.forecasts else ("perfect",):

            def placed(kind: Any = kind, predictor: str = predictor) -> dict[str, Any]:
                predicted = forecast(predictor, trace, at_s=0.0, seed=1)
                placement, run = place_vms(trace, VmHosts.of([6]), kind(), predicted, from_s=43_200.0)
                return {"used_host_s": placement.used_host_s, "bound": placement.bound, "empty": run.measures.empty_share, "placement": placement}

            found[f"{kind.name} {predictor}"] = made(placed)
    return found


def resized() -> Found:
    found: Found = {}
    for number, (tenants, demand, rules, start) in enumerate(RESIZED):
        for kind in resize.STRATEGIES:

            def log(kind: Any = kind, of: Any = (tenants, demand, rules, start), seed: int = number) -> dict[str, Any]:
                tenants, demand, rules, start = of
                done = resize_simulated(tenants, demand, kind(), rules=rules, seed=seed, start=start, record=True)
                return {"log": done.log, "prior": done.prior}

            found[f"{number} {kind.name}"] = made(log)
    return found


def placements() -> Found:
    found: Found = {}
    for number, problem in enumerate(PLACED):
        found[f"{number}"] = made(lambda p=problem: {"bound": place_bound(p)})
        for kind in PLACES:
            if kind.name not in ("exact", "giph"):  # these need solvers that are not always installed

                def placed(kind: Any = kind, problem: Any = problem) -> dict[str, Any]:
                    p = kind().plan(problem, rng=rng())
                    return {"makespan_s": p.makespan_s, "on": p.on, "sequence": p.sequence, "start_s": p.start_s, "tried": p.evaluations}

                found[f"{number} {kind.name}"] = made(placed)
    return found


def tables() -> Found:
    found: Found = {}
    for number, problem in enumerate(TABLED):
        found[f"{number}"] = made(lambda p=problem: {"bound": table_bound(p)})
        for kind in TABLES:

            def placed(kind: Any = kind, problem: Any = problem) -> dict[str, Any]:
                p = kind().plan(problem, rng=rng())
                return {
                    "cost_s": p.cost_s, "shards": p.shards, "phases": p.phases, "columns": p.columns, "moved": p.moved_bytes, "tried": p.evaluations,
                    "others": [x.cost_s for x in p.others], "notes": p.notes,
                }  # fmt: skip

            found[f"{number} {kind.name}"] = made(placed)
    return found


def topologies() -> Found:
    found: Found = {}
    for nodes, ports, paired in ((4, 2, False), (8, 2, True), (12, 4, False), (16, 3, True), (20, 4, True)):
        problem = TopologyProblem(nodes=nodes, ports=ports, bidirectional=paired)
        for kind in TOPOLOGIES:

            def designed(kind: Any = kind, problem: Any = problem) -> dict[str, Any]:
                designs = kind().plan(problem, rng=rng())
                fabrics = [d.fabric(problem) for d in designs]
                return {
                    "names": [d.name for d in designs], "parts": [dict(d.parts) for d in designs], "links": [f.links for f in fabrics],
                    "prices": [problem.prices.of(d.parts) for d in designs],
                }  # fmt: skip

            found[f"{nodes} {ports} {paired} {kind.name}"] = made(designed)
    return found


def traffic() -> Found:
    found: Found = {}
    for seed in range(4):
        profile = traffic_profile(random.Random(seed), 6 + 2 * seed, 1 + seed % 3, 250 * (seed % 2), knee=seed > 1)
        for kind in TRAFFIC:
            found[f"{seed} {kind.name}"] = made(lambda k=kind, p=profile: {"plan": k().plan(TrafficProblem.of(p))})
    return found


def halos() -> Found:
    r = np.random.default_rng(7)
    exchanges = tuple(
        Exchange(f"x{k}", 16, tuple(Channel(i, j, r.pareto(1.5, 6)) for i in range(3) for j in range(3) if i != j)) for k in range(2)
    )
    problem = HaloProblem(fabric=joined(3), ranks=("d0", "d1", "d2"), exchanges=exchanges)
    asked: dict[str, Callable[[], Any]] = {
        "trade": lambda: AdaQP(group=2), "time": lambda: AdaQP(group=1, trade=0.0), "variance": lambda: AdaQP(group=3, trade=1.0),
        "like": lambda: AdaQP(group=2, like=4), "rounds": lambda: AdaQP(group=2, max_rounds_s=1e-3), "uniform": Uniform,
    }  # fmt: skip
    return {name: made(lambda s=strategy: {"assignment": s().plan(problem, rng=rng())}) for name, strategy in asked.items()}


def restarts() -> Found:
    found: Found = {}
    for seed in range(6):
        r = random.Random(seed)

        def held(r: random.Random = r) -> dict[str, Any]:
            regions = {n: whole_region(s) if r.random() < 0.5 else region_along(s, 0, [(0, s[0] // 2)]) for n, s in SHAPES.items() if s}
            return {n: region for n, region in regions.items() if r.random() < 0.8}

        files = {f"f{i}": held() for i in range(3)}
        problem = RestartProblem(
            tensors=TENSORS, needs=tuple(held() for _ in range(3)), files=files, homes={"f0": ("d0",), "f1": ("d3",)}, placement=("d1", "d0", "d3"),
            servers=("left", "left", "right"), stored=frozenset({"f2"}) if seed % 2 else frozenset(),
        )  # fmt: skip
        found[f"{seed} transfers"] = made(lambda p=problem: {"transfers": plan_transfers(p)})
        reuse = np.random.default_rng(seed).integers(0, 50, (3, 4))
        allowed = np.array([[i != j for j in range(4)] for i in range(3)]) if seed % 2 else None
        found[f"{seed} placement"] = made(lambda u=reuse, a=allowed: {"assignment": MostInPlace().plan(PlacementProblem(reuse=u, allowed=a))})
    return found


def feeds() -> Found:
    found: Found = {}
    for seed in range(12):
        r = random.Random(seed)
        rates = InputRates(
            items=r.choice([8, 1000]), total_bytes=r.randrange(10**5, 10**9), workers=r.randrange(5), cores=r.choice([0.5, 2, 16]),
            device_s=r.choice([0, 0.003]), prepare_s=r.uniform(1e-3, 0.02), cpu_s=r.uniform(1e-4, 1e-3), miss_s=r.uniform(1e-3, 0.1),
            hit_s=r.uniform(1e-6, 1e-3), storage_Bps=r.uniform(1e6, 1e9), sampled=10, rounds=1, held=r.choice([1.0, 0.2]),
            batch_bytes=r.choice([0, 10**5, 10**8]),
        )  # fmt: skip
        place = Place(
            memory_bytes=r.randrange(0, 2 * rates.total_bytes), jobs=r.randint(1, 4), nodes=r.randint(1, 3), network_Bps=r.choice([1e6, 1e9]),
            shared_bytes=r.choice([0, 10**7, 10**10]),
        )  # fmt: skip
        for kind in FEEDS:

            def fed(kind: Any = kind, problem: FeedProblem = FeedProblem(rates=rates, place=place, seed=seed)) -> dict[str, Any]:
                p = kind().plan(problem, rng=rng())
                return {"epoch_s": p.epoch_s, "bound": p.bound, "words": numbers_in(p.words), "plan": p}

            found[f"{seed} {kind.name}"] = made(fed)
    return found


def experts() -> Found:
    found: Found = {}
    for n, experts_of in ((2, 1), (4, 2), (4, 8)):
        shape = ExpertShape(ranks=n, experts=experts_of, model=64, inner=256)
        for passes in ("training", "inference"):
            problem = ExpertProblem(
                fabric=joined(n, flops={"fp32": 10**11}, memory_bandwidth_Bps=10**10), ranks=tuple(f"d{i}" for i in range(n)), shape=shape,
                capacities=(8, 64, 512), passes=passes,
            )  # fmt: skip
            found[f"{n} {experts_of} {passes}"] = made(lambda p=problem: {"plan": Tutel().plan(p)})
    for seed in range(4):
        r = random.Random(seed)
        choices = [Choice(d, c, a) for d in (0, 1, 2, 3, 4, 6, 12) for c in (1, 2) for a in ("linear", "2dh") if d or c == 1]
        took_s = {c: r.uniform(0.5, 2) + abs(c.degree - r.choice((1, 3, 6))) for c in choices}

        def searched(choices: list[Choice] = choices, took_s: dict[Choice, float] = took_s) -> dict[str, Any]:
            search, asked = DictionarySearch(choices, window=64), list[str]()
            for call in range(120):
                choice = search.choose(60 + 40 * (call % 3))
                asked.append(choice.text)
                search.record(60 + 40 * (call % 3), choice, took_s[choice] * (1 + call // 60))
            return {"asked": asked, "settled": search.settled}

        found[f"search {seed}"] = made(searched)
    return found


@pytest.mark.parametrize("of", [clusters, machines, resized, placements, tables, topologies, traffic, halos, restarts, feeds, experts])
def test_on_record(of: Callable[[], Found]) -> None:
    require_on_record(of.__name__, of())
