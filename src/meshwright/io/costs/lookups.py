"""Costs of embedding lookups in files: safetensors with the nets' weights, and what they were measured on in the header (docs/formats.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...cost_models.lookups import FEATURES, FLOOR_TERMS, LookupCosts, Net
from ...errors import FormatError
from ..limits import MaxBytes
from .tensors import tensors_in, write_tensors

__all__ = ["SCHEMA", "VERSION", "read_lookup_costs", "write_lookup_costs"]

SCHEMA, VERSION = "meshwright.lookup-costs", 1
NETS = ("table", "device", "forward", "backward")
MAX_UNITS = 4096
MAX_LAYERS = 16
_AGAIN = "measure again with `meshwright tables fit`"


class _Facts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What stands in the header beside schema and version."""

    batch: int
    floor: tuple[float, ...]
    overhead_s: float
    fabric: str
    devices: int
    machine: dict[str, str]
    errors: dict[str, float]
    ranges: dict[str, tuple[float, float]]


def write_lookup_costs(path: str | Path, costs: LookupCosts) -> None:
    """Equal costs give equal bytes."""
    facts = {f: msgspec.to_builtins(getattr(costs, f)) for f in _Facts.__struct_fields__}
    tensors: dict[str, Any] = {}
    for name in NETS:
        net: Net | None = getattr(costs, name)
        if net is not None:
            tensors |= {f"{name}.mean": net.mean, f"{name}.spread": net.spread}
            for i, (weights, bias) in enumerate(net.layers):
                tensors |= {f"{name}.{i}.weight": np.ascontiguousarray(weights), f"{name}.{i}.bias": bias}
    write_tensors(path, tensors, {"schema": SCHEMA, "version": VERSION, "facts": facts})


def read_lookup_costs(path: str | Path) -> LookupCosts:
    """Raises: UsageError (no such file), FormatError naming the tensor or the field; nets of an older version's features are stale."""
    where, tensors, said = tensors_in(path, MaxBytes.LOOKUP_COSTS, SCHEMA, VERSION, what="no costs", hint=_AGAIN)
    try:
        facts = msgspec.convert(said, _Facts)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"facts: {error}", where=where, hint=_AGAIN) from None
    numbers = [*facts.floor, facts.overhead_s, *facts.errors.values()]
    if len(facts.floor) != FLOOR_TERMS or not all(math.isfinite(x) and x >= 0 for x in numbers) or facts.batch < 1 or facts.devices < 0:
        raise FormatError("facts: a floor, an error or a batch that is no number from 0 on", where=where, hint=_AGAIN)
    nets = {name: _net(name, tensors, where) for name in NETS}
    _fitting(nets, facts, where)
    found: dict[str, Any] = {f: getattr(facts, f) for f in _Facts.__struct_fields__}
    return LookupCosts(**{**found, **nets})


def _net(name: str, tensors: dict[str, Any], where: str) -> Net | None:
    if f"{name}.mean" not in tensors:
        return None
    layers: list[tuple[Any, Any]] = []
    try:
        mean, spread = tensors[f"{name}.mean"], tensors[f"{name}.spread"]
        units = mean.shape
        while f"{name}.{len(layers)}.weight" in tensors and len(layers) < MAX_LAYERS:
            weights, bias = tensors[f"{name}.{len(layers)}.weight"], tensors[f"{name}.{len(layers)}.bias"]
            if weights.shape != (*units, *bias.shape) or bias.ndim != 1 or max(weights.shape) > MAX_UNITS:
                raise ValueError(f"layer {len(layers)} of {weights.shape} does not fit")
            units = bias.shape
            layers.append((weights, bias))
    except (KeyError, ValueError) as error:
        raise FormatError(f"net {name} lacks or mangles {error}", where=where, hint=_AGAIN) from None
    every = [mean, spread, *(x for layer in layers for x in layer)]
    if not layers or spread.shape != mean.shape or any(x.dtype != np.float64 or not np.isfinite(x).all() for x in every) or not (spread > 0).all():
        raise FormatError(f"net {name} has weights that are no finite numbers in float64, or no layers", where=where, hint=_AGAIN)
    return Net(mean, spread, tuple(layers), last_relu=name == "table")


def _fitting(nets: dict[str, Net | None], facts: _Facts, where: str) -> None:
    """Do nets belong together and to these facts?"""
    table, device = nets["table"], nets["device"]
    why = ""
    if (table is None) != (device is None):
        why = "half of the net of lookups is missing"
    elif table is not None and len(table.mean) != FEATURES:
        why = f"its net reads {len(table.mean)} features, this version {FEATURES}: it is stale"
    elif table is not None and device is not None and (len(device.mean) != len(table.layers[-1][1]) or len(device.layers[-1][1]) != 1):
        why = "both halves of the net of lookups do not fit together"
    for name, times in (("forward", 2), ("backward", 1)):
        net = nets[name]
        if net is not None and (len(net.mean), len(net.layers[-1][1])) != (times * facts.devices, facts.devices):
            why = f"net {name} is not for {facts.devices} devices"
    if why:
        raise FormatError(why, where=where, hint=_AGAIN)
