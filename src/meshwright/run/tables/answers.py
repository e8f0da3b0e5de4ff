"""A rank that a lab, or torchrun, started: it reads what is asked from a folder and leaves its answer there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist

__all__ = ["answer"]


class _Asked(Protocol):
    @property
    def timeout_s(self) -> float: ...


R = TypeVar("R", bound=_Asked)


def answer(folder: Path, kind: type[R], work: Callable[[R], Any]) -> None:
    """Joins the gloo group, does `work` on `request.json`, and writes `rank-NNN.json`."""
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=kind)
    dist.init_process_group("gloo", timeout=timedelta(seconds=request.timeout_s))
    found = work(request)
    (folder / f"rank-{dist.get_rank():03d}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()
