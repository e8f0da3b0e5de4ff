"""`memory pack`: table in, table with offsets out, the bound named, a capacity that is refused."""

import json
import random

import pytest

from meshwright.cli import main
from meshwright.io.plan.minimalloc_csv import read_buffers_csv


@pytest.fixture
def table(tmp_path):
    rng = random.Random(1)
    rows = [(f"t{i}", a := rng.randrange(60), a + rng.randrange(1, 25), 64 * rng.randrange(1, 40)) for i in range(60)]
    path = tmp_path / "storages.csv"
    path.write_text("id,lower,upper,size\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return path


def test_offsets_are_written_and_no_two_in_use_overlap(table, tmp_path, capsys):
    out = tmp_path / "placed.csv"
    assert main(["memory", "pack", str(table), "-o", str(out), "--json", "--alignment", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    placed = read_buffers_csv(out)
    rows = list(zip(placed.lower, placed.upper, placed.offset_bytes, placed.size_bytes, strict=True))
    assert max(at + size for *_, at, size in rows) == document["arena_bytes"] >= document["bound_bytes"]
    for i, (a, b, at, size) in enumerate(rows):
        for c, d, other, width in rows[:i]:
            assert b <= c or d <= a or at + size <= other or other + width <= at
    alive = max(sum(size for a, b, _, size in rows if a <= moment < b) for moment, *_ in rows)
    assert document["bound_bytes"] == alive and document["check"]["status"] == "ok"
    assert main(["memory", "pack", str(table), "--effort", "0"]) == 0
    said = capsys.readouterr().out
    assert f"bound {alive}: {len(document['clique'])} storages in use together" in said and "no two storages" in said


def test_a_capacity_that_cannot_be_met_is_refused(table, capsys):
    assert main(["memory", "pack", str(table), "--json"]) == 0
    bound = json.loads(capsys.readouterr().out)["bound_bytes"]
    assert main(["memory", "pack", str(table), "--capacity", str(bound - 1)]) == 3
    assert "in use together hold" in capsys.readouterr().err
    assert main(["memory", "pack", str(table), "--capacity", "1GiB", "--effort", "0"]) == 0
    assert main(["memory", "pack", str(table), "--capacity", "a lot"]) == 2
    assert main(["memory", "pack", str(table), "--alignment", "0"]) == 2
