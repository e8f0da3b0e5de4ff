"""Training whose bits do not depend on the number of ranks: the fold over micro-batches on one rank, plans of it, proofs, and real runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rig import TINY

from meshwright.capture.precision import capture_job
from meshwright.check import check_plan
from meshwright.cli import main
from meshwright.drive.plans import read_fabric, read_plan, write_plan
from meshwright.drive.training.compress import CompressWanted
from meshwright.drive.training.pipeline import PipelineWanted
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted, TensorOptions
from meshwright.errors import Unsupported, UsageError
from meshwright.graph.graph import OpGraph
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes
from meshwright.job import Recipe, Training
from meshwright.plan.plan import Plan
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import REPRODUCIBLE_SUMS, Kind, Part, Unit
from meshwright.run.checkpoint.export import whole_tensors
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run
from meshwright.run.train.folds import GradientFolds


def planned(devices: int, *wishes: Any, batch: int = 8, recipe: Recipe | None = None, microbatch: int | None = 2) -> Plan:
    job = Training(model=TINY, global_batch=batch, recipe=recipe or Recipe(reproducible="tree", clip_norm=0.5))
    given = {type(w): w for w in (LayoutWanted(microbatch=microbatch), *wishes)}
    return plan_training(job, read_fabric(f"laptop:{devices}"), wishes=given.values(), graph=captured())


PARTS = LayoutWanted(microbatch=2, tensor=2, tensor_options=TensorOptions(sequence=True))  # gradients of norms are partial sums on tensor ranks


@cache
def captured() -> OpGraph:
    return capture_job(Training(model=TINY, global_batch=8))


@pytest.fixture(scope="module")
def plans() -> dict[int, Plan]:
    return {n: planned(n) for n in (1, 2)}


# ---- on one rank ---------------------------------------------------------------------------------------------------------
def fold(rows: list[torch.Tensor]) -> torch.Tensor:
    while len(rows) > 1:
        rows = [rows[i] + rows[i + 1] if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
    return rows[0]


def backward_steps(order: Iterator[int] | range | list[int]) -> Any:
    """A rank with two backward steps per micro-batch that add to one gradient buffer."""
    b = ProgramBuilder(ranks=1)
    buffer = b.buffer(0, chunks=1, chunk_bytes=4 * 50, role="gradient", name="gradients", persistent=True)
    lane, ops = b.lane(0, unit=Unit.COMPUTE), []
    for number in order:
        for part in ("head", "body"):
            ops.append((number, b.op("B", graph=part, microbatch=number, accumulate=True, writes=[(buffer, 0, 1)])))
            lane.compute(ops[-1][1])
    return b.build(), ops


@pytest.mark.parametrize("m", range(1, 12))
def test_a_rank_folds_its_micro_batches(m: int) -> None:
    program, ops = backward_steps(range(m))
    rows = [torch.randn(2, 50, generator=torch.Generator().manual_seed(i)) * 2.0 ** (i % 5) for i in range(m)]
    flat = torch.zeros(50)
    folds = GradientFolds(program, 0, {"gradients": flat}, m)
    assert len(folds.waiting["gradients"]) == (m - 1).bit_length()
    for _ in range(2):  # steps: nothing is left over from the one before
        flat.zero_()
        for at, (number, op) in enumerate(ops):
            folds.after(op, lambda number=number, at=at: flat.add_(rows[number][at % 2]))()
        assert torch.equal(flat, fold([row[0] + row[1] for row in rows]))


def test_micro_batches_out_of_order_are_refused() -> None:
    program, _ = backward_steps([0, 2, 1])
    with pytest.raises(Unsupported, match="where 1 is due"):
        GradientFolds(program, 0, {"gradients": torch.zeros(50)}, 3)


# ---- plans -----------------------------------------------------------------------------------------------------------------
def test_plans_say_it_and_are_read_back(plans: dict[int, Plan]) -> None:
    for n, plan in plans.items():
        assert plan.layout is not None and plan.layout.step_end.folded and plan.layout.data == n
        again = plan_from_bytes(plan_bytes(plan))
        assert check_plan(again).ok and again.job["training"]["recipe"]["reproducible"] == "tree"
        promised = {c.reproducible for p in plan.programs.values() for c in p.contracts}
        assert promised == ({"tree"} if n > 1 else set())
    waiting = [int(plans[1].main.buffers.chunks[b]) for b, name in enumerate(plans[1].main.buffers.name) if name == "folds"]
    assert waiting == [2], "two sums of four micro-batches wait, and memory counts them"


def test_proofs_find_what_is_no_fold(plans: dict[int, Plan]) -> None:
    plan = plans[2]
    assert plan.layout is not None
    ring = planned(2, LayoutWanted(microbatch=2, data=2, tensor=1, pipeline=1), ShardingWanted(level=0, overlap=False), recipe=Recipe(clip_norm=0.5))
    training = plan.job["training"]
    cases = {
        "otherwise than the tree": replace(ring, job={**ring.job, "training": training}, layout=plan.layout),
        "the layout does not": replace(plan, layout=msgspec.structs.replace(plan.layout, end=ring.layout.end)),
        "asks for none": replace(plan, job={**plan.job, "training": {**training, "recipe": {"clip_norm": 0.5}}}),
    }
    for words, wrong in cases.items():
        assert any(words in f.message for f in check_plan(wrong).findings), words
    one = plans[1]
    main = one.main
    backward = [i for i in range(len(main.steps)) if main.steps.kind[i] == Kind.COMPUTE and main.ops.name[int(main.steps.op[i])] == "B"]
    numbers = main.ops.microbatch.copy()
    ends = [int(main.steps.op[backward[0]]), int(main.steps.op[backward[-1]])]
    numbers[ends] = numbers[ends[::-1]]
    turned = replace(main, ops=replace(main.ops, microbatch=numbers))
    found = check_plan(replace(one, programs=dict.fromkeys(one.programs, turned))).findings
    assert any(f.witness.get("fold_node") for f in found), [f.message for f in found]


@pytest.mark.parametrize(
    ("wish", "flag"),
    [
        ((ShardingWanted(level=1),), "--clip-norm"), ((LayoutWanted(microbatch=2, pipeline=2),), "--clip-norm"),
        ((LayoutWanted(microbatch=2, context=2),), "--context"), ((LayoutWanted(microbatch=2, expert=2),), "--ep"),
        ((LayoutWanted(microbatch=2, pipeline=2), PipelineWanted(name="gpipe")), "--pipeline"),
        ((CompressWanted(codec="onebit"),), "--compress"), ((ShardingWanted(overlap=True),), "--overlap"),
        ((LayoutWanted(microbatch=2, data=2),), "--dp"), ((LayoutWanted(microbatch=2, tensor=3),), "--dp"),
    ],
)
def test_what_divides_gradients_otherwise_is_refused(wish: Any, flag: str) -> None:
    with pytest.raises(Unsupported) as refused:
        planned(4, *wish)
    assert refused.value.where == flag and refused.value.hint


def test_divided_gradients_are_kept_as_the_fold() -> None:
    """Levels 2 and 3: replicas take micro-batches in turn, and what a rank adds up is followed on real numbers; another order is found."""
    plan = planned(2, ShardingWanted(level=3), batch=28, recipe=Recipe(reproducible="tree"))
    assert plan.layout is not None and plan.layout.in_turn and check_plan(plan).ok
    assert [plan.layout.first_sample(d, k) for k in range(7) for d in range(2)] == list(range(0, 28, 2))
    p, s = plan.main, plan.main.steps
    rows = [torch.randn(5, generator=torch.Generator().manual_seed(i)) * 2.0 ** (i % 5) for i in range(7)]
    memory, folding = dict[tuple[int, int], torch.Tensor](), list[int]()
    for step in np.flatnonzero(s.kind == Kind.TRANSFER).tolist():
        a, b = int(s.src_buffer[step]), int(s.dst_buffer[step])
        if not p.buffers.name[b].startswith(("gradfull", "gradshard", "folds")):
            continue
        folding.append(step)
        for i in range(int(s.count[step])):
            one, two = (memory.setdefault((x, int(c[step]) + i), first(p.buffers.name[x], rows)) for x, c in ((a, s.src_chunk), (b, s.dst_chunk)))
            memory[b, int(s.dst_chunk[step]) + i] = one + two if s.parts[step] & Part.ADD else one
    kept = [x for (b, _), x in memory.items() if p.buffers.name[b].startswith("gradshard")]
    assert kept and all(torch.equal(x, fold(rows)) for x in kept)
    plain = next(step for step in folding if not s.parts[step] & Part.ADD)
    for field, at, value in (("src_chunk", folding[2], s.src_chunk[folding[2]] + 1), ("parts", plain, s.parts[plain] | Part.ADD)):
        column = getattr(s, field).copy()
        column[at] = value
        wrong = replace(plan, programs={**plan.programs, plan.cycle[0].program: replace(p, steps=replace(s, **{field: column}))})
        assert not check_plan(wrong).ok, field


@pytest.mark.parametrize("level", [0, 1, 2])
def test_tensor_ranks_add_up_their_parts_last(level: int) -> None:
    plan = planned(4, PARTS, ShardingWanted(level=level), recipe=Recipe(reproducible="tree"))
    assert plan.layout is not None and plan.layout.partial_gradients and check_plan(plan).ok
    p, s, lane = plan.main, plan.main.steps, plan.main.lane_of_step()
    calls = [k for k in np.flatnonzero(s.kind == Kind.CALL).tolist() if p.lanes.actor[lane[k]] == 0]

    def sums(kind: str, tensor: bool) -> list[int]:
        """Calls of rank 0 that add up buffers of this kind, over tensor ranks (0, 1) or replicas (0, 2)."""
        of = {k: p.comms.groups[int(p.calls.comm[s.op[k]])].tolist() for k in calls}
        return [k for k in calls if of[k] == [0, 1 if tensor else 2] and p.buffers.name[int(p.calls.binds[s.op[k]][1])].startswith(kind)]

    def wrong(words: str, **changed: Any) -> None:
        program = replace(p, **changed)
        found = check_plan(replace(plan, programs={**plan.programs, plan.cycle[0].program: program})).findings
        assert any(words in f.message for f in found), [f.message for f in found]

    over = sums("gradshard" if level else "gradients", tensor=True)
    if level < 2:  # the first replicas' sum of such a group and its tensor sum change places
        group = p.buffers.name[int(p.calls.binds[s.op[over[0]]][1])].removeprefix("gradshard").removeprefix("gradients")
        before = next(k for k in sums("gradients", tensor=False) if p.buffers.name[int(p.calls.binds[s.op[k]][1])] == f"gradients{group}")
        op = s.op.copy()
        op[[before, over[0]]] = op[[over[0], before]]
        wrong("adds up replicas of what tensor ranks have added up before", steps=replace(s, op=op))
        return
    assert len(over) > 1 and not sums("gradfull", tensor=True)
    binds = p.calls.binds.values.copy()
    first_of = {k: int(p.calls.binds.ptr[s.op[k]]) + 1 for k in over}
    for buffer, words in (
        (binds[first_of[over[1]]], "adds micro-batches to what tensor ranks have added up"),
        (next(b for b, name in enumerate(p.buffers.name) if name.startswith("gradfull:0")), "tensor ranks of one micro-batch"),
    ):
        other = binds.copy()
        other[first_of[over[0]]] = buffer
        wrong(words, calls=replace(p.calls, binds=replace(p.calls.binds, values=other)))


def first(name: str, rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[int(name.partition(":")[2].partition("@")[0])] if name.startswith("gradfull") else torch.zeros(5)


def test_micro_batches_must_be_told_and_fit() -> None:
    with pytest.raises(UsageError, match="size must be told"):
        planned(4, microbatch=None)
    with pytest.raises(Unsupported, match="no power of two"):
        planned(2, batch=12)
    with pytest.raises(Unsupported, match="no power of two of replicas"):
        planned(3, ShardingWanted(level=2), batch=12, recipe=Recipe(reproducible="tree"))
    with pytest.raises(UsageError, match="run or tree"):
        planned(2, recipe=Recipe(reproducible="exact"))


# ---- runs --------------------------------------------------------------------------------------------------------------------
@pytest.mark.real
@pytest.mark.timeout(280)
def test_weights_and_state_have_equal_bits_at_one_and_two_ranks(plans: dict[int, Plan], tmp_path: Path) -> None:
    one, two = (trained(plan, tmp_path / str(n)) for n, plan in plans.items())
    assert len(one) > 8 and equal_bits(one, two)


def trained(plan: Plan, out: Path) -> dict[str, torch.Tensor]:
    """Weights and state after two steps."""
    train_run(plan, RunRequest(out=out, data="synthetic", steps=2, calibrate=False, module_spans=False))
    _, _, reader, _ = whole_tensors(out)
    return {name: reader.read(name) for name in reader.tensors}


def equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one)


@pytest.mark.real
@pytest.mark.timeout(280)
def test_stages_and_shards_have_the_bits_of_one_rank_and_tensor_ranks_those_of_their_degree(tmp_path: Path) -> None:
    recipe = Recipe(reproducible="tree")
    of = {
        "one": planned(1, recipe=recipe),
        "two stages, two replicas, weights divided": planned(4, LayoutWanted(microbatch=2, pipeline=2), ShardingWanted(level=3), recipe=recipe),
        "two replicas, state divided": planned(2, ShardingWanted(level=1), recipe=recipe),
        "tensor": planned(2, PARTS, recipe=recipe),
        "tensor, two replicas, weights divided": planned(4, PARTS, ShardingWanted(level=3), recipe=recipe),
    }
    for plan in of.values():
        assert check_plan(plan).ok and {c.reproducible for p in plan.programs.values() for c in p.contracts if c.op in REPRODUCIBLE_SUMS} <= {"tree"}
    found = {name: trained(plan, tmp_path / str(k)) for k, (name, plan) in enumerate(of.items())}
    for name in ("two stages, two replicas, weights divided", "two replicas, state divided"):
        assert equal_bits(found["one"], found[name]), name
    assert equal_bits(found["tensor"], found["tensor, two replicas, weights divided"])


def test_a_run_asks_for_what_its_plan_promises(plans: dict[int, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(path := tmp_path / "plan.json", plans[1])
    assert read_plan(path).layout == plans[1].layout
    assert main(["train", "run", str(path), "--reproducible", "tree", "--dry-run"]) == 0
    write_plan(path, planned(1, recipe=Recipe(clip_norm=0.5)))
    assert main(["train", "run", str(path), "--reproducible", "tree", "--dry-run"]) == 2
    assert "train plan --reproducible tree" in capsys.readouterr().err
