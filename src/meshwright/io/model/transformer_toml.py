"""A transformer and its layout in TOML, for `train explain --transformer FILE.toml`.

    [transformer]
    layers = 48
    hidden = 6144
    heads = 64
    sequence = 2048
    vocabulary = 51200

    [layout]
    tensor = 8
    sequence_parallel = true
    recompute = "selective"

Fields are those of `ledger.transformer.Transformer` and `SplitLayout`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ...ledger.transformer import Transformer
from ..limits import MAX_TOML_DOTS, MaxBytes
from ..text import text_of

__all__ = ["parse_transformer_toml", "read_transformer_toml"]



def read_transformer_toml(path: Path) -> tuple[Transformer, dict[str, Any]]:
    """The transformer and the fields of its layout. Raises: UsageError when the file cannot be read; FormatError."""
    try:
        with path.open("rb") as file:
            data = file.read(MaxBytes.TRANSFORMER_TOML + 1)
    except OSError as error:
        raise UsageError(f"cannot read the transformer: {error.strerror}", where=str(path), hint="or write it as layers=48,hidden=6144,...") from None
    return parse_transformer_toml(data, where=path.name)


def parse_transformer_toml(data: bytes, *, where: str = "transformer.toml") -> tuple[Transformer, dict[str, Any]]:
    """Raises: FormatError."""
    if len(data) > MaxBytes.TRANSFORMER_TOML:
        raise FormatError(f"is larger than {MaxBytes.TRANSFORMER_TOML} bytes", where=where)
    text = text_of(data, where)
    if any(line.count(".") > MAX_TOML_DOTS for line in text.splitlines()):
        raise FormatError(f"has a line with more than {MAX_TOML_DOTS} dots", where=where)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError("is nested too deeply" if isinstance(error, RecursionError) else str(error), where=where) from None
    unknown = sorted(set(document) - {"transformer", "layout"})
    if unknown or not isinstance(document.get("transformer"), dict) or not isinstance(document.get("layout", {}), dict):
        what = f"has {unknown[0][:64]!r}" if unknown else "has no table [transformer]"
        raise FormatError(what, where=where, hint="tables: [transformer] and [layout]")
    try:
        return msgspec.convert(document["transformer"], Transformer), document.get("layout", {})
    except msgspec.ValidationError as error:
        raise FormatError(str(error), where=f"{where}: transformer") from None
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where}") from None
