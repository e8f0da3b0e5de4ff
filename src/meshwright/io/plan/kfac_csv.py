"""Times and bytes of a block with K-FAC as PipeFisher's authors publish them (`prof/*.csv` of kazukiosawa/pipe-fisher).

A heading, then a line per micro-batch size: `bs,time_f,time_b,time_kron,time_inv,time_prec,mem_param,mem_act,mem_peak_err,mem_save_err,mem_kron`,
times in milliseconds, memory in megabytes. Columns may stand in any order; a second heading (files that were measured in parts) is an error.
"""

from __future__ import annotations

import os
import re

from ...errors import FormatError
from ...profile.kfac import KFACRow
from ..limits import MaxBytes
from ..strict_json import read_text

__all__ = ["parse_kfac_csv", "read_kfac_csv"]

MAX_ROWS = 1000  # sizes of a micro-batch; the published files have up to nine
MAX_VALUE = 1e12  # ms or MB
MILLI, MEGA = 1e-3, 1e6
COLUMNS = {
    "bs": ("batch", 1.0), "time_f": ("forward_s", MILLI), "time_b": ("backward_s", MILLI), "time_kron": ("curvature_s", MILLI),
    "time_inv": ("inverse_s", MILLI), "time_prec": ("precondition_s", MILLI), "mem_param": ("weight_bytes", MEGA),
    "mem_act": ("activation_bytes", MEGA), "mem_peak_err": ("error_peak_bytes", MEGA), "mem_save_err": ("error_bytes", MEGA),
    "mem_kron": ("factor_bytes", MEGA),
}  # fmt: skip
_NUMBER = re.compile(r"\d{1,18}(\.\d{1,24})?([eE][-+]?\d{1,2})?\Z")


def read_kfac_csv(path: str | os.PathLike[str]) -> tuple[KFACRow, ...]:
    """A file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError."""
    where, text = read_text(path, MaxBytes.KFAC_CSV)
    return parse_kfac_csv(text, where=where)


def parse_kfac_csv(text: str, *, where: str = "csv") -> tuple[KFACRow, ...]:
    """By size of the micro-batch. Raises: FormatError that names the line and the column."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if len(lines) < 2 or len(lines) > MAX_ROWS + 1:
        raise FormatError(f"has {max(0, len(lines) - 1)} rows, wanted are 1 to {MAX_ROWS}", where=where, hint=f"a heading {','.join(COLUMNS)}")
    heading = [c.strip() for c in lines[0][1].split(",")]
    if sorted(heading) != sorted(COLUMNS):
        odd = sorted(set(heading) ^ set(COLUMNS)) or [c for c in heading if heading.count(c) > 1]
        raise FormatError(f"columns {', '.join(odd)[:80]}", where=f"{where}: line {lines[0][0]}", hint=f"each once: {','.join(COLUMNS)}")
    found: dict[int, KFACRow] = {}
    for number, line in lines[1:]:
        cells = [c.strip() for c in line.split(",")]
        if len(cells) != len(heading):
            raise FormatError(f"has {len(cells)} cells, the heading {len(heading)}", where=f"{where}: line {number}")
        values: dict[str, float] = {}
        for column, cell in zip(heading, cells, strict=True):
            if not _NUMBER.match(cell) or float(cell) > MAX_VALUE:
                raise FormatError(f"{cell[:40]!r} is no number from 0 to {MAX_VALUE:g}", where=f"{where}: line {number}: {column}")
            values[COLUMNS[column][0]] = float(cell) * COLUMNS[column][1]
        batch = int(values.pop("batch"))
        if batch < 1 or batch in found:
            raise FormatError("must be >= 1, and stand once", where=f"{where}: line {number}: bs")
        found[batch] = KFACRow(batch=batch, **values)
    return tuple(found[b] for b in sorted(found))
