"""Rank bodies for the tests of traffic under DDP: each runs in its own process."""

from __future__ import annotations

import datetime
import json
import math
import os
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright.drive.traffic import plan_traffic
from meshwright.errors import MeshwrightError
from meshwright.probe.traffic.settled_plan import settled_plan
from meshwright.probe.traffic.steps import measure_traffic
from meshwright.run.traffic import PlannedTraffic, traffic_hook
from meshwright.run.traffic.agreement import digest
from meshwright.run.traffic.exchange import add_up, gather
from meshwright.torch import measured_traffic, traffic_in_training
from meshwright.traffic import CodecCost, Curve, GradientTensor, TrafficProfile

FREE = Curve(sizes=(0,), times_ns=(0,))


class Net(nn.Module):
    """Odd sizes, a parameter used twice, and one that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(7, 11), nn.Linear(11, 11, bias=False), nn.Linear(11, 3)
        self.spare = nn.Linear(11, 11)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = self.shared(torch.tanh(self.shared(torch.relu(self.first(x)))))
        return self.last(self.spare(x) if spare else x)


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def profile_of(module: nn.Module, ranks: int, *codecs: str) -> TrafficProfile:
    named = list(module.named_parameters())[::-1]
    tensors = tuple(GradientTensor(name=n, shape=tuple(p.shape), ready_ns=i) for i, (n, p) in enumerate(named, 1))
    costs = tuple(CodecCost(codec=c, encode=FREE, exchange=FREE, decode=FREE, payload_bytes=(0,) * len(named)) for c in codecs)
    return TrafficProfile(tensors=tensors, codecs=costs, ranks=ranks)


def inputs(rank: int, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(5, 7, generator=generator), torch.randn(5, 3, generator=generator)


class Joined:
    """The default process group of one test case."""

    def __init__(self, rank: int, world: int, store: str) -> None:
        self.arguments = {"store": dist.FileStore(store, world), "rank": rank, "world_size": world, "timeout": datetime.timedelta(seconds=30)}

    def __enter__(self) -> None:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", **self.arguments)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def train(rank, _, world, store, plan, steps, more=None, resume=None):
    """Weights after every step, and the traffic state; `plan` None: DDP alone. `more`: spare (which ranks use the spare layer), micro, view."""
    spare, micro, view = ((more or {}).get(k, v) for k, v in (("spare", "all"), ("micro", 1), ("view", False)))
    with Joined(rank, world, store):
        net = make_net()
        if resume is not None:
            net.load_state_dict(resume[0])
        ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=spare != "all", gradient_as_bucket_view=view, bucket_cap_mb=0.001)
        traffic = None
        if plan is not None:
            traffic = PlannedTraffic(ddp, plan, deadline_s=20)
            ddp.register_comm_hook(traffic, traffic_hook)
            if resume is not None:
                traffic.load_state_dict(resume[1])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        weights = []
        for step in range(0 if resume is None else resume[2], steps):
            used = {"all": True, "none": False, "some": (rank + step) % 2 == 0}[spare]
            for m in range(micro):
                x, y = inputs(rank, step, m)
                last = m == micro - 1
                if last:
                    nn.functional.mse_loss(ddp(x, used), y).backward()
                else:
                    with ddp.no_sync():
                        nn.functional.mse_loss(ddp(x, used), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append({k: v.clone() for k, v in net.state_dict().items()})
        spans = [] if traffic is None else traffic.measured
        state = None if traffic is None else traffic.state_dict()
        if traffic is not None:
            traffic.close()
        del ddp, traffic  # torch's reducer joins the group's threads when it goes, and must not be the last to hold the group
        return weights, state, len(spans)


def refused(rank, _, world, store, plans, case):
    """The error's code, message and data that this rank meets."""
    with Joined(rank, world, store):
        net = make_net()
        ddp = nn.parallel.DistributedDataParallel(net)
        try:
            traffic = PlannedTraffic(ddp, plans[rank], deadline_s=20)
            ddp.register_comm_hook(traffic, traffic_hook)
            x, y = inputs(rank, 0)
            if case == "nan" or case == f"nan on {rank}":
                x[0, 0] = float("nan")
            if case == "twice":  # as a reentrant checkpoint does
                net.first.bias.register_post_accumulate_grad_hook(traffic.arrive)
            nn.functional.mse_loss(ddp(x, True), y).backward()
        except Exception as error:
            return getattr(error, "code", type(error).__name__), str(error), getattr(error, "data", {})
        return "ok", "", {}


