"""The zoo: models nobody tuned for, captured, planned and trained, each compared with plain PyTorch.

    python benchmarks/zoo.py --products
    python benchmarks/zoo.py [NAME ...] [--steps 20] [--rows FILE.jsonl] [--layouts dp2,pp2] [--summary]

Three kinds: transformers' classes from small configurations (needs transformers; diffusers for its U-Net), nets of torch.nn, and the traps of
tests/capture/eager_models.py (no_grad and autocast inside forward, checkpoints, own gradients, routing by value, ...). For each:

- captured: by which method, how many modules are kept whole, whether loss, gradients and buffers of the traced graph are the module's own bits (else
  the largest relative difference);
- planned and run by layouts with exactly the degrees of `LAYOUTS`, all ranks in one process (`run.gate`), in float64 where the model has that form,
  SGD, dropout as the configuration has it, with one process's bits (layers and paths left out at random are off: the gate refuses those). Losses of
  all steps and all weights after them against a plain loop over the whole batch, relative; where that differs (batch statistics, sums in bf16),
  against one that accumulates over the same micro-batches, with the replicas' buffers apart. Where neither is equal, the row says so, and how far
  the plain loop comes from itself when its weights are moved by one rounding: `chaotic` nets cannot be compared after so many steps by anybody. A
  refusal is told in its own words.

`--products`: twelve decoders under products of data, tensor, pipeline and context degrees on 4 and 8 ranks (zoo_products.jsonl).
Every model runs in a forked process of its own. A row is appended as soon as it is known; rows that are there are not made again, so an interrupted
run goes on. Raw output: benchmarks/results/zoo.jsonl (a row per model and layout), summed up in zoo.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NETS, TRAPS = ROOT / "benchmarks" / "zoo_nets.py", ROOT / "tests" / "capture" / "eager_models.py"
ROWS = ROOT / "benchmarks" / "results" / "zoo.jsonl"
STEPS, RATE, MICRO, GLOBAL, SEED = 20, 0.05, 2, 8, 0
LENGTH = 12
CAPTURED = "captured"
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {  # data, tensor, pipeline; what else is asked
    "dp2": ((2, 1, 1), {}), "pp2": ((1, 1, 2), {}), "tp2": ((1, 2, 1), {}), "dp2 x pp2": ((2, 1, 2), {}), "zero 1": ((2, 1, 1), {"zero": 1}),
    "zero 2": ((2, 1, 1), {"zero": 2}), "zero 3": ((2, 1, 1), {"zero": 3}), "recompute full": ((1, 1, 2), {"recompute": "full"}),
    "sequence parallel": ((1, 2, 1), {"sequence": True}),
}  # fmt: skip
PRODUCTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {  # on 4 and 8 ranks; context and its exchange
    "tp4": ((1, 4, 1), {}), "dp2 x tp2": ((2, 2, 1), {}), "tp2 x pp2": ((1, 2, 2), {}), "dp2 x tp2 x pp2": ((2, 2, 2), {}),
    "cp2 ring x dp2": ((2, 1, 1), {"context": (2, "ring")}), "cp2 ulysses x pp2": ((1, 1, 2), {"context": (2, "ulysses")}),
    "cp2 ring x tp2": ((1, 2, 1), {"context": (2, "ring")}), "cp2 ring x tp2 x pp2": ((1, 2, 2), {"context": (2, "ring")}),
    "cp2 ring x dp2 x tp2": ((2, 2, 1), {"context": (2, "ring")}),
}  # fmt: skip
ALL = LAYOUTS | PRODUCTS
TWELVE = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "opt", "olmo2", "granite", "stablelm")  # of `--products`
MAX_ERROR = {"float64": 1e-9, "float32": 1e-5}  # relative, of losses and weights
MAX_CONDITION = 1e3  # a plain loop whose losses move by so many times `MAX_ERROR` where its weights move by a rounding says nothing of a plan
MIN_SCALE = 1e-3  # a tensor whose elements are all smaller is compared as if its largest were this: key biases have no gradient but rounding
TIMEOUT_S = 900


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


def model_of(name: str, folder: Path, products: bool = False) -> tuple[str, str]:
    """(model, loss) as jobs name them; `products`: without dropout of attention's weights."""
    import zoo_nets

    kind, rest = named(name)
    if kind == "traps":
        return f"{TRAPS}:{rest}", "mse"
    if kind == "nets":
        return f"{NETS}:{rest}", zoo_nets.NETS[rest]
    import transformers

    fields, loss = zoo_nets.TRANSFORMERS[rest]
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields).to_dict()
    for k, v in config.items():  # what leaves out whole layers or paths draws by itself: the gate refuses that by name (`random-streams`)
        if ("layerdrop" in k or "drop_path" in k) and isinstance(v, float):
            config[k] = 0.0
    if products:  # a part of the positions does not know the bits of dropped attention weights
        config |= {k: 0.0 for k in ("attention_dropout", "attn_pdrop") if k in config}
    place = folder / f"{rest}.json"
    place.write_text(json.dumps({**config, "architectures": fields["architectures"]}, default=str))
    text = fields["architectures"][0].endswith(("LM", "LMHeadModel", "ForConditionalGeneration", "MTModel", "SequenceClassification"))
    return f"hf:{place}" + (f"@{LENGTH}" if text else ""), loss


