"""`meshwright fabric design`: which cables to plug between accelerators, or which network with switches to buy, with bounds and prices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import at_least_one, whole_number
from .frame import Result

if TYPE_CHECKING:
    from ..decide.topology import TopologyProblem
    from ..drive.network import NetworkRow
    from ..drive.wiring import WiringRow
    from ..fabric.fabric import Fabric
    from ..kernels.effort import Budget

__all__ = ["HELP", "arguments", "run"]

HELP = "Which fabric to build: wirings without switches and how far they are from the best possible, or networks by price and time."
EPILOG = """\
examples:
  meshwright fabric design --nodes 16 --ports 4
  meshwright fabric design --nodes 64 --ports 4 --bidirectional --out pod.toml --cables pod.csv
  meshwright collective plan all-gather --fabric pod.toml --size 64MiB --strategy bfb       the schedule for it
  meshwright fabric design --nodes 18 --ports 4 --grow pod.toml --moves moves.csv           two more, few cables moved
  meshwright fabric design --rewire pod.toml --without d3 --moved 8 --moves moves.csv       one is dead: join what it leaves, move up to 8 links
  meshwright fabric design --nodes 64 --ports 4 --peers 2                                   two neighbours each, cables doubled
  meshwright fabric design --accelerators 1024 --budget 6000000 --job job.toml              networks beside each other

steps    of an all-gather or a reduce-scatter, the worse of both; every step costs one latency
T_B      how long its bytes take, in (bytes of the message) / (rate of all ports of one accelerator)
least    no wiring of so many accelerators and ports has fewer steps (Moore), or a smaller T_B
best     T_B of the best schedule on this wiring, however many steps it takes (--strategy forestcoll)
all      share of the ports' rate that all-to-all traffic can have, by a linear program; with <: at most so much, by the mean number of hops
out, in  with --grow or --rewire: links of the old wiring to unplug, and links to plug; a two-way cable is two links
global   at most so much of the injection can be all-to-all traffic, by a cut
time     of one iteration of the job. Networks: at least, its bytes over these shares, and latency over the diameter. Wirings (with --job): a
         breadth-first all-reduce, and an all-to-all at its share. With --simulate: message by message, above 128 accelerators round by round"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=at_least_one, metavar="N", help="accelerators without switches, joined by the ports of each")
    parser.add_argument("--ports", type=at_least_one, metavar="D", help="ports of each accelerator, one way in and one way out each")
    parser.add_argument("--bidirectional", action="store_true", help="only cables that carry both ways between the same two accelerators")
    parser.add_argument("--peers", type=at_least_one, default=0, metavar="N", help="with --nodes: others that each is joined to, at most")
    parser.add_argument("--parallel", type=at_least_one, default=0, metavar="N", help="with --nodes: cables to the same other, at most")
    parser.add_argument("--grow", metavar="FILE", help="with --nodes: a wiring that stands (fabric file), to grow to so many with few cables moved")
    parser.add_argument("--rewire", metavar="FILE", help="a wiring that stands: join its free ports, and move links for fewer steps or a smaller T_B")
    parser.add_argument("--without", metavar="PART,...", help="with --rewire: parts that are gone (d3, or a link d3<->d5)")
    parser.add_argument("--moved", type=whole_number, default=0, metavar="N", help="with --rewire: links that may move beyond the least (default 0)")
    parser.add_argument("--accelerators", type=at_least_one, metavar="N", help="at least so many, in a network of 16 ports each")
    parser.add_argument("--budget", type=whole_number, metavar="USD", help="leave out what costs more")
    parser.add_argument("--job", metavar="FILE", help="what an iteration sends (TOML; default of networks: 10 GB summed, 1 GB all-to-all)")
    parser.add_argument("--simulate", action="store_true", help="time the job's collectives on the fabric, of up to 4096 accelerators")
    parser.add_argument("--rate", default="50GB/s", help="of one port (default 50GB/s)")
    parser.add_argument("--latency", default="1us", help="of one cable (default 1us)")
    parser.add_argument("--prices", metavar="FILE", help="what parts cost (TOML; default: the published figures that ship)")
    tried = "Cayley digraphs tried at every size (default 2000); with --grow, --rewire: designs tried (default 200)"
    parser.add_argument("--evaluations", type=whole_number, default=None, metavar="N", help=tried)
    parser.add_argument("--no-table", action="store_true", help="leave the shipped base graphs out: all that is found is found now")
    parser.add_argument("--seed", type=whole_number, default=0, help="of the search: equal seeds give equal designs (default 0)")
    chosen = parser.add_argument_group("one design as files")
    chosen.add_argument("--row", type=whole_number, metavar="N", help="which row, counted from 1 (default: the last)")
    chosen.add_argument("-o", "--out", metavar="FILE", help="write it as a fabric file (.toml or .json)")
    chosen.add_argument("--cables", metavar="FILE", help="write its cables as CSV")
    chosen.add_argument("--dot", metavar="FILE", help="write it for Graphviz")
    chosen.add_argument("--moves", metavar="FILE", help="with --grow or --rewire: write what to unplug and to plug, as CSV")
    chosen.add_argument("--schedule", metavar="FILE", help="write a plan by the rule of the wiring's expansion, checked; an all-to-all by paths")
    operations = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    chosen.add_argument("--op", choices=operations, default="all-gather", help="of that plan (default all-gather)")
    chosen.add_argument("--size", default="64MiB", help="of that plan (default 64MiB)")


