"""Cores that slow each other down: a timeline by hand, the speeds of an operator, and nothing new where nothing is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import Cost, Priced
from meshwright.fabric.fabric import Device, Fabric
from meshwright.graph.graph import Work
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Program, Unit
from meshwright.simulate import simulate_program

SPEEDS = {"compute": (1.0, 0.75), "memory": (1.0, 0.5)}


def fabric(**more: object) -> Fabric:
    return Fabric(name="two", devices=tuple(Device(name=x, kind="cpu", cpu_cores=2.0, **more) for x in "ab"))  # type: ignore[arg-type]


def beside(ops: list[list[str]]) -> Program:
    """Every rank computes its ops one after the other."""
    b = ProgramBuilder(ranks=len(ops), name="beside")
    made = {name: b.op("F", graph=name) for name in sorted({x for rank in ops for x in rank})}
    for rank, names in enumerate(ops):
        lane = b.lane(rank, unit=Unit.COMPUTE)
        for name in names:
            lane.compute(made[name])
    return b.build()


def ends(program: Program, on: Fabric, cost: Cost, works: dict[str, Work]) -> list[float]:
    found = simulate_program(program, on, ["a", "b"], cost, works=works)
    return [end for _, end in sorted(zip(found.spans.step.tolist(), found.spans.end_s.tolist(), strict=True))]


def work(flops: int, size_bytes: int) -> Work:
    return Work(flops=flops, bytes_read=size_bytes, bytes_written=0, calls=0)


def test_two_cores_slow_each_other_down_while_both_are_busy() -> None:
    """a: 1 s in memory, then 0.5 s of computing. b: 0.25 s in memory. By hand: both at half speed till 0.5 s, when b ends, a with 0.25 s done; then a
    alone, till 1.25 and 1.75 s."""
    program = beside([["long", "sums"], ["short"]])
    table = {"long|F": Priced(1.0), "sums|F": Priced(0.5), "short|F": Priced(0.25)}
    works = {"long|F": work(1, 10**12), "short|F": work(1, 10**12), "sums|F": work(10**15, 1)}
    cost = Cost(table=table)
    assert ends(program, fabric(cpu_speeds=SPEEDS), cost, works) == pytest.approx([1.25, 1.75, 0.5])
    assert ends(program, fabric(), cost, works) == pytest.approx([1.0, 1.5, 0.25]), "nothing is said, so nobody is slowed"
    assert ends(program, fabric(cpu_speeds={"memory": (1.0,)}), cost, works) == pytest.approx([1.0, 1.5, 0.25])


def test_what_computes_beside_what_is_in_memory_has_its_own_speed() -> None:
    """a: 0.75 s of computing at 0.75; b: 1 s in memory at 0.5. a ends at 1 s, when b has done 0.5 s, and b at 1.5 s."""
    program = beside([["sums"], ["long"]])
    cost = Cost(table={"sums|F": Priced(0.75), "long|F": Priced(1.0)})
    works = {"long|F": work(1, 10**12), "sums|F": work(10**15, 1)}
    assert ends(program, fabric(cpu_speeds=SPEEDS), cost, works) == pytest.approx([1.0, 1.5])


def test_a_quota_counts_the_time_of_a_slowed_core() -> None:
    """Both have 0.25 s of every second, and work 0.25 s in memory, at half speed while both run: between once and twice as long, as periods meet."""
    quota = {"cpu_share": 0.25, "cpu_period_s": 1.0}
    program, works = beside([["x"], ["x"]]), {"x|F": work(1, 10**12)}
    cost = Cost(table={"x|F": Priced(0.25 / 0.25)}, table_share=0.25)
    plain = simulate_program(program, fabric(**quota), ["a", "b"], cost, works=works).makespan_s
    slowed = simulate_program(program, fabric(cpu_speeds=SPEEDS, **quota), ["a", "b"], cost, works=works).makespan_s
    assert plain == pytest.approx(1.0) and 1.1 < slowed <= 2.0


def test_the_speed_of_an_operator_is_that_of_its_roof() -> None:
    speeds = {**SPEEDS, "memory": (1.0, 0.5, 0.25)}
    device = Device(name="a", kind="cpu", cpu_cores=4, flops={"fp32": 10**9}, memory_bandwidth_Bps=10**9, cpu_speeds=speeds)
    cost = Cost(flops_efficiency=1.0, memory_efficiency=1.0, per_call_s=1.0)
    assert cost.busy_speeds(None, device) == (1.0, 0.75, 0.75), "what is not known computes"
    assert cost.busy_speeds(work(10**9, 10), device) == (1.0, 0.75, 0.75)
    assert cost.busy_speeds(work(10, 10**9), device) == (1.0, 0.5, 0.25)
    assert cost.busy_speeds(work(2 * 10**9, 10**9), device) == pytest.approx((1.0, 0.75, 0.5)), "2.67 s and 2 s; with three busy 2.67 s and 4 s"
    assert cost.busy_speeds(Work(flops=0, bytes_read=0, bytes_written=0, calls=3), device) == (1.0, 0.75, 0.75)
    assert cost.busy_speeds(work(1, 1), replace(device, cpu_speeds={})) == (1.0,)
