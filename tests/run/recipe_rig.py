"""Training by a recipe on real ranks, with checkpoints between, and the same by a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from levels_rig import CPU
from tensor_rig import SEED, Case, _Counting, _Fixed, comm_of, whole_case

from meshwright.capture.losses import Objective
from meshwright.job import Recipe, Training
from meshwright.plan.plan import CycleEntry, Plan
from meshwright.plan.shards import local_values
from meshwright.run.checkpoint.checkpoint import load_rank, make_index, save_rank
from meshwright.run.checkpoint.index import CheckpointIndex, SavedRank
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.memory import RankMemory
from meshwright.run.steps.forward_graph import ForwardGraph
from meshwright.run.tensor.sharding import take_part
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.update import AVERAGE, make_update
from meshwright.run.train.work import TrainingWork, gradient_bytes


def job_of(case: Case, optimizer: str, learning_rate: float = 0.01, **recipe: Any) -> Training:
    asked = Recipe(**recipe) if recipe else msgspec.UNSET
    return Training(
        model=case.model, global_batch=case.layout.global_batch, loss=case.loss, optimizer=optimizer, learning_rate=learning_rate, recipe=asked
    )


def plan_of(case: Case, job: Training) -> Plan:
    return Plan(
        kind="training", job={"training": msgspec.to_builtins(job)}, target_fabric={}, placement=tuple(f"d{r}" for r in range(case.layout.ranks)),
        programs={"p": case.program}, cycle=(CycleEntry(program="p"),), decisions={}, layout=case.layout,
    )  # fmt: skip


@dataclass
class Ended:
    """What a rank ends with, by (parameter, first element): weights and averages, flat; rates by step; bytes sent by communicator in each step."""

    losses: list[float | None]
    weights: dict[tuple[str, int], torch.Tensor]
    averages: dict[tuple[str, int], torch.Tensor]
    rates: list[list[float]]
    sent: list[dict[str, int]]
    norms: list[float]
    saved: SavedRank | None = None


def train(
    rank: int, group: Any, case: Case, job: Training, first: int, steps: int, to: str = "", source: tuple[str, CheckpointIndex] | None = None,
    change: Callable[[Any, int], None] | None = None,
) -> Ended:  # fmt: skip
    """On a rank: steps `first` to `steps`, from a checkpoint in a folder, into one. `change` is told the module before each step."""
    whole = {n: torch.nn.Parameter(p.clone(), requires_grad=n not in case.frozen) for n, p in case.parameters.items()}
    sizes = gradient_bytes(case.program, rank)
    graph = ForwardGraph.from_json(case.graph)
    module = build_rank_module(
        graph, case.layout, rank, whole, case.buffers, device=CPU, gradient_bytes=sizes, precision=job.asked.autocast
    )
    trained = {n: p for n, p in whole.items() if p.requires_grad}
    update = make_update(job, [(p.name, t) for p, t, _ in module.updated()], whole=trained)
    if source is not None:
        folder, index = source
        load_rank(Path(folder), index, rank, module, update, plan_of(case, job))
        update.resume(index.scalars, index.step)
    work = TrainingWork(case.program, case.layout, rank, module, _Fixed(case), update, seed=SEED)
    memory = RankMemory(case.program, rank, CPU, local_values(case.layout, rank), module.flats, layout=case.layout)
    transport = _Counting(group)
    executor = Executor(case.program, case.orders, rank, memory=memory, transport=transport, work=work)
    tags = case.program.channels.tag.tolist()
    ended = Ended([], {}, {}, [], [], [])
    for step in range(first, steps):
        transport.bytes.clear()
        ended.rates.append([g["lr"] for g in update.param_groups])
        if change is not None:
            change(module, step)
        work.begin(step)
        executor.run()
        ended.losses.append(work.loss())
        if case.layout.step_end.norm:
            ended.norms.append(float(work.norm.total))
        sent: dict[str, int] = {}
        for channel, size in transport.bytes.items():
            name = comm_of(case, tags[channel])
            sent[name] = sent.get(name, 0) + size
        ended.sent.append(sent)
    for p, tensor, piece in module.kept():
        ended.weights[p.name, piece.first if piece else 0] = tensor.detach().reshape(-1).clone()
    for p, tensor, piece in module.updated():
        if AVERAGE in update.state[tensor]:
            ended.averages[p.name, piece.first if piece else 0] = update.state[tensor][AVERAGE].reshape(-1).clone()
    if to:
        ended.saved = save_rank(Path(to), rank, module, update, case.layout, [])
    return ended


def checkpoint(case: Case, job: Training, step: int, found: list[Ended]) -> CheckpointIndex:
    """The index of what the ranks saved, as a file gives it."""
    index = make_index(plan_of(case, job), step, "d", [], [x.saved for x in found if x.saved is not None])
    return msgspec.json.decode(msgspec.json.encode(index), type=CheckpointIndex)


@dataclass
class Plain:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]
    rates: list[list[float]]


def plain(
    case: Case, name: str, steps: int, make: Callable[[torch.nn.Module], tuple[torch.optim.Optimizer, Any, Any]],
    clip: Callable[[torch.nn.Module], Any] = lambda module: None, dtype: torch.dtype | None = None, scaler: Any = None,
) -> Plain:  # fmt: skip
    """A plain loop. `make(module)`: (optimizer, scheduler or None, AveragedModel or None). `dtype`: of autocast; `scaler`: a GradScaler."""
    module, batch = whole_case(name, case.layout.global_batch, case.loss, case.model.rpartition(":")[0] + ":")
    objective = Objective(module, case.loss)
    optimizer, scheduler, average = make(module)
    found = Plain([], {}, {}, [])
    for _ in range(steps):
        found.rates.append([g["lr"] for g in optimizer.param_groups])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext():
            loss = objective(*batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip(module)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if average is not None:
            average.update_parameters(module)
        if scheduler is not None:
            scheduler.step()
        found.losses.append(float(loss.detach()))
    found.weights = {n: p.detach() for n, p in module.named_parameters()}
    found.averages = {n: p.detach() for n, p in average.module.named_parameters()} if average is not None else {}
    return found


def worst(case: Case, found: list[Ended], expected: Plain) -> float:
    """The largest error of losses, weights and averages, relative to the largest entry. Every element is held by some rank."""
    lay, shards = case.layout, {s.param: s for s in case.layout.shards}
    error = 0.0
    by_copy = {lay.coordinates(r)[:2]: x.losses for r, x in enumerate(found) if x.losses and x.losses[0] is not None}
    for step, loss in enumerate(expected.losses):
        error = max(error, abs(sum(x[step] for x in by_copy.values()) / len(by_copy) - loss) / abs(loss))
    for kind in ("weights", "averages"):
        whole = getattr(expected, kind)
        for part in range(lay.tensor):
            seen: dict[str, torch.Tensor] = {}
            for rank, ended in enumerate(found):
                for (name, first), values in getattr(ended, kind).items() if lay.coordinates(rank)[2] == part else ():
                    own = take_part(whole[name], shards[name].axis, shards[name], part, lay.tensor) if name in shards else whole[name]
                    have = own.reshape(-1)[first : first + values.numel()]
                    error = max(error, float((have - values).abs().max()) / float(whole[name].abs().max()))
                    seen.setdefault(name, torch.zeros(own.numel(), dtype=torch.bool))[first : first + values.numel()] = True
            assert set(seen) == set(whole) and all(bool(x.all()) for x in seen.values())
    return error
