"""Price files: `meshwright.prices` version 1 in TOML (docs/formats.md)."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from ...errors import FormatError, UsageError
from ...fabric.prices import Prices
from ..fields import Table
from ..limits import MaxBytes

__all__ = ["SCHEMA", "VERSION", "read_prices"]

SCHEMA, VERSION = "meshwright.prices", 1
MAX_USD = 10**9  # of one part
MAX_SWITCH_PORTS = 4096


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """Raises: UsageError when the file cannot be read; FormatError naming the field when it does not say what it must, a missing price included."""
    where = Path(path).name
    try:
        with Path(path).open("rb") as file:
            data = file.read(MaxBytes.PRICES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the prices: {error.strerror}", where=str(path), hint="docs/formats.md shows a price file") from None
    if len(data) > MaxBytes.PRICES:
        raise FormatError(f"is larger than {MaxBytes.PRICES} bytes", where=where)
    try:
        document = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        detail = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(detail, where=where, hint="docs/formats.md shows a price file") from None
    top = Table(document, where)
    if (schema := top.text("schema")) != SCHEMA:
        raise top.error("schema", f"must be {SCHEMA!r}, got {schema!r}")
    top.integer("version", least=VERSION, most=VERSION)
    table = Table(top.take("prices"), where, "prices")
    prices = Prices(
        switch_ports=table.integer("switch_ports", least=2, most=MAX_SWITCH_PORTS), switch_usd=table.integer("switch_usd", most=MAX_USD),
        optical_cable_usd=table.integer("optical_cable_usd", most=MAX_USD), copper_cable_usd=table.integer("copper_cable_usd", most=MAX_USD),
        patch_panel_port_usd=table.integer("patch_panel_port_usd", 0, most=MAX_USD), source=table.text("source", "", limit=512),
    )  # fmt: skip
    table.done()
    top.done()
    return prices
