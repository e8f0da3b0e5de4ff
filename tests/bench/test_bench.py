"""`collective bench`: exact inputs, real processes, the columns; wrong flags."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench.data import BLOCK_ELEMENTS, DTYPES, REDUCTIONS, contribution, expected, wrong_elements
from meshwright.bench.measure import RATES
from meshwright.bench.operations import make_case
from meshwright.bench.start import rows_of
from meshwright.bench.worker import Described
from meshwright.cli import main
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.errors import RunError, UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.rank_code import form_of


@given(
    seed=st.integers(0, 99), ranks=st.integers(1, 9), first=st.integers(0, 10_000), count=st.integers(1, 50), dtype=st.sampled_from(sorted(DTYPES)),
    reduction=st.sampled_from(REDUCTIONS),
)  # fmt: skip
def test_results_are_exact_in_every_type_and_order(seed: int, ranks: int, first: int, count: int, dtype: str, reduction: str) -> None:
    kind = DTYPES[dtype]
    if reduction == "avg" and not kind.is_floating_point:
        return
    rows = [contribution(seed, r, ranks, first, count, kind, reduction) for r in range(ranks)]
    combine = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[reduction]
    for order in (rows, rows[::-1]):
        total = order[0].clone()
        for row in order[1:]:
            total = combine(total, row)
        if reduction == "avg":
            total = total / ranks
        assert wrong_elements(total, expected(seed, ranks, first, count, kind, reduction)) == 0
    halves = [contribution(seed, 0, ranks, first + a, b, kind, reduction) for a, b in ((0, count // 2), (count // 2, count - count // 2))]
    assert torch.equal(torch.cat(halves), rows[0]), "any slice can be made anywhere"


def test_wrong_elements_are_counted() -> None:
    want = expected(0, 4, 0, 100, torch.float32, "sum")
    broken = want.clone()
    broken[[3, 50, 99]] += 1
    assert wrong_elements(broken, want) == 3
    long = expected(0, 4, 5, 2 * BLOCK_ELEMENTS + 7, torch.float32, "avg")
    for first in (0, BLOCK_ELEMENTS - 3, 2 * BLOCK_ELEMENTS - 3):
        assert torch.equal(long[first : first + 10], expected(0, 4, 5 + first, 10, torch.float32, "avg")), "however it is cut"


@pytest.mark.real
@pytest.mark.timeout(280)
def test_two_processes_and_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ranks", "2", "-b", "4KiB", "-e", "64KiB", "-f", "16", "-n", "2", "-w", "1", "--fabric", "laptop:2", "--no-builtin", "--json"]
    assert main(["collective", "bench", "reduce-scatter", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.collective-bench" and document["sizes"] == [4096, 65536]
    rows = {(r["backend"], r["size_bytes"]): r for r in document["rows"]}
    assert set(rows) == {(b, s) for b in ("meshwright", "gloo") for s in (4096, 65536)}
    for row in rows.values():
        for form in ("out_of_place", "in_place"):
            assert row[form]["wrong"] == 0 and row[form]["least_s"] <= row[form]["time_s"] <= row[form]["most_s"]
            assert row[form]["busbw_Bps"] == pytest.approx(row[form]["algbw_Bps"] / 2)
    planned = rows["meshwright", 65536]
    assert planned["ran"] and planned["simulated_s"] > 0 and planned["bound_s"] > 0
    assert rows["meshwright", 4096]["ran"].startswith("below")


@pytest.mark.real
@pytest.mark.timeout(280)
def test_the_table_and_an_operation_without_an_in_place_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "bench", "all-to-all", "--ranks", "2", "-b", "1KiB", "-e", "1KiB", "-n", "1", "-w", "0", "-d", "half"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "#wrong" in lines[2] and len([x for x in lines if not x.startswith("#")]) == 2
    assert all(" half " in x and "N/A" not in x and " - " in x for x in lines if not x.startswith("#"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["all-sum"], "no operation"), (["all-reduce", "-d", "float128"], "no type"), (["all-reduce", "-o", "median"], "no reduction"),
        (["all-reduce", "-f", "1"], "-f"), (["all-reduce", "-n", "0"], "-n"), (["all-reduce", "-b", "2MiB", "-e", "1MiB"], "empty"),
        (["all-reduce", "--ranks", "0"], "--ranks"), (["all-reduce", "--ranks", "999"], "at most"), (["all-reduce", "-b", "many"], "-b"),
        (["all-reduce", "--backends", "mpi"], "no backend"), (["all-reduce", "-w", "-1"], "-w"),
    ],
)  # fmt: skip
def test_wrong_flags_are_usage_errors(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "bench", *flags]) == 2
    assert said in capsys.readouterr().err


def test_errors_of_rank_0_come_through() -> None:
    with pytest.raises(RunError, match="no plan at all"):
        rows_of('{"error": {"message": "no plan at all", "where": "", "hint": "", "data": null}}')
    assert rows_of("a warning\n") == []


def test_operations_that_there_are_not() -> None:
    with pytest.raises(UsageError, match="in the bench"):
        make_case("permute", 64, torch.float32, "sum", 0, in_place=True, seed=0)


def test_inputs_of_digests_are_the_same_everywhere_and_uneven() -> None:
    """Made of integers alone; a digest of them is a fixed number on every machine. Half the sums of eight depend on the order."""
    from hashlib import sha256

    import torch

    from meshwright.bench.digest import uneven

    made = {dtype: uneven(1, 2, 1000, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)}
    for dtype, row in made.items():
        assert row.dtype == dtype and bool(torch.isfinite(row.double()).all())
        if dtype != torch.int32:
            assert 0.4 < float((row < 0).float().mean()) < 0.6
    assert sha256(made[torch.float32].numpy().tobytes()).hexdigest()[:16] == "e716442efb8a8f18"
    rows = [uneven(1, r, 4000, torch.float32) for r in range(8)]
    ahead, back = rows[0].clone(), rows[7].clone()
    for r in range(1, 8):
        ahead += rows[r]
        back += rows[7 - r]
    assert float((ahead != back).float().mean()) > 0.5


def test_digests_are_of_sums(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "bench", "all-gather", "--digest"]) == 2
    assert "adds nothing" in capsys.readouterr().err


def test_a_lab_s_times_are_simulated_at_what_its_links_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound stays that of the fabric's rates."""
    fabric = load_fabric("star:4")
    p = CollectiveProblem.on(fabric, "all-reduce", 1 << 22, element_bytes=4)
    chosen = SimpleNamespace(strategy="ring", form=form_of(Ring(rings=1).plan(p, rng=np.random.default_rng(0)).program))
    plans = SimpleNamespace(choose=lambda *_: chosen, fabric=fabric, devices=p.ranks, ranks_per_core=1.0)
    group: Any = SimpleNamespace(engine=SimpleNamespace(plans=plans), rank=lambda: 0)
    said = {}
    for share in (1.0, 0.5):
        monkeypatch.setenv(RATES, json.dumps([int(x.rate_Bps * share) for x in fabric.links]))
        said[share] = Described(group, torch.float32)("all-reduce", 0, 1 << 22)
    monkeypatch.delenv(RATES)
    assert Described(group, torch.float32)("all-reduce", 0, 1 << 22) == said[1.0]
    (_, whole, bound), (_, half, same) = said[1.0], said[0.5]
    assert whole is not None and half is not None and 1.2 * whole < half <= 2 * whole and bound == same