def rows_of(name: str, layouts: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """What is found of one model, layout by layout."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        try:
            model, loss = model_of(name, Path(folder), products={*layouts} <= {*PRODUCTS})
            found = captured(model, loss)
        except Exception as error:
            yield {"name": name, "layout": CAPTURED, "ok": False, "why": _said(error, folder)}
            return
        yield {"name": name, "layout": CAPTURED, **found, "cpu_s": round(time.process_time() - start, 1)}
        for layout in layouts:
            start = time.process_time()
            try:
                row = Trained(model, loss, steps).under(*ALL[layout])
            except Exception as error:
                row = {"ok": False, "why": _said(error, folder)}
            yield {"name": name, "layout": layout, **row, "cpu_s": round(time.process_time() - start, 1)}


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
    torch.manual_seed(SEED)
    module(*traced.inputs).backward()
    gradients = {n: p.grad for n, p in traced.parameters.items()}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    with torch.no_grad():
        for n, b in module.named_buffers():
            b.copy_(before[n])
    for p in traced.parameters.values():
        p.grad = None
    torch.manual_seed(SEED)
    ours = traced.graph_module(*(traced.value(v) for v in traced.placeholders))[0]
    ours.backward()
    errors = [_error(p.grad, gradients[n]) for n, p in traced.parameters.items()]
    errors += [_error(b, buffers[n]) for n, b in module.named_buffers()]
    graph = captured_once(model, loss)
    notes = [_relative(n) for n in graph.notes if not n.startswith(("module paths", "no flop"))]
    return {
        "ok": True, "method": graph.method, "nodes": len(graph.nodes), "kept_whole": sum(n.target == REGION for n in graph.nodes),
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


def _said(error: BaseException, folder: str = str(ROOT)) -> str:
    text = (str(error).strip().splitlines() or ["no message"])[0]
    for place in (f"{folder}/", f"{ROOT}/"):
        text = text.replace(place, "")
    return f"{type(error).__name__}: {_relative(text)[:300]}"


def _relative(text: str) -> str:
    """Without where packages lie."""
    return re.sub(r"[^ ]*site-packages/", "", text)


@cache
def plain(model: str, loss: str, wide: bool, rows: int, replicas: int, steps: int, moved: bool = False) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a plain loop, `rows` samples at a time, with dropout's bits by sample; each of the replicas has its own buffers.
    `moved`: from weights of which every second one is larger by one rounding."""
    import torch

    from meshwright.capture.losses import Objective
    from meshwright.capture.resolve import build_model
    from meshwright.run.gate.widened import Widened
    from meshwright.run.train.dropout import Draws, SerialDraws

    source = build_model(model, device="cpu", batch_size=MICRO, seed=SEED)
    places = drawn_places(model, loss)
    if wide:
        source.module.double()
    for p in source.module.parameters() if moved else ():
        p.data.reshape(-1)[::2] *= 1 + torch.finfo(p.dtype).eps
    objective = Objective(source.module, loss, calling=source.calling)
    optimizer = torch.optim.SGD(source.module.parameters(), lr=RATE)
    buffers = dict(source.module.named_buffers())
    kept = [{n: b.clone() for n, b in buffers.items()} for _ in range(replicas)]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, GLOBAL, rows):
            own = kept[first * replicas // GLOBAL]
            for n, b in buffers.items():
                b.data.copy_(own[n])
            draws = Draws(seed=SEED, step=step, first=step * GLOBAL + first, samples=rows)
            batch = samples(model, step * GLOBAL + first, rows, wide)
            with Widened() if wide else contextlib.nullcontext(), SerialDraws(draws, places) if places else contextlib.nullcontext():
                value = objective(*batch) * (rows / GLOBAL)
                value.backward()
            total += float(value.detach())
            own |= {n: b.detach().clone() for n, b in buffers.items()}
        optimizer.step()
        losses.append(total)
    return losses, {n: p.detach() for n, p in source.module.named_parameters()}


@cache
def drawn_places(model: str, loss: str) -> Any:
    from meshwright.run.steps.forward_graph import from_traced
    from meshwright.run.train.dropout import random_places

    return list(random_places(from_traced(traced_once(model, loss))).values())


@cache
def dataset_of(model: str) -> Any:
    from meshwright.capture.resolve import build_model
    from meshwright.run.train.data import open_data

    return open_data("synthetic", build_model(model, device="cpu", batch_size=MICRO).examples, SEED)


def samples(model: str, first: int, count: int, wide: bool) -> list[Any]:
    import torch

    columns = zip(*(dataset_of(model).sample(first + i) for i in range(count)), strict=True)
    return [x.double() if wide and x.is_floating_point() else x for x in map(torch.stack, map(list, columns))]


class Trained:
    """A model under a layout's ranks, and beside it a plain loop on the same samples."""

    def __init__(self, model: str, loss: str, steps: int) -> None:
        self.model, self.loss, self.steps = model, loss, steps

    def under(self, degrees: tuple[int, int, int], how: dict[str, Any]) -> dict[str, Any]:
        import tensor_rig
        import torch

        from meshwright.capture.resolve import build_model
        from meshwright.decide.layout.data_sharding import PLAIN, DataSharding
        from meshwright.decide.layout.tensor_shares import TensorOptions
        from meshwright.decide.layout.unlike_devices import EVEN
        from meshwright.graph.scale import at_batch
        from meshwright.job import Training
        from meshwright.run.gate.planned import planned_step
        from meshwright.run.gate.wide import can_widen, wide_graph, wide_layout, wide_program
        from meshwright.run.steps.forward_graph import from_traced

        tensor_rig.graph_of = lambda *_: at_batch(captured_once(self.model, self.loss), MICRO)
        options = TensorOptions(sequence=True if how.get("sequence") else None)
        sharding = DataSharding(how["zero"]) if how.get("zero") else PLAIN
        layout, _, program = tensor_rig._lowered(
            self.model, degrees, MICRO, GLOBAL, self.loss, options, None, how.get("recompute", "none"), sharding, None, EVEN, None, None, "fp32",
            how.get("context", (1, "")),
        )  # fmt: skip
        if degrees[1] > 1 and not layout.shards:
            return {"ok": False, "why": "nothing of it divides over tensor-parallel ranks"}
        if how.get("sequence") and not any(s.sequence for s in layout.segments):
            return {"ok": False, "why": "nothing of it lies between regions along the sequence"}
        if how.get("recompute") and not any(s.computed_again() for s in layout.segments):
            return {"ok": False, "why": "nothing of it is worth computing again"}
        whole = traced_once(self.model, self.loss)
        graph = from_traced(whole)
        opaque = next(n.target for n in whole.graph_module.graph.nodes if n.op == "call_function") if whole.method == "opaque" else None
        source = build_model(self.model, device="cpu", batch_size=MICRO, seed=SEED)
        narrow: tuple[Any, ...] = (program, layout, graph)
        trial = self

        def planned(wide: bool) -> Any:
            if wide:
                source.module.double()
            parameters, buffers = dict(source.module.named_parameters()), dict(source.module.named_buffers())
            program, layout, graph = (wide_program(*narrow[:2]), wide_layout(narrow[1]), wide_graph(narrow[2])) if wide else narrow

            class Data:
                def microbatch(self, step: int, replica: int, microbatch: int) -> list[Any]:
                    return samples(trial.model, step * GLOBAL + layout.first_sample(replica, microbatch), layout.microbatch_size, wide)

            job = Training(model=self.model, global_batch=GLOBAL, loss=self.loss, optimizer="sgd", learning_rate=RATE, seed=SEED)
            return planned_step(
                program, layout, graph, job, parameters=parameters, buffers=buffers, data=Data(), seed=SEED,
                dtype=torch.float64 if wide else torch.float32, opaque=opaque, steps=self.steps,
            )  # fmt: skip

        def compared(wide: bool) -> dict[str, Any]:
            ours = planned(wide)
            precision = "float64" if wide else "float32"
            dropout = "serial" if drawn_places(self.model, self.loss) else "none"
            found: dict[str, Any] = {"ok": True, "steps": self.steps, "precision": precision, "dropout": dropout}
            for what, rows, replicas in (("whole_batch", GLOBAL, 1), ("by_microbatch", MICRO, layout.data)):
                found[what] = self.apart(layout, ours, *plain(self.model, self.loss, wide, rows, replicas, self.steps))
                found["equal"] = found[what] <= MAX_ERROR[precision]
                if found["equal"]:
                    return found
            own, other = (plain(self.model, self.loss, wide, MICRO, layout.data, self.steps, moved) for moved in (False, True))
            found["plain_moved_by_rounding"] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(other[0], own[0], strict=True))
            return {**found, "chaotic": found["plain_moved_by_rounding"] > MAX_CONDITION * MAX_ERROR[precision]}

        if can_widen(layout, graph, [*source.module.parameters(), *source.module.buffers()]):
            try:
                return compared(True)
            except RuntimeError as error:  # an operator that has no double form
                source = build_model(self.model, device="cpu", batch_size=MICRO, seed=SEED)
                return {**compared(False), "note": _said(error)}
        return compared(False)

    def apart(self, layout: Any, planned: Any, losses: list[float], weights: dict[str, Any]) -> float:
        """The largest error of a loss or a weight."""
        from meshwright.run.tensor.sharding import take_part

        said = [x.losses for r, x in enumerate(planned) if x.losses[-1] is not None and layout.coordinates(r)[2] == 0]
        worst = max(abs(sum(c) / len(c) - b) / max(abs(b), 1e-12) for c, b in zip(zip(*said, strict=True), losses, strict=True))
        shards = {s.param: s for s in layout.shards} if layout.tensor > 1 else {}
        for rank, step in enumerate(planned):
            for held in step.parameters:
                own, shard = weights[held.name], shards.get(held.name)
                part = take_part(own, shard.axis, shard, layout.coordinates(rank)[2], layout.tensor) if shard else own
                worst = max(worst, _error(held.values, part.reshape(-1)[held.first : held.first + held.values.numel()]))
        return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--layouts")
    parser.add_argument("--products", action="store_true", help="twelve transformers classes under products of degrees, context among them")
    parser.add_argument("--summary", action="store_true", help="only sum up the rows")
    args = parser.parse_args()
    args.rows = args.rows or (ROWS.with_name("zoo_products.jsonl") if args.products else ROWS)
    layouts = (args.layouts or ",".join(PRODUCTS if args.products else LAYOUTS)).split(",")
    if not args.summary:
        wanted = [f"transformers/{n}" for n in TWELVE] if args.products else []
        names = [n for n in every() if (n in wanted or not args.products) and (not args.names or any(w in n for w in args.names))]
        warm()
        for name in names:
            while missing := [x for x in (CAPTURED, *layouts) if x not in known(args.rows).get(name, {})]:
                apart(name, [x for x in missing if x != CAPTURED], args.steps, args.rows, missing[0])
                if known(args.rows)[name].get(CAPTURED, {}).get("ok") is False:
                    break
    found = summary(known(args.rows))
    print(json.dumps(found, indent=1))
    if args.rows.parent == ROWS.parent and not args.names:
        from machine import describe

        document = {"schema": "meshwright.benchmark", "name": args.rows.stem, **found, "machine": describe()}
        args.rows.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def known(rows: Path) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in rows.read_text().splitlines() if rows.exists() else ():
        row = json.loads(line)
        found[row["name"]][row["layout"]] = row
    return found


