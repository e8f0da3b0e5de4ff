"""Every reader of `io`, and files that each of them reads: written by the package's own writers, and short ones as other tools write them."""

from __future__ import annotations

import io
import json
import random
import struct
import tarfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from .cluster_files import machines, queues
from .written import written

__all__ = ["READERS", "read_with", "seeds"]

KFAC_TABLE = b"""bs,time_f,time_b,time_kron,time_inv,time_prec,mem_param,mem_act,mem_peak_err,mem_save_err,mem_kron
1,4.5,9.25,3,12,2,85,40,12,6,30
8,21.75,44,9,12,2,85,310,96,48,30
"""

# name -> (module, function, what it takes). "path": a file; "bytes", "text": what it holds. Options that a reader needs stand behind.
READERS: Mapping[str, tuple[str, str, str, dict[str, Any]]] = {
    "plan or program": ("plan.plan", "read_plan_or_program", "path", {}), "fill work": ("plan.fill", "read_fill_work", "path", {}),
    "traffic plan": ("plan.traffic", "read_traffic_plan", "path", {}), "traffic profile": ("plan.traffic", "read_traffic_profile", "path", {}),
    "tensors": ("plan.traffic", "read_tensors", "path", {}), "buffers": ("plan.minimalloc_csv", "read_buffers_csv", "path", {}),
    "kfac table": ("plan.kfac_csv", "read_kfac_csv", "path", {}),
    "pipeline table": ("plan.pipeline_csv", "read_pipeline_csv", "text", {}), "graph": ("model.graph", "read_graph", "path", {}),
    "tasks": ("model.tasks", "read_tasks", "path", {}), "tar index": ("data.tar", "read_tar_index", "path", {}),
    "MDS index": ("data.mds", "read_mds_index", "path", {}), "MDS shard": ("data.mds", "read_mds_offsets", "path", {"samples": 2}),
    "input plan": ("data.input_plan", "read_input_plan", "path", {}), "input rates": ("data.input_plan", "read_input_rates", "path", {}),
    "expert loads": ("costs.expert_loads", "read_expert_loads", "path", {}),
    "tables": ("model.tables", "read_tables", "path", {}),
    "move net": ("costs.moves", "read_move_net", "path", {}),
    "lookup costs": ("costs.lookups", "read_lookup_costs", "path", {}),
    "points": ("model.node_graphs", "read_points", "path", {}), "node graph": ("model.node_graphs", "read_node_graph", "path", {}),
    "queue": ("cluster.queue", "read_queue", "path", {}), "allocation": ("cluster.allocation", "read_allocation", "path", {}),
    "resize log": ("cluster.resize", "read_resize_log", "path", {}), "resize prior": ("cluster.resize", "read_prior", "path", {}),
    "journal": ("cluster.journal", "read_journal", "path", {}), "Slurm jobs": ("cluster.slurm", "parse_jobs", "text", {}),
    "Slurm nodes": ("cluster.slurm", "parse_nodes", "text", {}), "Slurm version": ("cluster.slurm", "parse_version", "text", {}),
    "Kubernetes pods": ("cluster.kubernetes", "parse_pods", "bytes", {}),
    "Kubernetes version": ("cluster.kubernetes", "parse_version", "bytes", {}),
    "Kubernetes nodes": ("cluster.kubernetes", "parse_nodes", "bytes", {}), "extender": ("cluster.kubernetes", "parse_asked", "bytes", {}),
    "Philly": ("cluster.traces", "read_philly", "path", {}), "Alibaba": ("cluster.traces", "read_job_table", "path", {}),
    "Gavel": ("cluster.traces", "read_gavel", "path", {"rates": {("ResNet-18 (batch size 16)", 1): 20.0, ("LM (batch size 5)", 2): 8.0}}),
    "Gavel rates": ("cluster.traces", "read_gavel_rates", "path", {}),
    "machines": ("cluster.vms", "read_vms", "path", {}), "machines on hosts": ("cluster.vms", "read_vm_placement", "path", {}),
    "Azure Packing": ("cluster.vm_traces", "read_azure_packing", "path", {}), "Huawei-East-1": ("cluster.vm_traces", "read_huawei", "path", {}),
    "transformer": ("model.transformer_toml", "read_transformer_toml", "path", {}), "cost": ("costs.table", "read_cost", "path", {}),
    "runtime": ("costs.profile_documents", "read_runtime", "path", {}), "profiled layout": ("costs.profile_documents", "read_layout", "path", {}),
    "measured runs": ("costs.profile_documents", "read_measured_runs", "path", {}),
    "layer profile": ("costs.profile_layers", "read_profile_files", "paths", {"model": "m", "device": "d"}),
    "system": ("costs.perf_tables", "parse_system", "text", {"name": "x"}),
    "fabric TOML": ("fabric.toml", "read_fabric_toml", "path", {}), "fabric JSON": ("fabric.toml", "read_fabric_json", "path", {}),
    "prices": ("fabric.prices", "read_prices", "path", {}), "network job": ("fabric.network_jobs", "read_network_job", "path", {}),
    "board jobs": ("fabric.network_jobs", "read_board_jobs", "path", {}),
    "cluster": ("fabric.imported", "import_fabric", "source", {}), "matrix": ("fabric.adjacency", "parse_matrix", "text", {}),
    "edges": ("fabric.adjacency", "parse_edges", "text", {}), "nvidia-smi": ("fabric.nvidia_topo", "parse_nvidia_topo", "text", {}),
    "rocm-smi": ("fabric.rocm_topo", "parse_rocm_topo", "text", {}),
    "nvidia-smi -q": ("fabric.machine_outputs", "parse_nvidia_q", "text", {}), "ibstat": ("fabric.machine_outputs", "parse_ibstat", "text", {}),
    "ibv_devinfo": ("fabric.machine_outputs", "parse_ibv_devinfo", "text", {}), "lscpu": ("fabric.machine_outputs", "parse_lscpu", "text", {}),
    "dcgm": ("fabric.dcgm_topo", "parse_dcgm_topo", "text", {}), "kubernetes": ("fabric.nodes", "parse_kubernetes_nodes", "bytes", {}),
    "slurm": ("fabric.nodes", "parse_slurm_nodes", "bytes", {}), "NCCL topology": ("nccl.topology", "read_nccl_topology", "path", {}),
    "NCCL graph": ("nccl.graph", "read_nccl_graph", "path", {}), "NCCL tuner": ("nccl.tuner", "read_tuner", "path", {}),
    "MSCCL": ("msccl.xml", "read_msccl", "path", {}), "MSCCL++": ("msccl.mscclpp_json", "read_mscclpp", "path", {}),
    "sketch": ("msccl.taccl_sketch", "read_sketch", "path", {}),
    "box profile": ("msccl.taccl_sketch", "read_profile", "path", {"boxes": 2, "kind": "ndv2"}),
    "Chakra": ("chakra.et", "parse_chakra", "bytes", {}), "execution trace": ("chakra.execution_trace", "read_execution_trace", "path", {}),
    "trace": ("trace.read", "read_trace", "path", {}), "module tree": ("trace.module_tree", "read_module_tree", "path", {}),
}  # fmt: skip


