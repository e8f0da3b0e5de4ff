"""NCCL tuner configurations: strict where the plugin is lenient; ranges without gaps; the first match holds."""

from __future__ import annotations

import io
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.nccl.tuner import (
    ALGORITHMS,
    NO_LIMIT,
    PROTOCOLS,
    TunerRow,
    first_match,
    parse_tuner,
    read_tuner,
    rows_of_choices,
    tuner_text,
    write_tuner,
)

FILE = b"""# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff

allreduce,0,65536,tree,simple,2,1,-1,-1,1
allreduce, 65537 ,1048576,ring,simple,4,4,32,1,0\r
allreduce,65537,4294967295,nvls_tree,ll128,-1,-1,-1,4
broadcast,32769,4294967295,ring,ll,2,-1,-1
"""


def test_the_documented_format() -> None:
    rows = parse_tuner(FILE)
    assert rows[0] == TunerRow(
        op="all-reduce", min_bytes=0, max_bytes=65536, algorithm="tree", protocol="simple", channels=2, nodes=1, registered=1
    )  # fmt: skip
    assert (rows[2].pipe_ops, rows[2].registered, rows[3].pipe_ops) == (4, -1, -1)
    assert parse_tuner(tuner_text(rows).encode()) == rows


def test_the_first_match_holds() -> None:
    rows = parse_tuner(b"allreduce,0,99,ring,ll,-1,2,-1\nallreduce,0,999,tree,ll,-1,-1,16\n")
    assert first_match(rows, "all-reduce", 50, nodes=2, ranks=16) == rows[0]
    assert first_match(rows, "all-reduce", 50, nodes=1, ranks=16) == rows[1]
    assert first_match(rows, "all-reduce", 100, nodes=2, ranks=16) == rows[1]
    assert first_match(rows, "all-reduce", 50, nodes=1, ranks=8) is None
    assert first_match(rows, "broadcast", 50, nodes=2, ranks=16) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allredoce,0,1,ring,ll,-1,-1,-1", "collective_type: unknown name 'allredoce'"),
        ("alltoall,0,1,ring,ll,-1,-1,-1", "collective_type: unknown name 'alltoall'"),
        ("allreduce,0,1,rink,ll,-1,-1,-1", "algorithm: unknown name 'rink'"),
        ("allreduce,0,1,ring,LL,-1,-1,-1", "protocol: unknown name 'LL'"),
        ("allreduce,0,1,ring,ll,-1,-1", "has 7 fields, expected 8 to 10"),
        ("allreduce,0,1,ring,ll,-1,-1,-1,-1,-1,0", "has 11 fields"),
        ("allreduce,a,1,ring,ll,-1,-1,-1", "min_bytes: must be a whole number, got 'a'"),
        ("allreduce,,1,ring,ll,-1,-1,-1", "min_bytes: must be a whole number, got ''"),
        ("allreduce,-1,1,ring,ll,-1,-1,-1", "min_bytes: must be 0.."),
        ("allreduce,0,99999999999999999999,ring,ll,-1,-1,-1", "max_bytes: must be 0.."),
        ("allreduce,2,1,ring,ll,-1,-1,-1", "max_bytes 1 is below min_bytes 2"),
        ("allreduce,0,1,ring,ll,0,-1,-1", "at least 1, got 0"),
        ("allreduce,0,1,ring,ll,65,-1,-1", "channels: must be -1..64, got 65"),
        ("allreduce,0,1,ring,ll,-1,-1,-1,-1,2", "regBuff: must be -1..1, got 2"),
        ("allreduce,0,1,ring,ll,-1,-1,-1" + " " * 250, "characters, the plugin reads 255"),
        ("allreduce,7,7,tree,ll,-1,2,8", "never matches: row 1 takes every call that it would"),
    ],
)
def test_refused_with_the_line(line: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_tuner(f"allreduce,0,99,ring,ll,-1,-1,-1\n{line}\n".encode(), "t.conf")
    assert str(caught.value).startswith("t.conf: line 2: ") and message in str(caught.value)


def test_other_bad_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = b"#" * (2 << 20)
    for data, message in ((b"", "has no configuration line"), (b"# x\n", "no configuration"), (b"\xff", "plain ASCII"), (big, "larger than")):
        with pytest.raises(FormatError, match=message):
            parse_tuner(data)
    with pytest.raises(UsageError, match="cannot read"):
        read_tuner(tmp_path / "none")
    rows = parse_tuner(FILE)
    write_tuner(tmp_path / "t.conf", rows)
    assert read_tuner(tmp_path / "t.conf") == rows
    with pytest.raises(FormatError, match="unknown name"):
        write_tuner(tmp_path / "u.conf", [TunerRow(op="permute", min_bytes=0, max_bytes=1, algorithm="ring", protocol="ll")])
    assert not (tmp_path / "u.conf").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FILE)))
    assert read_tuner("-") == rows


CHOICE = st.tuples(st.integers(1, 1 << 40), st.sampled_from(ALGORITHMS), st.sampled_from(PROTOCOLS), st.sampled_from([-1, 1, 8]))
CHOICES = st.lists(CHOICE, min_size=1, max_size=9, unique_by=lambda x: x[0]).map(sorted)


@given(CHOICES, st.integers(0, 1 << 41))
def test_every_size_gets_the_choice_of_the_size_below_it(choices: list[tuple[int, str, str, int]], size: int) -> None:
    rows = rows_of_choices("all-gather", choices, nodes=2, ranks=16)
    assert parse_tuner(tuner_text(rows).encode()) == rows
    assert rows[0].min_bytes == 0 and rows[-1].max_bytes == NO_LIMIT
    assert all(a.max_bytes + 1 == b.min_bytes for a, b in pairwise(rows))
    assert all((a.algorithm, a.protocol, a.channels) != (b.algorithm, b.protocol, b.channels) for a, b in pairwise(rows))
    row = first_match(rows, "all-gather", size, nodes=2, ranks=16)
    wanted = max((c for c in choices if c[0] <= size), default=choices[0])
    assert row is not None and (row.algorithm, row.protocol, row.channels) == wanted[1:]


def test_choices_that_make_no_configuration() -> None:
    for choices, message in (
        ([], "at least one size"),
        ([(5, "ring", "ll", -1), (5, "tree", "ll", -1)], "sizes must rise"),
        ([(5, "best", "ll", -1)], "unknown name 'best'"),
    ):
        with pytest.raises(UsageError, match=message):
            rows_of_choices("all-reduce", choices)
