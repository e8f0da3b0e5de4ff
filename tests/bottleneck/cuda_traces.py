"""Traces as torch.profiler writes them on CUDA machines, made by a small simulation: a host thread launches, an autograd thread launches backward,
streams run kernels in order, NCCL kernels end on all ranks when the last has arrived, and the truth is known.

Fields and categories follow Kineto's output: cpu_op, cuda_runtime, kernel, gpu_memcpy, gpu_memset, user_annotation; correlation joins a launch
with its kernel, `ac2g` arrows too; collectives carry their name, group, size and rank.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE, NCCL, COPIES = 7, 20, 13
GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_cublas"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"
COPY = "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass
class Settings:
    """Times in us. `data`: of loading per rank; `copy_in`: (layer, us) of a copy; `collective_us`; `slow_rank`: (rank, factor of its kernels)."""

    ranks: int = 2
    steps: int = 3
    layers: int = 4
    kernel_us: float = 120.0
    launch_us: float = 6.0
    data_us: float = 80.0
    slow_data_rank: int = -1
    slow_data_us: float = 0.0
    copy_in: tuple[int, float] = (-1, 0.0)
    collective_us: float = 150.0
    slow_rank: tuple[int, float] = (-1, 1.0)
    skew_us: float = 0.0  # the clock of rank r runs ahead by r times this
    hosts: tuple[str, ...] = ()  # name of each rank's machine; `skews_us` then gives each rank's clock
    skews_us: tuple[float, ...] = ()
    leaves_late: tuple[int, float] = (-1, 0.0)  # (rank, us) that it leaves collectives after the others
    bucket: int = 2  # layers per all-reduce
    seed: int = 0
    whole_us: bool = False  # times as Kineto wrote them before it wrote ns


@dataclass
class _Rank:
    rank: int
    rng: random.Random
    host: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    free: dict[int, float] = field(default_factory=dict)
    correlation: int = 1000
    external: int = 1


class Maker:
    """Makes the ranks' events in lockstep, so that collectives can meet."""

    def __init__(self, settings: Settings) -> None:
        self.s = settings
        self.ranks = [_Rank(r, random.Random(f"{settings.seed}/{r}")) for r in range(settings.ranks)]
        self.sequence = 0

    # ---- events
    def event(self, r: _Rank, cat: str, name: str, tid: Any, start: float, dur: float, pid: Any = None, **args: Any) -> dict[str, Any]:
        made = {"ph": "X", "cat": cat, "name": name, "pid": 4000 + r.rank if pid is None else pid, "tid": tid, "ts": start, "dur": dur, "args": args}
        r.events.append(made)
        return made

    def launch(
        self, r: _Rank, tid: int, stream: int, name: str, us: float, *, cat: str = "kernel", after: float = 0.0, **args: Any
    ) -> dict[str, Any]:
        """A runtime call on the host, and its device work as early as its stream allows."""
        s = self.s
        cost = s.launch_us * r.rng.uniform(0.8, 1.3)
        r.correlation += 1
        call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}[cat]
        self.event(r, "cuda_runtime", call, tid, r.host, cost, **{"External id": r.external, "cbid": 211, "correlation": r.correlation})
        start = max(r.host + cost + 2.0, r.free.get(stream, 0.0), after)
        r.host += cost
        if r.rank == s.slow_rank[0] and cat == "kernel" and not name.startswith("nccl"):
            us *= s.slow_rank[1]
        made = self.event(
            r, cat, name, stream, start, us * r.rng.uniform(0.95, 1.05), pid=0,
            **{"External id": r.external, "device": 0, "context": 1, "stream": stream, "correlation": r.correlation, **args},
        )  # fmt: skip
        r.free[stream] = start + made["dur"]
        return made

    def operator(self, r: _Rank, name: str, tid: int, kernels: list[tuple[str, float]], **args: Any) -> None:
        start = r.host
        r.external += 1
        made = self.event(r, "cpu_op", name, tid, start, 0.0, **{"External id": r.external, **args})
        r.host += 2.0
        for kernel, us in kernels:
            self.launch(r, tid, COMPUTE, kernel, us)
        r.host += 1.5
        made["dur"] = r.host - start

    def annotation(self, r: _Rank, name: str, tid: int, start: float) -> None:
        self.event(r, "user_annotation", name, tid, start, r.host - start)

    # ---- the loop
    def step(self, number: int) -> None:
        s = self.s
        begun = [r.host for r in self.ranks]
        sequences: list[int] = []
        for r in self.ranks:
            main = 4000 + r.rank
            start = r.host
            r.host += s.data_us * r.rng.uniform(0.9, 1.1) + (s.slow_data_us if r.rank == s.slow_data_rank else 0.0)
            self.annotation(r, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", main, start)
            self.launch(r, main, COMPUTE, "Memcpy HtoD (Pageable -> Device)", 25.0, cat="gpu_memcpy", bytes=1 << 20)
            for layer in range(s.layers):
                start = r.host
                sequence = self.sequence + layer
                if r.rank == 0:
                    sequences.append(sequence)
                self.operator(r, "aten::linear", main, [(GEMM, s.kernel_us)], **{"Sequence number": sequence, "Fwd thread id": 0})
                if layer == s.copy_in[0]:
                    self.operator(r, "aten::copy_", main, [(COPY, s.copy_in[1])])
                self.operator(r, "aten::add", main, [(POINTWISE, s.kernel_us / 8)])
                self.annotation(r, f"module:layers.{layer}", main, start)
            self.operator(r, "aten::mse_loss", main, [(POINTWISE, 12.0)])
        self.backward(sequences)
        for r, at in zip(self.ranks, begun, strict=True):
            main = 4000 + r.rank
            start = r.host
            self.operator(r, "aten::_foreach_add_", main, [(POINTWISE, 30.0)])
            self.annotation(r, "Optimizer.step#SGD.step", main, start)
            done = max(r.free.values()) + 1.0
            self.event(r, "cuda_runtime", "cudaDeviceSynchronize", main, r.host, max(done - r.host, 3.0), correlation=0, cbid=165)
            r.host = max(done, r.host + 3.0)
            self.annotation(r, f"ProfilerStep#{number}", main, at)
        self.sequence += s.layers

    def backward(self, sequences: list[int]) -> None:
        s = self.s
        for done, layer in enumerate(reversed(range(s.layers)), 1):
            ready = []
            for r in self.ranks:
                thread = 5000 + r.rank
                start = r.host
                tags = {"Sequence number": sequences[layer], "Fwd thread id": 1}
                outer = self.event(r, "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", thread, start, 0.0, **tags)
                self.operator(r, "AddmmBackward0", thread, [(GEMM, s.kernel_us), (GEMM, s.kernel_us)], **tags)
                outer["dur"] = r.host - start
                ready.append(r.free[COMPUTE])
            if done % s.bucket == 0 or done == s.layers:
                self.all_reduce(ready)
        for r in self.ranks:
            r.free[COMPUTE] = max(r.free[COMPUTE], r.free.get(NCCL, 0.0))

    def all_reduce(self, ready: list[float]) -> None:
        elements = 1 << 20
        made = [
            self.launch(
                r, 5000 + r.rank, NCCL, ALL_REDUCE, 1.0, after=at,
                **{"Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "Group size": self.s.ranks,
                   "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": str(list(range(self.s.ranks)))},
            )
            for r, at in zip(self.ranks, ready, strict=True)
        ]  # fmt: skip
        end = max(e["ts"] for e in made) + self.s.collective_us * self.ranks[0].rng.uniform(0.97, 1.03)
        for r, e in zip(self.ranks, made, strict=True):
            left = end + (self.s.leaves_late[1] if r.rank == self.s.leaves_late[0] else 0.0)
            e["dur"] = left - e["ts"]
            r.free[NCCL] = left

    def documents(self) -> list[dict[str, Any]]:
        for number in range(self.s.steps):
            self.step(5 + number)
        return [self._document(r) for r in self.ranks]

    def _document(self, r: _Rank) -> dict[str, Any]:
        base, shift = 4_000_000_000.0, self.s.skews_us[r.rank] if self.s.skews_us else r.rank * self.s.skew_us
        out: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 4000 + r.rank, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        ]
        calls = {e["args"]["correlation"]: e for e in r.events if e["cat"] == "cuda_runtime"}
        for e in r.events:
            at, until = base + shift + e["ts"], base + shift + e["ts"] + e["dur"]
            if self.s.whole_us:
                out.append({**e, "ts": int(at), "dur": int(until) - int(at)})
            else:
                out.append({**e, "ts": round(at, 3), "dur": round(round(until, 3) - round(at, 3), 3)})  # ends in whole ns, as Kineto has them
            if e["cat"].startswith(("kernel", "gpu_mem")):
                call = calls[e["args"]["correlation"]]
                for ph, at in (("s", call), ("f", e)):
                    flow = {"ph": ph, "id": e["args"]["correlation"], "cat": "ac2g", "name": "ac2g", "pid": at["pid"], "tid": at["tid"]}
                    out.append({**flow, "ts": round(base + shift + at["ts"], 3), **({"bp": "e"} if ph == "f" else {})})
        world = list(range(self.s.ranks))
        info = {"backend": "nccl", "rank": r.rank, "world_size": self.s.ranks, "pg_config": [{"pg_name": "0", "ranks": world}]}
        gpu = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85 * 10**9}]
        head = {"schemaVersion": 1, "deviceProperties": gpu, "distributedInfo": info, "displayTimeUnit": "ms"}
        if self.s.hosts:
            head["host_name"] = self.s.hosts[r.rank]
        return {**head, "baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": out}


def write_ranks(folder: Path, settings: Settings) -> list[Path]:
    """One `rank<r>.json.gz` per rank."""
    paths = []
    for r, document in enumerate(Maker(settings).documents()):
        path = folder / f"rank{r}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document).encode(), 3, mtime=0))
        paths.append(path)
    return paths
