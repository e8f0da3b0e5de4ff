"""Texts of Slurm and Kubernetes, both ways: what their programs printed is read, what we write is read back, damage is refused with its place."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from effort import few
from meshwright.cluster import Given, Server, Servers
from meshwright.cluster.placed import placed
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.cluster.journal import SCHEMA, Record, read_journal, record_bytes
from meshwright.io.cluster.kubernetes import parse_asked, parse_nodes, parse_pods, quantity
from meshwright.io.cluster.kubernetes import parse_version as kubernetes_version
from meshwright.io.cluster.manifests import GATE, HOST, KEY, Pods, manifest_text, manifests
from meshwright.io.cluster.slurm import expanded, parse_jobs, parse_version
from meshwright.io.cluster.slurm import parse_nodes as parse_slurm_nodes
from meshwright.io.cluster.slurm_files import job_submit_lua, topology_conf
from meshwright.io.fabric.name import load_fabric

# Printed by Slurm 22.05.8 (words that are not read left out).
RUNS = (
    "JobId=1 JobName=wrap UserId=root(0) Priority=4294901759 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-2] CPUs/Task=1 "
    "ReqB:S:C:T=0:0:*:* TRES=cpu=2,mem=200M,node=2,billing=2 JOB_GRES=gpu:fake:4   Nodes=n[1-2] CPU_IDs=0 Mem=100 "
    "GRES=gpu:fake:2(IDX:0-1) MinCPUsNode=1 MinMemoryNode=100M Command=(null) Power= TresPerNode=gres:gpu:2 \n"
)
ENDED = (
    "JobId=7 JobName=b JobState=FAILED Reason=NonZeroExitCode ExitCode=0:9 JOB_GRES=gpu:fake:3   Nodes=n1 CPU_IDs=4-7 Mem=32768 "
    "GRES=gpu:fake:2(IDX:0,3)   "
    "Nodes=n4 CPU_IDs=1 Mem=100 GRES= MinCPUsNode=4 Power= \nJobId=8 JobName=c JobState=PENDING Reason=JobHeldUser ExitCode=3:0 NumNodes=1 \n"
)
NODES = (
    "NodeName=n1 Arch=x86_64 CPUAlloc=1 CPUTot=8 Gres=gpu:a100:4 NodeAddr=127.0.0.1 OS=Linux 6.18 #1 SMP @0  RealMemory=65536 State=MIXED Sockets=8\n"
    "NodeName=n2 CPUTot=8 Gres=(null) NodeAddr=n2 RealMemory=100 State=IDLE+DRAIN\n"
    "NodeName=n3 CPUTot=8 Gres=gpu:2 RealMemory=100 State=IDLE*+NOT_RESPONDING\n"
)


def test_jobs_and_nodes_as_slurm_prints_them():
    (job,) = parse_jobs(RUNS)
    assert (job.id, job.name, job.state, job.code) == ("1", "wrap", "RUNNING", 0)
    assert job.parts == (("n1", 1, 100 << 20, (0, 1)), ("n2", 1, 100 << 20, (0, 1)))
    killed, held = parse_jobs(ENDED)
    assert killed.code == 137 and killed.parts == (("n1", 4, 32768 << 20, (0, 3)), ("n4", 1, 100 << 20, ()))
    assert (held.reason, held.code, held.parts) == ("JobHeldUser", 3, ())
    nodes = parse_slurm_nodes(NODES)
    assert [(n.name, n.gpus, n.type, n.cores, n.up) for n in nodes] == [("n1", 4, "a100", 8, True), ("n2", 0, "", 8, False), ("n3", 2, "", 8, False)]
    assert nodes[0].memory_bytes == 65536 << 20 and nodes[0].address == "127.0.0.1" and nodes[2].address == "n3"
    assert parse_jobs("No jobs in the system\n") == [] and parse_version("slurm-wlm 22.05.8\n") == (22,
        5) and parse_version("slurm 25.11.1") == (25, 11)


@pytest.mark.parametrize("text", ["slurm_load_jobs error", "JobId= JobName=a", "JobId=1 ExitCode=x:y",
                                  "JobId=1 Nodes=n[1-9999999] CPU_IDs=0 Mem=1 GRES=",
                                  "JobId=1 Nodes=n1 CPU_IDs=0-99999 Mem=1 GRES=", "JobId=1 Nodes=n1 CPU_IDs=0 Mem=lots GRES="])  # fmt: skip
def test_jobs_of_another_kind_are_refused(text):
    with pytest.raises(FormatError):
        parse_jobs(text)
    with pytest.raises(FormatError):
        parse_slurm_nodes("NodeName=n1 CPUTot=-1")
    with pytest.raises(FormatError):
        parse_version("PBS 22.05")


@examples(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "a1b"]), st.integers(0, 120), st.integers(0, 5), st.integers(1, 4)), max_size=5))
def test_lists_of_hosts_are_written_out(pieces):
    """Slurm's own form made from names, `n[007-012]`, gives the names."""
    names = [f"{p}{n:0{w}d}" for p, first, more, w in pieces for n in range(first, first + more + 1)]
    text = ",".join(f"{p}[{first:0{w}d}-{first + more:0{w}d}]" if more else f"{p}{first:0{w}d}" for p, first, more, w in pieces)
    assert list(expanded(text)) == names


