"""Numbers for people: seconds, bytes and rates with the unit that reads best."""

from __future__ import annotations

__all__ = ["bytes_text", "seconds_text", "share_text"]


def seconds_text(time_s: float) -> str:
    """`1.234 s`, `56.7 ms`, `8.9 us`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.4g} {unit}"
    return f"{time_s / 1e-9:.3g} ns" if time_s else "0 s"


def bytes_text(size_bytes: float) -> str:
    """Decimal units: `1.23 GB`, `45.6 MB`, `789 kB`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def share_text(share: float) -> str:
    return f"{100 * share:.1f} %"
