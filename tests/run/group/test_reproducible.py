"""Sums with promised bits by the backend, in real processes, and the settings that ask for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_group import run_ranks

from meshwright.cli import main
from meshwright.drive.plans import read_plan
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.run.executor.collective import run_collective
from meshwright.run.group.bits import BitsRecord, first_difference
from meshwright.run.group.integers import exponents, from_integers, is_finite, to_integers
from meshwright.run.group.plans import GroupPlans
from meshwright.run.group.settings import Settings, settings_from

HERE = Path(__file__).parent


@pytest.mark.real
@pytest.mark.timeout(280)
def test_folds_and_exact_sums_of_everything_that_torch_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three ranks: a tree with a tail; with and without a fabric. Then the doctor names where the fold and gloo's ring part."""
    done = run_ranks(3, [str(HERE / "reproducible_rank.py"), "none", "two-islands"], BITS=str(tmp_path))
    assert [code for code, _ in done] == [0] * 3, "\n".join(text[-3000:] for code, text in done if code)
    assert '{"ok": true}' in done[0][1]
    assert len(list(tmp_path.glob("*/world/*.safetensors"))) == 2 * 4 * 3
    assert main(["run", "doctor", "--bits", str(tmp_path / "tree"), str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "world, sum 2 (all-reduce sum): element" in said and "fold node [0, 3) of 3" in said
    assert "the second run's result is not their fold" in said
    assert main(["run", "doctor", "--bits", str(tmp_path / "tree"), str(tmp_path / "tree"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared"] == 4


@pytest.mark.parametrize("also", [{"MESHWRIGHT_TUNE": "2"}, {"MESHWRIGHT_SMALL": "1"}, {"MESHWRIGHT_FABRIC": "probe"}])
def test_settings_that_change_bits_from_call_to_call_are_refused(also: dict[str, str]) -> None:
    with pytest.raises(UsageError) as refused:
        settings_from({"MESHWRIGHT_REPRODUCIBLE": "run", **also})
    assert refused.value.where in also and refused.value.hint
    with pytest.raises(UsageError, match="no level"):
        settings_from({"MESHWRIGHT_REPRODUCIBLE": "bits"})
    assert settings_from({"MESHWRIGHT_REPRODUCIBLE": "tree", "MESHWRIGHT_FABRIC": "probe"}).reproducible == "tree"


def test_plans_of_exact_sums_run_on_integers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    command = ["collective", "plan", "all-reduce", "--fabric", "laptop:2", "--size", "4KiB", "--strategy", "ring", "-o", path]
    assert main([*command, "--reproducible", "exact"]) == 0
    assert "exact sums" in capsys.readouterr().out
    with pytest.raises(Unsupported, match="integers of exact sums"):
        GroupPlans(Settings(plans=(path,)), None, 0, 2, devices=(), fabric=None, timeout_s=1.0)
    GroupPlans(Settings(plans=(path,), reproducible="exact"), None, 0, 2, devices=(), fabric=None, timeout_s=1.0)
    program = read_plan(path).main
    with pytest.raises(Unsupported, match=r"not torch\.float32"):
        run_collective(program, 0, {0: torch.zeros(2048)}, None)  # type: ignore[arg-type]
    for wrong in ("1,2,x", "0,0"):
        assert main([*command, "--reproducible", "tree", "--numbers", wrong]) == 2
    assert main([*command, "--reproducible", "tree"]) == 2, "a ring is no fold"
    assert "fold-tree" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_integers_are_elements_where_a_block_is_near_its_largest(dtype: torch.dtype) -> None:
    """One rank's numbers come back; those of unlike size within the quantum; infinities are told."""
    rows = (torch.randn(2, 700, generator=torch.Generator().manual_seed(3)) + 2).to(dtype)
    rows[1, 256:512] = 0
    coded = exponents(rows)
    assert is_finite(coded) and len(coded.exponent) == 6
    back = from_integers(to_integers(rows, coded, 8), coded, 8)
    assert torch.equal(back, rows) if dtype != torch.float64 else torch.allclose(back, rows, rtol=0, atol=2.0**-56)
    one = from_integers(to_integers(rows, coded, 8).view(2, -1)[1], coded, 8, row=1)
    assert torch.equal(one, back[1:])
    for bad in (float("inf"), float("-inf"), float("nan")):
        rows[0, 3] = bad
        assert not is_finite(exponents(rows))
    tops = torch.tensor([[torch.finfo(dtype).max] * 2 + [torch.finfo(dtype).tiny]], dtype=dtype)
    coded = exponents(tops)
    assert torch.equal(from_integers(to_integers(tops, coded, 2), coded, 2)[:, :2], tops[:, :2])


def recorded(folder: Path, rows: list[torch.Tensor], op: str = "all-reduce", result: torch.Tensor | None = None) -> Path:
    """A record of one sum of these contributions, by their fold unless the result is given."""
    nodes = list(rows)
    while len(nodes) > 1:
        nodes = [nodes[i] + nodes[i + 1] if i + 1 < len(nodes) else nodes[i] for i in range(0, len(nodes), 2)]
    for rank, row in enumerate(rows):
        record = BitsRecord.of(str(folder), tuple(range(len(rows))), rank, len(rows))
        record.begin(op, "sum", row, lambda: nodes[0] if result is None else result)()
    return folder


def test_the_doctor_names_the_first_fold_node(tmp_path: Path) -> None:
    rows = [torch.randn(40, generator=torch.Generator().manual_seed(r)) for r in range(8)]
    whole = recorded(tmp_path / "whole", rows)
    other = [row.clone() for row in rows]
    other[5][7] = other[5][7].nextafter(torch.tensor(9.0)) * 3
    found, compared = first_difference(whole, recorded(tmp_path / "leaf", other))
    assert found is not None and compared == 1
    assert (found.element, found.elements, found.node, found.of) == (7, 1, (5, 6), 8) and "before anything is added" in found.why
    # the same micro-batches on two ranks, which fold four each: the first node that both have
    halves = [torch.stack(rows[i : i + 4]) for i in (0, 4)]
    two = [(h[0] + h[1]) + (h[2] + h[3]) for h in halves]
    assert first_difference(whole, recorded(tmp_path / "two", two)) == (None, 1)
    turned = [two[0], ((halves[1][0] + halves[1][2]) + halves[1][1]) + halves[1][3]]
    found, _ = first_difference(whole, recorded(tmp_path / "turned", turned))
    assert found is not None and found.node == (1, 2) and found.of == 2
    found, _ = first_difference(whole, recorded(tmp_path / "three", rows[:3]))
    assert found is not None and "no nodes in common" in found.line()
    found, _ = first_difference(whole, recorded(tmp_path / "op", rows, op="reduce"))
    assert found is not None and "the other run makes reduce sum" in found.line()


def test_records_that_are_none_are_refused(tmp_path: Path) -> None:
    rows = [torch.ones(4), torch.ones(4)]
    good = recorded(tmp_path / "good", rows)
    for wrong in (tmp_path / "missing", tmp_path):
        with pytest.raises((UsageError, FormatError)):
            first_difference(good, wrong)
    bad = recorded(tmp_path / "bad", rows)
    next(bad.glob("*/*0of2*")).write_bytes(b"not tensors at all")
    with pytest.raises(FormatError):
        first_difference(good, bad)
    (tmp_path / "names" / "world").mkdir(parents=True)
    (tmp_path / "names" / "world" / "x.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="no part of a record"):
        first_difference(good, tmp_path / "names")
