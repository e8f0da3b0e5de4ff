"""`train plan --cost tables:SYSTEM`: operators are priced from the table, holes are bridged, and what cannot be read is said, not guessed."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.drive.plans import cost_of
from meshwright.errors import FormatError
from meshwright.fabric.fabric import Device, Fabric
from meshwright.io.costs import perf_tables
from meshwright.io.limits import MaxBytes
from meshwright.io.plan.plan import read_plan
from meshwright.probe.costs.name import load_cost, load_prices

TEXT = "gpu:\n  mem_bw: 3350000000000\n  mem_capacity: 80000000000\n  bfloat16_tc_flops: 989000000000000\nnode:\n  intra_node_bw: 450000000000\n"
WORDS = [
    "train", "plan", "--loss", "mse", "--fabric", "dgx-h100:1", "--devices", "0-1", "--global-batch", "64", "--dp", "2", "--tp", "1", "--pp", "1",
    "--microbatch", "32", "--recompute", "none", "--json",
]  # fmt: skip
MODEL = """
import torch
from torch import nn


def two():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)), (torch.randn(8, 256), torch.randn(8, 256))
"""
SIDES = (16, 64, 256, 1024, 4096)


def products(slower=1.0, missing=()):
    rows = []
    for n in SIDES:
        for k in SIDES:
            for m in (1, 16, 256, 4096, 65536):
                if (n, k) not in missing:
                    rows.append(("kernel", "bfloat16", m, n, k, slower * (5e-3 + 2e3 * m * n * k / 5e14)))
    return {c: np.array([r[i] for r in rows], dtype=object) for i, c in enumerate(("kernel_source", "gemm_dtype", "m", "n", "k", "latency"))}


def collectives():
    rows = [(op, "half", 2, 1024 * 4**i, "NCCL", 0.01 + 1024 * 4**i * 4e-9) for op in ("all_reduce", "all_gather") for i in range(8)]
    names = ("op_name", "nccl_dtype", "num_gpus", "message_size", "kernel_source", "latency")
    return {c: np.array([r[i] for r in rows], dtype=object) for i, c in enumerate(names)}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of made-up tables; returns what chooses the products."""
    systems = tmp_path / "systems"
    for part in ("gemm/vllm/1.0/gemm_perf", "comm/nccl/2.9/nccl_perf"):
        path = systems / f"data/h100_sxm/{part}.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    (systems / "h100_sxm.yaml").write_text(TEXT)
    chosen = {"gemm": products()}
    monkeypatch.setattr(perf_tables, "_root", lambda: systems)
    monkeypatch.setattr("meshwright.probe.costs.gpu_tables.package_version", lambda: "0.12")
    monkeypatch.setattr(perf_tables, "_columns", lambda path, names: chosen["gemm"] if path.name.startswith("gemm") else collectives())
    return chosen


def planned(tmp_path, capsys, *more):
    out, model = tmp_path / "plan.json", tmp_path / "layers.py"
    model.write_text(MODEL)
    code = main([*WORDS, "--model", f"{model}:two", "-o", str(out), "--cost", "tables:h100_sxm", *more])
    text = capsys.readouterr()
    return code, (cost_of(read_plan(out)) if code == 0 else None), text


def test_operators_are_priced_from_the_table(package, tmp_path, capsys):
    code, cost, text = planned(tmp_path, capsys)
    assert code == 0 and "interpolated" in {p.evidence for p in cost.table.values()} and "vllm 1.0 (kernel)" in cost.source
    package["gemm"] = products(slower=3.0)
    code, slow, later = planned(tmp_path, capsys)
    assert code == 0
    whole, slower = (sum(p.time_s for p in c.table.values()) for c in (cost, slow))  # the plans may cut the model differently
    assert slower > 1.9 * whole
    assert json.loads(later.out)["time_s"] > 1.5 * json.loads(text.out)["time_s"]


def test_a_table_with_missing_entries(package, tmp_path, capsys):
    _, cost, _ = planned(tmp_path, capsys)
    package["gemm"] = products(missing={(1024, 256), (256, 1024), (64, 256)})
    code, holey, _ = planned(tmp_path, capsys)
    assert code == 0 and set(holey.table) == set(cost.table)
    assert all(0.3 < p.time_s / cost.table[k].time_s < 3 for k, p in holey.table.items())


@pytest.mark.parametrize(
    ("cost", "said"), [("tables:h1000", "no measured tables for 'h1000'"), ("tables:h100_sxm:fp64", "fp64"), ("tables:", "needs a system")]
)
def test_unknown_systems_and_types(package, tmp_path, capsys, cost, said):
    code, _, text = planned(tmp_path, capsys, "--cost", cost)
    assert code == 2 and said in text.out + text.err


def test_a_table_that_cannot_be_read(package, tmp_path, capsys, monkeypatch):
    def broken(path, names):
        raise FormatError("not a table of measurements", where=str(path))

    monkeypatch.setattr(perf_tables, "_columns", broken)
    code, _, text = planned(tmp_path, capsys)
    assert code != 0 and "not a table of measurements" in text.out + text.err and not (tmp_path / "plan.json").exists()


def test_files_of_senseless_size(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    with path.open("wb") as f:
        f.truncate(MaxBytes.PERF_TABLE + 1)
    with pytest.raises(FormatError, match="more than the 268,435,456"):
        perf_tables._columns(path, ("m",))
    (tmp_path / "data/x").mkdir(parents=True)
    (tmp_path / "x.yaml").write_text("#" * (MaxBytes.PERF_SYSTEM + 1))
    monkeypatch.setattr(perf_tables, "_root", lambda: tmp_path)
    with pytest.raises(FormatError, match="more than the 1,048,576"):
        perf_tables.read_system("x")


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow (extra `tables`) is not installed")
def test_files_of_too_many_rows(tmp_path, monkeypatch):
    from pyarrow import parquet, table

    parquet.write_table(table({"m": list(range(100))}), tmp_path / "x.parquet")
    monkeypatch.setattr(perf_tables, "MAX_ROWS", 99)
    with pytest.raises(FormatError, match="100 rows are more than the 99"):
        perf_tables._columns(tmp_path / "x.parquet", ("m",))


def test_prices_are_of_one_kind_of_device(package):
    one = Device(name="a", flops={"bf16": 989_000_000_000_000})
    box = Fabric(name="box", devices=(one,))
    cost = load_cost("tables:h100_sxm", box)
    assert load_prices("tables:h100_sxm", cost, box) is not None and load_prices("roofline", cost, box) is None
    mixed = Fabric(name="mixed", devices=(one, Device(name="b", flops={"bf16": 312_000_000_000_000})))
    assert load_prices("tables:h100_sxm", cost, mixed) is None
