"""Full-graph training as a plan says, on local processes or as one rank of a lab or cluster; bytes of each channel are counted.

Every `reassign` epochs bits are chosen anew: ranges of the rows are traced for `TRACED` epochs, rank 0 asks the plan's strategy, and all take what it
says. Evaluation is in full precision. (AdaQP, MLSys 2023, section 3.8 of its card; before the first trace it sends 8 bits, we send what was planned.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...codec.rows import WIDTHS
from ...decide.traffic.adaqp import NAMES
from ...decide.traffic.adaqp.lower import stated_steps
from ...decide.traffic.adaqp.strategy import AdaQP
from ...drive.halo import aggregated, digest_of, halo_problem
from ...drive.plans import fabric_of, read_plan, write_plan
from ...errors import PlanMismatch, UsageError
from ...graph.halo import Halo, halos
from ...graph.nodes import Labelled, NodeGraph
from ...job import GraphTraining
from ...plan.halo import HaloJob
from ...plan.plan import Plan
from ..machine.process import DONE, STATE, STEP, TRAINING
from ..ranks.launcher import LocalRanks, scratch_folder
from .exchange import HaloExchange
from .networks import GraphNet

__all__ = ["GraphRank", "GraphRun", "read_share", "run_graph", "train_rank", "write_share"]

TRACED = 5  # epochs of which ranges are averaged before bits are chosen
PLAN, GRAPH = "plan.json", "graph.npz"


class GraphRank(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What one worker measured. `sent`: (exchange, destination, bytes counted, bytes stated) of all epochs together."""

    rank: int
    epochs_s: list[float] = []
    losses: list[float] = []
    accuracy: float = 0.0
    sent: list[tuple[str, int, int, int]] = []
    reassigned: list[int] = []
    variances: list[dict[str, float]] = []
    digest: str = ""


