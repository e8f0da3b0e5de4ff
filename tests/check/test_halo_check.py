"""Plans of graph training: written, read, proved, simulated; and what is edited is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from effort import few
from meshwright.check.whole import check_plan as verdict_on
from meshwright.decide.traffic.adaqp import partition
from meshwright.decide.traffic.adaqp.strategy import AdaQP, Uniform
from meshwright.drive.citations import citations
from meshwright.drive.claims import check_claims
from meshwright.drive.halo import aggregated, compare_halos, digest_of, halo_problem, plan_halo, uniform_beside
from meshwright.drive.plans import read_fabric, read_plan, simulate_plan, write_plan
from meshwright.errors import UsageError
from meshwright.graph.generate import rmat
from meshwright.graph.halo import halos
from meshwright.job import GraphTraining
from meshwright.program.hash import program_hash


def planned(strategy=None, *, workers=3, model="gcn", nodes=60, seed=1):
    graph = rmat(nodes, 6 * nodes, seed=seed)
    job = GraphTraining(name="g", features=12, classes=4, hidden=16, model=model)
    of = partition(graph, workers, method="own").of
    over, weights = aggregated(job, graph)
    shares = halos(over, of, workers, weights)
    problem = halo_problem(job, shares, read_fabric(f"star:{workers}?link=12.5MB/s"))
    made, (tried, *_) = plan_halo(
        job, problem, strategy or AdaQP(group=7), digest=digest_of(graph, of), edges=graph.edges, central=[s.central for s in shares]
    )
    return made, tried, problem


@pytest.mark.parametrize("seed", range(few(6)))
def test_a_plan_goes_full_circle(seed, tmp_path):
    strategy = [AdaQP(group=5), AdaQP(group=1, like=4), Uniform(bits=32), Uniform(bits=2)][seed % 4]
    plan, tried, _ = planned(strategy, workers=2 + seed % 3, model=("gcn", "sage")[seed % 2], seed=seed)
    write_plan(tmp_path / "p.json", plan)
    again = read_plan(tmp_path / "p.json")
    verdict = check_claims(again)
    assert verdict.ok and not any("nothing to prove" in note for note in verdict.notes)
    assert simulate_plan(again).makespan_s == pytest.approx(tried.time_s, rel=1e-12) == plan.prediction.time_s
    assert float(plan.bound) <= plan.prediction.time_s
    assert [c.key for _, c in citations(again)] == (["wan2023adaqp"] if strategy.name == "adaqp" else [])
    write_plan(tmp_path / "q.json", planned(strategy, workers=2 + seed % 3, model=("gcn", "sage")[seed % 2], seed=seed)[0])
    assert (tmp_path / "q.json").read_bytes() == (tmp_path / "p.json").read_bytes()


def test_planned_bits_are_never_slower_than_the_uniform_width_they_are_held_to():
    _, _, problem = planned()
    for bits in (2, 4, 8):
        ours, same = compare_halos(problem, [AdaQP(group=3, like=bits), Uniform(bits=bits)])
        assert ours.assignment.variance <= same.assignment.variance * (1 + 1e-9) and ours.assignment.rounds_s <= same.assignment.rounds_s * (1 + 1e-9)
    tried = compare_halos(problem)
    beside = uniform_beside(tried, tried[0].assignment.variance)
    assert beside.assignment.variance <= tried[0].assignment.variance and beside.label in ("uniform 4", "uniform 8", "uniform 32")


def edited(plan, edit):
    """With its job changed."""
    job = json.loads(json.dumps(msgspec.to_builtins(plan.job)))
    edit(job["halo"])
    return replace(plan, job=job)


def first(job):
    return job["steps"][0]["messages"][0]


EDITS = {
    "its rows take": lambda job: first(job).update(size_bytes=first(job)["size_bytes"] - 1),
    "rows by width": lambda job: first(job).update(widths="8" * len(first(job)["widths"])),
    "is no width": lambda job: first(job).update(widths="3" * len(first(job)["widths"])),
    "there are workers": lambda job: first(job).update(dst=9),
    "a group of": lambda job: first(job)["groups"].append([0, 0.0, 2]),
    "variance": lambda job: job.update(variance=job["variance"] / 2),
    "none of the job's": lambda job: job["steps"][0]["messages"].pop(0),
    "no such operation": lambda job: job["steps"].pop(),
    "nobody does": lambda job: job["steps"].append({"name": "forward9", "dim": 4, "messages": []}),
    "lacks or mangles": lambda job: job.pop("steps"),
}


@pytest.mark.parametrize("text", EDITS)
def test_a_job_that_is_not_the_program_s_is_refused(text):
    found = [f for f in verdict_on(edited(planned()[0], EDITS[text])).findings if f.status == "wrong"]
    assert any(text in f.message for f in found), found


def with_program(plan, program):
    name = program_hash(program)
    return replace(plan, programs={name: program}, cycle=(msgspec.structs.replace(plan.cycle[0], program=name),))


def test_a_program_that_does_something_else_is_refused():
    plan = planned()[0]
    p = plan.main
    renamed = replace(p, ops=replace(p.ops, graph=tuple(g.replace("forward1/0", "forward1/1") for g in p.ops.graph)))
    smaller = replace(p, buffers=replace(p.buffers, chunk_bytes=np.where(p.buffers.role == 0, p.buffers.chunk_bytes, 1)))
    pack = p.ops.name.index("pack")
    swapped = replace(p, ops=replace(p.ops, name=tuple("central" if i == pack else n for i, n in enumerate(p.ops.name))))
    for changed in (renamed, smaller, swapped):
        assert not verdict_on(with_program(plan, changed)).ok


def test_a_bound_of_something_else_is_refused():
    plan = planned(AdaQP(group=4, like=4))[0]
    bound = plan.bound
    assert float(bound) > 0

    def claims(**data):
        certificate = msgspec.structs.replace(bound.certificate, data={**bound.certificate.data, **data})
        return replace(plan, bound=msgspec.structs.replace(bound, certificate=certificate))

    half = bound.certificate.data["variance"] / 2
    shares = bound.certificate.data["shares"]
    for wrong in (
        replace(plan, bound=msgspec.structs.replace(bound, value=str(bound.exact * Fraction(11, 10)))), claims(variance=half), claims(price=-1.0),
        claims(shares={}), claims(shares={**shares, next(iter(shares)): 1e9}),
        replace(plan, bound=msgspec.structs.replace(bound, quantity="step time")),
        replace(plan, bound=msgspec.structs.replace(bound, certificate=msgspec.structs.replace(bound.certificate, kind="placement"))),
    ):  # fmt: skip
        assert not verdict_on(wrong).ok


def test_a_fabric_that_is_too_small_and_ranges_of_other_rows():
    graph = rmat(20, 80)
    job = GraphTraining(name="g", features=3, classes=2)
    shares = halos(graph, partition(graph, 3, method="own").of, 3, graph.coefficients("sum"))
    with pytest.raises(UsageError, match="3 workers on 2 devices"):
        halo_problem(job, shares, read_fabric("star:2"))
    with pytest.raises(UsageError, match="traced rows"):
        halo_problem(job, shares, read_fabric("star:3"), {})


@pytest.mark.parametrize("wrong", [{"model": "gat"}, {"layers": 0}, {"reassign": -1}, {"learning_rate": 0.0}])
def test_jobs_that_are_none(wrong):
    with pytest.raises(UsageError):
        GraphTraining(**{"name": "g", "features": 3, "classes": 2, **wrong})
