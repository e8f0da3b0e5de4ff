"""Interpolation and loading on made-up tables; the real package's tables where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Cost
from meshwright.errors import FormatError, MissingExtra, UnknownName, UsageError
from meshwright.fabric.fabric import Device, Fabric
from meshwright.graph.graph import GraphValue, OpGraph, OpNode, Parameter, Work
from meshwright.io.costs import perf_tables
from meshwright.io.costs.perf_tables import GemmCurve, NcclCurve, gemm_curves, nccl_curves, parse_system
from meshwright.plan.plan import ParamShard, Segment, TrainingLayout
from meshwright.probe.costs import gpu_tables
from meshwright.probe.costs.gpu_tables import GemmTable, gemm_errors, nccl_errors, table_prices, tables_cost
from meshwright.probe.costs.name import load_cost

HAVE = find_spec("aiconfigurator_core") is not None and find_spec("pyarrow") is not None
needs_package = pytest.mark.skipif(not HAVE, reason="aiconfigurator-core with pyarrow (extra `tables`) is not installed")
PEAK, LINK = 1e15, 450e9
H100 = Device(name="g", memory_bandwidth_Bps=3_350_000_000_000, flops={"bf16": 989_000_000_000_000})


def nccl_columns(rows):
    names = ("op_name", "nccl_dtype", "num_gpus", "message_size", "kernel_source", "latency")
    return {n: np.array([r[i] for r in rows], dtype=object) for i, n in enumerate(names)}


def gemm_columns(rows):
    names = ("kernel_source", "gemm_dtype", "m", "n", "k", "latency")
    return {n: np.array([r[i] for r in rows], dtype=object) for i, n in enumerate(names)}


# ---- loading -----------------------------------------------------------------------------------------------------------
def test_sizes_are_elements_and_latencies_milliseconds():
    rows = [
        ("all_reduce", "half", 8, 268_435_456, "NCCL", 2.11106), ("all_reduce", "half", 8, 1024, "NCCL", 0.0156),
        ("alltoall", "int8", 2, 512, "NCCL", 0.006),
    ]  # fmt: skip
    curves, rejected = nccl_curves(nccl_columns(rows), link_Bps=LINK)
    by_op = {c.op: c for c in curves}
    assert by_op["all-reduce"].sizes.tolist() == [2048, 536_870_912] and by_op["all-reduce"].times_s[1] == pytest.approx(2.11106e-3)
    assert by_op["all-to-all"].sizes.tolist() == [512] and (rejected.rows, rejected.duplicates, rejected.below_bound) == (3, 0, 0)


def test_sources_are_kept_apart_and_duplicates_counted():
    rows = [("all_gather", "half", 2, 1024, source, ms) for source, ms in (("NCCL", 0.02), ("NCCL", 0.03), ("other", 0.01))]
    curves, rejected = nccl_curves(nccl_columns(rows), link_Bps=LINK)
    assert {(c.source, c.times_s[0]) for c in curves} == {("NCCL", 2e-5), ("other", 1e-5)}  # the first row, not the mean
    assert rejected.duplicates == 1 and rejected.spread == pytest.approx(1.5)


def test_rows_faster_than_the_link_are_left_out():
    size = 450_000_000 // 2  # half elements: 450 MB, 1 ms at the link rate
    rows = [
        ("all_reduce", "half", 8, size, "NCCL", 0.99), ("all_reduce", "half", 8, size * 2, "NCCL", 2.01),
        ("all_gather", "half", 2, size, "NCCL", 0.51), ("all_gather", "half", 2, size * 2, "NCCL", 0.98),  # half the bytes come from the peer
    ]  # fmt: skip
    curves, rejected = nccl_curves(nccl_columns(rows), link_Bps=LINK)
    assert rejected.below_bound == 2 and sorted(len(c.sizes) for c in curves) == [1, 1]


@pytest.mark.parametrize("latency", [0.0, -1.0, float("nan"), float("inf")])
def test_rows_without_a_time_are_left_out(latency):
    _, rejected = nccl_curves(nccl_columns([("all_gather", "half", 2, 1024, "NCCL", latency)]), link_Bps=LINK)
    assert rejected.without_time == 1


@pytest.mark.parametrize("row", [("all_gather", "nibble", 2, 1, "NCCL", 1.0), ("gossip", "half", 2, 1, "NCCL", 1.0)])
def test_unknown_names_in_tables(row):
    with pytest.raises(FormatError, match="unknown data type or operation"):
        nccl_curves(nccl_columns([row]), link_Bps=LINK)


def test_products_below_their_flop_bound_are_left_out():
    ms = 2 * 1024**3 / PEAK * 1e3
    rows = [("k", "bfloat16", 1024, 1024, 1024, ms * 0.99), ("k", "bfloat16", 512, 1024, 1024, ms), ("k", "odd", 1024, 1024, 1024, ms * 0.1)]
    curves, rejected = gemm_curves(gemm_columns(rows), flops={"bfloat16": PEAK})
    assert rejected.below_bound == 1 and {(c.dtype, c.n, c.k, *c.m) for c in curves} == {("bfloat16", 1024, 1024, 512.0), ("odd", 1024, 1024, 1024.0)}


SYSTEM = """data_dir: data/x # relative
gpu:
  mem_bw: 3350000000000 # 3350GB/s
  mem_capacity: 85899345920
  bfloat16_tc_flops: 989000000000000 # 989TFLOPS
  mem_empirical_constant_latency: 0.000003
