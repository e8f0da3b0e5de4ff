"""MSCCL++ execution plans: JSON, the subset that `meshwright.mscclpp` describes, read strictly.

Refused with the field: unknown fields and operations (packets, switch channels, pipelines, groups of blocks, the older format with `i_cids`),
keys that occur twice, and files beyond a size. Whether a plan is right is `meshwright.check.foreign.mscclpp`'s business.
"""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

from ...errors import FormatError
from ...interop.mscclpp import MscclppPlan
from ..limits import MaxBytes
from ..strict_json import decode, read_document, write_document

__all__ = ["mscclpp_bytes", "parse_mscclpp", "read_mscclpp", "write_mscclpp"]

_PLAN = msgspec.json.Decoder(MscclppPlan)


def read_mscclpp(path: str | os.PathLike[str]) -> MscclppPlan:
    """The plan in a file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError."""
    return parse_mscclpp(read_document(path, limit=MaxBytes.MSCCLPP_JSON), os.path.basename(path) if str(path) != "-" else "standard input")  # noqa: PTH119


def parse_mscclpp(data: bytes, where: str = "plan") -> MscclppPlan:
    """The plan in a document. Raises: FormatError."""
    if len(data) > MaxBytes.MSCCLPP_JSON:
        raise FormatError(f"larger than {MaxBytes.MSCCLPP_JSON} bytes", where=where)
    try:
        plan = decode(data, _PLAN, where)
    except FormatError as error:
        hint = "read are plans of protocol Simple with memory and port channels; no packets, switch channels, pipelines or groups of blocks"
        raise FormatError(error.message, where=error.where, hint=hint) from None
    _refuse_twins(data, where)
    if plan.protocol != "Simple":
        raise FormatError(f"must be 'Simple', got {plan.protocol[:40]!r}: packets are not read", where=f"{where}: protocol")
    return plan


def _refuse_twins(data: bytes, where: str) -> None:
    def pairs(items: list[tuple[str, Any]]) -> None:
        names = [key for key, _ in items]
        if len(set(names)) < len(names):
            twice = next(key for i, key in enumerate(names) if key in names[:i])
            raise FormatError(f"the key {twice[:64]!r} occurs twice in one object", where=where)

    json.loads(data, object_pairs_hook=pairs)


def mscclpp_bytes(plan: MscclppPlan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def write_mscclpp(path: str | os.PathLike[str], plan: MscclppPlan) -> None:
    """Write all or nothing. Raises what `io.atomic` raises."""
    write_document(path, mscclpp_bytes(plan))
