"""Engines that carry decisions out: a sandbox of Slurm with 16 made-up GPUs on four nodes, this machine, manifests for Kubernetes, Ray.

    python benchmarks/engines.py [--parts ready,jobs,rounds,killed,gloo,manifests,ray] [--jobs 50]

ready: five sandboxes, seconds until all nodes take jobs. jobs: 50 jobs of 1 to 8 GPUs come in 40 s, and 50 others in 20 s (more than 16 GPUs can do);
differences between decisions and what Slurm did; from release to the first line of the job, beside plain `sbatch` of single jobs on the idle sandbox;
the simulator's starts, with overheads fitted on a first trace of other jobs. The saturated trace runs twice: what two runs of one trace differ by, no
simulator can know. FIFO, proportional shares, a job is passed over once at most. rounds: 16 jobs in rounds of two seconds, shortest rest first, each
counts its work and saves it when it must leave. killed:
the controller is killed 1 s after eight jobs were submitted. gloo: an all-reduce of four ranks on four nodes under
srun. manifests: kubernetes-validate --strict (KUBERNETES_VALIDATE names the program). ray: four nodes in one process. Parts whose engine is absent
say so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np

from meshwright.cluster import Queue, QueuedJob, Servers
from meshwright.cluster.generate import UNPROFILED
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import Rounds, given_of
from meshwright.drive.cluster_kept import Kept
from meshwright.run.engines import Driver, Session, Slurm
from meshwright.run.engines.audited import audit
from meshwright.run.engines.overheads import fit_overheads, predict
from meshwright.run.engines.sandbox import PROGRAMS, Sandbox

WORKS = """
import os, pathlib, signal, sys, time
path, asked = pathlib.Path(os.environ["MESHWRIGHT_STATE"]) / f"done-{os.environ['RANK']}", []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
done = int(path.read_text()) if path.exists() else 0
while done < int(sys.argv[1]) and not asked:
    time.sleep(0.1)
    done += 1
path.write_text(str(done))
"""
ASKED_READY_S, ASKED_START_S, ASKED_MEDIAN_S, ASKED_WORST_S = 10.0, 1.0, 0.5, 2.0
ALLREDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert (x == 10).all(), x
print("sum", x[0].item(), "of", dist.get_world_size(), "ranks, rank", dist.get_rank(), "on", os.environ["SLURMD_NODENAME"], flush=True)
dist.destroy_process_group()
"""


def trace(jobs: int, seed: int, span_s: float) -> Queue:
    rng = np.random.default_rng(seed)
    gpus = rng.choice([1, 2, 4, 8], jobs, p=[0.5, 0.25, 0.15, 0.1])
    arrival, duration = np.sort(rng.uniform(0, span_s, jobs)), rng.uniform(1, 6, jobs).round(3)
    return Queue(name=f"trace {seed}", profiles=(UNPROFILED,), jobs=tuple(
        QueuedJob(name=f"j{i}", gpus=int(g), profile="unprofiled", arrival_s=float(a), duration_s=float(d), command=("sleep", f"{d:.3f}"))
        for i, (g, a, d) in enumerate(zip(gpus, arrival, duration, strict=True))
    ))  # fmt: skip


def policy(servers: Servers, queue: Queue) -> Kept:
    return Kept(servers=servers, queue=queue, order=order("fifo")(), allocation=allocation("proportional")(), most_passed=1)


def carried(sandbox: Sandbox, queue: Queue, folder: Path, **options: Any) -> tuple[Servers, Driver]:
    with Session(Slurm(conf=sandbox.conf), folder) as session:
        servers = session.discover()
        driver = Driver(session=session, servers=servers, queue=queue, policy=policy(servers, queue), per="server", limit_s=240,
                        given=lambda n, parts: tuple(given_of(servers, queue, n, parts)), **options)  # fmt: skip
        driver.run()
    return servers, driver


