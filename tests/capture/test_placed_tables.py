"""Models with placed tables compute what the owner's did, eagerly and captured; what cannot be placed is named."""

from __future__ import annotations

import gzip
import json
import sys
import types

import msgspec
import pytest
import torch
from torch import nn

from meshwright.capture.embedding_tables import placeable_tables, tables_of_module
from meshwright.capture.placed_tables import place_tables, read_placed, split_name, together, whole_tables
from meshwright.errors import CaptureError, FormatError, UnknownName, Unsupported, UsageError
from meshwright.graph.embeddings import Shard, Table, Tables
from meshwright.kernels.bags import bag_ids, table_lookups, table_rows, table_sums
from meshwright.plan.packing import packing_of


class Net(nn.Module):
    def __init__(self, twice=False, chained=False, **options):
        super().__init__()
        self.a, self.b, self.c = nn.EmbeddingBag(20, 8, mode="sum", **options), nn.EmbeddingBag(9, 4, mode="mean"), nn.Embedding(6, 4)
        self.twice, self.chained = twice, chained

    def forward(self, ids):
        a = self.a(ids[:, :3])
        second = self.a(ids[:, 1:4]) if self.twice else a
        chosen = (a.sum(1) > 0).long() if self.chained else ids[:, 4] % 6
        return torch.cat([a, second, self.b(ids[:, 2:4] % 9), self.c(chosen)], 1)


class Places(nn.Module):
    """As many positions as samples: ids of one dimension, but none of a sample."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(4, 4)

    def forward(self, x):
        return x.float() @ self.places(torch.arange(x.shape[1]))


def ids():
    return torch.randint(20, (7, 5), generator=torch.Generator().manual_seed(0))


def tables(*names):
    sizes = {"a": (20, 8, "sum"), "b": (9, 4, "mean"), "c": (6, 4, "sum")}
    return Tables(tables=tuple(Table(name=n, rows=sizes[n][0], dim=sizes[n][1], mode=sizes[n][2], most=3) for n in names), batch=7)


SHARDS = [
    Shard(table="a", device="x", rows=(0, 12), columns=(0, 4)), Shard(table="a", device="y", rows=(12, 20), columns=(0, 4)),
    Shard(table="a", device="y", rows=(0, 20), columns=(4, 8)), Shard(table="b", device="x", rows=(0, 9), columns=(0, 4)),
    Shard(table="c", device="y", rows=(0, 6), columns=(0, 4)),
]  # fmt: skip


def document(**change):
    job = {"tables": msgspec.to_builtins(tables("a", "b", "c")), "shards": msgspec.to_builtins(SHARDS)}
    return {"kind": "tables", "job": job, "placement": ["x", "y"], **change}


@pytest.mark.parametrize("sparse", [False, True])
def test_outputs_gradients_and_states_are_the_owners(sparse):
    """sparse=True says how the owner's gradients are stored: those of the pack are the same numbers."""
    torch.manual_seed(1)
    owner, mine = Net(sparse=sparse).double(), Net(sparse=sparse).double()
    mine.load_state_dict(owner.state_dict())
    place_tables(mine, tables("a", "b", "c"), SHARDS, ["x", "y"])
    weight = torch.randn(7, 24, dtype=torch.float64)
    want, got = owner(ids()), mine(ids())
    assert torch.equal(want, got) and [n for n, _ in mine.named_parameters()] == ["placed_tables.pack"]
    for y in (want, got):
        (y * weight).sum().backward()
    gradients = mine.placed_tables.tables(mine.placed_tables.pack.grad)
    assert all(torch.allclose(gradients[n], p.grad.to_dense(), rtol=1e-13, atol=1e-13) for n, p in owner.named_parameters())
    state = whole_tables(mine, mine.state_dict())
    assert set(state) == set(owner.state_dict()) and all(torch.equal(state[n], x) for n, x in owner.state_dict().items())
    exported = torch.export.export(mine, (ids(),), strict=False)
    assert together(exported.graph) and not together(exported.graph)
    targets = [str(n.target) for n in exported.graph.nodes]
    assert [targets.count(f"meshwright.table_{x}.default") for x in ("ids", "rows", "sums", "bag")] == [1, 1, 1, 0]
    exported.graph_module.recompile()
    assert torch.allclose(exported.module()(ids()), want, rtol=1e-13, atol=1e-13)
    with pytest.raises(UsageError, match="no placed tables"):
        whole_tables(owner, {})


