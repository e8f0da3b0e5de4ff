"""Generated jobs and layouts: what the gate says of each, and whether what it lets pass trains what a plain loop trains, for several steps.

The loop is written out here and shares with the gate nothing but the model's function, the data and dropout's bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from gate_nets import LOSSES_OF_TOKENS, LOSSES_OF_VECTORS, OPTIMIZERS, of_tokens
from gate_rig import plan_of

from meshwright.capture.forward import trace_forward
from meshwright.capture.losses import Objective
from meshwright.capture.resolve import build_model
from meshwright.errors import DifferentTraining, MeshwrightError
from meshwright.job import Recipe, Training
from meshwright.plan.plan import Plan
from meshwright.run.gate.gate import GateReport, gate
from meshwright.run.gate.planned import RankStep, planned_step
from meshwright.run.gate.wide import wide_graph, wide_layout, wide_program
from meshwright.run.launch.outcome import forward_graph
from meshwright.run.steps.forward_graph import OPAQUE, ForwardGraph
from meshwright.run.tensor.sharding import take_part
from meshwright.run.train.data import Synthetic
from meshwright.run.train.dropout import Draws, SerialDraws, random_places
from meshwright.run.train.masters import MASTER
from meshwright.run.train.optimizers import make_optimizer
from meshwright.run.train.update import AVERAGE

NETS = "tests/run/gate_nets.py:"
STEPS = 3
# What is narrow agrees with a plain loop up to the rounding of eight bits: its loss by this share, the sum of its updates by that of their length.
# A step that is not clipped, scaled or scheduled as asked moves elsewhere by a multiple; Adam turns rounding into updates of full size.
# Where the loop itself is further than that from one in float32, as one that diverges, that distance is allowed (`rounding_alone`).
NARROW_LOSS, NARROW_MOVE, NARROW_MOVE_SGD = 3e-2, 0.7, 0.15
RECIPES: tuple[dict[str, Any], ...] = (
    {"clip_norm": 0.3}, {"clip_value": 0.02}, {"schedule": "linear:steps=10,warmup=2,end=0.1"}, {"no_decay": ("bias",)}, {"ema": 0.9},
    {"clip_norm": 0.3, "schedule": "StepLR:step_size=1,gamma=0.5"}, {"batch_statistics": "global"}, {"batch_statistics": "global", "clip_norm": 0.3},
)  # fmt: skip
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 2, 2), (1, 1, 3))


@dataclass(frozen=True)
class Combination:
    net: str
    loss: str
    optimizer: str
    degrees: tuple[int, int, int]
    how: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = "".join(f", {k} {v}" for k, v in self.how.items())
        return f"{self.net}, {self.loss}, {self.optimizer}, data {self.degrees[0]} x tensor {self.degrees[1]} x pipeline {self.degrees[2]}{how}"


@dataclass(frozen=True)
class Verdict:
    """`outcome`: "equal", "refused" (`why`: the error and its cause), or what must not be: "unexplained" (refused without a cause, so a fault of the
    plan), "different" (and let pass). `error`: of an equal one's later steps."""

    outcome: str
    why: str = ""
    error: float = 0.0


