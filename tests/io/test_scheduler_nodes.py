"""Nodes of Kubernetes and Slurm as fabrics."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, MeshwrightError, UsageError
from meshwright.io.fabric.imported import Source, format_of, import_fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.io.fabric.nodes import Node, nodes_fabric, parse_kubernetes_nodes, parse_slurm_nodes
from meshwright.io.fabric.topo_matrix import Assumed


def kubernetes(*nodes):
    items = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels, "uid": "x", "creationTimestamp": "2025-11-07T00:00:00Z"},
         "spec": {"podCIDR": "10.0.0.0/24", **({"unschedulable": True} if cordoned else {})},
         "status": {"capacity": {"cpu": "192", "memory": "2113Gi", "pods": "250", **capacity},
                    "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}], "images": [{"names": ["a"]}]}}
        for name, labels, capacity, ready, cordoned in nodes
    ]  # fmt: skip
    return json.dumps({"apiVersion": "v1", "items": items, "kind": "List", "metadata": {"resourceVersion": ""}}).encode()


P5 = {"node.kubernetes.io/instance-type": "p5.48xlarge", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
GPUS = {"nvidia.com/gpu": "8"}
CLUSTER = kubernetes(
    ("ip-10-0-1-7.ec2.internal", P5, GPUS, "True", False), ("ip-10-0-1-9.ec2.internal", P5, GPUS, "True", False),
    ("ip-10-0-1-11.ec2.internal", P5, GPUS, "Unknown", False), ("ip-10-0-1-12.ec2.internal", P5, GPUS, "True", True),
    ("control", {"node.kubernetes.io/instance-type": "m7i.xlarge"}, {}, "True", False),
)  # fmt: skip
# The fields of `scontrol show node`, Slurm 23.11, those that matter among some that do not
SLURM = """NodeName=hpc-a[{0}] Arch=x86_64 CoresPerSocket=48
   CPUAlloc=0 CPUEfctv=192 CPUTot=192 CPULoad=0.10
   AvailableFeatures=cloud ActiveFeatures=cloud
   Gres=gpu:{1}:8(S:0-1)
   NodeAddr=hpc-a{0} NodeHostName=hpc-a{0} Version=23.11.4
   RealMemory=2000000 AllocMem=0 FreeMem=1990000 Sockets=2 Boards=1
   State={2} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   CfgTRES=cpu=192,mem=2000000M,billing=192,gres/gpu=8

