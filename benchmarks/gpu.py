"""One GPU: its ceilings, Triton kernels, measured operator costs, memory plans, results that wait in the host, steps and runs, a trace.

    python benchmarks/gpu.py [--parts ceilings,codecs,experts,steps,host,loop,run,trace] [--out FOLDER] [--device cpu --quick]

Each part runs in a process of its own with a limit, and writes FOLDER/gpu_PART.json; a part that fails says why, the others go on. Kernels: payloads
against those of the processor's kernels on the same gradients, bit for bit (in other sums: within 1e-5), and bytes per second beside a copy on the
device. Steps: each operator timed alone, their sum and the plan's peak against what the device measures; plans for 0.8, 0.6 and 0.5 of the peak
beside PyTorch's memory budgets at their own peaks; results of every plan against those of the plain step. Loop and run: `parallelize` and
`train run` beside the same loop in plain PyTorch, in turns. With `--device cpu --quick` everything but the kernels' speed is rehearsed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import gpu_experts
import gpu_nets
import gpu_steps
import machine

PART_LIMIT_S = {"ceilings": 40, "codecs": 100, "experts": 150, "steps": 170, "host": 80, "loop": 110, "run": 170, "trace": 60}
SHAPES = [(40, 30), (50,), (1,), (9, 8)]  # of the small gradients whose payloads are compared
ROUNDED = {"efsign", "onebit", "powersgd"}  # these sum in another order on a GPU
TOLERANCE = 1e-5
LARGE = 1 << 26  # elements of the large gradient: 256 MB, five times the second-level cache of an H100
COLUMNS = 4096


def device_seconds(call: Callable[[], Any], device: str, rounds: int = 20) -> float:
    """Median seconds of a call: by events on a GPU, by the clock elsewhere. Three calls warm up."""
    for _ in range(3):
        call()
    found = []
    for _ in range(rounds):
        if device == "cpu":
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def ceilings(device: str, quick: bool) -> dict[str, Any]:
    n = 1 << 20 if quick else 1 << 28
    a, b = torch.empty(n, device=device), torch.ones(n, device=device)
    found: dict[str, Any] = {"copy_Bps": 8 * n / device_seconds(lambda a=a, b=b: a.copy_(b), device)}
    del a, b
    side = 256 if quick else 8192
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        found[f"matmul_{name}_flops_per_s"] = 2 * side**3 / device_seconds(lambda x=x, y=y: x @ y, device, 10)
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
        found["cuda"], found["nccl"] = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version()))
    return found


def codecs(device: str, quick: bool) -> dict[str, Any]:
    from meshwright.run.codecs import IMPLEMENTED

    specs = [*IMPLEMENTED, "topk:density=1", "qsgd:bits=8", "qsgd:norm=2", "int8:stochastic=true", "fp8:format=e5m2", "threshold:every=2"]
    equal = {}
    for text in specs:
        try:
            equal[text] = compared(text, device)
        except Exception as error:  # what fails is a row of the table
            equal[text] = f"{type(error).__name__}: {str(error)[:600]}"
            traceback.print_exc(limit=-4)
        print(text, equal[text], flush=True)
    speed = []
    for name in IMPLEMENTED:
        try:
            row = codec_speed(name, device, 1 << 16 if quick else LARGE)
        except Exception as error:
            row = {"codec": name, "error": f"{type(error).__name__}: {str(error)[:600]}"}
        speed.append(row)
        print(row, flush=True)
    return {"equal": equal, "speed": speed}


def gradient(step: int, shapes: list[tuple[int, ...]]) -> torch.Tensor:
    x = torch.randn(sum(torch.Size(s).numel() for s in shapes), generator=torch.Generator().manual_seed(step))
    x[::7] = 0
    x[5:300:6] = x[4:299:6]  # ties
    return x


def three_steps(text: str, device: str, shapes: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    """Of every step: the first payload, what is decoded, the state."""
    from meshwright.codec.codec import parse_codec
    from meshwright.run.codecs import At, make_codec

    codec, found = make_codec(parse_codec(text), shapes, name="g"), []
    state = codec.new_state(torch.device(device))
    for step in range(3):
        at = At(step=step, rank=1, world=2)
        payload = codec.encode(gradient(step, shapes).to(device), state, at)
        sent = payload.wire.clone()
        while (following := codec.advance(payload, state, at)) is not None:
            payload = following
        out = torch.ones(gradient(step, shapes).numel(), device=device)
        codec.decode(payload, out)
        codec.decode(payload, out, accumulate=True)
        codec.finish(out, 2)
        found.append([t.cpu().clone() for t in (sent, out, *state.values())])  # a state goes on changing
    return found


def compared(text: str, device: str) -> str:
    """"equal bits", "within 1e-5", or what differs, of a small and of a larger gradient of odd sizes."""
    says = set()
    for shapes in (SHAPES, [(513, 257), (100_003,)]):
        for step, (a, b) in enumerate(zip(three_steps(text, "cpu", shapes), three_steps(text, device, shapes), strict=True)):
            for what, (x, y) in enumerate(zip(a, b, strict=True)):
                if x.shape == y.shape and torch.equal(x, y):
                    says.add("equal bits")
                elif x.shape == y.shape and x.is_floating_point() and torch.allclose(x, y, atol=TOLERANCE, rtol=TOLERANCE):
                    says.add("within 1e-5")
                elif not (what == 0 and (text.partition(":")[0] in ROUNDED or "norm=2" in text)):
                    part = ("payload", "decoded")[what] if what < 2 else f"state {what - 2}"
                    return f"different: {part} of step {step}, {tuple(x.shape)} and {tuple(y.shape)}, gradients of {shapes}"
    return "within 1e-5" if "within 1e-5" in says else "equal bits"


def codec_speed(name: str, device: str, n: int) -> dict[str, Any]:
    from meshwright.codec.codec import parse_codec
    from meshwright.run.codecs import At, make_codec

    codec = make_codec(parse_codec(name), [(n // COLUMNS, COLUMNS)])
    state, x, out = codec.new_state(torch.device(device)), torch.randn(n, device=device), torch.zeros(n, device=device)
    kept: list[Any] = [None, 0]

    def encode() -> None:
        at = At(step=kept[1], rank=0, world=2)
        payload, size = codec.encode(x, state, at), 0
        size += payload.size_bytes
        while (following := codec.advance(payload, state, at)) is not None:
            payload = following
            size += payload.size_bytes
        kept[:] = [payload, kept[1] + 1, size]

    encode_s = device_seconds(encode, device, 10)
    decode_s = device_seconds(lambda: codec.decode(kept[0], out, accumulate=True), device, 10)
    return {
        "codec": name, "elements": n, "payload_bytes": kept[2], "encode_s": encode_s, "decode_s": decode_s,
        "encode_gradient_Bps": 4 * n / encode_s, "decode_gradient_Bps": 4 * n / decode_s, "peers_s": peers(name, x, out, device),
    }  # fmt: skip


def peers(name: str, x: torch.Tensor, out: torch.Tensor, device: str) -> dict[str, float]:
    """PyTorch's own operations for the same job, without error feedback and without a look for NaN."""
    k = max(1, x.numel() // 100)

    def topk() -> None:
        indices = torch.topk(x.abs(), k, sorted=False).indices
        out.index_add_(0, indices, x[indices])

    ways: dict[str, tuple[str, Callable[[], Any]]] = {
        "topk": ("torch.topk, gather, index_add", topk), "fp16": ("casts", lambda: out.add_(x.to(torch.float16))),
        "bf16": ("casts", lambda: out.add_(x.to(torch.bfloat16))), "fp8": ("casts", lambda: out.add_(x.to(torch.float8_e4m3fn).float())),
    }  # fmt: skip
    return {ways[name][0]: device_seconds(ways[name][1], device, 10)} if name in ways else {}


def plain_loop(model: str, device: str, batch: int | None = None) -> tuple[Callable[[int], torch.Tensor], torch.nn.Module, Any]:
    """A step of the model as its owner would write it: bf16 autocast on a GPU, AdamW. The same samples every step."""
    torch.manual_seed(0)
    module, (x, y) = getattr(gpu_nets, model)()
    module, x, y = module.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(_: int) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, module, (x, y)


def loop(device: str, quick: bool) -> dict[str, Any]:
    """`parallelize` in an own loop on one device, beside the plain loop, in turns; losses and weights after the same steps."""
    import meshwright as mw

    found = {}
    for name in ("quick",) if quick else ("gpt2_small", "llama_1b"):
        plain, theirs, batch = plain_loop(name, device)
        torch.manual_seed(0)
        model, given = getattr(gpu_nets, name)()
        begin = time.perf_counter()
        samples = len(given[0])
        one = mw.read_fabric("dgx-h100:1").subset([0])
        plan = mw.plan(model, given, fabric=one, data=1, tensor=1, pipeline=1, microbatch=samples, recipe=mw.Recipe(precision="bf16-autocast"))
        planned_s = time.perf_counter() - begin
        model = model.to(device)
        ours = mw.torch.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan)
        losses: dict[str, list[float]] = {"plain": [], "ours": []}
        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for i in range(4 if quick else 14):
            for way, step in (("plain", plain), ("ours", lambda _, ours=ours, batch=batch: ours(batch))):
                synchronised(device)
                begin = time.perf_counter()
                loss = step(i)
                synchronised(device)
                seconds[way].append(time.perf_counter() - begin)
                losses[way].append(float(loss))
        weights = gpu_steps.apart([*theirs.parameters()], [*model.parameters()])
        medians = {way: statistics.median(x[3:]) for way, x in seconds.items()}
        found[name] = {
            "planned_s": planned_s, "predicted_s": plan.prediction.time_s, "step_s": medians,
            "ratio": medians["ours"] / medians["plain"], "losses": losses, "weights_apart": weights, "seconds": seconds,
        }  # fmt: skip
        print(name, {k: v for k, v in found[name].items() if k not in ("losses", "seconds")}, flush=True)
        del plain, theirs, model, ours
        if device != "cpu":
            torch.cuda.empty_cache()
    return found


