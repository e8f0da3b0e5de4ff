"""What a job that wants equal bits at any number of ranks leaves to decide: replicas alone, each with an aligned block of micro-batches.

Contributions are numbered by micro-batch, so a replica's part of the tree is the fold of its own micro-batches, and a collective folds these
(docs/reproducibility.md). Whatever divides a micro-batch or its gradient otherwise rounds otherwise, and is refused.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...job import Training
from .compress import CompressWanted
from .division import DivisionWanted
from .pipeline import PipelineWanted
from .sharding import ShardingWanted
from .wishes import LayoutWanted, Wishes

__all__ = ["folding"]


def folding(job: Training, fabric: Fabric, wishes: Wishes) -> Wishes:
    """The wishes of a job, and where its recipe says `tree` what follows from that.

    Raises: UsageError for a level that there is not or without a size of micro-batches, Unsupported for what would give other bits at other ranks.
    """
    level = job.asked.reproducible
    if level == "run":
        return wishes
    if level != "tree":
        raise UsageError(f"training is reproducible by run or tree, got {level[:32]!r}", where="--reproducible", hint="--reproducible tree")
    layout, sharding, n = wishes.of(LayoutWanted), wishes.of(ShardingWanted), len(fabric.devices)
    if layout.microbatch is None:
        raise UsageError("contributions are numbered by micro-batch, whose size must be told", where="--reproducible", hint="give --microbatch")
    wanted = (
        ("--tp", layout.tensor not in (None, 1)), ("--pp", layout.pipeline not in (None, 1)), ("--context", layout.context != 1),
        ("--zero", bool(sharding.level)), ("--overlap", bool(sharding.overlap)), ("--pipeline", bool(wishes.of(PipelineWanted).name)),
        ("--compress", wishes.of(CompressWanted).codec not in ("", "none")), ("--dp", layout.data not in (None, n)),
        ("--precision", job.asked.precision == "fp16-autocast"),
    )  # fmt: skip
    if refused := [flag for flag, given in wanted if given]:
        text = f"{refused[0]} makes partial sums that are no nodes of the tree over micro-batches"
        raise Unsupported(text, where=refused[0], hint="--reproducible tree is for data-parallel replicas on all devices, each with whole gradients")
    each, rest = divmod(job.global_batch, n * layout.microbatch)
    if n > 1 and (rest or each & (each - 1)):
        text = f"{job.global_batch} samples in micro-batches of {layout.microbatch} on {n} devices are no power of two of micro-batches on each"
        raise Unsupported(text, where="--reproducible", hint="choose --global-batch, --microbatch and devices so that each has 1, 2, 4, ...")
    return wishes.but(
        replace(layout, data=n, tensor=1, pipeline=1), ShardingWanted(level=0, overlap=False), DivisionWanted(by_speed=False),
    )  # fmt: skip
