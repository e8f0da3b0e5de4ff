"""What NCCL would do: its choice of algorithm and protocol by its own tuner model, and a schedule of that kind to compare with.

Cite: NVIDIA, NCCL 2.30 (source code, src/graph/tuning.cc and search.cc); the model is described nowhere else.
Left open by the paper: how its graph search lays channels on a fabric that is only described. Our answer: the number and speed of channels that the
fabric's rates allow, rings server by server, one ring or tree pair per network port.
Deviations: the schedule is lowered to sends and receives of our own: rings, double trees over servers with chains inside, PAT; what NCCL does inside
the switch (NVLS) is replaced by the best of its other choices and said so; CollNet is off, as by default.
Invariant: the prediction is NCCL's model and labelled so; the simulated time is ours. They never meet in one ratio.
Cost: 15 cells per size; a schedule of O(n²) messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Unsupported
from ..bounds.collective import collective_bound
from ..classic.direct import Direct
from ..classic.double_tree import double_parents
from ..classic.hierarchical import servers_of
from ..classic.pat import Pat
from ..classic.ring import Ring
from ..classic.rooted_tree import choose_pieces, plan_trees
from ..classic.rounds import resolve_order
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, options_of
from .model import OPS, NcclTopology, Option, changes, parse_list, predict, topology_of
from .tables import ALGORITHMS, PROTOCOLS, SOURCE

__all__ = ["CITE", "DEVIATIONS", "Nccl"]

CITE = Cite(
    key="nvidia2026nccl", title="NVIDIA Collective Communications Library 2.30, source code", authors="NVIDIA", year=2026, venue="software",
    url="https://github.com/NVIDIA/nccl",
)  # fmt: skip
DEVIATIONS = ("channels by rates, not by search over paths", "NVLS is replaced by the next choice in the schedule", "CollNet is off")


@dataclass(frozen=True, kw_only=True)
class Nccl(CollectiveStrategy):
    """Options.

    arch: volta, ampere, hopper or blackwell; None = by the devices' figures.
    cpu: intel, amd or other; NCCL's limits for LL between nodes and its posting costs depend on it.
    algo, proto: as NCCL_ALGO and NCCL_PROTO: `ring,tree`, `^LL128`; None = all.
    unroll: pieces of trees as explicit chunks (repeat 1).
    """

    name: ClassVar[str] = "nccl"
    cite: ClassVar[Cite] = CITE

    arch: str | None = None
    cpu: str = "intel"
    algo: str | None = None
    proto: str | None = None
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (no GPUs NCCL runs on, unreachable ranks), UsageError (options)."""
        bound = collective_bound(problem)
        algorithms, protocols = parse_list(self.algo, ALGORITHMS, "algorithm"), parse_list(self.proto, PROTOCOLS, "protocol")
        topology = topology_of(problem.fabric, problem.ranks, arch=self.arch, cpu=self.cpu)
        chosen = replace(self, arch=topology.arch)
        if problem.op not in OPS:
            plan = Direct(order="servers").plan(problem, rng=rng)
            notes = {"prediction": "none: grouped sends and receives", "schedule": "direct", "source": SOURCE}
            return replace(plan, strategy=self.name, options=options_of(chosen), notes={**plan.notes, **notes})
        cells = predict(topology, problem.op, problem.size_bytes, algorithms=algorithms, protocols=protocols)
        lowered = [c for c in cells if c.time_us is not None and not c.algorithm.startswith("nvls")]
        stand_in = lowered[0] if lowered else Option(algorithm="ring", protocol="Simple")
        plan = self._schedule(problem, topology, stand_in, rng)
        notes = _explained(topology, problem, cells, stand_in, algorithms=algorithms, protocols=protocols)
        return CollectivePlan(program=plan.program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes)

    def _schedule(self, problem: CollectiveProblem, topology: NcclTopology, choice: Option, rng: np.random.Generator) -> CollectivePlan:
        order = resolve_order(problem, "servers", "nccl")
        if problem.shard_bytes is not None:
            raise Unsupported("NCCL has no uneven shards in one call", hint="use --strategy direct")
        if choice.algorithm == "pat":
            return Pat(order=order).plan(problem, rng=rng)
        if choice.algorithm == "tree":
            return self._trees(problem, order)
        return Ring(order=order, unroll=self.unroll).plan(problem, rng=rng)

    def _trees(self, problem: CollectiveProblem, order: tuple[int, ...]) -> CollectivePlan:
        """Double trees over servers, chains inside, one pair per rank that heads a chain."""
        servers = servers_of(problem)
        heads = min(len(s) for s in servers) if len(servers) > 1 else 1
        trees = []
        for head in range(heads):
            turned = [[*s[head:], *s[:head]] for s in servers]
            for parents in double_parents(len(servers)) if len(servers) > 1 else ([-1],):
                tree = [-1] * len(problem.ranks)
                for chain, parent in zip(turned, parents, strict=True):
                    for above, below in pairwise(chain):
                        tree[below] = above
                    tree[chain[0]] = turned[parent][0] if parent >= 0 else -1
                trees.append(tree)
        pieces = choose_pieces(problem, trees)
        bound = collective_bound(problem)
        return plan_trees(problem, self, trees, pieces=pieces, unroll=self.unroll, name=self.name, order=order, bound=bound)


def _explained(t: NcclTopology, problem: CollectiveProblem, cells: list[Option], stand_in: Option, **more: Any) -> dict[str, Any]:
    best = cells[0]
    available = [c for c in cells if c.time_us is not None]
    why = f"least of {len(available)} times in NCCL's model: {best.latency_us:.1f} us + size / {best.bandwidth_GBps:.1f} GB/s"
    notes: dict[str, Any] = {
        "prediction": "NCCL's own model, not a simulation", "source": SOURCE, "algorithm": best.algorithm, "protocol": best.protocol,
        "predicted_us": best.time_us, "why": why, "changes": changes(t, problem.op, problem.size_bytes, **more),
        "table": [c.to_json() for c in cells], "assumptions": list(t.assumptions), "nodes": t.nodes, "arch": t.arch,
        "channels": {"count": t.ring.count, "intra_GBps": t.ring.intra_GBps, "inter_GBps": t.ring.inter_GBps}, "schedule": stand_in.algorithm,
    }  # fmt: skip
    if stand_in.algorithm != best.algorithm:
        notes["stand_in"] = f"{best.algorithm} adds and copies inside switches; the schedule is {stand_in.algorithm}, NCCL's next choice"
    return notes
