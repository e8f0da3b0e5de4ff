"""Capture of the example nets: processor time, peak memory, parameters, traced calls; saved and peak bytes against a real run.

    python benchmarks/capture.py [NET ...] [--no-write]

Every capture runs in a fresh process, so its figures include the import of torch. `cpu_s` and `rss_peak_bytes` (VmHWM) are those of one
capture; "scalable" those of capturing a second time at twice the batch as well, which gives every other batch size. Ends with 1 if
the GPT-3-175B-shaped net breaks its limits (30 s of processor time, 1 GiB, 174,604,259,328 parameters, 95 % of the calls traced) or a
reduced net's saved bytes differ from its real run's. Raw output: benchmarks/results/capture.json.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import machine

EXAMPLES = Path(__file__).parents[1] / "examples"
REAL = {
    "gpt-small": ("gpt.py:small", "cross-entropy"),
    "convnet-small": ("convnet.py:small", "cross-entropy"),
    "encoder-decoder-small": ("encoder_decoder.py:small", "cross-entropy"),
    "dlrm-small": ("dlrm.py:small", "mse"),
}
NETS = {**REAL, "gpt3-175b": ("gpt.py:gpt3_175b", "cross-entropy")}
LIMITS = {"cpu_s": 30.0, "rss_peak_bytes": 1 << 30, "parameters": 174_604_259_328, "share_with_cause": 0.95}


def one(model: str, loss: str, scalable: bool) -> dict[str, Any]:
    """In a fresh process: capture and say what it took."""
    from meshwright.capture.graph import capture
    from meshwright.graph.liveness import peak_bytes

    graph = capture(f"{EXAMPLES}/{model}", loss=loss, scalable=scalable)
    cpu, high = time.process_time(), machine.memory_high_water_bytes()
    calls = [j for j in graph.joint if j.target != "operator.getitem"]
    share = {phase: _share([j for j in calls if j.phase == phase]) for phase in ("forward", "backward")}
    return {
        "cpu_s": cpu, "rss_peak_bytes": high, "method": graph.method, "batch_size": graph.batch_size, "parameters": graph.parameter_count,
        "forward_nodes": len(graph.nodes), "joint_calls": len(calls), "share_with_cause": min(share.values()), "share": share,
        "forward_flops": sum(n.forward.flops for n in graph.nodes), "backward_flops": sum(n.backward.flops for n in graph.nodes),
        "saved_bytes": graph.saved_bytes, "peak_bytes": peak_bytes(graph), "scalable": graph.scaling is not None, "notes": list(graph.notes),
    }  # fmt: skip


def _share(calls: list[Any]) -> float:
    return sum(bool(j.node) for j in calls) / len(calls)


def real(model: str, loss: str) -> dict[str, Any]:
    """In a fresh process: the same module on real tensors, autograd's saved storages and the allocator's events."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from meshwright.capture.forward import trace_forward

    traced = trace_forward(f"{EXAMPLES}/{model}", loss=loss, device="cpu")
    module, inputs = traced.objective, traced.inputs
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Any] = {}

    def pack(x: Any) -> Any:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_value = module(*inputs)
    saved = sum(x.untyped_storage().nbytes() for x in kept.values())
    loss_value.backward()
    kept.clear()
    del loss_value
    module.zero_grad(set_to_none=True)
    gc.collect()
    held = sum(x.untyped_storage().nbytes() for x in (*module.parameters(), *module.buffers(), *inputs))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(*inputs).backward()
    alive = peak = 0
    for event in sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return {"saved_bytes": saved, "peak_bytes": held + peak}


def rows_of(net: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Result rows of one net, and which limits it breaks."""
    model, loss = NETS[net]
    got = machine.fresh("capture", "--child", "one", model, loss, "")
    scaled = machine.fresh("capture", "--child", "one", model, loss, "scalable")
    limits = LIMITS if net not in REAL else {"share_with_cause": LIMITS["share_with_cause"]}
    rows: list[dict[str, Any]] = []
    for key, unit in (("cpu_s", "s"), ("rss_peak_bytes", "B"), ("parameters", ""), ("share_with_cause", "")):
        row = {"what": f"{net}: {key}", "value": got[key], "unit": unit}
        rows.append(row | ({"limit": limits[key]} if key in limits else {}))
    for key, unit in (("cpu_s", "s"), ("rss_peak_bytes", "B")):
        row = {"what": f"{net}: {key}, scalable to all batch sizes", "value": scaled[key], "unit": unit}
        rows.append(row | ({"limit": limits[key]} if key in limits else {}))
    broken = [f"{net}: {key}" for key in ("cpu_s", "rss_peak_bytes") if key in limits and max(got[key], scaled[key]) > limits[key]]
    broken += [f"{net}: parameters"] * ("parameters" in limits and got["parameters"] != limits["parameters"])
    broken += [f"{net}: share_with_cause"] * (got["share_with_cause"] < limits["share_with_cause"])
    if net in REAL:
        run = machine.fresh("capture", "--child", "real", model, loss)
        rows += [{"what": f"{net}: {key}, peer is a real run", "value": got[key], "unit": "B", "peer": run[key]} for key in run]
        broken += [f"{net}: saved_bytes"] * (got["saved_bytes"] != run["saved_bytes"])
    rows.append({"what": f"{net}: details", "value": got["joint_calls"], "unit": "calls", "capture": got})
    return rows, broken


def main(arguments: list[str]) -> int:
    chosen = [a for a in arguments if not a.startswith("--")] or list(NETS)
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for net in chosen:
        more, bad = rows_of(net)
        broken += bad
        rows += more
        for row in more:
            against = row.get("limit", row.get("peer"))
            print(f"{row['what']:<62}{row['value']:>20,}" + (f"  against {against:,}: {row['value'] / against:.4f}" if against else ""))
    if "--no-write" not in arguments:
        machine.record("capture", rows, broken=broken)
    print(f"broken: {', '.join(broken)}" if broken else "all limits kept")
    return 1 if broken else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        kind, model_name, loss_name, *rest = sys.argv[2:]
        print(json.dumps(real(model_name, loss_name) if kind == "real" else one(model_name, loss_name, bool(rest and rest[0]))))
    else:
        sys.exit(main(sys.argv[1:]))
