"""Evaluation under a plan: the loss of the owner's module after `eval()` on the same samples, in every layout; training keeps its bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from levels_rig import CPU
from rig import forward_of
from tensor_rig import EVEN, PLAIN, lowered_calls

from meshwright.capture.losses import Objective
from meshwright.capture.resolve import build_model
from meshwright.check import check_program
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.errors import Unsupported, UsageError
from meshwright.job import Training
from meshwright.plan.plan import CycleEntry, Plan
from meshwright.plan.shards import local_values
from meshwright.program.calls import inline
from meshwright.program.forward_only import forward_only
from meshwright.program.hash import program_hash
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.gate.together import ranks_together
from meshwright.run.launch.outcome import evaluation_graph_of
from meshwright.run.launch.request import RunRequest, check_request
from meshwright.run.train.data import Batches, open_data
from meshwright.run.train.evaluation import Evaluation, batches_of
from meshwright.run.train.segments import build_rank_module
from meshwright.run.train.update import make_update
from meshwright.run.train.work import TrainingWork, gradient_bytes

HERE = "tests/run/evaluation_models.py:"
GLOBAL, STEPS = 8, 2


def plan_of(name: str, degrees: tuple[int, int, int], *, level: int = 0, loss: str = "cross-entropy", microbatch: int = 2, **more: Any) -> Plan:
    model = HERE + name
    sharding = DataSharding(level, level > 0, 1500) if level else PLAIN
    layout, program, callees = lowered_calls(
        model, degrees, microbatch, GLOBAL, loss, more.get("options", TensorOptions()), None, more.get("recompute", "none"), sharding,
        more.get("schedule"), EVEN,
    )  # fmt: skip
    main = program_hash(program)
    job = Training(model=model, global_batch=GLOBAL, loss=loss, optimizer="adamw", learning_rate=0.05)
    return Plan(
        kind="training", job={"training": msgspec.to_builtins(job)}, target_fabric={}, placement=tuple(f"d{r}" for r in range(layout.ranks)),
        programs={main: program, **callees}, cycle=(CycleEntry(program=main),), decisions={}, layout=layout, seed=5,
    )  # fmt: skip


@dataclass
class Ended:
    losses: list[float | None]
    evaluations: list[float | None]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def train(plan: Plan, data: str, evaluated: str = "", batches: int = 0) -> list[Ended]:
    """All ranks of a plan in this process; `evaluated`: the data of an evaluation before the first step and after each."""
    layout = plan.layout
    assert layout is not None
    job = msgspec.convert(plan.job["training"], Training)
    graph = forward_of(job.model, layout.microbatch_size, job.loss)
    program = inline(plan.main, plan.programs).program
    orders = fuse_lanes(program)
    at_evaluation = evaluation_graph_of(plan, layout, graph) if evaluated else None

    def body(rank: int, transport: Any) -> Ended:
        source = build_model(job.model, device="cpu")
        whole, kept = dict(source.module.named_parameters()), dict(source.module.named_buffers())
        module = build_rank_module(graph, layout, rank, whole, kept, device=CPU, gradient_bytes=gradient_bytes(program, rank))
        update = make_update(job, [(p.name, t) for p, t, _ in module.updated()], whole=whole)
        work = TrainingWork(program, layout, rank, module, Batches(open_data(data, source.examples, 0), layout, graph.inputs, CPU), update, seed=5)
        memory = RankMemory(program, rank, CPU, local_values(layout, rank), module.flats, torch.float64, layout=layout)
        executor = Executor(program, orders, rank, memory=memory, transport=transport, work=work)
        evaluation = None
        if at_evaluation is not None:
            opened = open_data(evaluated, source.examples, 0)
            samples = Batches(opened, layout, graph.inputs, CPU)
            evaluation = Evaluation(plan, at_evaluation, rank, module, samples, batches_of(opened, batches, GLOBAL, evaluated), transport)
        ended = Ended([], [], {}, module.buffers)
        torch.manual_seed(11)
        for step in range(STEPS):
            if evaluation is not None:
                ended.evaluations.append(evaluation.run())
            work.begin(step)
            executor.run()
            ended.losses.append(work.loss())
        if evaluation is not None:
            ended.evaluations.append(evaluation.run())
        for p, tensor, piece in module.kept():
            ended.weights[f"{p.name}+{piece.first if piece else 0}"] = tensor.detach().reshape(-1).clone()
        ended.losses.append(float(torch.rand(1)))  # what the generator gives next
        return ended

    return ranks_together(layout.ranks, body)


def mean(plan: Plan, found: list[Ended], at: int) -> float:
    """Of an evaluation: over the ranks that compute some of the loss, one of each tensor-parallel group."""
    known = [x.evaluations[at] for r, x in enumerate(found) if plan.layout.coordinates(r)[2] == 0]  # type: ignore[union-attr]
    values = [x for x in known if x is not None]
    return sum(values) / len(values)


def owners(name: str, data: str, batches: int, loss: str = "cross-entropy", module: torch.nn.Module | None = None) -> float:
    """The owner's module in evaluation mode on all samples at once."""
    source = build_model(HERE + name, device="cpu")
    dataset = open_data(data, source.examples, 0)
    columns = zip(*(dataset.sample(i) for i in range(batches * GLOBAL)), strict=True)
    with torch.no_grad():
        return float(Objective((module or source.module).eval(), loss)(*(torch.stack(c) for c in columns)))


