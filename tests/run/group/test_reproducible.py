"""Sums with promised bits by the backend, in real processes, and the settings that ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_group import run_ranks

from meshwright.errors import UsageError
from meshwright.run.group.integers import exponents, from_integers, is_finite, to_integers
from meshwright.run.group.settings import settings_from

HERE = Path(__file__).parent


@pytest.mark.real
@pytest.mark.timeout(280)
def test_folds_and_exact_sums_of_everything_that_torch_asks_for() -> None:
    """Five ranks: a tree with a tail; with and without a fabric."""
    done = run_ranks(5, [str(HERE / "reproducible_rank.py"), "none", "two-islands:3"])
    assert [code for code, _ in done] == [0] * 5, "\n".join(text[-3000:] for code, text in done if code)
    assert '{"ok": true}' in done[0][1]


@pytest.mark.parametrize("also", [{"MESHWRIGHT_TUNE": "2"}, {"MESHWRIGHT_SMALL": "1"}, {"MESHWRIGHT_FABRIC": "probe"}])
def test_settings_that_change_bits_from_call_to_call_are_refused(also: dict[str, str]) -> None:
    with pytest.raises(UsageError) as refused:
        settings_from({"MESHWRIGHT_REPRODUCIBLE": "run", **also})
    assert refused.value.where in also and refused.value.hint
    with pytest.raises(UsageError, match="no level"):
        settings_from({"MESHWRIGHT_REPRODUCIBLE": "bits"})
    assert settings_from({"MESHWRIGHT_REPRODUCIBLE": "tree", "MESHWRIGHT_FABRIC": "probe"}).reproducible == "tree"


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
