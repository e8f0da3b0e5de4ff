"""Pipeline schedules as CSV for torch.distributed.pipelining (`_PipelineScheduleRuntime._load_csv(file, format="compute_only")`).

One row per rank, one cell per compute action: `<stage><F|B|I|W><micro-batch>`, B the whole backward. PyTorch adds the communication itself, in
places of its own. It knows one rank per stage and one micro-batch per action, so schedules with copies of stages (Chimera) cannot be written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import FormatError, Unsupported

__all__ = ["pipeline_csv", "read_pipeline_csv"]

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
Cell = tuple[str, int, int]  # (kind, stage, micro-batch)


def pipeline_csv(orders: Sequence[Sequence[Cell]], *, copies: int = 1, grouped: bool = False, moved: bool = False) -> str:
    """The CSV text. Raises: Unsupported for what PyTorch's format cannot say."""
    if copies > 1:
        raise Unsupported(
            f"PyTorch's schedules have one rank per stage, this one has {copies} copies of every stage", where="csv",
            hint="export another schedule (zbv is near), or use --format trace", data={"copies": copies},
        )  # fmt: skip
    if grouped:
        raise Unsupported("PyTorch's schedules run one micro-batch per action", where="csv", hint="export another schedule, or use --format trace")
    if moved:
        raise Unsupported("PyTorch's schedules copy nothing to the host", where="csv", hint="plan without --host-copies, or use --format trace")
    return "".join(",".join(f"{stage}{kind}{microbatch}" for kind, stage, microbatch in order) + "\n" for order in orders)


def read_pipeline_csv(text: str, *, where: str = "csv") -> list[list[Cell]]:
    """Compute actions per rank of a `compute_only` file; idle cells are skipped. Raises: FormatError naming line and cell."""
    rows = []
    for i, line in enumerate(text.splitlines()):
        row = []
        for j, cell in enumerate(line.split(",")):
            cell = cell.strip().strip('"')
            if cell:
                row.append(_cell(cell, f"{where}: line {i + 1}, cell {j + 1}"))
        rows.append(row)
    return rows


def _cell(text: str, where: str) -> Cell:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise FormatError(f"{text[:32]!r} is no compute action", where=where, hint="cells are like 0F3, 4B1, 2I0, 2W0")
    return match[2], int(match[1]), int(match[3])