def test_a_name_may_have_several_lists_of_numbers():
    assert expanded("r[1-2]n[07,9]x,a") == ("r1n07x", "r1n9x", "r2n07x", "r2n9x", "a")


def test_a_job_list_made_to_exhaust_time_or_memory_is_refused(monkeypatch):
    with pytest.raises(FormatError, match="no list of hosts"):
        expanded("n" * 1_000_000 + "[")
    with pytest.raises(FormatError, match="more than 65536 hosts"):
        expanded("a[0-300]b[0-300]")
    monkeypatch.setattr("meshwright.io.cluster.slurm.MAX_PARTS", 7)
    part = "Nodes=n[1-4] CPU_IDs=0 Mem=1 GRES="
    assert len(parse_jobs(f"JobId=1 {part}")[0].parts) == 4
    with pytest.raises(FormatError, match="of all jobs"):
        parse_jobs(f"JobId=1 {part}\nJobId=2 {part}")


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n[3-1]", "n[1-9],m[0-99999]", "n]1", "n[1-2<a><a>", "n[]"])
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(FormatError):
        expanded(text)


def tree_of(text):
    """(children by switch, nodes by switch) read with split alone."""
    down, nodes = {}, {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        say = dict(word.split("=") for word in line.split())
        (down if "Switches" in say else nodes)[say["SwitchName"]] = say.get("Switches", say.get("Nodes")).split(",")
    return down, nodes


@pytest.mark.parametrize("name", ["dgx-a100:4", "dgx-h100:4?net=rails", "dgx1-v100:1", "dgx-a100:2?net=spine"])
def test_every_server_hangs_once_in_one_tree(name):
    fabric = load_fabric(name)
    down, nodes = tree_of(topology_conf(fabric))
    assert Counter(x for found in nodes.values() for x in found) == Counter(list(fabric.groups))
    below = [x for found in down.values() for x in found]
    assert len(set(below)) == len(below) and set(below) <= set(down) | set(nodes) and len(set(down) | set(nodes)) - len(below) == 1


def test_leaves_below_a_spine_and_servers_that_no_switch_joins():
    def two_ways(a, b):
        return [Link(src=a, dst=b, rate_Bps=1), Link(src=b, dst=a, rate_Bps=1)]

    devices = tuple(Device(name=f"g{n}", group=f"s{n}") for n in range(5))
    links = [x for n in range(4) for x in two_ways(f"g{n}", f"leaf{n // 2}")] + [x for n in range(2) for x in two_ways(f"leaf{n}", "spine")]
    fabric = Fabric(name="f", devices=devices, switches=tuple(Switch(name=x) for x in ("leaf0", "leaf1", "spine")), links=tuple(links))
    down, nodes = tree_of(topology_conf(fabric))
    assert nodes == {"leaf0": ["s0", "s1"], "leaf1": ["s2", "s3"], "fabric-nodes": ["s4"]}
    assert down == {"spine": ["leaf0", "leaf1"], "fabric": ["spine", "fabric-nodes"]}
    with pytest.raises(UsageError):
        topology_conf(Fabric(name="f", devices=(Device(name="a", group="has space"),), links=()))


def test_the_plug_in_is_lua_and_names_are_checked(tmp_path):
    text = job_submit_lua(partition="gpu", refuse=True, decided={"train": ["n1", "n2"]})
    assert '["train"] = "n1,n2"' in text and "slurm.ERROR" in text and "slurm.ERROR" not in job_submit_lua()
    for wrong in ({"decided": {'a"]]': ["n"]}}, {"decided": {"a": ['n"']}}, {"partition": 'p" or true --'}):
        with pytest.raises(UsageError):
            job_submit_lua(**wrong)
    if lua := shutil.which("luac") or shutil.which("luac5.3"):
        (tmp_path / "x.lua").write_text(text)
        assert subprocess.run([lua, "-p", str(tmp_path / "x.lua")], check=False).returncode == 0


# ---- Kubernetes --------------------------------------------------------------------------------------------------------
@examples(st.integers(0, 10**6), st.integers(0, 999),
          st.sampled_from(["", "n", "u", "m", "k", "M", "G", "E", "Ki", "Mi", "Ti", "Ei", "e3", "E+2", "e-3"]))
def test_quantities_are_exact(whole, part, unit):
    scale = {"": 1, "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "E": 10**18,
             "Ki": 2**10, "Mi": 2**20, "Ti": 2**40, "Ei": 2**60, "e3": 1000, "E+2": 100, "e-3": Fraction(1, 1000)}[unit]  # fmt: skip
    assert quantity(f"{whole}.{part:03d}{unit}") == (whole + Fraction(part, 1000)) * scale // 1


@pytest.mark.parametrize("text", ["", "1e", "1e999", "\u0663", "1Mu", "-1", "4gb", "1" * 30])
def test_what_is_no_quantity(text):
    with pytest.raises(FormatError):
        quantity(text)


def test_versions_of_kubernetes():
    assert kubernetes_version(b'{"clientVersion": {}, "serverVersion": {"major": "", "gitVersion": "v1.27.3-gke.100"}}') == (1, 27)
    for wrong in (b'{"serverVersion": {"gitVersion": "1.27"}}', b'{"clientVersion": {}}', b"{"):
        with pytest.raises(FormatError):
            kubernetes_version(wrong)


SERVERS = Servers(servers=tuple(Server(name=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(8)), cores=64, memory_bytes=1 << 40) for n in range(3)))
NODE = "launcher text"


def decided(seed, equal=False):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    sizes = [4] * count if equal else rng.integers(1, 9, count).tolist()
    parts = [Given(job="t", server=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(g)), cores=2 * g, memory_bytes=g << 30) for n,
        g in enumerate(sizes)]
    order = [g for p in parts for g in p.gpus]
    rng.shuffle(order)
    return placed(SERVERS, "t", parts, number=0, order=order)