@cache
def whole_weights(name: str, data: str, loss: str) -> dict[str, torch.Tensor]:
    (ended,) = train(plan_of(name, (1, 1, 1), loss=loss, microbatch=GLOBAL), data)
    return {n.removesuffix("+0"): w for n, w in ended.weights.items()}


LAYOUTS = [
    ((2, 1, 1), {}), ((1, 2, 1), {}), ((2, 1, 1), {"level": 1}), ((2, 1, 2), {"level": 2}), ((2, 2, 1), {"level": 3}),
    ((1, 2, 1), {"options": TensorOptions(sequence=True)}), ((1, 1, 2), {"recompute": "full"}), ((1, 1, 2), {"schedule": ("zb1p", {})}),
]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(("degrees", "more"), LAYOUTS, ids=lambda x: str(x)[:40])
def test_the_loss_is_the_owners_in_evaluation_mode(degrees: tuple[int, int, int], more: dict[str, Any]) -> None:
    """Whose dropout draws nothing then. The last of 18 samples, which fill no batch, are left out."""
    plan = plan_of("words", degrees, **more)
    found = train(plan, HERE + "some", HERE + "others")
    assert mean(plan, found, 0) == pytest.approx(owners("words", HERE + "others", 2), rel=1e-12)
    source = build_model(HERE + "words", device="cpu").module
    with torch.no_grad():
        for name, p in source.named_parameters():
            p.copy_(whole_weights("words", HERE + "some", "cross-entropy")[name].view_as(p))
    assert mean(plan, found, 2) == pytest.approx(owners("words", HERE + "others", 2, module=source), rel=1e-9)
    assert mean(plan, found, 2) != pytest.approx(mean(plan, found, 0), rel=1e-3)


@pytest.mark.parametrize(("degrees", "more"), [((1, 1, 1), {}), ((2, 1, 2), {}), ((2, 2, 1), {"level": 3})])
def test_training_goes_on_with_the_same_bits(degrees: tuple[int, int, int], more: dict[str, Any]) -> None:
    """Although both fetch samples that draw from one generator, whose state is a rank's own where there is one rank in a process."""
    plan = plan_of("words", degrees, **more)
    without, with_it = train(plan, HERE + "some"), train(plan, HERE + "some", HERE + "others")
    for a, b in zip(without, with_it, strict=True):
        if len(without) > 1:
            a.losses.pop()
            b.losses.pop()
        assert a.losses == b.losses and all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)


