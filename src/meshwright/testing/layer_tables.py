"""Small layer tables and fabrics, for tests of searches over choices per layer."""

from __future__ import annotations

from collections.abc import Sequence

from ..decide.layout.mixed.candidate import Pool, Problem
from ..decide.layout.mixed.search import uniform_choices
from ..fabric.fabric import Device, Fabric, Link, Switch
from ..fabric.servers import network_of, server_kinds
from ..profile.layer_profile import Entry
from ..profile.layer_table import LayerRow, LayerTable
from ..profile.network import TrainingRuntime
from ..profile.state_bytes import StateBytes

STATE = StateBytes(2.0, 4.0, 12.0, 2.0)
SPEEDS = {"fast": 8_000_000, "slow": 3_000_000, "old": 1_000_000}


def fabric(boxes: Sequence[tuple[str, int, int]], *, nic_Bps: int = 10**8, memory: int = 10**9, trunk_Bps: int = 0) -> Fabric:
    """(kind, servers, GPUs per server), a NIC per GPU; with `trunk_Bps` the kinds are joined by that only."""
    devices, switches, links, number = [], [Switch(name="core")], [], 0

    def cable(a: str, b: str, rate: int) -> None:
        links.extend([Link(src=a, dst=b, rate_Bps=rate, latency_s=1e-6), Link(src=b, dst=a, rate_Bps=rate, latency_s=1e-6)])

    for kind, servers, gpus in boxes:
        hub = "core"
        if trunk_Bps:
            hub = f"hub-{kind}"
            switches.append(Switch(name=hub))
            cable(hub, "core", trunk_Bps)
        for _ in range(servers):
            box = f"box{number}"
            number += 1
            switches.append(Switch(name=f"{box}/inside", group=box))
            for i in range(gpus):
                name = f"{box}/gpu{i}"
                flops = {"bf16": SPEEDS[kind]}
                devices.append(Device(name=name, group=box, kind=kind, memory_bytes=memory, memory_bandwidth_Bps=10**9, flops=flops))
                switches.append(Switch(name=f"{box}/nic{i}", group=box))
                cable(name, f"{box}/inside", 20 * nic_Bps)
                cable(name, f"{box}/nic{i}", nic_Bps)
                cable(f"{box}/nic{i}", hub, nic_Bps)
    return Fabric(name="case", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def table(net: Fabric, work: Sequence[float], *, microbatches: Sequence[int] = (1, 2), tensors: Sequence[int] = (1, 2)) -> LayerTable:
    """Layer l needs `work[l]` million operations forward for a sample; sizes follow from it."""
    kinds = server_kinds(net)
    rows = {}
    for k in kinds:
        for b in microbatches:
            for t in (t for t in tensors if k.gpus % t == 0):
                made = []
                for n, w in enumerate(work):
                    flops = w * 1e6 * b / t
                    speed = SPEEDS[k.name.partition("/")[0]]
                    ring = 0.02 * w * b if t > 1 else 0.0
                    forward = flops / speed + 0.001 + ring
                    kept = 4000.0 * w * b / t
                    made.append(
                        LayerRow(
                            forward_s=forward, backward_s=2 * flops / speed + 0.001 + ring, update_s=0.001 * w / t, parameters=5000 * w / t,
                            output_bytes=(0.0 if n == len(work) - 1 else 2000.0 * b), kept_bytes=(kept, 0.6 * kept, 0.1 * kept),
                            again_s=(0.0, 0.1 * forward, forward), tensor_s=(ring, ring), flops=(flops, 2 * flops),
                            weights_s=flops / speed, left_bytes=1000.0 * w * b / t,
                        )
                    )
                rows[Entry(k.name, b, t)] = tuple(made)
    return LayerTable(
        model="case", names=tuple(f"layer{i}" for i in range(len(work))), rows=rows, state=STATE, sample_flops=sum(work) * 3e6,
        inside_Bps={k.name: k.inside_Bps[k.gpus] for k in kinds if k.gpus > 1}, outside_Bps={k.name: k.device_nic_Bps for k in kinds if k.nics},
        gpus_per_server={k.name: k.gpus for k in kinds}, inside_hop_s={k.name: 1e-5 for k in kinds}, outside_hop_s={k.name: 2e-5 for k in kinds},
    )  # fmt: skip


def problem(net: Fabric, work: Sequence[float], *, batch: int = 8, memory: int = 0, microbatches: Sequence[int] = (1, 2)) -> Problem:
    kinds = server_kinds(net)
    made = table(net, work, microbatches=microbatches)
    runtime = TrainingRuntime(
        activation_bytes_per_value=1.0, gradient_bytes_per_value=STATE.message, saved_bytes_per_value=1.0,
        gpus_per_server={k.name: k.gpus for k in kinds}, nics_by_device={k.name: k.nics for k in kinds if k.nics}, per_message_s=1e-5,
    )  # fmt: skip
    pools = tuple(Pool(kind=k, memory_bytes=memory or k.device.memory_bytes) for k in kinds)
    return Problem(table=made, pools=pools, network=network_of(kinds), runtime=runtime, global_batch=batch, choices=uniform_choices())