def read_with(reader: str, path: Path) -> Any:
    """Raises: what the reader raises."""
    from importlib import import_module

    module, function, takes, options = READERS[reader]
    read = getattr(import_module(f"meshwright.io.{module}"), function)
    if takes == "path":
        return read(path, **options)
    if takes == "paths":
        return read([path], **options)
    data = path.read_bytes()
    if takes == "source":
        from ...io.fabric.imported import Source

        return read([Source(path.name, data)])
    given = data if takes == "bytes" else data.decode("utf-8", "replace")
    return read(options["name"], given, where=path.name) if "name" in options else read(given, where=path.name)


def seeds() -> list[tuple[str, str, bytes]]:
    """(reader, file name, what it holds). Made once; equal in every process."""
    found: list[tuple[str, str, bytes]] = []
    for make in (_plans, _fabrics, _schedules, _costs, _graphs, queues, machines, _traces, _shards, _foreign):
        found += make()
    return found


def _plans() -> list[tuple[str, str, bytes]]:
    from ...decide.collective import CollectiveProblem, Ring
    from ...decide.pipeline import PipelineProblem
    from ...decide.pipeline.fill_work import checkpoint_work
    from ...drive.collective.job import plan_collective
    from ...drive.pipeline.fill import fill_plan
    from ...drive.pipeline.pipelines import plan_pipeline
    from ...drive.traffic import plan_traffic
    from ...io.fabric.name import load_fabric
    from ...io.plan.plan import plan_bytes
    from ...io.plan.program import program_bytes
    from ...io.plan.traffic import write_traffic_plan, write_traffic_profile
    from ..traffic import traffic_profile

    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-reduce", 1 << 12)
    ring = plan_collective(problem, candidates=[Ring()])[0]
    pipeline = plan_pipeline(PipelineProblem.of(2, 3, activation_bytes=12, message_bytes=4, weight_bytes=64), "1f1b")
    filled = fill_plan(pipeline, lambda p, s: checkpoint_work(p, s, write_s=0.5, snapshot_s=0.2, piece_s=0.2), most_steps=4).plan
    profile = traffic_profile(random.Random(3), 6, 2)
    fill = {"schema": "meshwright.fill-work", "version": 1, "items": [
        {"name": "a", "kind": "checkpoint", "ranks": [0], "duration_s": 0.5, "piece_s": 0.1},
        {"name": "b", "kind": "k", "ranks": [1], "after": ["a"], "duration_s": 1.0},
    ]}  # fmt: skip
    return [
        ("plan or program", "ring.json", plan_bytes(ring)), ("plan or program", "pipeline.json", plan_bytes(pipeline)),
        ("plan or program", "filled.json", plan_bytes(filled)), ("plan or program", "program.json", program_bytes(ring.main)),
        ("fill work", "fill.json", json.dumps(fill).encode()),
        ("traffic plan", "traffic.json", written(lambda p: write_traffic_plan(p, plan_traffic(profile)), "traffic.json")),
        ("traffic profile", "profile.json", written(lambda p: write_traffic_profile(p, profile), "profile.json")),
        ("tensors", "tensors.csv", b"ready_s,name,shape\n0.5,late,3x4\n0.25,early,7\n0.75,last,1x2x3\n"),
        ("buffers", "buffers.csv", b"id,lower,upper,size\na,0,3,8\nb,1,4,16\nc,3,9,4\n"),
        ("kfac table", "kfac.csv", KFAC_TABLE), ("pipeline table", "pipeline.csv", b"0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"),
    ]


