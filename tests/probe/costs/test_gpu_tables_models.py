"""The protocol on made-up tables: held-back rows are unseen, errors are those of the rows, and the real tables where they are installed."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from meshwright.cost_models.collectives import CollectiveModel
from meshwright.cost_models.products import GpuPeaks, ProductModel
from meshwright.errors import FormatError, UnknownName
from meshwright.io.costs import perf_tables
from meshwright.io.costs.perf_tables import GemmCurve, NcclCurve, System
from meshwright.probe.costs import gpu_tables_models as models
from meshwright.probe.costs.gpu_tables import GemmTable
from meshwright.probe.costs.gpu_tables_models import NcclTable, TableErrors, gemm_table_errors, gpu_peaks, nccl_table_errors

HAVE = find_spec("aiconfigurator_core") is not None and find_spec("pyarrow") is not None
needs_package = pytest.mark.skipif(not HAVE, reason="aiconfigurator-core with pyarrow (extra `tables`) is not installed")
LINK = 450e9
H100 = System(name="h100_sxm", memory_bandwidth_Bps=3.35e12, memory_bytes=80 << 30, link_Bps=LINK, flops={"bfloat16": 989e12})
SIZES = 2.0 ** np.arange(9, 30)
M = np.array([1, 2, 4, 8, 16, 32, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 2048, 4096, 8192], float)


def nccl(spoil=None):
    truth = CollectiveModel(link_Bps=LINK, numbers=(5.0, 0.8, 6.0, 0.9, 0.78, 0.9, 8.0, 1.1))
    curves = []
    for op in ("all-gather", "all-reduce", "all-to-all"):
        for g in (2, 8):
            times = truth.time_s(op, SIZES, g)
            curves.append(NcclCurve(op=op, dtype="half", gpus=g, source="NCCL", sizes=SIZES, times_s=times if spoil is None else times * spoil))
    return curves


def gemm(spoil=None):
    truth = ProductModel(peaks=gpu_peaks(H100, "bfloat16"), numbers=(5.0, 0.6, 1.0, 0.5, 0.85, 5.0, 30.0), tile=128)
    factor = np.ones(len(M)) if spoil is None else spoil
    shapes = [(n, k) for n in (512, 2048, 8192) for k in (512, 2048, 8192)]
    return [GemmCurve(dtype="bfloat16", source="k", n=n, k=k, m=M, times_s=truth.time_s(M, n, k) * factor) for n, k in shapes]


def test_collectives_of_one_law():
    found = nccl_table_errors(nccl(), LINK)
    assert set(found) == {"interpolating", "compact", "largest quarter"}
    assert found["compact"].summary()["median"] < 0.01 < found["compact"].summary()["line_median"]
    assert found["interpolating"].summary()["points"] == 6 * 10 and found["largest quarter"].summary()["points"] == 6 * 6
    assert found["largest quarter"].summary()["median"] < 0.12 < found["largest quarter"].summary()["line_median"]
    assert found["interpolating"].summary()["median"] < 0.05


def test_products_of_one_law():
    (errors,) = gemm_table_errors(gemm(), H100).values()
    assert errors.compact.summary()["median"] < 0.01 and len(errors.numbers) + 1 == 8
    assert errors.interpolating.summary()["p90"] < 0.05 and errors.interpolating.summary()["points"] == 9 * 9
    assert errors.interpolating.summary()["median"] < errors.interpolating.summary()["line_median"]


def test_held_back_rows_change_errors_but_not_models():
    """Doubling every second time leaves what is fitted as it was: the errors become one half."""
    back = np.arange(len(M)) % 2 == 1
    clean, spoiled = (next(iter(gemm_table_errors(gemm(f), H100).values())) for f in (None, np.where(back, 2.0, 1.0)))
    assert clean.numbers == spoiled.numbers and clean.table.choice == spoiled.table.choice
    assert np.array_equal(clean.table.levels, spoiled.table.levels)
    assert spoiled.compact.summary()["median"] == pytest.approx(0.5, abs=0.01)
    back = np.arange(len(SIZES)) % 2 == 1
    found = nccl_table_errors(nccl(np.where(back, 2.0, 1.0)), LINK)
    for name in ("compact", "interpolating"):
        assert found[name].summary()["median"] == pytest.approx(0.5, abs=0.05)


def test_an_even_number_of_sizes_holds_back_the_last():
    assert models._every_second(4).tolist() == [False, True, False, True] and models._every_second(5).tolist() == [False, True, False, True, False]


def test_sources_are_judged_apart():
    other = [GemmCurve(dtype=c.dtype, source="other", n=c.n, k=c.k, m=c.m, times_s=c.times_s * 3) for c in gemm()]
    found = gemm_table_errors([*gemm(), *other], H100)
    assert list(found) == [("bfloat16", "k"), ("bfloat16", "other")] and all(e.compact.summary()["median"] < 0.05 for e in found.values())


def test_what_cannot_be_judged():
    with pytest.raises(FormatError, match="no rows to judge"):
        TableErrors.joined([])
    with pytest.raises(FormatError, match="four sizes or more"):
        nccl_table_errors([NcclCurve(op="all-gather", dtype="half", gpus=2, source="s", sizes=SIZES[:3], times_s=SIZES[:3])], LINK)
    with pytest.raises(UnknownName, match="peak for 'fp64'"):
        gpu_peaks(H100, "fp64")
    with pytest.raises(UnknownName, match="multiprocessors"):
        gpu_peaks(System(name="x", memory_bandwidth_Bps=1.0, memory_bytes=1, link_Bps=1.0, flops={"bfloat16": 1.0}), "bfloat16")


def test_tables_for_use():
    table = NcclTable.of(nccl(), LINK)
    assert table.time_s("all-reduce", SIZES[5], 8) == pytest.approx(nccl()[3].times_s[5])
    truth = CollectiveModel(link_Bps=LINK, numbers=(5.0, 0.8, 6.0, 0.9, 0.78, 0.9, 8.0, 1.1))
    assert table.time_s("all-reduce", 1e8, 4) == pytest.approx(float(truth.time_s("all-reduce", 1e8, 4)), rel=0.05)  # 4 GPUs were not measured
    with pytest.raises(FormatError, match="no curve of 'int8'"):
        NcclTable.of(nccl(), LINK, dtype="int8")


def test_products_beyond_the_table_follow_the_compact_model():
    peaks = gpu_peaks(H100, "bfloat16")
    truth = ProductModel(peaks=peaks, numbers=(5.0, 0.6, 1.0, 0.5, 0.85, 5.0, 30.0), tile=128)
    with_peaks, without = GemmTable(tuple(gemm()), peaks), GemmTable(tuple(gemm()))
    far = float(truth.time_s(64, 16384, 16384))
    assert with_peaks.time_s(64, 16384, 16384) == pytest.approx(far, rel=0.05) and with_peaks.time_s(64, 2048, 2048) > 0
    assert abs(without.time_s(1, 256, 256) / float(truth.time_s(1, 256, 256)) - 1) > 0.5  # n k alone forgets the launch
    assert with_peaks.time_s(1, 256, 256) == pytest.approx(float(truth.time_s(1, 256, 256)), rel=0.05)


def test_a_large_table_is_read_by_the_learned_model():
    """Enough rows: the answer is the learned model's, bounded by the peak; the same question is answered once."""
    peaks = gpu_peaks(H100, "bfloat16")
    truth = ProductModel(peaks=peaks, numbers=(5.0, 0.6, 1.0, 0.5, 0.85, 5.0, 30.0), tile=128)
    sides = (256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
    curves = tuple(GemmCurve(dtype="bfloat16", source="k", n=n, k=k, m=M, times_s=truth.time_s(M, n, k)) for n in sides for k in sides)
    table = GemmTable(curves, peaks)
    assert table.time_s(100, 2048, 3000) == pytest.approx(float(truth.time_s(100, 2048, 3000)), rel=0.1)
    assert table.time_s(100, 2048, 3000) == float(table._learned.time_s(100.0, 2048.0, 3000.0)) and len(table._asked) == 1
    bounded = GemmTable(curves, GpuPeaks(flops=1e9, memory_Bps=3e12, processors=132, weight_bytes=2, input_bytes=2))
    bounded.__dict__["_learned"] = table._learned
    assert bounded.time_s(512, 512, 512) == 2 * 512**3 / 1e9


def test_versions_are_listed_and_read_by_name(tmp_path, monkeypatch):
    systems = tmp_path / "systems"
    for part in ("comm/nccl/2.9.1/nccl_perf", "comm/nccl/2.10/nccl_perf", "gemm/vllm/0.1.0/gemm_perf", "gemm/sglang/0.5/gemm_perf"):
        path = systems / f"data/x/{part}.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    text = "gpu:\n  mem_bw: 1\n  mem_capacity: 1\nnode:\n  intra_node_bw: 4\n"
    (systems / "x.yaml").write_text(text)
    monkeypatch.setattr(perf_tables, "_root", lambda: systems)
    assert perf_tables.nccl_versions("x") == ["2.10", "2.9.1"] and perf_tables.gemm_versions("x") == [("sglang", "0.5"), ("vllm", "0.1.0")]
    names = ("op_name", "nccl_dtype", "num_gpus", "message_size", "kernel_source", "latency")
    row = ("all_gather", "half", 2, 1024, "NCCL", 1e9)
    monkeypatch.setattr(perf_tables, "_columns", lambda path, wanted: {n: np.array([v], dtype=object) for n, v in zip(names, row, strict=True)})
    curves, _, version = perf_tables.read_nccl("x", "2.9.1")
    assert version == "2.9.1" and curves[0].op == "all-gather"
    with pytest.raises(UnknownName, match="no matrix product table"):
        perf_tables.read_gemm("x", "vllm", "9.9")


@needs_package
def test_real_collectives_keep_the_limits():
    for version in perf_tables.nccl_versions("h100_sxm"):
        found = nccl_table_errors(perf_tables.read_nccl("h100_sxm", version)[0], LINK)
        limits = {"interpolating": 0.05 if version == "2.23" else 0.04, "compact": 0.10, "largest quarter": 0.12}
        for name, limit in limits.items():
            assert found[name].summary()["median"] <= limit < found[name].summary()["line_median"] or name == "compact", (version, name)
