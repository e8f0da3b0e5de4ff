"""Message times between the ranks of an initialised process group, measured by all of them together.

Runs at the start of a run, in its ranks; torch.distributed must be initialised with gloo on the default group for the processor, one intra-op
thread. Messages go as in the executor: receives are posted ahead, sends do not block, each work is waited for once. Between
exchanges every rank computes for a few milliseconds, as between the messages of a training step: the transport's threads then find the cores
busy and the quota partly used, which costs several times what back-to-back messages show.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..executor.tags import ReservedTag
from ..executor.transport import TaggedTransport, Transport

__all__ = ["MessageTimes", "add_s_per_byte"]

CPU = torch.device("cpu")
MIN_ROUNDS = 8  # messages of a batch, whatever they take
COLD_BYTES = 8 << 20  # of messages by turns: more than a core's own caches hold
MAX_TURNS = 64  # of short messages, which cost what they cost wherever they are
Rounds = Callable[[int], tuple[float, float, float]]  # number of rounds -> seconds spent in messages: wall, of the process, of the calling thread


class MessageTimes:
    """`run()` returns this rank's part; `meshwright.run.calibrate.transport.calibration_of` makes a calibration of all ranks' parts.

    Collective: every rank of the default group must call it at the same point. Without a transport, messages of the default group.
    """

    def __init__(
        self, *, sizes: Sequence[int], budget_s: float, batches: int, transport: Transport | None = None, device: torch.device = CPU
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.transport, self.device = transport or TaggedTransport(dist.group.WORLD), device
        self.module: Any = torch.get_device_module(device.type)
        self.sizes, self.budget_s, self.batches = list(sizes), budget_s, batches
        self.tag = int(ReservedTag.MESSAGE_TIMES)
        self.work = (torch.ones(256, 512, device=device), torch.ones(512, 512, device=device), torch.ones(2**19, device=device))

    def run(self, counting: Any = None) -> dict[str, Any]:
        """`counting`: a process group whose small sums are timed too."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            dist.barrier()
            part: dict[str, Any] = {"add_s_per_byte": add_s_per_byte(), "sizes": self.sizes}
            part["ring"] = [self.measure(self.ring, size) for size in self.sizes]
            part["pingpong"] = [self.measure(self.pingpong, size) for size in self.sizes[::2]]
            if counting is not None:
                part["small_sum_s"], part["small_sum_cpu_s"] = self.small_sum_s(counting)
            dist.barrier()
            return part
        finally:
            if collecting:
                gc.enable()

    def tensor(self, size: int) -> torch.Tensor:
        """Written, so in pages of its own: the system's one page of zeros is in every cache."""
        return torch.ones(size, dtype=torch.uint8, device=self.device)

    def cold(self, size: int) -> tuple[torch.Tensor, ...]:
        """Two at least, of which none is in a cache when its turn comes, as parts of all gradients are not."""
        count = max(2, min(MAX_TURNS, COLD_BYTES // size))
        return tuple(self.tensor(size * count).split(size))

    def ring(self, size: int) -> Rounds:
        """n rounds: all compute, then send to the next rank and receive from the one before, two receives posted ahead; in groups, where the
        transport has them, both at once. Wall time: of the median round, since a few rounds wait long for other programs, or for a quota."""
        if self.transport.grouped:
            return self.grouped_ring(size)
        outgoing, slots = self.cold(size), self.cold(size)
        after, before, tag, transport = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks, self.tag, self.transport

        def rounds(n: int) -> tuple[float, float, float]:
            walls, cpu, thread = list[float](), 0.0, 0.0
            posted = [transport.receive(slots[i], before, tag) for i in range(min(2, n))]
            count = len(slots)
            for i in range(n):
                self.burst()
                begin, used, own = time.perf_counter(), time.process_time(), time.thread_time()
                sent = transport.send(outgoing[i % count], after, tag)
                transport.wait(posted[i])
                if i + 2 < n:
                    posted.append(transport.receive(slots[(i + 2) % count], before, tag))
                transport.wait(sent)
                walls.append(time.perf_counter() - begin)
                cpu += time.process_time() - used
                thread += time.thread_time() - own
            return n * statistics.median(walls), cpu, thread

        return rounds

    def grouped_ring(self, size: int) -> Rounds:
        outgoing, incoming, transport = self.tensor(size), self.tensor(size), self.transport
        sends, receives = [(outgoing, (self.rank + 1) % self.ranks, self.tag)], [(incoming, (self.rank - 1) % self.ranks, self.tag)]

        def rounds(n: int) -> tuple[float, float, float]:
            wall = cpu = 0.0
            for _ in range(n):
                self.burst()
                self.module.synchronize(self.device)
                begin, used = time.perf_counter(), time.process_time()
                for work in transport.exchange(sends, receives):
                    transport.wait(work)
                self.module.synchronize(self.device)
                wall += time.perf_counter() - begin
                cpu += time.process_time() - used
            return wall, cpu, cpu

        return rounds

    def burst(self) -> None:
        """A few milliseconds of what training does between messages."""
        torch.mm(self.work[0], self.work[1])
        torch.tanh(self.work[2])

    def pingpong(self, size: int) -> Rounds:
        """n one-way messages between ranks 0 and 1, by turns; the others do nothing."""
        outgoing, incoming, tag, transport = self.tensor(size), self.tensor(size), self.tag, self.transport

        def rounds(n: int) -> tuple[float, float, float]:
            begin, used, own = time.perf_counter(), time.process_time(), time.thread_time()
            if self.rank > 1:
                return 0.0, 0.0, 0.0
            peer = 1 - self.rank
            for i in range(n):
                if i % 2 == self.rank:
                    transport.wait(transport.send(outgoing, peer, tag))
                else:
                    transport.wait(transport.receive(incoming, peer, tag))
            self.module.synchronize(self.device)
            return time.perf_counter() - begin, time.process_time() - used, time.thread_time() - own

        return rounds

    def small_sum_s(self, group: Any) -> tuple[float, float]:
        """Of a sum of a few numbers over the group, whose ranks compute before it: median wall seconds, mean processor seconds of this process."""
        number, waits, used_s = torch.zeros(2, dtype=torch.float64), [], 0.0
        for _ in range(2 * MIN_ROUNDS):
            self.burst()
            begin, used = time.perf_counter(), time.process_time()
            dist.all_reduce(number, group=group)
            waits.append(time.perf_counter() - begin)
            used_s += time.process_time() - used
        return statistics.median(waits), used_s / len(waits)

    def measure(self, make: Callable[[int], Rounds], size: int) -> dict[str, float]:
        """Median over batches of wall and CPU seconds per message round; the number of rounds is agreed by all ranks.

        Untimed rounds before each batch bring the ranks together: those leaving a barrier are up to a quota period apart.
        """
        self.tag += 1
        rounds = make(size)
        dist.barrier()
        rounds(2)
        begin = time.perf_counter()
        rounds(4)
        guess = torch.tensor([(time.perf_counter() - begin) / 4], dtype=torch.float64)
        dist.all_reduce(guess, op=dist.ReduceOp.MAX)
        n = max(MIN_ROUNDS, min(1000, int(self.budget_s / self.batches / max(float(guess), 1e-6)) // 2 * 2))
        wall, cpu, thread = list[float](), list[float](), list[float]()
        for _ in range(self.batches):
            rounds(2)
            for into, spent in zip((wall, cpu, thread), rounds(n), strict=True):
                into.append(spent / n)
        return {"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "thread_s": statistics.median(thread), "rounds": n}


def add_s_per_byte() -> float:
    """CPU seconds per byte of adding a received fp32 array to a local one, larger than the second-level cache."""
    a, b = torch.zeros(2**20), torch.ones(2**20)
    samples = []
    for _ in range(9):
        begin = time.thread_time()
        a.add_(b)
        samples.append((time.thread_time() - begin) / (4 * 2**20))
    return statistics.median(samples)
