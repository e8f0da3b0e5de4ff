"""A program as JSON: one object per table, one entry per column, columns in the forms of `io.columns`.

    {"schema": "meshwright.program", "version": 1, "hash": "...", "requires": ["lag"], "name": "", "ranks": 2, "switches": 0,
     "lanes": {"rows": 2, "actor": [0, 1], ...}, "steps": {...}, "channels": {...}, "buffers": {...}, "ops": {...},
     "sizes": {...}, "comms": {...}, "calls": {...}, "fold": null, "contract": null}

A column of strings is `{"words": [...], "index": column, "number": column}`: string i is `words[index[i]]`, followed by `number[i]` unless
that is -1 (`number` may be empty: no numbers), so `act:block:0`, `act:block:1`, ... cost one word. Lists are
`{"ptr": column, "values": column}`. `hash` is `meshwright.program.hash` of the contents and is checked on reading, so a damaged
program is never taken for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ...errors import FormatError
from ...program.hash import TABLES, column_forms, program_hash
from ...program.program import FEATURES, MAX_STEPS, SCHEMA, VERSION, Contract, Fold, FoldAxis, Program
from ...program.tables import Csr
from ...program.validate import refuse_too_many_executed, validate
from ..columns import Budget, decode_column, encode_column
from ..strict_json import decode, header, refuse_ambiguous

__all__ = ["program_bytes", "program_from_bytes", "program_from_json", "program_json"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_Columns = dict[str, msgspec.Raw]
_Range = tuple[_Count, _Count, _Count]
_Peer = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]


class _Axis(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    stride: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    kind: Literal["shift", "xor", "plain"]


class _Fold(msgspec.Struct, forbid_unknown_fields=True):
    axes: list[_Axis]
    buffer_shift: list[msgspec.Raw]  # one column per folded axis
    fixed: list[_Count] = []
    by_rank: bool = False


class _Contract(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    op: str
    inputs: list[_Range]
    outputs: list[_Range]
    root: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
    ranks: list[_Peer] = []
    peers: list[_Peer] = []
    reproducible: str = "run"
    numbers: list[_Peer] = []


class _Program(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    hash: str
    requires: list[str]
    name: str
    ranks: _Count
    switches: _Count
    lanes: _Columns
    steps: _Columns
    channels: _Columns
    buffers: _Columns
    ops: _Columns
    sizes: _Columns
    comms: _Columns
    calls: _Columns
    fold: _Fold | None
    contract: _Contract | None
    contracts: list[_Contract] = []


class _Lists(msgspec.Struct, forbid_unknown_fields=True):
    ptr: msgspec.Raw
    values: msgspec.Raw


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    words: list[str]
    index: msgspec.Raw
    number: msgspec.Raw


_PROGRAM = msgspec.json.Decoder(_Program)
_LISTS = msgspec.json.Decoder(_Lists)
_TEXT = msgspec.json.Decoder(_Text)
_NAMES: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(list[str])
_ROUTES: msgspec.json.Decoder[list[list[str]]] = msgspec.json.Decoder(list[list[str]])
_ROWS = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS)])


# ---- writing -----------------------------------------------------------------------------------------------------------
def program_bytes(program: Program) -> bytes:
    """The program as one JSON document, a line per table; equal programs give equal bytes."""
    return program_json(program) + b"\n"


def program_json(program: Program, *, hashed: str = "") -> bytes:
    """The document without a final newline. `hashed`: its hash, if the caller has just computed it."""
    refuse_too_many_executed(program)
    fold, contract = program.fold, program.contract
    several = [b'"contracts":[%s]' % b",".join(map(_contract, program.contracts))] if len(program.contracts) > 1 else []
    lines = [
        b'{"schema":"%s","version":%d' % (SCHEMA.encode(), VERSION),
        b'"hash":' + _json(hashed or program_hash(program)),
        b'"requires":' + _json(program.requires),
        b'"name":%s,"ranks":%d,"switches":%d' % (_json(program.name), program.ranks, program.switches),
        *(b'"%s":%s' % (table.encode(), _table(program, table)) for table in TABLES),
        b'"fold":' + (b"null" if fold is None else _fold(fold)),
        b'"contract":' + (b"null" if contract is None else _contract(contract)),
        *several,
    ]
    return b",\n".join(lines) + b"}"


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _table(program: Program, table: str) -> bytes:
    held = getattr(program, table)
    entries = [b'"rows":%d' % len(held)]
    for column, form in column_forms(table).items():
        value = getattr(held, column)
        if form == "csr":
            encoded = b'{"ptr":%s,"values":%s}' % (encode_column(value.ptr), encode_column(value.values))
        elif form == "text":
            encoded = _text(value)
        elif form in ("names", "routes"):
            encoded = _json(value)
        else:
            encoded = encode_column(value)
        entries.append(b'"%s":%s' % (column.encode(), encoded))
    return b"{" + b",".join(entries) + b"}"


def _text(values: Sequence[str]) -> bytes:
    words: dict[str, int] = {}
    index, number = [], []
    for value in values:
        stem = value.rstrip("0123456789")
        digits = value[len(stem) :]
        if len(digits) > 9 or (digits[:1] == "0" and digits != "0"):  # would not come back as it was
            stem, digits = value, ""
        index.append(words.setdefault(stem, len(words)))
        number.append(int(digits) if digits else -1)
    if not any(n >= 0 for n in number):
        number = []
    return b'{"words":%s,"index":%s,"number":%s}' % (_json(list(words)), encode_column(index), encode_column(number))


def _fold(fold: Fold) -> bytes:
    rows = b",".join(encode_column(row) for row in fold.buffer_shift)
    fixed = b',"fixed":' + _json(fold.fixed) if fold.fixed else b""
    by_rank = b',"by_rank":true' if fold.by_rank else b""
    return b'{"axes":%s,"buffer_shift":[%s]%s%s}' % (_json([_Axis(*axis) for axis in fold.axes]), rows, fixed, by_rank)


def _contract(contract: Contract) -> bytes:
    c = contract
    return _json(_Contract(c.op, list(c.inputs), list(c.outputs), c.root, list(c.ranks), list(c.peers), c.reproducible, list(c.numbers)))


# ---- reading -----------------------------------------------------------------------------------------------------------
def program_from_bytes(data: bytes, *, where: str = "program.json") -> Program:
    """Read and validate one program document.

    Raises: FormatError for anything that is not exactly a valid program, with the file and the field in `where`.
    """
    header(data, schema=SCHEMA, version=VERSION, where=where)
    decode(data, _PROGRAM, where)
    refuse_ambiguous(data, where)
    return program_from_json(data, where=where, budget=Budget(len(data)))[1]


def program_from_json(data: Any, *, where: str, budget: Budget) -> tuple[str, Program]:
    """(content hash, program) of a document inside another, whose keys have been checked already. Raises like `program_from_bytes`."""
    header(data, schema=SCHEMA, version=VERSION, where=where)
    raw = decode(data, _PROGRAM, where)
    unknown = sorted(set(raw.requires) - FEATURES)
    if unknown:
        raise FormatError(f"needs the feature {unknown[0][:64]!r}: written by a newer meshwright", where=_at(where, "requires"))
    if not raw.ranks:
        raise FormatError("must be >= 1, got 0", where=_at(where, "ranks"))
    tables = {table: _read_table(table, getattr(raw, table), _at(where, table), budget) for table in TABLES}
    if raw.contract is not None and raw.contracts:
        raise FormatError("there is a contract already", where=_at(where, "contracts"), hint="give `contract` or `contracts`")
    promised = raw.contracts if raw.contract is None else [raw.contract]
    program = Program(
        ranks=raw.ranks,
        switches=raw.switches,
        name=raw.name,
        **tables,
        fold=_read_fold(raw.fold, len(tables["buffers"]), _at(where, "fold"), budget),
        contracts=tuple(map(_read_contract, promised)),
    )
    try:
        validate(program)
        refuse_too_many_executed(program)
    except FormatError as error:
        error.where = _at(where, error.where.removeprefix("program").lstrip("."))
        raise
    if tuple(raw.requires) != program.requires:
        raise FormatError(f"says {raw.requires}, the program needs {list(program.requires)}", where=_at(where, "requires"))
    actual = program_hash(program)
    if raw.hash != actual:
        message = f"the contents have the hash {actual[:16]}..., not {raw.hash[:16]}..."
        raise FormatError(message, where=_at(where, "hash"), hint="the file is damaged or was edited by hand", data={"actual": actual})
    return actual, program


def _at(where: str, field: str) -> str:
    return where if not field else f"{where}.{field}" if ": " in where else f"{where}: {field}"


def _read_table(table: str, raw: _Columns, where: str, budget: Budget) -> Any:
    forms = column_forms(table)
    for name in raw:
        if name not in forms and name != "rows":
            raise FormatError(f"unknown field {name[:64]!r}", where=where)
    for name in ("rows", *forms):
        if name not in raw:
            raise FormatError(f"lacks the field {name!r}", where=where)
    count = decode(raw["rows"], _ROWS, f"{where}.rows")
    columns = {name: _read_column(form, raw[name], count, f"{where}.{name}", budget) for name, form in forms.items()}
    return TABLES[table](**columns)


def _read_column(form: str, raw: Any, count: int, where: str, budget: Budget) -> Any:
    if form == "csr":
        lists = decode(raw, _LISTS, where)
        ptr = decode_column(lists.ptr, np.int32, where=f"{where}.ptr", budget=budget)
        if not len(ptr):
            raise FormatError("needs at least one entry, 0", where=f"{where}.ptr")
        return Csr(ptr, decode_column(lists.values, np.int32, where=f"{where}.values", budget=budget))
    if form == "text":
        return _read_text(raw, count, where, budget)
    if form == "names":
        names = decode(raw, _NAMES, where)
        return tuple(names)
    if form == "routes":
        routes = decode(raw, _ROUTES, where)
        return tuple(map(tuple, routes))
    expected = None if form == "i32*" else count
    return decode_column(raw, np.int64 if form == "i64" else np.int32, where=where, budget=budget, expected=expected)


def _read_text(raw: Any, count: int, where: str, budget: Budget) -> tuple[str, ...]:
    text = decode(raw, _TEXT, where)
    # Buffers need not be named: then the column is empty.
    expected = None if where.endswith("buffers.name") and not text.words else count
    index = decode_column(text.index, np.int64, where=f"{where}.index", budget=budget, expected=expected)
    if len(index) and (index.min() < 0 or index.max() >= len(text.words)):
        raise FormatError(f"must be 0..{len(text.words) - 1}", where=f"{where}.index")
    number = decode_column(text.number, np.int64, where=f"{where}.number", budget=budget)
    if len(number) not in (0, len(index)):
        raise FormatError(f"has {len(number)} entries, expected 0 or {len(index)}", where=f"{where}.number")
    words = text.words
    if not len(number):
        return tuple(words[i] for i in index.tolist())
    lengths = np.array([len(word) for word in words], np.int64)
    budget.take_text(int(lengths[index[number >= 0]].sum()), where)
    return tuple(f"{words[i]}{n}" if n >= 0 else words[i] for i, n in zip(index.tolist(), number.tolist(), strict=True))


def _read_contract(raw: _Contract) -> Contract:
    return Contract(
        op=raw.op, inputs=tuple(raw.inputs), outputs=tuple(raw.outputs), root=raw.root, ranks=tuple(raw.ranks), peers=tuple(raw.peers),
        reproducible=raw.reproducible, numbers=tuple(raw.numbers),
    )  # fmt: skip


def _read_fold(raw: _Fold | None, buffers: int, where: str, budget: Budget) -> Fold | None:
    if raw is None:
        return None
    axes = tuple(FoldAxis(a.name, a.size, a.stride, a.kind) for a in raw.axes)
    folded = sum(axis.kind != "plain" for axis in axes)
    if len(raw.buffer_shift) != folded:
        raise FormatError(f"has {len(raw.buffer_shift)} rows, there are {folded} folded axes", where=f"{where}.buffer_shift")
    rows = [
        decode_column(row, np.int32, where=f"{where}.buffer_shift[{i}]", budget=budget, expected=buffers) for i, row in enumerate(raw.buffer_shift)
    ]
    shift = np.ascontiguousarray(rows, dtype=np.int32).reshape(folded, buffers)
    return Fold(axes=axes, buffer_shift=shift, fixed=tuple(raw.fixed), by_rank=raw.by_rank)
