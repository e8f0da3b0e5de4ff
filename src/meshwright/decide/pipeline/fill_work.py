"""Work that may wait for a pipeline's idle time: the items of K-FAC, of gradient statistics, checkpoints and evaluation, and what items must keep.

rank = device · data + replica, as in `lower`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...deferrable import Deferrable, FillWork
from ...errors import UsageError
from .orders import connection, message_bytes, stage_share
from .problem import PipelineProblem, Schedule, per_stage

__all__ = [
    "KFACCosts", "checkpoint_work", "evaluation_work", "gradient_work", "holders", "joined", "kfac_work", "require_sound",
]  # fmt: skip


def require_sound(work: FillWork, ranks: int) -> None:
    """Raises: UsageError naming the item whose figures, ranks or predecessors cannot be."""
    names = {i.name for i in work.items}
    if len(names) < len(work.items):
        raise UsageError("two items have one name", where="work", hint="give every item a name of its own")
    for i in work.items:
        if not i.ranks or any(not 0 <= r < ranks for r in i.ranks) or len(set(i.ranks)) < len(i.ranks):
            raise UsageError(f"runs on ranks {list(i.ranks)}, there are {ranks}", where=i.name)
        if not 0 <= i.duration_s < float("inf") or not 0 <= i.piece_s < float("inf") or min(i.ready_step, i.deadline_steps, i.keeps_bytes) < 0:
            raise UsageError("a figure is negative or not finite", where=i.name)
        if i.together and i.piece_s:
            raise UsageError("a collective cannot be cut into pieces here", where=i.name, hint="list its parts as items")
        if unknown := sorted(set(i.after) - names):
            raise UsageError(f"comes after {unknown[0]!r}, which is no item", where=i.name)
    _require_acyclic(work.items)


def _require_acyclic(items: Sequence[Deferrable]) -> None:
    waits = {i.name: set(i.after) for i in items}
    while waits:
        free = [n for n, w in waits.items() if not w & waits.keys()]
        if not free:
            raise UsageError("items wait for each other", where=sorted(waits)[0])
        for n in free:
            del waits[n]


def joined(parts: Sequence[FillWork], ranks: int) -> FillWork:
    """All work together."""

    def total(rows: list[tuple[int, ...]] | list[tuple[float, ...]]) -> list[float]:
        return [sum(r[i] for r in rows if r) for i in range(ranks)]

    return FillWork(
        items=tuple(i for p in parts for i in p.items), resident_bytes=tuple(int(x) for x in total([p.resident_bytes for p in parts])),
        exposed_s=tuple(total([p.exposed_s for p in parts])),
    )  # fmt: skip


def holders(problem: PipelineProblem, schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Ranks that hold a stage: its copies, each with its replicas."""
    return tuple(d * problem.data + i for d in sorted({where[stage] for where in schedule.placement}) for i in range(problem.data))


