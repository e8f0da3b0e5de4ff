"""One rank of `backend`: takes seeds from its standard input, and says of each sequence how it went. See `backend`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import torch as ours
from ...errors import MeshwrightError, RankDiverged
from .calls import SETTINGS, Sequence, drawn, made

DEADLINE = timedelta(seconds=150)
MAX_CLOSING_S = 60.0  # that a rank goes on calling after its sequence until it hears of what it has missed


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # to say where it hangs
    dist.init_process_group("gloo", timeout=DEADLINE)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say: Any = {}
    while True:
        sys.stdout.write(json.dumps(say) + "\n")
        sys.stdout.flush()
        if not (text := sys.stdin.readline()):
            break
        say = ran(drawn(int(text), ranks), rank)
    os._exit(0)  # groups that are over may still have threads that wait


def ran(sequence: Sequence, rank: int) -> dict[str, Any]:
    """`outcome`: alike, diverged, or a mistake; `error`: what was raised; `seconds`: from the odd call until this rank raised."""
    ranks, seed = sequence.ranks, sequence.seed
    right: dict[int, list[torch.Tensor] | None] = {}
    for number, call in enumerate(sequence.line):
        try:
            _, results = made(call, rank, ranks, dist.group.WORLD, (seed, number + 1), joined=True)
            right[number] = [t.clone() for t in results()]
        except (RuntimeError, ValueError):  # gloo does not do it
            right[number] = None
    told = SETTINGS[sequence.setting]
    ours.configure(fabric=f"laptop:{ranks}" if told else "", **{"min_bytes": None, "builtin": None, "strategies": None, "small": None, **told})
    group: Any = dist.new_group(backend="meshwright", timeout=DEADLINE)
    try:
        return _compared(sequence, rank, group, right)
    finally:
        dist.destroy_process_group(group)


def _compared(sequence: Sequence, rank: int, group: Any, right: dict[int, list[torch.Tensor] | None]) -> dict[str, Any]:
    rng = np.random.default_rng((sequence.seed, rank, 11))
    told: dict[str, Any] = {"calls": 0, "seconds": 0.0, "error": ""}
    pending: list[tuple[int, Any, Any]] = []
    began: list[float] = []

    def end(number: int, results: Any) -> None:
        want = right.get(number)
        # Equal calls cannot be told apart: once a rank is a call ahead or behind, they meet the data of others, until an unlike one comes.
        shifted = 0 <= sequence.at <= number and sequence.how in ("left out", "twice", "order")
        if number < 0 or want is None or shifted:
            return
        told["calls"] += 1
        if any(not torch.equal(a, b) for a, b in zip(want, results(), strict=True)):
            told.update(outcome="wrong", error=f"call {number} ({sequence.line[number]}) gives another value")

    def settle() -> None:
        while pending:
            number, work, results = pending.pop(0)
            work.wait()
            end(number, results)

    try:
        for place, (number, call) in enumerate(sequence.calls(rank)):
            if place >= max(sequence.at, 0) and not began:
                began.append(time.monotonic())
            if number >= 0 and right[number] is None:
                continue
            if call.op in ("send", "all_gather_object"):
                settle()  # both wait, behind all that is under way
            gaps = bool(rng.random() < 0.2) and call.op != "send"  # gloo refuses them for point-to-point calls
            work, results = made(call, rank, sequence.ranks, group, (sequence.seed, number + 1), gaps=gaps, waits=call.waits)
            if work is None:
                end(number, results)
            else:
                pending.append((number, work, results))
            if len(pending) > 3:
                settle()
        if not began:  # the odd rank has left out its last call
            began.append(time.monotonic())
        settle()
        limit = time.monotonic() + MAX_CLOSING_S
        while True:
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            if sequence.odd < 0 or time.monotonic() > limit:
                break
            time.sleep(0.01)
        if sequence.odd < 0 and x.item() != sequence.ranks:
            told.update(outcome="wrong", error="the last sum")
        told.setdefault("outcome", "alike" if sequence.odd < 0 else "accepted")
    except RankDiverged as error:
        told["seconds"] = time.monotonic() - began[0]
        told["error"], told["named"] = told["error"] or str(error), error.data.get("rank", -1)
        told.setdefault("outcome", "diverged" if sequence.odd >= 0 else "wrong")
    except (MeshwrightError, RuntimeError, ValueError) as error:
        told.setdefault("outcome", "wrong")
        told["error"] = told["error"] or f"{type(error).__name__}: {error}"
    return told


if __name__ == "__main__":
    main()
