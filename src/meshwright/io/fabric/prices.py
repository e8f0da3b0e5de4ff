"""Price files: `meshwright.prices` version 1 in TOML (docs/formats.md)."""

from __future__ import annotations

import os

from ...fabric.prices import Prices
from ..fields import Table
from ..limits import MaxBytes
from .small_toml import read_table

__all__ = ["read_prices"]

MAX_USD = 10**9  # of one part
MAX_SWITCH_PORTS = 4096


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """Raises: UsageError when the file cannot be read; FormatError naming the field when it does not say what it must, a missing price included."""
    top = read_table(path, "meshwright.prices", MaxBytes.PRICES)
    if not top.has("prices"):
        raise top.error("prices", "is missing", hint="docs/formats.md shows a price file")
    table = Table(top.take("prices"), top.where, "prices")
    prices = Prices(
        switch_ports=table.integer("switch_ports", least=4, most=MAX_SWITCH_PORTS), switch_usd=table.integer("switch_usd", most=MAX_USD),
        optical_cable_usd=table.integer("optical_cable_usd", most=MAX_USD), copper_cable_usd=table.integer("copper_cable_usd", most=MAX_USD),
        patch_panel_port_usd=table.integer("patch_panel_port_usd", 0, most=MAX_USD), source=table.text("source", "", limit=512),
    )  # fmt: skip
    table.done()
    top.done()
    return prices
