"""Tables and costs of lookups in files: our forms, the statistics of dlrm_datasets, torchrec's plans, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from meshwright.cost_models.lookups import FEATURES, LookupCosts, Net
from meshwright.errors import FormatError, MissingExtra, Unsupported, UsageError
from meshwright.graph.embeddings import BINS, Shard, Table, Tables, histogram_of, uniform_histogram
from meshwright.io.costs.lookups import read_lookup_costs, write_lookup_costs
from meshwright.io.export.torchrec import torchrec_document
from meshwright.io.model.tables import read_tables, write_tables

OURS = {
    "schema": "meshwright.tables", "version": 1, "name": "two", "batch": 8,
    "tables": [{"name": "a", "rows": 10, "dim": 8, "pooling": 2.5}, {"name": "b", "rows": 5, "dim": 4, "mode": "mean"}],
}  # fmt: skip
STATISTICS = [{"row": 100, "pooling_factor": 0.0, **{f"bin_{k}": 0.0 for k in range(17)}},
              {"row": 2000, "pooling_factor": 3.5, "bin_0": 0.75, "bin_1": 0.25, "dim": 12}]  # fmt: skip


def written(tmp_path, document):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_both_forms_are_read_and_ours_is_written(tmp_path):
    ours = read_tables(written(tmp_path, OURS))
    assert [(t.name, t.rows, t.dim, t.pooling, t.mode) for t in ours.tables] == [("a", 10, 8, 2.5, "sum"), ("b", 5, 4, 1.0, "mean")]
    write_tables(tmp_path / "again.json", ours)
    assert read_tables(tmp_path / "again.json") == ours and read_tables(tmp_path / "again.json", batch=3).batch == 3
    found = read_tables(written(tmp_path, STATISTICS), dim=[64, 32])
    assert [(t.dim, t.rows, t.histogram[:2], t.pooling) for t in found.tables] == [(64, 100, (), 0.0), (12, 2000, (0.75, 0.25), 3.5)]
    assert found.batch == 65_536


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({**OURS, "tables": [{"name": "a", "rows": 10, "dim": 6}]}, "pad it to 8"), ({**OURS, "tables": []}, "must be 1"),
        ({**OURS, "batch": 0}, "a batch of 0"), ({**OURS, "tables": [OURS["tables"][0]] * 2}, "empty or taken"),
        ({**OURS, "tables": [{"name": "a", "rows": 0, "dim": 4}]}, "0 rows"), ({**OURS, "more": 1}, "unknown field"),
        ({**OURS, "tables": [{"name": "a", "rows": 1, "dim": 4, "pooling": -1}]}, "looked up -1"),
        ({**OURS, "tables": [{"name": "a", "rows": 1, "dim": 4, "histogram": [1.0]}]}, "a histogram has 17"),
        (STATISTICS, "give them with --dim"), ([{"row": 3}], "no table's statistics"),
        ([{"row": 3, "pooling_factor": 1, "dim": 4, "pooling_factor_std": 1}], "no table's statistics, with 'pooling_factor_std'"),
        ([{"row": "x", "pooling_factor": 1, "dim": 4}], "no number"),
        ({"schema": "meshwright.tasks", "version": 1}, "meshwright.tasks"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_by_place(tmp_path, document, says):
    with pytest.raises(FormatError, match=says):
        read_tables(written(tmp_path, document))


def test_statistics_of_other_tools(tmp_path):
    """DreamShard's and AutoShard's configs of the same data sets were refused."""
    tables = [{"index": 0, "row": 100, "dim": 16, "pooling_factor": 3, "bin_0": 1.0},
              {"index": 1, "num_embeddings": 50, "embedding_dim": 8, "pooling_factor": 2}]  # fmt: skip
    (tmp_path / "table_configs.json").write_text(json.dumps({"tables": tables}), encoding="utf-8")
    found = read_tables(tmp_path / "table_configs.json", batch=64)
    assert [(t.rows, t.dim, t.pooling, len(t.histogram)) for t in found.tables] == [(100, 16, 3.0, 17), (50, 8, 2.0, 0)]


def test_histograms():
    assert histogram_of([3, 3, 3, 5, 9, 9, 9, 9, 9])[:4] == pytest.approx((1 / 3, 0, 1 / 3, 1 / 3)) and histogram_of([]) == (0.0,) * BINS
    drawn = histogram_of(np.random.default_rng(0).integers(1000, size=3000))
    assert np.abs(np.array(uniform_histogram(1000, 3000)) - drawn).max() < 0.05
    assert uniform_histogram(2, 10**7)[-1] == pytest.approx(1) and sum(uniform_histogram(10**9, 5)) == pytest.approx(1)


def _net(r, *sizes, last_relu=False):
    layers = tuple((r.normal(size=(a, b)), r.normal(size=b)) for a, b in pairwise(sizes))
    return Net(r.normal(size=sizes[0]), np.ones(sizes[0]), layers, last_relu)


def _costs(features=FEATURES):
    r = np.random.default_rng(0)
    return LookupCosts(
        batch=8, floor=(1e-9, 2e-9), overhead_s=1e-6, table=_net(r, features, 5, 3, last_relu=True), device=_net(r, 3, 4, 1),
        forward=_net(r, 4, 5, 2), backward=_net(r, 2, 5, 2), fabric="f", devices=2, machine={"cpu": "x"}, errors={"compute": 0.1},
        ranges={"rows": (1.0, 2.0)},
    )  # fmt: skip


def test_costs_are_written_and_read(tmp_path):
    path, costs = tmp_path / "c.safetensors", _costs()
    write_lookup_costs(path, costs)
    again = read_lookup_costs(path)
    one = [np.array([9.0]), np.array([4.0]), np.array([2.0]), np.array([uniform_histogram(9, 16)])]
    assert np.array_equal(costs.embed(*one), again.embed(*one)) and again.machine == {"cpu": "x"} and again.ranges == {"rows": (1.0, 2.0)}
    columns = np.array([[8.0, 4.0]])
    assert np.array_equal(costs.exchange_s(columns, columns), again.exchange_s(columns, columns))
    first = path.read_bytes()
    write_lookup_costs(path, again)
    assert path.read_bytes() == first


def test_costs_that_do_not_hold_together_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    wrong = {
        "stale": _costs(features=20), "not for 3 devices": replace(_costs(), devices=3), "half of the net": replace(_costs(), device=None),
        "do not fit together": replace(_costs(), device=_net(np.random.default_rng(0), 9, 1)),
        "no number from 0 on": replace(_costs(), floor=(-1.0, 0.0)),
        "no finite numbers": replace(_costs(), backward=Net(np.zeros(2), np.zeros(2), _costs().backward.layers)),
    }  # fmt: skip
    for says, costs in wrong.items():
        write_lookup_costs(path, costs)
        with pytest.raises(FormatError, match=says):
            read_lookup_costs(path)
    path.write_bytes(b"nothing")
    with pytest.raises(FormatError, match="no safetensors file"):
        read_lookup_costs(path)
    from safetensors.numpy import save

    for head, says in (({}, "holds 'no costs'"), ({"schema": "meshwright.lookup-costs", "version": 1, "facts": {}}, "facts"), (3, "no safetensors")):
        path.write_bytes(save({"x": np.zeros(1)}, {"meshwright": json.dumps(head)}))
        with pytest.raises(FormatError, match=says):
            read_lookup_costs(path)
    with pytest.raises(UsageError):
        read_lookup_costs(tmp_path / "none")


TABLES = Tables(tables=(Table(name="sparse.embedding_bags.a", rows=10, dim=8), Table(name="b", rows=5, dim=4)), batch=4)
SHARDS = [
    Shard(table="sparse.embedding_bags.a", device="x", rows=(0, 10), columns=(0, 4)),
    Shard(table="sparse.embedding_bags.a", device="y", rows=(0, 10), columns=(4, 8)),
    Shard(table="b", device="y", rows=(0, 5), columns=(0, 4)),
]


def test_a_plan_in_torchrecs_words():
    plan = torchrec_document(TABLES, SHARDS, ("x", "y"))["plan"]
    assert plan["sparse"]["a"]["sharding_type"] == "column_wise" and plan[""]["b"]["ranks"] == [1]
    assert plan["sparse"]["a"]["sharding_spec"]["shards"][1] == {"shard_offsets": [0, 4], "shard_sizes": [10, 4], "placement": "rank:1/cpu"}
    rows = [Shard(table="b", device=d, rows=r, columns=(0, 4)) for d, r in (("x", (0, 3)), ("y", (3, 5)))]
    assert torchrec_document(TABLES, [*SHARDS[:2], *rows], ("x", "y"))["plan"][""]["b"]["sharding_type"] == "row_wise"
    other = [msgspec.structs.replace(rows[0], rows=(0, 2)), msgspec.structs.replace(rows[1], rows=(2, 5))]
    with pytest.raises(Unsupported, match="table b is cut in rows"):
        torchrec_document(TABLES, [*SHARDS[:2], *other], ("x", "y"))


def test_torchrec_takes_the_plan():
    from meshwright.run.tables.torchrec import sharding_plan

    document = torchrec_document(TABLES, SHARDS, ("x", "y"))
    try:
        import torchrec  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtra, match="torchrec"):
            sharding_plan(document)
        pytest.skip("torchrec is not installed: that its plan is made is tried by hand")
    from torchrec.distributed.types import ShardingPlan

    found = sharding_plan(document)
    assert isinstance(found, ShardingPlan) and found.plan["sparse"]["a"].ranks == [0, 1]
    with pytest.raises(FormatError, match="lacks"):
        sharding_plan({"plan": {"m": {"t": {}}}})