def owed_by(traffic):
    """What was not sent, by tensor, from what a checkpoint would hold."""
    state, found = traffic.state_dict(), {}
    for name, group in json.loads(state["meshwright"])["groups"].items():
        pieces = state[f"{name}/residual"].split([math.prod(shape) for _, shape in group["tensors"]])
        found |= dict(zip((n for n, _ in group["tensors"]), pieces, strict=True))
    return found


def killed(rank, _, world, store, plan, folder):
    """Rank 1 dies between encoding and sending its second step; the others write down what they met."""
    with Joined(rank, world, store):
        net = make_net()
        ddp = nn.parallel.DistributedDataParallel(net)
        traffic = PlannedTraffic(ddp, plan, deadline_s=10)
        ddp.register_comm_hook(traffic, traffic_hook)
        before = {}
        try:
            for step in range(2):
                if step == 1:
                    before = owed_by(traffic)
                    if rank == 1:
                        traffic._exchange.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                x, y = inputs(rank, step)
                nn.functional.mse_loss(ddp(x, True), y).backward()
        except Exception as error:
            after = owed_by(traffic)
            owed = {n: after[n] - before[n] - net.get_parameter(n).grad.flatten() for n in after}
            wrong = max(float(v.abs().max()) for v in owed.values())
            met = {"code": getattr(error, "code", type(error).__name__), "data": getattr(error, "data", {}), "wrong": wrong}
            (Path(folder) / f"{rank}.json").write_text(json.dumps(met))
        traffic.close()
        del ddp, traffic


def sharded(rank, _, world, store, codec, steps):
    """Losses under FSDP2, compressed or (codec None) as it is, and the mass that is still owed at the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from meshwright.run.traffic.fsdp import compress_fsdp

    with Joined(rank, world, store):
        net = make_net()
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(net.shared, mesh=mesh)
        fully_shard(net, mesh=mesh)
        made = [] if codec is None else compress_fsdp(net, codec)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        losses = []
        for step in range(steps):
            x, y = inputs(rank, step)
            loss = nn.functional.mse_loss(net(x, True), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [m.step for m in made], sum(float(s["residual"].abs().sum()) for m in made for s in m.states if "residual" in s)


def replanned(rank, _, world, store, plans, other):
    """A run that goes over to the second plan after two steps: what it owed before and after, what `other` (per rank) was refused with, and the
    weights at the end."""
    with Joined(rank, world, store):
        net = make_net()
        ddp = nn.parallel.DistributedDataParallel(net)
        traffic = PlannedTraffic(ddp, plans[0], deadline_s=20)
        ddp.register_comm_hook(traffic, traffic_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        owed, met = [], ""
        for step in range(4):
            if step == 2:
                owed.append(owed_by(traffic))
                try:
                    traffic.use(other[rank])
                except Exception as error:
                    met = getattr(error, "code", type(error).__name__)
                traffic.use(plans[1])
                owed.append(owed_by(traffic))
            x, y = inputs(rank, step)
            nn.functional.mse_loss(ddp(x, True), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = {k: v.clone() for k, v in net.state_dict().items()}
        traffic.close()
        del ddp, traffic
        return owed, met, weights


def measured(rank, _, world, store, codecs):
    """What `measure_traffic` finds, which gradients it leaves, and a step's gradients behind it: left to DDP, and by a plan without codecs."""
    with Joined(rank, world, store):
        return _measured(rank, codecs)  # DDP must be gone before the group


