"""Ranks' walks in one thread: messages in queues, the next rank chosen by a seed. The oracle's side of the executor's tests."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from meshwright.program.program import Program
from meshwright.run.group.call import Call, Session
from meshwright.run.group.chunks import BLOCKED
from meshwright.run.group.instructions import Op
from meshwright.run.group.rank_code import Bound, compile_rank, form_of
from meshwright.run.group.walk import Under, walk
from meshwright.run.group.waves import compile_waves, walk_waves, waves_of


@dataclass
class _Message:
    tensor: torch.Tensor
    done: bool = False
    copy: Callable[[], None] = lambda: None  # what is left to do when it is over


def _once(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    moved: list[bool] = []

    def copy() -> None:
        if not moved:
            target.copy_(source)
            moved.append(True)

    return copy


@dataclass
class Network:
    sent: dict[Any, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    posted: dict[Any, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    delivered: int = 0
    lazy: bool = False  # the bytes move when either side is told that they have

    def match(self, key: Any) -> None:
        while self.sent[key] and self.posted[key]:
            out, into = self.sent[key].popleft(), self.posted[key].popleft()
            assert out.tensor.numel() == into.tensor.numel(), key
            if self.lazy:
                out.copy = into.copy = _once(out.tensor, into.tensor)
            else:
                into.tensor.copy_(out.tensor)
            out.done = into.done = True
            self.delivered += 1


@dataclass
class End:
    network: Network
    rank: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        key, message = (self.rank, peer, tag), _Message(tensor)
        self.network.sent[key].append(message)
        self.network.match(key)
        return message

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        key, message = (peer, self.rank, tag), _Message(tensor)
        self.network.posted[key].append(message)
        self.network.match(key)
        return message


def inputs(op: str, n: int, elements: int, rng: np.random.Generator, dtype: torch.dtype) -> list[torch.Tensor]:
    blocks = n if op in ("reduce-scatter", "all-to-all", "scatter") else 1
    return [torch.tensor(rng.integers(-9, 10, elements * blocks)).to(dtype) for _ in range(n)]


def calls(op: str, given: list[torch.Tensor], elements: int, root: int) -> list[Call]:
    n, made = len(given), []
    for rank, source in enumerate(given):
        own = source.clone()
        blocks = n if op in ("all-gather", "all-to-all") or (op == "gather" and rank == root) else 1
        fresh = torch.full((elements * blocks,), -77).to(source.dtype)
        if op in ("all-reduce", "broadcast", "reduce"):
            made.append(Call(op, own, own, root))
        elif op == "scatter":
            made.append(Call(op, own if rank == root else None, fresh, root))
        elif op == "gather":
            made.append(Call(op, own, fresh if rank == root else None, root))
        else:
            made.append(Call(op, own, fresh, root))
    return made


def wanted(op: str, given: list[torch.Tensor], elements: int, root: int, rank: int) -> torch.Tensor | None:
    """What the operation's definition says; None: anything."""
    n, total = len(given), sum(given[1:], given[0].clone())
    mine = slice(rank * elements, (rank + 1) * elements)
    return {
        "all-reduce": lambda: total, "broadcast": lambda: given[root], "reduce": lambda: total if rank == root else given[rank],
        "all-gather": lambda: torch.cat(given), "gather": lambda: torch.cat(given) if rank == root else None,
        "reduce-scatter": lambda: total[mine], "scatter": lambda: given[root][mine],
        "all-to-all": lambda: torch.cat([given[s][mine] for s in range(n)]),
    }[op]()  # fmt: skip


def in_code_order(bound: list[Bound], network: Network, rng: np.random.Generator) -> None:
    """The real walks; the seed says which rank goes on."""
    walks = [walk(b, End(network, r), lambda a, b: a.add_(b), Under()) for r, b in enumerate(bound)]
    waits = [next(w, None) for w in walks]
    while any(w is not None for w in waits):
        ready = [r for r, w in enumerate(waits) if w is not None and w.work.done]
        assert ready, f"ranks wait for each other: {waits}"
        chosen = int(rng.choice(ready))
        waits[chosen] = next(walks[chosen], None)