def _uses(problem: PipelineProblem, schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """(rank, stage, micro-batch) of everything that runs forward and backward."""
    for m, copy in enumerate(schedule.copy_of):
        for stage, device in enumerate(schedule.placement[copy]):
            for replica in range(problem.data):
                yield device * problem.data + replica, stage, m


# ---- K-FAC -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class KFACCosts:
    """One number, or one per stage of the problem, for a whole stage on a device of speed 1.

    curvature_s: both factors of one micro-batch, half each unless `gradient_curvature_s` (B) is given, then it is A alone.
    inverse_s, gradient_inverse_s: likewise, per refresh. sync_s: both factors over the ranks that hold the stage; without it, a ring all-reduce
    of `factor_bytes` on the problem's connections. precondition_s: every step, in no bubble. layers: pieces that curvature and inversion are made of.
    error_bytes, input_bytes: output gradients and inputs kept of one micro-batch until their curvature is done. factor_bytes: both factors;
    their inverses take as much again.
    """

    curvature_s: float | Sequence[float]
    inverse_s: float | Sequence[float]
    gradient_curvature_s: float | Sequence[float] | None = None
    gradient_inverse_s: float | Sequence[float] | None = None
    sync_s: float | Sequence[float] | None = None
    precondition_s: float | Sequence[float] = 0.0
    layers: int = 1
    error_bytes: float | Sequence[float] = 0
    input_bytes: float | Sequence[float] = 0
    factor_bytes: float | Sequence[float] = 0


@dataclass
class _Stages:
    """A cost table per stage of the problem, read per stage of the schedule on one of its ranks."""

    problem: PipelineProblem
    schedule: Schedule
    table: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, name: str, stage: int, rank: int, *, microbatch: bool = False, size: bool = False) -> float:
        share = self.schedule.chunks * (self.schedule.parts if microbatch else 1)
        speed = 1.0 if size else self.problem.speeds[rank // self.problem.data]
        return self.table[name][stage_share(self.schedule, stage)] / (share * speed)


def _kfac_table(problem: PipelineProblem, schedule: Schedule, costs: KFACCosts) -> _Stages:
    d = problem.devices
    if costs.layers < 1:
        raise UsageError(f"must be >= 1, got {costs.layers}", where="layers")
    table = _Stages(problem, schedule)
    for name, other in (("curvature_s", costs.gradient_curvature_s), ("inverse_s", costs.gradient_inverse_s)):
        whole = per_stage(getattr(costs, name), d, name)
        table.table[name] = whole if other is not None else tuple(x / 2 for x in whole)
        table.table["gradient_" + name] = per_stage(other, d, "gradient_" + name) if other is not None else table.table[name]
    for name in ("precondition_s", "error_bytes", "input_bytes", "factor_bytes"):
        table.table[name] = per_stage(getattr(costs, name), d, name)
    if costs.sync_s is not None:
        table.table["sync_s"] = per_stage(costs.sync_s, d, "sync_s")
    return table


def kfac_work(problem: PipelineProblem, schedule: Schedule, costs: KFACCosts) -> FillWork:
    """Per stage: curvature A after each F, B after each backward (after I when split), sums over the ranks that hold the stage, then both inverses of
    every layer, each on any of those ranks. Inverses wait for both factors, since the damping is split by both.

    Raises: UsageError naming the cost.
    """
    table = _kfac_table(problem, schedule, costs)
    backward = "I" if schedule.split else "B"
    ranks = problem.devices * problem.data
    items: list[Deferrable] = []
    found: dict[tuple[str, int], list[str]] = {}
    for rank, stage, m in _uses(problem, schedule):
        where = f"{stage}:m{m}" + (f":r{rank % problem.data}" if problem.data > 1 else "")
        layers = max(1, costs.layers // schedule.chunks)
        for letter, action, cost, kept in (("A", "F", "curvature_s", "input_bytes"), ("B", backward, "gradient_curvature_s", "error_bytes")):
            seconds = table.of(cost, stage, rank, microbatch=True)
            held = int(table.of(kept, stage, rank, microbatch=True, size=True))
            name = f"curvature {letter} {where}"
            found.setdefault((letter, stage), []).append(name)
            items.append(Deferrable(
                name=name, kind="curvature", duration_s=seconds, ranks=(rank,), actions=((rank, f"{stage}{action}{m}"),), piece_s=seconds / layers,
                keeps_bytes=held, priority=0 if letter == "A" else 1,
            ))  # fmt: skip
    for stage in range(schedule.stages):
        items += _inverses(table, stage, costs.layers, [found[x, stage] for x in "AB"])
    resident, exposed = [0] * ranks, [0.0] * ranks
    for device in range(problem.devices):
        for _, stage in schedule.hosted(device):
            for rank in range(device * problem.data, (device + 1) * problem.data):
                resident[rank] += 2 * int(table.of("factor_bytes", stage, rank, size=True))
                exposed[rank] += table.of("precondition_s", stage, rank)
    return FillWork(items=tuple(items), resident_bytes=tuple(resident), exposed_s=tuple(exposed))


def _inverses(table: _Stages, stage: int, layers: int, curvature: list[list[str]]) -> list[Deferrable]:
    """Sums of a stage's factors over its holders, where there are several, and the inverses of its layers."""
    problem, schedule = table.problem, table.schedule
    held = holders(problem, schedule, stage)
    items: list[Deferrable] = []
    ready = [name for names in curvature for name in names]
    if len(held) > 1:
        if "sync_s" in table.table:
            seconds = table.of("sync_s", stage, held[0], size=True)
        else:
            links = [connection(problem, a // problem.data, b // problem.data) for a in held for b in held if a != b]
            size, n = table.of("factor_bytes", stage, held[0], size=True), len(held)
            seconds = 2 * (n - 1) * (max(x[0] for x in links) + size / n / min(x[1] for x in links))
        for letter, names in zip("AB", curvature, strict=True):
            items.append(Deferrable(
                name=f"sync {letter} {stage}", kind="sync", duration_s=seconds / 2, ranks=held, together=True, after=tuple(names), priority=2,
            ))  # fmt: skip
        ready = [i.name for i in items]
    each = max(1, layers // schedule.chunks)
    for layer in range(each):
        for letter, cost in (("A", "inverse_s"), ("B", "gradient_inverse_s")):
            slowest = max(table.of(cost, stage, r) for r in held) / each
            items.append(Deferrable(
                name=f"inverse {letter} {stage}.{layer}", kind="inverse", duration_s=slowest, ranks=held, after=tuple(ready), priority=3,
            ))  # fmt: skip
    return items


# ---- other work ------------------------------------------------------------------------------------------------------------
def gradient_work(
    problem: PipelineProblem, schedule: Schedule, kind: str, phases: Sequence[tuple[str, float | Sequence[float]]], *, layers: int = 1,
    kept_bytes: float | Sequence[float] = 0,
) -> FillWork:  # fmt: skip
    """Work on final gradients of a step, done while the next ones run: Shampoo (`statistics`, then `roots`), Muon (`orthogonalise`).

    phases: (name, seconds per stage) one after the other, cut by layers; done once per stage by any of the ranks that hold it, on a copy of the
    gradients (`kept_bytes` per stage) that is there from step 1 on. Raises: UsageError.
    """
    if layers < 1:
        raise UsageError(f"must be >= 1, got {layers}", where="layers")
    kept = per_stage(kept_bytes, problem.devices, "kept_bytes")
    items = []
    for stage in range(schedule.stages):
        held = holders(problem, schedule, stage)
        share, each = stage_share(schedule, stage), max(1, layers // schedule.chunks)
        for layer in range(each):
            before: tuple[str, ...] = ()
            for number, (phase, seconds) in enumerate(phases):
                whole = per_stage(seconds, problem.devices, phase)[share] / (schedule.chunks * each)
                speed = min(problem.speeds[r // problem.data] for r in held)
                name = f"{kind} {phase} {stage}.{layer}"
                last = number == len(phases) - 1
                items.append(Deferrable(
                    name=name, kind=f"{kind}-{phase}", duration_s=whole / speed, ranks=held, after=before, ready_step=1, priority=number,
                    keeps_bytes=int(kept[share] / (schedule.chunks * each)) if last else 0,
                ))  # fmt: skip
                before = (name,)
    return FillWork(items=tuple(items))


def checkpoint_work(
    problem: PipelineProblem, schedule: Schedule, *, write_s: float | Sequence[float], snapshot_s: float | Sequence[float] = 0.0,
    piece_s: float = 0.0, within_steps: int = 0,
) -> FillWork:  # fmt: skip
    """One copy of every stage written out: a snapshot in step 0, before its optimizer changes the weights, then the writing, in pieces.

    write_s, snapshot_s: per stage. The snapshot (as many bytes as the stage's weights) is held until it is written. Raises: UsageError.
    """
    write, snapshot = per_stage(write_s, problem.devices, "write_s"), per_stage(snapshot_s, problem.devices, "snapshot_s")
    items = []
    for stage in range(schedule.stages):
        rank = schedule.placement[0][stage] * problem.data  # the rank that took the snapshot writes it
        share = stage_share(schedule, stage)
        size = -(-problem.weight_bytes[share] // schedule.chunks)
        taken = Deferrable(
            name=f"snapshot {stage}", kind="snapshot", duration_s=snapshot[share] / schedule.chunks, ranks=(rank,), deadline_steps=1, priority=0,
            piece_s=piece_s,
        )  # fmt: skip
        items += [taken, Deferrable(
            name=f"write {stage}", kind="write", duration_s=write[share] / schedule.chunks, ranks=(rank,), after=(taken.name,), priority=1,
            piece_s=piece_s, deadline_steps=within_steps, keeps_bytes=size,
        )]  # fmt: skip
    return FillWork(items=tuple(items))


def evaluation_work(problem: PipelineProblem, schedule: Schedule, microbatches: int) -> FillWork:
    """Forwards of `microbatches` evaluation micro-batches through all stages; each lies within one step, so that it sees one state of the weights.

    Micro-batches take the schedule's copies in turn. Raises: UsageError.
    """
    if microbatches < 1:
        raise UsageError(f"must be >= 1, got {microbatches}", where="microbatches")
    items = []
    for m in range(microbatches):
        where = schedule.placement[m % schedule.copies]
        replica = (m // schedule.copies) % problem.data
        for stage, device in enumerate(where):
            seconds = problem.forward_s[stage_share(schedule, stage)] / (schedule.chunks * schedule.parts * problem.speeds[device])
            size = message_bytes(problem, schedule, stage) if stage < schedule.stages - 1 else 0
            items.append(Deferrable(
                name=f"evaluate {stage}:e{m}", kind="evaluate", duration_s=seconds, ranks=(device * problem.data + replica,), group=f"e{m}",
                after=(f"evaluate {stage - 1}:e{m}",) if stage else (), message_bytes=size, priority=m,
            ))  # fmt: skip
    return FillWork(items=tuple(items))
