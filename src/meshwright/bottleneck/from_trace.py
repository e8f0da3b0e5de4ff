"""One rank's trace by torch.profiler as a view: host pieces, device work with its launches, meetings, steps."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..kernels.pieces import inherit, places
from ..trace.launching import launched
from ..trace.trace import ABSENT, Trace
from ..trace.vocabulary import DEVICE, EVALUATE, KERNEL, NODE, RUNTIME, STEP
from .classify import COLLECTIVE_KERNEL, COPY_OPERATOR, HOST, MEETING_RANGE, ONE_WAY, SYNC, TRANSFER
from .labels import Labels, own_labels
from .lanes import Activities, Device, Kind, Meetings, RankView, Stage, Step
from .tiles import covering, distinct, flattened

__all__ = ["rank_view"]

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


def rank_view(trace: Trace, labels: Labels | None = None, *, rank: int | None = None) -> RankView:
    """The view of `trace`, on its own clock (ns since the epoch where the file says so). `rank`: where the trace does not say it.

    Raises: FormatError for a trace without any operator or kernel.
    """
    labels = labels or own_labels(trace)
    warnings = [f"{w.kind} ({w.count})" for w in trace.warnings if "overlap" not in w.kind]  # gloo's ranges always do
    named = _Names(trace)
    ranges = trace.in_category("user_annotation", "gpu_user_annotation") & named.matches(MEETING_RANGE)
    host = trace.in_category(*HOST) & ~ranges
    main, threads = _threads(trace, host)
    steps = _steps(trace, main, warnings)
    device = _device(trace, named, labels)
    meetings, of_row = _meetings(trace, named, ranges, steps)
    modules = list(labels.modules)
    work = _host(trace, named, labels, host, main, threads, steps, meetings, modules, has_device=device is not None)
    if device is not None:
        at = np.flatnonzero(device.work.meeting >= 0)  # rows of the trace so far: see _device
        device.work.meeting[at] = of_row[device.work.meeting[at]]
    clock = trace.origin_ns + trace.base_time_ns
    view = RankView(
        rank=rank if rank is not None else trace.rank if trace.rank is not None else 0, source=trace.source, steps=steps, host=work, device=device,
        meetings=meetings, modules=tuple(modules), names=trace.names, kinds=labels.kinds,
        machine=trace.metadata.get("host_name", ""), warnings=tuple(warnings),
    )  # fmt: skip
    return msgspec.structs.replace(view.aligned(clock), clock_ns=0)


class _Names:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def matches(self, pattern: re.Pattern[str]) -> Mask:
        return self.trace.where_name(np.array([bool(pattern.search(n)) for n in self.trace.names], bool)) if len(self.trace) else np.zeros(0, bool)


def _threads(trace: Trace, host: Mask) -> tuple[int, list[int]]:
    """The track that runs the loop, and the autograd threads that work for it."""
    if not host.any():
        raise FormatError("holds no operator of a host thread", where=trace.source, hint="give a trace written by torch.profiler")
    step_name = np.array([bool(STEP.match(n)) for n in trace.names], bool)
    annotation = host & trace.in_category("user_annotation")
    marks = Counter(trace.track[annotation & trace.where_name(step_name)].tolist())
    if marks:
        main = marks.most_common(1)[0][0]
    else:
        busy = np.bincount(trace.track[host & (trace.parent < 0)], weights=trace.duration_ns[host & (trace.parent < 0)], minlength=len(trace.tracks))
        main = int(busy.argmax())
    engine = trace.where_name(np.array([n.startswith(EVALUATE) or bool(NODE.search(n)) for n in trace.names], bool)) & host
    # Autograd runs backward on threads of its own; those of other processes work for others.
    others = {t for t in np.flatnonzero(np.bincount(trace.track[engine])).tolist() if t != main and trace.tracks[t].pid == trace.tracks[main].pid}
    return main, sorted(others)


def _steps(trace: Trace, main: int, warnings: list[str]) -> list[Step]:
    rows = np.arange(trace.rows(main).start, trace.rows(main).stop)
    found = []
    for row in rows[trace.in_category("user_annotation")[rows]].tolist():
        match = STEP.match(trace.name_of(row))
        if match:
            found.append(Step(number=int(match[1]), start=int(trace.start_ns[row]), end=int(trace.start_ns[row] + trace.duration_ns[row])))
    if found:
        return found
    warnings.append("no ProfilerStep in the trace: the whole of it counts as one step")
    end = int((trace.start_ns + trace.duration_ns)[trace.in_category(*HOST, *DEVICE)].max())
    return [Step(number=0, start=int(trace.start_ns[rows].min()), end=end)]


def _host(
    trace: Trace, named: _Names, labels: Labels, host: Mask, main: int, threads: list[int], steps: list[Step], meetings: Meetings,
    modules: list[str], *, has_device: bool,
) -> Activities:  # fmt: skip
    """Pieces of the loop's thread; where it only waits inside an annotation, those of autograd's threads; gaps in between."""
    low, high = steps[0].start, steps[-1].end
    start, end, row = _flattened(trace, host, main)
    container = ~trace.in_category("cpu_op", *RUNTIME)
    for thread in threads:
        start, end, row = _fill((start, end, row), _flattened(trace, host, thread), container)
    start, end, row = _with_gaps(start, end, row, low, high)
    kind = _host_kinds(trace, named, labels, row, container, has_device=has_device)
    stage = np.where(row >= 0, labels.stage[row], 0).astype(np.int8)
    stage = _between(stage, row)
    kind = np.where((kind == Kind.IDLE) & (stage == Stage.DATA), np.int8(Kind.DATA), kind)
    module = _modules_between(np.where(row >= 0, labels.module[row], 0).astype(np.int32), kind, stage, modules)
    pieces = Activities(
        start=start, end=end, kind=kind, stage=stage, module=module,
        name=np.where(row >= 0, trace.name[row], -1).astype(np.int32), meeting=np.full(len(row), -1, np.int32),
    )  # fmt: skip
    return pieces if has_device else waiting(pieces, meetings)


def _flattened(trace: Trace, host: Mask, track: int) -> tuple[I64, I64, I64]:
    rows = np.arange(trace.rows(track).start, trace.rows(track).stop)
    rows = rows[host[rows]]
    return flattened(trace.start_ns, trace.end_ns, rows)


def _fill(outer: tuple[I64, I64, I64], inner: tuple[I64, I64, I64], container: Mask) -> tuple[I64, I64, I64]:
    """The outer pieces; where they are mere annotations or absent, the inner ones."""
    busy = ~container[outer[2]]
    edges = distinct(np.concatenate([*outer[:2], *inner[:2]]))
    first, second = covering(edges, *outer), covering(edges, *inner)
    strong = covering(edges, outer[0][busy], outer[1][busy], outer[2][busy])
    # Own work first, then what autograd's threads did meanwhile, and an annotation only where neither ran.
    row = np.where(strong >= 0, strong, np.where(second >= 0, second, first))
    keep = row >= 0
    return edges[:-1][keep], edges[1:][keep], row[keep]


def _with_gaps(start: I64, end: I64, row: I64, low: int, high: int) -> tuple[I64, I64, I64]:
    """Cut to [low, high], gaps as pieces of row -1."""
    keep = (end > low) & (start < high)
    start, end, row = np.maximum(start[keep], low), np.minimum(end[keep], high), row[keep]
    gap_start, gap_end = np.concatenate([[low], end]), np.concatenate([start, [high]])
    gaps = gap_end > gap_start
    start, end = np.concatenate([start, gap_start[gaps]]), np.concatenate([end, gap_end[gaps]])
    row = np.concatenate([row, np.full(int(gaps.sum()), -1, np.int64)])
    order = np.argsort(start, kind="stable")
    return start[order], end[order], row[order]


def _host_kinds(trace: Trace, named: _Names, labels: Labels, row: I64, container: Mask, *, has_device: bool) -> NDArray[np.int8]:
    kind = np.full(len(trace), int(Kind.LAUNCH if has_device else Kind.COMPUTE), np.int8)
    if not has_device:
        kind[_in_copies(trace, named)] = Kind.COPY
    kind[container] = Kind.HOST
    kind[named.matches(SYNC) & trace.in_category(*RUNTIME)] = Kind.SYNC
    kind[labels.stage == Stage.DATA] = Kind.DATA
    return np.where(row >= 0, kind[row], np.int8(Kind.IDLE)).astype(np.int8)


def _in_copies(trace: Trace, named: _Names) -> Mask:
    """Which slices are operators that copy a tensor, or lie in one."""
    inside = np.where(named.matches(COPY_OPERATOR) & trace.in_category("cpu_op"), np.int32(1), np.int32(-1))
    inherit(trace.parent, inside)
    return inside > 0


def _between(stage: NDArray[np.int8], row: I64) -> NDArray[np.int8]:
    """What comes after a stage's operators counts to it until the next stage begins; but not after data loading and the optimizer."""
    known = (row >= 0) & (stage != Stage.OTHER)
    before = np.maximum.accumulate(np.where(known, np.arange(len(stage)), -1))
    left = np.where(before >= 0, stage[np.maximum(before, 0)], np.int8(Stage.OTHER))
    return np.where(known | np.isin(left, (Stage.DATA, Stage.OPTIMIZER)), stage, left).astype(np.int8)


