"""NCCL tuner configuration: the CSV file of NCCL's example tuner plugin, which overrides the choice of algorithm, protocol and channels.

    # collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
    allreduce,0,65536,tree,ll,2,1,8,-1,-1

The plugin takes the first line that matches. It is lenient where that hurts: an unknown collective is read as allreduce, an unknown algorithm
as ring, an unknown protocol as simple, and a line longer than 255 characters is torn in two. All of that is refused here, and so are lines
that never match because an earlier one covers them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import FormatError, UsageError
from ..atomic import write_text
from ..limits import MaxBytes
from ..strict_json import read_at_most

__all__ = ["ALGORITHMS", "NO_LIMIT", "TunerRow", "first_match", "parse_tuner", "read_tuner", "rows_of_choices", "tuner_text", "write_tuner"]

COLLECTIVES = {
    "broadcast": "broadcast", "reduce": "reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce",
}  # fmt: skip
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
NO_LIMIT = (1 << 64) - 1  # size_t; the plugin's own documents write 4294967295, which ends at 4 GiB
_FIELDS = ("collective_type", "min_bytes", "max_bytes", "algorithm", "protocol", "channels", "nNodes", "nRanks", "numPipeOps", "regBuff")
_MAX_LINE_CHARACTERS = 255  # what the plugin reads of a line


@dataclass(frozen=True, kw_only=True)
class TunerRow:
    """One line. `op` is our name of the collective; -1 = any, or NCCL's own number of channels. Sizes as NCCL counts them for the
    operation: all-gather, the whole gathered buffer; reduce-scatter, one rank's whole input; otherwise the buffer."""

    op: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int = -1
    nodes: int = -1
    ranks: int = -1
    pipe_ops: int = -1
    registered: int = -1

    def matches(self, op: str, size_bytes: int, *, nodes: int, ranks: int, pipe_ops: int = 1, registered: int = 0) -> bool:
        wanted = ((self.nodes, nodes), (self.ranks, ranks), (self.pipe_ops, pipe_ops), (self.registered, registered))
        return op == self.op and self.min_bytes <= size_bytes <= self.max_bytes and all(x in (-1, y) for x, y in wanted)

    def covers(self, other: TunerRow) -> bool:
        """Whether every call that the other matches is matched by this one."""
        mine = (self.nodes, self.ranks, self.pipe_ops, self.registered)
        theirs = (other.nodes, other.ranks, other.pipe_ops, other.registered)
        sizes = self.min_bytes <= other.min_bytes and other.max_bytes <= self.max_bytes
        return self.op == other.op and sizes and all(x in (-1, y) for x, y in zip(mine, theirs, strict=True))


def first_match(rows: Sequence[TunerRow], op: str, size_bytes: int, *, nodes: int, ranks: int) -> TunerRow | None:
    """The row that the plugin takes for a call."""
    return next((row for row in rows if row.matches(op, size_bytes, nodes=nodes, ranks=ranks)), None)


def rows_of_choices(op: str, choices: Sequence[tuple[int, str, str, int]], *, nodes: int = -1, ranks: int = -1) -> list[TunerRow]:
    """Rows for choices (size in bytes, algorithm, protocol, channels) at rising sizes.

    A choice holds from its size (the first from 0) to one byte below the next; the last has no upper end. Equal neighbours become one row.
    Raises: UsageError for no choices, sizes that do not rise, and names that the plugin does not know.
    """
    if not choices:
        raise UsageError("a tuner configuration needs at least one size")
    rows: list[TunerRow] = []
    for k, (size, algorithm, protocol, channels) in enumerate(choices):
        if k and size <= choices[k - 1][0]:
            raise UsageError(f"sizes must rise, got {size} after {choices[k - 1][0]}")
        end = choices[k + 1][0] - 1 if k + 1 < len(choices) else NO_LIMIT
        sizes = (size if k else 0, end)
        row = TunerRow(
            op=op, min_bytes=sizes[0], max_bytes=sizes[1], algorithm=algorithm, protocol=protocol, channels=channels, nodes=nodes, ranks=ranks,
        )  # fmt: skip
        try:
            _row(_line(row), "choices")
        except FormatError as error:
            raise UsageError(error.message) from None
        same = rows and (rows[-1].algorithm, rows[-1].protocol, rows[-1].channels) == (algorithm, protocol, channels)
        rows[-1:] = [replace(rows[-1], max_bytes=end)] if same else [*rows[-1:], row]
    return rows