def synchronised(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def run(device: str, quick: bool) -> dict[str, Any]:
    """`fabric here`, then `train plan`, `train gate` and `train run --device cuda` as a user would type them."""
    found: dict[str, Any] = {}
    net = f"{Path(__file__).with_name('gpu_nets.py')}:{'quick' if quick else 'gpt2_small'}"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plan = ["train", "plan", "--model", net, "--fabric", "dgx-h100:1", "--devices", "0", "--global-batch", "4" if quick else "8"]
        lines = {
            "here": ["fabric", "here"], "plan": [*plan, "--precision", "bf16-autocast", "-o", "plan.json"],
            "run": ["train", "run", "plan.json", "--data", "synthetic", "--steps", "6" if quick else "16", "--device", device, "--json", "--profile"],
            "compare": ["train", "compare", "plan.json", "run"], "tight": [*plan, "--memory", "4MB" if quick else "9GiB", "-o", "tight.json"],
            "tight run": ["train", "run", "tight.json", "--data", "synthetic", "--steps", "8", "--device", device, "-o", "tight", "--json"],
            "tight compare": ["train", "compare", "tight.json", "tight"],
        }  # fmt: skip
        for name, line in lines.items():
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "meshwright", *line], capture_output=True, text=True, check=False, timeout=100)
            found[name] = {
                "command": " ".join(["meshwright", *line]).replace(str(Path(__file__).parent), "benchmarks"), "exit": done.returncode,
                "wall_s": time.perf_counter() - begin, "said": done.stdout[-6000:], "errors": done.stderr[-3000:],
            }  # fmt: skip
            print(f"== {name}: exit {done.returncode}, {found[name]['wall_s']:.1f} s\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}", flush=True)
        for trace in sorted(Path("run").glob("*.json.gz")):
            shutil.copy(trace, OUT[0] / f"gpu_run_{trace.name}")
    return found


