"""Storages as CSV: both headings, offsets, what is written is read back, and every malformed line is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.limits import MaxBytes
from meshwright.io.plan import minimalloc_csv
from meshwright.io.plan.minimalloc_csv import BufferTable, buffers_csv, parse_buffers_csv, read_buffers_csv

NUMBER = st.integers(-(2**59), 2**59)


def test_both_headings_and_offsets():
    old = parse_buffers_csv("buffer,start,end,size\n\nb1, 0 ,3,4\nb2,3,9,4\n")
    assert old == BufferTable(names=("b1", "b2"), lower=(0, 3), upper=(3, 9), size_bytes=(4, 4))
    new = parse_buffers_csv("size,id,upper,lower,offset\n4,b1,3,0,8\n")
    assert (new.lower, new.upper, new.size_bytes, new.offset_bytes) == ((0,), (3,), (4,), (8,))


@given(data=st.lists(st.tuples(NUMBER, st.integers(1, 2**58), st.integers(0, 2**59)), max_size=5), placed=st.booleans())
def test_what_is_written_is_read(data, placed):
    table = BufferTable(
        names=tuple(f"t{i}" for i in range(len(data))), lower=tuple(a for a, _, _ in data), upper=tuple(a + d for a, d, _ in data),
        size_bytes=tuple(s for _, _, s in data),
    )  # fmt: skip
    offsets = tuple(7 * i for i in range(len(data))) if placed else ()
    again = parse_buffers_csv(buffers_csv(table, offsets))
    assert again == BufferTable(names=table.names, lower=table.lower, upper=table.upper, size_bytes=table.size_bytes, offset_bytes=offsets)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"), ("id,lower,upper\n", "exactly one column 'size'"), ("id,lower,upper,size,colour\n", "no column 'colour'"),
        ("id,lower,upper,size,size\n", "exactly one column 'size'"), ("id,lower,upper,size\na,0,1\n", "line 2: has 3 cells"),
        ("id,lower,upper,size\na,0,1,2\na,0,1,2\n", "line 3: id: 'a' stands in line 2 too"), ("id,lower,upper,size\na b,0,1,2\n", "no name"),
        ("id,lower,upper,size\na,0,1,-2\n", "line 2: size: '-2'"), ("id,lower,upper,size\na,0,1e3,2\n", "line 2: upper: '1e3'"),
        ("id,lower,upper,size\na,2,2,2\n", "alive from 2 to 2"), ("id,lower,upper,size\na,0,1,9999999999999999999\n", "up to 2^60"),
    ],
)  # fmt: skip
def test_malformed_lines_are_named(text, said):
    with pytest.raises(FormatError) as refused:
        parse_buffers_csv(text)
    assert said in str(refused.value)


def test_files_from_outside(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="cannot read"):
        read_buffers_csv(tmp_path / "none.csv")
    file = tmp_path / "t.csv"
    file.write_bytes(b"id,lower,upper,size\n\xff,0,1,2\n")
    with pytest.raises(FormatError, match="byte 20 is not UTF-8"):
        read_buffers_csv(file)
    file.write_bytes(b"\xef\xbb\xbfid,lower,upper,size\na,0,1,2\n")
    assert read_buffers_csv(file).names == ("a",)
    monkeypatch.setattr(minimalloc_csv, "MAX_ROWS", 0)
    with pytest.raises(FormatError, match="has 1 storages"):
        read_buffers_csv(file)
    monkeypatch.setattr(MaxBytes, "BUFFERS_CSV", 3)
    with pytest.raises(FormatError, match="larger than 3"):
        read_buffers_csv(file)
