"""AutoDDL's plans against templates on real processes: 4 devices at 100 Mbit/s in the lab, every plan executed, plans taking turns step by step.

Run: `python benchmarks/autoddl.py` (root or user namespaces; about ten minutes on two quiet cores), with `--quick` for one net and few steps.
Costs of operators and messages are measured first, in the lab, by ranks that run at the same time (`calibrate`); rates are the lab's measured
goodputs. Predicted and measured step times, bytes per rank and the bound on them are in every row. Asked: 5 x faster than data parallelism on
the FC-heavy net, never more than 3 % slower than the best template, bytes as planned.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

MBIT = 100
DEVICES = 4
STEPS, WARM = 9, 2
TRIED = 3  # of AutoDDL's plans, best predicted first, run before the choice that is called validated
MESSAGES = (1 << 10, 1 << 18)  # elements exchanged to fit the cost of a message and of a byte


# ---- nets ------------------------------------------------------------------------------------------------------------
def fc_heavy() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The fully connected part of a VGG, scaled down."""
    net = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    return net, (torch.randn(32, 2048), torch.randint(1024, (32,)))


def vgg_like() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two convolutions, then 4096 -> 1024 -> 1024 -> 10."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip
    return net, (torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


class _Mixer(nn.Module):
    """Two MLP-Mixer blocks over 16 patches."""

    def __init__(self, patches: int = 16, width: int = 512) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2))
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x).mean(1))


def mixer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Mixer(), (torch.randn(16, 3, 32, 32), torch.randint(100, (16,)))


def transformer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The example GPT with two layers of width 256."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import gpt

    return gpt.build(vocabulary=1024, sequence=32, layers=2, width=256, heads=8, batch=8)


