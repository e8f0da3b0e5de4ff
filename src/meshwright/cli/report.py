"""`meshwright report`: a plan, and its run where there is one, as one page that a browser opens without a network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.garbage import few_collections
from .frame import Result

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..report.page.content import RunFacts

HELP = "explain a plan and its run, a profiler trace, or two runs side by side, on one self-contained page (HTML)"
EPILOG = """\
examples:
  meshwright report plan.json -o report.html
  meshwright report run/ -o report.html                prediction above measurement, of the plan that the run's folder holds
  meshwright report plan.json run/ -o report.html      the same with the plan from elsewhere
  meshwright report trace.json -o report.html          where the time of a torch.profiler trace went, without a plan; a folder holds a rank each
  meshwright report before.json after.json             two traces, or two runs, side by side, with what changed"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="a plan file, the folder of a run, a torch.profiler trace, or a folder of traces")
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run of that plan, or a second run or trace to compare with")
    parser.add_argument("--out", "-o", type=Path, default=Path("report.html"), help="where to write the page (default report.html)")
    parser.add_argument("--step", type=int, default=0, help="which program of a plan with a cycle of several (default 0, the first)")
    parser.add_argument("--no-check", action="store_true", help="do not check the plan first; the page then says so")


@few_collections()
def run(args: argparse.Namespace) -> Result:
    from ..drive.plans import check_plan, fabric_of, read_plan
    from ..errors import UsageError
    from ..io.atomic import write_text
    from ..report.page.document import report_page
    from ..report.page.gather import gather
    from .arguments import require_directory

    require_directory(args.out)
    folder, plan_file = args.run, args.plan
    if measured := _measured(args):
        return measured
    if plan_file.is_dir():
        if folder is not None:
            raise UsageError("is a folder, not a plan", where=str(plan_file), hint="meshwright report RUN, or meshwright report plan.json RUN")
        from ..io.plan.run_names import PLAN
        from ..run.launch.run_folder import run_plan

        folder, plan_file = plan_file, plan_file / PLAN
        plan = run_plan(folder)
    else:
        plan = read_plan(plan_file)
    if not 0 <= args.step < len(plan.cycle):
        raise UsageError(f"there is no step {args.step} in a cycle of {len(plan.cycle)}", where="--step")
    fabric = fabric_of(plan)
    if not args.no_check:
        check_plan(plan, fabric)
    ran = _ran(plan, folder) if folder is not None else None
    content = gather(plan, plan_file=plan_file.name, run=ran, entry=args.step, checked=not args.no_check, fabric=fabric)
    page = report_page(content)
    write_text(args.out, page.html)
    document: dict[str, Any] = {
        "schema": "meshwright.report", "version": 1, "plan": str(plan_file), "run": str(folder) if folder else None, "path": str(args.out),
        "kind": plan.kind, "bytes": page.size_bytes, "time_s": content.timeline.makespan_s, "spans": page.spans, "spans_shown": page.shown,
        "messages": page.messages, "checked": content.checked, "notes": list(page.notes),
    }  # fmt: skip
    lines = [f"{page.spans:,} spans, {page.messages:,} messages, {page.size_bytes / 1e6:.2f} MB", *(f"note: {n}" for n in page.notes)]
    return Result(document, "\n".join([*lines, f"written: {args.out}"]))


def _measured(args: argparse.Namespace) -> Result | None:
    """The page of what was measured, where no plan is given: traces, or two runs; None where the page is a plan's."""
    from ..bottleneck.diff import by_module, difference
    from ..compare.breakdown import breakdown_of
    from ..compare.diff import kind_of
    from ..io.atomic import write_text
    from ..report.page.measured import Side, measured_page

    paths = [p for p in (args.plan, args.run) if p is not None]
    kinds = [kind_of(p) for p in paths]
    if "plan" in kinds or kinds == ["run"]:
        return None
    names = [p.name or str(p) for p in paths]
    names = [f"{n} ({'AB'[k]})" for k, n in enumerate(names)] if len(set(names)) < len(names) else names
    sides = [Side(name=n, found=breakdown_of([p])[0]) for n, p in zip(names, paths, strict=True)]
    diff = difference(*(by_module(s.found.views) for s in sides)) if len(sides) > 1 else None
    page = measured_page(sides, diff)
    write_text(args.out, page.html)
    document: dict[str, Any] = {
        "schema": "meshwright.report", "version": 1, "plan": None, "run": str(paths[0]), "path": str(args.out), "kind": "measured",
        "bytes": page.size_bytes, "time_s": sides[0].found.step_s, "spans": page.spans, "spans_shown": page.shown, "messages": 0, "checked": False,
        "notes": list(page.notes), "against": str(paths[1]) if len(paths) > 1 else None,
    }  # fmt: skip
    return Result(document, f"{page.spans:,} spans, {page.size_bytes / 1e6:.2f} MB\nwritten: {args.out}")


def _ran(plan: Plan, folder: Path) -> RunFacts:
    import msgspec

    from ..bottleneck.breakdown import break_down
    from ..compare.own_run import run_views
    from ..compare.run import compare_run
    from ..errors import UsageError
    from ..report.page.content import RunFacts
    from ..run.launch.run_folder import read_run
    from ..run.recording.recording import expert_loads

    comparison, inlined = compare_run(plan, folder)
    read = read_run(folder, plan)
    document = msgspec.to_builtins(read.document)
    loads = expert_loads(read.recordings, plan.layout) if plan.layout is not None else {}
    try:
        views, one_clock = run_views(plan, folder)
        measured = break_down(views, one_clock=one_clock)
    except UsageError:  # no step that nothing slowed: the comparison takes what there is, causes need better
        measured = None
    return RunFacts(
        folder=folder.name or str(folder), comparison=comparison, inlined=inlined, document=document, measured=measured, expert_loads=loads
    )
