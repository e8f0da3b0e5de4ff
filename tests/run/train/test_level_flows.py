"""Sharding levels 2 and 3: bytes that a profile's passes move, layer by layer, against the messages of the lowered step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tensor_rig import MODELS, TensorOptions, lowered_calls

from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.profile.layer_profile import Entry
from meshwright.profile.layer_table import LayerChoice, LayerRow, LayerTable
from meshwright.profile.state_bytes import StateBytes
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part, Program

REPLICAS, MICROBATCHES, BYTES = 2, 2, 8
RATE_BPS = 2.0**30


def lowered(level: int) -> tuple[Counter[tuple[str, str]], Program, dict[str, int]]:
    """(calls of rank 0 by kind of message and group of parameters, the program inlined, bytes of every group's whole buffer)."""
    _, program, callees = lowered_calls(
        MODELS + "even", (REPLICAS, 1, 1), 2, 2 * REPLICAS * MICROBATCHES, "cross-entropy", TensorOptions(), None, "none",
        DataSharding(level, True, 3000),
    )  # fmt: skip
    p, counted, whole = program, Counter[tuple[str, str]](), dict[str, int]()
    actor = p.lanes.actor[p.lane_of_step()]
    for step in np.flatnonzero((p.steps.kind == Kind.CALL) & (actor == 0)).tolist():
        site = int(p.steps.op[step])
        kind = p.comms.name[p.calls.comm[site]].partition(":")[0]
        if kind in ("dp", "dpw"):
            buffer = int(p.calls.binds[site][1])
            group = p.buffers.name[buffer].rpartition("@")[2]
            counted[kind, group] += 1
            whole[group] = int(p.buffers.chunks[buffer] * p.buffers.chunk_bytes[buffer])
    return counted, inline(program, callees).program, whole


def flows(level: int, sizes: list[int]) -> tuple[list[float], list[float], list[float]]:
    """By layer, bytes of one gather, one scatter, and of what follows the last micro-batch, as a layer table has them."""
    rows = tuple(
        LayerRow(forward_s=1.0, backward_s=2.0, update_s=0.1, parameters=size / BYTES, output_bytes=0.0, kept_bytes=(0.0, 0.0, 0.0)) for size in sizes
    )
    table = LayerTable(
        model="case", names=tuple(map(str, range(len(sizes)))), rows={Entry("cpu", 1, 1): rows}, state=StateBytes(BYTES, BYTES, 2 * BYTES, BYTES),
        inside_Bps={"cpu": RATE_BPS}, gpus_per_server={"cpu": REPLICAS},
    )  # fmt: skip
    priced = table.priced(Entry("cpu", 1, 1), LayerChoice(sharding=level), REPLICAS)
    ring = 2 * (REPLICAS - 1) / REPLICAS  # what `wire_bytes` are multiplied by: gradients' ring
    return (*((priced[name] * RATE_BPS).tolist() for name in ("gather_s", "scatter_s")), (priced["wire_bytes"] * ring).tolist())


@pytest.mark.parametrize("level", [2, 3])
def test_bytes_of_every_layer(level: int) -> None:
    """Scatters of every micro-batch; gathers of every pass (level 3) or one after the update (level 2). The first and the last layer's weights stay
    between two passes that meet there, which the flows, pass by pass, do not know: they may ask for more, never for less."""
    counted, flat, whole = lowered(level)
    groups = sorted(whole, key=lambda g: [int(x) for x in g.split("+")[0].split(".")])
    gather, scatter, after = flows(level, [whole[g] for g in groups])
    assert len(groups) > 3
    moved = {kind: [counted[kind, g] * whole[g] * (REPLICAS - 1) / REPLICAS for g in groups] for kind in ("dp", "dpw")}
    assert moved["dp"] == pytest.approx([MICROBATCHES * x for x in scatter])
    passes = [2 * MICROBATCHES * g + a for g, a in zip(gather, after, strict=True)]
    inner = slice(None) if level == 2 else slice(1, -1)
    assert moved["dpw"][inner] == pytest.approx(passes[inner])
    assert all(a <= b + 1e-6 for a, b in zip(moved["dpw"], passes, strict=True))
    s, size = flat.steps, flat.message_bytes()
    sends = np.flatnonzero(((s.parts & Part.SEND) != 0) & (flat.lanes.actor[flat.lane_of_step()] == 0)).tolist()
    names = [flat.comms.name[flat.channels.tag[s.chan_out[i]]].partition(":")[0] for i in sends]
    for kind in ("dp", "dpw"):
        assert sum(int(size[i]) for i, name in zip(sends, names, strict=True) if name == kind) == pytest.approx(sum(moved[kind]))