def draw(number: int, *, nets: int = 400, recipes: bool = False, narrow: bool = False) -> Combination:
    """Half of the optimizers and losses are plain ones, so that most combinations train. `recipes`: two of three have one. `narrow`: a third each
    have weights of bfloat16 or are cast to it, half of all keep averages, whatever their recipe."""
    r = random.Random(10_000 + number)
    net = r.randrange(nets)
    losses = LOSSES_OF_TOKENS if of_tokens(net) else LOSSES_OF_VECTORS
    loss = losses[0] if r.random() < 0.3 else r.choice(losses)
    optimizer = r.choice(OPTIMIZERS[:3]) if r.random() < 0.6 else r.choice(OPTIMIZERS)
    degrees = r.choice(LAYOUTS)
    how: dict[str, Any] = {"microbatch": r.choice([1, 2, 4]) if degrees[0] < 4 else r.choice([1, 2])}
    if degrees[0] > 1 and r.random() < 0.5:
        how["zero"] = r.randint(1, 3)
    if r.random() < 0.3:
        how["recompute"] = r.choice(["selective", "full", "least"])
    if recipes and (r := random.Random(20_000 + number)).random() < 2 / 3:
        how["recipe"] = recipe = r.choice(RECIPES)
        if "no_decay" in recipe:
            optimizer = "adamw:weight_decay=0.1"
        if "batch_statistics" in recipe:  # of the whole batch: one micro-batch in each replica
            how["microbatch"] = 8 // degrees[0]
    kind = "net"
    if narrow:
        r = random.Random(30_000 + number)
        precision, ema = r.choice(["fp32", "bf16-autocast", "masters"]), r.random() < 0.5
        kind = "narrow" if precision == "masters" else kind
        more = ({"precision": precision} if precision == "bf16-autocast" else {}) | ({"ema": 0.9} if ema else {})
        if more:
            how["recipe"] = how.get("recipe", {}) | more
    return Combination(f"{kind}_{net}", loss, optimizer, degrees, how)


def judge(c: Combination) -> Verdict:
    """Plans, asks the gate, and trains on where it says equal."""
    try:
        asked = c.how.get("recipe", {})
        how = {**c.how, "recipe": Recipe(**asked) if asked else None, "shared": "batch_statistics" in asked and c.degrees[0] > 1}
        plan = plan_of(c.net, c.degrees, models=NETS, loss=c.loss, optimizer=c.optimizer, rate=0.05, **how)
        report = gate(plan, data="synthetic")
    except DifferentTraining as error:
        cause = error.data["cause"]
        return Verdict("refused" if cause != "operator" else "unexplained", f"DifferentTraining: {cause}")
    except MeshwrightError as error:
        return Verdict("refused", f"{type(error).__name__}: {error.data.get('cause') or error.message.partition(';')[0][:90]}")
    if report.why_not:
        return Verdict("refused", report.why_not)
    apart = apart_from_a_plain_loop(plan, report)
    narrow = c.net.startswith("narrow") or "precision" in asked
    allowed = 1e-6 if report.precision == "float64" else 1.0 if narrow else 5e-3  # of a narrow one, relative to what is allowed
    return Verdict("equal" if apart <= allowed else "different", report.precision, apart)