class GraphRun(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A run of all workers. `epochs_s`: the slowest worker's; `accuracy`: of labelled nodes that do not count in the loss, of all where all count;
    `as_planned`: every channel's bytes were those stated. `variances`: at each reassignment, of the new bits ("planned") and of uniform ones."""

    epochs_s: list[float]
    losses: list[float]
    accuracy: float
    sent_bytes: int
    as_planned: bool
    reassigned: list[int]
    variances: list[dict[str, float]]
    ranks: list[GraphRank]


class RankOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    epochs: int
    timeout_s: float


def write_share(folder: Path, plan: Plan, data: Labelled, of: np.ndarray[Any, Any]) -> None:
    """Plan, graph and parts for the ranks. Raises: PlanMismatch for a graph or parts that the plan is not for."""
    job = msgspec.convert(plan.job["halo"], HaloJob)
    training = msgspec.convert(plan.job["graph_training"], GraphTraining)
    if digest_of(data.graph, of) != job.digest or data.features.shape[1] != training.features or data.classes > training.classes:
        what = "the plan is for another graph, or other parts of it"
        raise PlanMismatch(what, where=data.graph.name, hint="plan again with the same graph and seed")
    write_plan(folder / PLAN, plan)
    graph = data.graph
    np.savez(
        folder / GRAPH, indptr=graph.indptr, indices=graph.indices, of=of, features=data.features, labels=data.labels, train=data.train
    )  # fmt: skip


def read_share(folder: Path, rank: int) -> tuple[Plan, tuple[Halo, ...], Labelled]:
    """(plan, all shares, the whole data). The folder is one that `write_share` wrote."""
    plan = read_plan(folder / PLAN)
    training = msgspec.convert(plan.job["graph_training"], GraphTraining)
    with np.load(folder / GRAPH, allow_pickle=False) as found:
        data = Labelled(NodeGraph(found["indptr"], found["indices"], training.name), found["features"], found["labels"], found["train"])
        graph, weights = aggregated(training, data.graph)
        return plan, halos(graph, found["of"], plan.main.ranks, weights), data


def run_graph(plan: Plan, data: Labelled, of: np.ndarray[Any, Any], *, epochs: int, timeout_s: float, port: int) -> GraphRun:
    """Trains on local processes, one per worker.

    Raises: UsageError; PlanMismatch; RankDied, RankFailed, RunTimeout, Interrupted of the run.
    """
    if epochs < 1 or not timeout_s > 0:
        raise UsageError(f"{epochs} epochs, {timeout_s:g} s", where="--epochs", hint="at least one epoch, and a time above 0")
    with scratch_folder("graph") as folder:
        write_share(folder, plan, data, of)
        ranks = LocalRanks(plan.main.ranks, folder, training_rank, RankOptions(epochs=epochs, timeout_s=timeout_s), port=port, timeout_s=timeout_s)
        ranks.run()
        return together(ranks.results(GraphRank))


def together(ranks: list[GraphRank]) -> GraphRun:
    """Raises: PlanMismatch where workers ended with different weights."""
    if len({r.digest for r in ranks}) > 1:
        raise PlanMismatch("workers hold different weights at the end", where="graph run", hint="do all run the same versions and seeds?")
    first = ranks[0]
    return GraphRun(
        epochs_s=[max(times) for times in zip(*(r.epochs_s for r in ranks), strict=True)], losses=first.losses, accuracy=first.accuracy,
        sent_bytes=sum(counted for r in ranks for _, _, counted, _ in r.sent),
        as_planned=all(counted == stated for r in ranks for _, _, counted, stated in r.sent), reassigned=first.reassigned, variances=first.variances,
        ranks=ranks,
    )  # fmt: skip


def training_rank(seat: Any) -> GraphRank:
    """A rank that our launcher started."""
    options = msgspec.convert(seat.options, RankOptions)
    plan, shares, data = read_share(seat.folder, seat.rank)
    link = seat.join("cpu", options.timeout_s)
    link.go()
    link.progress[STATE] = TRAINING

    def at(epoch: int) -> None:
        link.progress[STEP] = epoch

    found = train_rank(plan, shares, data, options.epochs, on_epoch=at)
    link.progress[STATE] = DONE
    return found


def train_rank(
    plan: Plan, shares: tuple[Halo, ...], data: Labelled, epochs: int, *, on_epoch: Callable[[int], object] = lambda epoch: None
) -> GraphRank:  # fmt: skip
    """One worker's training; `torch.distributed` is initialised and has one rank per worker. `on_epoch`: told which begins."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    worker = _Worker(plan, shares, data, rank)
    result = GraphRank(rank=rank)
    for epoch in range(epochs):
        on_epoch(epoch)
        worker.before(epoch, result)
        dist.barrier()
        start = time.perf_counter()
        result.losses.append(worker.epoch())
        result.epochs_s.append(time.perf_counter() - start)
        worker.count()
    result.accuracy = worker.accuracy()
    result.sent = [(name, dst, counted, worker.stated[name, dst]) for (name, _, dst), counted in sorted(worker.halo.sent.items())]
    result.digest = str(float(sum(p.detach().double().sum() for p in worker.net.parameters())))
    return result


class _Worker:
    def __init__(self, plan: Plan, shares: tuple[Halo, ...], data: Labelled, rank: int) -> None:
        self.plan, self.shares, self.rank = plan, shares, rank
        self.training = msgspec.convert(plan.job["graph_training"], GraphTraining)
        self.job = msgspec.convert(plan.job["halo"], HaloJob)
        share = shares[rank]
        own = share.nodes[: share.own]
        self.x, self.labels = torch.from_numpy(data.features[own]), torch.from_numpy(data.labels[own])
        counts = data.train & (data.labels >= 0)
        self.counts, self.total = torch.from_numpy(counts[own]), int(counts.sum())
        judged = (data.labels >= 0) & ~counts
        self.judged = torch.from_numpy((judged if judged.any() else counts)[own])
        self.halo = HaloExchange(self.job, share, seed=self.training.seed)
        self.net = GraphNet(self.training, share)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self.training.learning_rate)
        self.stated: dict[tuple[str, int], int] = {}
        self.compared: dict[str, float] = {}

    def epoch(self) -> float:
        """Returns the loss, a mean over all nodes that count."""
        self.optimizer.zero_grad()
        out = self.net(self.x, self.halo)
        loss = nn.functional.cross_entropy(out[self.counts], self.labels[self.counts], reduction="sum") / self.total
        (loss + 0 * out.sum()).backward()  # a worker without a node that counts still takes part in every exchange
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        flat = torch.cat([*(g.reshape(-1) for g in grads), loss.detach().reshape(1)])
        dist.all_reduce(flat)
        at = 0
        for g in grads:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()
        self.optimizer.step()
        self.halo.next_step()
        return float(flat[-1])

    def count(self) -> None:
        """What the plan says that this worker sends in an epoch."""
        for s in self.job.steps:
            for m in s.messages:
                if m.src == self.rank:
                    self.stated[s.name, m.dst] = self.stated.get((s.name, m.dst), 0) + m.size_bytes

    def before(self, epoch: int, result: GraphRank) -> None:
        """Tracing begins `TRACED` epochs before bits are chosen anew, which happens every `reassign` epochs."""
        every = self.training.reassign
        if not every or self.plan.decisions["halo"]["strategy"] != AdaQP.name:
            return
        if epoch and epoch % every == 0:
            self.reassign()
            result.reassigned.append(epoch)
            result.variances.append(self.compared)
        if (epoch + min(TRACED, every)) % every == 0:
            self.halo.trace()

    def reassign(self) -> None:
        """Raises: what the plan's strategy raises, on rank 0."""
        everyone: list[Any] = [None] * len(self.shares)
        dist.all_gather_object(everyone, self.halo.ranges())
        box: list[Any] = [None, None]
        if self.rank == 0:
            ranges: Mapping[tuple[str, int, int], Any] = {key: value for each in everyone for key, value in each.items()}
            problem = halo_problem(self.training, self.shares, fabric_of(self.plan), ranges)
            strategy = NAMES[AdaQP.name](**self.plan.decisions["halo"]["options"])
            made = strategy.plan(problem, rng=np.random.default_rng(self.plan.seed))
            steps = stated_steps(problem, made, strategy.group)  # type: ignore[attr-defined]
            box[0] = msgspec.json.encode(msgspec.structs.replace(self.job, steps=steps, variance=made.variance))
            box[1] = {"planned": made.variance} | {str(b): problem.variance(problem.uniform(b)) for b in WIDTHS}
        dist.broadcast_object_list(box, src=0)
        self.compared = box[1]
        self.job = msgspec.json.decode(box[0], type=HaloJob)
        self.halo.assign(self.job)

    def accuracy(self) -> float:
        with torch.no_grad(), self.halo.exact():
            out = self.net(self.x, self.halo)
        right = (out.argmax(1) == self.labels)[self.judged].sum()
        both = torch.stack([right, self.judged.sum()]).double()
        dist.all_reduce(both)
        return float(both[0] / max(1.0, float(both[1])))
