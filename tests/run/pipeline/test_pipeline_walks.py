"""Every schedule, walked for real by ranks over gloo (threads of one process): gradients and loss of serial training, copies alike bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_stages import make
from rig import in_threads

from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.pipeline.pipelines import default_candidates, make_strategy, plan_pipeline
from meshwright.errors import MeshwrightError
from meshwright.plan.plan import Plan
from meshwright.program.calls import inline
from meshwright.program.program import Part
from meshwright.run.executor.transport import TaggedTransport
from meshwright.run.launch.pipeline_rank import Walk, digests, make_walk, worst_difference
from meshwright.run.launch.rehearse import pipeline_orders, with_real_sizes
from meshwright.run.pipeline.stages import Given

CPU = torch.device("cpu")


def planned(name: str, options: Mapping[str, Any], devices: int, microbatches: int, **more: Any) -> tuple[Plan, Given]:
    problem = PipelineProblem.of(devices, microbatches, forward_s=1.0, backward_s=2.0, **more)
    plan = plan_pipeline(problem, name, options)
    doc = plan.job["schedule"]
    modules, inputs, targets, loss = make(doc["stages"], len(doc["copy_of"]) * problem.data)
    given = Given(modules=tuple(modules), inputs=tuple(inputs), targets=tuple(targets), loss=loss)
    return with_real_sizes(plan, given), given


def walked(plan: Plan, given: Given, steps: int = 1) -> list[Walk]:
    from meshwright.drive.pipeline.pipelines import problem_of_plan, schedule_of_plan

    problem = problem_of_plan(plan)
    orders, _ = pipeline_orders(plan, problem, schedule_of_plan(plan))

    def body(rank: int, group: Any) -> Walk:
        walk = make_walk(plan, orders, rank, given, TaggedTransport(group), CPU)
        for _ in range(steps):
            walk.clear()
            walk.step()
        return walk

    return in_threads(problem.devices * problem.data, body)


def agree(name: str, options: Mapping[str, Any], devices: int, microbatches: int, **more: Any) -> list[Walk]:
    plan, given = planned(name, options, devices, microbatches, **more)
    walks = walked(plan, given, steps=2)
    assert max(worst_difference(given, w) for w in walks) < 1e-9
    seen: dict[str, set[str]] = {}
    for w in walks:
        for stage, digest in digests(w.flats).items():
            seen.setdefault(stage, set()).add(digest)
        assert w.memory.held_bytes == 0  # every border tensor has been let go
        assert not any(s._saved or s._entries or s._left for s in w.stages.segments.values())
    assert {s: len(d) for s, d in seen.items()} == dict.fromkeys(seen, 1)
    total = sum(float(x) for w in walks for x in w.work.losses.values()) / len(given.inputs)
    serial = sum(float(given.loss(_through(given, x), t).detach()) for x, t in zip(given.inputs, given.targets, strict=True)) / len(given.inputs)
    assert abs(total - serial) < 1e-9 * abs(serial)
    return walks


def _through(given: Given, x: torch.Tensor) -> torch.Tensor:
    for module in given.modules:
        x = module(x)
    return x


def candidates(devices: int, microbatches: int) -> list[tuple[str, dict[str, Any]]]:
    problem = PipelineProblem.of(devices, microbatches)
    found = []
    for name, options in default_candidates(problem):
        try:
            make_strategy(name, options).plan(problem)
            found.append((name, dict(options)))
        except MeshwrightError:
            continue
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("name", "options"), [*candidates(4, 5), ("dualpipe-v", {})], ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else x
)
def test_four_devices_equal_serial_training(name: str, options: dict[str, Any]) -> None:
    agree(name, options, 4, 8 if name == "dualpipe-v" else 5)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "options", "devices", "microbatches"),
    [
        ("chimera", {}, 2, 2), ("chimera", {"split": True}, 2, 5), ("chimera", {"sync": "lazy"}, 4, 3), ("chimera", {"sync": "eager"}, 4, 4),
        ("chimera", {"pipes": 3, "mode": "halve"}, 6, 6), ("zbv", {}, 3, 4), ("interleaved", {"chunks": 3}, 2, 4), ("1f1b", {}, 1, 3),
        ("dualpipe", {}, 4, 8),
        ("breadth-first", {"chunks": 4, "reverse": True}, 2, 3), ("gpipe", {"reverse": True}, 3, 1),
    ],
)  # fmt: skip
def test_other_shapes_equal_serial_training(name: str, options: dict[str, Any], devices: int, microbatches: int) -> None:
    agree(name, options, devices, microbatches)


@pytest.mark.parametrize(("name", "options"), [("1f1b", {}), ("zbv", {}), ("chimera", {"split": True})])
def test_replicas_and_copies_have_the_same_bits(name: str, options: dict[str, Any]) -> None:
    agree(name, options, 2, 3, data=2)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "breadth-first", "zbv"])
def test_a_slow_stage_does_not_pile_up_messages(name: str) -> None:
    """With one stage three times slower, no more messages wait per connection than the program allows, however many micro-batches there are."""
    problem = PipelineProblem.of(4, 12, forward_s=[1, 1, 3, 1], backward_s=[2, 2, 6, 2])
    plan = plan_pipeline(problem, name)
    modules, inputs, targets, loss = make(plan.job["schedule"]["stages"], 12)
    given = Given(modules=tuple(modules), inputs=tuple(inputs), targets=tuple(targets), loss=loss)
    plan = with_real_sizes(plan, given)
    program = plan.main
    for rank, walk in enumerate(walked(plan, given)):
        room = sum(int(program.channels.depth[c]) for c in range(len(program.channels)) if int(program.channels.dst[c]) == rank)
        assert 0 < walk.memory.unused_peak <= room
        assert room < 12 * plan.job["schedule"]["stages"] // 4  # so the bound says something


def test_stages_do_not_see_each_others_random_state() -> None:
    """Walking the same plan twice gives the same bits."""
    plan, given = planned("zbv", {}, 2, 3)
    first, second = (
        [digests(w.flats) for w in walked(plan, given)] for _ in range(2)
    )  # fmt: skip
    assert first == second


def test_a_rank_refuses_stages_that_it_does_not_hold() -> None:
    from meshwright.errors import Unsupported

    plan, given = planned("1f1b", {}, 2, 2)
    first, _ = walked(plan, given)
    ops = first.work.program.ops
    foreign = next(op for op in range(len(ops.name)) if int(ops.stage[op]) == 1)
    with pytest.raises(Unsupported, match="cannot execute"):
        first.work.compile(foreign, first.memory)


def test_messages_leave_before_room_is_made_for_new_ones() -> None:
    """A neighbour may be waiting for what is sent; a receive that is posted a little later is still two messages ahead."""
    from meshwright.drive.pipeline.pipelines import problem_of_plan, relowered, schedule_of_plan
    from meshwright.run.executor.schedule import compile_schedule

    plan, _ = planned("interleaved", {"chunks": 2}, 4, 8)
    orders, _ = pipeline_orders(plan, problem_of_plan(plan), schedule_of_plan(plan))
    program = inline(plan.main, plan.programs).program
    moved = 0
    for rank in range(4):
        plain, first = (compile_schedule(program, orders, rank, sends_ahead=len(program.steps), sends_first=x) for x in (False, True))
        for at, posts in first.posts.items():
            if at < len(first.order) and not first.waits.get(at + 1):
                assert int(program.steps.parts[first.order[at]]) & (Part.SEND | Part.RECV) != Part.SEND or not posts
        before = {r.step: at for at, posts in plain.posts.items() for r in posts}
        after = {r.step: at for at, posts in first.posts.items() for r in posts}
        position = {int(s): i for i, s in enumerate(first.order)}
        assert before.keys() == after.keys() and all(before[s] <= after[s] <= position[s] for s in before)
        by_tag: dict[int, list[int]] = {}
        for at in sorted(first.posts):
            for r in first.posts[at]:
                by_tag.setdefault(r.tag, []).append(position[r.step])
        assert all(rows == sorted(rows) for rows in by_tag.values())  # messages of one tag are told apart by their order
        moved += sum(after[s] > before[s] for s in before)
    assert moved
    large = relowered(plan, replace(problem_of_plan(plan), message_bytes=(1 << 20,) * 4))
    program = inline(large.main, large.programs).program
    orders, _ = pipeline_orders(large, problem_of_plan(large), schedule_of_plan(large))
    plain, first = (compile_schedule(program, orders, 1, sends_ahead=len(program.steps), sends_first=x) for x in (False, True))
    assert plain.posts == first.posts  # word of a receive would wait behind a long message


@pytest.mark.parametrize(("name", "microbatches", "cap"), [("1f1b", 5, 2_500_000), ("zbv", 5, 3_500_000), ("interleaved", 4, 2_500_000)])
def test_activations_wait_in_the_hosts_memory(name: str, microbatches: int, cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved tensors leave and come back at the plan's places, those of backwards that run are all there, and the sums are those of a serial run."""
    from meshwright.run.pipeline.host import WaitingTensors

    left: list[tuple[int, int]] = []
    leave = WaitingTensors.leave

    def seen(self: WaitingTensors) -> None:
        before = self.here_bytes
        leave(self)
        left.append((before, self.here_bytes))

    monkeypatch.setattr(WaitingTensors, "leave", seen)
    more = {"activation_bytes": 1_000_000, "message_bytes": 1000, "memory_cap_bytes": cap, "host_out_Bps": 1e12, "host_in_Bps": 1e12}
    walks = agree(name, {}, 4, microbatches, **more)
    moves = sum(len(w.work.waiting) for w in walks)
    assert moves and len(left) == 2 * moves  # two steps
    assert all(after == 0 for _, after in left) and sum(before for before, _ in left) > 0
    assert not any(x.found for w in walks for x in w.work.waiting.values())