def run(args: argparse.Namespace) -> Result:
    from ..decide.topology import TopologyProblem
    from ..errors import UsageError
    from ..fabric.prices import shipped_prices
    from ..io.fabric.prices import read_prices
    from ..io.quantity import parse_rate_Bps, parse_size_bytes, parse_time_s

    try:
        rate, latency, _ = parse_rate_Bps(args.rate), parse_time_s(args.latency), parse_size_bytes(args.size)
    except ValueError as error:
        raise UsageError(str(error), where="--rate, --latency, --size", hint="e.g. --rate 50GB/s --latency 1us --size 64MiB") from None
    if args.rewire:
        return _rewired(args, rate, latency)
    _refuse(args, ("without", "moved"), "--rewire", "only a wiring that stands has parts that are gone, and links to move")
    wired = args.nodes is not None and args.ports is not None
    if wired == (args.accelerators is not None) or (args.nodes is None) != (args.ports is None):
        raise UsageError("give --nodes and --ports, or --accelerators", hint="e.g. --nodes 16 --ports 4, or --accelerators 1024")
    prices = read_prices(args.prices) if args.prices else shipped_prices()
    if not wired:
        _refuse(args, ("peers", "parallel", "grow", "moves", "schedule"), "--nodes", "networks with switches have their own parts")
        return _networks(args, TopologyProblem(nodes=args.accelerators, ports=1, rate_Bps=rate, latency_s=latency, prices=prices))
    if not args.grow:
        _refuse(args, ("moves",), "--grow", "only a wiring that stands has cables to move")
    else:
        _refuse(args, ("peers", "parallel", "bidirectional", "schedule"), "designs without --grow", "a growth keeps what stands, and has no rule")
    return _wirings(args, TopologyProblem(
        nodes=args.nodes, ports=args.ports, bidirectional=args.bidirectional, rate_Bps=rate, latency_s=latency, prices=prices,
        most_peers=args.peers, most_parallel=args.parallel,
    ))  # fmt: skip


def _refuse(args: argparse.Namespace, options: tuple[str, ...], owner: str, hint: str) -> None:
    from ..errors import UsageError

    for option in options:
        if getattr(args, option):
            raise UsageError(f"belongs to {owner}", where=f"--{option}", hint=hint)


def _wirings(args: argparse.Namespace, problem: TopologyProblem) -> Result:
    from ..drive.plans import read_fabric
    from ..drive.wiring import GROWTHS, design_wiring, grow_wiring
    from ..kernels.effort import Budget

    options = {"table": not args.no_table} | ({} if args.evaluations is None else {"evaluations": args.evaluations})
    budget = Budget(1)
    if args.grow:
        tried = GROWTHS if args.evaluations is None else args.evaluations
        rows = grow_wiring(read_fabric(args.grow), problem, evaluations=tried, seed=args.seed, budget=budget)
    else:
        rows = design_wiring(problem, options=options, seed=args.seed, budget=budget)
    return _shown(args, rows, problem, budget)


def _rewired(args: argparse.Namespace, rate_Bps: int, latency_s: float) -> Result:
    from ..decide.topology import TopologyProblem
    from ..drive.plans import read_fabric
    from ..drive.wiring import GROWTHS, rewire_wiring
    from ..fabric.prices import shipped_prices
    from ..io.fabric.prices import read_prices
    from ..kernels.effort import Budget

    others = ("nodes", "accelerators", "grow", "bidirectional", "peers", "parallel", "schedule")
    _refuse(args, others, "designs without --rewire", "a redesign keeps what stands")
    prices = read_prices(args.prices) if args.prices else shipped_prices()
    given = TopologyProblem(nodes=2, ports=1, rate_Bps=rate_Bps, latency_s=latency_s, prices=prices)
    budget = Budget(1)
    rows, problem = rewire_wiring(
        read_fabric(args.rewire), args.without.split(",") if args.without else (), given, ports=args.ports or 0, moved=args.moved,
        evaluations=GROWTHS if args.evaluations is None else args.evaluations, seed=args.seed, budget=budget,
    )  # fmt: skip
    return _shown(args, rows, problem, budget)


