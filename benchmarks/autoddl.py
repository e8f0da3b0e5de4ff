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
MESSAGES = (1, 1 << 10, 1 << 16, 1 << 18)  # elements exchanged to fit the cost of a message


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
def calibrate() -> None:
    """One rank: seconds of products, copies and small operators while all ranks compute; of exchanges while all exchange. Prints a JSON line."""
    import torch.distributed as dist

    from meshwright.run.dtensor_worker import mesh_place

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    a, b = torch.randn(256, 1024), torch.randn(1024, 1024)
    big, small = torch.randn(1 << 22), torch.randn(64)
    product_s = _middle(lambda: a @ b, 12)
    copy_s = _middle(lambda: big.add_(1.0), 12)
    call_s = _middle(lambda: [small.add_(1.0) for _ in range(200)], 7) / 200
    place = mesh_place((dist.get_world_size(),), dist.get_rank(), "cpu")
    exchange_s = {n: _middle(lambda n=n: place.wires.all_reduce(0, torch.ones(n), "calibrate"), 9) for n in MESSAGES}
    measured = {"flops": 2 * 256 * 1024 * 1024 / product_s, "memory_Bps": 2 * 4 * (1 << 22) / copy_s, "call_s": call_s, "exchange_s": exchange_s}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    if dist.get_rank() == 0:
        print(json.dumps({"calibration": everyone}), flush=True)
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