def _measured(rank, codecs):
    net = make_net()
    ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    x, y = inputs(rank, 0)

    def step():
        nn.functional.mse_loss(ddp(x, False), y).backward()

    found = measure_traffic(ddp, step, codecs, repeats=1, deadline_s=20)
    left = [n for n, p in net.named_parameters() if p.grad is not None]
    gradients = []
    for plan in (None, plan_traffic(found.profile, strategy="one-group", codecs=["none"])):
        if plan is not None:
            found.state.use(plan)
        net.zero_grad()
        step()
        gradients.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
    settled, plan = settled_plan(found, ["topk:density=0.2"])
    try:
        settled_plan(found, ["dgc"])  # was not measured
    except MeshwrightError as error:
        refused = error.code
    found.state.close()
    return found.profile, found.probes, left, gradients, (settled.probes[-1], plan, refused)


def one_call(rank, _, world, store, save):
    """Whether `measured_traffic` left gradients to DDP, its plan's digest and the step's gradients behind it; or the code of what it raised."""
    with Joined(rank, world, store):
        return _one_call(rank, save)


def _one_call(rank, save):
    net = make_net()
    ddp = nn.parallel.DistributedDataParallel(net)
    x, y = inputs(rank, 0)
    try:
        state = measured_traffic(ddp, lambda: nn.functional.mse_loss(ddp(x, True), y).backward(), codecs=["fp16"], save=save, deadline_s=20)
    except MeshwrightError as error:
        return error.code, b"", {}
    nn.functional.mse_loss(ddp(x, True), y).backward()
    state.close()
    return state.plan.leave, digest(state.plan), {n: p.grad.clone() for n, p in net.named_parameters()}


class Fixed(nn.Module):
    """Its gradients are what its input is, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(s) for s in ((24, 16), (16,), (16, 20), (20,), (20, 9)))

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def planned_while_training(rank, _, world, store, codecs, steps):
    """When the plan was settled, its digest, the steps that it took, by how much a weight is off the sum of all gradients less what is owed,
    and how many plans were timed."""
    with Joined(rank, world, store):
        return _planned_while_training(rank, world, codecs, steps)


def _planned_while_training(rank, world, codecs, steps):
    net = Fixed()
    ddp = nn.parallel.DistributedDataParallel(net)
    try:
        planner = traffic_in_training(ddp, codecs=codecs, steps=steps, deadline_s=20)
    except MeshwrightError as error:
        return error.code
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    total = [torch.zeros_like(p) for p in net.parameters()]
    settled = []
    for step in range(steps + 2):
        settled.append(planner.done)
        made = [[torch.randn(p.shape, generator=torch.Generator().manual_seed(97 * step + r)) for p in net.parameters()] for r in range(world)]
        for into, *parts in zip(total, *made, strict=True):
            into += sum(parts) / world
        if step % 5 == 4:  # an evaluation and an accumulated step in between count for nothing
            with torch.no_grad():
                ddp(made[rank])
            with ddp.no_sync():
                ddp([g / 2 for g in made[rank]]).backward()
                made[rank] = [g / 2 for g in made[rank]]
        ddp(made[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = planner.state.state_dict()
    owed = {n: torch.zeros(p.shape) for n, p in net.named_parameters()}
    for name, group in json.loads(state["meshwright"])["groups"].items():
        if f"{name}/residual" in state:
            pieces = state[f"{name}/residual"].split([math.prod(shape) for _, shape in group["tensors"]])
            owed |= {n: piece.view(shape) for (n, shape), piece in zip(group["tensors"], pieces, strict=True)}
    off = []
    for (name, p), sent in zip(net.named_parameters(), total, strict=True):
        dist.all_reduce(owed[name])
        off.append(float((sent - owed[name] / world + p.detach()).abs().max()))
    planner.state.close()
    return settled.index(True), digest(planner.plan), planner.made, max(off), len(planner.found)


def exchanged(rank, _, world, store, counts, lengths):
    """Sums of so many numbers, and payloads of such lengths of all ranks."""
    with Joined(rank, world, store):
        sums = [(torch.arange(n) % 100 + rank).float() for n in counts]
        for values in sums:
            add_up(values, None)
        wires = [gather(((torch.arange(n) + rank) % 251).to(torch.uint8), None) for n in lengths]
        return sums, wires