def apart_from_a_plain_loop(plan: Plan, report: GateReport) -> float:
    """The largest error of losses and parameters after `STEPS` steps, relative to the largest entry."""
    job, layout = msgspec.convert(plan.job["training"], Training), plan.layout
    assert layout is not None
    graph, program, dtype = forward_graph(plan, layout), plan.main, torch.float32
    source = build_model(job.model, device="cpu", seed=job.seed)
    places = list(random_places(graph).values())
    if report.precision == "float64":
        graph, program, layout, dtype = wide_graph(graph), wide_program(program, layout), wide_layout(layout), torch.float64
        source.module.double()
    opaque = opaque_call(job, graph, layout.microbatch_size)  # its function takes the parameters as they are, doubles too
    dataset = Synthetic(source.examples, job.seed)

    def rows(first: int, count: int) -> list[torch.Tensor]:
        columns = zip(*(dataset.sample(first + i) for i in range(count)), strict=True)
        return [x.to(dtype) if x.is_floating_point() and dtype == torch.float64 else x for x in map(torch.stack, map(list, columns))]

    class Data:
        def microbatch(self, step: int, replica: int, microbatch: int) -> list[torch.Tensor]:
            return rows(step * layout.global_batch + layout.first_sample(replica, microbatch), layout.microbatch_size)

    parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in source.module.named_parameters()}
    held = next(iter(parameters.values())).dtype
    planned = planned_step(
        program, layout, graph, job, parameters=parameters, buffers=dict(source.module.named_buffers()), data=Data(), seed=plan.seed,
        dtype=held if held == torch.bfloat16 else dtype, opaque=opaque, steps=STEPS,
    )  # fmt: skip
    plain = plain_loop(job, source.module, rows, plan.seed, places)
    last = [x.loss for r, x in enumerate(planned) if x.loss is not None and layout.coordinates(r)[2] == 0]
    worst = abs(sum(last) / len(last) - plain.losses[-1]) / abs(plain.losses[-1])
    kept: list[tuple[str, dict[str, torch.Tensor]]] = [(AVERAGE, plain.averages)] if job.asked.ema else []
    if held == torch.bfloat16 or job.asked.precision != "fp32":
        first = {n: p.float() for n, p in parameters.items()}
        kept.append((MASTER, plain.masters) if held == torch.bfloat16 else ("", plain.masters))
        move = NARROW_MOVE_SGD if "sgd" in job.optimizer else NARROW_MOVE
        moved = max(moved_apart(planned, layout, key, own, first) for key, own in kept)
        if worst > NARROW_LOSS or moved > move:  # a loop that diverges makes rounding grow
            limits = rounding_alone(job, rows, plan.seed, places, plain, first)
            return max(worst / max(NARROW_LOSS, limits[0]), moved / max(move, limits[1]))
        return max(worst / NARROW_LOSS, moved / move)
    if dtype == torch.float64:  # in float32 Adam makes full steps of gradients that are rounding alone
        worst = max(worst, *(furthest(planned, layout, key, settled(own, source.module)) for key, own in [("", plain.masters), *kept]))
    return worst


def rounding_alone(
    job: Training, rows: Any, seed: int, places: Any, plain: Plain, first: dict[str, torch.Tensor]
) -> tuple[float, float]:  # fmt: skip
    """How far the plain loop is from the same loop in float32: of its last loss, and of what moved, relative to how far that moved."""
    exact = msgspec.structs.replace(job, recipe=msgspec.structs.replace(job.asked, precision="fp32"))
    module = build_model(job.model, device="cpu", seed=job.seed).module.float()
    wide = plain_loop(exact, module, lambda a, n: [x.float() if x.is_floating_point() else x for x in rows(a, n)], seed, places)
    apart = sum(float((wide.masters[n] - p).square().sum()) for n, p in plain.masters.items())
    moved = sum(float((p - first[n]).detach().square().sum()) for n, p in plain.masters.items())
    return abs(wide.losses[-1] - plain.losses[-1]) / abs(plain.losses[-1]), (apart / moved) ** 0.5


