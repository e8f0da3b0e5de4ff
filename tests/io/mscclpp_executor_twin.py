"""An interpreter of MSCCL++ plans (the subset without packets), from the executor's rules, sharing no code with meshwright: JSON in, integers out.

Blocks advance in random order. Data operations between two nops of a block may be carried out in any order that the test draws, and later
than signals and releases, which one thread does in order; a put over a port is carried out at any time up to the next flush or signal on
the way to that peer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any


class Hang(Exception):
    """All blocks wait."""


class Machine:
    def __init__(self, data: bytes, seed: int) -> None:
        self.plan = json.loads(data)
        self.random = random.Random(seed)
        self.gpus = self.plan["gpus"]
        self.n, self.coll = len(self.gpus), self.plan["collective"]
        first = self.gpus[0]
        self.ins, self.outs = first["input_chunks"], first["output_chunks"]
        draw = random.Random(3)
        self.input = [[draw.randrange(1, 1 << 40) for _ in range(self.ins)] for _ in range(self.n)]
        self.memory: list[dict[tuple[str, int], int]] = [{} for _ in range(self.n)]
        for r in range(self.n):
            for c in range(self.ins):
                self.memory[r][self.cell(r, "i", c)] = self.input[r][c]
        self.signals: dict[tuple[int, str, int], int] = {}
        self.semaphores = {(g["id"], k): s["init_value"] for g in self.gpus for k, s in enumerate(g.get("semaphores", []))}
        self.arrived: dict[tuple[int, int], int] = {}
        self.proxies: dict[tuple[int, int, int], list[Callable[[], None]]] = {}

    def cell(self, r: int, letter: str, at: int) -> tuple[str, int]:
        sizes = {"i": self.ins, "o": self.outs, "s": self.gpus[r]["scratch_chunks"]}
        assert 0 <= at < sizes[letter], "beyond the buffer"
        if self.plan["inplace"]:
            if self.coll == "allgather" and letter == "i":
                return "o", r * self.ins + at
            if self.coll == "reducescatter" and letter == "o":
                return "i", r * self.outs + at
            if letter == "o" and self.coll != "allgather":
                return "i", at
        return letter, at

    def where(self, g: dict[str, Any], block: dict[str, Any], op: dict[str, Any], ref: dict[str, Any]) -> list[tuple[int, tuple[str, int]]]:
        if "type" in ref:
            rank, letter = g["id"], ref["type"]
        else:
            ids = [x for r in block["remote_buffer_refs"] if r["access_channel_type"] == op["channel_type"] for x in r["remote_buffer_ids"]]
            there = g["remote_buffers"][ids[ref["buffer_id"]]]
            rank, letter = there["rank"], there["type"]
        return [(rank, self.cell(rank, letter, ref["index"] + k)) for k in range(ref["size"])]

    def end(self, g: dict[str, Any], block: dict[str, Any], op: dict[str, Any], local: int) -> tuple[int, int, int]:
        """(peer, my connection, the peer's connection)."""
        kind = op["channel_type"]
        mine = [x for c in block["channels"] if c["channel_type"] == kind for x in c["channel_ids"]][local]
        peers = [p for c in g["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
        peer = peers[mine]
        theirs = [p for c in self.gpus[peer]["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
        return peer, mine, [j for j, p in enumerate(theirs) if p == g["id"]][peers[:mine].count(peer)]

    def read(self, cells: list[tuple[int, tuple[str, int]]]) -> list[int]:
        return [self.memory[r].get(c, 0) for r, c in cells]

    def write(self, cells: list[tuple[int, tuple[str, int]]], values: list[int]) -> None:
        for (r, c), v in zip(cells, values, strict=True):
            self.memory[r][c] = v

    def drain(self, g: int, tb: int, peer: int | None = None) -> None:
        for (a, b, c), jobs in self.proxies.items():
            if (a, b) == (g, tb) and peer in (None, c):
                while jobs:
                    jobs.pop(0)()

    def data(self, g: dict[str, Any], block: dict[str, Any], op: dict[str, Any]) -> None:
        def at(ref: dict[str, Any]) -> list[tuple[int, tuple[str, int]]]:
            return self.where(g, block, op, ref)

        if op["name"] in ("copy", "put", "get"):
            for src, dst in zip(op["src_buff"], op["dst_buff"], strict=True):
                if op["name"] == "put" and op["channel_type"] == "port":
                    peer = at(dst)[0][0]
                    self.proxies.setdefault((g["id"], block["id"], peer), []).append(lambda s=at(src), d=at(dst): self.write(d, self.read(s)))
                else:
                    self.write(at(dst), self.read(at(src)))
        else:
            operands = [self.read(at(ref)) for ref in op["src_buff"]]
            for ref in op["dst_buff"]:
                self.write(at(ref), [sum(x) for x in zip(*operands, strict=True)])

    def signal(self, g: dict[str, Any], block: dict[str, Any], op: dict[str, Any]) -> None:
        for local in op["channel_ids"]:
            peer, _, theirs = self.end(g, block, op, local)
            self.drain(g["id"], block["id"], peer)
            key = (peer, op["channel_type"], theirs)
            self.signals[key] = self.signals.get(key, 0) + 1

    def run_block(self, g: dict[str, Any], block: dict[str, Any]) -> Iterator[bool]:
        open_jobs: list[Callable[[], None]] = []  # since the last nop: in any order

        def settle() -> None:
            self.random.shuffle(open_jobs)
            while open_jobs:
                open_jobs.pop()()

        rounds: dict[int, int] = {}
        for op in block["ops"]:
            name = op["name"]
            if name in ("wait", "rlxwait"):
                for local in op["channel_ids"]:
                    key = (g["id"], op["channel_type"], self.end(g, block, op, local)[1])
                    while not self.signals.get(key, 0):
                        yield False
                    self.signals[key] -= 1
            elif name == "sem_acquire":
                for k in op["semaphore_ids"]:
                    while not self.semaphores[g["id"], k]:
                        yield False
                    self.semaphores[g["id"], k] -= 1
            elif name == "sem_release":
                for k in op["semaphore_ids"]:
                    self.semaphores[g["id"], k] += 1
            elif name in ("signal", "rlxsignal"):
                self.signal(g, block, op)
            elif name == "flush":
                settle()
                self.drain(g["id"], block["id"])
            elif name == "nop":
                settle()
            elif name == "barrier":
                settle()
                key = (g["id"], op["barrier_id"])
                rounds[op["barrier_id"]] = rounds.get(op["barrier_id"], 0) + 1
                self.arrived[key] = self.arrived.get(key, 0) + 1
                while self.arrived[key] < rounds[op["barrier_id"]] * op["num_threadblocks"]:
                    yield False
            else:
                open_jobs.append(lambda op=op: self.data(g, block, op))
            if self.random.random() < 0.5 and open_jobs and name not in ("wait",):  # some are done at once
                open_jobs.pop(0)()
            for jobs in list(self.proxies.values()):
                if jobs and self.random.random() < 0.2:
                    jobs.pop(0)()
            yield True
        settle()
        self.drain(g["id"], block["id"])

    def run(self) -> Machine:
        running = [self.run_block(g, b) for g in self.gpus for b in g["threadblocks"]]
        while running:
            self.random.shuffle(running)
            moved, left = False, []
            for block in running:
                try:
                    got_on = next(block)
                    moved |= got_on
                    left.append(block)
                except StopIteration:
                    moved = True
            running = left
            if not moved:
                raise Hang
        return self

    def wrong(self) -> list[tuple[int, int]]:
        n, x, bad = self.n, self.input, []
        for r in range(n):
            for c in range(self.outs):
                wanted = {
                    "allreduce": lambda c=c: sum(x[q][c] for q in range(n)),
                    "allgather": lambda c=c: x[c // self.ins][c % self.ins],
                    "reducescatter": lambda r=r, c=c: sum(x[q][r * self.outs + c] for q in range(n)),
                    "alltoall": lambda r=r, c=c: x[c // (self.outs // n)][r * (self.outs // n) + c % (self.outs // n)],
                }[self.coll]()
                if self.memory[r].get(self.cell(r, "o", c)) != wanted:
                    bad.append((r, c))
        return bad


def replays(data: bytes, *, seeds: int = 3) -> None:
    """Runs a plan; raises where it is wrong, or an out-of-place run has changed its input."""
    for seed in range(seeds):
        m = Machine(data, seed).run()
        assert not m.wrong(), m.wrong()[:5]
        if not m.plan["inplace"]:
            assert all(m.memory[r][("i", c)] == m.input[r][c] for r in range(m.n) for c in range(m.ins))
