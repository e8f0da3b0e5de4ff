"""Runs of ours as views of their ranks: program steps, modules inside them, and messages matched by the program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..bottleneck.from_trace import waiting
from ..bottleneck.lanes import Activities, Kind, Meetings, RankView, Stage, Step
from ..errors import UsageError
from ..io.trace.events import matched_steps
from ..plan.plan import Plan
from ..program.calls import inline
from ..program.program import Kind as StepKind
from ..program.program import Part, Program
from ..run.launch.run_folder import RecordedRun, read_run
from ..run.recording.recording import RankRecording, StepRecord

__all__ = ["plain_steps", "run_views"]

WARM_UP_STEPS = 2  # left out where later ones are there: they compile, allocate and order buckets
I64 = NDArray[np.int64]


def run_views(plan: Plan, folder: Path) -> tuple[list[RankView], bool]:
    """All ranks of a run of ours, by its recordings: program steps, modules inside them, and messages matched by the program; and whether they
    ran on one machine, with one clock.

    Raises: as `read_run`; UsageError where no undisturbed step was recorded.
    """
    run = read_run(folder, plan)
    program = inline(plan.main, plan.programs).program
    chosen = plain_steps(run)
    one_clock = len({r.clock or r.host for r in run.recordings}) == 1
    meetings = _messages(program, run, chosen, one_clock=one_clock)
    return [_view(program, r, chosen, meetings[r.rank], str(folder)) for r in run.recordings], one_clock


def plain_steps(run: RecordedRun) -> list[int]:
    """The longest row of steps that nothing slowed, without the first ones where there are more."""
    records = run.recordings[0].steps
    best: list[int] = []
    row: list[int] = []
    for i, record in enumerate(records):
        after = i > 0 and records[i - 1].traced  # the trace was written meanwhile
        row = [*row, i] if record.starts_s and not record.profiled and not record.traced and not after else []
        best = row if len(row) > len(best) else best
    if not best:
        raise UsageError("the run recorded no step that was not slowed by measuring memory or by the profiler", hint="run more steps")
    return [i for i in best if i >= WARM_UP_STEPS] or best


def _ns(seconds: float | Sequence[float] | NDArray[np.float64]) -> I64:
    return np.round(np.asarray(seconds, np.float64) * 1e9).astype(np.int64)


def _messages(program: Program, run: RecordedRun, chosen: list[int], *, one_clock: bool) -> list[Meetings]:
    """Per rank its messages: the sender enters one when it posts it, the receiver when it waits; both leave when it has arrived."""
    send, receive = matched_steps(program)
    actor = program.lanes.actor[program.lane_of_step()]
    size = program.message_bytes()
    rows: list[list[tuple[str, str, str, int, int, int, int, int]]] = [[] for _ in run.recordings]
    for i in chosen:
        begin, end = np.zeros(len(program.steps), np.int64), np.zeros(len(program.steps), np.int64)
        for r in run.recordings:
            begin[r.order], end[r.order] = _ns(r.steps[i].starts_s), _ns(r.steps[i].ends_s)
        number = run.recordings[0].steps[i].step
        for a, b in zip(send.tolist(), receive.tolist(), strict=True):
            source, destination = int(actor[a]), int(actor[b])
            if max(source, destination) >= len(rows):
                continue  # a switch of the network, which has no recording
            common = (f"{number}/{a}>{b}", "message", f"link/{source}>{destination}")
            rest = (source, destination, int(size[a]))
            leaves = max(int(end[b]), int(begin[a]) + 1) if one_clock else int(end[a])
            rows[source].append((*common, int(begin[a]), leaves, *rest))
            rows[destination].append((*common, int(begin[b]), int(end[b]), *rest))
    return [_as_meetings(sorted(mine, key=lambda m: (m[3], m[0]))) for mine in rows]


def _as_meetings(rows: list[tuple[str, str, str, int, int, int, int, int]]) -> Meetings:
    numbers = np.array([r[3:] for r in rows], np.int64).reshape(-1, 5)
    return Meetings(
        key=tuple(r[0] for r in rows), label=tuple(r[1] for r in rows), queue=tuple(r[2] for r in rows), arrives=numbers[:, 0], leaves=numbers[:, 1],
        source=numbers[:, 2], destination=numbers[:, 3], size_bytes=numbers[:, 4], everyone=np.zeros(len(rows), bool),
    )  # fmt: skip


def _view(program: Program, recording: RankRecording, chosen: list[int], meetings: Meetings, source: str) -> RankView:
    modules = tuple(dict.fromkeys(["", *(m.module for m in recording.module_runs)]))
    number = {m: i for i, m in enumerate(modules)}
    run_module = np.array([number[m.module] for m in recording.module_runs], np.int32)
    of_key = {key: i for i, key in enumerate(meetings.key)}
    parts = [_step_pieces(program, recording, recording.steps[i], run_module, number.get("loss", -1), of_key) for i in chosen]
    records = [recording.steps[i] for i in chosen]
    ends = [*(_ns(r.start_s) for r in records[1:]), _ns(records[-1].end_s)]
    start, kind, stage, module, name, meeting = (np.concatenate([p[k] for p in parts]) for k in range(6))
    end = np.append(start[1:], ends[-1])
    order = end > start
    pieces = Activities(
        start=start, end=end, kind=kind.astype(np.int8), stage=stage.astype(np.int8), module=module.astype(np.int32), name=name.astype(np.int32),
        meeting=meeting.astype(np.int32),
    ).take(order)  # fmt: skip
    steps = [Step(number=r.step, start=int(_ns(r.start_s)), end=int(e)) for r, e in zip(records, ends, strict=True)]
    return RankView(
        rank=recording.rank, source=source, steps=steps, host=waiting(pieces, meetings), device=None, meetings=meetings, modules=modules,
        names=(),
    )  # fmt: skip


_STAGE = {"F": Stage.FORWARD, "R": Stage.BACKWARD, "B": Stage.BACKWARD, "I": Stage.BACKWARD, "W": Stage.BACKWARD, "optimizer": Stage.OPTIMIZER}


def _step_pieces(
    program: Program, recording: RankRecording, record: StepRecord, run_module: NDArray[np.int32], loss: int, of_key: dict[str, int]
) -> tuple[I64, ...]:
    """Columns start, kind, stage, module, program step, meeting of the pieces of one training step; a piece lasts until the next."""
    received = {int(b): int(a) for a, b in zip(*matched_steps(program), strict=True)}
    rows: list[tuple[int, int, int, int, int, int]] = []
    begin = int(_ns(record.start_s))
    if record.data_end_s is not None:
        rows.append((begin, Kind.DATA, Stage.DATA, 0, -1, -1))
        begin = int(_ns(record.data_end_s))
    rows.append((begin, Kind.IDLE, Stage.OTHER, 0, -1, -1))
    marks, mark = _ns(record.marks_s), 0
    for step, start, end in zip(recording.order, _ns(record.starts_s).tolist(), _ns(record.ends_s).tolist(), strict=True):
        if int(program.steps.kind[step]) == StepKind.COMPUTE:
            stage = _STAGE.get(program.ops.name[int(program.steps.op[step])], Stage.OTHER)
            rows.append((start, Kind.COMPUTE, stage, 0, step, -1))
            while mark < len(marks) and marks[mark] < start:
                mark += 1
            while mark < len(marks) and marks[mark] < end:
                module = int(run_module[record.marks[mark]])
                of = Stage.LOSS if module == loss and stage == Stage.FORWARD else stage
                rows.append((int(marks[mark]), Kind.COMPUTE, of, module, step, -1))
                mark += 1
        else:
            key = f"{record.step}/{received[step]}>{step}" if step in received else ""
            waits = bool(int(program.steps.parts[step]) & Part.RECV) and key in of_key
            rows.append((start, Kind.WAIT if waits else Kind.HOST, Stage.COMMUNICATION, 0, step, of_key.get(key, -1) if waits else -1))
        rows.append((end, Kind.IDLE, Stage.OTHER, 0, -1, -1))
    table = np.array(rows, np.int64).T
    return tuple(table)