def costs(lab: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(fabric with measured rates and speeds, cost, what was measured)."""
    from dataclasses import replace

    from meshwright.cost import Cost, Transport

    rows: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        if line.startswith(b'{"calibration"'):
            rows.extend(json.loads(line)["calibration"])

    lab.run([sys.executable, str(Path(__file__).resolve()), "--calibrate"], sink=sink, timeout_s=300)
    middle = {k: statistics.median(r[k] for r in rows) for k in ("flops", "memory_Bps", "call_s")}
    exchange = {int(n): statistics.median(r["exchange_s"][n] for r in rows) for n in rows[0]["exchange_s"]}
    fabric = lab.measured_fabric
    rate = min(x.rate_Bps for x in fabric.links)
    p = len(fabric.devices)
    small = 1 << 10
    per_message = max(1e-5, (exchange[small] - 2 * (p - 1) / p * small * 4 / rate) / (2 * (p - 1)))
    large = max(exchange)
    sent = 2 * (p - 1) / p * large * 4
    per_byte = max(0.0, (exchange[large] - sent / rate - 2 * (p - 1) * per_message) / sent / 2)
    devices = tuple(
        replace(d, flops={"fp32": int(middle["flops"])}, memory_bandwidth_Bps=int(middle["memory_Bps"]), cpu_share=0.0) for d in fabric.devices
    )
    cost = Cost(
        name="measured in the lab", flops_efficiency=1.0, memory_efficiency=1.0, per_call_s=max(middle["call_s"], 1e-6),
        transport=Transport(per_message_s=per_message, per_byte_s=per_byte, evidence="measured"), evidence="interpolated",
        source="benchmarks/autoddl.py",
    )  # fmt: skip
    return replace(fabric, devices=devices), cost, {**middle, "exchange_s": exchange, "per_message_s": per_message, "per_byte_s": per_byte}


# ---- a net -----------------------------------------------------------------------------------------------------------
def plans_of(net: str, fabric: Any, cost: Any) -> list[Any]:
    """AutoDDL's plan, the best of the templates by name."""
    from meshwright.capture.graph import capture
    from meshwright.decide.layout.autoddl import AutoDDL, ShardingProblem
    from meshwright.decide.layout.autoddl.templates import TEMPLATES
    from meshwright.errors import Unsupported

    problem = ShardingProblem(graph=capture(f"{Path(__file__).resolve()}:{net}", scalable=False), fabric=fabric, cost=cost)
    found = [AutoDDL().plan(problem)]
    for template in TEMPLATES:
        try:
            found.append(AutoDDL(search=template).plan(problem))
        except Unsupported:
            continue
    return found


def measure(lab: Any, plans: list[Any], steps: int) -> list[Any]:
    from meshwright.run.dtensor_run import prepare_folder, results
    from meshwright.run.dtensor_worker import WorkRequest

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_folder(folder, plans, WorkRequest(plans=[], steps=steps, warmup=WARM, timeout_s=300))
        lab.run([sys.executable, "-W", "ignore", "-m", "meshwright.run.dtensor_worker", str(folder)], timeout_s=900)
        return results(folder, plans)


def rows_of(net: str, plans: list[Any], found: list[Any]) -> list[dict[str, Any]]:
    from meshwright.decide.layout.autoddl import ShardingPlan

    def facts(plan: ShardingPlan, result: Any) -> dict[str, Any]:
        mean = sum(b.total for b in plan.bytes_sent) / len(plan.bytes_sent)
        return {
            "strategy": plan.strategy, "mesh": list(plan.mesh), "predicted_s": plan.time_s, "measured_s": result.time_s,
            "steps_s": list(result.step_s),
            "sent_bytes": mean, "bytes_as_planned": result.bytes_equal, "parts_s": plan.parts_s,
            "signatures": {n: list(o.names) for n, o in plan.ops.items()},
        }  # fmt: skip

    raw = [facts(p, r) for p, r in zip(plans, found, strict=True)]
    ours, others = raw[0], raw[1:]
    best = min(others, key=lambda r: r["measured_s"])
    data = next(r for r in others if r["strategy"] == "data")
    bound = plans[0].bound_bytes
    rows = [
        {"what": f"{net}: speed over data parallelism", "value": round(data["measured_s"] / ours["measured_s"], 3), "unit": "x",
         "higher_is_better": True,
         **({"limit": 5.0, "ratio": round(data["measured_s"] / ours["measured_s"] / 5.0, 3)} if net == "fc_heavy" else {}), "raw": raw},
        {"what": f"{net}: time over the best template ({best['strategy']})", "value": round(ours["measured_s"] / best["measured_s"], 4), "unit": "x",
         "limit": 1.03},
        {"what": f"{net}: ranks that sent other bytes than planned", "value": sum(not r["bytes_as_planned"] for r in raw), "unit": "", "limit": 0},
        {"what": f"{net}: measured over predicted time", "value": round(ours["measured_s"] / ours["predicted_s"], 3), "unit": "x"},
    ]  # fmt: skip
    if bound:
        rows.append({"what": f"{net}: bytes over the least without redundant work", "value": round(ours["sent_bytes"] / bound, 3), "unit": "x"})
    rows.append({"what": f"{net}: predicted time over the bound", "value": round(plans[0].time_s / plans[0].bound_time_s, 3), "unit": "x"})
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--calibrate"]:
        calibrate()
        return
    import machine
    from executed import star

    from meshwright.lab import Lab

    quick = "--quick" in sys.argv
    rows: list[dict[str, Any]] = []
    with Lab.up(star(*[MBIT] * DEVICES)) as lab:
        fabric, cost, measured = costs(lab)
        print(json.dumps(measured))
        for net in NETS[:1] if quick else NETS:
            plans = plans_of(net, fabric, cost)
            found = measure(lab, plans, 3 if quick else STEPS)
            for plan, result in zip(plans, found, strict=True):
                mean = sum(b.total for b in plan.bytes_sent) / len(plan.bytes_sent)
                mesh = "x".join(map(str, plan.mesh))
                print(f"  {net:<12} {plan.strategy:<14} {mesh:<6} predicted {plan.time_s * 1e3:9.1f} ms  measured {result.time_s * 1e3:9.1f} ms  "
                      f"{mean / 1e3:10.1f} kB per rank")  # fmt: skip
            rows += rows_of(net, plans, found)
    for row in rows:
        asked = f" (asked {row['limit']})" if "limit" in row else ""
        print(f"{row['what']:<75} {row['value']:>9} {row['unit']}{asked}")
    if not quick:
        machine.record("autoddl", rows, calibration=measured)


if __name__ == "__main__":
    main()
