"""Breakdowns of files: traces of torch.profiler, a rank each, or the folder of a run of ours with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..bottleneck.breakdown import Breakdown, break_down
from ..bottleneck.device import DeviceTimes
from ..errors import UsageError
from .ranks import read_ranks, traces_in

__all__ = ["breakdown_of"]


def breakdown_of(
    traces: Sequence[Path], *, plan: Path | None = None, modules: Path | None = None, model: str | None = None, fabric: str | None = None,
    last_step: bool = True,
) -> tuple[Breakdown, dict[int, DeviceTimes]]:
    """The breakdown, and of CUDA traces the device's totals by rank. `traces`: one per rank, a folder of them, or the folder of a run of ours;
    `plan`: what that ran (default: what it holds).
    `fabric`: its rates are what links should carry; rank r is on its device r, or where the plan put it.

    Raises: UsageError (a folder without plan and trace, or among traces; ranks of several runs), FormatError (a file is no trace, clocks do not fit).
    """
    folders = [t for t in traces if t.is_dir()]
    if folders:
        if len(traces) > 1:
            raise UsageError("a folder holds all ranks of its run", where=str(folders[0]), hint="give it alone")
        if not (folders[0] / "run.json").is_file() and plan is None:
            traces, folders = traces_in(folders[0]), []
    if folders:
        from ..drive.plans import read_plan  # a trace alone needs neither plans nor programs
        from ..run.launch.run_folder import run_plan
        from .own_run import run_views

        planned = run_plan(folders[0]) if plan is None else read_plan(plan)
        recorded, one_clock = run_views(planned, folders[0])
        rates = _rates(fabric, len(recorded), planned.placement) if fabric else None
        return break_down(recorded, one_clock=one_clock, rates_Bps=rates), {}
    tree = None
    if modules is not None:
        from ..io.trace.module_tree import read_module_tree

        tree = read_module_tree(modules)
    if model is not None:
        from ..capture.modules import named_capture

        tree = named_capture(model)
    ranks = read_ranks(traces, tree, last_step=last_step)
    views, worlds = [r.view for r in ranks], {r.world_size: r.path for r in ranks if r.world_size}
    devices = {r.view.rank: r.device for r in ranks if r.device is not None}
    if len(worlds) > 1:
        said = " and ".join(f"{n} ({p.name})" for n, p in worlds.items())
        raise UsageError(f"the traces are of runs with different numbers of ranks: {said}", hint="give traces of one run")
    rates = _rates(fabric, max(v.rank for v in views) + 1) if fabric else None
    found = break_down(views, rates_Bps=rates)
    world = max(worlds, default=0)
    if world > len(views):
        missing = sorted(set(range(world)) - {v.rank for v in views})
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        note = f"{len(missing)} of {world} ranks are missing ({shown}): who was last is told among those given"
        found = Breakdown(**{**{f: getattr(found, f) for f in found.__struct_fields__}, "warnings": [*found.warnings, note]})
    return found, devices


def _rates(name: str, ranks: int, placement: Sequence[str] = ()) -> dict[tuple[int, int], float]:
    """(source, destination) -> rate of the slowest link on the way. Raises: UsageError for a fabric with fewer devices than ranks."""
    from ..io.fabric.name import load_fabric

    fabric = load_fabric(name)
    if len(fabric.devices) < ranks:
        raise UsageError(f"has {len(fabric.devices)} devices, the traces are of {ranks} ranks", where="--fabric", hint="give the fabric of the run")
    known = fabric.actor_of
    names = placement if len(placement) >= ranks and all(p in known for p in placement) else [d.name for d in fabric.devices]
    actor = [known[name] for name in names[:ranks]]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return {(a, b): float(min(fabric.links[i].rate_Bps for i in fabric.route(actor[a], actor[b]))) for a, b in pairs}
