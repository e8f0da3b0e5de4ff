"""Real steps with K-FAC's work in their idle time beside the same steps without it: is a step slower for it?

Run: `python benchmarks/filled_step.py` on a quiet machine (under three minutes; prints and writes benchmarks/results/filled_step.json).
Real: two gloo processes with a core each, stages of eight Linear layers, 1F1B; what forward, backward, curvature and inverses take is measured
first, `fill_plan` places them with a margin, and `rehearse` does the real work (hooks, Gram matrices, Cholesky inverses) there. The preconditioned
gradients are compared with a serial K-FAC step's. `--paced`: four processes whose stages and work sleep, 1F1B, GPipe and
Chimera, whose ranks tell each other of their work (six minutes more).
Plain and filled runs alternate, and each turn's ratio is of their median steps; preconditioning comes after a step, in no idle time: it stands apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import machine

from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import KFACCosts, kfac_work
from meshwright.drive.pipeline.fill import Filled, fill_plan
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.plan.plan import Plan
from meshwright.run.launch.rehearse import Rehearsal, rehearse

LIMIT = 1.03  # of the step without the work
COSTS = KFACCosts(curvature_s=0.02, inverse_s=0.08, layers=8, sync_s=0.004)
WIDTH, ROWS, LAYERS, MICROBATCHES = 256, 512, 8, 6
APART = 1e-6  # of the serial step's preconditioned gradients, float64 work in a float64 model


def stages(count: int, microbatches: int) -> tuple[list[Any], list[Any], list[Any], Any]:
    import torch

    torch.manual_seed(0)
    parts = [[part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())] for _ in range(count)]
    made = [torch.nn.Sequential(*own).double() for own in parts]
    rows = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(2 * microbatches)]
    return made, rows[:microbatches], rows[microbatches:], torch.nn.functional.mse_loss


def measured() -> tuple[dict[str, float], KFACCosts]:
    """Seconds of a stage's forward and backward and of its K-FAC work, median of five, on one thread."""
    import torch

    from meshwright.second_order import KFAC

    torch.set_num_threads(1)
    (stage,), (x,), (target,), loss = stages(1, 1)
    kfac = KFAC(stage, torch.optim.SGD(stage.parameters(), lr=0.0), deferred=True)
    found: dict[str, list[float]] = {}

    def timed(name: str, body: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = body()
        found.setdefault(name, []).append(time.perf_counter() - start)
        return result

    x.requires_grad_()
    for _ in range(5):
        y = timed("forward", lambda: stage(x))
        timed("backward", loss(y, target).backward)
        timed("curvature", lambda: [kfac.curvature(n, "input") for n in kfac.layers])
        timed("gradient curvature", lambda: [kfac.curvature(n, "gradient") for n in kfac.layers])
        for n in kfac.layers:
            kfac.average(n)
        timed("inverse", lambda: [kfac.invert(n, "input") for n in kfac.layers])
        timed("gradient inverse", lambda: [kfac.invert(n, "gradient") for n in kfac.layers])
    kfac.close()
    t = {name: median(values) for name, values in found.items()}
    costs = KFACCosts(
        curvature_s=t["curvature"], gradient_curvature_s=t["gradient curvature"], inverse_s=t["inverse"], gradient_inverse_s=t["gradient inverse"],
        layers=LAYERS,
    )  # fmt: skip
    return t, costs


def compared(what: str, plain: Plan, filled: Filled, turns: int, run: Callable[[Plan], Rehearsal]) -> tuple[dict[str, Any], list[Rehearsal]]:
    pairs = [(run(plain), run(filled.plan)) for _ in range(turns)]
    row = {
        "what": f"{what}: a filled step over a plain one", "value": round(median(b.median_s / a.median_s for a, b in pairs), 4),
        "unit": "of the plain step", "limit": LIMIT, "plain_s": [round(a.median_s, 4) for a, _ in pairs],
        "filled_s": [round(b.median_s, 4) for _, b in pairs], "planned_s": filled.filling.idle.step_s, "steps_per_refresh": filled.filling.steps,
        "used_planned": [round(filled.filling.used(filled=x), 4) for x in (False, True)],
    }  # fmt: skip
    return row, [b for _, b in pairs]


def real(args: argparse.Namespace) -> list[dict[str, Any]]:
    t, costs = measured()
    problem = PipelineProblem.of(2, MICROBATCHES, forward_s=t["forward"], backward_s=t["backward"], first_input_grad=False)
    plain = plan_pipeline(problem, "1f1b")
    filled = fill_plan(plain, lambda p, s: kfac_work(p, s, costs), margin=args.margin)
    where = f"{Path(__file__).resolve()}:stages"
    steps = -(-args.steps // filled.filling.steps) * filled.filling.steps  # whole cycles, so every kind of work counts alike
    row, runs = compared("real K-FAC work, 1F1B, two processes", plain, filled, args.turns, lambda p: rehearse(p, stages=where, steps=steps))
    worst = max(r.kfac_difference for r in runs if r.kfac_difference is not None)
    return [
        row | {"measured_first_s": {k: round(v, 5) for k, v in t.items()}, "precondition_s": round(median(r.precondition_s for r in runs), 5)},
        {"what": "preconditioned gradients of filled steps, largest difference from a serial K-FAC step's", "value": worst, "unit": "relative",
         "limit": APART, "done": runs[0].kfac_done},
    ]  # fmt: skip


def paced(args: argparse.Namespace) -> list[dict[str, Any]]:
    problem = PipelineProblem.of(4, 8, forward_s=0.02, backward_s=0.04, activation_bytes=4096)
    rows = []
    for name in ("1f1b", "gpipe", "chimera"):
        plain = plan_pipeline(problem, name)
        filled = fill_plan(plain, lambda p, s: kfac_work(p, s, COSTS), margin=args.margin)
        rows.append(compared(f"{name}, paced", plain, filled, args.turns, lambda p: rehearse(p, steps=args.steps))[0])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--margin", type=float, default=0.1)
    parser.add_argument("--paced", action="store_true")
    args = parser.parse_args()
    rows = real(args) + (paced(args) if args.paced else [])
    command = f"python benchmarks/filled_step.py --turns {args.turns} --steps {args.steps}" + (" --paced" if args.paced else "")
    print(json.dumps(machine.record("filled_step", rows, command=command)["rows"], indent=1))


if __name__ == "__main__":
    main()