def _shown(args: argparse.Namespace, rows: list[WiringRow], problem: TopologyProblem, budget: Budget) -> Result:
    from ..drive.wiring import timed_wirings
    from ..io.fabric.network_jobs import read_network_job

    job = read_network_job(args.job) if args.job else None
    rows = timed_wirings(rows, problem, job, budget_usd=args.budget, simulate=args.simulate)
    number = _chosen(args, len(rows), len(rows))
    text = _text(rows, problem)
    written = _written(args, rows[number - 1].design.fabric(problem)) if args.out or args.cables or args.dot else []
    written += _plans(args, rows[number - 1], problem)
    document = {
        "schema": "meshwright.fabric-design", "version": 1, "nodes": problem.nodes, "ports": problem.ports, "bidirectional": problem.bidirectional,
        "prices": problem.prices.source, "simulated": args.simulate, "designs": [_document(row) for row in rows], "files": written,
    }  # fmt: skip
    return Result(document, "\n".join([text, *(f"row {number} written to {path}" for path in written)]), cut=budget.cut)


def _plans(args: argparse.Namespace, row: WiringRow, problem: TopologyProblem) -> list[str]:
    """`--moves` and `--schedule`."""
    from ..drive.plans import write_plan
    from ..io.atomic import write_text
    from ..io.fabric.cabling import moves_csv
    from ..io.quantity import parse_size_bytes

    made = []
    if args.moves and row.grown is not None:
        write_text(args.moves, moves_csv(row.design.names, row.grown.unplugged, row.grown.plugged))
        made.append(args.moves)
    if args.schedule:
        from ..drive.expansion import plan_expansion

        write_plan(args.schedule, plan_expansion(row.design, problem, args.op, parse_size_bytes(args.size)))
        made.append(args.schedule)
    return made


def _chosen(args: argparse.Namespace, rows: int, default: int) -> int:
    from ..errors import UsageError

    number = default if args.row is None else args.row
    if not 1 <= number <= rows:
        raise UsageError(f"there is no row {number}, the last is {rows}", where="--row", hint="leave --row out for the usual choice")
    return int(number)


def _networks(args: argparse.Namespace, problem: TopologyProblem) -> Result:
    from ..drive.network import DEFAULT_JOB, compare_networks
    from ..io.fabric.network_jobs import read_network_job

    job = read_network_job(args.job) if args.job else dict(DEFAULT_JOB)
    rows = compare_networks(problem, job, budget_usd=args.budget, simulate=args.simulate)
    number = _chosen(args, len(rows), 1)
    written = _written(args, rows[number - 1].design.fabric(problem)) if args.out or args.cables or args.dot else []
    document = {
        "schema": "meshwright.network-design", "version": 1, "accelerators": problem.nodes, "job": job, "prices": problem.prices.source,
        "budget_usd": args.budget, "designs": [_network(row) for row in rows], "files": written,
    }  # fmt: skip
    return Result(document, "\n".join([_network_text(rows, problem), *(f"row {number} written to {path}" for path in written)]))


def _network(row: NetworkRow) -> dict[str, Any]:
    d = row.design
    return {
        "name": d.name, "strategy": d.strategy, "accelerators": d.nodes, "planes": d.planes, "links": d.links, "parts": dict(d.parts), "usd": row.usd,
        "global_bound": str(d.global_bound), "all_reduce_share": str(d.all_reduce_share), "diameter": d.diameter, "time_s": row.time_s,
        "usd_seconds": row.usd_seconds, "simulated_s": row.simulated_s,
    }  # fmt: skip


def _network_text(rows: list[NetworkRow], problem: TopologyProblem) -> str:
    from ..io.quantity import show_time

    kind = "least" if rows[0].simulated_s is None else "simulated"
    lines = [
        f"networks for {problem.nodes} accelerators of 16 ports, by price times {kind} time of the job's iteration",
        f"{'row':>3}  {'network':<32}{'nodes':>7}{'switches':>10}{'cables':>9}{'price':>14}{'global':>9}{'hops':>6}{'time':>12}{'$ x s':>12}",
    ]
    for number, row in enumerate(rows, 1):
        d = row.design
        cables = sum(count for part, count in d.parts.items() if part.endswith("cable"))
        lines.append(
            f"{number:>3}  {d.name:<32}{d.nodes:>7}{d.parts.get('switch', 0):>10}{cables:>9}{row.usd:>12,} ${float(d.global_bound) * 100:>7.1f} %"
            f"{d.diameter:>6}{show_time(row.time_s if row.simulated_s is None else row.simulated_s):>12}{row.usd_seconds:>12,.0f}"
        )
    return "\n".join(lines)


