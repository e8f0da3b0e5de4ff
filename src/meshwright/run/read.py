"""Reads a run folder back: `run.json` and its recordings, as `Measured`. The files may come from anywhere; sizes are capped."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ..cost import Cost
from ..errors import FormatError, UsageError
from ..fabric import Fabric
from ..io.fabric_document import fabric_from_document
from ..measured import Measured
from ..program import Program
from ..timeline import Spans, Timeline
from .rank import RankRecording
from .train import RunDocument

__all__ = ["read_run"]

MAX_BYTES = 512 << 20
T = TypeVar("T")


def read_run(folder: Path, program: Program) -> tuple[RunDocument, Measured, Fabric, Cost]:
    """(run.json, the measured timelines, the fabric the run had, its calibrated cost). `program` is the plan's program, inlined.

    Raises: UsageError (no run there, or of a program with other ranks or steps), FormatError (a file that is not what it should be).
    """
    if not (folder / "run.json").is_file():
        raise UsageError(f"no run.json in {folder}", where=str(folder), hint="make a run with `meshwright train run PLAN --out FOLDER`")
    document = _read(folder / "run.json", RunDocument)
    if document.ranks != program.ranks:
        raise UsageError(f"the run has {document.ranks} ranks, the plan {program.ranks}", where=str(folder), hint="compare a plan with its own run")
    recordings = []
    for name in document.recordings:
        if Path(name).name != name:
            raise FormatError(f"must be the name of a file beside it, got {name!r}", where=f"{folder / 'run.json'}: recordings")
        recordings.append(_read(folder / name, RankRecording))
    for r in recordings:
        if r.order and (min(r.order) < 0 or max(r.order) >= len(program.steps)):
            raise UsageError(f"rank {r.rank} executed steps that the plan does not have", where=str(folder), hint="compare a plan with its own run")
    fabric = fabric_from_document(document.run_fabric)
    try:
        cost = msgspec.convert(document.cost, Cost)
    except msgspec.ValidationError as error:
        raise FormatError(str(error), where=f"{folder / 'run.json'}: cost") from None
    share = float(document.machine_use.get("others", 0.0))
    measured = Measured(
        steps=_timelines(recordings, program, fabric.name), step_s=document.step_s, losses=document.losses,
        memory_peak_bytes=document.memory_peak_bytes, rss_peak_bytes=document.rss_peak_bytes, cpu_s=document.process_cpu_s,
        run_fabric=fabric.name, pacing=str(document.pacing.get("mode", "none")), others_share=share, notes=document.notes,
    )  # fmt: skip
    return document, measured, fabric, cost


def _timelines(recordings: list[RankRecording], program: Program, fabric: str) -> list[Timeline]:
    """One timeline per training step that every rank recorded in full and undisturbed by the memory profiler."""
    lane_of = program.lane_of_step()
    found = []
    for i in range(min(len(r.steps) for r in recordings)):
        records = [r.steps[i] for r in recordings]
        if any(x.profiled or len(x.starts_s) != len(r.order) or len(x.ends_s) != len(r.order) for x, r in zip(records, recordings, strict=True)):
            continue
        begin = min(x.start_s for x in records)
        end = max(x.end_s for x in records)
        step = np.concatenate([np.array(r.order, np.int32) for r in recordings])
        spans = Spans(
            rank=np.concatenate([np.full(len(r.order), r.rank, np.int32) for r in recordings]),
            lane=lane_of[step],
            step=step,
            iteration=np.zeros(len(step), np.int32),
            start_s=np.concatenate([np.array(x.starts_s) for x in records]) - begin,
            end_s=np.concatenate([np.array(x.ends_s) for x in records]) - begin,
        )
        found.append(Timeline(origin="measured", run_fabric=fabric, spans=spans, makespan_s=end - begin, attributes={"step": records[0].step}))
    return found


def _read(path: Path, kind: type[T]) -> T:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FormatError(f"{path.stat().st_size} bytes, at most {MAX_BYTES}", where=str(path))
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(str(error), where=str(path)) from None