def trace(device: str, quick: bool) -> dict[str, Any]:
    """A torch.profiler trace of the plain loop with a DataLoader and a host that waits in one step, read by `trace breakdown`."""
    from torch.profiler import ProfilerActivity, profile, schedule

    step, _, (x, y) = plain_loop("quick" if quick else "gpt2_small", device)
    step(0)
    step(1)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.cpu(), y.cpu()), batch_size=len(x))
    file = OUT[0] / "gpu_trace.json"
    when = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profile(activities=activities, schedule=when, on_trace_ready=lambda p: p.export_chrome_trace(str(file))) as profiler:
        for i in range(4):
            for _ in rows:
                step(i)
            if i == 2:
                time.sleep(0.05)  # what a slow host adds to one step
            profiler.step()
    with file.open("rb") as plain, gzip.open(f"{file}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    file.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "trace", "breakdown", f"{file}.gz"], capture_output=True, text=True, check=False, timeout=60
    )
    print(done.stdout[-3000:], done.stderr[-1000:])
    return {"exit": done.returncode, "said": done.stdout, "errors": done.stderr[-3000:]}


PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "ceilings": ceilings, "codecs": codecs, "experts": gpu_experts.experts, "steps": gpu_steps.steps, "host": gpu_steps.host,
    "loop": loop, "run": run, "trace": trace,
}  # fmt: skip
OUT = [machine.RESULTS]


@contextlib.contextmanager
def timed(found: dict[str, Any]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    found["took_s"] = time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    OUT[0] = args.out.resolve()
    names = args.parts.split(",")
    if not args.inside:
        for name in names:
            line = [sys.executable, __file__, "--inside", "--parts", name, "--out", str(OUT[0]), "--device", args.device, *["--quick"] * args.quick]
            print(f"===== {name}", flush=True)
            try:
                subprocess.run(line, check=False, timeout=PART_LIMIT_S[name], env={**os.environ, "PYTHONUNBUFFERED": "1"})
            except subprocess.TimeoutExpired:
                print(f"{name}: stopped after {PART_LIMIT_S[name]} s", flush=True)
        return
    for name in names:
        found: dict[str, Any] = {}
        with timed(found):
            try:
                found["found"] = PARTS[name](args.device, args.quick)
            except Exception as error:
                traceback.print_exc()
                found["error"] = f"{type(error).__name__}: {error}"
        found = {"schema": "meshwright.benchmark", "version": 1, "name": f"gpu_{name}", "device": device_name(args.device), **found}
        document = {**found, "command": f"python benchmarks/gpu.py --parts {name}", "machine": machine.describe()}
        (OUT[0] / f"gpu_{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(0)


if __name__ == "__main__":
    main()