def _fabrics() -> list[tuple[str, str, bytes]]:
    from ...io.fabric.adjacency import edges_text, matrix_text_of
    from ...io.fabric.document import fabric_document
    from ...io.fabric.name import load_fabric
    from ...io.fabric.toml import fabric_toml
    from ...io.nccl.write import nccl_topology_text

    islands, box = load_fabric("two-islands"), load_fabric("dgx-a100:1")
    matrix, edges, topology = matrix_text_of(load_fabric("laptop:4")), edges_text(islands), nccl_topology_text(box).encode()
    return [
        ("fabric TOML", "islands.toml", fabric_toml(islands).encode()),
        ("fabric JSON", "islands.json", json.dumps(fabric_document(islands)).encode()),
        ("edges", "islands.edges", edges.encode()), ("matrix", "four.txt", matrix.encode()), ("cluster", "islands.edges", edges.encode()),
        ("NCCL topology", "box.xml", topology), ("cluster", "box.xml", topology),
        ("prices", "prices.toml", resources.files("meshwright.fabric").joinpath("prices.toml").read_bytes()),
        ("network job", "job.toml", b'schema = "meshwright.network-job"\nversion = 1\ncompute_s = 0.5\nall_reduce_bytes = 1000000\n'),
        ("board jobs", "jobs.toml", b'schema = "meshwright.board-jobs"\nversion = 1\n[[jobs]]\nname = "a"\nrows = 1\ncolumns = 2\nduration_s = 3'),
    ]  # fmt: skip


def _schedules() -> list[tuple[str, str, bytes]]:
    from ...decide.collective import CollectiveProblem, Ring
    from ...drive.collective.job import plan_collective
    from ...drive.handover.msccl import export_msccl, export_mscclpp
    from ...io.fabric.name import load_fabric
    from ...io.msccl.mscclpp_json import mscclpp_bytes
    from ...io.msccl.xml import msccl_text
    from ...io.nccl.tuner import TunerRow, tuner_text

    plan = plan_collective(CollectiveProblem.on(load_fabric("two-islands"), "all-gather", 1 << 12), candidates=[Ring()])[0]
    text = msccl_text(export_msccl(plan.main).algo)
    one_sided = mscclpp_bytes(export_mscclpp(plan.main))
    rows = [TunerRow(op="all-reduce", min_bytes=0, max_bytes=1 << 20, algorithm="tree", protocol="ll")]
    return [
        ("MSCCL", "ring.xml", text.encode()), ("MSCCL++", "ring.json", one_sided),
        ("NCCL tuner", "tuner.conf", tuner_text(rows).encode()),
    ]


