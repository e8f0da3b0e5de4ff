"""Transformers from TOML: a value or a FormatError, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.io.limits import MaxBytes
from meshwright.io.model.transformer_toml import parse_transformer_toml, read_transformer_toml

GOOD = b"""[transformer]
layers = 2
hidden = 64
heads = 4
sequence = 32
vocabulary = 96
[layout]
tensor = 2
recompute = "selective"
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_bytes(GOOD)
    model, layout = read_transformer_toml(path)
    assert model.hidden == 64 and layout == {"tensor": 2, "recompute": "selective"}
    with pytest.raises(UsageError, match="cannot read"):
        read_transformer_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x" * (MaxBytes.TRANSFORMER_TOML + 1), "larger"), (b"\xff", "UTF-8"), (b"a" + b".a" * 70 + b" = 1", "dots"), (b"a = ", "Invalid value"),
        (b"[layout]\n", r"no table \[transformer\]"), (GOOD + b"[other]\n", "'other'"), (GOOD.replace(b"64", b'"64"'), "int"),
        (GOOD.replace(b"heads = 4", b"heads = 5"), "not a multiple"), (b"transformer = " + b"[" * 5000, "nested|Invalid"),
        (b"layout = 3\n" + GOOD.partition(b"[layout]")[0], "tables|no table"),
    ],
)  # fmt: skip
def test_wrong_files_say_where(data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said) as error:
        parse_transformer_toml(data)
    assert error.value.where.startswith("transformer.toml")


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.binary(max_size=60))
def test_damaged_files(at: int, byte: int, noise: bytes) -> None:
    for data in (GOOD[:at] + bytes([byte]) + GOOD[at + 1 :], GOOD[:at] + noise + GOOD[at:], noise):
        try:
            model, layout = parse_transformer_toml(data)
        except FormatError as error:
            assert error.where.startswith("transformer.toml")
            continue
        assert min(model.layers, model.hidden, model.heads, model.sequence, model.vocabulary) > 0 and isinstance(layout, dict)
        assert model.head_width > 0 or model.hidden % model.heads == 0
