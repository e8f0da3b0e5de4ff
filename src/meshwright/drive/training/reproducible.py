"""What a job that wants equal bits at any number of replicas and stages leaves to decide: aligned blocks of micro-batches for each replica.

Contributions are numbered by micro-batch, so a replica's part of the tree is the fold of its own micro-batches, and a collective folds these
(docs/reproducibility.md). Stages of a pipeline do the same operations on other ranks, and sharding at level 1 divides only what is added already. At
levels 2 and 3 replicas are added micro-batch by micro-batch: there they take micro-batches in turn (`TrainingLayout.in_turn`). A tensor degree is
part of the contributions: plans of the same degree have equal bits. Tensor ranks add up what they hold in parts last, at every level. Whatever
divides a micro-batch or its gradient otherwise rounds otherwise, and is refused.
"""

from __future__ import annotations

from dataclasses import replace

from ...decide.pipeline import OneFOneB
from ...errors import Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...job import Training
from ...plan.plan import TrainingLayout
from .compress import CompressWanted
from .division import DivisionWanted
from .pipeline import PipelineWanted
from .sharding import ShardingWanted
from .wishes import LayoutWanted, Wishes

__all__ = ["folding", "require_folds"]

PARTIAL = "makes partial sums that are no nodes of the tree over micro-batches"


def folding(job: Training, fabric: Fabric, wishes: Wishes) -> Wishes:
    """The wishes of a job, and where its recipe says `tree` what follows from that.

    Raises: UsageError for a level that there is not or without a size of micro-batches, Unsupported for what would give other bits at other ranks.
    """
    level = job.asked.reproducible
    if level == "run":
        return wishes
    if level != "tree":
        raise UsageError(f"training is reproducible by run or tree, got {level[:32]!r}", where="--reproducible", hint="--reproducible tree")
    layout = wishes.of(LayoutWanted)
    tensor, stages = layout.tensor or 1, layout.pipeline or 1
    data, alone = divmod(len(fabric.devices), tensor * stages)
    if layout.microbatch is None:
        raise UsageError("contributions are numbered by micro-batch, whose size must be told", where="--reproducible", hint="give --microbatch")
    if alone or layout.data not in (None, data):
        text = f"{len(fabric.devices)} devices are no {layout.data or 'whole number of'} replicas of {tensor * stages}"
        raise Unsupported(text, where="--dp", hint="--reproducible tree uses all devices: dp x tp x pp is their number")
    for flag, why in _refused(job, wishes, stages):
        hint = "--reproducible tree is for replicas (--dp) of stages (--pp) and tensor ranks (--tp), each with whole gradients, and for --zero"
        raise Unsupported(f"{flag} {why}", where=flag, hint=hint)
    each, rest = divmod(job.global_batch, data * layout.microbatch)
    in_turn = _level(wishes) > 1
    if data > 1 and (rest or (not in_turn and each & (each - 1)) or (in_turn and each > 1 and data & (data - 1))):
        what = "no power of two of replicas" if in_turn and not rest else "no power of two of micro-batches on each"
        text = f"{job.global_batch} samples in micro-batches of {layout.microbatch} on {data} replicas are {what}"
        hint = "choose --dp 2, 4, 8, ..." if in_turn and not rest else "choose --global-batch, --microbatch and devices so that each has 1, 2, 4, ..."
        raise Unsupported(text, where="--reproducible", hint=hint)
    return wishes.but(
        replace(layout, data=data, tensor=tensor, pipeline=stages), replace(wishes.of(ShardingWanted), level=_level(wishes), overlap=False),
        DivisionWanted(by_speed=False),
    )  # fmt: skip


def _level(wishes: Wishes) -> int:
    return wishes.of(ShardingWanted).level or 0


def _refused(job: Training, wishes: Wishes, stages: int) -> list[tuple[str, str]]:
    """(flag, why): what is asked for and has no fold."""
    layout, level = wishes.of(LayoutWanted), _level(wishes)
    norm = "adds up squares rank by rank, whose order is not that of one rank"
    wanted = (
        ("--context", layout.context != 1, PARTIAL), ("--ep", layout.expert != 1, PARTIAL),
        ("--overlap", bool(wishes.of(ShardingWanted).overlap), PARTIAL),
        ("--pipeline", wishes.of(PipelineWanted).name not in ("", OneFOneB.name), "may do micro-batches in another order"),
        ("--compress", wishes.of(CompressWanted).codec not in ("", "none"), PARTIAL),
        ("--clip-norm", job.asked.clip_norm > 0 and (level > 0 or stages > 1), norm),
        ("--precision", job.asked.precision == "fp16-autocast", "scales by the norm of gradients"),
    )  # fmt: skip
    return [(flag, why) for flag, given, why in wanted if given]


def require_folds(layout: TrainingLayout) -> None:
    """Of a layout that was decided. Raises: Unsupported where stages share a parameter, or a value goes to several of them: its gradient's parts are
    then added up across stages, in another order than on one rank."""
    if not layout.step_end.folded:
        return
    differentiable = {v.name for v in layout.values if v.differentiable}
    for what, names in (("parameter", [p for s in layout.stages for p in s.params if p not in layout.frozen]),
                        ("value", [v for s in layout.stages for v in s.receives if v in differentiable])):  # fmt: skip
        if twice := sorted({n for n in names if names.count(n) > 1}):
            text = f"several stages add to the gradient of {what} {twice[0]!r}, in another order than one rank does"
            hint = "--reproducible tree with --pp needs stages that share no parameter, each fed by the one before"
            raise Unsupported(text, where="--pp", hint=hint)