def _costs() -> list[tuple[str, str, bytes]]:
    from ...cost import assumed_cost
    from ...io.costs.table import write_cost
    from ...io.fabric.name import load_fabric

    cost = written(lambda p: write_cost(assumed_cost(load_fabric("two-islands")), p), "cost.json")
    layout = {"stages": [{"layers": 12, "replicas": [{"device": "A100", "tensor": 4}]}], "microbatch": 2, "microbatches": [4]}
    documents = [
        ("runtime", {"schema": "meshwright.training-runtime", "version": 1, "runtime": {"p2p": "blocking", "gpus_per_server": {"A100": 4}}}),
        ("profiled layout", {"schema": "meshwright.profiled-layout", "version": 1, "layout": layout}),
        ("measured runs", {"schema": "meshwright.measured-runs", "version": 1, "runs": [{"layout": layout, "time_s": 1.5}]}),
        ("layer profile", {"1": {"1": {"0": [1.0, 2.0, 0.1], "1": [0.5, 1.0, 0.1]}}}),
    ]  # fmt: skip
    system = b"gpu:\n  mem_bw: 3.3e12 # B/s\n  mem_capacity: 8e10\n  bfloat16_tc_flops: 9.8e14\nnode:\n  intra_node_bw: 4.5e11\n"
    return [("cost", "cost.json", cost), ("system", "x.yaml", system), *((r, f"{r}.json", json.dumps(d).encode()) for r, d in documents)]


TASKS = b"""{"schema": "meshwright.tasks", "version": 1, "tasks": [{"name": "a", "work": 2.5, "kind": "camera"}, {"name": "b", "work": 1}],
 "edges": [{"src": "a", "dst": "b", "size_bytes": 7}]}"""


TABLES = b"""{"schema": "meshwright.tables", "version": 1, "batch": 8, "tables": [{"name": "a", "rows": 9, "dim": 8, "pooling": 2.5},
 {"name": "b", "rows": 5, "dim": 4, "mode": "mean"}]}"""
LOADS = b'{"schema": "meshwright.expert-loads", "version": 1, "layers": {"blocks.0.experts": [5, 0, 7, 2], "blocks.1.*": [1, 1, 1, 1]}}'
STATISTICS = b'[{"row": 100, "pooling_factor": 3.5, "bin_0": 0.75, "bin_1": 0.25, "dim": 8}]'


def _lookup_costs() -> list[tuple[str, str, bytes]]:
    from ...cost_models.lookups import assumed_costs
    from ...io.costs.lookups import write_lookup_costs

    try:
        return [("lookup costs", "c.safetensors", written(lambda p: write_lookup_costs(p, assumed_costs(8, 4, 10**9)), "c.safetensors"))]
    except ImportError:  # without safetensors
        return []


def _move_net() -> list[tuple[str, str, bytes]]:
    from ...cost_models.moves import LAYERS, MoveNet
    from ...io.costs.moves import write_move_net

    shapes = {f"{n}.weight": s for n, s in LAYERS.items()} | {f"{n}.bias": s[:1] for n, s in LAYERS.items()}
    weights = {name: np.zeros(s, np.float32) for name, s in shapes.items()}
    try:
        return [("move net", "m.safetensors", written(lambda p: write_move_net(p, MoveNet(weights)), "m.safetensors"))]
    except ImportError:  # without safetensors
        return []


def _graphs() -> list[tuple[str, str, bytes]]:
    from ...io.model.graph import write_graph

    linked = b'{"directed": true, "nodes": [{"id": "a"}, {"id": "b"}], "links": [{"source": "a", "target": "b"}]}'
    rows = written(lambda p: np.savez(p, indptr=np.array([0, 1, 2]), indices=np.array([1, 0]), y=np.array([0, 1])), "rows.npz")
    nodes = [
        ("points", "points.csv", b"0,0,1\n1,0.5,0\n0,2,1\n"), ("node graph", "edges.txt", b"# from to\n0 1\n2 1\n"),
        ("node graph", "linked.json", linked), ("node graph", "rows.npz", rows),
    ]  # fmt: skip
    tasks = [
        ("tasks", "tasks.json", TASKS), ("tables", "tables.json", TABLES), ("tables", "statistics.json", STATISTICS), *_lookup_costs(), *_move_net(),
        *nodes, ("expert loads", "loads.json", LOADS),
    ]  # fmt: skip
    try:
        from ..nets import captured
    except ImportError:  # without torch
        return tasks
    return [*tasks, ("graph", "graph.json", written(lambda p: write_graph(p, captured("chain")), "graph.json"))]


