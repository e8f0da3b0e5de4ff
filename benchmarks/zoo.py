"""The zoo: models nobody tuned for, captured, planned and trained, each compared with plain PyTorch.

    python benchmarks/zoo.py [NAME ...] [--no-write] [--no-run] [--missing]

Three kinds: transformers' classes from small configurations (needs transformers; diffusers for its U-Net), nets of torch.nn, and the traps of
tests/capture/eager_models.py (no_grad and autocast inside forward, checkpoints, own gradients, routing by value, ...). For each:

- captured: by which method, how many modules are kept whole, whether loss, gradients and buffers of the traced graph are the module's own bits (else
  the largest relative difference);
- planned and run: dp2, pp2 and tp2 by layouts with exactly these degrees, ranks as threads of this process, messages by gloo, `STEPS` steps of SGD;
  losses and weights against a plain loop over the whole batch, relative; where that differs (batch statistics, sums in bf16), against one that
  accumulates over the same micro-batches. A refusal is told in its own words.

Every model runs in a forked process of its own. Raw output: benchmarks/results/zoo.json.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NETS, TRAPS = ROOT / "benchmarks" / "zoo_nets.py", ROOT / "tests" / "capture" / "eager_models.py"
RESULTS = ROOT / "benchmarks" / "results" / "zoo.json"
STEPS, RATE, MICRO, GLOBAL = 3, 0.05, 2, 8
LENGTH = 12
LAYOUTS = {"dp2": (2, 1, 1), "pp2": (1, 1, 2), "tp2": (1, 2, 1)}  # data, tensor, pipeline
MAX_ERROR = 1e-5  # relative, of losses and weights in float32
MIN_SCALE = 1e-3  # a tensor whose elements are all smaller is compared as if its largest were this: key biases have no gradient but rounding
TIMEOUT_S = 300


def named(name: str) -> tuple[str, str]:
    """(kind, name without it)."""
    kind, _, rest = name.partition("/")
    return kind, rest


def every() -> list[str]:
    sys.path[:0] = [str(NETS.parent), str(TRAPS.parent)]
    import eager_models
    import zoo_nets

    return (
        [f"transformers/{n}" for n in zoo_nets.TRANSFORMERS] + [f"nets/{n}" for n in zoo_nets.NETS] + [f"traps/{n}" for n in eager_models.CAUSES]
    )


def model_of(name: str, folder: Path) -> tuple[str, str]:
    """(model, loss) as jobs name them."""
    import zoo_nets

    kind, rest = named(name)
    if kind == "traps":
        return f"{TRAPS}:{rest}", "mse"
    if kind == "nets":
        return f"{NETS}:{rest}", zoo_nets.NETS[rest]
    import transformers

    fields, loss = zoo_nets.TRANSFORMERS[rest]
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields).to_dict()
    for k, v in config.items():  # masks of dropout are drawn in one way here and in another by eager
        if "drop" in k and isinstance(v, float):
            config[k] = 0.0
    place = folder / f"{rest}.json"
    place.write_text(json.dumps({**config, "architectures": fields["architectures"]}, default=str))
    text = fields["architectures"][0].endswith(("LM", "LMHeadModel", "ForConditionalGeneration", "MTModel", "SequenceClassification"))
    return f"hf:{place}" + (f"@{LENGTH}" if text else ""), loss


def one(name: str, run: bool) -> dict[str, Any]:
    """What is found of one model."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"name": name}
        start = time.process_time()
        try:
            model, loss = model_of(name, Path(folder))
            found |= captured(model, loss)
        except Exception as error:
            return found | {"captured": False, "why": _said(error)}
        found["capture_cpu_s"] = round(time.process_time() - start, 1)
        if run:
            found["runs"] = {layout: _ran(model, loss, degrees) for layout, degrees in LAYOUTS.items()}
        return found


@cache
def captured_once(model: str, loss: str) -> Any:
    from meshwright.capture.graph import capture

    return capture(model, loss=loss)


@cache
def traced_once(model: str, loss: str) -> Any:
    """On real tensors, a micro-batch of them."""
    from meshwright.capture.forward import trace_forward

    return trace_forward(model, loss=loss, batch_size=MICRO, device="cpu")


