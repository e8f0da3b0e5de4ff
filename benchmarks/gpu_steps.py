"""The parts of `gpu.py` that plan the memory of whole training steps and run them on the device: costs, peaks, results in the host's memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu_nets
import memory_nets
import numpy as np
import torch

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import MeshwrightError
from meshwright.graph.step_graph import StepGraph, StepPlan
from meshwright.probe.steps.costs import StepCosts
from meshwright.probe.steps.host_copies import measured_rates
from meshwright.probe.steps.priced import priced_graphs
from meshwright.run.steps.step import runner_of, step_tensors
from meshwright.run.steps.storage_peak import storage_bytes

SHARES = (0.8, 0.6, 0.5)  # of the peak without recomputation
HOST_SHARES = (0.7, 0.6, 0.5)  # of it, where results may wait in the host's memory
EFFORT = 20_000_000


def nets(quick: bool) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Name -> (loss, model function). Sizes that keep an H100 busy; small ones for a rehearsal."""
    if quick:
        return {"gpt": ("cross-entropy", gpu_nets.quick), "swiglu": ("mse", memory_nets.swiglu)}
    return {
        "gpt2_small": ("cross-entropy", gpu_nets.gpt2_small),
        "resnet50": ("cross-entropy", lambda: (memory_nets.ResNet(classes=1000), memory_nets.images(64, 224, 1000))),
        "unet": ("cross-entropy", lambda: (memory_nets.UNet(width=64), (torch.randn(8, 3, 256, 256), torch.randint(0, 4, (8, 256, 256))))),
    }


def captured(function: Callable[[], Any], loss: str, name: str, device: str) -> CapturedStep:
    torch.manual_seed(0)
    module, inputs = function()
    return capture_step(module.to(device), [x.to(device) for x in inputs], loss=loss, name=name)


class Measured:
    """Runs plans of one step on its device."""

    def __init__(self, step: CapturedStep, device: str) -> None:
        self.step, self.device = step, device
        self.module: Any = torch.get_device_module(device)

    def run(self, plan: StepPlan, graph: StepGraph, rounds: int) -> dict[str, Any]:
        """Peak bytes that were asked for, beyond what is there without the step's own tensors; median seconds of a run; its results."""
        runner = runner_of(self.step, plan, graph=graph)
        tensors = step_tensors(self.step)
        torch.manual_seed(1)
        results = [None if x is None else x.clone() for x in runner.run([*tensors])]  # the first run also makes the libraries' workspaces
        if self.device == "cpu":
            return {"peak_bytes": plan.peak_bytes, "time_s": self.seconds(runner, tensors, rounds), "results": results}
        kept = [x.cpu() for x in results if x is not None]
        del results
        self.module.synchronize()
        others = self.module.memory_stats()["requested_bytes.all.current"] - storage_bytes(tensors)
        self.module.reset_peak_memory_stats()
        out = runner.run([*tensors])
        self.module.synchronize()
        stats = self.module.memory_stats()
        del out
        return {
            "peak_bytes": stats["requested_bytes.all.peak"] - others, "reserved_bytes": stats["reserved_bytes.all.peak"], "others_bytes": others,
            "time_s": self.seconds(runner, tensors, rounds), "results": kept,
        }  # fmt: skip

    def seconds(self, runner: Any, tensors: list[torch.Tensor], rounds: int) -> float:
        found = []
        for i in range(rounds + 1):
            self.synchronise()
            begin = time.perf_counter()
            out = runner.run([*tensors])
            self.synchronise()
            if i:
                found.append(time.perf_counter() - begin)
            del out
        return statistics.median(found)

    def synchronise(self) -> None:
        if self.device != "cpu":
            self.module.synchronize()


def eager_seconds(step: CapturedStep, device: str, loss: str, rounds: int) -> float:
    """The module itself, forward and backward, by autograd."""
    import torch.nn.functional as F

    module, (x, y) = step.source.module, step.source.inputs

    def once() -> None:
        out = module(x)
        if loss == "mse":
            F.mse_loss(out, y).backward()
        else:
            F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1)).backward()
        module.zero_grad(set_to_none=True)

    found = []
    for i in range(rounds + 2):
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        once()
        if device != "cpu":
            torch.cuda.synchronize()
        if i > 1:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def apart(a: list[Any], b: list[Any]) -> float:
    """Largest distance of two lists of results, relative to the norm of the first."""
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(a, b, strict=True) if x is not None and x.is_floating_point()]
    return max((float((x - y).norm() / x.norm().clamp(min=1e-30)) for x, y in pairs), default=0.0)