def in_any_order(bound: list[Bound], network: Network, rng: np.random.Generator) -> None:
    """Whatever the dependencies allow, and messages copied at the last moment: nothing but the dependencies keeps the results right."""
    network.lazy = True
    left = [list(b.code.flow.waits) for b in bound]
    ready = [(r, row) for r, waits in enumerate(left) for row, count in enumerate(waits) if not count]
    works: dict[tuple[int, int], _Message] = {}
    while ready:
        can = [x for x in ready if (w := works.get(x)) is None or w.done]
        assert can, "ranks wait for each other"
        rank, row = chosen = can[int(rng.integers(len(can)))]
        ready.remove(chosen)
        op, _, tensor, source, key, peer, tag = bound[rank].rows[row]
        end = End(network, rank)
        if op in (Op.POST, Op.SEND):
            assert tensor is not None
            work = end.receive(tensor, peer, tag) if op == Op.POST else end.send(tensor, peer, tag)
            over = Op.TAKE if op == Op.POST else Op.DONE
            works[rank, next(i for i, r in enumerate(bound[rank].rows) if r[0] == over and r[4] == key)] = work
        elif op in (Op.TAKE, Op.DONE):
            works[chosen].copy()
        elif tensor is not None:
            tensor.add_(source) if op == Op.ADD else tensor.copy_(source)
        for follower in bound[rank].code.flow.followers[row]:
            left[rank][follower] -= 1
            if not left[rank][follower]:
                ready.append((rank, follower))
    assert not any(any(waits) for waits in left)


def in_waves(bound: list[Any], network: Network, rng: np.random.Generator) -> None:
    """As groups of calls: a rank's group ends once all its peers have made theirs. Ranks make them when the seed says so; a peer's order must fit."""
    walks = [_grouped(r, b, network) for r, b in enumerate(bound)]
    left = set(range(len(walks)))
    waits: list[list[_Message]] = [[] for _ in walks]
    while left:
        ready = [r for r in sorted(left) if all(m.done for m in waits[r])]
        assert ready, "ranks wait for each other"
        rank = int(rng.choice(ready))
        group = next(walks[rank], None)
        if group is None:
            left.remove(rank)
        else:
            waits[rank] = group


def _grouped(rank: int, bound: Any, network: Network) -> Iterator[list[_Message]]:
    """The walk of one rank, standing still at every group: `walk_waves` in a thread of its own, which only ever runs while this waits."""
    groups: queue.Queue[list[_Message] | BaseException | None] = queue.Queue()
    go_on = threading.Semaphore(0)
    end = End(network, rank)

    def exchange(sends: list[Any], receives: list[Any]) -> None:
        groups.put([end.receive(t, peer, 0) for t, peer in receives] + [end.send(t, peer, 0) for t, peer in sends])
        go_on.acquire()

    def run() -> None:
        go_on.acquire()
        try:
            walk_waves(bound, exchange, lambda a, b: a.add_(b))
            groups.put(None)
        except BaseException as error:
            groups.put(error)

    threading.Thread(target=run, daemon=True).start()
    while True:
        go_on.release()
        found = groups.get(timeout=200)
        if isinstance(found, BaseException):
            raise found
        if found is None:
            return
        yield found


def run_virtually(
    program: Program, op: str, elements: int, root: int, seed: int, dtype: torch.dtype = torch.int64, repeats: int = 1,
    drive: Callable[[list[Any], Network, np.random.Generator], None] = in_code_order,
) -> Network:  # fmt: skip
    """Run on tensors of `elements` elements per block and compare every rank with the definition; inputs must survive where torch says so."""
    rng, n = np.random.default_rng(seed), program.ranks
    form = form_of(program)
    if drive is in_waves:
        waves = waves_of(form.unrolled)
        codes: list[Any] = [compile_waves(form, waves, r, elements) for r in range(n)]
    else:
        codes = [compile_rank(form, r, elements) for r in range(n)]
    sessions = [Session(code, op, root, elements, dtype, torch.device("cpu")) for code in codes]
    network = Network()
    for _ in range(repeats):
        given = inputs(op, n, elements, rng, dtype)
        asked = calls(op, given, elements, root)
        bound = [session.with_tensors(call) for session, call in zip(sessions, asked, strict=True)]
        drive([b for b, _ in bound], network, rng)
        for _, finish in bound:
            finish()
        assert not any(network.sent.values()) and not any(network.posted.values()), "messages were left over"
        for rank, call in enumerate(asked):
            want = wanted(op, given, elements, root, rank)
            if want is not None and call.target is not None:
                assert torch.equal(call.target, want), (op, rank)
            if call.source is not None and call.source is not call.target:
                assert torch.equal(call.source, given[rank]), f"{op} changed the input of rank {rank}"
    return network


__all__ = ["BLOCKED", "in_any_order", "in_waves", "run_virtually"]
