"""What parsers of outside files have in common: the largest file of each format that is read, and the largest numbers.

A file that comes from outside must not exhaust memory or time before it is looked at. A limit was measured where its line says so; the others are
many times what the tools that write such files make. What only one format has (rows, nodes, depth) is limited beside its parser.
"""

from __future__ import annotations

__all__ = ["MAX_INT32", "MAX_QUANTITY", "MAX_TOML_DOTS", "MaxBytes"]


class MaxBytes:
    """Bytes of one file that are read (unpacked, where it may be gzip); a larger file is refused."""

    DOCUMENT = 512 << 20  # plans, programs, graphs: the largest documents of our own
    FABRIC_TOML = 16 << 20  # the largest preset takes 10.4 MiB
    EXPERT_LOADS = 16 << 20  # 1,000 layers of 256 experts take 3 MiB
    PRICES = 64 << 10  # half a dozen figures and their source
    NETWORK_JOBS = 4 << 20  # 10,000 jobs on boards take 1.2 MiB
    FABRIC_JSON = 32 << 20  # the same fabric is longer in JSON, less than twice
    CLUSTER_FILE = 32 << 20  # one of the files that describe a cluster: XML, `nvidia-smi topo`, a matrix
    ADJACENCY = 32 << 20  # a matrix of 4096 x 4096 entries of two characters
    DCGM = 4 << 20  # `dcgmi topo`, some kilobytes for a GPU
    NCCL_XML = 16 << 20  # topologies and graphs of one server, or of a fused cluster
    MSCCL_XML = 64 << 20
    MSCCLPP_JSON = 64 << 20
    TACCL_SKETCH = 8 << 20
    NCCL_TUNER = 1 << 20  # a row takes at most 256 bytes
    COST_TABLE = 64 << 20
    PERF_TABLE = 256 << 20  # the largest real ones have 3 MB
    PERF_SYSTEM = 1 << 20  # a GPU's data sheet in YAML, a few kilobytes
    PROFILE_DOCUMENT = 16 << 20  # runtimes, layouts and runs that profilers report
    PROFILE_LAYERS = 64 << 20
    TRAFFIC = 64 << 20
    TRAFFIC_CSV = 4 << 20  # 1 kB for each of the 4096 tensors that can be planned
    BUFFERS_CSV = 64 << 20
    KFAC_CSV = 1 << 20  # the published ones have a kilobyte
    LOOKUP_COSTS = 64 << 20  # nets for four devices take 0.3 MB
    MOVE_NET = 1 << 20  # GiPH's net takes 5 kB
    TABLES = 64 << 20  # 20,000 tables with histograms take 8 MB
    TASKS = 64 << 20  # 100,000 tasks with 300,000 edges take 30 MB
    NODE_GRAPH = 16 << 30  # columns of a graph to train on; ogbn-products has 0.5 GB
    NODE_TEXT = 1 << 30  # edges, features or labels as text; 60 million edges
    POINTS_CSV = 256 << 20
    QUEUE = 256 << 20  # a million jobs take 150 MB
    CLUSTER_TRACE = 256 << 20  # the published job log of Philly, 117,325 jobs, is the largest
    ALLOCATION = 64 << 20
    INPUT_PLAN = 1 << 20  # takes 2 kB
    VMS = 1 << 30  # 300,000 machines take 25 MB
    AZURE_PACKING = 4 << 30  # the public one, 5.6 million machines, has below 1 GB; only pages that are asked for are read
    RESIZE_LOG = 256 << 20  # 100 tenants for a day of five-minute windows take 4 MB
    RESIZE_PRIOR = 4 << 20  # 36 columns take 15 kB
    JOURNAL = 256 << 20  # a job takes about 3 kB
    SLURM_OUTPUT = 64 << 20  # `scontrol show`; a job takes about 2 kB
    EXTENDER_BODY = 64 << 20  # kube-scheduler sends whole nodes, some 20 kB each
    TRANSFORMER_TOML = 64 << 10  # a dozen lines
    EXECUTION_TRACE = 128 << 20  # a node takes about 1 kB
    MODULE_TREE = 256 << 20
    PERFETTO = 1 << 30


MAX_QUANTITY = 9 * 10**18  # rates, sizes and FLOP/s stay below 2^63 = 9.22e18
MAX_INT32 = (1 << 31) - 1  # what the C programs read that these files are for
MAX_TOML_DOTS = 64  # on one line: a key a.b.c... costs a TOML parser time that grows with its length squared
