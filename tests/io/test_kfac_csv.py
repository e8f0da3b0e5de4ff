"""PipeFisher's profiles: rows as published, its closed form, and every malformed line named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.limits import MaxBytes
from meshwright.io.plan.kfac_csv import COLUMNS, parse_kfac_csv, read_kfac_csv
from meshwright.profile.kfac import capacity

HEADING = ",".join(COLUMNS)
# BERT-Base on a P100, 32 sequences (kazukiosawa/pipe-fisher, prof/bert-base_time_memory_p100.csv), rounded
ROW = "32,9.748,16.45,25.547,71.667,6.805,39.1,264.06,145.05,108.0,94.5"


def test_the_closed_form_of_a_published_row():
    (row,) = parse_kfac_csv(f"{HEADING}\n{ROW}\n")
    assert (row.batch, row.forward_s, row.weight_bytes) == (32, pytest.approx(0.009748), pytest.approx(39.1e6))
    plain, both = capacity(row, 4), capacity(row, 4, both_ways=True)
    # by hand: 7 (F + B), 3 of it idle; Chimera 4 F + 6 B
    assert plain.pipe_s == pytest.approx(7 * 0.026198) and plain.bubble_s == pytest.approx(3 * 0.026198)
    assert plain.work_s == pytest.approx(4 * 0.025547 + 0.071667) and plain.refresh_steps == 3
    assert both.pipe_s == pytest.approx(4 * 0.009748 + 6 * 0.01645) and both.refresh_steps == 6
    assert both.memory_bytes - plain.memory_bytes == pytest.approx(2 * 39.1e6)
    again = capacity(row, 4, recompute=True)
    assert again.bubble_s == pytest.approx(3 * (0.026198 + 0.009748)) and again.memory_bytes == pytest.approx(plain.memory_bytes - 3 * 264.06e6)
    assert capacity(row, 2, both_ways=True).refresh_steps == 0  # no bubble at all


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 rows"), (HEADING, "has 0 rows"), (f"{HEADING},x\n{ROW},1", "columns x"), (f"{HEADING[3:]}\n{ROW}", "columns bs"),
        (f"{HEADING}\n{ROW},1", "has 12 cells"), (f"{HEADING}\n{ROW}\n{ROW}", "stand once"), (f"{HEADING}\n0{ROW[2:]}", "must be >= 1"),
        (f"{HEADING}\n{ROW.replace('16.45', '-1')}", "line 2: time_b"), (f"{HEADING}\n{ROW.replace('16.45', '1e99')}", "'1e99' is no number"),
    ],
)  # fmt: skip
def test_malformed_lines_are_named(text, said):
    with pytest.raises(FormatError) as refused:
        parse_kfac_csv(text)
    assert said in str(refused.value)


@settings(max_examples=25)
@given(text=st.text(alphabet="bs,time_f0123456789.e-\n " + HEADING, max_size=200), tail=st.text(max_size=40))
def test_anything_is_rows_or_a_format_error(text, tail):
    for whole in (text + tail, f"{HEADING}\n{text}"):
        try:
            assert parse_kfac_csv(whole)
        except FormatError:
            pass


def test_files_from_outside(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="cannot read"):
        read_kfac_csv(tmp_path / "none.csv")
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xff")
    with pytest.raises(FormatError, match="not UTF-8"):
        read_kfac_csv(file)
    file.write_text(f"{HEADING}\n{ROW}\n")
    assert len(read_kfac_csv(file)) == 1
    monkeypatch.setattr(MaxBytes, "KFAC_CSV", 8)
    with pytest.raises(FormatError, match="larger than 8"):
        read_kfac_csv(file)