def test_a_loss_that_counts_targets_is_normalised_over_all_samples() -> None:
    """Replicas and micro-batches with unlike numbers of targets that count."""
    plan = plan_of("ignoring", (2, 1, 1), microbatch=2)
    found = train(plan, HERE + "unlike", HERE + "unlike")
    assert mean(plan, found, 0) == pytest.approx(owners("ignoring", HERE + "unlike", 2), rel=1e-12)


def test_running_statistics_are_read_and_calls_of_one_mode_are_followed() -> None:
    plan = plan_of("noisy", (1, 1, 1), loss="mse", microbatch=GLOBAL)
    (found,) = train(plan, HERE + "rows", HERE + "rows")
    assert found.evaluations[0] == pytest.approx(owners("noisy", HERE + "rows", 1, "mse"), rel=1e-12)
    (without,) = train(plan, HERE + "rows")
    assert all(torch.equal(without.buffers[n], b) for n, b in found.buffers.items()) and float(found.buffers["norm.num_batches_tracked"]) == STEPS


def test_a_value_between_stages_that_evaluation_does_not_make_is_refused() -> None:
    plan = plan_of("noisy", (1, 1, 1), loss="mse", microbatch=GLOBAL)
    lay = plan.layout
    assert lay is not None
    graph = forward_of(HERE + "noisy", GLOBAL, "mse")
    noise = next(n.name for n in graph.nodes if "bernoulli" in n.target)
    segments = tuple(msgspec.structs.replace(s, writes=(*s.writes, noise)) if noise in s.nodes else s for s in lay.segments)
    with pytest.raises(Unsupported, match=f"does not compute '{noise}'"):
        evaluation_graph_of(plan, msgspec.structs.replace(lay, segments=segments), graph)


@pytest.mark.parametrize(
    ("degrees", "more"),
    [((2, 2, 2), {"level": 3}), ((2, 1, 2), {"schedule": ("chimera", {})}), ((1, 2, 1), {"options": TensorOptions(sequence=True)})],
)
def test_the_checker_accepts_forward_parts(degrees: tuple[int, int, int], more: dict[str, Any]) -> None:
    plan = plan_of("words", degrees, microbatch=1, **more)
    part = forward_only(plan.main)
    verdict = check_program(part, programs=plan.programs)
    assert verdict.ok, verdict
    forward = list(part.ops.name)
    assert set(forward) == {"F"} and len(forward) == plan.main.ops.name.count("F")
    assert int(np.sum(part.steps.kind >= 0)) < len(plan.main.steps)


def test_a_model_that_reads_values_in_evaluation_is_refused() -> None:
    plan = plan_of("choosing", (1, 1, 1), loss="mse", microbatch=GLOBAL)
    assert plan.layout is not None
    with pytest.raises(Unsupported, match=r"cannot be traced in evaluation mode: .*evaluation_models.py:"):
        evaluation_graph_of(plan, plan.layout, forward_of(HERE + "choosing", GLOBAL, "mse"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"evaluate_every": 2}, "--evaluation-data: an evaluation needs --evaluation-data too"),
        ({"evaluation_data": "synthetic"}, "--evaluate-every: an evaluation needs --evaluate-every too"),
        ({"evaluation_batches": 2}, "--evaluate-every: an evaluation needs"),
        ({"evaluate_every": -1, "evaluation_data": "synthetic"}, "--evaluate-every: steps and batches are at least 1"),
    ],
)
def test_half_an_evaluation_is_refused(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as found:
        check_request(plan_of("words", (1, 1, 1)), RunRequest(out=tmp_path, **asked))
    assert str(found.value).startswith(message)


def test_samples_are_counted() -> None:
    some = open_data(HERE + "others", (), 0)
    assert batches_of(some, 0, 8, "d") == 2 and batches_of(some, 1, 8, "d") == 1
    assert batches_of(open_data("python-source", build_model(HERE + "words", device="cpu").examples, 0), 0, 8, "d") == 8
    with pytest.raises(UsageError, match="has 18 samples, fewer than 3 batches of 8"):
        batches_of(some, 3, 8, "d")
    with pytest.raises(UsageError, match="has 18 samples, fewer than a batch of 32"):
        batches_of(some, 0, 32, "d")
