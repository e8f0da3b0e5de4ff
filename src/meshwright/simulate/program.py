"""A program run in virtual time: what is asked for is checked, made into tables, run by the engine and told as a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..cost import Cost
from ..errors import Unsupported, UsageError
from ..fabric.fabric import Fabric
from ..graph.graph import Work
from ..program.calls import inline
from ..program.program import Program
from ..timeline import Timeline
from .engine import finished
from .folded import simulate_folded
from .network import Mode, compile_network
from .pricing import durations, on_processors
from .results import make_timeline, refuse_unfinished
from .tables import LinkTables, ProgramTables, State, link_tables, make_state, program_tables
from .transfers import link_transfers

Extreme = Literal["lower", "expected", "upper"]
GOLDEN = 0.6180339887498949  # its multiples are spread over a period without a pattern
PHASES = 3  # of the periods of unlike processors to each other, which a run keeps and nobody knows
STEPS_IN_A_ROW = 6  # that are simulated from each under a quota: an even number without those that fill, since long and short ones take turns
MAX_FILLING = 2  # of them at first only use up what the buckets hold
NEAR_MEAN_SHARE = 0.01  # of the mean, by which a typical step may differ from it: runs of a lab differ by more
HALVINGS = 6  # of the way between the start of a shorter and of a longer step, to find one as long as the mean

__all__ = ["Extreme", "simulate_program", "simulate_stored"]


def simulate_program(
    program: Program, fabric: Fabric, placement: Sequence[str], cost: Cost | None = None, *,
    durations_s: NDArray[np.float64] | Sequence[float] | None = None, works: Mapping[str, Work] | None = None,
    programs: Mapping[str, Program] | None = None, network: Mode = "auto", segment_bytes: int | None = None,
    depth: Mapping[int, int] | int | None = None, sizes: Mapping[str, int] | Extreme | None = None, record: bool = True, memory: bool = True,
    staging: bool = False, transfers: bool = False,
) -> Timeline:  # fmt: skip
    """Run `program` in virtual time.

    Args:
        placement: fabric device of every rank, then fabric switch of every switch actor, by name.
        cost: prices the steps (see `pricing`); without it, and without `durations_s`, steps take no time of their own.
        durations_s: seconds per step instead; of a program with calls, per step of the inlined program.
        works: work per op key, for what `cost` has no table entry of.
        programs: callees by content hash, for a program with calls. Calls are inlined: their steps share links and time with the caller's.
        network, segment_bytes: the model of a shared link, see `network`.
        depth: of all channels, or by channel, instead of the program's own.
        sizes: bytes per symbol name, instead of the expected ones; or "lower" or "upper" for all of them.
        record: also spans, memory curves, the critical path and slack; else only makespan, link busy seconds and memory peaks.
        memory: without it memory is not counted, which takes longer than many a simulation.
        transfers: with `record`, also which message was on which link when.
        staging: count `depth` messages of staging at the receiver of every channel whose messages cannot go straight into their place.

    Returns: a `Timeline`; step ids are those of the inlined program, `slack_s` is per step.
    Raises: Deadlock (lanes wait for ever; carries the blocked steps), CheckFailed (undelivered messages, two lanes on one channel end),
    Unsupported (a folded program: see `meshwright.program.fold`), UsageError, UnknownName, Disconnected.
    """
    if program.fold is not None:
        raise Unsupported("a folded program stores only some of its ranks", where=program.name, hint="expand it, or use simulate_folded")
    inlined = inline(program, programs or {})
    p = inlined.program
    links = compile_network(p, fabric, placement, mode=network, segment_bytes=segment_bytes)
    time_s = _durations(p, fabric, placement, cost, durations_s, works)
    time_s, processors = on_processors(p, cost if durations_s is None else None, fabric, placement, time_s, works)
    tables, messages = program_tables(p, time_s, _message_bytes(p, sizes), _depths(p, depth), processors)
    links_t = link_tables(links)
    start = _typical_start(p, tables, links_t, messages) if np.any(tables.quota > 0) else None
    state = finished(tables, links_t, lambda: _started(make_state(tables, links_t, messages, record=record), start), record)
    refuse_unfinished(p, tables, state)
    makespan_s = _makespan_s(state)
    attributes: dict[str, Any] = {"network": links.mode, "segment_bytes": segment_bytes, "program": program.name}
    attributes["rate_instants"] = int(state.work[1])  # at which rates of fair links were worked out anew ...
    attributes["rate_work"] = int(state.work[2])  # ... and the links and flows looked at for it: what such a simulation costs
    timeline = make_timeline(
        inlined, tables, state, links, fabric_name=fabric.name, makespan_s=makespan_s, record=record, memory=memory,
        staging=staging, attributes=attributes,
    )  # fmt: skip
    return replace(timeline, transfers=link_transfers(tables, state, links)) if record and transfers else timeline


def simulate_stored(
    program: Program, fabric: Fabric, placement: Sequence[str], cost: Cost | None = None, *, works: Mapping[str, Work] | None = None,
    programs: Mapping[str, Program] | None = None, record: bool = True, transfers: bool = False,
) -> Timeline:  # fmt: skip
    """`simulate_program`, or `simulate_folded` of a folded program, whose spans are those of its representatives (without transfers)."""
    if program.fold is not None:
        return simulate_folded(program, fabric, placement, cost, works=works, programs=programs, record=record)
    return simulate_program(program, fabric, placement, cost, works=works, programs=programs, record=record, transfers=transfers)


def _started(state: State, processors: NDArray[Any] | None) -> State:
    """With what its processors have left at the start, and when they get more."""
    if processors is not None:
        for name in ("left", "refill"):
            state.processor[name] = processors[name]
    return state


def _makespan_s(state: State) -> float:
    return float(max(state.step["last_end"].max(initial=0.0), 0.0))


def _typical_start(p: Program, tables: ProgramTables, links: LinkTables, messages: NDArray[np.int64]) -> NDArray[Any]:
    """Processors at the start of a step that lasts as long as steps do in the mean: what one has used of a quota, the next one lacks.

    Periods of unlike processors begin at unlike times, so rows of steps are simulated from several; the mean is without the first ones of each row.
    Where no step is as long, as where a short one follows each long one, the start lies between those of a shorter and a longer one.
    Raises: as `refuse_unfinished`.
    """

    def after(start: NDArray[Any]) -> State:
        state = finished(tables, links, lambda: _started(make_state(tables, links, messages, record=False), start), False)
        refuse_unfinished(p, tables, state)
        return state

    tried: list[tuple[float, NDArray[Any]]] = []  # makespan, start
    settled_s: list[float] = []
    each = np.arange(1, len(tables.quota) + 1)
    for phase in range(1, PHASES + 1):
        start = make_state(tables, links, messages, record=False).processor
        start["refill"] = tables.period * np.modf(GOLDEN * phase * each)[0]
        for step in range(STEPS_IN_A_ROW):
            state = after(start)
            lasted_s = _makespan_s(state)
            tried.append((lasted_s, start))
            settled_s += [lasted_s] if step >= MAX_FILLING else []
            start = start.copy()
            start["left"], start["refill"] = state.processor["left"], state.processor["refill"] - lasted_s
    mean_s = min(sum(settled_s) / len(settled_s), max(settled_s))  # a sum of floats may be above
    shorter = max((t for t in tried if t[0] <= mean_s), key=lambda t: t[0], default=min(tried, key=lambda t: t[0]))
    longer = min((t for t in tried if t[0] >= mean_s), key=lambda t: t[0])
    best = min(shorter, longer, key=lambda t: abs(t[0] - mean_s))
    for _ in range(HALVINGS):
        if abs(best[0] - mean_s) <= NEAR_MEAN_SHARE * mean_s:
            break
        start = shorter[1].copy()
        for name in ("left", "refill"):
            start[name] = (shorter[1][name] + longer[1][name]) / 2
        between = _makespan_s(after(start)), start
        shorter, longer = (between, longer) if between[0] <= mean_s else (shorter, between)
        best = min(best, between, key=lambda t: abs(t[0] - mean_s))
    return best[1]


def _durations(
    p: Program, fabric: Fabric, placement: Sequence[str], cost: Cost | None, given: NDArray[np.float64] | Sequence[float] | None,
    works: Mapping[str, Work] | None,
) -> NDArray[np.float64]:  # fmt: skip
    if given is None:
        if cost is None:
            return np.zeros(len(p.steps))
        return durations(p, cost, fabric, placement, works)
    time_s = np.asarray(given, np.float64)
    if time_s.shape != (len(p.steps),):
        raise UsageError(f"{time_s.size} durations for {len(p.steps)} steps", where="durations_s", hint="one per step of the inlined program")
    if not np.all(np.isfinite(time_s) & (time_s >= 0)):
        at = int(np.argmin(np.isfinite(time_s) & (time_s >= 0)))
        raise UsageError(f"must be finite and >= 0, got {time_s[at]}", where=f"durations_s[{at}]")
    return time_s


def _message_bytes(p: Program, sizes: Mapping[str, int] | Extreme | None) -> NDArray[np.int64]:
    if isinstance(sizes, str):
        if sizes not in get_args(Extreme):
            raise UsageError(f"{sizes!r} is no set of sizes", where="sizes", hint=f"one of {', '.join(get_args(Extreme))}, or bytes by name")
        return p.message_bytes(sizes)
    out = p.message_bytes()
    for name, size_bytes in (sizes or {}).items():
        if name not in p.sizes.name:
            raise UsageError(f"the program has no size {name!r}", where="sizes", hint=f"it has: {', '.join(p.sizes.name[:8]) or 'none'}")
        number = p.sizes.name.index(name)
        low, high = int(p.sizes.lower[number]), int(p.sizes.upper[number])
        if not low <= size_bytes <= high:
            raise UsageError(f"{name!r} must be {low}..{high} bytes, got {size_bytes}", where="sizes")
        out = np.where(p.steps.size == number, size_bytes, out)
    return out


def _depths(p: Program, depth: Mapping[int, int] | int | None) -> NDArray[np.int64]:
    out = p.channels.depth.astype(np.int64)
    if isinstance(depth, int):
        out = np.full(len(out), depth, np.int64)
    elif depth is not None:
        for channel, value in depth.items():
            if not 0 <= channel < len(out):
                raise UsageError(f"the program has no channel {channel}", where="depth")
            out[channel] = value
    if len(out) and int(out.min()) < 1:
        raise UsageError(f"must be >= 1 message, got {int(out.min())}", where="depth")
    return out
