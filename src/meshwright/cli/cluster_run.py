"""`meshwright cluster run QUEUE`: decide who runs where, and make an engine do it: this machine, Slurm, Ray or Kubernetes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cluster_arguments import bytes_given, queue_of, seconds_given
from .frame import Result

if TYPE_CHECKING:
    from ..cluster import Queue, Servers
    from ..simulate.cluster import Policy

HELP = "Decide who runs where, and make an engine do it: this machine, Slurm, Ray or Kubernetes."
EPILOG = """\
examples:
  meshwright cluster run queue.json --fabric dgx1-v100:2 --cores 24 --memory 500GB --folder run
  meshwright cluster run queue.json --fabric dgx1-v100:2 --cores 24 --memory 500GB --folder run --round 5min --order srtf --allocation priced
  meshwright cluster run queue.json --engine slurm --sandbox slurm-1a2b3c --folder run
  meshwright cluster run queue.json --engine kubernetes --image my/image:1 --folder run --dry-run ...

The folder holds the journal. The same command again takes up a run that was broken off: what has ended is not started again.
The exit code is 1 where a job failed."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", help="as for `cluster plan`; its jobs say their command, or --command does")
    parser.add_argument("--engine", choices=("local", "slurm", "ray", "kubernetes"), default="local",
        help="who runs the jobs (default local: this machine)")
    parser.add_argument("--folder", type=Path, required=True, help="of the run: its journal, and what jobs print")
    parser.add_argument("--fabric", help="FILE.toml or PRESET:n; its groups are the servers (default: those that the engine has)")
    parser.add_argument("--cores", type=int, default=0, help="with --fabric: cores of one server")
    parser.add_argument("--memory", default="", help="with --fabric: memory of one server, e.g. 500GB")
    parser.add_argument("--order", default="fifo", help="who goes first: fifo (default), srtf, las, ftf, drf or tetris")
    parser.add_argument("--allocation", default="proportional", help="who gets what: proportional (default), priced, greedy, tune or opt")
    parser.add_argument("--command", default="", help="for jobs without one; {name}, {gpus}, {duration_s} are filled in: 'sleep {duration_s}'")
    parser.add_argument("--per", choices=("gpu", "server"), default="gpu", help="a job's command is started once per GPU (default) or per server")
    parser.add_argument("--round", default="", help="decide in rounds of this length, e.g. 5min: jobs are preempted, moved, and resized where the "
        "engine can (default: when jobs come and end; jobs keep what they have)")
    parser.add_argument("--move", default="0s", help="with --round: what a job loses when it begins again elsewhere (default 0s)")
    parser.add_argument("--age", type=int, default=144, help="with --round: rounds that a gang may be passed over, 0: for ever (default 144)")
    parser.add_argument("--grace", default="30s", help="with --round: what a job that must leave has after SIGTERM to save its state (default 30s)")
    parser.add_argument("--speed-up", type=float, default=1.0, help="divide arrival times and durations by this, to try a trace")
    parser.add_argument("--limit", default="", help="give the run up after this time, e.g. 2h")
    parser.add_argument("--conf", type=Path, help="Slurm: its slurm.conf (default: as SLURM_CONF says)")
    parser.add_argument("--sandbox", default="", help="Slurm, Ray: a sandbox of `cluster sandbox up`")
    parser.add_argument("--address", default="auto", help="Ray: address of the cluster (default: the one that runs here)")
    parser.add_argument("--partition", default="", help="Slurm: partition of the jobs")
    parser.add_argument("--image", default="", help="Kubernetes: container image with the jobs' program and Python")
    parser.add_argument("--kind", choices=("job", "jobset", "leaderworkerset"), default="job", help="Kubernetes: what a job becomes (default job)")
    parser.add_argument("--namespace", default="default", help="Kubernetes: namespace (default default)")
    parser.add_argument("--local-queue", default="", help="Kubernetes: queue the jobs in this LocalQueue of Kueue")
    parser.add_argument("--state-claim", default="", help="Kubernetes: PersistentVolumeClaim where jobs keep their state (MESHWRIGHT_STATE)")
    parser.add_argument("--resource", default="nvidia.com/gpu", help="Kubernetes: name of the GPUs (default nvidia.com/gpu)")
    parser.add_argument("--dry-run", action="store_true", help="print what the engine would be told of the jobs that start first, and do nothing")
    parser.add_argument("--split", help="draw published profiles: shares of image, language and speech models, e.g. 20,70,10")
    parser.add_argument("--most-passed", type=int, default=16, help="how many later jobs may start before a waiting one, 0: any number (default 16)")
    parser.add_argument("--rates", default="", help="of a Gavel trace: its measured throughputs, a JSON file")
    parser.add_argument("--seed", type=int, default=0, help="seed: equal seeds give equal results (default 0)")