"""


def slurm(*nodes):
    return "".join(SLURM.format(*node).replace(f"a[{node[0]}]", f"a{node[0]}") for node in nodes).encode()


def test_kubernetes_nodes_are_the_presets_of_their_instance_types():
    assert format_of(Source("n.json", CLUSTER)) == "kubernetes"
    fabric = import_fabric([Source("nodes.json", CLUSTER)])
    preset = load_fabric("p5:2")
    assert list(fabric.groups) == ["ip-10-0-1-7.ec2.internal", "ip-10-0-1-9.ec2.internal"] and len(fabric.devices) == 16
    assert [(x.kind, x.rate_Bps, x.latency_s) for x in sorted(fabric.links, key=lambda x: (x.kind, x.rate_Bps))] == [
        (x.kind, x.rate_Bps, x.latency_s) for x in sorted(preset.links, key=lambda x: (x.kind, x.rate_Bps))
    ]
    fabric.require_connected()
    notes = {n.what: n.source for n in fabric.provenance}
    assert notes["inside of 2 nodes"] == "as p5: the instance type is p5.48xlarge" and "machine" in notes
    assert notes["nodes"] == (
        "nodes.json: 2; left out: 2 not ready (ip-10-0-1-11.ec2.internal, ip-10-0-1-12.ec2.internal), 1 without accelerators (control)"
    )


def test_nodes_that_jobs_cannot_have_whole_are_left_out_and_named():
    nodes = json.loads(kubernetes(
        ("good", P5, GPUS, "True", False), ("sick", P5, GPUS, "True", False), ("v5e", {}, {"google.com/tpu": "4"}, "True", False),
        ("cut", P5, {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"}, "True", False),
    ))  # fmt: skip
    nodes["items"][0]["status"]["allocatable"] = {"nvidia.com/gpu": "8"}
    nodes["items"][1]["status"]["allocatable"] = {"nvidia.com/gpu": "7"}  # the device plugin takes a faulty GPU out
    fabric = import_fabric([Source("nodes.json", json.dumps(nodes).encode())])
    assert list(fabric.groups) == ["good"]
    assert {n.what: n.source for n in fabric.provenance}["nodes"] == (
        "nodes.json: 1; left out: 1 where jobs get 7 of 8 accelerators (sick), 1 with TPUs (a slice is a preset: `meshwright fabric list`) (v5e), "
        "1 with GPUs in MIG parts (cut)"
    )


def test_one_node_is_a_list_of_one():
    one = json.dumps(json.loads(CLUSTER)["items"][0]).encode()
    assert parse_kubernetes_nodes(one) == parse_kubernetes_nodes(CLUSTER)[:1]


def test_slurm_nodes_by_count_and_make():
    data = slurm((1, "h100", "IDLE"), (2, "h100", "MIXED+DRAIN"), (3, "nvidia_h100_80gb_hbm3", "ALLOCATED"), (4, "a100", "DOWN*"))
    assert format_of(Source("n.txt", data)) == "slurm"
    fabric = import_fabric([Source("nodes.txt", data)], form="slurm")
    assert list(fabric.groups) == ["hpc-a1", "hpc-a3"]
    assert {n.what: n.source for n in fabric.provenance}["inside of 2 nodes"] == "as dgx-h100, assumed: 8 x h100, no instance type that we know"
    as_json = json.dumps({"meta": {}, "nodes": [{"name": "a", "gres": "gpu:h100:8(S:0-1)", "state": ["IDLE"], "cpus": 3},
                                                {"name": "b", "gres": "gpu:8", "state": ["IDLE", "DRAIN"]}]}).encode()  # fmt: skip
    assert format_of(Source("n", as_json)) == "slurm"
    assert parse_slurm_nodes(as_json) == [Node("a", 8, "h100"), Node("b", 8, lacks="not ready")]


def test_unlike_nodes_hang_on_one_network():
    fabric = nodes_fabric([Node("a", 8, "h100"), Node("b", 8, machine="p4d.24xlarge"), Node("box0", 1, machine="x", product="gb10")], "mix", "n")
    fabric.require_connected()
    assert {d.name: d.memory_bytes for d in fabric.devices if d.name.endswith("gpu0")} == {
        "a/gpu0": 80 * 10**9, "b/gpu0": 40 * 10**9, "box0/gpu0": 128 * 10**9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "said", "hint"),
    [
        ([], "the list has no nodes", "fabric here"),
        ([Node("a", 8, lacks="not ready"), Node("b", 0)], "no node to plan for, of 2: 1 not ready (a), 1 without accelerators (b)", ""),
        ([Node("a", 8)], "node a: the list does not say which accelerators it has", "--gpu"),
        ([Node("a", 8, "teapot")], "node a: 'teapot' is not a device we know", "--gpu"),
        ([Node("a", 7, "h100")], "node a has 7 h100, and no preset is like it", "has 8"),
        ([Node("a", 1, "b200")] * 2, "nodes that are there twice: a", ""),
        ([Node(f"n{i}", 72, "gb200") for i in range(300)], "21600 devices", "at most"),
    ],
)
def test_nodes_that_cannot_be_built(nodes, said, hint):
    with pytest.raises((UsageError, FormatError)) as caught:
        nodes_fabric(nodes, "n", "nodes.json")
    assert said in str(caught.value) and hint in caught.value.hint
    if nodes == [Node("a", 8)]:
        assert len(nodes_fabric(nodes, "n", "w", gpu="h200").devices) == 8
        with pytest.raises(UsageError, match="no GPU make 'x'"):
            nodes_fabric(nodes, "n", "w", gpu="x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"items": [{"metadata": {"name": "a b"}}]}', "not a node's name"),
        (b'{"items": [{"metadata": {"name": "a"}, "status": {"capacity": {"nvidia.com/gpu": "-1"}}}]}', "not a number of devices"),
        (b'{"items": 3}', "Expected `array`"),
        (b"[" * 100_000, ""),
        (b"NodeName=\xff", "not UTF-8"),
        (b"NodeName=../../etc State=IDLE", "not a node's name"),
        (b"Nodename", "0 lines begin with NodeName="),
        (b'{"nodes": [{"name": 3}]}', "Expected `str`"),
    ],
)
def test_damaged_lists_are_refused(data, said):
    parse = parse_slurm_nodes if b"ode" in data[:12] and b"items" not in data else parse_kubernetes_nodes
    with pytest.raises(FormatError) as caught:
        parse(data)
    assert said in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([CLUSTER, slurm((1, "h100", "IDLE"), (2, "h100", "IDLE"))]), st.data())
def test_any_list_is_read_or_refused(data, draw):
    at = draw.draw(st.integers(0, len(data)))
    data = data[:at] + draw.draw(st.binary(max_size=8)) + data[at + draw.draw(st.integers(0, 60)) :]
    try:
        assert import_fabric([Source("x", data)], assumed=Assumed(gpu="h100")).devices
    except MeshwrightError as error:
        assert str(error)