node:
  intra_node_bw: 450000000000  # Byte/s per gpu
misc:
  nccl_version: '2.27.3'
"""


def test_system_description():
    system = parse_system("x", SYSTEM, where="x.yaml")
    assert (system.memory_bandwidth_Bps, system.memory_bytes, system.link_Bps) == (3.35e12, 85899345920, 4.5e11)
    assert system.flops == {"bfloat16": 9.89e14, "int8_wo": 9.89e14, "int4_wo": 9.89e14}
    with pytest.raises(FormatError, match="intra_node_bw is missing"):
        parse_system("x", SYSTEM.replace("intra_node_bw", "other"), where="x.yaml")


# ---- interpolation -----------------------------------------------------------------------------------------------------
def power_table(source="k", axis=(64, 256, 1024, 4096)):
    """time = 1e-15 m^0.9 n^0.8 k^0.7 x 1e3: a plane in log space, which bilinear log interpolation reproduces."""
    m = np.array([1.0, 16.0, 256.0, 4096.0])
    return GemmTable(tuple(GemmCurve(dtype="bfloat16", source=source, n=n, k=k, m=m, times_s=plane(m, n, k)) for n in axis for k in axis))


def plane(m, n, k):
    return 1e-12 * m**0.9 * n**0.8 * k**0.7


PLANE = power_table()


@given(st.floats(1, 4096), st.floats(64, 4096), st.floats(64, 4096))
def test_inside_the_table_a_plane_is_exact(m, n, k):
    assert PLANE.time_s(m, n, k) == pytest.approx(plane(m, n, k), rel=1e-9)


def test_beyond_the_table_time_grows_with_the_work():
    table = power_table()
    assert table.time_s(100, 8192, 256) == pytest.approx(2 * plane(100, 4096, 256))
    assert table.time_s(100, 256, 8192) == pytest.approx(2 * plane(100, 256, 4096))
    assert table.time_s(8192, 256, 256) == pytest.approx(plane(8192, 256, 256))


def test_a_missing_corner_is_scaled_from_its_neighbour():
    full = power_table()
    holey = GemmTable(tuple(c for c in full.curves if (c.n, c.k) != (256, 256)))
    assert 0.3 < holey.time_s(100, 300, 300) / full.time_s(100, 300, 300) < 3
    assert holey.time_s(100, 1024, 1024) == pytest.approx(full.time_s(100, 1024, 1024))


def test_one_shape_only_and_none():
    one = GemmTable(power_table().curves[:1])
    assert one.time_s(16, 64, 64) == pytest.approx(plane(16, 64, 64))
    with pytest.raises(FormatError, match="without rows"):
        GemmTable(()).time_s(1, 1, 1)


def test_errors_by_operation_and_kernel():
    sizes = np.array([4.0**i for i in range(9)])
    curves = [NcclCurve(op=op, dtype="half", gpus=2, source="s", sizes=sizes, times_s=1e-5 + 1e-9 * sizes) for op in ("all-reduce", "all-gather")]
    errors = nccl_errors(curves)
    assert list(errors) == ["all-gather", "all-reduce"] and errors["all-reduce"].points == 4 and errors["all-reduce"].line_median < 1e-9
    found = gemm_errors(power_table().curves)
    assert found["bfloat16 / k"].points == 16 and found["bfloat16 / k"].curve_median < 1e-9 < found["bfloat16 / k"].line_median


# ---- prices of a layout ------------------------------------------------------------------------------------------------
def two_layers(batch=4):
    """x (batch, 1024) -> up (4096) -> relu -> down (1024); flops counted by hand."""
    value = lambda n: (GraphValue(shape=(batch, n), dtype="float32", storage=-1),)  # noqa: E731
    up = Parameter(name="up", shape=(4096, 1024), dtype="float32", size_bytes=2**24)
    down = Parameter(name="down", shape=(1024, 4096), dtype="float32", size_bytes=2**24)
    nodes = (
        OpNode(name="a", target="aten.linear.default", module="", inputs=("input:0", "param:up"), outputs=value(4096)),
        OpNode(name="r", target="aten.relu.default", module="", inputs=("a",), outputs=value(4096)),
        OpNode(name="b", target="aten.linear.default", module="", inputs=("r", "param:down"), outputs=value(1024)),
    )
    return OpGraph(model="m", method="export", batch_size=batch, loss="mse", inputs=value(1024), parameters=(up, down), nodes=nodes)


def layout_of(tensor, microbatch, work, split):
    segment = Segment(key="s0", stage=0, nodes=("a", "r", "b"), reads=(), writes=(), split=split, forward=work, backward=work)
    shards = (ParamShard(param="up", axis=0), ParamShard(param="down", axis=1))
    return TrainingLayout(
        data=1, tensor=tensor, pipeline=1, microbatch_size=microbatch, microbatches=1, global_batch=microbatch, segments=(segment,), shards=shards
    )


@pytest.mark.parametrize(("tensor", "microbatch"), [(1, 4), (2, 4), (1, 8), (4, 2)])
def test_layers_are_priced_in_their_sharded_shapes(tensor, microbatch):
    table, cost = power_table(), Cost(dtype="bf16", evidence="interpolated")
    prices = table_prices(table, two_layers(), layout_of(tensor, microbatch, Work(), tensor > 1), cost, H100)
    hidden, m = 4096 / tensor, microbatch
    t = table.time_s
    assert prices["s0|F"].time_s == pytest.approx(t(m, hidden, 1024) + t(m, 1024, hidden)) and prices["s0|F"].evidence == "interpolated"
    backward = t(m, 1024, hidden) + t(hidden, 1024, m) + t(m, hidden, 1024) + t(1024, hidden, m)
    assert prices["s0|B"].time_s == pytest.approx(backward)


def test_the_rest_is_priced_by_roofline_and_decides_the_evidence():
    work = Work(flops=10**15, bytes_read=10**9, calls=3)
    prices = table_prices(power_table(), two_layers(), layout_of(1, 4, work, False), Cost(dtype="bf16"), H100)
    assert prices["s0|F"].evidence == "assumed" and prices["s0|F"].time_s > 1


def test_a_layout_of_another_graph():
    graph = two_layers()
    lacking = OpGraph(model="m", method="export", batch_size=4, loss="mse", inputs=(), parameters=graph.parameters, nodes=graph.nodes[:1])
    with pytest.raises(UsageError, match="'r' that the graph lacks"):
        table_prices(power_table(), lacking, layout_of(1, 4, Work(), False), Cost(), H100)


# ---- names of costs ----------------------------------------------------------------------------------------------------
GPUS = Fabric(name="box", devices=(H100,))


def test_names_of_costs(tmp_path):
    from meshwright.io.costs.table import write_cost

    roofline = load_cost("roofline", GPUS)
    assert roofline.evidence == roofline.transport.evidence == "assumed" and not roofline.table
    write_cost(Cost(name="mine"), tmp_path / "cost.json")
    assert load_cost(str(tmp_path / "cost.json"), GPUS).name == "mine"
    for spec, match in (("measured", "job"), ("tables:", "needs a system"), ("no/such/file.json", "cannot read")):
        with pytest.raises(UsageError, match=match):
            load_cost(spec, GPUS)
    with pytest.raises(UsageError, match="has processors"):
        load_cost("tables:h100_sxm", Fabric(name="laptop", devices=(Device(name="c", kind="cpu"),)))


def test_missing_package(monkeypatch):
    monkeypatch.setattr(perf_tables, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="aiconfigurator-core") as caught:
        load_cost("tables:h100_sxm", GPUS)
    assert caught.value.hint == "pip install 'meshwright[tables]'"


def test_missing_package_version(monkeypatch):
    monkeypatch.setattr(perf_tables, "PACKAGE", "no-such-package-at-all")
    with pytest.raises(MissingExtra):
        perf_tables.package_version()


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A package folder with descriptions and empty data folders, without pyarrow."""
    systems = tmp_path / "systems"
    (systems / "data/x/comm/nccl/2.9.1").mkdir(parents=True)
    (systems / "data/x/comm/nccl/2.10").mkdir()
    (systems / "x.yaml").write_text(SYSTEM)
    for version in ("2.9.1", "2.10"):
        (systems / f"data/x/comm/nccl/{version}/nccl_perf.parquet").write_bytes(b"not parquet")
    monkeypatch.setattr(perf_tables, "_root", lambda: systems)
    return systems