def _modules_between(
    module: NDArray[np.int32], kind: NDArray[np.int8], stage: NDArray[np.int8], modules: list[str]
) -> NDArray[np.int32]:  # fmt: skip
    """Python and gaps between operators of two modules, without a span that names one, are of the innermost module around both, in one stage.

    `modules`: the table of paths; gets those that are new.
    """
    open_ = np.flatnonzero(np.isin(kind, (Kind.HOST, Kind.IDLE)) & (module == 0))
    known = np.flatnonzero(module != 0)
    at = places(known, open_)
    inside = (at > 0) & (at < len(known))
    open_, at = open_[inside], at[inside]
    before, after = known[at - 1], known[at]
    alike = (stage[before] == stage[open_]) & (stage[after] == stage[open_]) & (stage[open_] != Stage.OTHER)
    open_, before, after = open_[alike], before[alike], after[alike]
    out, number = module.copy(), {path: i for i, path in reversed(list(enumerate(modules)))}
    if len(open_):
        pairs, which = np.unique(np.stack([module[before], module[after]], axis=1), axis=0, return_inverse=True)
        around = [_common(modules[a], modules[b]) for a, b in pairs.tolist()]
        for path in around:
            if path not in number:
                number[path] = len(modules)
                modules.append(path)
        both = [number[path] for path in around]
        out[open_] = np.array(both, np.int32)[which.reshape(-1)]
    return out


