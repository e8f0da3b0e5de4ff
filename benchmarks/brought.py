"""Classes as their owners bring them: live objects with batches of their own (padding, masks, boxes), their own losses, planned, gated and run.

    python benchmarks/brought.py [NAME ...] [--layouts dp2,pp2,tp2] [--summary]     # needs transformers; scipy and Pillow for its detectors

For each of `brought_classes.CLASSES`, none of which is in the zoo as it stands there: `meshwright.plan` on two devices in micro-batches of two
samples, `compare_step` (the gate), and under pp2 three steps of `parallelize` in two processes beside a plain loop: losses and weights, relative, in
float64 where the class has that form. Dropout and what else draws by configuration is off. "equal": the gate's step is the owner's (and the run's
losses and weights the plain loop's); "refused": by the plan or the gate, in the words of the row; "different": let pass, and not the plain loop's.

Every class runs in a forked process of its own; rows that are there are not made again. Raw output: benchmarks/results/brought.jsonl, summed up in
brought.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from brought_classes import CLASSES, bring, more

ROWS = Path(__file__).parent / "results" / "brought.jsonl"
LAYOUTS = {
    "dp2": {"data": 2, "tensor": 1, "pipeline": 1}, "pp2": {"data": 1, "tensor": 1, "pipeline": 2}, "tp2": {"data": 1, "tensor": 2, "pipeline": 1},
}  # fmt: skip
RUN = ("pp2",)  # layouts that are also run, in two processes
STEPS, RATE, MICRO, TIMEOUT_S = 3, 0.05, 2, 900
MAX_ERROR = {True: 1e-6, False: 1e-4}  # relative; in double precision, in which transformers takes losses of `logits.float()`
MIN_SCALE = 1e-3  # a tensor whose elements are all smaller is compared as if its largest were this


def own_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=RATE)


def plain_loop(module: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = own_optimizer(module), []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: x.detach().clone() for n, x in module.state_dict().items()}


def doubled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}


def has_double(name: str) -> bool:
    """Whether the class runs in double precision, with gradients that are numbers."""
    module, batch = bring(name)
    try:
        module.double()(**doubled(batch))["loss"].backward()
    except (RuntimeError, ValueError):
        return False
    return all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


def rows_of(name: str, layouts: list[str]) -> Any:
    import meshwright as mw

    wide = has_double(name)

    def fresh() -> torch.nn.Module:
        module, _ = bring(name)
        return module.double() if wide else module

    batches = [bring(name)[1], *(more(name, seed) for seed in range(100, 99 + STEPS))]
    batches = [doubled(b) if wide else b for b in batches]
    known = plain_loop(fresh(), batches)
    for layout in layouts:
        start, module = time.process_time(), fresh()
        row: dict[str, Any] = {"name": name, "layout": layout, "double": wide}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plan = mw.plan(module, batches[0], fabric="laptop:2", optimizer=own_optimizer(module), microbatch=MICRO, **LAYOUTS[layout])
                row["planned"] = True
                report = mw.torch.compare_step(module, own_optimizer(module), plan, batches[0])
                row |= {"verdict": "equal", "gate": report.why_not or f"{report.largest_error:.1e} in {report.precision}"}
            except Exception as error:
                row |= {"verdict": "refused", "why": said(error)}
            if row["verdict"] == "equal" and layout in RUN:
                row |= beside_plain(name, plan, wide, batches, known)
        yield {**row, "cpu_s": round(time.process_time() - start, 1)}


def beside_plain(name: str, plan: Any, wide: bool, batches: list[Any], known: tuple[list[float], dict[str, torch.Tensor]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.get_context("fork").Process(target=rank_of, args=(r, folder, name, plan, wide, batches)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S / 3)
            process.kill()
        if not (Path(folder) / "found").exists():
            errors = sorted(x.read_text() for x in Path(folder).glob("error*"))
            return {"verdict": "failed", "why": errors[0] if errors else "no result"}
        losses, state, told = torch.load(Path(folder) / "found")
    apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, known[0], strict=True)]
    apart += [difference(state[n], x) for n, x in known[1].items() if n in state and x.numel()]
    found = {"error": max(apart), "told": told}
    return found if max(apart) <= MAX_ERROR[wide] else {**found, "verdict": "different"}


def difference(ours: torch.Tensor, own: torch.Tensor) -> float:
    return float((ours.double() - own.double()).abs().max()) / max(float(own.double().abs().max()), MIN_SCALE)


def rank_of(rank: int, folder: str, name: str, plan: Any, wide: bool, batches: list[Any]) -> None:
    import torch.distributed as dist

    import meshwright as mw

    try:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
        module, _ = bring(name)
        module = module.double() if wide else module
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = mw.torch.parallelize(module, own_optimizer(module), plan)
        losses, state = [float(step(b)) for b in batches], step.state_dict(full=True)
        if rank == 0:
            torch.save((losses, state, [shown(str(w.message)) for w in told if "micro-batch" in str(w.message)]), f"{folder}/found")
        dist.destroy_process_group()
    except BaseException as error:
        (Path(folder) / f"error{rank}").write_text(said(error))
        os._exit(1)
    os._exit(0)


def said(error: BaseException) -> str:
    return shown(f"{type(error).__name__}: {error}; {getattr(error, 'hint', '')}")


def shown(text: str) -> str:
    """Without where packages lie."""
    return re.sub(r"[^ ]*(site-packages/|benchmarks/)", "", text)[:700]


def one(name: str, layouts: list[str], rows: Path) -> None:
    for row in rows_of(name, layouts):
        line = json.dumps(row)
        with rows.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def known_rows(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"classes": len({r["name"] for r in rows})}
    for layout in LAYOUTS:
        of = [r for r in rows if r["layout"] == layout]
        found[layout] = dict(Counter(r["verdict"] for r in of)) | {"refused_classes": sorted(r["name"] for r in of if r["verdict"] == "refused")}
    found["not_right"] = sorted(f"{r['name']} {r['layout']}" for r in rows if r["verdict"] not in ("equal", "refused"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--summary", action="store_true", help="only sum up the rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.summary:
        import transformers  # noqa: F401 - before the forks

        import meshwright.run.own_loop.parallelize  # noqa: F401

        for name in args.names or CLASSES:
            there = {r["layout"] for r in known_rows(args.rows) if r["name"] == name}
            if missing := [x for x in args.layouts.split(",") if x not in there]:
                process = multiprocessing.get_context("fork").Process(target=one, args=(name, missing, args.rows))
                process.start()
                process.join(TIMEOUT_S)
                process.kill()
    found = summary(known_rows(args.rows))
    print(json.dumps(found, indent=1))
    if args.rows == ROWS:
        with contextlib.suppress(ImportError):
            from machine import describe

            document = {"schema": "meshwright.benchmark", "name": "brought", **found, "machine": describe()}
            ROWS.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
