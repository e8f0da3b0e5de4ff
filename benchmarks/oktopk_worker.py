"""One rank of `benchmarks/oktopk.py`: sparse all-reduces of gradient-like vectors, timed and counted on the interface. Not a benchmark by itself.

The vectors stand for gradients: importance decays along the vector (by `DECAY` from the first to the last element, with ripples such as layers make),
about half of the variance is common to all ranks, and the common part turns slowly from step to step while its size shrinks. Making them is not
timed: ranks meet at a barrier before and after each step, and the slowest rank's time counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np

DECAY = 30.0
ACK_BYTES, PACKET_BYTES = 66, 1514  # a packet that only acknowledges (Ethernet, IP and TCP with time stamps), and a full one


class Vectors:
    """`at(step)`: this rank's gradient, in an array that the next call overwrites."""

    def __init__(self, elements: int, rank: int) -> None:
        def noise(seed: int) -> Any:
            return np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)

        place = np.linspace(0, 1, elements, dtype=np.float32)
        scale = np.exp(-np.log(np.float32(DECAY)) * place) * (1 + 0.5 * np.sin(40 * place))
        self.common = noise(1) * scale, noise(2) * scale
        self.own, self.scale = noise(100 + rank), scale
        self.out = np.empty(elements, np.float32)

    def at(self, step: int) -> Any:
        angle = 0.03 * step
        np.multiply(self.common[0], np.float32(np.cos(angle)), out=self.out)
        self.out += self.common[1] * np.float32(np.sin(angle))
        turn = 7919 * step % len(self.out)
        self.out[turn:] += self.scale[turn:] * self.own[: len(self.out) - turn]
        self.out[:turn] += self.scale[:turn] * self.own[len(self.out) - turn :]
        self.out *= np.float32(1 / (1 + 0.01 * step))
        return self.out


def sent() -> tuple[int, int]:
    """(bytes with every packet's header, packets) that left through this namespace's interface."""
    command = ["tc", "-j", "-s", "qdisc", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    root = next(q for q in json.loads(subprocess.run(command, capture_output=True, check=True).stdout) if q.get("root"))
    return root["bytes"], root["packets"]


def payload_words(size_bytes: int, packets: int) -> float:
    """4-byte words of payload in what left: packets that only acknowledge are told from full ones by the mean length."""
    acks = max(0.0, (PACKET_BYTES * packets - size_bytes) / (PACKET_BYTES - ACK_BYTES))
    return (size_bytes - acks * ACK_BYTES) * 0.957 / 4


def costs(reducer: Any, group: Any) -> dict[str, Any]:
    """Seconds of this rank's kernels, by key of the programs' ops, and of a round of small messages, all ranks at once: what predictions use."""
    from meshwright.probe.traffic.sparse_prices import sparse_prices
    from meshwright.run.sparse.programs import program_of
    from meshwright.run.sparse.protocol import Protocol
    from meshwright.run.sparse.walk import ExchangeWalk, Place

    state = reducer.state
    headers = program_of("oktopk", "dense", ranks=state.ranks, elements=state.elements, k=state.k)

    def timed(what: Any) -> float:
        found = []
        for _ in range(5):
            group.barrier().wait()
            start = time.perf_counter()
            what()
            found.append(time.perf_counter() - start)
        return median(found)

    class Rows:
        """Headers that nobody reads."""

        rows = np.zeros((state.ranks, 9 + 2 * state.ranks), np.int64)

        def run(self, key: str, reads: tuple[Place, ...]) -> None:
            pass

        def place(self, at: Place) -> Any:
            return self.rows[at.first]

        def add(self, into: Place) -> None:
            pass

    walk = ExchangeWalk(headers, state.rank, Rows())

    def rounds() -> Protocol[None]:
        for _ in range(20):
            yield from walk.steps(reducer.runner)

    table = sparse_prices(state.elements, state.k, state.ranks, timed=timed)
    return {"rank": state.rank, "table": table, "round_s": timed(lambda: reducer.runner.run(rounds(), state.step)) / 20}


def main() -> None:
    import torch
    import torch.distributed as dist

    from meshwright.run.sparse import SparseAllReduce

    torch.set_num_threads(1)
    job = json.loads(os.environ["SPARSE_JOB"])
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    elements, k = job["elements"], job["k"]
    vectors = Vectors(elements, rank)
    for case in job["cases"]:
        group = dist.new_group(timeout=timedelta(minutes=10))
        warm = SparseAllReduce(group, elements, k=k, **case["settings"])  # compiles, connects, opens the connections' windows
        for step in range(3):
            warm.step(vectors.at(step))
        del warm
        reducer = SparseAllReduce(group, elements, k=k, **case["settings"])
        for step in range(case["steps"]):
            gradient = vectors.at(step)
            dist.barrier()
            before = sent()
            dist.barrier()
            start = time.perf_counter()
            if case["name"] == "gloo":
                dist.all_reduce(torch.from_numpy(gradient))
                took, stats = time.perf_counter() - start, None
            else:
                stats = reducer.step(gradient).stats
                took = time.perf_counter() - start
            dist.barrier()
            time.sleep(0.05)  # the last acknowledgements
            after = sent()
            words = payload_words(after[0] - before[0], after[1] - before[1])
            row: dict[str, Any] = {"rank": rank, "time_s": round(took, 5), "interface_words": round(words)}
            if stats is not None:
                row |= {
                    "kind": stats.kind, "words_sent": stats.words_sent, "words_received": stats.words_received, "control_words": stats.control_words,
                    "selected": stats.selected, "result": stats.result,
                }  # fmt: skip
                if stats.words_to_regions is not None:
                    row["to_regions"] = stats.words_to_regions.tolist()
            rows: list[Any] = [None] * ranks
            dist.all_gather_object(rows, row)
            if rank == 0:
                sys.stdout.write(json.dumps({"row": {"case": case["name"], "step": step, "ranks": rows}}) + "\n")
                sys.stdout.flush()
        if case["name"] == "oktopk":
            sys.stdout.write(json.dumps({"costs": costs(reducer, group)}) + "\n")
            sys.stdout.flush()
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