def _common(a: str, b: str) -> str:
    """The path of the innermost module around two."""
    parts = [x for x, y in zip(a.split("."), b.split("."), strict=False) if x == y]
    same = len(parts) if a.split(".")[: len(parts)] == parts == b.split(".")[: len(parts)] else 0
    return ".".join(parts[:same])


def waiting(pieces: Activities, meetings: Meetings) -> Activities:
    """Pieces in which the host does nothing of its own while a meeting is under way become waits for the one that ends next after they began."""
    if not len(meetings):
        return pieces
    pieces = _cut_at(pieces, np.concatenate([meetings.arrives, meetings.leaves]))
    order = np.argsort(meetings.leaves, kind="stable")
    idle = np.flatnonzero(np.isin(pieces.kind, (Kind.HOST, Kind.IDLE)))
    # Of the meetings under way the one that ends first is what the host waits for.
    at = places(meetings.leaves[order], pieces.start[idle], right=True)
    found = np.full(len(idle), -1, np.int64)
    for back in range(16):  # those that end next may not have begun; few are under way at once
        place = np.minimum(at + back, len(order) - 1)
        meeting = order[place]
        under_way = (meetings.arrives[meeting] <= pieces.start[idle]) & (meetings.leaves[meeting] > pieces.start[idle])
        hit = (at + back < len(order)) & (found < 0) & under_way
        found[hit] = meeting[hit]
    kind, waits = pieces.kind.copy(), pieces.meeting.copy()
    kind[idle[found >= 0]] = Kind.WAIT
    waits[idle] = found
    return msgspec.structs.replace(pieces, kind=kind, meeting=waits)


