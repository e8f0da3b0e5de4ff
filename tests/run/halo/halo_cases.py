"""What ranks do in tests of the halo exchange: functions of a module of their own, so that other processes can import them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from meshwright.graph.generate import rmat
from meshwright.graph.halo import Halo, halos
from meshwright.graph.nodes import NodeGraph
from meshwright.job import GraphTraining
from meshwright.plan.halo import HaloGroup, HaloJob, HaloMessage, HaloStep, text_of_widths
from meshwright.run.halo import GraphNet, HaloExchange

NODES = 40


def graph_of(model: str) -> NodeGraph:
    graph = rmat(NODES, 300, seed=4)
    return graph.looped() if model == "gcn" else graph


def shares_of(model: str, workers: int, *, empty: bool = False) -> tuple[Halo, ...]:
    graph = graph_of(model)
    of = np.random.default_rng(2).integers(workers - empty, size=NODES)
    return halos(graph, of, workers, graph.coefficients("gcn" if model == "gcn" else "mean"))


def training(model: str) -> GraphTraining:
    return GraphTraining(name="g", features=6, classes=3, hidden=8, layers=3, model=model, seed=5)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(3)
    return torch.from_numpy(rng.standard_normal((NODES, 6), dtype=np.float32)), torch.from_numpy(rng.integers(3, size=NODES))


def job_of(shares: tuple[Halo, ...], job: GraphTraining, bits: int) -> HaloJob:
    """All rows at the same width."""
    steps = []
    for name, layer, forward in job.exchanges:
        messages = []
        for s in shares:
            for other in shares:
                rows = len(s.send[other.rank]) if forward else len(other.send[s.rank])
                if rows and other is not s:
                    messages.append(HaloMessage(
                        src=s.rank, dst=other.rank, widths=text_of_widths([bits] * rows), groups=(HaloGroup(rows, 1.0, bits),), size_bytes=0
                    ))  # fmt: skip
        steps.append(HaloStep(name=name, dim=job.dims[layer], messages=tuple(messages)))
    own = tuple(s.own for s in shares)
    return HaloJob(graph="g", digest="", nodes=NODES, edges=0, workers=len(shares), own=own, central=own, variance=1.0, steps=tuple(steps))


def gradients(rank: int, group: Any, model: str, workers: int, bits: int, repeats: int = 1, empty: bool = False) -> dict[str, Any]:
    """Loss and weight gradients (this rank's part), mean over `repeats` epochs of other random numbers; bytes sent."""
    torch.set_num_threads(1)
    shares, job = shares_of(model, workers, empty=empty), training(model)
    share = shares[rank]
    halo = HaloExchange(None if bits == 32 else job_of(shares, job, bits), share, group=group, seed=1)
    net = GraphNet(job, share)
    x, labels = (t[torch.from_numpy(share.nodes[: share.own])] for t in inputs())
    total = None
    for _ in range(repeats):
        net.zero_grad()
        out = net(x, halo)
        loss = torch.nn.functional.cross_entropy(out, labels, reduction="sum") + 0 * out.sum()
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).double()
        total = flat if total is None else total + flat
        halo.next_step()
    return {"loss": float(loss.detach()), "gradient": (total / repeats).numpy(), "sent": dict(halo.sent)}


def input_gradient(rank: int, group: Any, workers: int) -> np.ndarray:
    """Of a module that is no graph network: each row times the sum of all rows that the worker sees; with a gradient in the input."""
    share = shares_of("sage", workers)[rank]
    halo = HaloExchange(None, share, group=group)
    x = inputs()[0][torch.from_numpy(share.nodes[: share.own])].requires_grad_()
    ticket = halo.start(x, 0)
    rows = torch.cat([x, halo.finish(ticket, 0)])
    (rows.sum(0) * torch.arange(1.0, 7.0)).prod().backward()
    assert x.grad is not None
    return x.grad.numpy()


def refusals(rank: int, group: Any) -> list[str]:
    """What is refused on one rank alone, before anything is sent."""
    from meshwright.errors import MeshwrightError

    share = shares_of("gcn", 2)[rank]
    halo, said = HaloExchange(None, share, group=group), []
    other = job_of(shares_of("sage", 3), training("sage"), 4)
    for what in (
        lambda: halo.start(torch.zeros(share.own, 2, dtype=torch.float64), 0), lambda: halo.start(torch.zeros(share.own + 1, 2), 0),
        lambda: halo.assign(other), lambda: HaloExchange(object(), share),
    ):  # fmt: skip
        try:
            what()
        except MeshwrightError as error:
            said.append(f"{error.code}: {error.message}")
    return said


def lost(rank: int, group: Any) -> str:
    """Rank 1 never answers a second time."""
    from meshwright.errors import MeshwrightError

    share = shares_of("gcn", 2)[rank]
    halo = HaloExchange(None, share, group=group, timeout_s=1.0 if rank == 0 else 60.0)
    halo(torch.zeros(share.own, 2), 0)
    if rank == 1:
        return ""
    try:
        halo(torch.zeros(share.own, 2), 0)
    except MeshwrightError as error:
        return f"{error.code}: {error.message}"
    return "nothing"
