"""What every strategy of embedding tables must do, on small problems."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from ...check.tables import Sharded, check_shards
from ...cost_models.lookups import LookupCosts
from ...decide.tables import TableProblem, TableStrategy, table_bound
from ...decide.tables.lower import lower_tables
from ...errors import MeshwrightError, UsageError
from ...fabric.fabric import Device, Fabric, Link
from ...graph.embeddings import Table, Tables
from .chosen import named_and_cited, parametrized

Kind = type[TableStrategy]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "tables")


def _problem(seed: int) -> TableProblem:
    r = np.random.default_rng(seed)
    tables = tuple(
        Table(name=f"t{i}", rows=int(r.integers(10, 500)), dim=int(r.choice([4, 8, 32])), pooling=float(r.integers(1, 9)))
        for i in range(3 + 3 * seed)
    )
    job = Tables(tables=tables, batch=int(r.integers(5, 40)))
    room = int(2.5 * sum(t.rows * t.dim * 4 + 200 * t.dim for t in tables)) if seed % 2 else 0
    devices = tuple(Device(name=f"d{k}", kind="cpu", memory_bytes=room) for k in range(2 + seed % 3))
    links = tuple(Link(src=a.name, dst=b.name, rate_Bps=10**6, latency_s=0.0) for a in devices for b in devices if a is not b)
    costs = (LookupCosts(batch=job.batch, floor=(1e-6, 1e-6), overhead_s=1e-4), LookupCosts(batch=job.batch, floor=(3e-6, 1e-6), overhead_s=1e-4))
    kinds = tuple(int(k > 0) for k in range(len(devices))) if seed == 2 else ()
    return TableProblem(tables=job, fabric=Fabric(name="small", devices=devices, links=links), costs=costs, kinds=kinds)


PROBLEMS = [_problem(seed) for seed in range(4)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{len(p.tables.tables)}on{p.devices}")
def test_shards_tile_their_tables_and_cost_no_less_than_the_bound(kind: Kind, problem: TableProblem) -> None:
    try:
        found = kind().plan(problem, rng=np.random.default_rng(0))
    except MeshwrightError as refused:
        assert not isinstance(refused, UsageError) and refused.hint, "a refusal says why and what to do"
        return
    assert not check_shards(Sharded(problem.tables, found.shards, problem.fabric.devices, {}, {}))
    assert float(table_bound(problem)) <= found.cost_s * (1 + 1e-9)
    lower_tables(problem, found)


def test_equal_seeds_give_equal_plans(kind: Kind) -> None:
    try:
        first = kind().plan(PROBLEMS[1], rng=np.random.default_rng(0))
    except MeshwrightError:
        return
    assert kind().plan(PROBLEMS[1], rng=np.random.default_rng(0)).shards == first.shards


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind(**asdict(kind())) == kind()  # type: ignore[call-overload]