def _cut_at(pieces: Activities, times: I64) -> Activities:
    """Idle pieces split at the given times, so that each lies inside or outside every meeting."""
    idle = np.isin(pieces.kind, (Kind.HOST, Kind.IDLE))
    times = distinct(times)
    inside = places(pieces.start, times, right=True) - 1
    keep = (inside >= 0) & (times < pieces.end[np.maximum(inside, 0)]) & (times > pieces.start[np.maximum(inside, 0)])
    keep &= idle[np.maximum(inside, 0)]
    times, inside = times[keep], inside[keep]
    rows = np.sort(np.concatenate([np.arange(len(pieces)), inside]), kind="stable")
    start = np.sort(np.concatenate([pieces.start, times]), kind="stable")
    cut = pieces.take(rows)
    return msgspec.structs.replace(cut, start=start, end=np.append(start[1:], pieces.end[-1]))


def _device(trace: Trace, named: _Names, labels: Labels) -> Device | None:
    """Device work by start; a kernel's stage, module and copy-ness are those of the operator that launched it."""
    rows = np.flatnonzero(trace.in_category(*DEVICE) & (trace.stream != ABSENT))
    if not len(rows):
        return None
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    launch = launches(trace, rows)
    caller = np.where(launch >= 0, launch, rows)
    collective = named.matches(COLLECTIVE_KERNEL)[rows]
    transfer = named.matches(TRANSFER)[rows] | ~trace.in_category(*KERNEL)[rows]
    kind = np.select(
        [collective, transfer, (launch >= 0) & _in_copies(trace, named)[caller]], [Kind.COLLECTIVE, Kind.TRANSFER, Kind.COPY], default=Kind.COMPUTE
    ).astype(np.int8)
    stage = np.where(collective, np.int8(Stage.COMMUNICATION), labels.stage[caller])
    work = Activities(
        start=trace.start_ns[rows], end=trace.end_ns[rows], kind=kind, stage=stage.astype(np.int8), module=labels.module[caller],
        name=trace.name[rows], meeting=np.where(collective, rows, -1).astype(np.int32),
    )  # fmt: skip
    return Device(work=work, launch=np.where(launch >= 0, trace.start_ns[caller], -1), stream=trace.stream[rows] + (trace.device[rows] << 32))


