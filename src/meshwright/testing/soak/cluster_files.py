"""Seeds of the readers of clusters: queues, allocations, logs, traces of jobs and of machines, what engines say."""

from __future__ import annotations

import json
from pathlib import Path

from .written import written

__all__ = ["azure_base", "machines", "queues"]


def queues() -> list[tuple[str, str, bytes]]:
    from ...cluster.demand import synthetic_demand
    from ...cluster.generate import synthetic
    from ...cluster.servers import Server, Servers
    from ...decide.cluster import allocation, order
    from ...decide.cluster.resize import strategy
    from ...drive.cluster import plan_allocation
    from ...drive.resize import resize_simulated
    from ...io.cluster.allocation import write_allocation
    from ...io.cluster.queue import queue_bytes
    from ...io.cluster.resize import PriorFile, write_prior, write_resize_log

    log = resize_simulated(*synthetic_demand(2, 4, seed=1), strategy("squarecb")(), record=True).log
    assert log is not None
    prior = PriorFile(resource="cpu", knots=(1.0, 2.0), squares=((1.0, 0.0), (0.0, 2.0)), products=(0.5, 0.25), rows=2.0)
    queue = synthetic(3, per_hour=20, seed=1, most_gpus=2)
    servers = Servers(servers=(Server(name="s", gpus=("a", "b"), cores=6, memory_bytes=125 * 10**9),))
    found = plan_allocation(servers, queue, order("fifo")(), allocation("priced")())[0]
    philly = [{"status": "Pass", "vc": "v", "jobid": "a1", "submitted_time": "2017-10-07 01:11:39", "user": "u", "attempts": [
        {"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:23", "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]},
    ]}]  # fmt: skip
    gavel = "ResNet-18 (batch size 16)\tpython3 main.py\tdata\t--steps\t1\t9000\t1\t1\t-1.0\t12.5\n" \
            "LM (batch size 5)\tpython3 main.py\t--steps\t1\t400\t2\t1.0\t-1\t20\n"  # fmt: skip
    alibaba = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n" \
              "p0,12000,16384,1,1000,,LS,Running,0,12537496,0\np1,6000,12288,2,460,V100M16|V100M32,BE,Failed,427061,12902960,427070\n"  # fmt: skip
    rates = {"v100": {"('ResNet-18 (batch size 16)', 1)": {"null": 20.5}, "('LM (batch size 5)', 2)": {"null": 8.0}}}
    return [
        ("queue", "queue.json", queue_bytes(queue)), ("allocation", "allocation.json", written(lambda p: write_allocation(p, found), "a.json")),
        ("Philly", "philly.json", json.dumps(philly).encode()), ("Gavel", "gavel.tsv", gavel.encode()), ("Alibaba", "pods.csv", alibaba.encode()),
        ("Gavel rates", "rates.json", json.dumps(rates).encode()),
        ("resize log", "log.jsonl", written(lambda p: write_resize_log(p, log), "log.jsonl")),
        ("resize prior", "prior.json", written(lambda p: write_prior(p, prior), "prior.json")), *_engines(),
    ]  # fmt: skip


def _engines() -> list[tuple[str, str, bytes]]:
    from ...cluster.allocation import Given
    from ...cluster.placed import placed
    from ...cluster.servers import Server, Servers
    from ...io.cluster.journal import SCHEMA, VERSION, Record, record_bytes

    servers = Servers(servers=(Server(name="n1", gpus=("n1g0", "n1g1"), cores=8, memory_bytes=1 << 36),))
    given = (Given(job="j", server="n1", gpus=("n1g1",), cores=2, memory_bytes=1 << 30),)
    journal = [
        Record(what="run", time_s=1.0, text="slurm 1a2b", schema=SCHEMA, version=VERSION),
        Record(what="place", time_s=2.0, job="j", attempt=1, placed=placed(servers, "j", given, number=0)),
        Record(what="ended", time_s=3.0, job="j", attempt=1, given=given, at_s=2.5, code=1),
    ]  # fmt: skip
    jobs = "JobId=1 JobName=mw-1 JobState=RUNNING Reason=None ExitCode=0:9 Nodes=n[1-2] CPU_IDs=0-3 Mem=100 GRES=gpu:a100:2(IDX:0-1) Power= \n"
    nodes = "NodeName=n1 CPUTot=8 Gres=gpu:a100:4 NodeAddr=127.0.0.1 RealMemory=65536 State=IDLE\n"
    pod = {"metadata": {"name": "p", "labels": {"meshwright.dev/key": "k"}},
           "spec": {"nodeName": "a", "containers": [{"resources": {"limits": {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1"}}}]},
           "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]}}  # fmt: skip
    status = {"allocatable": {"cpu": "95500m", "memory": "4Ki"}, "conditions": [{"type": "Ready", "status": "True"}]}
    node = {"metadata": {"name": "a"}, "status": status}
    return [
        ("journal", "journal.jsonl", b"".join(map(record_bytes, journal))), ("Slurm jobs", "jobs.txt", jobs.encode()),
        ("Slurm version", "version.txt", b"slurm-wlm 22.05.8\n"),
        ("Slurm nodes", "engine-nodes.txt", nodes.encode()), ("Kubernetes pods", "pods.json", json.dumps({"items": [pod]}).encode()),
        ("Kubernetes version", "kubernetes-version.json", b'{"clientVersion": {}, "serverVersion": {"major": "", "gitVersion": "v1.27.3"}}'),
        ("Kubernetes nodes", "engine-nodes.json", json.dumps({"items": [node]}).encode()),
        ("extender", "asked.json", json.dumps({"Pod": pod, "NodeNames": ["a", "b"]}).encode()),
    ]  # fmt: skip


def azure_base(path: Path, *more: str) -> None:
    """A small database of the form of Azure Packing 2020; `more`: statements that follow."""
    import sqlite3

    base = sqlite3.connect(path)
    base.executescript(
        "CREATE TABLE vmType (id INTEGER, vmTypeId INTEGER, machineId INTEGER, core REAL, memory REAL, hdd REAL, ssd REAL, nic REAL);"
        "CREATE TABLE vm (vmId INTEGER, tenantId INTEGER, vmTypeId INTEGER, priority INTEGER, starttime REAL, endtime REAL);"
        "INSERT INTO vmType VALUES (1, 7, 0, 0.25, 0.125, 0, 0.1, NULL), (2, 7, 1, 0.5, 0.25, 0, 0.1, 0.2), (3, 8, 1, 0.125, 0.125, 0, 0, 0);"
        "INSERT INTO vm VALUES (1, 5, 7, 0, -3.5, 1.25), (2, 5, 8, 1, 0.5, NULL), (3, 6, 8, 0, 1.0, 2.0), (4, 6, 8, 0, -2.0, -1.0);" + ";".join(more)
    )
    base.commit()
    base.close()


def machines() -> list[tuple[str, str, bytes]]:
    from ...cluster.generate_vms import synthetic_vms
    from ...cluster.vms import VmHosts
    from ...decide.cluster.vms import forecast, strategy
    from ...drive.vms import place_vms
    from ...io.cluster.vms import write_vm_placement, write_vms

    trace = synthetic_vms(2, days=0.2, before_days=0.1, load=0.3, owners=5, warm_days=0.05, seed=1)
    made, _ = place_vms(trace, VmHosts.of([2]), strategy("best-fit")(), forecast("perfect", trace), from_s=0.0)
    huawei = b"vmid,cpu,memory,time,type\n0,1,2,10,0\n1,4,8,15,0\n0,1,2,40,1\n2,1,2,55.5,0\n"
    return [
        ("machines", "vms.json", written(lambda p: write_vms(p, trace), "vms.json")),
        ("machines on hosts", "placed.json", written(lambda p: write_vm_placement(p, made), "placed.json")),
        ("Azure Packing", "packing.sqlite", written(azure_base, "packing.sqlite")), ("Huawei-East-1", "huawei.csv", huawei),
    ]
