"""A memory of measured operator times, by operator, shape, stride and dtype, on this very machine and software.

The file form is JSON (`meshwright.operator-times`); one that was written by another torch, processor or version of this package is
not an error, it is just not used.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ... import __version__
from ...errors import FormatError
from ...io.atomic import write_bytes
from ..machine.pacing import machine_facts

__all__ = ["OperatorTime", "OperatorTimes", "call_key", "environment"]

SCHEMA = "meshwright.operator-times"
VERSION = 1
MAX_FILE_BYTES = 64 * 2**20

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class OperatorTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CPU seconds of one call, forward and what it causes in backward, without dispatch overhead."""

    forward_s: Seconds
    backward_s: Seconds
    backward_calls: Annotated[int, msgspec.Meta(ge=0)] = 0  # autograd nodes


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION
    environment: dict[str, str]
    times: dict[str, OperatorTime]


def environment() -> dict[str, str]:
    """What a time depends on besides the call: versions, processor, threads."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "none"
    return {
        "meshwright": __version__, "torch": torch_version, "python": platform.python_version(), "cpu": machine_facts().cpu_model, "threads": "1",
    }  # fmt: skip


class OperatorTimes:
    """Times by call key, in memory and, if a path is given, in a file that `save` writes.

    Raises: FormatError when the file is not one of ours.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.times: dict[str, OperatorTime] = {}
        if self.path is not None and self.path.exists():
            self.times = self._load(self.path)

    def _load(self, path: Path) -> dict[str, OperatorTime]:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FormatError(f"larger than {MAX_FILE_BYTES} bytes", where=str(path), hint="delete it; it will be made anew")
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not a file of operator times: {error}", where=str(path), hint="delete it; it will be made anew") from error
        if file.schema != SCHEMA or file.version != VERSION:
            raise FormatError(
                f"schema {file.schema!r} version {file.version}, expected {SCHEMA!r} version {VERSION}",
                where=str(path),
                hint="delete it; it will be made anew",
            )
        return file.times if file.environment == environment() else {}

    def __contains__(self, key: str) -> bool:
        return key in self.times

    def __getitem__(self, key: str) -> OperatorTime:
        return self.times[key]

    def update(self, times: dict[str, OperatorTime]) -> None:
        self.times.update(times)

    def save(self) -> None:
        """Write the file, all or nothing; does nothing without a path."""
        if self.path is not None:
            write_bytes(self.path, msgspec.json.encode(_File(environment=environment(), times=self.times), order="deterministic"))


def call_key(target: str, args: Any, kwargs: Any) -> str:
    """Operator with shape, stride, dtype of every tensor, whether it needs a gradient, and the other arguments as they are."""
    inner = ", ".join([*(_describe(a) for a in args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())])
    return f"{target}({inner})"


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_describe, value)) + "]"
    if hasattr(value, "requires_grad") and hasattr(value, "stride"):
        dtype = str(value.dtype).removeprefix("torch.")
        shape, stride = "x".join(map(str, value.shape)), ",".join(map(str, value.stride()))
        return f"{dtype}[{shape}]({stride}){'g' if value.requires_grad else ''}"
    return repr(value)
