"""Passes with gathers and scatters: the event simulator's time of the same two lanes, and what needs no simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from effort import few
from meshwright.cost import Cost, Priced
from meshwright.fabric.fabric import Device, Fabric
from meshwright.profile.layer_messages import MAX_WHOLE, LayerMessages, pass_s
from meshwright.profile.layer_table import LayerChoice
from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.program import Role, Unit
from meshwright.simulate import simulate_program
from meshwright.testing.layer_tables import fabric
from meshwright.testing.layer_tables import table as layers_of


def simulated(layers: list[LayerMessages], *, backward: bool) -> float:
    """A lane that computes and a lane of messages; the makespan without scatters that no gather waits behind."""
    order = layers[::-1] if backward else layers
    b, table = ProgramBuilder(ranks=1), {}
    compute, wire = b.lane(0, unit=Unit.COMPUTE, role=Role.COMPUTE), b.lane(0, role=Role.COMM)

    def step(lane, name: str, seconds: float, after: list[StepRef]) -> StepRef:
        table[f"{name}|F"] = Priced(seconds)
        return lane.compute(b.op("F", graph=name), after=after)

    room = MAX_WHOLE * max(x.gather_s for x in order)

    def fits(i: int, j: int) -> bool:
        """Whether layer j may be asked for when layer i begins."""
        return i == j - 1 or sum(x.gather_s for x in order[i : j + 1]) <= room

    asked = [min((i for i in range(j) if all(fits(k, j) for k in range(i, j))), default=0) for j in range(len(order))]
    gathered = [step(wire, "gather0", order[0].gather_s, [])]
    for i, x in enumerate(order):
        # what begins the layer: a step of no length that its computation and the next gathers wait for
        begin = step(compute, f"begin{i}", 0.0, [gathered[i]])
        gathered += [step(wire, f"gather{j}", order[j].gather_s, [begin]) for j in range(1, len(order)) if asked[j] == i]
        done = step(compute, f"layer{i}", x.backward_s if backward else x.forward_s, [])
        if backward and len(gathered) < len(order):  # a gather is behind it
            step(wire, f"scatter{i}", x.scatter_s, [done])
    cost = Cost(table=table, per_call_s=0.0)
    net = Fabric(name="one", devices=(Device(name="d", kind="cpu", flops={"fp32": 10**9}),))
    made = simulate_program(b.build(), net, ["d"], cost, record=False).makespan_s
    return max(made, sum(x.gather_s + (x.scatter_s if backward else 0.0) for x in layers))


@pytest.mark.parametrize("seed", range(few(20)))
@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_takes_what_its_two_lanes_take(seed: int, backward: bool) -> None:
    rng = np.random.default_rng(seed)
    layers = [LayerMessages(*(rng.integers(0, 20, 4) / 1000).tolist()) for _ in range(int(rng.integers(1, 8)))]
    # The simulator counts in nanoseconds.
    assert pass_s(layers, backward=backward) == pytest.approx(simulated(layers, backward=backward), abs=1e-7)


def test_what_hides_and_what_does_not() -> None:
    layers = [LayerMessages(1.0, 2.0, 4.0, 8.0)] * 5
    assert pass_s(layers, backward=False) == 1 + 5 * 4  # the first gather
    assert pass_s(layers, backward=True) == 1 + 5 * 8  # the last scatter is the next pass's
    slow = [LayerMessages(5.0, 5.0, 4.0, 8.0)] * 5
    assert pass_s(slow, backward=False) == 5 * 5 + 4 and pass_s(slow, backward=True) >= 50
    assert pass_s([LayerMessages(0.0, 0.0, 3.0, 7.0)] * 2, backward=True) == 14


def test_a_large_layer_is_on_its_way_while_small_ones_lie_between() -> None:
    """Experts beside attention: the gather of one hides behind the computation of the one before it, not behind the small layer alone."""
    small, large = LayerMessages(1.0, 1.0, 2.0, 4.0), LayerMessages(8.0, 8.0, 8.0, 16.0)
    layers = [small, large] * 4
    assert pass_s(layers, backward=False) == 1 + 2 + (8 - 2) + 8 + 3 * (2 + 8)  # but for the first of them


def test_a_stage_of_a_layer_table_takes_its_flow() -> None:
    """What is simulated of sharding levels 2 and 3 is never below what searches and bounds count with; blocking messages are in the layers."""
    table = layers_of(fabric([("fast", 2, 4)], nic_Bps=10**7), [1.0, 2.0, 0.5, 3.0])
    entry = next(iter(table.rows))
    replicas = 4 * max(1, table.gpus_per_server.get(entry.device, 1))
    found = {}
    for level in range(4):
        profile = table.profile([entry], [LayerChoice(sharding=level)] * table.layers, replicas)
        assert (entry in profile.messages) == (level >= 2)
        found[level] = profile.span(entry, 0, table.layers)
        rows = profile.times[entry]
        assert found[level].forward_s >= sum(r.forward_s for r in rows) and found[level].backward_s >= sum(r.backward_s for r in rows)
        if level >= 2:
            sent = profile.messages[entry]
            assert found[level].backward_s >= pass_s(sent, backward=True) and any(x.gather_s for x in sent) == (level == 3)
    blocking = replace(table, sharding_messages="blocking").profile([entry], [LayerChoice(sharding=3)] * table.layers, replicas)
    assert not blocking.messages and blocking.span(entry, 0, table.layers).forward_s > found[0].forward_s