def wide_hidden() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Products whose three sides are alike."""
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    return net, (torch.randn(512, 512), torch.randint(512, (512,)))


NETS = ("fc_heavy", "vgg_like", "mixer", "transformer", "wide_hidden")


# ---- costs -----------------------------------------------------------------------------------------------------------
def calibrate(nets: list[str]) -> None:
    """One rank: seconds of exchanges, and of a whole serial step of every net while all ranks compute. Prints a JSON line."""
    import torch.distributed as dist

    from meshwright.capture.forward import trace_forward
    from meshwright.lower.sharding import Redistribution
    from meshwright.run.dtensor.redistribute import LoneRedistribution
    from meshwright.run.executor.transport import own_transport

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = own_transport(rank, torch.device("cpu"))

    def all_reduce_s(sizes: tuple[int, ...], elements: int) -> float:
        """Over the last axis of a mesh."""
        state = ("B",) * (len(sizes) - 1) + ("P",)
        way = Redistribution(((elements,),) * world, state, ((len(sizes) - 1, "B"),), "calibrate")
        alone, piece = LoneRedistribution(sizes, rank, way, "float32", transport), torch.ones(elements)
        return _middle(lambda: alone.run(piece), 15)

    exchange_s = {n: all_reduce_s((world,), n) for n in MESSAGES}
    pair_s = all_reduce_s((world // 2, 2), MESSAGES[0])
    serial_s = {}
    for net in nets:
        traced = trace_forward(f"{Path(__file__).resolve()}:{net}", device="cpu")
        optimizer = torch.optim.SGD(traced.objective.parameters(), lr=1e-2)

        def step(traced: Any = traced, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            traced.objective(*traced.inputs).backward()
            optimizer.step()

        serial_s[net] = _sustained(step)
    print(json.dumps({"calibration": {"exchange_s": exchange_s, "pair_s": pair_s, "serial_s": serial_s}}), flush=True)
    dist.destroy_process_group()


def _middle(work: Any, times: int) -> float:
    import torch.distributed as dist

    found = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _sustained(work: Any, seconds: float = 1.5) -> float:
    """Seconds of one call while all ranks call it over and over: as much processor as a rank gets when all compute."""
    import torch.distributed as dist

    work()
    dist.barrier()
    start, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < seconds:
        work()
        count += 1
    return (time.perf_counter() - start) / count


def costs(lab: Any, nets: list[str]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(fabric with measured rates, a cost per net, what was measured)."""
    from dataclasses import replace

    import msgspec

    from meshwright.cost import Cost, Transport

    rows: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        if line.startswith(b'{"calibration"'):
            rows.append(json.loads(line)["calibration"])

    lab.run([sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--calibrate", *nets], sink=sink, timeout_s=600)
    exchange = {int(n): statistics.median(r["exchange_s"][n] for r in rows) for n in rows[0]["exchange_s"]}
    fabric = lab.measured_fabric
    rate = min(x.rate_Bps for x in fabric.links)
    p, small, large = len(fabric.devices), min(MESSAGES), max(MESSAGES)
    # an all-reduce is two rounds; among p ranks each sends 2 (p-1) messages, between two ranks 2
    among = exchange[small] - 2 * (p - 1) / p * small * 4 / rate
    between = statistics.median(r["pair_s"] for r in rows) - small * 4 / rate
    per_message = max(1e-5, (among - between) / (2 * (p - 2)))
    per_round = max(0.0, between / 2 - per_message)
    sent = 2 * (p - 1) / p * large * 4
    per_byte = max(0.0, (exchange[large] - sent / rate - 2 * (p - 1) * per_message - 2 * per_round) / sent / 2)
    fabric = replace(fabric, links=tuple(replace(x, library_latency_s=per_round / 2) for x in fabric.links))  # a route is two links
    transport = Transport(per_message_s=per_message, per_byte_s=per_byte, evidence="measured")
    base = Cost(flops_efficiency=1.0, memory_efficiency=1.0, per_call_s=4e-6, default_flops=4e10, default_memory_Bps=1e10, transport=transport)
    found, serial = {}, {}
    for net in nets:
        serial[net] = statistics.median(r["serial_s"][net] for r in rows)
        slower = serial[net] / _serial_prediction(net, fabric, base)
        found[net] = msgspec.structs.replace(
            base, name="roofline scaled to a serial step", flops_efficiency=1 / slower, memory_efficiency=1 / slower, per_call_s=4e-6 * slower,
            evidence="interpolated", source="benchmarks/autoddl.py",
        )  # fmt: skip
    return fabric, found, {"exchange_s": exchange, "serial_s": serial, "per_message_s": per_message, "per_round_s": per_round, "per_byte_s": per_byte}


def _serial_prediction(net: str, fabric: Any, cost: Any) -> float:
    from meshwright.capture.graph import capture
    from meshwright.decide.layout.autoddl import AutoDDL, ShardingProblem

    plan = AutoDDL().plan(ShardingProblem(graph=capture(f"{Path(__file__).resolve()}:{net}", scalable=False), fabric=fabric.subset([0]), cost=cost))
    return float(plan.parts_s["compute"])


# ---- a net -----------------------------------------------------------------------------------------------------------
def plans_of(net: str, fabric: Any, cost: Any) -> tuple[list[Any], list[Any]]:
    """(AutoDDL's plans, best predicted first; every template's best plan)."""
    from meshwright.capture.graph import capture
    from meshwright.decide.layout.autoddl import AutoDDL, ShardingProblem
    from meshwright.decide.layout.autoddl.templates import TEMPLATES
    from meshwright.errors import Unsupported

    problem = ShardingProblem(graph=capture(f"{Path(__file__).resolve()}:{net}", scalable=False), fabric=fabric, cost=cost)
    ours = AutoDDL().candidates(problem, most=TRIED)
    found = []
    for template in TEMPLATES:
        try:
            found.append(AutoDDL(search=template).plan(problem))
        except Unsupported:
            continue
    return ours, found


def measure(lab: Any, plans: list[Any], steps: int) -> list[Any]:
    from meshwright.run.dtensor.run import prepare_folder, results
    from meshwright.run.dtensor.worker import WorkRequest

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_folder(folder, plans, WorkRequest(plans=[], steps=steps, warmup=WARM, timeout_s=300))
        lab.run([sys.executable, "-W", "ignore", "-m", "meshwright.run.dtensor.worker", str(folder)], timeout_s=900)
        return results(folder, plans)


def facts(plan: Any, result: Any) -> dict[str, Any]:
    return {
        "strategy": plan.strategy, "mesh": list(plan.mesh), "predicted_s": plan.time_s, "measured_s": result.time_s, "steps_s": list(result.step_s),
        "sent_bytes": sum(b.total for b in plan.bytes_sent) / len(plan.bytes_sent), "bytes_as_planned": result.bytes_equal, "parts_s": plan.parts_s,
        "signatures": {n: list(o.names) for n, o in plan.ops.items()},
    }  # fmt: skip


def case(lab: Any, net: str, fabric: Any, cost: Any, steps: int) -> list[dict[str, Any]]:
    """The plans tried out for a few steps; then the choices and the templates, taking turns."""
    ours, templates = plans_of(net, fabric, cost)
    tried = measure(lab, [*ours, *templates], max(3, steps // 3))
    every = [*ours, *templates]
    validated = every[min(range(len(every)), key=lambda i: tried[i].time_s)]
    plans = [ours[0], validated, *templates]
    raw = [facts(p, r) for p, r in zip(plans, measure(lab, plans, steps), strict=True)]
    show(net, raw)
    best = min(raw[2:], key=lambda r: r["measured_s"])
    data = next(r for r in raw[2:] if r["strategy"] == "data")
    rows: list[dict[str, Any]] = []
    for how, mine, plan in (("predicted choice", raw[0], ours[0]), ("choice validated by a trial", raw[1], validated)):
        gain = data["measured_s"] / mine["measured_s"]
        asked = {"limit": 5.0, "ratio": round(gain / 5.0, 3)} if net == "fc_heavy" else {}
        rows.append({"what": f"{net}, {how}: speed over data parallelism", "value": round(gain, 3), "unit": "x", "higher_is_better": True, **asked})
        over = mine["measured_s"] / best["measured_s"]
        against = f"time over the best template ({best['strategy']})"
        rows.append({"what": f"{net}, {how}: {against}", "value": round(over, 4), "unit": "x", "limit": 1.03})
        rows.append({"what": f"{net}, {how}: measured over predicted", "value": round(mine["measured_s"] / mine["predicted_s"], 3), "unit": "x"})
        if plan.bound_bytes:
            value = round(mine["sent_bytes"] / plan.bound_bytes, 3)
            rows.append({"what": f"{net}, {how}: bytes over the least without redundant work", "value": value, "unit": "x"})
        above = round(mine["measured_s"] / plan.bound_time_s, 3)
        rows.append({"what": f"{net}, {how}: measured over the bound on time", "value": above, "unit": "x"})
    wrong = sum(not r["bytes_as_planned"] for r in raw)
    rows.append({"what": f"{net}: plans whose ranks sent other bytes than planned", "value": wrong, "unit": "", "limit": 0, "raw": raw})
    return rows


def show(net: str, raw: list[dict[str, Any]]) -> None:
    for how, r in zip(["predicted choice", "validated choice", *[""] * len(raw)], raw, strict=False):
        mesh = "x".join(map(str, r["mesh"]))
        times = f"predicted {r['predicted_s'] * 1e3:9.1f} ms  measured {r['measured_s'] * 1e3:9.1f} ms  {r['sent_bytes'] / 1e3:10.1f} kB per rank"
        print(f"  {net:<12} {r['strategy']:<14} {mesh:<6} {times}  {how}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--calibrate"]:
        calibrate(sys.argv[2:])
        return
    import machine
    from executed import star

    from meshwright.lab import Lab

    quick = "--quick" in sys.argv
    named = [n for n in sys.argv[1:] if n in NETS]
    nets = named or (list(NETS[:1]) if quick else list(NETS))
    rows: list[dict[str, Any]] = []
    with Lab.up(star(*[MBIT] * DEVICES)) as lab:
        fabric, cost, measured = costs(lab, nets)
        print(json.dumps(measured), flush=True)
        for net in nets:
            rows += case(lab, net, fabric, cost[net], 3 if quick else STEPS)
    for row in rows:
        asked = f" (asked {row['limit']})" if "limit" in row else ""
        print(f"{row['what']:<90} {row['value']:>9} {row['unit']}{asked}")
    if not quick and not named:
        machine.record("autoddl", rows, calibration=measured)


if __name__ == "__main__":
    main()