def steps(device: str, quick: bool) -> dict[str, Any]:
    found = {}
    for name, (loss, function) in nets(quick).items():
        try:
            found[name] = one_net(name, loss, function, device, 3 if quick else 7)
        except MeshwrightError as error:
            found[name] = {"error": str(error)}
            print(name, error, flush=True)
        if device != "cpu":
            torch.cuda.empty_cache()
    return found


def one_net(name: str, loss: str, function: Callable[[], Any], device: str, rounds: int) -> dict[str, Any]:
    from meshwright.decide.memory.baselines import Chen
    from meshwright.decide.memory.fusionaware import FusionAware
    from meshwright.probe.steps.torch_partitions import torch_plans

    begin = time.perf_counter()
    step = captured(function, loss, name, device)
    capture_s, begin = time.perf_counter() - begin, time.perf_counter()
    graph, _ = priced_graphs(step, StepCosts(device=device), device=device)
    priced_s, begin = time.perf_counter() - begin, time.perf_counter()
    plain = keep_everything(graph)
    plans = [plain]
    for share in SHARES:
        for strategy in (FusionAware(effort=EFFORT), Chen()):
            try:
                plans.append(strategy.plan(graph, int(share * plain.peak_bytes), rng=np.random.default_rng(0)))
            except MeshwrightError as error:
                print(name, strategy, share, error, flush=True)
    searched_s = time.perf_counter() - begin
    plans += torch_plans(step, graph=graph)
    device_run = Measured(step, device)
    rows: list[dict[str, Any]] = []
    base: list[Any] = []
    for plan in plans:
        one = device_run.run(plan, graph, rounds)
        results = one.pop("results")
        base = base or results
        row = {"strategy": plan.strategy, "options": plan.options, "predicted_peak_bytes": plan.peak_bytes, "predicted_s": plan.time_s, **one}
        row |= {"peak_ratio": one["peak_bytes"] / plan.peak_bytes, "time_ratio": one["time_s"] / plan.time_s, "apart": apart(base, results)}
        rows.append(row)
        print(name, {k: (round(v, 5) if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
    eager_s = eager_seconds(step, device, loss, rounds)
    print(name, f"eager {eager_s:.5f} s, capture {capture_s:.1f} s, priced {priced_s:.1f} s, searched {searched_s:.1f} s", flush=True)
    return {"nodes": len(graph.nodes), "capture_s": capture_s, "priced_s": priced_s, "searched_s": searched_s, "eager_s": eager_s, "plans": rows}


def host(device: str, quick: bool) -> dict[str, Any]:
    """Results may wait in the host's memory: plans for less than recomputation alone, their peaks and times."""
    from meshwright.decide.memory.fusionaware import FusionAware

    rates = measured_rates(device)
    found: dict[str, Any] = {"to_host_Bps": rates.to_host_Bps, "from_host_Bps": rates.from_host_Bps}
    name = "gpt" if quick else "gpt2_small"
    loss, function = nets(quick)[name]
    step = captured(function, loss, name, device)
    plain_graph, graph = priced_graphs(step, StepCosts(device=device), kinds=("host",), device=device)
    plain = keep_everything(plain_graph)
    device_run = Measured(step, device)
    base = device_run.run(plain, plain_graph, 3).pop("results")
    rows = []
    for share in HOST_SHARES:
        try:
            plan = FusionAware(effort=EFFORT).plan(graph, int(share * plain.peak_bytes), rng=np.random.default_rng(0))
        except MeshwrightError as error:  # a row of the table
            rows.append({"share": share, "error": str(error)})
            print(name, rows[-1], flush=True)
            continue
        one = device_run.run(plan, graph, 3 if quick else 7)
        row = {
            "share": share, "strategy": plan.strategy, "predicted_peak_bytes": plan.peak_bytes, "predicted_s": plan.time_s,
            "hosted": sum(a.alternative >= 0 for a in plan.actions), "apart": apart(base, one.pop("results")), **one,
        }  # fmt: skip
        rows.append(row)
        print(name, row, flush=True)
    return found | {"net": name, "plans": rows}