def test_newest_complete_version_is_read(fake_package, monkeypatch):
    seen = []
    row = [("all_reduce", "half", 2, 1024, "NCCL", 0.01)]

    def columns(path, names):
        seen.append(path.parent.name)
        return nccl_columns([("all_gather", *row[0][1:])] if path.parent.name == "2.10" else row)

    monkeypatch.setattr(perf_tables, "_columns", columns)
    curves, _, version = perf_tables.read_nccl("x")
    assert seen == ["2.10", "2.9.1"] and version == "2.9.1" and curves[0].op == "all-reduce"
    monkeypatch.setattr(perf_tables, "_columns", lambda path, names: nccl_columns([("all_gather", *row[0][1:])]))
    with pytest.raises(UnknownName, match="no complete NCCL table"):
        perf_tables.read_nccl("x")


def test_unknown_system_and_framework(fake_package):
    with pytest.raises(UnknownName, match="'y'") as caught:
        perf_tables.read_system("y")
    assert "x" in caught.value.hint
    with pytest.raises(UnknownName, match="no matrix product table"):
        perf_tables.read_gemm("x", "vllm")
    with pytest.raises(UnknownName, match="no measured matrix products"):
        gpu_tables.gemm_table("x")


def test_spoiled_file_or_missing_pyarrow(fake_package):
    with pytest.raises(FormatError if find_spec("pyarrow") else MissingExtra):
        perf_tables.read_nccl("x")


