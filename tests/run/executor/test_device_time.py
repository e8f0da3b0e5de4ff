"""Accelerators: moments, memory and streams are those of the tensors' device. A device of our own plays it, behind the calls that are really made."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import Deadlock, Unsupported
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Program
from meshwright.run.calibrate.rank_times import SilentRank
from meshwright.run.executor.device_time import DeviceTime, device_time
from meshwright.run.executor.executor import Executor, StepFailed
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.rounds import Round, compile_rounds, require_ends
from meshwright.run.executor.transport import GroupedTransport, connected, grouped_calls, own_stream
from meshwright.run.recording.module_clock import ModuleClock
from meshwright.run.steps.storage_peak import allocator_peak
from meshwright.run.steps.variants import sign_bits

CPU, OTHER = torch.device("cpu"), torch.device("cuda", 3)


class Device:
    """What `torch.get_device_module` has, of a device that works through what it is given only when somebody waits for it.

    `work(seconds)` puts work on the current stream. `told`: whom calls were about.
    """

    def __init__(self) -> None:
        self.clock_s, self.told = 1000.0, list[Any]()
        self.queue: list[Any] = []
        self.current = SimpleNamespace(name="default")
        self.stats = {"allocated_bytes.all.peak": 2048, "requested_bytes.all.peak": 1900}
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at_s: float | None = None

            def record(self, stream: Any) -> None:
                assert stream is device.current
                self.at_s = None
                device.queue.append(self)

            def elapsed_time(self, other: Any) -> float:
                assert self.at_s is not None and other.at_s is not None, "not there yet"
                return 1e3 * (other.at_s - self.at_s)

        self.Event = Event

    def work(self, seconds: float) -> None:
        self.queue.append(seconds)

    def current_stream(self, device: torch.device) -> Any:
        self.told.append(("stream", device))
        return self.current

    def synchronize(self, device: torch.device) -> None:
        self.told.append(("synchronize", device))
        for one in self.queue:
            if isinstance(one, float):
                self.clock_s += one
            else:
                one.at_s = self.clock_s
        self.queue.clear()

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.told.append(("reset", device))

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        self.told.append(("stats", device))
        return self.stats


def test_moments_are_those_of_the_device() -> None:
    device = Device()
    times = DeviceTime(OTHER, device)
    for _ in range(2):  # events are used again
        before = time.perf_counter()
        times.begin()
        after = time.perf_counter()
        moments = array("d")
        for seconds in (0.0, 2.0, 0.5):
            device.work(seconds)
            moments.append(times.now())
        assert moments.tolist() == [0, 1, 2], "numbers until the device has come to them"
        times.settle(moments)
        assert before <= moments[0] <= after and moments[1] - moments[0] == pytest.approx(2) and moments[2] - moments[1] == pytest.approx(0.5)
    assert {d for _, d in device.told} == {OTHER}
    assert device_time(CPU) is None


# ---- who uses them ---------------------------------------------------------------------------------------------------


def chain() -> Program:
    """One rank computes twice and adds nothing."""
    b = ProgramBuilder(ranks=1)
    lane = b.lane(0)
    for i in range(2):
        lane.compute(b.op("F", graph=f"part{i}"))
    return b.build()


class Steps:
    def __init__(self, device: Device) -> None:
        self.device = device

    def compile(self, op: int, memory: RankMemory) -> Any:
        return lambda: self.device.work(1.0 + op)


def executor_on(device: Device, work: Any, times: DeviceTime) -> Executor:
    program = chain()
    transport: Any = SimpleNamespace(grouped=False)
    return Executor(program, fuse_lanes(program), 0, memory=RankMemory(program, 0, CPU, {}, {}), transport=transport, work=work, times=times)


def test_a_walk_is_timed_by_its_device() -> None:
    device = Device()
    times = DeviceTime(OTHER, device)
    executor = executor_on(device, Steps(device), times)
    for _ in range(2):
        executor.run()
        assert not device.queue, "a run ends when the device is done"
        assert [b - a for a, b in zip(executor.starts, executor.ends, strict=True)] == pytest.approx([1, 2])


def test_modules_are_timed_by_the_same_device() -> None:
    device = Device()
    times = DeviceTime(OTHER, device)
    clock = ModuleClock(times)
    first, _ = clock.begins("part0", "a")
    second, _ = clock.begins("part1", "b")
    work = SimpleNamespace(compile=lambda op, memory: lambda: ((first, second)[op](), device.work(1.0 + op)))
    executor = executor_on(device, work, times)
    executor.run()
    which, at = clock.take(executor.starts[0])
    assert which == [0, 2] and at == pytest.approx([0, 1]) and not clock.times_s


def test_calibration_takes_the_device_s_seconds() -> None:
    device = Device()
    times = DeviceTime(CPU, device)
    silent = SilentRank(chain(), 0, times)
    executor = executor_on(device, silent.timed(Steps(device)), times)
    found = silent.measure(executor.run)
    assert {k: v.time_s for k, v in found.prices.items()} == pytest.approx({"part0|F": 1, "part1|F": 2})
    assert found.per_step_s == 0.0


def test_peak_memory_is_the_allocator_s_on_that_device() -> None:
    device = Device()
    order: list[str] = []
    assert allocator_peak(lambda: order.extend(what for what, _ in device.told), OTHER, device) == 1900
    assert order == ["synchronize", "reset"] and {d for _, d in device.told} == {OTHER}
    del device.stats["requested_bytes.all.peak"]
    assert allocator_peak(lambda: None, OTHER, device) == 2048


# ---- groups of calls -------------------------------------------------------------------------------------------------


class Backend:
    def __init__(self) -> None:
        self.made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.made.append((name, *args[1:2]) if name in ("send", "recv") else name)
            return self

        return call


def test_a_group_is_one_work_and_comes_after_the_current_stream() -> None:
    backend, x = Backend(), torch.zeros(2)
    transport = GroupedTransport(connected(backend, CPU), CPU)
    assert backend.made == ["allreduce", "wait"], "the communicator is made by a call of all ranks"
    backend.made.clear()
    waited: list[Any] = []
    transport.stream = SimpleNamespace(wait_stream=waited.append)
    (work,) = transport.exchange([(x, 1, 5), (x, 2, 6)], [(x, 1, 7)])
    assert backend.made == ["_start_coalescing", ("send", 1), ("send", 2), ("recv", 1), "_end_coalescing"]
    assert waited == [torch.cpu.current_stream()] and not isinstance(own_stream(CPU), type(None))
    transport.wait(work)
    transport.wait(work)
    assert backend.made[-2:] == ["wait", "wait"]
    backend.made.clear()
    transport.send(x, 1, 0)
    transport.receive(x, 2, 0)
    assert backend.made == ["_start_coalescing", ("send", 1), "_end_coalescing", "_start_coalescing", ("recv", 2), "_end_coalescing"]
    assert grouped_calls(backend, [(x, 1)], []) is backend


def test_orders_that_wait_for_each_other_never_start() -> None:
    """Groups of one rank turned round, as a bug would: the executor's own check names the circle."""
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=2, chunk_bytes=4), b.buffer(1, chunks=2, chunk_bytes=4)
    there, back = b.channel(0, 1), b.channel(1, 0)
    first, second = b.lane(0), b.lane(1)
    first.send(there, x, 0)
    first.recv(back, x, 1)
    second.recv(there, y, 0)
    second.send(back, y, 0)
    program = b.build()
    rounds = compile_rounds(program, fuse_lanes(program))
    assert require_ends(program, rounds).facts == {"ranks": 2, "groups": 4, "messages": 2, "largest_group": 1}
    asked, answered = (one for edge in rounds[1].before.values() for one in edge if isinstance(one, Round))
    rounds[1].before = {0: [answered, asked], 2: [3]}
    with pytest.raises(Deadlock, match="in a circle") as caught:
        require_ends(program, rounds)
    assert caught.value.data["witness"]["ranks"] == [0, 1]


def test_packed_values_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="packed on processors only, not on meta"):
        sign_bits(torch.empty(3, device="meta"))


def test_a_failing_step_is_named() -> None:
    device = Device()

    def fails() -> None:
        raise RuntimeError("out of memory")

    executor = executor_on(device, SimpleNamespace(compile=lambda op, memory: fails), DeviceTime(OTHER, device))
    with pytest.raises(StepFailed, match="step 0"):
        executor.run()
