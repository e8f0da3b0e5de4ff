"""Nets that score moves of tasks, in safetensors files (docs/formats.md)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ...cost_models.moves import LAYERS, MoveNet
from ...errors import FormatError
from ..limits import MaxBytes
from .tensors import tensors_in, write_tensors

__all__ = ["SCHEMA", "VERSION", "read_move_net", "write_move_net"]

SCHEMA, VERSION = "meshwright.move-net", 1
_AGAIN = "train one with `meshwright place fit`"


def write_move_net(path: str | Path, net: MoveNet) -> None:
    """Equal nets give equal bytes."""
    write_tensors(path, net.weights, {"schema": SCHEMA, "version": VERSION, "facts": dict(net.trained)})


def read_move_net(path: str | Path) -> MoveNet:
    """Raises: UsageError (no such file), FormatError naming the tensor: missing, unknown, of another size or type, or not finite."""
    where, tensors, said = tensors_in(path, MaxBytes.MOVE_NET, SCHEMA, VERSION, what="no net of moves", hint=_AGAIN)
    try:
        trained = msgspec.convert(said, dict[str, float])
    except (msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"facts: {error}", where=where, hint=_AGAIN) from None
    wanted = {f"{name}.weight": shape for name, shape in LAYERS.items()} | {f"{name}.bias": shape[:1] for name, shape in LAYERS.items()}
    for name in sorted(wanted.keys() | tensors.keys()):
        x = tensors.get(name)
        if name not in wanted or x is None:
            raise FormatError(f"tensor {name[:64]!r} is {'missing' if name in wanted else 'unknown'}", where=where, hint=_AGAIN)
        if x.shape != wanted[name] or x.dtype != np.float32 or not np.isfinite(x).all():
            raise FormatError(f"tensor {name!r} is no {wanted[name]} of finite float32", where=where, hint=_AGAIN)
    return MoveNet(tensors, trained)
