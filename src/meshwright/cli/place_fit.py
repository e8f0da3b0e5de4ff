"""`meshwright place fit`: a net that chooses moves of tasks (GiPH), trained on random problems and on ones that are given."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import at_least_one, require_directory, whole_number
from .frame import Result

if TYPE_CHECKING:
    from ..kernels.stages import Stage

HELP = "Train the net by which `--strategy giph` moves tasks, on random task graphs and devices, or on yours."


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("tasks", nargs="*", type=Path, help="task graphs to train on beside random ones, with --fabric")
    add("--fabric", help="FILE.toml or PRESET:n, of the given task graphs")
    add("--updates", type=at_least_one, default=100, help="steps of the optimizer, 16 episodes each (default 100: a minute or two)")
    add("--devices", type=at_least_one, default=20, help="of random problems (default 20)")
    add("--seed", type=whole_number, default=0, help="equal seeds give equal nets on one machine (default 0)")
    add("--out", "-o", type=Path, default=Path("moves.safetensors"), help="where to write the net (default moves.safetensors)")


def run(args: argparse.Namespace) -> Result:
    from ..drive.place import fit_placer
    from ..drive.plans import read_fabric
    from ..errors import UsageError
    from ..io.costs.moves import write_move_net
    from ..io.model.tasks import read_tasks
    from ..kernels.effort import Budget
    from ..kernels.stages import stage

    require_directory(args.out)
    if bool(args.tasks) != (args.fabric is not None):
        raise UsageError("task graphs and a fabric go together", where="--fabric", hint="meshwright place fit tasks.json --fabric edge.toml")
    fabric = read_fabric(args.fabric) if args.fabric is not None else None
    curve: list[tuple[int, float]] = []
    graphs = [read_tasks(t) for t in args.tasks]
    budget = Budget(1)
    with stage("steps of the optimizer", of=args.updates) as here, budget.net():
        net = fit_placer(graphs, fabric, devices=args.devices, updates=args.updates, seed=args.seed, told=partial(_told, here, curve))
    write_move_net(args.out, net)
    document = {
        "schema": "meshwright.place-fit", "version": 1, "file": str(args.out), "net": net.digest, "trained": dict(net.trained),
        "curve": [{"update": u, "over_path": x} for u, x in curve],
    }  # fmt: skip
    lines = [
        f"{net.trained['episodes']:,.0f} episodes of 2 moves for every task",
        f"on problems held back: {net.trained['held_back']:.3f} of the shortest path, {net.trained['held_back_untrained']:.3f} untrained",
        f"written: {args.out}",
    ]
    return Result(document, "\n".join(lines), cut=budget.cut)


def _told(here: Stage, curve: list[tuple[int, float]], update: int, over_path: float) -> None:
    curve.append((update, over_path))
    here.done, here.best = update, f"{min(x for _, x in curve):.3f} of the shortest path"
