"""What ranks do in the tests of the launcher."""

from __future__ import annotations

import os
import time
from typing import Any

from meshwright.errors import UsageError
from meshwright.run.machine.process import CALIBRATING, STATE
from meshwright.run.ranks.worker import Seat


def meet(seat: Seat) -> dict[str, Any]:
    """By the launcher's store, then by torch's own `env://`."""
    import torch
    import torch.distributed as dist

    found = []
    seat.join("cpu", 30.0).go()
    for again in (True, False):
        x = torch.ones(1)
        dist.all_reduce(x)
        found.append(int(x))
        if again:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo")
    return {"rank": seat.rank, "sums": found, "said": os.environ.get("MESHWRIGHT_TEST_SAID", "")}


def scheduling(seat: Seat) -> int:
    seat.link(100.0).go()
    return os.sched_getscheduler(0)


def waits(seat: Seat) -> None:
    """Says in the folder who it is, past its start, and waits to be ended."""
    seat.link(100.0).go()
    seat.progress[STATE] = CALIBRATING
    (seat.folder / f"here-{seat.rank}").write_text(str(os.getpid()))
    time.sleep(seat.options["sleep_s"])


def refuses(seat: Seat) -> None:
    if seat.rank == 1:
        raise UsageError("the question makes no sense", where="--question", hint="ask another one")
    waits(seat)


def breaks(seat: Seat) -> None:
    seat.link(100.0).go()
    seat.progress[STATE] = CALIBRATING
    if seat.rank == 1:
        raise ValueError("sample 20 is damaged")
    time.sleep(seat.options["sleep_s"])


def leaves(seat: Seat) -> None:
    seat.link(100.0).go()
    os._exit(3)
