"""What the commands of embedding tables share: the tables, the fabric, costs, strategies and their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..bound import Bound
    from ..cost_models.lookups import LookupCosts
    from ..decide.tables import TableProblem
    from ..drive.tables import Tried
    from ..fabric.fabric import Fabric
    from ..graph.embeddings import Tables
    from ..kernels.effort import Cut

__all__ = ["compared_document", "lab_of", "problem_arguments", "problem_of", "tables_arguments", "tables_given", "text_table", "tried"]


def tables_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="?", type=Path, help="meshwright.tables (docs/formats.md) or statistics of dlrm_datasets, .json or .json.gz")
    parser.add_argument("--model", help="FILE.py:function or module:function instead: its EmbeddingBags, looked up once on its example inputs")
    parser.add_argument("--batch", type=at_least_one, help="samples of an iteration, of all devices together (default: the file's or the example's)")
    parser.add_argument("--dim", help="columns of tables whose statistics state none: one number, or several taken in turn, e.g. 128,64,32")
    parser.add_argument("--fabric", required=True, help="FILE.toml or PRESET:n; devices with memory_bytes hold no more than that")
    parser.add_argument("--devices", help="use only these devices, e.g. 0-3,8")
    parser.add_argument("--seed", type=whole_number, default=0, help="seed of what is drawn: equal seeds give equal plans (default 0)")


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    tables_arguments(parser)
    costs = "costs of `tables fit`; NAME=FILE for devices whose name begins so; without: a formula of memory bandwidths, assumed, not measured"
    parser.add_argument("--costs", action="append", default=[], metavar="FILE", help=costs)
    parser.add_argument("--foreign", action="store_true", help="plan with costs that were measured on another machine")
    parser.add_argument("--from", dest="start", type=Path, metavar="PLAN", help="the plan that runs now: what is moved from it is told")
    parser.add_argument("--move-at-most", metavar="SIZE", help="with --from: bytes that may be moved, e.g. 4GB")
    parser.add_argument("--measure", type=at_least_one, metavar="N", help="measure the N best plans on this machine, and take the best of them")
    parser.add_argument("--lab", metavar="NAME", help="with --measure: exchanges in this lab (`meshwright lab up`), not on loopback")


def tables_given(args: argparse.Namespace) -> Tables:
    """Raises: UsageError where neither or both of a file and a model are given."""
    from ..errors import UsageError

    if (args.tables is None) == (args.model is None):
        raise UsageError("give a file of tables or --model, one of them", where="TABLES", hint="meshwright tables plan tables.json --fabric laptop:2")
    if args.model is not None:
        from ..capture.embedding_tables import named_tables

        return named_tables(args.model, batch=args.batch, seed=args.seed)
    from ..io.model.tables import read_tables

    try:
        dims = [int(x) for x in args.dim.split(",")] if args.dim else []
    except ValueError:
        raise UsageError(f"{args.dim[:64]!r} are no numbers", where="--dim", hint="--dim 64, or --dim 128,64,32") from None
    return read_tables(args.tables, batch=args.batch, dim=dims)


def problem_of(args: argparse.Namespace) -> TableProblem:
    from ..decide.tables import TableProblem
    from ..drive.plans import read_fabric, read_plan
    from ..drive.tables import shards_of
    from ..errors import UsageError
    from .collective_bound import size_bytes

    tables, fabric = tables_given(args), read_fabric(args.fabric, args.devices)
    if (args.move_at_most is not None and args.start is None) or (args.lab is not None and args.measure is None):
        word = "--move-at-most" if args.move_at_most is not None and args.start is None else "--lab"
        raise UsageError("says nothing alone", where=word, hint="--move-at-most goes with --from, --lab with --measure")
    start = shards_of(read_plan(args.start)) if args.start is not None else ()
    most = size_bytes(args.move_at_most, "--move-at-most") if args.move_at_most is not None else None
    costs, kinds = _costs(args, tables, fabric)
    return TableProblem(tables=tables, fabric=fabric, costs=costs, kinds=kinds, start=start, move_bytes=most)


def _costs(args: argparse.Namespace, tables: Tables, fabric: Fabric) -> tuple[tuple[LookupCosts, ...], tuple[int, ...]]:
    """Costs, and which each device has."""
    from ..cost_models.lookups import assumed_costs
    from ..errors import UsageError
    from ..io.costs.lookups import read_lookup_costs

    if not args.costs:
        rates = sorted({d.memory_bandwidth_Bps for d in fabric.devices})
        found = tuple(assumed_costs(tables.batch, tables.element_bytes, r) for r in rates)
        return found, tuple(rates.index(d.memory_bandwidth_Bps) for d in fabric.devices)
    named: list[tuple[str, str]] = []
    for text in args.costs:
        name, equals, file = text.partition("=")
        named.append((name, file) if equals and any(d.name.startswith(name) for d in fabric.devices) else ("", text))
    files = [file for _, file in named]
    costs = tuple(read_lookup_costs(file) for file in files)
    if not args.foreign:
        from ..probe.tables.fit import refuse_foreign

        for c, file in zip(costs, files, strict=True):
            refuse_foreign(c, file)
    kinds = [max((len(name), -i, i) for i, (name, _) in enumerate(named) if d.name.startswith(name)) if any(
        d.name.startswith(name) for name, _ in named) else None for d in fabric.devices]  # fmt: skip
    if None in kinds:
        raise UsageError(f"no costs for device {fabric.devices[kinds.index(None)].name}", where="--costs", hint="NAME=FILE, or FILE for all others")
    return costs, tuple(k[2] for k in kinds if k is not None)


@contextmanager
def lab_of(name: str | None) -> Iterator[Any]:
    if name is None:
        yield None
        return
    from ..lab.lab import Lab

    lab = Lab.open(name)
    try:
        yield lab
    finally:
        lab.close()


def tried(args: argparse.Namespace, problem: TableProblem, kinds: Sequence[type[Any]]) -> tuple[Any, list[Tried], Bound, Cut | None]:
    """(plan, all that were tried, bound, what ended it early), finalists measured where that is asked."""
    from ..drive.tables import plan_tables
    from ..kernels.effort import Budget

    budget = Budget(len(kinds))

    with lab_of(args.lab) as lab:
        measure = None
        if args.measure is not None:
            from ..probe.tables.compute import Meter
            from ..probe.tables.fit import PlanMeasure

            measure = PlanMeasure(meter=Meter(problem.tables, seed=args.seed), fabric=problem.fabric, lab=lab)
        found = plan_tables(problem, [kind() for kind in kinds], seed=args.seed, measure=measure, finalists=args.measure or 0, budget=budget)
    return (*found, budget.cut)


def compared_document(problem: TableProblem, ranked: Sequence[Tried], bound: Bound) -> dict[str, Any]:
    rows = []
    for t in ranked:
        p = t.plan
        rows.append({
            "strategy": t.strategy.name, "cost_s": p.cost_s if p else None, "measured_s": t.measured.total_s if t.measured else None,
            "over_bound": p.cost_s / float(bound) if p and float(bound) else None, "shards": len(p.shards) if p else 0,
            "moved_bytes": p.moved_bytes if p else None, "evaluations": p.evaluations if p else 0, "why": t.why,
        })  # fmt: skip
    first = problem.costs[0]
    return {
        "tables": problem.tables.name, "table_count": len(problem.tables.tables), "batch": problem.tables.batch, "fabric": problem.fabric.name,
        "devices": problem.devices, "costs": "measured" if first.table is not None else "assumed", "errors": dict(first.errors),
        "exchanges": "measured" if problem.exchanges_measured else "links",
        "bound_s": float(bound), "strategies": rows,
    }  # fmt: skip


def text_table(problem: TableProblem, ranked: Sequence[Tried], bound: Bound) -> list[str]:
    from ..io.quantity import show_time

    first = problem.costs[0]
    how = "costs are assumed, from memory bandwidths" if first.table is None else "costs were measured: " + ", ".join(
        f"{name} within {error:.1%}" for name, error in sorted(first.errors.items()))  # fmt: skip
    if first.table is not None and not problem.exchanges_measured:
        how += "; exchanges by the fabric's links" + (f", those measured are of {first.fabric} with {first.devices} devices" if first.fabric else "")
    what = f"{len(problem.tables.tables)} tables, {problem.tables.batch} samples, on {problem.devices} devices of {problem.fabric.name}"
    lines = [
        f"{problem.tables.name}: {what}", how,
        f"no plan has a cost below {show_time(float(bound))}: lookups and bytes at their floors, evenly spread", "",
        f"{'strategy':<20}{'cost':>12}{'of bound':>10}{'measured':>12}{'shards':>8}",
    ]  # fmt: skip
    for t in ranked:
        if t.plan is None:
            lines.append(f"{t.strategy.name:<20}{'-':>12}{'-':>10}{'-':>12}{'-':>8}  {t.why}")
            continue
        over = f"{t.plan.cost_s / float(bound):.3f}" if float(bound) else "-"
        taken = show_time(t.measured.total_s) if t.measured else "-"
        lines.append(f"{t.strategy.name:<20}{show_time(t.plan.cost_s):>12}{over:>10}{taken:>12}{len(t.plan.shards):>8}")
    return lines
