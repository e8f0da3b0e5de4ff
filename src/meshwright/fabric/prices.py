"""What the parts of a network cost: switches by their ports, cables by kind. Files are read by `meshwright.io.fabric.prices`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ..errors import UsageError

__all__ = ["PARTS", "Prices", "shipped_prices"]

PARTS = ("switch", "optical cable", "copper cable", "patch-panel port")  # kinds of parts; cables are two-way


@dataclass(frozen=True, kw_only=True)
class Prices:
    """US dollars each. `switch_ports`: of one switch; `source`: where the figures are from."""

    switch_ports: int
    switch_usd: int
    optical_cable_usd: int
    copper_cable_usd: int
    patch_panel_port_usd: int = 0
    source: str = ""

    def of(self, parts: Mapping[str, int]) -> int:
        """Dollars for so many of each part. Raises: UsageError for a part without a price."""
        each = dict(zip(PARTS, (self.switch_usd, self.optical_cable_usd, self.copper_cable_usd, self.patch_panel_port_usd), strict=True))
        unknown = sorted(set(parts) - set(each))
        if unknown:
            raise UsageError(f"no price for {unknown[0]!r}", where="prices", hint=f"parts with a price: {', '.join(PARTS)}")
        return sum(each[part] * count for part, count in parts.items())


@cache
def shipped_prices() -> Prices:
    """The figures of `prices.toml`, which ships with the package."""
    return Prices(**tomllib.loads(resources.files(__package__).joinpath("prices.toml").read_text(encoding="utf-8"))["prices"])