def captured(model: str, loss: str) -> dict[str, Any]:
    """The traced graph and the module on the same values."""
    import torch

    from meshwright.capture.regions import REGION

    traced = traced_once(model, loss)
    module = traced.objective
    before = {n: b.detach().clone() for n, b in module.named_buffers()}
    module(*traced.inputs).backward()
    gradients = {n: p.grad for n, p in traced.parameters.items()}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    with torch.no_grad():
        for n, b in module.named_buffers():
            b.copy_(before[n])
    for p in traced.parameters.values():
        p.grad = None
    ours = traced.graph_module(*(traced.value(v) for v in traced.placeholders))[0]
    ours.backward()
    errors = [_error(p.grad, gradients[n]) for n, p in traced.parameters.items()]
    errors += [_error(b, buffers[n]) for n, b in module.named_buffers()]
    graph = captured_once(model, loss)
    notes = [n for n in graph.notes if not n.startswith(("module paths", "no flop"))]
    return {
        "captured": True, "method": graph.method, "nodes": len(graph.nodes), "kept_whole": sum(n.target == REGION for n in graph.nodes),
        "error": max(errors, default=0.0), "scales": graph.scaling is not None, "notes": notes,
    }  # fmt: skip


def _error(a: Any, b: Any) -> float:
    """Largest difference, relative to the largest element (or to `MIN_SCALE`, where rounding is all there is)."""
    if a is None or b is None:
        rest = b if a is None else a
        return 0.0 if rest is None or not rest.any() else 1.0
    if a.numel() == 0:
        return 0.0
    scale = float(b.double().abs().max())
    return float((a.double() - b.double()).abs().max()) / max(scale, MIN_SCALE)


def _ran(model: str, loss: str, degrees: tuple[int, int, int]) -> dict[str, Any]:
    try:
        return trained(model, loss, degrees)
    except Exception as error:
        return {"ran": False, "why": _said(error)}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


def trained(model: str, loss: str, degrees: tuple[int, int, int]) -> dict[str, Any]:
    """A layout's ranks in threads, and a plain loop, on the same samples."""
    import rig
    import torch

    from meshwright.capture.losses import Objective
    from meshwright.capture.resolve import build_model
    from meshwright.graph.scale import at_batch
    from meshwright.plan.shards import local_values
    from meshwright.program.calls import inline
    from meshwright.run.executor.executor import Executor
    from meshwright.run.executor.lanes import fuse_lanes
    from meshwright.run.executor.memory import RankMemory
    from meshwright.run.executor.transport import TaggedTransport
    from meshwright.run.steps.forward_graph import from_traced
    from meshwright.run.train.data import Batches, open_data
    from meshwright.run.train.optimizers import make_optimizer
    from meshwright.run.train.segments import build_rank_module
    from meshwright.run.train.work import TrainingWork, gradient_bytes

    cpu = torch.device("cpu")
    rig.graph_of = lambda *_: at_batch(captured_once(model, loss), MICRO)
    layout, program, callees = rig.lowered(model, degrees, microbatch=MICRO, global_batch=GLOBAL, loss=loss)
    if degrees[1] > 1 and not layout.shards:
        return {"ran": False, "why": "nothing of it divides over tensor-parallel ranks"}
    flat = inline(program, callees).program
    orders = fuse_lanes(flat)
    whole = traced_once(model, loss)
    graph = from_traced(whole)
    opaque = next(n.target for n in whole.graph_module.graph.nodes if n.op == "call_function") if whole.method == "opaque" else None
    source = build_model(model, device="cpu", batch_size=MICRO)
    parameters, buffers = dict(source.module.named_parameters()), dict(source.module.named_buffers())
    dataset = open_data("synthetic", source.examples, 0)

    def body(rank: int, group: Any) -> Any:
        module = build_rank_module(
            graph, layout, rank, parameters, buffers, device=cpu, gradient_bytes=gradient_bytes(flat, rank), opaque=opaque
        )  # fmt: skip
        optimizer = make_optimizer("sgd", [(p.name, p.tensor) for p in module.trained()], RATE)
        work = TrainingWork(flat, layout, rank, module, Batches(dataset, layout, graph.inputs, cpu), optimizer)
        memory = RankMemory(flat, rank, cpu, local_values(layout, rank), module.gradients, layout=layout)
        executor = Executor(flat, orders, rank, memory=memory, transport=TaggedTransport(group), work=work)
        losses = []
        for step in range(STEPS):
            work.begin(step)
            executor.run()
            losses.append(work.loss())
        return losses, {p.name: (p.tensor.detach().clone(), p.shard) for p in module.parameters.values()}

    results = rig.in_threads(layout.ranks, body)
    last = [x for r, (x, _) in enumerate(results) if layout.coordinates(r)[0] == layout.pipeline - 1 and layout.coordinates(r)[2] == 0]
    losses = [sum(c) / len(c) for c in zip(*last, strict=True)]
    found: dict[str, Any] = {"ran": True}
    for what, rows in (("whole_batch", GLOBAL), ("by_microbatch", MICRO)):
        again = build_model(model, device="cpu", batch_size=MICRO)
        objective = Objective(again.module, loss, calling=again.calling)
        optimizer = torch.optim.SGD(again.module.parameters(), lr=RATE)
        plain = []
        for step in range(STEPS):
            samples = [dataset.sample(step * GLOBAL + i) for i in range(GLOBAL)]
            batch = [torch.stack(c) for c in zip(*samples, strict=True)]
            optimizer.zero_grad()
            total = 0.0
            for first in range(0, GLOBAL, rows):
                value = objective(*(x[first : first + rows] for x in batch)) * (rows / GLOBAL)
                value.backward()
                total += float(value.detach())
            optimizer.step()
            plain.append(total)
        weights = dict(again.module.named_parameters())
        held = [(n, t) for _, parts in results for n, (t, shard) in parts.items() if shard is None]
        error = max([abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, plain, strict=True)] + [_error(t, weights[n].detach()) for n, t in held])
        found[what] = error
        if error <= MAX_ERROR:
            break
    found["equal"] = min(found.get("whole_batch", 1.0), found.get("by_microbatch", 1.0)) <= MAX_ERROR
    return found