def settled(own: dict[str, torch.Tensor], module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Without what a gradient that is zero but for rounding (a key's bias) moves: its sign is chance, and some optimizers follow the sign."""
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in gradients.values())
    return own | {n: torch.where(g.abs() > 1e-12 * largest, own[n], torch.nan) for n, g in gradients.items() if n in own}


def pairs(planned: list[RankStep], layout: Any, key: str, own: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(what a rank holds, the same elements of the plain loop's); `key`: of what the recipe keeps, nothing for the parameters themselves."""
    shards = {s.param: s for s in layout.shards}
    for rank, step in enumerate(planned):
        for held in step.recipe.get(key, []) if key else step.parameters:
            if held.name not in own:
                continue
            shard, whole = shards.get(held.name), own[held.name]
            part = take_part(whole, shard.axis, shard, layout.coordinates(rank)[2], layout.tensor) if shard else whole
            yield held.values, part.reshape(-1)[held.first : held.first + held.values.numel()]


def furthest(planned: list[RankStep], layout: Any, key: str, own: dict[str, torch.Tensor]) -> float:
    """The largest error of an element, relative to the largest entry."""
    worst, seen = 0.0, 0
    for found, mine in pairs(planned, layout, key, own):
        known, seen = mine[~mine.isnan()], seen + 1
        if known.numel():
            worst = max(worst, float((known - found[~mine.isnan()]).abs().max()) / float(known.abs().max()))
    assert seen, f"no rank keeps {key or 'parameters'}"
    return worst


def moved_apart(planned: list[RankStep], layout: Any, key: str, own: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> float:
    """How far all elements together are from the plain loop's, relative to how far that moved them."""
    apart = moved = 0.0
    for (found, mine), (_, before) in zip(pairs(planned, layout, key, own), pairs(planned, layout, key, {n: first[n] for n in own}), strict=True):
        apart += float((found.float() - mine).detach().square().sum())
        moved += float((mine - before).detach().square().sum())
    assert moved, f"no rank keeps {key or 'parameters'}, or nothing moved"
    return (apart / moved) ** 0.5


def opaque_call(job: Training, graph: ForwardGraph, rows: int) -> Any:
    """What runs an opaque model; modules that are kept whole become known by tracing."""
    opaque = any(n.target == OPAQUE for n in graph.nodes)
    traced = trace_forward(job.model, loss=job.loss, batch_size=rows, seed=job.seed, device="cpu", opaque=opaque)
    return next(n.target for n in traced.graph_module.graph.nodes if n.op == "call_function") if opaque else None


@dataclass
class Plain:
    """`masters`: trained parameters, in float32 where they are narrow; `averages` of them."""

    losses: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)


def plain_loop(job: Training, module: torch.nn.Module, rows: Any, seed: int, places: Any) -> Plain:
    """Whole batches, one after the other."""
    objective, asked, found = Objective(module, job.loss), job.asked, Plain()
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    narrow = any(p.dtype == torch.bfloat16 for _, p in named)
    masters = [(n, torch.nn.Parameter(p.detach().float().clone())) for n, p in named] if narrow else named
    if asked.no_decay:
        groups = [{"params": [p for n, p in masters if ("bias" in n) == kept], **decay}
                  for kept, decay in ((False, {}), (True, {"weight_decay": 0.0}))]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=job.learning_rate, weight_decay=0.1)
    else:
        optimizer = make_optimizer(job.optimizer, masters, job.learning_rate)
    rate: Any = None
    if asked.schedule:  # written out: two steps up, eight down to a tenth; or halved after each step
        warm = asked.schedule.startswith("linear")
        shape = (lambda s: s / 2 if s < 2 else 1 - 0.9 * (s - 2) / 8) if warm else (lambda s: 0.5**s)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    weights = torch.nn.ParameterList(p for _, p in masters)
    average: Any = None
    if asked.ema:
        average = torch.optim.swa_utils.AveragedModel(weights, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(asked.ema))
    for step in range(STEPS):
        module.zero_grad()
        draws = Draws(seed=seed, step=step, first=step * job.global_batch, samples=job.global_batch)
        cast = torch.autocast("cpu", dtype=torch.bfloat16) if asked.precision == "bf16-autocast" else nullcontext()
        with SerialDraws(draws, places) if places else nullcontext(), cast:
            loss = objective(*rows(step * job.global_batch, job.global_batch))
        loss.backward()
        for (_, p), (_, q) in zip(named, masters, strict=True) if narrow else ():
            q.grad = None if p.grad is None else p.grad.float()
        if asked.clip_norm:
            torch.nn.utils.clip_grad_norm_(weights.parameters(), asked.clip_norm)
        if asked.clip_value:
            torch.nn.utils.clip_grad_value_(weights.parameters(), asked.clip_value)
        optimizer.step()
        with torch.no_grad():
            for (_, p), (_, q) in zip(named, masters, strict=True) if narrow else ():
                p.copy_(q)
        if average is not None:
            average.update_parameters(weights)
        if rate is not None:
            rate.step()
        found.losses.append(float(loss.detach()))
    found.masters = {n: p.detach().clone() for n, p in masters}
    if average is not None:
        found.averages = {n: p.detach() for (n, _), p in zip(masters, average.module.parameters(), strict=True)}
    return found
