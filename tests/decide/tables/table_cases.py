"""Small table problems, and costs whose nets are written down rather than trained."""

from __future__ import annotations

import numpy as np

from meshwright.cost_models.lookups import FEATURES, LookupCosts, Net
from meshwright.decide.tables import TableProblem
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.graph.embeddings import Table, Tables


def fabric_of(devices, rate_Bps=10**7, memory_bytes=0, slow=()):
    made = tuple(Device(name=f"d{k}", kind="cpu", memory_bytes=memory_bytes) for k in range(devices))
    links = tuple(
        Link(src=a.name, dst=b.name, rate_Bps=rate_Bps // (10 if a.name in slow or b.name in slow else 1)) for a in made for b in made if a is not b
    )
    return Fabric(name=f"all{devices}", devices=made, links=links)


def tables_of(seed, count, batch=16, **fields):
    r = np.random.default_rng(seed)
    made = tuple(
        Table(name=f"t{i}", rows=int(r.integers(20, 900)), dim=int(r.choice([4, 8, 16, 32])), pooling=float(r.integers(1, 12))) for i in range(count)
    )
    return Tables(tables=made, batch=batch, **fields)


def grown_costs(batch, seed=0):
    """Costs of a net that do not add up: tables on one device cost more than each alone."""
    r = np.random.default_rng(seed)
    pick = np.zeros((FEATURES, 8))
    pick[[17, 18, 21], [0, 1, 2]] = 1.0  # columns, lookups, columns times lookups
    table = Net(np.zeros(FEATURES), np.full(FEATURES, 40.0), ((pick, np.full(8, 0.1)),), last_relu=True)
    head = Net(np.zeros(8), np.ones(8), ((np.abs(r.normal(size=(8, 6))) * 0.3, np.zeros(6)), (np.full((6, 1), 0.5), np.array([-16.0]))))
    return LookupCosts(batch=batch, floor=(1e-9, 1e-9), overhead_s=1e-6, table=table, device=head)


def additive_costs(batch, element=1e-7, column=1e-7, each=1e-5):
    return LookupCosts(batch=batch, floor=(element, column), overhead_s=each)


def problem_of(seed=0, tables=6, devices=2, costs=None, fabric=None, **fields):
    job = tables_of(seed, tables)
    return TableProblem(tables=job, fabric=fabric or fabric_of(devices), costs=(costs or grown_costs(job.batch),), **fields)
