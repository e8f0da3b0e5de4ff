"""The soaks themselves: they reach every reader, what they draw is the same again, they find nothing in a short run, and they tell mistakes."""

from __future__ import annotations

import ast
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import meshwright.io
from meshwright.check import check_plan
from meshwright.errors import FormatError
from meshwright.io.costs.perf_tables import parse_system
from meshwright.io.fabric.imported import Source, import_fabric
from meshwright.io.plan.plan import plan_from_bytes
from meshwright.testing.soak import soak
from meshwright.testing.soak.damage import DAMAGE
from meshwright.testing.soak.files import READERS, seeds
from meshwright.testing.soak.readers import judged_file
from meshwright.testing.soak.traces import DRESSES, counted, drawn_trace

# Not readers of an outside file: parts of one, tables of an installed package, and what calls a reader that is in the list.
PARTS = {
    "quantity": {"parse_rate_Bps", "parse_size_bytes", "parse_flops", "parse_time_s"}, "protobuf": {"read_varint"},
    "strict_json": {"read_at_most", "read_text", "read_document", "read_versioned"}, "xml_reader": {"read_xml", "parse_xml"},
    "perf_tables": {"read_system", "read_nccl", "read_gemm"}, "imported": {"read_source"}, "toml": {"parse_fabric_toml"},
    "plan": {"read_plan", "read_program"}, "minimalloc_csv": {"parse_buffers_csv"}, "profile_layers": {"parse_profile_file"},
    "kfac_csv": {"parse_kfac_csv"}, "small_toml": {"read_table"},
    "transformer_toml": {"parse_transformer_toml"}, "mscclpp_json": {"parse_mscclpp"}, "xml": {"parse_msccl"}, "tuner": {"parse_tuner"},
    "graph": {"parse_nccl_graph"}, "topology": {"parse_nccl_topology"}, "et": {"read_chakra_set"}, "read": {"read_events"},
    "job_folder": {"read_started", "read_ended"},  # notes of a launcher, by server
}  # fmt: skip


def test_every_reader_is_in_the_list() -> None:
    reached = {(module.rpartition(".")[2], function) for module, function, _, _ in READERS.values()}
    for path in Path(meshwright.io.__path__[0]).rglob("*.py"):
        found = {x.name for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef) and x.name.startswith(("read_", "parse_"))}
        missing = {name for name in found if (path.stem, name) not in reached} - PARTS.get(path.stem, set())
        assert not missing, (path.name, missing)


@pytest.mark.parametrize("reader, name, data", [
    ("Slurm jobs", "jobs.txt", b"JobId=1 Nodes=" + b"n" * 400_000 + b"[ GRES="), ("queue", "q.json", b'\\"' * 400_000),
    ("cluster", "topo.txt", b"\n" * 800_000), ("network job", "job.toml", b"a." * 400_000 + b"b = 1"),
    ("pipeline table", "p.csv", b"1" * 800_000 + b"F0"),
])  # fmt: skip
def test_what_repeats_one_token_is_not_looked_at_again_for_each(reader: str, name: str, data: bytes, tmp_path: Path) -> None:
    """Before, each took from half a minute to hours."""
    (tmp_path / name).write_bytes(data)
    assert judged_file(reader, tmp_path / name) == ("refused", "")


@pytest.fixture(scope="module")
def files() -> list[tuple[str, str, bytes]]:
    pytest.importorskip("torch")
    return seeds()


def test_seeds_are_read_by_their_readers(files: list[tuple[str, str, bytes]], tmp_path: Path) -> None:
    assert {reader for reader, _, _ in files} == set(READERS)
    for reader, name, data in files:
        (tmp_path / name).write_bytes(data)
        assert judged_file(reader, tmp_path / name) == ("read", ""), name


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_the_same_again(name: str, files: list[tuple[str, str, bytes]]) -> None:
    for _, _, data in files[::9]:
        assert DAMAGE[name](data, np.random.default_rng(5)) == DAMAGE[name](data, np.random.default_rng(5))


def test_a_short_soak_of_readers_finds_nothing() -> None:
    found = soak("readers", minutes=5, count=40, seed=9)
    assert found["ok"] and found["cases"] == 40 and found["sums"]["bytes"] and set(found["outcomes"]) <= {"read", "refused"}, found["told"]


def test_what_a_reader_gives_can_be_written(tmp_path: Path) -> None:
    """A group of a control character, a name that is a number, and a figure beyond a document's were imported, and then not read again."""
    for text in ("device a is\x07and\ndevice b\na b 1GB/s\n", f"device a {'x' * 200}\ndevice b\na b 1GB/s\n"):
        with pytest.raises(FormatError, match="group"):
            import_fabric([Source("net.edges", text.encode())])
    with pytest.raises(FormatError, match="no finite number"):
        parse_system("x", "gpu:\n  mem_bw: 1\n  mem_capacity: 1e999\nnode:\n  intra_node_bw: 1\n", where="x.yaml")


def test_mangled_work_in_idle_time_is_wrong(files: list[tuple[str, str, bytes]]) -> None:
    plan = plan_from_bytes(next(data for _, name, data in files if name == "filled.json"))
    for key in ("items", "placements"):
        fill: dict[str, Any] = msgspec.to_builtins(plan.job["fill"])
        del fill[key]
        assert "job.fill" in str(check_plan(replace(plan, job={**plan.job, "fill": fill})).findings)


def test_a_short_soak_of_traces_finds_nothing() -> None:
    found = soak("traces", minutes=5, count=60, seed=4)
    assert found["ok"] and found["outcomes"] == {"same": 60}, found["told"]


def test_counting_a_trace_by_hand() -> None:
    drawn = drawn_trace(np.random.default_rng(0))
    want = counted(drawn.readable)
    assert len(want["rows"]) == len(drawn.events) and json.loads(drawn.text())["traceEvents"]
    for dress in DRESSES.values():
        dressed = dress(drawn, np.random.default_rng(1))
        assert dressed.text() == dress(drawn, np.random.default_rng(1)).text()
        assert gzip.decompress(gzip.compress(dressed.text().encode())) and len(dressed.readable) == len(drawn.events) - len(dressed.lost)


def test_sequences_of_calls_are_the_same_at_all_ranks() -> None:
    pytest.importorskip("torch")
    from meshwright.testing.soak.calls import DIVERGENCES, drawn

    found = [drawn(seed, 3) for seed in range(200)]
    assert found == [drawn(seed, 3) for seed in range(200)] and {s.how for s in found} == {"", *DIVERGENCES}
    for s in found:
        others = {tuple(s.calls(rank)) for rank in range(3) if rank != s.odd}
        assert len(others) == 1 and (s.odd < 0 or tuple(s.calls(s.odd)) not in others)
    assert drawn(831137214, 2).odd < 0  # splits that differ in what a rank sends itself only: no other rank sees that
