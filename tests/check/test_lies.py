"""Bounds that prove too much, of every kind that a plan file can carry, and plans that leave out what a proof needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from meshwright.bound import Bound, Certificate
from meshwright.cost import Cost
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.decide.collective.bounds.allreduce import hosts_of, packing_bound
from meshwright.decide.collective.bounds.collective import collective_bound
from meshwright.drive.claims import check_claims
from meshwright.drive.collective.groups import plan_groups
from meshwright.drive.collective.job import plan_collective
from meshwright.io.fabric.name import load_fabric
from meshwright.plan.plan import Plan
from meshwright.program.hash import program_hash

ISLANDS = load_fabric("two-islands")
REDUCE = CollectiveProblem.on(ISLANDS, "all-reduce", 1 << 14)
EVEN = {(x.src, x.dst): 1 for x in ISLANDS.links}


@lru_cache
def plan(op: str = "all-reduce", ranks: int = 4) -> Plan:
    asked = CollectiveProblem(fabric=ISLANDS, op=op, ranks=REDUCE.ranks[:ranks], size_bytes=1 << 14)
    return plan_collective(asked, candidates=[Ring()])[0]


@lru_cache
def groups() -> Plan:
    names = REDUCE.ranks
    asked = [CollectiveProblem(fabric=ISLANDS, op="all-reduce", ranks=pair, size_bytes=1 << 12) for pair in (names[::2], names[1::2])]
    return plan_groups(asked)[0]


@lru_cache
def training() -> Plan:
    pytest.importorskip("torch")
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted
    from meshwright.job import Training
    from meshwright.testing.nets import captured

    job = Training(model="meshwright.testing.nets:chain", global_batch=8)
    return plan_training(job, ISLANDS, Cost(), graph=captured("chain"), wishes=[LayoutWanted(data=4, tensor=1, pipeline=1)])


def said(made: Plan) -> str:
    verdict = check_claims(made)
    assert verdict.status == "wrong", verdict
    return " | ".join(f.message for f in verdict.findings)


def of(made: Plan) -> Bound:
    assert made.bound is not None
    return made.bound


def twice(problem: CollectiveProblem) -> Bound:
    return msgspec.structs.replace(packing_bound([problem, problem], EVEN, [hosts_of(problem)] * 2), quantity="all-reduce time")


def added(bound: Bound) -> Bound:
    nothing = Certificate(kind="sum", data={})
    return msgspec.structs.replace(bound, value=str(2 * bound.exact), certificate=nothing, parts=(bound, bound))


def with_part(bound: Bound) -> Bound:
    return msgspec.structs.replace(bound, parts=(msgspec.structs.replace(bound, value="77"),))


@pytest.mark.parametrize(("lie", "words"), [(added, "a sum certificate says nothing"), (with_part, "this one has parts")])
def test_bounds_on_one_time_do_not_add_up(lie: Callable[[Bound], Bound], words: str) -> None:
    assert words in said(replace(plan(), bound=lie(of(plan()))))


def test_a_collective_pays_once() -> None:
    once = packing_bound([REDUCE], EVEN, [hosts_of(REDUCE)])
    assert check_claims(replace(plan(), bound=once)).ok and of(plan()).exact * 2 < Fraction(plan().prediction.time_s)  # type: ignore[union-attr]
    assert "or not so often" in said(replace(plan(), bound=twice(REDUCE)))


def test_who_names_no_devices_speaks_of_all() -> None:
    whole = of(plan("all-gather"))
    data = {k: v for k, v in whole.certificate.data.items() if k != "devices"}
    lie = msgspec.structs.replace(whole, certificate=msgspec.structs.replace(whole.certificate, data=data))
    assert check_claims(replace(plan("all-gather"), bound=lie)).ok, "of a job on all devices it is true"
    assert "its devices is" in said(replace(plan("all-gather", 3), bound=lie))


def test_groups_state_each_of_their_collectives() -> None:
    made = groups()
    assert check_claims(made).ok
    alone = [CollectiveProblem(fabric=ISLANDS, op=j["op"], ranks=tuple(j["ranks"]), size_bytes=j["size_bytes"]) for j in made.job["collectives"]]
    assert check_claims(replace(made, bound=collective_bound(alone[0]))).ok, "both together take as long as one of them"
    assert "the plan's job has a" in said(replace(made, bound=msgspec.structs.replace(of(made), quantity="memory")))
    first, *rest = made.job["collectives"]
    for change in ({"op": "all-gather"}, {"size_bytes": 1 << 20}, {"ranks": first["ranks"][::-1]}):
        assert "job.collectives[0]" in said(replace(made, job={**made.job, "collectives": [{**first, **change}, *rest]}))
    assert "the program does 2" in said(replace(made, job={**made.job, "collectives": rest}))


def test_a_roofline_is_of_the_plans_type_and_peaks() -> None:
    made = training()
    assert check_claims(made).ok
    data = of(made).certificate.data

    def claimed(**change: Any) -> Plan:
        new = {**data, **change}
        value = str(Fraction(new["flops"], new["flops_per_s"]))
        return replace(made, bound=msgspec.structs.replace(of(made), value=value, certificate=Certificate(kind="roofline", data=new)))

    assert check_claims(claimed(flops=data["flops"] // 2)).ok, "less work is a weaker bound, and a true one"
    slow = 10**9
    lies: dict[str, dict[str, Any]] = {
        "devices do": {"flops_per_s": data["flops_per_s"] // 2}, "plan computes in fp32": {"dtype": "fp8"},
        "segments do": {"flops": data["flops"] * 3},
    }  # fmt: skip
    for words, change in lies.items():
        assert words in said(claimed(**change))
    # A peak that the certificate assumes where devices state none is a claim like any other.
    assert "it says 4000000000" in said(claimed(dtype="fp8", default_flops_per_s=slow, flops_per_s=4 * slow))


def test_what_a_proof_needs_cannot_be_left_out() -> None:
    assert "states no layout" in said(replace(training(), layout=None))
    bare = replace(plan().main, contracts=())
    name = program_hash(bare)
    cycle = tuple(msgspec.structs.replace(x, program=name) for x in plan().cycle)
    assert "states no contract" in said(replace(plan(), programs={name: bare}, cycle=cycle))
    assert "the program does 1" in said(replace(plan(), job={k: v for k, v in plan().job.items() if k != "collective"}))
    kinds = {"imported": "states no job that a bound could be of", "training": "states no layout", "quicksilver": "no plans of kind"}
    for kind, words in kinds.items():
        assert words in said(replace(plan(), kind=kind))
