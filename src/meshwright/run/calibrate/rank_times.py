"""Measured costs of the executor's own compute steps: a rank's whole step runs for real, only its messages are left out.

The executor walks its program as in a run: same order, same micro-batches in flight, same buffers, same local additions and copies. Messages are
replaced by a transport that fills received tensors with small random numbers, and leaves sums as what the rank has itself. So every compute step is
timed in place, with everything the executor does around it, and what is left of the step is the executor's own time per transfer step.

    silent = SilentRank(program, rank)
    executor = Executor(program, orders, rank, memory=memory, transport=silent.transport, work=silent.timed(work))
    times = silent.measure(executor.run, begin=work.begin)

Parameters and optimizer state change as in a real step (by wrong gradients): use copies, or restore them afterwards. Ranks may measure at the
same time under their pacing; their CPU times then contain what they cost each other in caches.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from ...cost import Priced
from ...errors import UsageError
from ...program.program import Kind, Part, Program
from ..executor.device_time import DeviceTime
from ..executor.schedule import Schedule
from ..executor.transport import Messages
from .message_times import add_s_per_byte
from .operators import quiet_single_thread

__all__ = ["RankTimes", "SilentRank", "SilentTransport", "adding_up", "merged_prices"]

_clock = time.thread_time
PATTERN_NUMEL = 1 << 16  # random numbers, repeated to fill received tensors of any length
MIN_TIMED_S, MAX_REPEATS = 0.4, 50  # so long, steps are repeated: one other program slows few short ones by half
PATTERN_SCALE = 1e-3  # zeros and denormals would be computed faster or slower than real values


class RankTimes(msgspec.Struct, frozen=True):
    """`prices`: by `Cost.table` key; `step_s`: median CPU seconds of a whole step, messages left out; `per_step_s`: executor's own time per
    transfer step; what adding received bytes takes (`message_times.add_s_per_byte`) is left out, since `Transport.per_byte_s` holds it;
    `begin_s`: CPU seconds of what comes before a step, fetching its micro-batches."""

    prices: dict[str, Priced]
    step_s: float
    per_step_s: float
    begin_s: float = 0.0


class Work(Protocol):
    """What is used of `meshwright.run.train.work.TrainingWork`."""

    def compile(self, op: int, memory: Any) -> Callable[[], None]: ...


class SilentTransport:
    """Messages that are not sent and arrive `wait_s` after they are waited for: a thread that sleeps finds its caches used by others, as in a run.
    `filled`: moments by `now` before and after their contents were made, by turns. Messages of the tags in `zeros` are zeros, of those in `left` what
    is in place already, of those in `alike` what was sent last of the same length."""

    grouped = False

    def __init__(self, now: Callable[[], float], device: torch.device, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        self.pattern = (torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(0)) * PATTERN_SCALE).to(device)
        self.now = now
        self.filled: list[float] = []
        self.zeros, self.left, self.alike = set[int](), set[int](), set[int]()
        self.sent: dict[int, torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        if self.alike:
            begin = self.now()
            self.sent[tensor.numel()] = tensor.detach().clone()
            self.filled += (begin, self.now())

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """True: there is something to wait for."""
        begin = self.now()
        flat = tensor.detach().reshape(-1)
        if tag in self.alike and flat.numel() in self.sent:
            flat.copy_(self.sent[flat.numel()].reshape(-1))
        elif tag in self.zeros or tag in self.alike:
            flat.zero_()
        elif tag not in self.left:
            for start in range(0, flat.numel(), PATTERN_NUMEL):
                part = flat[start : start + PATTERN_NUMEL]
                part.copy_(self.pattern[: part.numel()])
        self.filled += (begin, self.now())
        return True

    def exchange(self, sends: Messages, receives: Messages) -> Sequence[None]:
        for tensor, peer, tag in receives:
            self.receive(tensor, peer, tag)
        return [None]

    def wait(self, work: Any) -> None:
        if work and self.wait_s:
            time.sleep(self.wait_s)


class SilentRank:
    """Collects the time of every compute step of one rank: CPU time, or that of the device that `times` are of, which the executor begins and
    settles. See the module's text."""

    def __init__(self, program: Program, rank: int, times: DeviceTime | None = None, *, wait_s: float = 0.0) -> None:
        self.program, self.rank, self.times = program, rank, times
        self.now: Callable[[], float] = _clock if times is None else times.now
        self.transport = SilentTransport(self.now, torch.device("cpu") if times is None else times.device, wait_s)
        self.moments: dict[str, list[float]] = defaultdict(list)  # of the step under way, before and after each call by turns
        self.samples: dict[str, list[float]] = defaultdict(list)

    def timed(self, work: Work) -> Work:
        """The same work with a clock around every compute step."""
        return _Timed(work, self.program, self.now, self.moments)

    def leave_sums(self, schedule: Schedule) -> None:
        """Have sums, to which the rank gives what it has itself, be just that: gradients of a rank are zero where those of the others are, at units
        that ReLU keeps shut. Kernels depend on it: Adam's square roots of zeros took ten times as long as those of small numbers (torch 2.13, MKL),
        the step of 1.2 M weights of which 0.3 M had none 4.9 ms instead of 3.2."""
        s = self.program.steps
        given = {int(s.src_buffer[step]) for step in schedule.sends if int(s.parts[step]) & Part.READ}
        for step, receive in schedule.receives.items():
            stores, adds = bool(int(s.parts[step]) & Part.STORE), bool(int(s.parts[step]) & Part.ADD)
            if int(s.dst_buffer[step] if stores else s.src_buffer[step]) in given:
                of = self.transport
                (of.zeros if adds else of.left if receive.direct else of.alike).add(receive.tag)

    def measure(
        self, run: Callable[[], object], *, begin: Callable[[int], object] = lambda step: None, repeats: int = 3, warmup: int = 1,
        together: Callable[[bool], bool] = lambda more: more,
    ) -> RankTimes:  # fmt: skip
        """Run `warmup + repeats` steps, more of short ones. `begin(step)` is called before each (fetch micro-batches); its time counts apart.
        `together`: called before each step by all ranks, which go on where one of them wants more.

        Raises: UsageError for repeats < 1, and whatever the step raises.
        """
        if repeats < 1 or warmup < 0:
            raise UsageError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
        totals, rests, begins, calls = list[float](), list[float](), list[float](), dict[str, int]()
        transfers, added_bytes = self._transfers()
        # What a device adds stays in its time per step: `add_s_per_byte` is the processor's.
        adding_s = added_bytes * add_s_per_byte() if added_bytes and self.times is None else 0.0
        whole = _clock if self.times is None else time.perf_counter
        with quiet_single_thread():
            stop = time.perf_counter() + MIN_TIMED_S
            for step in range(warmup + MAX_REPEATS):
                if not together(step < warmup + repeats or time.perf_counter() < stop):
                    break
                before = _clock()
                begin(step)
                begun_s = _clock() - before
                start = whole()
                run()
                total = whole() - start
                filled_s = sum(self._lapses(self.transport.filled))
                lapses = {key: self._lapses(moments) for key, moments in self.moments.items()}
                if step >= warmup:
                    for key, found in lapses.items():
                        self.samples[key] += found
                        calls[key] = len(found)
                    begins.append(begun_s)
                    totals.append(total - filled_s)
                    rests.append(total - filled_s - sum(map(sum, lapses.values())))
        rest = max(0.0, statistics.median(rests) - adding_s)
        usual = {key: statistics.median(found) for key, found in self.samples.items()}
        computing = [total - other for total, other in zip(totals, rests, strict=True)]
        prices = {key: Priced(cpu, "measured", cpu) for key, cpu in adding_up(usual, calls, computing).items()}
        per_step_s = rest / transfers if transfers else 0.0
        return RankTimes(prices, statistics.median(totals), per_step_s, statistics.median(begins))

    def _lapses(self, moments: list[float]) -> list[float]:
        """Seconds between the moments of each pair, which are forgotten."""
        if self.times is not None:
            self.times.settle(moments)
        found = [b - a for a, b in zip(moments[::2], moments[1::2], strict=True)]
        moments.clear()
        return found

    def _transfers(self) -> tuple[int, int]:
        """(transfer steps of this rank, bytes that they add to local ones)."""
        p = self.program
        mine = (p.steps.kind == Kind.TRANSFER) & (p.lanes.actor[p.lane_of_step()] == self.rank)
        return int(mine.sum()), int(p.message_bytes()[mine & ((p.steps.parts & Part.ADD) != 0)].sum())


