"""`run_layout`: a sharding plan (or several, taking turns) on processes of this machine, and what came of it.

Every rank is a process of its own. When one fails, the others are ended at once and its error is raised; no process outlives the call.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, TooFewDevices, UsageError
from ...io.strict_json import decode, read_document
from ...plan.sharding import ShardingPlan
from ..ranks.launcher import LocalRanks, scratch_folder
from .worker import RankReport, WorkRequest, layout_rank

__all__ = ["LayoutResult", "prepare_folder", "read_layout", "results", "run_layout", "write_layout"]


class LayoutResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One plan's run. `step_s`: per step the slowest rank. `bytes_equal`: every rank sent exactly the planned bytes for every reason."""

    plan: str
    strategy: str
    mesh: tuple[int, ...]
    predicted_s: float
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    sent_bytes: tuple[dict[str, int], ...]
    bytes_equal: bool
    kept_bytes: tuple[int, ...]
    loss_apart: float | None = None
    gradients_apart: float | None = None

    @property
    def time_s(self) -> float:
        """Median step."""
        return statistics.median(self.step_s)


def write_layout(path: Path, plan: ShardingPlan) -> None:
    """A plan as JSON; equal plans give equal bytes. Raises: UsageError if the folder does not exist."""
    from ...io.atomic import write_bytes

    write_bytes(path, msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")


def read_layout(path: Path) -> ShardingPlan:
    """Raises: UsageError (no such file), FormatError (not a layout plan, or one that contradicts itself)."""
    data = read_document(path)
    try:
        plan = decode(data, msgspec.json.Decoder(ShardingPlan), path.name)
    except FormatError as error:
        raise FormatError(f"is no layout plan: {error.message}", where=error.where, hint="make one with `meshwright layout plan`") from None
    _check(plan, path.name)
    return plan


def _check(plan: ShardingPlan, where: str) -> None:
    ranks, axes = 1, len(plan.mesh)
    for p in plan.mesh:
        ranks *= p
    states = [*plan.sources.values(), *plan.hubs.values(), *(s for o in plan.ops.values() for s in (*o.inputs, o.output))]
    problem = ""
    if plan.schema != "meshwright.layout" or plan.version != 1:
        problem = f"schema {plan.schema!r} version {plan.version} is not meshwright.layout version 1"
    elif min(plan.mesh, default=0) < 1 or ranks != len(plan.devices) or len(plan.bytes_sent) != ranks:
        problem = f"mesh {list(plan.mesh)} is not {len(plan.devices)} devices with bytes for each"
    elif any(len(s) != axes or not all(map(_is_type, s)) for s in states):
        problem = "a state is not one SBP type per mesh axis"
    elif any(not (0 <= a < axes and _is_type(k)) for m in plan.moves for a, k in (*m.forward, *m.backward)):
        problem = "a step names an axis or a type that does not exist"
    elif any(m.bucket and not any(b.axes == m.bucket for b in plan.buckets) for m in plan.moves):
        problem = "a gradient waits for a bucket that is never summed"
    if problem:
        raise FormatError(problem, where=where, hint="make the plan again with `meshwright layout plan`")


def _is_type(kind: str) -> bool:
    dim, _, blocks = kind[1:].partition("/")
    return kind in ("R", "B", "P", "M") or (kind[:1] == "S" and dim.isdecimal() and (not _ or (blocks.isdecimal() and int(blocks) > 1)))


def prepare_folder(folder: Path, plans: Sequence[ShardingPlan], request: WorkRequest) -> None:
    """Plans and request where ranks look for them. A model named by a file is named by its full path."""
    names = [f"plan-{i}.json" for i in range(len(plans))]
    for name, plan in zip(names, plans, strict=True):
        file, _, function = plan.model.rpartition(":")
        model = f"{Path(file).resolve()}:{function}" if file.endswith(".py") else plan.model
        write_layout(folder / name, msgspec.structs.replace(plan, model=model))
    (folder / "request.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(request, plans=names)))


def results(folder: Path, plans: Sequence[ShardingPlan]) -> list[LayoutResult]:
    """What the ranks left, plan by plan."""
    ranks = [msgspec.json.decode(p.read_bytes(), type=RankReport) for p in sorted(folder.glob("rank-*.json"))]
    found = []
    for i, plan in enumerate(plans):
        rows = [r.plans[i] for r in ranks]
        found.append(LayoutResult(
            plan=rows[0].plan, strategy=plan.strategy, mesh=plan.mesh, predicted_s=plan.time_s,
            step_s=tuple(map(max, zip(*(r.step_s for r in rows), strict=True))), losses=tuple(rows[0].losses),
            sent_bytes=tuple(r.sent_bytes for r in rows), bytes_equal=all(r.sent_bytes == r.planned_bytes for r in rows),
            kept_bytes=tuple(r.kept_bytes for r in rows), loss_apart=_most(r.loss_apart for r in rows),
            gradients_apart=_most(r.gradients_apart for r in rows),
        ))  # fmt: skip
    return found


def _most(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def run_layout(
    plans: Sequence[ShardingPlan], *, steps: int = 10, warmup: int = 2, seed: int = 0, learning_rate: float = 1e-2, device: str = "cpu",
    dtype: str = "", verify: bool = False, timeout_s: float = 300.0,
) -> list[LayoutResult]:  # fmt: skip
    """Train with each plan for `steps` timed steps, the plans taking turns, one process per rank.

    Raises: UsageError (steps, different numbers of ranks), TooFewDevices (CUDA), and what `LocalRanks.run` raises.
    """
    world = {len(p.devices) for p in plans}
    if steps < 1 or len(world) != 1:
        what = f"steps must be at least 1, got {steps}" if steps < 1 else f"plans for {sorted(world)} ranks cannot take turns"
        raise UsageError(what, hint="give plans for one fabric, and at least one step")
    ranks = world.pop()
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < ranks:
            raise TooFewDevices(f"the plan needs {ranks} CUDA devices here, there are {torch.cuda.device_count()}", hint="use --device cpu")
    request = WorkRequest(
        plans=[], steps=steps, warmup=warmup, seed=seed, learning_rate=learning_rate, device=device, dtype=dtype, verify=verify, timeout_s=timeout_s
    )
    with scratch_folder("layout") as folder:
        prepare_folder(folder, plans, request)
        hint = "raise --timeout, or ask for fewer steps"
        LocalRanks(ranks, folder, layout_rank, {"timeout_s": timeout_s}, limit_s=timeout_s, limit_hint=hint).run()
        return results(folder, plans)