def pod_specs(documents):
    for d in documents:
        if d["kind"] == "Job":
            yield d["spec"]["template"]["spec"]
        elif d["kind"] == "JobSet":
            yield from (r["template"]["spec"]["template"]["spec"] for r in d["spec"]["replicatedJobs"])


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("seed", range(few(5)))
def test_every_server_has_a_pod_with_what_it_was_given(seed, kind):
    job = decided(seed)
    documents = manifests(job, key="mw-1-0-1", run="mw-1", command=["x"], launcher=NODE, pods=Pods(image="i", queue="q"), kind=kind)
    found = {}
    for spec in pod_specs(documents):
        (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        (rule,) = term["matchExpressions"]
        assert rule["key"] == HOST and spec["schedulingGates"] == [{"name": GATE}]
        found[tuple(rule["values"])] = spec["containers"][0]["resources"]["limits"]
    assert found == {(g.server,): {"cpu": str(g.cores), "memory": str(g.memory_bytes), "nvidia.com/gpu": str(len(g.gpus))} for g in job.given}
    config = next(d for d in documents if d["kind"] == "ConfigMap")["data"]
    ranks = json.loads(config["ranks-1.json"])
    assert [(r["server"], tuple(r["gpus"])) for r in ranks["ranks"]] == list(job.ranks) and config["node.py"] == NODE
    held = [d for d in documents if d["kind"] in ("Job", "JobSet")]
    assert all(d["spec"]["suspend"] and d["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q" for d in held)
    assert [json.loads(x) for x in manifest_text(documents).split("---\n")[1:]] == documents


def test_attempts_of_a_job_share_a_folder_of_the_claim_and_have_their_grace():
    folders = set()
    for attempt in (1, 12):
        made = manifests(decided(1), key=f"mw-1-7-{attempt}", run="mw-1", command=["x"], launcher=NODE, pods=Pods(image="i", claim="c"), grace_s=2.5)
        for spec in pod_specs(made):
            assert spec["terminationGracePeriodSeconds"] == 8 and spec["volumes"][1]["persistentVolumeClaim"] == {"claimName": "c"}
            folders.add(spec["containers"][0]["volumeMounts"][1]["subPath"])
        assert json.loads(made[0]["data"]["ranks-1.json"])["grace_s"] == 2.5
    assert folders == {"mw-1-7"}


def test_leaders_workers_plans_and_refusals():
    job = decided(3, equal=True)
    made = manifests(job, key="k", run="r", command=["x"], launcher=NODE, pods=Pods(image="i"), kind="leaderworkerset", plan=("p.json", "{}"))
    spec = made[1]["spec"]["leaderWorkerTemplate"]
    assert spec["size"] == len(job.given) and made[0]["data"]["p.json"] == "{}"
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    values = [spec[t]["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"]
              for t in ("leaderTemplate", "workerTemplate")]  # fmt: skip
    assert values[0] == [job.ranks[0].server] and sorted({*values[0], *values[1]}) == sorted({g.server for g in job.given})
    uneven = placed(SERVERS, "t", [Given(job="t", server=f"n{n}", gpus=tuple(f"n{n}g{k}" for k in range(n + 1)), cores=1,
        memory_bytes=1) for n in range(3)],
                    number=0)  # fmt: skip
    for wrong, facts in ((Unsupported, {"kind": "leaderworkerset"}), (UsageError, {"key": "Not_DNS"}), (UsageError, {"plan": ("p",
        "x" * (1 << 20))})):
        with pytest.raises(wrong):
            manifests(uneven, **{"key": "k", "run": "r", "command": ["x"], "launcher": NODE, "pods": Pods(image="i"), "kind": "job"} | facts)


@pytest.mark.skipif(not shutil.which("kubernetes-validate"), reason="kubernetes-validate is not installed (pip install kubernetes-validate)")
def test_plain_objects_pass_strict_validation(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(manifest_text(manifests(decided(1), key="k", run="r", command=["x"], launcher=NODE, pods=Pods(image="i", claim="state"))))
    done = subprocess.run(["kubernetes-validate", "--strict", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nodes_pods_and_questions_of_kubernetes():
    node = {"metadata": {"name": "a"}, "status": {"allocatable": {"cpu": "95500m", "memory": "4Ki", "nvidia.com/gpu": "8"},
                                                  "conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip
    away = {"metadata": {"name": "b"}, "spec": {"unschedulable": True}, "status": node["status"]}
    assert parse_nodes(json.dumps({"items": [node, away]}).encode()) == [("a", 8, 95, 4096, True), ("b", 8, 95, 4096, False)]
    pod = {
        "metadata": {"name": "p", "labels": {KEY: "k"}},
        "spec": {"nodeName": "a", "schedulingGates": [{"name": "g"}], "containers": [{"resources": {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}}}]},
        "status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {
            "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:05Z", "exitCode": 3, "reason": "Error"}}}]},
    }  # fmt: skip
    (found,) = parse_pods(json.dumps({"items": [pod]}).encode())
    assert (found.key, found.node, found.gates, found.gpus, found.code, found.ended_s - found.started_s) == ("k", "a", ("g",), 1, 3, 5.0)
    assert parse_asked(json.dumps({"Pod": pod, "NodeNames": ["a", "b"]}).encode()) == ("k", ("a", "b"), True)
    assert parse_asked(json.dumps({"Pod": {}, "Nodes": {"items": [node]}}).encode()) == ("", ("a",), False)
    for data in (b"[]", b'{"Pod": 1}', b"{"):
        with pytest.raises(FormatError):
            parse_asked(data)
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["startedAt"] = "yesterday"
    with pytest.raises(FormatError):
        parse_pods(json.dumps({"items": [pod]}).encode())


# ---- our own -----------------------------------------------------------------------------------------------------------
def test_journals_are_read_back_and_cut_lines_left_out(tmp_path):
    path = tmp_path / "journal.jsonl"
    records = [Record(what="run", time_s=1.0, text="local 12", schema=SCHEMA, version=1), Record(what="place", time_s=2.0, job="t",
        placed=decided(1)),
               Record(what="ended", time_s=3.0, job="t", given=decided(2).given, code=3)]  # fmt: skip
    path.write_bytes(b"".join(map(record_bytes, records)) + b'{"what": "run", "ti')
    assert read_journal(path) == records
    for data in (b"", b"{}\n", record_bytes(records[1]), record_bytes(records[0]) + b"{]\n", record_bytes(msgspec.structs.replace(records[0],
        version=9))):
        path.write_bytes(data)
        with pytest.raises(FormatError):
            read_journal(path)