def adding_up(usual: Mapping[str, float], calls: Mapping[str, int], steps_s: Sequence[float]) -> dict[str, float]:
    """Prices that add up to a usual step. What hits few calls of each step, now this one, now that, is in no call's median: under a quota the first
    work of every period finds its caches used by others, 0.65 ms of 4 ms (8 linear layers of 384, shares of 0.4, four ranks on two cores)."""
    parts_s = sum(n * usual[key] for key, n in calls.items())
    factor = max(1.0, statistics.median(steps_s) / parts_s) if parts_s > 0 else 1.0
    return {key: factor * cpu for key, cpu in usual.items()}


class _Timed:
    def __init__(self, work: Work, program: Program, now: Callable[[], float], moments: dict[str, list[float]]) -> None:
        self.work, self.program, self.now, self.moments = work, program, now, moments

    def compile(self, op: int, memory: Any) -> Callable[[], None]:
        action, now, moments = self.work.compile(op, memory), self.now, self.moments[self.program.ops.key(op)]

        def timed() -> None:
            begin = now()
            action()
            moments.extend((begin, now()))

        return timed


def merged_prices(times: Mapping[int, RankTimes]) -> dict[str, Priced]:
    """One table from several ranks' times: the mean over the ranks that have a key (replicas and shards of one segment)."""
    found: dict[str, list[Priced]] = defaultdict(list)
    for rank in sorted(times):
        for key, price in times[rank].prices.items():
            found[key].append(price)
    return {key: Priced(statistics.fmean(p.time_s for p in ps), "measured", statistics.fmean(p.cpu_s for p in ps)) for key, ps in found.items()}