def ready() -> list[dict[str, Any]]:
    took = []
    for _ in range(5):
        with Sandbox.up() as sandbox:
            took.append(sandbox.state.ready_s)
    return [{"what": "sandbox of four slurmd with 16 GPUs ready, median of 5", "value": statistics.median(took), "unit": "s", "limit": ASKED_READY_S,
             "all": took}]  # fmt: skip


def plain(sandbox: Sandbox, count: int, folder: Path) -> float:
    """Median seconds from `sbatch` to the job's first line, one at a time, on an idle sandbox."""
    waits = []
    for n in range(count):
        out = folder / f"plain-{n}"
        begun = time.time()
        subprocess.run(["sbatch", f"--output={out}", "--mem=1000M", "--gres=gpu:1", "--wrap", "date +%s.%N"], env=sandbox.environment(), check=True,
                       capture_output=True)  # fmt: skip
        while not out.exists() or not out.read_text().strip():
            time.sleep(0.01)
        waits.append(float(out.read_text()) - begun)
        time.sleep(0.3)
    return statistics.median(waits)


def jobs(count: int, folder: Path) -> list[dict[str, Any]]:
    """A trace to fit, one with some waiting, one that is saturated."""
    fit, normal, full = trace(count * 2 // 5, 1, 0.32 * count), trace(count, 2, 0.8 * count), trace(count, 3, 0.4 * count)
    with Sandbox.up() as sandbox:
        servers, fitted = carried(sandbox, fit, folder / "fit")
        peer = plain(sandbox, 10, folder)
        runs = (("normal", normal), ("full", full), ("full again", full))
        ran = {name: carried(sandbox, queue, folder / name)[1].ran for name, queue in runs}
    overheads, rows = fit_overheads(fit, fitted.ran), []
    for name, queue in (("normal", normal), ("full", full)):
        found = audit(folder / name)
        real = np.array([r.started_s for r in ran[name]])
        starts = predict(servers, queue, policy(servers, queue), overheads)[1]
        bare = predict(servers, queue, policy(servers, queue), type(overheads)())[1]
        error, without = np.abs(starts - real), np.abs(bare - real)
        waited = float(np.mean(real - queue.arrival_s))
        print(f"{name}: {overheads}; audit {found.verdict.facts}; "
              f"release to start {statistics.median(found.waits_s):.3f}, worst {max(found.waits_s):.3f}; "
              f"starts predicted within {np.median(error):.3f}, worst {error.max():.3f}, without overheads {np.median(without):.3f}, worst "
              f"{without.max():.3f}; mean wait {waited:.2f}", flush=True)
        assert all(r.code == 0 for r in ran[name])
        what = f"{count} jobs of 1 to 8 GPUs in {queue.arrival_s.max():.0f} s"
        if name == "full":
            again = np.abs(np.array([r.started_s for r in ran["full again"]]) - real)
            rows += [{"what": f"{what}: starts of two runs of this trace differ by, median", "value": float(np.median(again)), "unit": "s",
                      "worst": float(again.max())}]  # fmt: skip
            print(f"two runs: {np.median(again):.3f}, worst {again.max():.3f}", flush=True)
        rows += [
            {"what": f"{what}: differences between decisions and Slurm", "value": found.verdict.facts["differences"], "unit": "differences"},
            {"what": f"{what}: release to first line of the job, median", "value": statistics.median(found.waits_s), "unit": "s",
                "limit": ASKED_START_S,
             "worst": max(found.waits_s), "plain_sbatch_to_first_line_s": peer},
            {"what": f"{what}: simulated starts, overheads fitted on another trace: median error", "value": float(np.median(error)), "unit": "s",
             "limit": ASKED_MEDIAN_S, "without_overheads": float(np.median(without)), "mean_wait_s": waited},
            {"what": f"{what}: simulated starts, overheads fitted on another trace: worst error", "value": float(error.max()), "unit": "s",
             "limit": ASKED_WORST_S, "without_overheads": float(without.max()), "last_start_s": float(real.max())},
        ]  # fmt: skip
    return rows


def rounds(folder: Path) -> list[dict[str, Any]]:
    """Jobs of 2 to 9 s of work; the state that the last attempt finds is all the work of those before it."""
    rng = np.random.default_rng(5)
    script = folder / "works.py"
    script.write_text(WORKS)
    queue = Queue(profiles=(UNPROFILED,), jobs=tuple(
        QueuedJob(name=f"r{n}", gpus=int(rng.choice([1, 2, 4, 8])), profile="unprofiled", arrival_s=1.5 * n, duration_s=float(d),
                  command=(sys.executable, "-S", str(script), str(10 * d)))
        for n, d in enumerate(rng.integers(2, 10, 16).tolist())
    ))  # fmt: skip
    with Sandbox.up() as sandbox, Session(Slurm(conf=sandbox.conf), folder / "rounds") as session:
        servers = session.discover()
        moving = Rounds(servers=servers, queue=queue, order=order("srtf")(), allocation=allocation("proportional")(), round_s=2.0, move_s=1.0,
                        resizes=False)  # fmt: skip
        driver = Driver(session=session, servers=servers, queue=queue, policy=moving, per="server", limit_s=240,
                        given=lambda n, parts: tuple(given_of(servers, queue, n, parts)))  # fmt: skip
        ran = driver.run()
    found, asked, gone, left, began = audit(folder / "rounds"), {}, {}, [], []
    for r in session.records:
        if r.what == "preempt":
            asked[r.job, r.attempt] = r.time_s
        elif r.what == "preempted":
            left.append(r.time_s - asked[r.job, r.attempt])
            gone[r.job, r.attempt + 1] = r.time_s
        elif r.what == "running" and (r.job, r.attempt) in gone:
            began.append(r.at_s - gone[r.job, r.attempt])
    whole = sum((folder / "rounds" / "jobs" / f"{n:06d}" / "done-0").read_text() == str(round(10 * j.duration_s)) for n, j in enumerate(queue.jobs))
    print(f"rounds: moves {[r.moves for r in ran]}, codes {[r.code for r in ran]}, audit {found.verdict.facts}", flush=True)
    return [
        {"what": "16 jobs in rounds on Slurm: differences", "value": found.verdict.facts["differences"], "unit": "differences"},
        {"what": "jobs that ended well, once, with all their work", "value": min(whole, sum(r.code == 0 for r in ran)), "unit": "jobs", "limit": 16},
        {"what": "times a job was preempted or moved", "value": sum(r.moves for r in ran), "unit": "moves",
         "asked_to_gone_median_s": statistics.median(left) if left else None, "gone_to_begun_median_s": statistics.median(began) if began else None},
    ]  # fmt: skip


def killed(folder: Path) -> list[dict[str, Any]]:
    """Each job writes a line at its end. Those of 4 s are over when the nodes are back, those of 12 s are then ended by Slurm and run again."""
    lost = twice = 0
    rounds = 3
    for n in range(rounds):
        told = folder / f"told-{n}"
        queue = Queue(profiles=(UNPROFILED,), jobs=tuple(
            QueuedJob(name=f"k{i}", gpus=g, profile="unprofiled", arrival_s=0.0, duration_s=float(d),
                      command=("sh", "-c", f"sleep {d}; echo {i} >> {told}"))
            for i, (g, d) in enumerate(zip((1, 2, 4, 1, 4, 4, 2, 4), (4, 12, 4, 4, 12, 4, 4, 4), strict=True))
        ))  # fmt: skip
        with Sandbox.up() as sandbox:
            shot: list[float] = []

            def say(text: str, sandbox: Sandbox = sandbox, shot: list[float] = shot) -> None:
                if "released" in text and not shot:
                    shot.append(time.monotonic() + 1.0)
                    import threading

                    threading.Timer(1.0, lambda: [os.kill(p, signal.SIGKILL) for p in sandbox.pids("slurmctld")]).start()

            _, driver = carried(sandbox, queue, folder / f"killed-{n}", say=say)
        lines = told.read_text().split()
        servers_of = {i: len({g.server for g in driver.session.jobs[f"k{i}"].given}) for i in range(8)}
        lost += sum(lines.count(str(i)) < servers_of[i] for i in range(8))
        twice += sum(lines.count(str(i)) > servers_of[i] for i in range(8))
        print(f"killed {n}: attempts {[r.attempts for r in driver.ran]}, codes {[r.code for r in driver.ran]}, "
              f"audit {audit(folder / f'killed-{n}').verdict.facts}", flush=True)
    return [{"what": f"controller killed 1 s after a submission, {rounds} times 8 jobs: jobs lost", "value": lost, "unit": "jobs"},
            {"what": "jobs that ended twice", "value": twice, "unit": "jobs"}]  # fmt: skip


def gloo(folder: Path) -> list[dict[str, Any]]:
    script = folder / "allreduce.py"
    script.write_text(ALLREDUCE)
    with Sandbox.up() as sandbox, Session(Slurm(conf=sandbox.conf), folder / "gloo") as session:
        servers = session.discover()
        from meshwright.cluster import Given

        given = [Given(job="sum", server=s.name, gpus=s.gpus[:1], cores=2, memory_bytes=8 << 30) for s in reversed(servers.servers)]
        session.submit("sum", [sys.executable, str(script)], number=0)
        session.place("sum", given)
        begun = time.time()
        session.start(["sum"])
        over: list[Any] = []
        while not over:
            over = [e for e in session.watch() if e.what != "running"]
            time.sleep(0.1)
        took = time.time() - begun
    printed = [(folder / "gloo" / "jobs" / "000000" / f"out-1-{r}.txt").read_text().strip().splitlines()[-1] for r in range(4)]
    print("\n".join(printed), over, audit(folder / "gloo").verdict.facts, flush=True)
    assert over[0].code == 0 and [f"rank {r} on n{4 - r}" in line for r, line in enumerate(printed)] == [True] * 4
    return [{"what": "all-reduce of 4 ranks under srun, ranks in the decided order n4 to n1, with imports", "value": took, "unit": "s"}]


def manifests(folder: Path) -> list[dict[str, Any]]:
    from meshwright.cluster import Given, Server
    from meshwright.cluster.placed import placed
    from meshwright.io.cluster.manifests import Pods, manifest_text
    from meshwright.io.cluster.manifests import manifests as made

    servers = Servers(servers=tuple(Server(name=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(8)), cores=64, memory_bytes=10**12) for n in range(3)))
    given = [Given(job="t", server=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(g)), cores=8 * g, memory_bytes=10**11) for n, g in enumerate((8,
        4, 4))]
    job = placed(servers, "t", given, number=0)
    launcher = (Path(__file__).parents[1] / "src/meshwright/run/engines/node.py").read_text()
    good = total = 0
    for kind in ("job", "jobset", "leaderworkerset"):
        for queue in ("", "research"):
            pods = Pods(image="x:1", queue=queue, claim="" if queue else "state")
            documents = made(job, key="mw-1-0-1", run="mw-1", command=["python", "train.py"], launcher=launcher, pods=pods,
                             kind=kind)  # type: ignore[arg-type] # fmt: skip
            plain_objects = [d for d in documents if d["apiVersion"] in ("v1", "batch/v1")]
            for d in documents:  # what custom resources hold is plain
                if d["kind"] == "JobSet":
                    plain_objects += [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": r["name"]}, "spec": r["template"]["spec"]}
                                      for r in d["spec"]["replicatedJobs"]]  # fmt: skip
                if d["kind"] == "LeaderWorkerSet":
                    both = d["spec"]["leaderWorkerTemplate"]
                    plain_objects += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **both[t]["metadata"]}, "spec": both[t]["spec"]}
                                      for t in ("leaderTemplate", "workerTemplate")]  # fmt: skip
            path = folder / f"{kind}-{queue}.yaml"
            path.write_text(manifest_text(plain_objects))
            done = subprocess.run([os.environ.get("KUBERNETES_VALIDATE", "kubernetes-validate"), "--strict", str(path)], capture_output=True,
                text=True,
                                  check=False)  # fmt: skip
            total, good = total + 1, good + (done.returncode == 0)
            print(kind, queue or "no queue", len(plain_objects), "objects:", done.stdout.strip()[-300:], done.stderr.strip()[-300:], flush=True)
    return [{"what": "sets of manifests that kubernetes-validate --strict takes", "value": good, "unit": "sets", "limit": total}]


