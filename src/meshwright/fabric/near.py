"""Which machines are near one that has no preset: by device, number of devices and network rate, not by the letters of its name."""

from __future__ import annotations

import math
import re

from .machines import ELSEWHERE, GPUS, MACHINES, Elsewhere, Machine

__all__ = ["device_called", "facts", "near_machines"]

# Words of a product's name -> the device; the first whose words are all there. What is listed as "" is a product of its own that we do not have.
_PRODUCTS = (
    ("a100 pcie 40gb", "a100-40gb"), ("a100 pcie", "a100-pcie"), ("a100 40gb", "a100-40gb"), ("h100 pcie", "h100-pcie"), ("h100 nvl", ""),
    ("h200 nvl", ""), ("rtx pro 6000", "rtx-pro-6000"), ("rtx 4090", "rtx-4090"), ("rtx4090", "rtx-4090"),
    *((name, name) for name in GPUS if "-" not in name),
)  # fmt: skip
_FAMILY = re.compile(r"-(pcie|\d+gb)\Z")


def near_machines(name: str, most: int = 3) -> list[str]:
    """Names of machines with the device that `name` means (a provider's machine, or any name with a device in it), nearest first; or none."""
    wanted = ELSEWHERE.get(name.casefold()) or _parsed(name.casefold())
    if wanted is None:
        return []
    alike = [m for m in MACHINES.values() if m.shape != "slice" and _FAMILY.sub("", m.device) == _FAMILY.sub("", wanted.device)]
    return [m.name for m in sorted(alike, key=lambda m: _distance(m, wanted))[:most]]


def device_called(product: str) -> str:
    """The device of `machines.GPUS` that a product's name means (`NVIDIA H100 80GB HBM3`, `nvidia_a100-sxm4-40gb`), or "" where we have none."""
    words = set(re.split(r"[^a-z0-9]+", product.casefold()[:256]))
    return next((device for wanted, device in _PRODUCTS if set(wanted.split()) <= words), "")


def facts(name: str) -> str:
    """What tells a machine from others: `p5 (8 h100, 3200 Gbit/s)`."""
    machine = MACHINES[name]
    return f"{name} ({machine.devices} {machine.device}, {machine.network_Bps * 8 / 10**9:g} Gbit/s)"


def _parsed(name: str) -> Elsewhere | None:
    """The longest device name inside `name`, and a number of devices where one is stated as `x8`, `8x`, `-8g` or `.8`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name)
    found = [device for device in GPUS if device in plain or device.replace("-", "") in plain]
    if not found:
        return None
    count = re.search(r"(?:\bx(\d{1,3})\b|\b(\d{1,3})x|-(\d{1,3})g\b|-(\d{1,2})\Z)", plain)
    devices = next((int(x) for x in count.groups() if x), 0) if count else 0
    return Elsewhere(max(found, key=len), devices, 0)


def _distance(machine: Machine, wanted: Elsewhere) -> tuple[bool, float]:
    """Another version of the device weighs most; then factors in devices and in network rate, where they are known."""
    pairs = ((machine.devices, wanted.devices), (machine.network_Bps, wanted.network_Bps))
    return machine.device != wanted.device, sum(abs(math.log2(a / b)) for a, b in pairs if a and b)