def test_the_operators_are_adjoint_and_parts_know_their_number():
    """Two ranks by hand: each gets the other's blocks, looks up its own part, and blocks go back."""
    numbers = [2, 2, 8, 0, 3, 4, 1, 2, 0, 0, 0, 20, 0, 4, 1, 0, 0, 20, 4, 8, 1, 1, 0, 9, 0, 4]
    packing = packing_of(numbers)
    assert packing.numbers() == numbers and (packing.slots, packing.longest, packing.columns) == (116, 5, 8)
    draw = torch.Generator().manual_seed(2)
    sent = [torch.ops.meshwright.table_ids([torch.randint(20, (5, 3), generator=draw), torch.randint(-1, 9, (5, 2), generator=draw)], numbers)
            for _ in range(2)]  # fmt: skip
    pack = torch.randn(2, packing.slots, dtype=torch.float64, generator=draw)
    came = [torch.stack([sent[s][r] for s in range(2)]) for r in range(2)]
    rows = [table_rows(came[r], pack[r : r + 1], numbers) for r in range(2)]
    for s in range(2):
        got = table_sums(torch.stack([rows[r][s] for r in range(2)]), sent[s], numbers)
        assert torch.allclose(got, table_sums(table_rows(sent[s], pack, numbers), sent[s], numbers))
    alone = torch.stack([torch.zeros_like(sent[1][1]), sent[1][1]])  # of rank 1 when it is measured without the others
    assert torch.equal(table_rows(alone, pack[1:2], numbers)[1], rows[1][1])
    arguments = (sent[0], pack.requires_grad_(), numbers)
    torch.library.opcheck(torch.ops.meshwright.table_rows.default, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.autograd.gradcheck(lambda p: table_sums(table_rows(sent[0], p, numbers), sent[0], numbers), (pack,))


def test_rows_that_are_not_there_and_long_bags_are_refused():
    assert table_lookups(torch.tensor([[0, 3]]), 4, 3, "t").tolist() == [[0, -1]]
    found = bag_ids(torch.tensor([1, 2, 3, 0]), torch.tensor([0, 3, 3]), 0, 3, 3, 4, -1, "t")
    assert found.tolist() == [[1, 2, 3], [-1, -1, -1], [0, -1, -1]]
    assert bag_ids(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]), 0, 2, 1, 4, -1, "t").tolist() == [[-1], [-1]]
    for wrong in ([[0, 4]], [[-1, 0]]):
        with pytest.raises(RuntimeError, match="table t has rows 0 to 3"):
            table_lookups(torch.tensor(wrong), 4, -1, "t")
    with pytest.raises(RuntimeError, match="has 3 lookups, it was placed for 2"):
        bag_ids(torch.tensor([1, 2, 3]), torch.tensor([0]), 0, 1, 2, 4, -1, "t")


def test_what_cannot_be_placed_is_named(tmp_path, monkeypatch):
    tied = Net()
    tied.d = nn.Linear(4, 6, bias=False)
    tied.d.weight = tied.c.weight
    frozen = Net()
    frozen.a.weight.requires_grad_(False)
    cases = [(Net(scale_grad_by_freq=True), "scale_grad_by_freq"), (Net(max_norm=1.0), "max_norm"), (tied, "shares its weight"),
             (frozen, "does not train"), (nn.Sequential(nn.Linear(1, 1)), "no table a")]  # fmt: skip
    for model, told in cases:
        with pytest.raises(UsageError, match=told):
            place_tables(model, tables("a", "b", "c"), SHARDS, ["x", "y"])
    for shards, told in ((SHARDS[1:], "do not tile"), ([*SHARDS, Shard(table="a", device="z", rows=(0, 1), columns=(0, 4))], "not there")):
        with pytest.raises(FormatError, match=told):
            place_tables(Net(), tables("a", "b", "c"), shards, ["x", "y"])
    for model, told in ((Net(twice=True), "looked up twice"), (Net(chained=True), "another table's rows")):
        place_tables(model, tables("a", "b", "c"), SHARDS, ["x", "y"])
        with pytest.raises(Unsupported, match=told):
            together(torch.export.export(model, (ids(),), strict=False).graph)
    placed = Net()
    place_tables(placed, tables("a", "b", "c"), SHARDS, ["x", "y"])
    with pytest.raises(UsageError, match="weights of lookups"):
        placed.a(ids()[:, :3], None, torch.ones(7, 3))
    with pytest.raises(UsageError, match="ids of shape"):
        placed.c(ids())
    module = types.ModuleType("nets_with_tables")
    module.twice = lambda: (Net(twice=True), (ids(), torch.zeros(7, 24)))
    module.positions = lambda: (Places(), (torch.randint(5, (4, 4)), torch.zeros(4, 4)))
    module.none = lambda: (nn.Linear(5, 1), (torch.zeros(7, 5), torch.zeros(7, 1)))
    monkeypatch.setitem(sys.modules, "nets_with_tables", module)
    found, notes = placeable_tables("nets_with_tables:twice", batch=64, state_bytes=8)
    assert [t.name for t in found.tables] == ["b", "c"] and found.batch == 64 and "looked up 2 times" in notes[0]
    for name, told in (("none", ""), ("positions", "not one for each sample")):
        with pytest.raises(CaptureError, match="no embedding tables") as error:
            placeable_tables(f"nets_with_tables:{name}", batch=64, state_bytes=8)
        assert told in error.value.hint
    wide = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 1))
    with pytest.raises(CaptureError, match="has no EmbeddingBag"):
        tables_of_module(wide, (torch.zeros(3, 2, dtype=torch.long),))


def test_files_of_table_plans(tmp_path):
    assert split_name("m.py:f@p.json") == ("m.py:f", "p.json") and split_name("hf:c.json@64") == ("hf:c.json@64", "") == split_name("hf:c.json@64")
    (tmp_path / "p.json").write_text(json.dumps(document()), encoding="utf-8")
    with gzip.open(tmp_path / "p.json.gz", "wt") as file:
        json.dump(document(), file)
    for name in ("p.json", "p.json.gz"):
        found, shards, names = read_placed(str(tmp_path / name))
        assert found == tables("a", "b", "c") and shards == SHARDS and names == ["x", "y"]
    for change, told in (({"kind": "halo"}, "kind 'halo'"), ({"job": {}}, "is no table plan"), ({"placement": 3}, "is no table plan")):
        (tmp_path / "p.json").write_text(json.dumps(document(**change)), encoding="utf-8")
        with pytest.raises(FormatError, match=told):
            read_placed(str(tmp_path / "p.json"))
    packed = (tmp_path / "p.json.gz").read_bytes()
    for name, data in (("n.json", b'{"other": ' + b"[" * 100_000), ("d.json.gz", packed[:20] + bytes(40) + packed[60:])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FormatError, match="is no table plan"):
            read_placed(str(tmp_path / name))
    with pytest.raises(UnknownName, match="no table plan"):
        read_placed(str(tmp_path / "q.json"))