def _traces() -> list[tuple[str, str, bytes]]:
    from ...interop.chakra import ChakraNode, ChakraTrace, NodeType
    from ...io.chakra.et import chakra_bytes
    from ...io.trace.module_tree import write_module_tree
    from ...trace.module_tree import CapturedOperator, ModuleNode, ModuleTree
    from .traces import drawn_trace

    tree = ModuleTree(model="m", modules=(
        ModuleNode(path="", kind="Net", parent=-1), ModuleNode(path="a", kind="Linear", parent=0, parameters=("weight",)),
    ), operators=(CapturedOperator(name="aten::linear", module=1, inner=("aten::t",), owners=(("TBackward0", (1,)),)),))  # fmt: skip
    nodes = tuple(ChakraNode(id=i, type=NodeType.COMP, data_deps=(i - 1,) if i else ()) for i in range(5))
    observed = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "x", "start_ts": 0, "finish_ts": 9, "nodes": [
        {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1, "inputs": {"values": [], "shapes": [], "types": []},
         "outputs": {"values": [], "shapes": [], "types": []}, "attrs": []},
        {"id": 2, "name": "aten::mm", "ctrl_deps": 1, "inputs": {"values": [[3, 4, 0, 12, 4, "cpu"]], "shapes": [[3, 4]], "types": ["Tensor(float)"]},
         "outputs": {"values": [[5, 6, 0, 12, 4, "cpu"]], "shapes": [[3, 4]], "types": ["Tensor(float)"]},
         "attrs": [{"name": "rf_id", "type": "uint64", "value": 3}, {"name": "fw_parent", "type": "uint64", "value": 0}]},
    ]}  # fmt: skip
    drawn = drawn_trace(np.random.default_rng(1))
    return [
        ("Chakra", "t.0.et", chakra_bytes(ChakraTrace(nodes=nodes))), ("execution trace", "et.json", json.dumps(observed).encode()),
        ("trace", "t.json", drawn.text().encode()), ("module tree", "tree.json", written(lambda p: write_module_tree(p, tree), "tree.json")),
    ]