def test_what_is_away_cannot_be_used() -> None:
    from meshwright.errors import CheckFailed
    from meshwright.run.pipeline.host import WaitingTensors

    module = torch.nn.Linear(3, 3).double()
    waiting, x = WaitingTensors(module), torch.randn(2, 3, dtype=torch.float64)
    waiting.begin(x)
    assert waiting.refer(x) is x and waiting.refer(module.weight) is module.weight
    kept: Any = waiting.refer(y := module(x))
    assert waiting.refer(y) is kept
    waiting.leave()
    with pytest.raises(CheckFailed, match="still in the host's memory"):
        kept.tensor()
    waiting.come()
    assert torch.equal(kept.tensor(), y) and kept.tensor().data_ptr() != y.data_ptr()


def test_a_plan_with_overlapped_pairs_trains_as_a_plain_loop() -> None:
    """Loss, and weights after a step of SGD, in double precision: pairs run for real."""
    plan, given = planned("dualpipe", {}, 4, 8, pair_overlap=0.5)
    pairs = sum(text.count("&") for text in plan.job["schedule"]["orders"])
    assert pairs > 20
    walks = walked(plan, given)
    loop = torch.nn.ModuleList(given.modules)
    loss = sum((given.loss(_through(given, x), t) for x, t in zip(given.inputs, given.targets, strict=True)), torch.zeros(())) / len(given.inputs)
    loss.backward()
    for walk in walks:
        for (_, stage), module in walk.stages.modules.items():
            for mine, theirs in zip(module.parameters(), loop[stage].parameters(), strict=True):
                if theirs.grad is not None and mine.grad is not None:
                    assert torch.allclose(mine - 0.1 * mine.grad, theirs - 0.1 * theirs.grad, rtol=0, atol=1e-12)
    losses = sum(float(x) for w in walks for x in w.work.losses.values()) / len(given.inputs)
    assert losses == pytest.approx(float(loss.detach()), rel=1e-12)
