"""One question to all ranks, and an answer of each: ranks that this machine's launcher starts, or a lab, or torchrun.

The question lies as `request.json` in a folder, rank r leaves its answer as `rank-r.json` there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from .launcher import LocalRanks, scratch_folder
from .worker import Seat

__all__ = ["answer", "answers", "seated"]

REQUEST = "request.json"


class _Asked(Protocol):
    @property
    def timeout_s(self) -> float: ...


R = TypeVar("R", bound=_Asked)
A = TypeVar("A")


def answers(request: _Asked, ranks: int, worker: Callable[[Seat], Any], kind: type[A], *, lab: Any = None, limit_hint: str = "") -> list[A]:
    """What every rank answers. `worker`: the function of a module that the launcher's ranks run; a lab runs that module,
    which calls `answer`. `lab`: a `meshwright.lab.Lab` that stands; none: this machine. Raises: what `LocalRanks.run` raises where a rank fails."""
    module = worker.__module__
    with scratch_folder(module.rpartition(".")[2]) as folder:
        (folder / REQUEST).write_bytes(msgspec.json.encode(request))
        if lab is None:
            LocalRanks(ranks, folder, worker, {}, limit_s=request.timeout_s, limit_hint=limit_hint).run()
        else:
            words = [sys.executable, "-m", module, str(folder)]
            lab.run(words, ranks=range(ranks), timeout_s=request.timeout_s, env={"OMP_NUM_THREADS": "1"})
        return [msgspec.json.decode((folder / f"rank-{r:03d}.json").read_bytes(), type=kind) for r in range(ranks)]


def seated(seat: Seat, kind: type[R], work: Callable[[R], A]) -> A:
    """The answer of a rank that the launcher started."""
    request = msgspec.json.decode((seat.folder / REQUEST).read_bytes(), type=kind)
    seat.join("cpu", request.timeout_s).go()
    return work(request)


def answer(folder: Path, kind: type[R], work: Callable[[R], Any]) -> None:
    """Of a rank that a lab, or torchrun, started: joins the gloo group, does `work`, and leaves the answer."""
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=kind)
    dist.init_process_group("gloo", timeout=timedelta(seconds=request.timeout_s))
    found = work(request)
    (folder / f"rank-{dist.get_rank():03d}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()
