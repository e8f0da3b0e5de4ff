"""Traces of machines and their placements in files of our own, `meshwright.vms` and `meshwright.vm-placement` (docs/formats.md)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from ...cluster.vm_placement import VmPlacement
from ...cluster.vms import Resize, VmTrace
from ...errors import FormatError, UsageError
from ..limits import MaxBytes
from ..strict_json import decode, header, read_document, refuse_ambiguous, write_document
from .bounded import bounded_document

__all__ = ["read_vm_placement", "read_vms", "vms_of", "write_vm_placement", "write_vms"]

SCHEMA, PLACEMENT, VERSION = "meshwright.vms", "meshwright.vm-placement", 1


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    schema: str
    version: int
    name: str
    resources: tuple[str, ...]
    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    size: list[list[list[float | None]]]
    shape: list[int]
    arrival_s: list[float]
    end_s: list[float | None]
    owner: list[int]
    since_s: float
    until_s: float
    low: list[int] = []
    features: list[list[float]] = []
    feature_names: tuple[str, ...] = ()
    resizes: list[tuple[float, int, int]] = []
    truth: list[tuple[float, float]] | None = None


class _PlacementFile(VmPlacement, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = PLACEMENT
    version: int = VERSION


def vms_of(data: bytes, where: str) -> VmTrace:
    """Raises: FormatError."""
    refuse_ambiguous(data, where)
    header(data, schema=SCHEMA, version=VERSION, where=where)
    f = decode(data, msgspec.json.Decoder(_File), where)
    low = np.zeros(len(f.shape), np.bool_)
    try:
        if any(not 0 <= v < len(low) for v in f.low) or any(abs(x) >= 1 << 31 for x in (*f.shape, *f.owner)):
            raise UsageError("a number of a machine, a shape or an owner that does not exist", where="low, shape, owner")
        low[f.low] = True
        return VmTrace(
            name=f.name, resources=f.resources, kinds=f.kinds, shapes=f.shapes,
            size=np.array([[[np.inf if x is None else x for x in kind] for kind in shape] for shape in f.size], np.float64),
            shape=np.array(f.shape, np.int32), arrival_s=np.array(f.arrival_s, np.float64),
            end_s=np.array([np.inf if x is None else x for x in f.end_s], np.float64), owner=np.array(f.owner, np.int32), low=low, since_s=f.since_s,
            until_s=f.until_s, features=np.array(f.features, np.float64).reshape(len(f.features),
                len(f.feature_names)), feature_names=f.feature_names,
            resizes=tuple(Resize(*r) for r in f.resizes), truth=None if f.truth is None else np.array(f.truth, np.float64).reshape(-1, 2),
        )  # fmt: skip
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None
    except ValueError:
        raise FormatError("lists of unequal length", where=where, hint="size[shape][kind][resource]; features[machine][feature]") from None


def read_vms(path: str | os.PathLike[str]) -> VmTrace:
    """Raises: UsageError (no such file), FormatError."""
    return vms_of(read_document(path, limit=MaxBytes.VMS), Path(path).name or str(path))


def write_vms(path: str | os.PathLike[str], trace: VmTrace) -> None:
    """All or nothing; equal traces give equal bytes."""
    f = _File(
        schema=SCHEMA, version=VERSION, name=trace.name, resources=trace.resources, kinds=trace.kinds, shapes=trace.shapes,
        size=[[[x if np.isfinite(x) else None for x in kind] for kind in shape] for shape in trace.size.tolist()], shape=trace.shape.tolist(),
        arrival_s=trace.arrival_s.tolist(), end_s=[x if x < np.inf else None for x in trace.end_s.tolist()], owner=trace.owner.tolist(),
        since_s=trace.since_s, until_s=trace.until_s, low=np.flatnonzero(trace.low).tolist(), features=trace.features.tolist(),
        feature_names=trace.feature_names, resizes=[(r.at_s, r.vm, r.shape) for r in trace.resizes],
        truth=None if trace.truth is None else [(a, b) for a, b in trace.truth.tolist()],
    )  # fmt: skip
    write_document(path, msgspec.json.encode(f) + b"\n")


def read_vm_placement(path: str | os.PathLike[str]) -> VmPlacement:
    """Raises: UsageError (no such file), FormatError. Whether it is right is the checker's to say."""
    found = bounded_document(path, _PlacementFile, schema=PLACEMENT, version=VERSION, limit=MaxBytes.VMS)
    return VmPlacement(**{name: getattr(found, name) for name in VmPlacement.__struct_fields__})


def write_vm_placement(path: str | os.PathLike[str], placement: VmPlacement) -> None:
    """All or nothing; equal placements give equal bytes."""
    write_document(path, msgspec.json.encode({"schema": PLACEMENT, "version": VERSION, **msgspec.to_builtins(placement)}) + b"\n")