def launches(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each device row the host row that launched it, or -1: see `launching.launched`; of several the last that began before the row."""
    found, kernel = launched(trace, np.flatnonzero(trace.in_category(*RUNTIME)), rows, trace.correlation)
    out = np.full(len(rows), -1, np.int64)
    order = np.argsort(trace.start_ns[found], kind="stable")
    found, kernel = found[order], kernel[order]
    first = np.unique(kernel, return_index=True)[1]
    out[kernel[first]] = found[first]
    early = trace.start_ns[found] <= trace.start_ns[rows[kernel]]
    out[kernel[early]] = found[early]  # in time, so that the last one stays
    return out


def _meetings(trace: Trace, named: _Names, ranges: Mask, steps: list[Step]) -> tuple[Meetings, NDArray[np.int32]]:
    """Collectives: kernels where there are any, else the ranges that gloo and others write. Also: the meeting of each row, or -1."""
    kernels = np.flatnonzero(named.matches(COLLECTIVE_KERNEL) & trace.in_category(*KERNEL))
    rows = kernels if len(kernels) else np.flatnonzero(ranges & trace.in_category("user_annotation"))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    rows = rows[(trace.end_ns[rows] > steps[0].start) & (trace.start_ns[rows] < steps[-1].end)] if not len(kernels) else rows
    said = {int(r): i for i, r in enumerate(trace.collectives.slice.tolist())}
    starts = np.array([s.start for s in steps], np.int64)
    seen: Counter[tuple[str, ...]] = Counter()
    keys, labels, queues, numbers = [], [], [], []
    for row in rows.tolist():
        at = said.get(row, -1)
        c = trace.collectives
        group = c.group[at] if at >= 0 else ""
        operation = (c.operation[at] if at >= 0 else "") or _operation(trace.name_of(row))
        source, destination, size = (int(x[at]) if at >= 0 else ABSENT for x in (c.source, c.destination, c.in_elements))
        sequence = int(c.sequence[at]) if at >= 0 else ABSENT
        step = int(np.searchsorted(starts, trace.start_ns[row], side="right")) - 1
        number = steps[step].number if step >= 0 else -1
        message = operation in ("send", "recv")
        if message:
            source, destination = _ends(trace, operation, source, destination)
        known = source >= 0 and destination >= 0
        pair = "" if not message else f"{source}>{destination}" if known else f"rank {trace.rank} alone"
        place = (group, "message" if message else operation, pair, f"#{sequence}" if sequence >= 0 else f"step {number}")
        # Without a sequence number the k-th of its kind in a step is taken to be the k-th on every rank.
        seen[place] += 1
        keys.append("/".join(place if sequence >= 0 else (*place, f"#{seen[place]}")))
        labels.append(operation)
        queues.append(f"{group}/{pair}")
        numbers.append((source, destination, size * _WIDTH.get(c.dtype[at].lower(), 0) if at >= 0 and size >= 0 else ABSENT))
    columns = np.array(numbers, np.int64).reshape(-1, 3)
    of_row = np.full(len(trace), -1, np.int32)
    of_row[rows] = np.arange(len(rows), dtype=np.int32)
    return Meetings(
        key=tuple(keys), label=tuple(labels), queue=tuple(queues), arrives=_entered(trace, rows), leaves=trace.end_ns[rows],
        source=columns[:, 0], destination=columns[:, 1], size_bytes=columns[:, 2],
        everyone=np.array([not ONE_WAY.search(x) for x in labels], bool),
    ), of_row  # fmt: skip


_CALL = re.compile(r"^c10d::(send|recv)")


def _entered(trace: Trace, rows: NDArray[np.int64]) -> I64:
    """When the rank entered each meeting. gloo begins a message's range after it has sent: there it is when the operator around it began."""
    entered = trace.start_ns[rows].copy()
    calls = np.flatnonzero(trace.where_name(np.array([bool(_CALL.match(n)) for n in trace.names], bool)))
    for track in np.flatnonzero(np.bincount(trace.track[rows])).tolist():
        mine = calls[trace.track[calls] == track]
        here = np.flatnonzero(trace.track[rows] == track)
        if len(mine):
            at = np.searchsorted(trace.start_ns[mine], entered[here], side="right") - 1
            call = mine[np.maximum(at, 0)]
            inside = (at >= 0) & (trace.end_ns[call] >= entered[here])
            entered[here[inside]] = trace.start_ns[call[inside]]
    return entered


def _ends(trace: Trace, operation: str, source: int, destination: int) -> tuple[int, int]:
    """(source, destination) of a message where the file says both, or between two ranks there is one other."""
    if (source >= 0 and destination >= 0) or trace.rank is None:
        return source, destination
    other = 1 - trace.rank if trace.world_size == 2 else destination if operation == "send" else source
    return (trace.rank, other) if operation == "send" else (other, trace.rank)


_WIDTH = {"float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2, "float16": 2, "bfloat16": 2, "double": 8, "float64": 8, "long": 8, "int64": 8,
          "byte": 1, "uint8": 1, "int8": 1, "bool": 1, "char": 1}  # fmt: skip


def _operation(name: str) -> str:
    found = MEETING_RANGE.match(name)
    if found:
        return found[2].replace("allreduce", "all_reduce")
    return {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}.get(_kernel_word(name), _kernel_word(name))


def _kernel_word(name: str) -> str:
    found = re.search(r"(allreduce|allgather|reducescatter|broadcast|sendrecv|reduce|alltoall)", name, re.IGNORECASE)
    return found[1].lower() if found else name.partition("(")[0][:40]
