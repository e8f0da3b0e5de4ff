"""Compiled loops return when whoever waits has had enough; a simulation whose interrupt was for something else is made again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.cli.progress import Interrupts
from meshwright.errors import TimeLimit
from meshwright.fabric.fabric import Device, Fabric
from meshwright.kernels.effort import Budget, stop_flag
from meshwright.kernels.interrupts import interrupt, raise_flags, raised_on_interrupt
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Unit
from meshwright.simulate import engine, simulate_program

TIMEOUT_S = 20.0


def two_steps():
    b = ProgramBuilder(1, name="two")
    lane = b.lane(0, unit=Unit.COMPUTE)
    lane.compute(b.op("a"))
    lane.compute(b.op("b"))
    return b.build()


def simulated_s() -> float:
    fabric = Fabric(name="one", devices=(Device(name="d"),), links=())
    return simulate_program(two_steps(), fabric, ["d"], durations_s=[1.0, 2.0]).makespan_s


def test_flags_are_of_loops_that_run() -> None:
    over, here = [0], [0]
    with raised_on_interrupt(over):
        pass
    with raised_on_interrupt(here), stop_flag() as stop:
        raise_flags()
        assert (here, over, stop[0]) == ([1], [0], 1)


@pytest.mark.parametrize("raised", [False, True])
def test_the_loop_of_the_simulator_returns_when_its_flag_is_raised(raised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], engine.run

    def run(t, k, state, record):
        state.number[6] = raised and not seen
        at = real(t, k, state, record)
        seen.append((float(at), int(state.number[3])))
        return at

    monkeypatch.setattr(engine, "run", run)
    assert simulated_s() == 3.0
    assert seen == ([(0.0, 1), (3.0, 0)] if raised else [(3.0, 0)])


def test_an_interrupt_that_ends_the_search_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(t, k, state, record):
        assert interrupt()
        raise_flags()

    monkeypatch.setattr(engine, "run", run)
    budget = Budget(1)
    with pytest.raises(TimeLimit), budget.net():
        simulated_s()
    assert budget.cut is not None and budget.cut.interrupted


@pytest.fixture
def heard() -> Iterator[None]:
    """The key is not ignored, as it is in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_the_key_raises_flags_while_python_handles_no_signals() -> None:
    """The handler of signals is called by this thread; the flag is raised by another one, as it must be while this one is in compiled code."""
    flag, budget = np.zeros(1, np.int64), Budget(1)
    with Interrupts().caught(), budget.net(), raised_on_interrupt(flag):
        os.kill(os.getpid(), signal.SIGINT)
        late = time.monotonic() + TIMEOUT_S
        while not flag[0] and time.monotonic() < late:
            time.sleep(0.001)
        assert flag[0] == 1 and budget.late
    assert signal.set_wakeup_fd(-1) == -1
