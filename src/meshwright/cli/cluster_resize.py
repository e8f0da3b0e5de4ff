"""`meshwright cluster resize`: a command's cores and memory, resized window by window; in virtual time; and what a log says."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import named_options, require_directory
from .cluster_arguments import bytes_given, seconds_given
from .frame import Result

if TYPE_CHECKING:
    from ..cluster.resize import ResizeLog, Tenants
    from ..decide.cluster.resize import Prior, ResizeStrategy

HELP = "Cores and memory of a command under real limits, resized window by window; in virtual time; and what a log says."
MAX_COPIES = 256
LOG_NAME, PRIOR_NAME = "{}.jsonl", "{}.prior.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the command and its arguments")
    parser.add_argument("--strategy", default="linucb",
        help="linucb (default), squarecb, doubly-robust, threshold, vpa, forecast or static; in virtual time also oracle")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the strategy, e.g. waste=0.002; may be repeated")
    parser.add_argument("--cpu", help="LEAST-MOST cores, e.g. 0.1-2; without it cores are not limited")
    parser.add_argument("--cpu-step", default="0.1", help="cores of a step (default 0.1)")
    parser.add_argument("--memory", help="LEAST-MOST, e.g. 128MiB-1GiB; without it memory is not limited")
    parser.add_argument("--memory-step", default="64MiB", help="of memory (default 64MiB)")
    parser.add_argument("--window", default="5s", help="between decisions (default 5s)")
    parser.add_argument("--windows", type=int, help="end the command after so many (default: when it ends)")
    parser.add_argument("--copies", type=int, default=1, help="of the command, each with limits of its own (default 1)")
    parser.add_argument("--critical", action="store_true", help="no exploration")
    parser.add_argument("--out", "-o", type=Path, help="folder for logs (cpu.jsonl, memory.jsonl) and what was learned (cpu.prior.json, ...)")
    parser.add_argument("--prior", type=Path, action="append", default=[], help="what was learned for another job; may be repeated")
    parser.add_argument("--simulate", metavar="TENANTSxDAYS", help="synthetic demands in virtual time instead of a command, e.g. 300x10")
    parser.add_argument("--from", dest="log", type=Path, metavar="LOG", help="check a log instead of running a command")
    parser.add_argument("--evaluate", help="with --from: what this strategy would have earned")
    parser.add_argument("--as", dest="form", metavar="ENGINE",
        help="with --from: the last sizes as orders: kubernetes:NAMESPACE/CONTAINER (pods have the tenants' names), or slurm:JOB")
    parser.add_argument("--seed", type=int, default=0, help="seed: equal seeds give equal results (default 0)")


def run(args: argparse.Namespace) -> Result:
    from ..errors import UsageError

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if sum((bool(command), args.simulate is not None, args.log is not None)) != 1:
        raise UsageError("one of a command, --simulate and --from", where="COMMAND",
            hint="meshwright cluster resize --cpu 0.1-2 -- python serve.py")
    if args.seed < 0:
        raise UsageError(f"must be at least 0, got {args.seed}", where="--seed", hint="--seed 0")
    if args.out is not None:
        require_directory(args.out / "cpu.jsonl")
    if args.log is not None:
        return _read(args)
    return _simulated(args) if args.simulate is not None else _real(args, command)


def _strategy(name: str, texts: list[str], where: str) -> ResizeStrategy:
    from dataclasses import fields

    import msgspec

    from ..decide.cluster.resize import strategy
    from ..errors import UsageError

    kind, options = strategy(name, where=where), named_options(texts, where="--option")
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    hint = f"options of {name}: {', '.join(known) or 'none'}"
    if not options.keys() <= set(known):
        raise UsageError(f"{', '.join(options.keys() - set(known))[:64]}: no option of {name}", where="--option", hint=hint)
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(str(error).replace("`$.", "`"), where="--option", hint=hint) from None


def _priors(paths: list[Path]) -> dict[str, Prior]:
    from ..decide.cluster.resize import Prior
    from ..io.cluster.resize import read_prior

    return {p.resource: Prior(knots=p.knots, squares=p.squares, products=p.products, rows=p.rows) for p in map(read_prior, paths)}


def _tenants(args: argparse.Namespace, resource: str) -> Tenants:
    """Raises: UsageError."""
    from ..cluster.resize import Tenants
    from ..errors import UsageError

    said, where = (args.cpu, "--cpu") if resource == "cpu" else (args.memory, "--memory")
    first, dash, second = said.partition("-")
    try:
        unit, least, most = (float(x) if resource == "cpu" else float(bytes_given(x, where))
            for x in (args.cpu_step if resource == "cpu" else args.memory_step, first, second))  # fmt: skip
    except ValueError:
        dash = ""
    if not dash or not 0 < unit < float("inf") or not 0 < least <= most < 1e18:
        raise UsageError(f"{said!r} is no range of sizes", where=where, hint="from the least to the most: 0.1-2, or 128MiB-1GiB; the step is above 0")
    if not 1 <= args.copies <= MAX_COPIES:
        raise UsageError(f"{args.copies} copies", where="--copies", hint=f"1 to {MAX_COPIES}")
    n = args.copies
    return Tenants(
        resource=resource, unit=unit, names=tuple(f"copy{i}" for i in range(n)), least=(max(1, round(least / unit)),) * n,
        most=(max(1, round(most / unit)),) * n, critical=(True,) * n if args.critical else (), window_s=seconds_given(args.window, "--window"),
    )  # fmt: skip


def _real(args: argparse.Namespace, command: list[str]) -> Result:
    from dataclasses import asdict

    from ..cluster.resize import ResizeLog, Rules
    from ..decide.cluster.resize import Resizer
    from ..errors import UsageError
    from ..io.cluster.resize import LogWriter
    from ..run.resize import ResizeCommand, resize_commands

    resources = [r for r, said in (("cpu", args.cpu), ("memory", args.memory)) if said is not None]
    if not resources or (args.windows is not None and args.windows < 1):
        raise UsageError("nothing to resize", where="--cpu", hint="give --cpu, --memory or both; --windows of at least 1")
    chosen, priors = _strategy(args.strategy, args.option, "--strategy"), _priors(args.prior)
    tenants = {r: _tenants(args, r) for r in resources}
    rules = {r: Rules(hold_windows=HOLD_WINDOWS if r == "memory" else 0) for r in resources}
    policies = {r: chosen.plan(tenants[r], rules[r], prior=priors.get(r)) for r in resources}
    commands = [ResizeCommand(name=name, command=tuple(command)) for name in tenants[resources[0]].names]
    written: list[str] = []
    with ExitStack() as stack:
        logs = {}
        for r in resources if args.out is not None else ():
            log = ResizeLog(tenants=tenants[r], rules=rules[r], strategy=chosen.name, options=asdict(chosen), seed=args.seed)  # type: ignore[call-overload]
            logs[r] = stack.enter_context(LogWriter(args.out / LOG_NAME.format(r), log))
            written.append(str(args.out / LOG_NAME.format(r)))
        found = resize_commands(
            commands, tenants, {r: Resizer(tenants[r], rules[r], policies[r], seed=args.seed) for r in resources}, most_windows=args.windows,
            on_window=lambda r, window: logs[r].add(window) if r in logs else None,
        )  # fmt: skip
        for r, log_file in logs.items():
            log_file.end(found.totals[r])
    if args.out is not None and chosen.learns:
        written += [_write_prior(args.out, r, policies[r].prior()) for r in resources]
    totals = {r: {"unit_hours": t.unit_hours, "violations": t.violations, "windows": t.windows} for r, t in found.totals.items()}
    document = {
        "schema": "meshwright.cluster-resize", "version": 1, "strategy": chosen.name, "windows": found.windows, "totals": totals,
        "periods": found.periods, "throttled": found.throttled, "oom_kills": found.oom_kills, "codes": dict(found.codes), "written": written,
    }  # fmt: skip
    lines = [f"{chosen.name}: {found.windows} windows of {args.window}, {args.copies} commands"]
    for r, t in found.totals.items():
        most = sum(tenants[r].most) * tenants[r].unit * found.windows * tenants[r].window_s / 3600
        hours = f"{t.unit_hours:.4g} core-hours" if r == "cpu" else f"{t.unit_hours / 1e9:.4g} GB-hours"
        lines.append(f"{r}: {hours}, {1 - t.unit_hours / most:.0%} fewer than the most; {t.violations} of {t.windows} windows violated")
    lines.append(f"quota used up in {found.throttled} of {found.periods} periods; {found.oom_kills} kills for memory")
    return Result(document, "\n".join([*lines, *(f"written: {w}" for w in written)]))


HOLD_WINDOWS = 12  # of memory: an hour of five-minute windows


def _write_prior(folder: Path, resource: str, prior: Prior) -> str:
    from ..io.cluster.resize import PriorFile, write_prior

    path = folder / PRIOR_NAME.format(resource)
    write_prior(path, PriorFile(resource=resource, knots=prior.knots, squares=prior.squares, products=prior.products, rows=prior.rows))
    return str(path)


def _simulated(args: argparse.Namespace) -> Result:
    from ..cluster.demand import DAY_WINDOWS, synthetic_demand
    from ..drive.resize import resize_simulated
    from ..errors import UsageError

    count, _, days = args.simulate.partition("x")
    if not (count.isdigit() and days.isdigit() and 1 <= int(count) <= 2000 and 2 <= int(days) <= 60):
        raise UsageError(f"{args.simulate!r}", where="--simulate", hint="tenants x days, e.g. 300x10; at most 2000x60, at least two days")
    tenants, demand = synthetic_demand(int(count), int(days) * DAY_WINDOWS, seed=args.seed)
    chosen = _strategy(args.strategy, args.option, "--strategy")
    found = resize_simulated(tenants, demand, chosen, seed=args.seed, prior=_priors(args.prior).get("cpu"))
    total, hours = found.run.total(DAY_WINDOWS), 24 * (int(days) - 1)
    written = [_write_prior(args.out, "cpu", found.prior)] if args.out is not None and found.prior is not None else []
    document = {
        "schema": "meshwright.cluster-resize-simulated", "version": 1, "strategy": chosen.name, "tenants": int(count), "days": int(days),
        "core_hours": total.unit_hours, "mean_cores": total.unit_hours / hours, "violations": total.violations, "rate": found.run.rate(DAY_WINDOWS),
        "most_cores": sum(tenants.most), "wanted_cores": float(demand[DAY_WINDOWS:].sum(1).mean()), "written": written,
    }  # fmt: skip
    lines = [
        f"{chosen.name}: {count} tenants, {days} days, the first not counted",
        f"{document['mean_cores']:.1f} cores in the mean, {document['rate']:.4%} of windows violated; "
        f"users asked for {document['most_cores']} and used {document['wanted_cores']:.1f}",
    ]  # fmt: skip
    return Result(document, "\n".join([*lines, *(f"written: {w}" for w in written)]))


def _read(args: argparse.Namespace) -> Result:
    from ..check.resize import check_resize_log
    from ..drive.resize import evaluate_log
    from ..io.cluster.resize import read_resize_log

    log = read_resize_log(args.log)
    verdict = check_resize_log(log)
    verdict.raise_if_wrong()
    facts: dict[str, Any] = dict(verdict.facts)
    document: dict[str, Any] = {
        "schema": "meshwright.cluster-resize-log", "version": 1, "resource": log.tenants.resource, "strategy": log.strategy, "status": verdict.status,
        "facts": facts, "notes": list(verdict.notes),
    }  # fmt: skip
    said = f"{facts['violations']} of {facts['windows']} windows violated"
    lines = [f"{args.log.name}: {log.tenants.resource}, {log.strategy}: {verdict.status}; {said}", *verdict.notes]
    if args.evaluate is not None:
        found = evaluate_log(log, _strategy(args.evaluate, args.option, "--evaluate"))
        document["evaluated"] = {
            "strategy": args.evaluate, "logged": found.logged, "rows": found.rows, "of": found.of,
            "estimates": [e._asdict() for e in found.estimates],
        }  # fmt: skip
        lines.append(f"mean reward {found.logged:.6f} as logged; of {args.evaluate}, on {found.rows} of {found.of} rows:")
        lines += [f"  {e.name:<6}{e.value:.6f}  ({e.low:.6f} to {e.high:.6f})" for e in found.estimates]
    if args.form is not None:
        document["orders"] = _orders(log, args.form)
        lines += document["orders"]
    return Result(document, "\n".join(lines))


def _orders(log: ResizeLog, form: str) -> list[str]:
    from ..cluster.resize import ACTIONS
    from ..errors import UsageError
    from ..run.resize import kubernetes_resize, slurm_update

    engine, _, name = form.partition(":")
    row = log.windows[-1] if log.windows else None
    if row is None or engine not in ("kubernetes", "slurm"):
        raise UsageError(f"{form!r}, a log of {len(log.windows)} windows", where="--as", hint="kubernetes:NAMESPACE/CONTAINER or slurm:JOB")
    orders = []
    for i, tenant in enumerate(log.tenants.names):
        size = (row.before[i] + ACTIONS[row.chosen[i]]) * log.tenants.unit
        what: dict[str, Any] = {"cores": size} if log.tenants.resource == "cpu" else {"memory_bytes": round(size)}
        if engine == "slurm":
            orders.append(slurm_update(name if len(log.tenants.names) == 1 else f"{name}_{i}", **what))
        else:
            namespace, _, container = name.partition("/")
            orders.append(kubernetes_resize(namespace, tenant, container, **what)[1])
    return orders