def warm() -> None:
    """What every model needs, imported once before the forks."""
    import torch

    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT / "tests" / "run"), str(ROOT / "tests")]
    import rig
    import tensor_rig  # noqa: F401

    import meshwright.run.launch.rank  # noqa: F401

    for package in ("transformers", "diffusers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    rig.fabric_of(2)


def apart(name: str, layouts: list[str], steps: int, rows: Path, first: str) -> None:
    """Rows of one model, made in a forked process for `TIMEOUT_S` at most; where it dies or takes longer, that is the row it was at (`first`, if
    none was written)."""
    before = len(known(rows).get(name, {}))

    def body() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            for row in rows_of(name, layouts, steps):
                if row["layout"] not in known(rows).get(name, {}):
                    _append(rows, row)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(TIMEOUT_S)
    late = process.is_alive()
    process.kill()
    process.join()
    done = known(rows).get(name, {})
    if late or len(done) == before:
        at = next((x for x in (CAPTURED, *layouts) if x not in done), first)
        _append(rows, {"name": name, "layout": at, "ok": False, "why": f"took more than {TIMEOUT_S} s" if late else "the process died"})


def _append(rows: Path, row: dict[str, Any]) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def summary(models: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {"tried": len(models)}
    captures = [m[CAPTURED] for m in models.values() if CAPTURED in m]
    found |= {
        "captured": sum(r["ok"] for r in captures), "same_bits": sum(r.get("error") == 0 for r in captures),
        "with_modules_kept_whole": sum(r.get("kept_whole", 0) > 0 for r in captures), "opaque": sum(r.get("method") == "opaque" for r in captures),
    }  # fmt: skip
    for layout in ALL:
        rows = [m[layout] for m in models.values() if layout in m]
        if not rows:
            continue
        equal = [r for r in rows if r.get("equal")]
        errors = [min(r[k] for k in ("whole_batch", "by_microbatch") if k in r) for r in equal if r["precision"] == "float64"]
        found[layout] = {
            "tried": len(rows), "equal": len(equal), "in_float64": len(errors), "by_microbatch": sum("by_microbatch" in r for r in equal),
            "largest_error_float64": max(errors, default=0.0),
            "different": sorted(r["name"] for r in rows if r["ok"] and not r["equal"] and not r.get("chaotic")),
            "chaotic": sorted(r["name"] for r in rows if r.get("chaotic")),
            "not_run": dict(Counter(r["why"] for r in rows if not r["ok"])), "steps": sorted({r["steps"] for r in equal}),
            "with_dropout": sum(r["dropout"] == "serial" for r in equal),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