def ray_part(folder: Path) -> list[dict[str, Any]]:
    """Run with an interpreter that has Ray. Gangs on one to three of four nodes, made up until 20 bundles are placed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    from meshwright.cluster import Given
    from meshwright.errors import Infeasible
    from meshwright.run.engines.ray import NAME, Ray

    begun = time.time()
    claims: dict[str, Any] = {"num_cpus": 8, "num_gpus": 4, "memory": 64 << 30, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**claims, "labels": {NAME: "n1"}, "include_dashboard": False})
    for n in (2, 3, 4):
        cluster.add_node(**claims, labels={NAME: f"n{n}"})
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    up_s, rng, bundles, took = time.time() - begun, np.random.default_rng(1), 0, []
    with Session(Ray(), folder / "ray") as session:
        servers = session.discover()
        while bundles < 20:
            free, names = {s.name: list(s.gpus) for s in servers.servers}, []
            while sum(map(len, free.values())) >= 4 and bundles < 20:
                name, given = f"j{len(session.jobs)}", []
                for host in rng.permutation([h for h in free if free[h]])[: int(rng.integers(1, 4))].tolist()[: 20 - bundles]:
                    gpus = int(rng.integers(1, len(free[host]) + 1))
                    given.append(Given(job=name, server=host, gpus=tuple(free[host][:gpus]), cores=gpus, memory_bytes=gpus << 30))
                    del free[host][:gpus]
                bundles += len(given)
                session.submit(name, ["true"], number=len(session.jobs), per="server")
                begun = time.time()
                session.place(name, given)
                took.append(time.time() - begun)
                names.append(name)
            session.start(names)
            while any(session.jobs[x].now not in ("ended", "lost") for x in names):
                session.watch()
                time.sleep(0.05)
        begun, refused_s = time.time(), float("nan")
        session.submit("big", ["true"], number=len(session.jobs))
        try:
            session.place("big", [Given(job="big", server=servers.servers[0].name, gpus=servers.servers[0].gpus, cores=99, memory_bytes=1 << 30)])
        except Infeasible:
            refused_s = time.time() - begun
    found = audit(folder / "ray")
    good = bundles - sum(f.witness["what"] == "server" for f in found.verdict.findings)
    print("ray:", found.verdict.facts, "up", round(up_s, 1), "s", flush=True)
    ray.shutdown()
    cluster.shutdown()
    return [
        {"what": "Ray, four nodes: bundles on the decided node, of 20", "value": good, "unit": "bundles", "limit": 20,
         "differences": found.verdict.facts["differences"], "slowest_group_s": max(took), "nodes_up_s": up_s},
        {"what": "a group that no node can hold: refused after", "value": refused_s, "unit": "s", "limit": 2.0},
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="ready,jobs,rounds,killed,gloo,manifests")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--name", default="engines")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="engines-"))
    rows, absent = [], []
    slurm = all(shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin") for p in PROGRAMS)
    parts = {"ready": ready, "jobs": lambda: jobs(args.jobs, folder), "rounds": lambda: rounds(folder),
             "killed": lambda: killed(folder), "gloo": lambda: gloo(folder),
             "manifests": lambda: manifests(folder), "ray": lambda: ray_part(folder)}  # fmt: skip
    for name in args.parts.split(","):
        if name in ("ready", "jobs", "rounds", "killed", "gloo") and not slurm:
            absent.append(f"{name}: Slurm is not installed")
            continue
        rows += parts[name]()
    for row in rows:
        print(row, flush=True)
    machine.record(args.name, rows, command=f"python benchmarks/engines.py --parts {args.parts} --jobs {args.jobs}", absent=absent)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