def _shards() -> list[tuple[str, str, bytes]]:
    """Training data in shards: an archive of two samples, an MDS shard of two."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        for name in ("a/1.jpg", "a/1.cls", "a/2.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 5
            file.addfile(member, io.BytesIO(b"12345"))
    shard = {
        "column_encodings": ["int", "str"], "column_names": ["a", "b"], "column_sizes": [8, None], "samples": 2, "format": "mds", "compression": None,
        "raw_data": {"basename": "shard.mds", "bytes": 23},
    }  # fmt: skip
    index = json.dumps({"version": 2, "shards": [shard]}).encode()
    data = struct.pack("<4I", 2, 16, 19, 23) + b"1234567"
    return [("tar index", "samples.tar", archive.getvalue()), ("MDS index", "index.json", index), ("MDS shard", "shard.mds", data), *_input_plans()]


def _input_plans() -> list[tuple[str, str, bytes]]:
    from ...decide.data import FeedProblem
    from ...decide.data.coordl import Coordl
    from ...io.data.input_plan import write_input_plan
    from ...profile.input_plan import Place
    from ...profile.input_rates import InputRates
    from ...report.stalls_text import stalls_document

    m = InputRates(items=10, total_bytes=10**6, workers=2, cores=2, device_s=0.01, prepare_s=0.002, cpu_s=0.004, miss_s=0.01, hit_s=0.001,
                   storage_Bps=5e6, sampled=8, rounds=1, batch_bytes=100)  # fmt: skip
    place = Place(memory_bytes=400_000, jobs=2)
    plan = Coordl().plan(FeedProblem(rates=m, place=place), rng=np.random.default_rng(0))
    return [("input plan", "feed.json", written(lambda p: write_input_plan(p, plan), "feed.json")),
            ("input rates", "rates.json", json.dumps(stalls_document(m, place)).encode())]  # fmt: skip


def _foreign() -> list[tuple[str, str, bytes]]:
    smi = b"\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV12\tPXB\t0-15\t0\nGPU1\tNV12\t X \tSYS\t16-31\t1\nNIC0\tPXB\tSYS\t X \n\n" \
          b"NIC Legend:\n\n  NIC0: mlx5_0\n"  # fmt: skip
    gpu = b"Attached GPUs : 1\nGPU 00000000:07:00.0\n    Product Name : NVIDIA A100-SXM4-40GB\n    GPU Link Info\n        PCIe Generation\n" \
          b"            Max : 4\n        Link Width\n            Max : 16x\n    FB Memory Usage\n        Total : 40960 MiB\n"  # fmt: skip
    ibstat = b"CA 'mlx5_0'\n\tCA type: MT4123\n\tPort 1:\n\t\tState: Active\n\t\tRate: 200\n\t\tLink layer: InfiniBand\n"
    ibv = b"hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tactive_width:\t\t4X (2)\n" \
          b"\t\t\tactive_speed:\t\t100.0 Gbps (128)\n\t\t\tlink_layer:\t\tEthernet\n"  # fmt: skip
    cpu = b"Architecture: x86_64\nCPU(s): 112\nModel name: Intel(R) Xeon(R) Platinum 8462Y+\nSocket(s): 2\nNUMA node(s): 2\n"
    node: dict[str, Any] = {
        "kind": "Node", "metadata": {"name": "n1", "labels": {"node.kubernetes.io/instance-type": "p5.48xlarge"}}, "spec": {},
        "status": {"capacity": {"cpu": "192", "nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip
    nodes = json.dumps({"apiVersion": "v1", "kind": "List", "items": [node, node | {"metadata": {**node["metadata"], "name": "n2"}}]}).encode()
    slurm = b"NodeName=a1 Arch=x86_64 CPUTot=192\n   Gres=gpu:h100:8(S:0-1)\n   RealMemory=2000000 Sockets=2\n   State=IDLE ThreadsPerCore=2\n\n"
    table = b"== %s ==\n     GPU0 GPU1\nGPU0 0    %s\nGPU1 %s   0\n"
    amd = b"".join(table % (title, cell, cell) for title, cell in ((b"Weight", b"15"), (b"Link Type", b"XGMI")))
    graph = b'<graphs version="1"><graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="20" speedinter="20" latencyinter="0"' \
            b' typeintra="NVL" typeinter="PIX" samechannels="1"><channel><gpu dev="0"/><gpu dev="1"/></channel></graph></graphs>'  # fmt: skip
    box = {"name": "NDv2", "gpus_per_node": 8, "nics_per_node": 1, "alpha": 0.3, "node_betas_list": [23, 46], "node_invbws_list": [23, 46],
           "remote_invbw": 107, "remote_alpha": 2.6, "remote_beta": 105}  # fmt: skip
    toml = b'[transformer]\nlayers = 2\nhidden = 64\nheads = 4\nsequence = 32\nvocabulary = 96\n[layout]\ntensor = 2\nrecompute = "selective"\n'
    sketch = {
        "nnodes": 2, "intranode_sketch": {"strategy": "switch", "switches": [[0, 1, 2, 3]], "switch_hyperedge_strategy": ["uc-min"]},
        "internode_sketch": {"strategy": "relay", "internode_conn": {"1": [0]}, "gpus_to_sender_rev_map": {"1": [0, 1]}, "enforce_ordering": True},
        "symmetry_offsets": [[2, 4]], "hyperparameters": {"input_chunkup": 2},
    }  # fmt: skip
    dcgm = {"body": {"To GPU 1": {"overflow": ["Connected via two NVLINKs (Links: 0, 1)"], "value": "Connected via a single PCIe switch"}},
            "header": ["Topology Information", "GPU ID: 0"]}  # fmt: skip
    back = json.loads(json.dumps(dcgm).replace("GPU 1", "GPU 0").replace("ID: 0", "ID: 1"))
    return [
        ("sketch", "sketch.json", json.dumps(sketch).encode()), ("dcgm", "dcgm.json", json.dumps(dcgm).encode() + json.dumps(back).encode()),
        ("nvidia-smi", "topo.txt", smi), ("cluster", "topo.txt", smi), ("rocm-smi", "topo.txt", amd),
        ("nvidia-smi -q", "q.txt", gpu), ("ibstat", "ibstat.txt", ibstat),
        ("ibv_devinfo", "ibv.txt", ibv), ("lscpu", "lscpu.txt", cpu), ("kubernetes", "nodes.json", nodes), ("cluster", "nodes.json", nodes),
        ("slurm", "slurm.txt", slurm), ("cluster", "slurm.txt", slurm), ("NCCL graph", "graph.xml", graph), ("transformer", "model.toml", toml),
        ("box profile", "box.json", json.dumps(box).encode()),
    ]