def run(args: argparse.Namespace) -> Result:
    import sys

    from ..cluster.allocation import speed_of
    from ..decide.cluster import allocation, order
    from ..decide.cluster.problem import require_possible
    from ..drive.cluster import given_of, speeds
    from ..errors import UsageError
    from ..run.engines import Driver, Session
    from ..run.engines.audited import audit

    queue = _commanded(args, queue_of(args))
    first, strategy = order(args.order, where="--order"), allocation(args.allocation, where="--allocation")
    if args.most_passed < 0:
        raise UsageError(f"must be at least 0, got {args.most_passed}", where="--most-passed", hint="0: nobody is passed over")
    limit_s = seconds_given(args.limit, "--limit") if args.limit else float("inf")
    servers = _servers(args)
    engine = _engine(args, servers)
    servers = servers or engine.discover()
    require_possible(servers, queue)
    policy = _policy(args, servers, queue, first(), strategy(), engine.resizes)

    def given(job: int, parts: Any) -> Any:
        return tuple(given_of(servers, queue, job, parts))

    with Session(engine, args.folder, dry=args.dry_run, servers=servers, grace_s=seconds_given(args.grace, "--grace")) as session:
        session.discover()
        driver = Driver(session=session, servers=servers, queue=queue, policy=policy, given=given, per=args.per, limit_s=limit_s,
                        speed=speeds(servers, queue, speed_of),
                        say=lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201 # fmt: skip
        if args.dry_run:
            started = driver.first()
            document = {"schema": "meshwright.cluster-dry-run", "version": 1, "engine": engine.name, "starts": started, "commands": list(engine.said)}
            return Result(document, "\n".join(engine.said))
        ran = driver.run()
    found = audit(args.folder)
    return _told(args, queue, engine.name, ran, found)


def _policy(args: argparse.Namespace, servers: Servers, queue: Queue, order: Any, allocation: Any, resizes: bool) -> Policy:
    """Rounds, or what keeps jobs where they are. Raises: UsageError."""
    from ..drive.cluster import Rounds
    from ..drive.cluster_kept import Kept
    from ..errors import UsageError

    if not args.round:
        return Kept(servers=servers, queue=queue, order=order, allocation=allocation, seed=args.seed, most_passed=args.most_passed)
    round_s, move_s = seconds_given(args.round, "--round"), seconds_given(args.move, "--move")
    if round_s <= 0 or move_s < 0 or args.age < 0:
        raise UsageError(f"a round of {args.round}, age {args.age}", where="--round", hint="a time above 0; an age of at least 0")
    return Rounds(servers=servers, queue=queue, order=order, allocation=allocation, seed=args.seed, round_s=round_s, age_rounds=args.age,
                  move_s=move_s, resizes=resizes)  # fmt: skip


def _commanded(args: argparse.Namespace, queue: Queue) -> Queue:
    import shlex

    import msgspec

    from ..errors import UsageError

    if not args.speed_up > 0 or args.speed_up == float("inf"):
        raise UsageError(f"{args.speed_up}", where="--speed-up", hint="a number above 0")
    words = shlex.split(args.command)
    jobs = []
    for job in queue.jobs:
        arrival_s, duration_s = job.arrival_s / args.speed_up, job.duration_s / args.speed_up
        fill = {"{name}": job.name, "{gpus}": str(job.gpus), "{duration_s}": f"{duration_s:.3f}"}
        command = list(job.command) or list(words)
        for mark, value in fill.items():
            command = [w.replace(mark, value) for w in command]
        if not command:
            raise UsageError(f"job {job.name} has no command", where="--command", hint="--command 'python train.py', or `command` in the queue")
        jobs.append(msgspec.structs.replace(job, arrival_s=arrival_s, duration_s=duration_s, command=tuple(command)))
    return msgspec.structs.replace(queue, jobs=tuple(jobs))


def _servers(args: argparse.Namespace) -> Servers | None:
    from ..cluster import servers_of
    from ..drive.plans import read_fabric
    from ..errors import UsageError

    if not args.fabric:
        return None
    if args.cores < 1 or not args.memory:
        raise UsageError("a fabric does not say the cores and the memory of its servers", where="--fabric", hint="add --cores 24 --memory 500GB")
    return servers_of(read_fabric(args.fabric), cores=args.cores, memory_bytes=bytes_given(args.memory, "--memory"))


def _engine(args: argparse.Namespace, servers: Servers | None) -> Any:
    from ..errors import UsageError

    if args.dry_run and args.engine != "local" and servers is None:
        raise UsageError("a dry run asks no engine which servers there are", where="--dry-run", hint="add --fabric, --cores and --memory")
    if args.engine == "local":
        from ..run.engines.local import Local

        return Local(servers=servers, dry=args.dry_run)
    if args.engine == "ray":
        if args.dry_run:
            raise UsageError("there are no commands of Ray to print", where="--dry-run", hint="choose another engine, or run it")
        from ..run.engines.ray import Ray

        return Ray(address=_sandbox(args.sandbox, "ray").address if args.sandbox else args.address)
    if args.engine == "slurm":
        from ..run.engines.slurm import Slurm

        conf = _sandbox(args.sandbox, "slurm").conf if args.sandbox else args.conf
        return Slurm(conf=conf, dry=args.dry_run, partition=args.partition)
    from ..io.cluster.manifests import Pods
    from ..run.engines.kubernetes import Kubernetes

    if not args.image:
        raise UsageError("pods need an image", where="--image", hint="one with the jobs' program and Python 3.8 or later")
    pods = Pods(image=args.image, resource=args.resource, namespace=args.namespace, queue=args.local_queue,
                claim=args.state_claim)  # fmt: skip
    engine = Kubernetes(pods, kind=args.kind, servers=servers, dry=args.dry_run)
    if args.round and not args.state_claim:
        engine.notes.append("jobs that are moved begin anew: their pods keep nothing without a volume (--state-claim)")
    return engine


def _sandbox(name: str, kind: str) -> Any:
    from ..errors import UsageError
    from ..run.engines.sandbox import Sandbox

    found = Sandbox.open(name)
    if found.state.kind != kind:
        raise UsageError(f"sandbox {name} is one of {found.state.kind}", where="--sandbox", hint=f"--engine {found.state.kind}")
    return found


def _told(args: argparse.Namespace, queue: Queue, engine: str, ran: Any, found: Any) -> Result:
    import math
    import statistics

    from ..errors import CheckFailed

    def number(x: float) -> float | None:
        return round(x, 4) if math.isfinite(x) else None

    rows = [
        {"job": job.name, "arrival_s": number(r.arrival_s), "decided_s": number(r.decided_s), "started_s": number(r.started_s),
         "ended_s": number(r.ended_s), "code": r.code, "attempts": r.attempts, "moves": r.moves, "resizes": r.resizes}
        for job, r in zip(queue.jobs, ran, strict=True)
    ]  # fmt: skip
    facts = found.verdict.facts
    bad = {r["job"]: r["code"] for r in rows if r["code"]}
    moves, resizes = sum(r.moves for r in ran), sum(r.resizes for r in ran)
    lines = [
        f"{queue.name}: {len(rows) - len(bad)} of {len(rows)} jobs ended well on {engine}"
        + (f"; release to start {statistics.median(found.waits_s):.2f} s median" if found.waits_s else ""),
        f"audit: {facts['differences']} differences between what was decided and what was done, in {facts['attempts']} attempts",
        *([f"{moves} times a job was moved or preempted, {resizes} times resized in place"] if args.round else []),
        *(f"failed: {name}, exit code {code}" for name, code in bad.items()),
        *(f"note: {x}" for x in found.notes if x != "closed"),
    ]  # fmt: skip
    document = {
        "schema": "meshwright.cluster-carried", "version": 1, "queue": queue.name, "engine": engine, "folder": str(args.folder), "jobs": rows,
        "differences": facts["differences"], "failed": [*bad], "notes": [x for x in found.notes if x != "closed"],
    }  # fmt: skip
    if facts["differences"]:
        raise CheckFailed(lines[1], where=str(args.folder), hint=f"meshwright cluster audit {args.folder}", data=document)
    return Result(document, "\n".join(lines), exit_code=1 if bad else 0)
