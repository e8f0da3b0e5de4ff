"""Table plans that run: cut by columns and by rows, idle devices, empty bags, forward and backward, equal to whole tables in one process."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import UsageError
from meshwright.graph.embeddings import Shard, Table, Tables
from meshwright.run.tables.run import run_tables
from meshwright.run.tables.sharded import ShardedTables

TABLES = Tables(
    tables=(
        Table(name="a", rows=50, dim=8, pooling=2.5), Table(name="b", rows=30, dim=4, pooling=0.3, mode="mean"),
        Table(name="c", rows=40, dim=16, pooling=3, mode="mean"), Table(name="never", rows=5, dim=4, pooling=0),
    ),
    batch=13, element_bytes=8,
)  # fmt: skip
SHARDS = [
    Shard(table=t, device=d, rows=r, columns=c)
    for t, d, r, c in [
        ("a", "x", (0, 50), (0, 4)), ("a", "y", (0, 50), (4, 8)), ("b", "x", (0, 30), (0, 4)), ("c", "x", (0, 10), (0, 16)),
        ("c", "z", (10, 40), (0, 12)), ("c", "y", (10, 40), (12, 16)), ("never", "z", (0, 5), (0, 4)),
    ]
]  # fmt: skip


@pytest.mark.real
def test_cut_tables_train_as_whole_ones():
    found = run_tables(TABLES, SHARDS, ["x", "y", "z", "idle"], dtype="float64", steps=3)
    assert 0 <= found.outputs_apart <= 1e-12 and 0 <= found.weights_apart <= 1e-12 and len(found.step_s) == 3
    # 13 samples: 4, 3, 3, 3 of the ranks; columns 24, 8, 16, 0.
    assert found.sent_bytes == (8 * 24 * 9, 8 * 8 * 10, 8 * 16 * 10, 0)


def test_what_cannot_run_is_refused():
    with pytest.raises(UsageError, match="0 steps"):
        run_tables(TABLES, SHARDS, ["x", "y", "z"], steps=0)
    with pytest.raises(UsageError, match="there is no z"):
        ShardedTables(TABLES, SHARDS, ["x", "y"], rank=0)
    with pytest.raises(UsageError, match="fbgemm cannot look up"):
        ShardedTables(TABLES, SHARDS, ["x", "y", "z"], rank=0, dtype=torch.float64, operator="fbgemm")


def test_features_that_no_table_has_rows_for_are_refused_before_anything_is_sent():
    bags = ShardedTables(TABLES, SHARDS, ["x", "y", "z"], rank=0)
    empty = (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    given = {t.name: empty for t in TABLES.tables}
    wrong = {
        "no indices of table a": {k: v for k, v in given.items() if k != "a"}, r"have \[1, 2\] samples": {**given, "a": (empty[0], empty[1][:2])},
        "table a has 50 rows": {**given, "a": (torch.tensor([50]), torch.tensor([0, 1, 1]))},
        "offsets of table b": {**given, "b": (torch.tensor([1]), torch.tensor([0, 0, 0]))},
    }  # fmt: skip
    for says, features in wrong.items():
        with pytest.raises(UsageError, match=says):
            bags(features)


@pytest.mark.real
def test_fbgemm_runs_the_same_plan():
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="fbgemm is not here"):
            ShardedTables(TABLES, SHARDS, ["x", "y", "z"], rank=0, operator="fbgemm")
        pytest.skip("fbgemm is not installed: the same run by its operator is tried by hand")
    found = run_tables(TABLES, SHARDS, ["x", "y", "z", "idle"], steps=2, operator="fbgemm")
    assert max(found.outputs_apart, found.weights_apart) <= 1e-5


@pytest.mark.real
def test_what_a_rank_refuses_is_what_the_run_raises():
    wrong = [*SHARDS[:-1], Shard(table="gone", device="z", rows=(0, 5), columns=(0, 4))]
    with pytest.raises(UsageError, match="there is no gone"):
        run_tables(TABLES, wrong, ["x", "y", "z"], steps=1, verify=False)