def _document(row: WiringRow) -> dict[str, Any]:
    d = row.design
    verdicts = {"all-gather": row.gather, "reduce-scatter": row.scatter}
    return {
        "name": d.name, "strategy": d.strategy, "exact": d.exact, "steps": d.steps, "factor": str(d.factor), "steps_bound": d.steps_bound,
        "factor_bound": str(d.factor_bound), "forest_factor": str(row.forest_factor),
        "all_to_all_bound": None if d.gather is None else str(1 / d.gather.hops), "all_to_all": row.all_to_all,
        "parts": dict(d.parts), "usd": row.usd, "peers": d.wiring.peers, "parallel": d.wiring.parallel,
        **({} if row.time_s is None else {"time_s": row.time_s, "usd_seconds": row.usd * row.time_s}),
        **({} if row.grown is None else {
            "unplugged": len(row.grown.unplugged), "plugged": len(row.grown.plugged), "least_unplugged": row.least_unplugged,
        }),
        "check": {op: None if v is None else v.to_json() for op, v in verdicts.items()},
        "directions": {
            op: None if cost is None else {
                "steps": cost.steps, "factor": str(cost.load * d.wiring.ports / d.nodes),
                "tight": [{"node": t.node, "senders": list(t.senders), "shards": t.shards, "links": t.links} for t in cost.tight],
            }
            for op, cost in (("all-gather", d.gather), ("reduce-scatter", d.scatter))
        },
    }  # fmt: skip


def _text(rows: list[WiringRow], problem: Any) -> str:
    from ..io.quantity import show_time

    first = rows[0].design
    cables = "two-way cables" if problem.bidirectional else "ports each"
    moved = f"{'out':>5}  {'in':>5}  " if rows[0].grown is not None else ""
    moved += f"{'time':>10}  {'$ x s':>10}  " if rows[0].time_s is not None else ""
    lines = [
        f"{first.nodes} accelerators, {first.wiring.ports} {cables}: at least {first.steps_bound} steps, T_B at least {first.factor_bound}",
        f"{'row':>3}  {'steps':>5}  {'T_B':>10}  {'':>7}  {'best':>10}  {'all':>7}  {'cables':>7}  {'price':>12}  {moved}wiring",
    ]
    for number, row in enumerate(rows, 1):
        d = row.design
        above = f"{float(d.factor / d.factor_bound - 1) * 100:.1f} %" if d.factor != d.factor_bound else "least"
        mark = "" if d.exact else "  (by its rule, at most)"
        cables_of = d.parts["optical cable"]
        share = f"<{float(1 / d.gather.hops) * 100:.1f} %" if d.gather is not None else ""
        share = share if row.all_to_all is None else f"{row.all_to_all * 100:.1f} %"
        moves = f"{len(row.grown.unplugged):>5}  {len(row.grown.plugged):>5}  " if row.grown is not None else ""
        moves += f"{show_time(row.time_s):>10}  {row.usd * row.time_s:>10,.0f}  " if row.time_s is not None else ""
        lines.append(
            f"{number:>3}  {d.steps:>5}  {d.factor!s:>10}  {above:>7}  {row.forest_factor!s:>10}  {share:>7}  {cables_of:>7}  {row.usd:>10,} $  "
            f"{moves}{d.name}{mark}"
        )
    if rows[0].grown is not None:
        lines.append(f"any design without loops and parallel cables unplugs at least {rows[0].least_unplugged} links")
    return "\n".join(lines)


def _written(args: argparse.Namespace, fabric: Fabric) -> list[str]:
    import json

    from ..io.atomic import write_text
    from ..io.fabric.cabling import cabling_csv, graphviz
    from ..io.fabric.document import fabric_document
    from ..io.fabric.toml import fabric_toml

    made = []
    if args.out:
        as_json = args.out.lower().endswith(".json")
        made.append((args.out, json.dumps(fabric_document(fabric), ensure_ascii=False) + "\n" if as_json else fabric_toml(fabric)))
    if args.cables:
        made.append((args.cables, cabling_csv(fabric)))
    if args.dot:
        made.append((args.dot, graphviz(fabric)))
    for path, text in made:
        write_text(path, text)
    return [path for path, _ in made]
