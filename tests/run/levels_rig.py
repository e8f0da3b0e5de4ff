"""Training steps of a planned layout with data-parallel sharding on real ranks, and the same steps in one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tensor_rig import SEED, Case, _Counting, _Fixed, comm_of, whole_case

from meshwright.capture.losses import Objective
from meshwright.plan.shards import local_values
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.memory import RankMemory
from meshwright.run.steps.forward_graph import ForwardGraph
from meshwright.run.steps.storage_peak import peak_of
from meshwright.run.tensor.sharding import take_part
from meshwright.run.train.dropout import Draws, SerialDraws, random_places
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.segments import RankModule, build_rank_module
from meshwright.run.train.work import TrainingWork, gradient_bytes

CPU = torch.device("cpu")


@dataclass
class Trained:
    """What a rank ends with. `weights`: (parameter, first element, flat values); `sent`: bytes of each step by communicator."""

    losses: list[float | None]
    weights: list[tuple[str, int, torch.Tensor]]
    sent: list[dict[str, int]]
    state_bytes: int
    peak_bytes: int
    kept: list[str]


def rank_of(case: Case, rank: int, optimizer: str) -> tuple[RankModule, Any, RankMemory, TrainingWork]:
    whole = {n: torch.nn.Parameter(p, requires_grad=n not in case.frozen) for n, p in case.parameters.items()}
    sizes = gradient_bytes(case.program, rank)
    module = build_rank_module(ForwardGraph.from_json(case.graph), case.layout, rank, whole, case.buffers, device=CPU, gradient_bytes=sizes)
    made = make_optimizer(optimizer, [(p.name, t) for p, t, _ in module.updated()], 0.01)
    work = TrainingWork(case.program, case.layout, rank, module, _Fixed(case), made, seed=SEED)
    return module, made, RankMemory(case.program, rank, CPU, local_values(case.layout, rank), module.flats, layout=case.layout), work


def train(rank: int, group: Any, case: Case, steps: int, optimizer: str = "adamw", measure: bool = False) -> Trained:
    """On a rank. `measure`: the peak of live tensor storage in the last step."""
    module, made, memory, work = rank_of(case, rank, optimizer)
    transport = _Counting(group)
    executor = Executor(case.program, case.orders, rank, memory=memory, transport=transport, work=work)
    tags = case.program.channels.tag.tolist()
    found = Trained([], [], [], 0, 0, [])

    def one(step: int) -> None:
        transport.bytes.clear()
        work.begin(step)
        executor.run()
        sent: Counter[str] = Counter()
        for channel, size in transport.bytes.items():
            sent[comm_of(case, tags[channel])] += size
        found.sent.append(dict(sent))
        found.losses.append(work.loss())

    for step in range(steps - measure):
        one(step)
    if measure:
        states = [v for s in made.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        live = [t for _, t, _ in module.kept()] + [*module.flats.values(), *states]
        live += [t for free in memory.staging.free.values() for t in free] + [f for f in memory.flats if f is not None]
        found.peak_bytes = peak_of(lambda: one(steps - 1), live)
    for p, tensor, piece in module.kept():
        found.weights.append((p.name, piece.first if piece else 0, tensor.detach().reshape(-1).clone()))
    tensors = [v for s in made.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    found.state_bytes = sum(t.numel() * t.element_size() for t in tensors)
    found.kept = sorted(name for name, _, _ in found.weights)
    assert all(x is None for b, x in enumerate(memory.flats) if (i := memory.infos[b]) is not None and i.kind), "a value outlived the step"
    return found


def serial(case: Case, name: str, steps: int, optimizer: str = "adamw") -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, parameters) of plain eager training, micro-batch by micro-batch."""
    module, batch = whole_case(name, case.layout.global_batch, case.loss, case.model.rpartition(":")[0] + ":")
    objective = Objective(module, case.loss)
    made = make_optimizer(optimizer, list(module.named_parameters()), 0.01)
    rows = case.layout.microbatch_size
    count = case.layout.global_batch // rows
    places = list(random_places(ForwardGraph.from_json(case.graph)).values())
    losses = []
    for step in range(steps):
        made.zero_grad()
        total = 0.0
        for i in range(count):
            draws = Draws(seed=SEED, step=step, first=step * case.layout.global_batch + i * rows, samples=rows)
            with SerialDraws(draws, places):
                loss = objective(*(x[i * rows : (i + 1) * rows] for x in batch)) / count
            loss.backward()
            total += float(loss.detach())
        made.step()
        losses.append(total)
    return losses, {n: p.detach() for n, p in module.named_parameters()}


def same_as_serial(case: Case, found: list[Trained], expected: tuple[list[float], dict[str, torch.Tensor]], tolerance: float = 1e-9) -> float:
    """The largest error of losses and weights, relative to the largest entry; every element of every parameter is held by some rank."""
    losses, parameters = expected
    lay = case.layout
    shards = {s.param: s for s in lay.shards}
    worst = 0.0
    by_replica = {lay.coordinates(r)[:2]: t.losses for r, t in enumerate(found) if t.losses[0] is not None}  # and by copy of the last stage
    for step, loss in enumerate(losses):
        mean = sum(x[step] for x in by_replica.values()) / len(by_replica)
        worst = max(worst, abs(mean - loss) / abs(loss))
    for part in range(lay.tensor):
        seen: dict[str, torch.Tensor] = {}
        for rank, t in enumerate(found):
            if lay.coordinates(rank)[2] != part:
                continue
            for name, first, values in t.weights:
                whole = parameters[name]
                own = take_part(whole, shards[name].axis, shards[name], part, lay.tensor) if name in shards else whole
                have = own.reshape(-1)[first : first + values.numel()]
                assert have.numel() == values.numel(), name
                worst = max(worst, float((have - values).abs().max()) / float(whole.abs().max()))
                seen.setdefault(name, torch.zeros(own.numel(), dtype=torch.bool))[first : first + values.numel()] = True
        assert set(seen) == set(parameters) and all(bool(x.all()) for x in seen.values()), "some elements are held by no rank"
    assert worst <= tolerance, worst
    return worst

