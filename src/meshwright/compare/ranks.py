"""Traces of the ranks of one run as views with labels, each read and annotated in a process of its own where that is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..bottleneck.device import DeviceTimes, device_times
from ..bottleneck.from_trace import rank_view
from ..bottleneck.lanes import RankView
from ..errors import UsageError
from ..io.each_file import each_file
from ..io.trace.read import read_trace
from ..trace.module_tree import ModuleTree
from .labels import annotated_labels

__all__ = ["RankFile", "read_ranks", "traces_in"]


class RankFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the breakdown takes from a rank's trace: much smaller than the trace, which is gone once it is made."""

    path: Path
    view: RankView
    world_size: int | None
    device: DeviceTimes | None  # of CUDA traces


def read_ranks(paths: Sequence[Path], tree: ModuleTree | None = None, *, last_step: bool = True) -> list[RankFile]:
    """In the order of `paths`; a trace that does not say its rank has its place among them. Raises: as `read_trace`, `rank_view`, `each_file`."""

    def read(place: int, path: Path) -> RankFile:
        trace = read_trace(path)
        rank = trace.rank if trace.rank is not None else place
        view = rank_view(trace, annotated_labels(trace, tree), rank=rank)
        return RankFile(path=path, view=view, world_size=trace.world_size, device=device_times(trace, last_step=last_step))

    return each_file(read, paths)


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, by name; documents of ours beside them, such as a module tree, are none. Raises: UsageError if there is no trace."""
    found = sorted(x for x in folder.iterdir() if x.name.endswith((".json", ".json.gz")) and x.is_file() and not _is_document(x))
    if not found:
        raise UsageError("holds no trace", where=str(folder), hint="give traces (.json, .json.gz), or a folder of them")
    return found


def _is_document(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"meshwright.' in file.read(200)
