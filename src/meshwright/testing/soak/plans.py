"""Plans of every kind and their mutants, in turn: collectives, pipelines, filled pipelines, training steps with their layouts, memory steps, arenas.

A case says of itself: `kind`, `plan`, `operator`, `what`, and two functions: `verdict` (the checkers' status, and what they say) and `same` (the
independent rule of `same`). Plans are small, so that a minute sees many; which of them, and where an operator strikes, is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ...arena import ArenaProblem, rows
from ...check.arena import check_arena
from ...check.training.step_memory import check_step_plan
from ...check.verdict import Verdict
from ...decide.collective import NAMES, CollectiveProblem
from ...decide.memory import STRATEGIES as MEMORY
from ...decide.pipeline import STRATEGIES, PipelineProblem, Schedule
from ...decide.pipeline.fill_work import checkpoint_work, evaluation_work, gradient_work
from ...drive.claims import check_claims
from ...drive.collective.job import plan_collective
from ...drive.pipeline.fill import fill_plan
from ...drive.pipeline.pipelines import plan_pipeline
from ...errors import Infeasible, TimeLimit, Unsupported, UsageError
from ...graph.step_graph import StepPlan
from ...io.fabric.name import load_fabric
from ...plan.plan import Plan
from ...program.hash import program_hash
from ...program.program import Program
from ..mutate import OPERATORS, mutate
from ..steps import random_step_graph
from .labels import LABELS, LAYOUTS, claims_of
from .same import arena_is_right, fill_order, is_collective, same_use, step_is_right

__all__ = ["mutants_of_plans"]

Rng = np.random.Generator
Case = dict[str, Any]
LABEL_SHARE = 0.25  # of the mutants of a plan, so many change what it says and not what it does


def mutants_of_plans(rng: Rng) -> Generator[Case, None, None]:
    """Without end, one of each kind in turn."""
    kinds = [_plans("collective", _collective), _plans("pipeline", _pipeline), _plans("filled", _filled), _steps, _arenas]
    kinds.append(_plans("training", _training))  # last: the only one that needs torch
    running = [kind(own) for kind, own in zip(kinds, rng.spawn(len(kinds)), strict=True)]
    while True:
        for kind in running:
            yield next(kind)


def _told(verdict: Verdict) -> tuple[str, str]:
    return verdict.status, "; ".join(f"{f.check}: {f.message}" for f in verdict.findings[:2])


# ---- plans with programs -----------------------------------------------------------------------------------------------
MUTANTS_OF_A_PLAN = 40  # before another one is drawn


@dataclass(frozen=True)
class _Subject:
    """`same(position in the cycle, mutant)`: whether a mutant of the program there still does what it is for."""

    name: str
    plan: Plan
    same: Callable[[int, Program], bool]


def _plans(kind: str, make: Callable[[Rng], _Subject | None]) -> Callable[[Rng], Iterator[Case]]:
    def run(rng: Rng) -> Iterator[Case]:
        while True:
            subject = make(rng)
            for _ in range(MUTANTS_OF_A_PLAN if subject is not None else 0):
                assert subject is not None
                case = _label(subject, rng) if rng.random() < LABEL_SHARE else _program(subject, rng)
                if case is not None:
                    yield {"kind": kind, "plan": subject.name, **case}

    return run


def _label(subject: _Subject, rng: Rng) -> Case | None:
    operators = {**LABELS, **(LAYOUTS if subject.plan.layout is not None else {})}
    name = sorted(operators)[int(rng.integers(len(operators)))]
    made = operators[name](subject.plan, rng)
    if made is None:
        return None
    mutant = made[0]
    same = claims_of(mutant) == claims_of(subject.plan)  # then only what proves the claims has changed, and still proves them
    return {"operator": name, "what": made[1], "verdict": lambda: _told(check_claims(mutant)), "same": lambda: same}


def _program(subject: _Subject, rng: Rng) -> Case | None:
    plan, name = subject.plan, sorted(OPERATORS)[int(rng.integers(len(OPERATORS)))]
    at = int(rng.integers(len(plan.cycle)))
    old = plan.cycle[at].program
    made = mutate(plan.programs[old], name, rng)
    if made is None or any(x.program == old for k, x in enumerate(plan.cycle) if k != at):
        return None
    new = program_hash(made.program)
    others = {k: p for k, p in plan.programs.items() if k != old}
    cycle = tuple(msgspec.structs.replace(x, program=new) if k == at else x for k, x in enumerate(plan.cycle))
    mutant = replace(plan, programs={new: made.program, **others}, cycle=cycle)
    return {
        "operator": name, "what": made.what, "verdict": lambda: _told(check_claims(replace(mutant, prediction=None))),
        "same": lambda: subject.same(at, made.program),
    }  # fmt: skip


def _collective(rng: Rng) -> _Subject | None:
    op = str(rng.choice(["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather"]))
    name = str(rng.choice(["ring", "direct", "halving-doubling", "forestcoll", "rooted-tree"]))
    fabric = load_fabric("two-islands")
    devices = tuple(d.name for d in fabric.devices)
    ranks = devices[: int(rng.integers(3, len(devices) + 1))]
    problem = CollectiveProblem(fabric=fabric, op=op, ranks=ranks, size_bytes=int(rng.choice([960, 1 << 12])), root=int(rng.integers(len(ranks))))
    try:
        plan, _ = plan_collective(problem, candidates=[NAMES[name]()] if name in NAMES else None)
    except (Unsupported, Infeasible, TimeLimit, UsageError):
        return None
    return _Subject(f"{name} {op} {len(ranks)}", plan, lambda at, mutant: is_collective(mutant))


def _problem(rng: Rng, data: int) -> PipelineProblem:
    devices = int(rng.integers(2, 4))
    return PipelineProblem.of(
        devices, int(rng.integers(2, 6)), activation_bytes=12, message_bytes=4, p2p_rate_Bps=4 if rng.random() < 0.5 else None, data=data,
        weight_bytes=64, gradient_bytes=16, speeds=[int(x) for x in rng.integers(1, 3, devices)], first_input_grad=bool(rng.random() < 0.5),
    )  # fmt: skip


def _planned(rng: Rng, data: int) -> tuple[PipelineProblem, Plan] | None:
    problem = _problem(rng, data)
    variants = [v for kind in STRATEGIES for v in kind.variants(problem) if not getattr(v, "sharded", False)]
    chosen = variants[int(rng.integers(len(variants)))]
    try:
        return problem, plan_pipeline(problem, chosen.name, asdict(chosen))  # type: ignore[call-overload]
    except (Unsupported, Infeasible, TimeLimit, UsageError):
        return None


def _pipeline(rng: Rng) -> _Subject | None:
    data = int(rng.choice([1, 1, 2]))
    made = _planned(rng, data)
    if made is None:
        return None
    plan = made[1]
    original = plan.main
    return _Subject(f"{original.name}, data {data}", plan, lambda at, mutant: same_use(mutant, original, plan.programs, replica=lambda r: r % data))


def _filled(rng: Rng) -> _Subject | None:
    made = _planned(rng, 1)
    if made is None:
        return None

    def work(problem: PipelineProblem, schedule: Schedule) -> Any:
        kind = int(rng.integers(3))
        if kind == 0:
            return checkpoint_work(problem, schedule, write_s=0.5, snapshot_s=0.2, piece_s=0.2)
        if kind == 1:
            return evaluation_work(problem, schedule, 2)
        return gradient_work(problem, schedule, "shampoo", [("statistics", 0.3), ("roots", 0.4)], layers=2)

    try:
        plan = fill_plan(made[1], work, most_steps=6).plan
    except (Unsupported, Infeasible, TimeLimit, UsageError):
        return None
    originals = [plan.programs[x.program] for x in plan.cycle]
    orders = [fill_order(plan.job["fill"], k, p) for k, p in enumerate(originals)]
    same = lambda at, mutant: same_use(mutant, originals[at], plan.programs, before=orders[at])  # noqa: E731
    return _Subject(f"{originals[0].name}, {len(originals)} steps", plan, same)


def _training(rng: Rng) -> _Subject | None:
    from ...cost import assumed_cost
    from ...drive.training.training import plan_training
    from ...drive.training.wishes import LayoutWanted
    from ...job import Training
    from ..nets import captured

    net = str(rng.choice(["chain", "residual"]))
    data, tensor, pipeline = [(2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 1)][int(rng.integers(4))]
    fabric = load_fabric("two-islands", f"0-{data * tensor * pipeline - 1}")
    job = Training(model=f"meshwright.testing.nets:{net}", global_batch=8)
    wishes = [LayoutWanted(data=data, tensor=tensor, pipeline=pipeline)]
    try:
        plan = plan_training(job, fabric, assumed_cost(fabric), graph=captured(net), wishes=wishes)
    except (Unsupported, Infeasible, TimeLimit, UsageError):
        return None
    original, layout = plan.main, plan.layout
    assert layout is not None
    replica = lambda rank: layout.coordinates(rank)[1]  # noqa: E731
    return _Subject(f"{net} {data}x{tensor}x{pipeline}", plan, lambda at, mutant: same_use(mutant, original, plan.programs, replica=replica))


# ---- memory: steps and arenas ------------------------------------------------------------------------------------------
def _steps(rng: Rng) -> Iterator[Case]:
    """Plans of what a training step keeps and computes again."""
    kinds: list[Any] = [k for k in MEMORY if k.answers == "step" and not any(f == "effort" for f in getattr(k, "__dataclass_fields__", ()))]
    while True:
        graph = random_step_graph(random.Random(int(rng.integers(2**31))), forward=int(rng.integers(3, 7)))
        kind = kinds[int(rng.integers(len(kinds)))]
        try:
            plan = kind().plan(graph, None, rng=np.random.default_rng(0))
        except (Unsupported, Infeasible, TimeLimit, UsageError):
            continue
        for _ in range(12):
            made = _mutated_step(plan, rng)
            if made is not None:
                operator, what, mutant = made
                yield {
                    "kind": "memory step", "plan": f"{plan.strategy}, {len(graph.nodes)} nodes", "operator": operator, "what": what,
                    "verdict": lambda graph=graph, mutant=mutant: _told(check_step_plan(graph, mutant)),
                    "same": lambda graph=graph, mutant=mutant: step_is_right(graph, mutant),
                }  # fmt: skip


STEP_OPERATORS = ("drop action", "repeat action", "swap actions", "keep a result", "let go early", "other way", "peak", "time", "saved", "floor")


def _mutated_step(plan: StepPlan, rng: Rng) -> tuple[str, str, StepPlan] | None:
    actions = list(plan.actions)
    at = int(rng.integers(len(actions)))
    a = actions[at]
    name = str(rng.choice(STEP_OPERATORS))
    if name == "drop action":
        del actions[at]
    elif name == "repeat action":
        actions.insert(int(rng.integers(len(actions) + 1)), msgspec.structs.replace(a, drops=()))
    elif name == "swap actions":
        if at + 1 == len(actions):
            return None
        actions[at], actions[at + 1] = actions[at + 1], actions[at]
    elif name == "keep a result":
        if not a.drops:
            return None
        actions[at] = msgspec.structs.replace(a, drops=a.drops[1:])
    elif name == "let go early":
        later = [(k, x) for k in range(at + 1, len(actions)) for x in actions[k].drops]
        if not later:
            return None
        k, x = later[int(rng.integers(len(later)))]
        actions[k] = msgspec.structs.replace(actions[k], drops=tuple(y for y in actions[k].drops if y != x))
        actions[at] = msgspec.structs.replace(a, drops=(*a.drops, x))
    elif name == "other way":
        actions[at] = msgspec.structs.replace(a, alternative=a.alternative + int(rng.choice([-1, 1])))
    else:
        claims: dict[str, dict[str, Any]] = {
            "peak": {"peak_bytes": plan.peak_bytes + int(rng.choice([-1, 1]))}, "time": {"time_s": plan.time_s * float(rng.choice([0.5, 2.0]))},
            "saved": {"saved": plan.saved[1:]}, "floor": {"floor_s": plan.time_s * 1.5},
        }  # fmt: skip
        if name == "saved" and not plan.saved:
            return None
        values = claims[name]
        return name, str(values)[:80], msgspec.structs.replace(plan, **values)
    return name, f"action {at}", msgspec.structs.replace(plan, actions=tuple(actions))


def _arenas(rng: Rng) -> Iterator[Case]:
    """Storages that share a block of memory."""
    kinds: list[Any] = [k for k in MEMORY if k.answers == "arena"]
    while True:
        problem = _arena(rng)
        try:
            plan = kinds[int(rng.integers(len(kinds)))]().plan(problem, rng=np.random.default_rng(0))
        except (Unsupported, Infeasible, TimeLimit, UsageError):
            continue
        for _ in range(12):
            name = str(rng.choice(["move", "swap", "arena", "bound", "clique", "whole clique"]))
            offset, at = plan.offset_bytes.copy(), int(rng.integers(len(plan.offset_bytes)))
            if name == "move":
                offset[at] = max(0, int(offset[at]) + int(rng.integers(-8, 9)))
            elif name == "swap":
                other = int(rng.integers(len(offset)))
                offset[at], offset[other] = offset[other], offset[at]
            values: Mapping[str, Any] = {
                "move": {"offset_bytes": offset}, "swap": {"offset_bytes": offset},
                "arena": {"arena_bytes": plan.arena_bytes - int(rng.integers(1, 5))},
                "bound": {"bound_bytes": plan.bound_bytes + int(rng.choice([-1, 1]))}, "clique": {"clique": plan.clique[1:]},
                "whole clique": {"clique": tuple(range(len(offset))), "bound_bytes": int(problem.size_bytes.sum())},
            }[name]  # fmt: skip
            mutant = replace(plan, **values)
            yield {
                "kind": "arena", "plan": f"{plan.strategy}, {len(offset)} storages", "operator": name, "what": str(values)[:80],
                "verdict": lambda problem=problem, mutant=mutant: _told(check_arena(problem, mutant)),
                "same": lambda problem=problem, mutant=mutant: arena_is_right(problem, mutant),
            }  # fmt: skip


def _arena(rng: Rng) -> ArenaProblem:
    ops, count = int(rng.integers(3, 10)), int(rng.integers(3, 8))
    stream = rng.integers(0, 2, ops).astype(np.int32)
    after = [sorted({int(x) for x in rng.integers(0, v, int(rng.integers(0, 2)))}) if v else [] for v in range(ops)]
    first = [int(rng.integers(ops)) for _ in range(count)]
    readers = [sorted({int(v) for v in rng.integers(f, ops, 2) if stream[v] == stream[f]} | {f}) for f in first]
    return ArenaProblem(
        stream=stream, after=rows(after), size_bytes=rng.integers(1, 9, count), sources=rows([[f] for f in first]), consumers=rows(readers),
        alignment_bytes=int(rng.choice([1, 1, 4])),
    )  # fmt: skip
