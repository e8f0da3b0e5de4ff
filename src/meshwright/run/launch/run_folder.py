"""Reading a run folder: what happened, as timelines that join with a simulation of the same program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ...cost import Cost
from ...errors import FormatError, UsageError
from ...fabric.fabric import Fabric
from ...io.fabric.document import fabric_from_document
from ...io.plan.plan import read_plan
from ...io.plan.run_names import PLAN
from ...plan.plan import Plan
from ...program.calls import inline
from ...program.tables import I32
from ...timeline import Spans, Timeline
from ..recording.recording import RankRecording, plan_identity
from .request import RUN_SCHEMA, RUN_VERSION, RunDocument

__all__ = ["RecordedRun", "read_run", "run_plan"]

MAX_FILE_BYTES = 1 << 30  # of one file of a run folder: what is larger is not read into memory
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """`steps`: a Timeline per recorded training step, seconds from the end of the step before; `profiled[i]`: slowed by measuring memory."""

    document: RunDocument
    fabric: Fabric
    cost: Cost
    steps: tuple[Timeline, ...]
    profiled: tuple[bool, ...]
    recordings: tuple[RankRecording, ...]


def read_run(folder: Path, plan: Plan | None = None) -> RecordedRun:
    """Read `run.json` and the recordings beside it; `plan` must be the one that was run.

    Raises: UsageError (no run there, another plan), FormatError (a file is not what it should be).
    """
    path = _run_file(folder)
    document = _decode(path, RunDocument)
    if document.schema != RUN_SCHEMA or document.version != RUN_VERSION:
        raise FormatError(f"is {document.schema!r} version {document.version}, expected {RUN_SCHEMA!r} version {RUN_VERSION}", where=str(path))
    if plan is not None and plan_identity(plan) != document.plan:
        raise UsageError("the run was made with another plan", where=str(path), hint="compare a run with the plan that it ran")
    recordings = []
    for name in document.recordings:
        if Path(name).name != name:
            raise FormatError(f"names a file outside its folder: {name!r}", where=f"{path}: recordings")
        recordings.append(_decode(folder / name, RankRecording))
    if len(recordings) != document.ranks or [r.rank for r in recordings] != list(range(document.ranks)):
        raise FormatError(f"names {len(recordings)} recordings for {document.ranks} ranks", where=f"{path}: recordings")
    fabric = fabric_from_document(document.run_fabric, where=f"{path}: run_fabric")
    try:
        cost = msgspec.convert(document.cost, Cost)
    except msgspec.ValidationError as error:
        raise FormatError(str(error), where=f"{path}: cost") from None
    lanes = inline(plan.main, plan.programs).program.lane_of_step() if plan is not None else None
    kept = [i for i in range(min(len(r.steps) for r in recordings)) if all(r.steps[i].starts_s for r in recordings)]  # of the plan's own program
    timelines = tuple(_timeline(recordings, i, document, fabric.name, lanes) for i in kept)
    profiled = tuple(recordings[0].steps[i].profiled for i in kept)
    return RecordedRun(document=document, fabric=fabric, cost=cost, steps=timelines, profiled=profiled, recordings=tuple(recordings))


def run_plan(folder: Path) -> Plan:
    """The plan that ran, as the folder holds it.

    Raises: UsageError (no run there; a run from before folders held their plan), FormatError (the file is no plan, or not the one that ran).
    """
    document = _decode(_run_file(folder), RunDocument)
    path = folder / PLAN
    if not path.is_file():
        hint = "name it: --plan plan.json, or `meshwright report plan.json RUN`"
        raise UsageError("does not hold the plan that was run", where=str(folder), hint=hint)
    plan = read_plan(path)
    if plan_identity(plan) != document.plan:
        raise FormatError("is not the plan that this folder's run.json is of", where=str(path), hint="name the plan that was run")
    return plan


def _run_file(folder: Path) -> Path:
    path = folder / "run.json"
    if not path.is_file():
        raise UsageError("is not a run folder: it has no run.json", where=str(folder), hint="give the folder of `meshwright train run --out`")
    return path


def _timeline(recordings: list[RankRecording], index: int, document: RunDocument, fabric: str, lanes: I32 | None) -> Timeline:
    rank, step, start, end = [], [], [], []
    for r in recordings:
        record = r.steps[index]
        if not len(record.starts_s) == len(record.ends_s) == len(r.order):
            raise FormatError(
                f"training step {record.step} has {len(record.starts_s)} times for {len(r.order)} program steps", where=f"rank-{r.rank:03d}.json"
            )
        rank.append(np.full(len(r.order), r.rank, np.int32))
        step.append(np.asarray(r.order, np.int32))
        start.append(np.asarray(record.starts_s))
        end.append(np.asarray(record.ends_s))
    # A step begins when the one before is over everywhere: a rank that was done early waits inside this one, and that is not its time.
    before = [r.steps[index - 1] for r in recordings] if index else []
    zero = max(s.end_s if s.evaluated_s is None else s.evaluated_s for s in before) if index else min(r.steps[index].start_s for r in recordings)
    steps = np.concatenate(step)
    if lanes is not None and len(steps) and (steps.min() < 0 or steps.max() >= len(lanes)):
        raise FormatError("a recording names steps that the plan's program does not have", where="recordings")
    spans = Spans(
        rank=np.concatenate(rank), lane=lanes[steps] if lanes is not None else np.full(len(steps), -1, np.int32), step=steps,
        iteration=np.zeros(len(steps), np.int32), start_s=np.maximum(np.concatenate(start) - zero, 0.0),
        end_s=np.maximum(np.concatenate(end) - zero, 0.0),
    )  # fmt: skip
    return Timeline(
        origin="measured", run_fabric=fabric, spans=spans, makespan_s=max(r.steps[index].end_s for r in recordings) - zero,
        memory_peak_bytes=document.memory_peak_bytes, attributes={"training_step": recordings[0].steps[index].step},
    )  # fmt: skip


def _decode(path: Path, kind: type[T]) -> T:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FormatError(f"is larger than {MAX_FILE_BYTES} bytes", where=str(path))
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error)[:300], where=str(path)) from None
