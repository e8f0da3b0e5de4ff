"""Plans of input pipelines in files, `meshwright.input-plan`, and the rates that `data analyse --json` printed (docs/formats.md)."""

from __future__ import annotations

import os

import msgspec

from ...bound import fraction_of
from ...errors import FormatError
from ...profile.input_plan import InputPlan
from ...profile.input_rates import InputRates
from ..limits import MaxBytes
from ..strict_json import read_versioned, write_document

__all__ = ["SCHEMA", "VERSION", "input_plan_document", "read_input_plan", "read_input_rates", "write_input_plan"]

SCHEMA, VERSION = "meshwright.input-plan", 1
STALLS, STALLS_VERSION = "meshwright.data.stalls", 1


class _File(InputPlan, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION


class _Stalls(msgspec.Struct):
    """What is read of an analysis: its measurements. What it concluded is worked out anew."""

    schema: str
    version: int
    measured: InputRates


def read_input_plan(path: str | os.PathLike[str]) -> InputPlan:
    """Raises: UsageError (no such file), FormatError. Whether it is right is the checker's to say."""
    found, where = read_versioned(path, _File, schema=SCHEMA, version=VERSION, limit=MaxBytes.INPUT_PLAN)
    if found.bound is not None:
        try:
            fraction_of(found.bound.value)
        except ValueError as error:
            raise FormatError(str(error), where=f"{where}: bound.value") from None
    return InputPlan(**{name: getattr(found, name) for name in InputPlan.__struct_fields__})


def input_plan_document(plan: InputPlan) -> dict[str, object]:
    return {"schema": SCHEMA, "version": VERSION, **msgspec.to_builtins(plan)}


def write_input_plan(path: str | os.PathLike[str], plan: InputPlan) -> None:
    """All or nothing; equal plans give equal bytes."""
    write_document(path, msgspec.json.encode(input_plan_document(plan)) + b"\n")


def read_input_rates(path: str | os.PathLike[str]) -> InputRates:
    """Raises: UsageError (no such file), FormatError."""
    return read_versioned(path, _Stalls, schema=STALLS, version=STALLS_VERSION, limit=MaxBytes.INPUT_PLAN)[0].measured