def main(arguments: list[str]) -> int:
    wanted = [a for a in arguments if not a.startswith("--")]
    from meshwright.io.atomic import write_bytes

    names = every()
    warm()
    known = {r["name"]: r for r in json.loads(RESULTS.read_text())["models"]} if RESULTS.exists() else {}
    for name in names:
        if (wanted and not any(w in name for w in wanted)) or ("--missing" in arguments and name in known):
            continue
        found = apart(name, "--no-run" not in arguments)
        known[name] = found
        print(json.dumps(found), flush=True)
        if "--no-write" not in arguments:
            write_bytes(RESULTS, (json.dumps(summary(known), indent=1) + "\n").encode())
    print(json.dumps({k: v for k, v in summary(known).items() if k != "models"}, indent=1))
    return 0


def warm() -> None:
    """What every model needs, imported once before the forks."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests" / "run"))
    import rig

    import meshwright.run.launch.rank  # noqa: F401

    for package in ("transformers", "diffusers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    rig.fabric_of(2)


def apart(name: str, run: bool) -> dict[str, Any]:
    """`one` in a forked process, for `TIMEOUT_S` at most."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def body() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            theirs.send(one(name, run))

    process = context.Process(target=body)
    process.start()
    theirs.close()
    found: dict[str, Any] = {"name": name, "captured": False, "why": f"took more than {TIMEOUT_S} s"}
    if ours.poll(TIMEOUT_S):
        try:
            found = ours.recv()
        except EOFError:
            found["why"] = "the process died"
    process.kill()
    process.join()
    return found


def summary(known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    models = list(known.values())
    runs = {k: [m["runs"][k] for m in models if "runs" in m] for k in LAYOUTS}
    return {
        "models": models, "tried": len(models), "captured": sum(m["captured"] for m in models), "same_bits": sum(m.get("error") == 0 for m in models),
        "within_1e-5": sum(m.get("error", 1) <= MAX_ERROR for m in models),
        "with_modules_kept_whole": sum(m.get("kept_whole", 0) > 0 for m in models), "opaque": sum(m.get("method") == "opaque" for m in models),
        **{f"{k}_ran": sum(r["ran"] for r in x) for k, x in runs.items()},
        **{f"{k}_equal": sum(r.get("equal", False) for r in x) for k, x in runs.items()},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