def test_tables_that_cannot_give_a_cost():
    with pytest.raises(FormatError, match="no large matrix product"):
        gpu_tables._efficiency(GemmTable(power_table().curves[:1]).curves, PEAK)
    with pytest.raises(FormatError, match="no two-GPU all-gather"):
        gpu_tables._transport([], parse_system("x", SYSTEM, where=""))


def test_message_cost_from_a_two_gpu_all_gather():
    """An all-gather of S bytes on two GPUs is one message of S/2 each way: alpha + (1 / rate + extra) S / 2."""
    sizes = np.array([1024.0 * 4**i for i in range(10)])
    curve = NcclCurve(op="all-gather", dtype="half", gpus=2, source="s", sizes=sizes, times_s=6e-6 + sizes / 2 * (1 / LINK + 1e-12))
    found = gpu_tables._transport([curve], parse_system("x", SYSTEM, where=""))
    assert found.per_message_s == pytest.approx(3e-6, rel=1e-3) and found.per_byte_s == pytest.approx(0.5e-12, rel=1e-3)
    assert found.evidence == "interpolated"


# ---- the real tables ---------------------------------------------------------------------------------------------------
@needs_package
@pytest.mark.parametrize(("system", "peak"), [("h100_sxm", 989e12), ("a100_sxm", 312e12)])
def test_real_cost(system, peak):
    cost = tables_cost(system)
    assert 0.5 < cost.flops_efficiency < 1 and cost.default_flops == peak and cost.evidence == cost.transport.evidence == "interpolated"
    assert 1e-6 < cost.transport.per_message_s < 1e-4 and system in cost.source
    assert load_cost(f"tables:{system}", GPUS) == cost


@needs_package
def test_real_tables_interpolate_better_than_a_line():
    curves, rejected, version = perf_tables.read_nccl("h100_sxm")
    assert rejected.rows == 504 and len(curves) == 24 and version
    top = next(c for c in curves if (c.op, c.dtype, c.gpus) == ("all-reduce", "half", 8))
    assert 2 * 7 / 8 * top.sizes[-1] / top.times_s[-1] / 1e9 == pytest.approx(445, rel=0.01)  # bus bandwidth: so sizes are elements
    for op, e in nccl_errors(curves).items():
        assert e.curve_median < 0.08 and e.curve_median < e.line_median, op


@needs_package
def test_real_tables_know_other_types():
    with pytest.raises(UnknownName):
        tables_cost("h100_sxm", dtype="fp64")
    assert tables_cost("h100_sxm", dtype="fp8").default_flops == 1978e12
