"""What the `cluster` commands share: queue, servers, orders and allocations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..cluster import Queue, Servers
    from ..drive.cluster import Simulated

__all__ = [
    "OF_QUEUES", "bytes_given", "hours", "problem_arguments", "queue_of", "refuse_options", "row_of", "run_arguments", "run_options", "seconds_given",
    "servers_of", "table",
]  # fmt: skip


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue",
        help="meshwright.queue .json, Philly's .json, Gavel's .tsv or .trace, a .csv of Alibaba, Helios or Acme, or "
             "synthetic:jobs=300,per_hour=20,seed=1; or machines")
    parser.add_argument("--fabric", help="FILE.toml or PRESET:n; its groups with GPUs are the servers, e.g. dgx1-v100:16")
    parser.add_argument("--cores", type=int, help="of a queue, needed: cores of one server")
    parser.add_argument("--memory", help="of a queue, needed: memory of one server, e.g. 500GB")
    parser.add_argument("--split", help="draw published profiles: shares of image, language and speech models, e.g. 20,70,10")
    parser.add_argument("--rates", default="", help="of a Gavel trace: its measured throughputs, a JSON file")
    parser.add_argument("--seed", type=int, default=0, help="seed: equal seeds give equal results (default 0)")


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", help="measure jobs FIRST-LAST of the queue only: those before warm up, those after keep the load up")
    parser.add_argument("--round", default="5min", help="length of a round (default 5min)")
    parser.add_argument("--move", default="0s", help="what a job loses when it starts again or on other GPUs, e.g. 60s (default 0s)")
    parser.add_argument("--age", type=int, default=144, help="rounds that a gang may be passed over before it goes first, 0: for ever (default 144)")
    parser.add_argument("--programs", action="store_true",
        help="jobs that name a plan are as fast as its program, simulated on the devices that they got")
    parser.add_argument("--failures", default="", help="mean time between failures of one server, e.g. 720h")
    parser.add_argument("--repair", default="1h", help="how long a failed server is away (default 1h)")
    parser.add_argument("--checkpoint", default="0s",
        help="time between checkpoints: work since the last one is lost when a server fails (default: all)")


def seconds_given(text: str, where: str) -> float:
    """Raises: UsageError."""
    from ..errors import UsageError
    from ..io.quantity import parse_time_s

    try:
        return parse_time_s(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint="as in 30s, 5min, 2h") from None


def bytes_given(text: str, where: str) -> int:
    """Raises: UsageError."""
    from ..errors import UsageError
    from ..io.quantity import parse_size_bytes

    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(str(error), where=where, hint="as in 500GB") from None


# Options that only one of the two inputs has, with their defaults.
OF_QUEUES = {
    "split": None, "rates": "", "cores": None, "memory": None, "count": None, "failures": "", "jobs_out": None, "order": "fifo",
    "allocation": "priced", "bound": "prices", "round": "5min", "move": "0s", "age": 144, "repair": "1h", "checkpoint": "0s",
    "programs": False, "orders": "fifo,srtf,las", "allocations": "proportional,greedy,tune,priced",
}  # fmt: skip
OF_MACHINES = {"hosts": None, "warm_up": "3d", "learn": None, "needed": False, "strategy": "aligned", "predictor": "kaplan-meier"}


def refuse_options(args: argparse.Namespace, others: Mapping[str, Any], what: str) -> None:
    """Raises: UsageError for an option of the other kind of input, which would do nothing."""
    from ..errors import UsageError

    for name, default in others.items():
        if getattr(args, name, default) != default:
            raise UsageError(f"{what} have no such option", where=f"--{name.replace('_', '-')}", hint="leave it out")


def queue_of(args: argparse.Namespace) -> Queue:
    from ..errors import UsageError
    from ..io.cluster import load_queue

    refuse_options(args, OF_MACHINES, "queues")
    if args.seed < 0:
        raise UsageError(f"must be at least 0, got {args.seed}", where="--seed", hint="--seed 0")
    split = None
    if args.split is not None:
        try:
            split = [float(x) for x in args.split.split(",")]
        except ValueError:
            raise UsageError(f"{args.split!r} are no numbers", where="--split", hint="three shares: 20,70,10") from None
    return load_queue(args.queue, split=split, seed=args.seed, rates=args.rates)


def servers_of(args: argparse.Namespace) -> Servers:
    from ..cluster import servers_of as of_fabric
    from ..drive.plans import read_fabric
    from ..errors import UsageError

    for what in ("fabric", "cores", "memory"):
        if getattr(args, what) is None:
            raise UsageError("a queue needs servers", where=f"--{what}", hint="--fabric dgx1-v100:16 --cores 24 --memory 500GB")
    if args.cores < 1:
        raise UsageError(f"must be at least 1, got {args.cores}", where="--cores", hint="cores of one server, e.g. --cores 24")
    return of_fabric(read_fabric(args.fabric), cores=args.cores, memory_bytes=bytes_given(args.memory, "--memory"))


def run_options(args: argparse.Namespace, queue: Queue, servers: Servers) -> dict[str, Any]:
    """Options of `simulate_queue`. Raises: UsageError."""
    from ..drive.cluster import random_failures
    from ..errors import UsageError
    from ..simulate.cluster import Costs

    count = None
    if args.count:
        first, _, last = args.count.partition("-")
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < len(queue.jobs)):
            raise UsageError(f"{args.count!r} are no jobs of this queue", where="--count", hint=f"FIRST-LAST within 0-{len(queue.jobs) - 1}")
        count = (int(first), int(last) + 1)
    round_s = seconds_given(args.round, "--round")
    if round_s <= 0 or args.age < 0:
        raise UsageError(f"a round of {args.round}, age {args.age}", where="--round", hint="a time above 0; an age of at least 0")
    failures: tuple[Any, ...] = ()
    if args.failures:
        every_s, repair_s = seconds_given(args.failures, "--failures"), seconds_given(args.repair, "--repair")
        if every_s < 60 or repair_s <= 0:
            raise UsageError(f"failures every {args.failures}, repaired in {args.repair}", where="--failures",
                hint="at least 60s, and a repair above 0s")
        until_s = float(queue.arrival_s.max(initial=0.0) + 10 * queue.duration_s.max(initial=0.0))
        failures = random_failures(servers, every_s=every_s, repair_s=repair_s, until_s=until_s, seed=args.seed)
    costs = Costs(move_s=seconds_given(args.move, "--move"), checkpoint_s=seconds_given(args.checkpoint, "--checkpoint"))
    programs = None
    if args.programs:
        from ..drive.cluster_programs import ProgramSpeeds
        from ..drive.plans import read_fabric

        if not any(job.plan for job in queue.jobs):
            raise UsageError("no job of the queue names a plan", where="--programs", hint='"plan": "plan.json" in a job')
        programs = ProgramSpeeds(servers=servers, queue=queue, fabric=read_fabric(args.fabric))
    return {"count": count, "round_s": round_s, "age_rounds": args.age, "seed": args.seed, "failures": failures, "costs": costs,
            "programs": programs}  # fmt: skip


def row_of(found: Simulated) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "order": found.order, "allocation": found.allocation, **asdict(found.measures), "order_violations": found.violations,
        "rounds": found.rounds, "planned": found.planned,
    }  # fmt: skip


def hours(time_s: float) -> str:
    return f"{time_s / 3600:.2f} h"


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'order':<8}{'allocation':<14}{'mean':>10}{'p99':>10}{'makespan':>11}{'GPUs':>6}{'cores':>7}{'memory':>8}{'out of order':>14}{'rho':>7}"
        f"{'rho p99':>9}{'below floor':>13}{'moves':>8}"
    ]
    for r in rows:
        lines.append(
            f"{r['order']:<8}{r['allocation']:<14}{hours(r['mean_s']):>10}{hours(r['p99_s']):>10}{hours(r['makespan_s']):>11}{r['gpu_utilisation']:>6.0%}"
            f"{r['core_utilisation']:>7.0%}{r['memory_utilisation']:>8.0%}{r['order_violations']:>14.2f}{r['rho_median']:>7.2f}{r['rho_p99']:>9.2f}"
            f"{r['below_floor']:>13}{r['moves']:>8}"
        )
    return lines