# ---- writing -----------------------------------------------------------------------------------------------------------
def _line(row: TunerRow) -> str:
    spelling = next((name for name, op in COLLECTIVES.items() if op == row.op), row.op)
    fields = (
        spelling, row.min_bytes, row.max_bytes, row.algorithm, row.protocol, row.channels, row.nodes, row.ranks, row.pipe_ops, row.registered,
    )  # fmt: skip
    return ",".join(map(str, fields))


def tuner_text(rows: Sequence[TunerRow]) -> str:
    return "\n".join([f"# {','.join(_FIELDS)}", *(_line(row) for row in rows), ""])


def write_tuner(path: str | os.PathLike[str], rows: Sequence[TunerRow]) -> None:
    """Write all or nothing. Raises: FormatError for rows that could not be read back; what `io.atomic` raises."""
    text = tuner_text(rows)
    parse_tuner(text.encode(), Path(path).name)
    write_text(path, text)


# ---- reading -----------------------------------------------------------------------------------------------------------
def read_tuner(path: str | os.PathLike[str]) -> list[TunerRow]:
    """The rows of a file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError."""
    where, data = read_at_most(path, MaxBytes.NCCL_TUNER)
    return parse_tuner(data, where)


def parse_tuner(data: bytes, where: str = "tuner") -> list[TunerRow]:
    """The rows of a document. Raises: FormatError, with the line."""
    if len(data) > MaxBytes.NCCL_TUNER:
        raise FormatError(f"larger than {MaxBytes.NCCL_TUNER} bytes", where=where)
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise FormatError(f"must be plain ASCII text, byte {error.start} is not", where=where) from None
    rows: list[TunerRow] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        at = f"{where}: line {number}"
        row = _row(line, at)
        for k, earlier in enumerate(rows):
            if earlier.covers(row):
                raise FormatError(f"never matches: row {k + 1} takes every call that it would", where=at, hint="narrow that row, or remove this one")
        rows.append(row)
    if not rows:
        raise FormatError("has no configuration line", where=where)
    return rows


def _row(line: str, at: str) -> TunerRow:
    if len(line) > _MAX_LINE_CHARACTERS:
        raise FormatError(f"has {len(line)} characters, the plugin reads {_MAX_LINE_CHARACTERS}", where=at)
    fields = [field.strip(" \t") for field in line.split(",")]
    if not 8 <= len(fields) <= 10:
        raise FormatError(f"has {len(fields)} fields, expected 8 to 10: {','.join(_FIELDS)}", where=at)

    def chosen(k: int, names: Sequence[str], otherwise: str) -> str:
        if fields[k] not in names:
            hint = f"one of {', '.join(names)}; the plugin would silently take {otherwise}"
            raise FormatError(f"{_FIELDS[k]}: unknown name {fields[k][:40]!r}", where=at, hint=hint)
        return fields[k]

    def whole(k: int, least: int, most: int) -> int:
        text = fields[k] if k < len(fields) else "-1"
        digits = text.removeprefix("-")
        if not digits.isdigit() or len(digits) > 20:
            raise FormatError(f"{_FIELDS[k]}: must be a whole number, got {text[:40]!r}", where=at)
        if not least <= int(text) <= most:
            raise FormatError(f"{_FIELDS[k]}: must be {least}..{most}, got {text}", where=at)
        return int(text)

    row = TunerRow(
        op=COLLECTIVES[chosen(0, tuple(COLLECTIVES), "allreduce")], min_bytes=whole(1, 0, NO_LIMIT), max_bytes=whole(2, 0, NO_LIMIT),
        algorithm=chosen(3, ALGORITHMS, "ring"), protocol=chosen(4, PROTOCOLS, "simple"), channels=whole(5, -1, 64), nodes=whole(6, -1, 1 << 20),
        ranks=whole(7, -1, 1 << 24), pipe_ops=whole(8, -1, 1 << 20), registered=whole(9, -1, 1),
    )  # fmt: skip
    if row.max_bytes < row.min_bytes:
        raise FormatError(f"max_bytes {row.max_bytes} is below min_bytes {row.min_bytes}: the line never matches", where=at)
    if 0 in (row.channels, row.nodes, row.ranks):
        raise FormatError("channels, nNodes and nRanks are -1 (any) or at least 1, got 0", where=at)
    return row
