"""A breakdown of measured steps as text and as a JSON document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..bottleneck.breakdown import Breakdown
from ..bottleneck.device import DeviceTimes
from ..bottleneck.table import COLUMNS
from ..explain.numbers import seconds_text, share_text
from .columns import columns

__all__ = ["breakdown_document", "breakdown_text"]

_HEADS = {
    "compute_s": "compute", "copy_s": "copies", "exposed_s": "exposed comm", "transfer_s": "host-device", "data_stall_s": "data stall",
    "host_s": "host", "idle_s": "idle",
}  # fmt: skip


def breakdown_document(found: Breakdown, devices: Mapping[int, DeviceTimes] | None = None) -> dict[str, Any]:
    """Times are seconds per step unless the name says otherwise."""
    waits, clocks = _by_rank(found), found.clocks
    return {
        "schema": "meshwright.trace-breakdown", "version": 1, "step_s": found.step_s, "steps": max(t.steps for t in found.times),
        "ranks": [
            {
                "rank": t.rank, "source": v.source, "steps": t.steps, "step_s": t.step_s, **t.total, "communication_s": t.communication_s,
                "overlap_s": t.overlap_s, "stages": t.stages, "clock_shift_s": shift / 1e9,
                "clock_uncertain_s": uncertain / 1e9 if uncertain >= 0 else None, "clock_spread_s": spread / 1e9 if spread >= 0 else None,
                **({"device": _device(devices[t.rank])} if devices and t.rank in devices else {}),
            }
            for t, v, shift, uncertain, spread in zip(found.times, found.views, clocks.shift_ns, clocks.uncertain_ns, clocks.spread_ns, strict=True)
        ],
        "bottlenecks": [
            {
                "rank": i, "kind": c.kind, "where": c.where, "path_s": c.path_s, "gain_s": c.gain_s, "share": c.share, "advice": c.advice,
                "facts": c.facts,
            }
            for i, c in enumerate(found.causes, 1)
        ],
        "stragglers": {
            "total": [{"rank": r, **w} for r, w in sorted(waits.items(), key=lambda item: -item[1]["waited_s"])],
            "collectives": [
                {"key": s.key, "operation": s.operation, "rank": s.rank, "gain_s": s.gain_s, "waited_s": s.waited_s, "sure": bool(s.sure)}
                for s in found.stragglers
            ],
        },
        "warnings": list(found.warnings),
    }  # fmt: skip


def _device(times: DeviceTimes) -> dict[str, Any]:
    """Over all chosen steps together, not per step."""
    return {
        "idle_total_s": times.idle_s, "compute_total_s": times.compute_s, "other_total_s": times.other_s, "kernel_total_s": times.kernel_s,
        "communication_total_s": times.communication_s, "overlap_share": times.overlap if times.overlap == times.overlap else None,
        "steps": list(times.steps),
    }  # fmt: skip


def _by_rank(found: Breakdown) -> dict[int, dict[str, Any]]:
    """Per rank: to how many meetings it came last, what the others waited for it per step, and what its being as early as the next would gain."""
    steps = max(max(t.steps for t in found.times), 1)
    sums: dict[int, dict[str, Any]] = defaultdict(lambda: {"last": 0, "waited_s": 0.0, "gain_s": 0.0})
    for s in found.stragglers:
        mine = sums[s.rank]
        mine["last"] += 1
        mine["waited_s"] += s.waited_s / steps
        mine["gain_s"] += s.gain_s / steps
    return dict(sums)


def breakdown_text(found: Breakdown, devices: Mapping[int, DeviceTimes] | None = None, *, limit: int = 10) -> str:
    steps = max(t.steps for t in found.times)
    ranks = len(found.times)
    lines = [f"{steps} step{'s' if steps > 1 else ''} on {ranks} rank{'s' if ranks > 1 else ''}: {seconds_text(found.step_s)} per step", ""]
    rows = [["rank  stage", "time", *_HEADS.values()]]
    for t in found.times:
        for stage, times in t.stages.items():
            rows.append([f"{t.rank:<4}  {stage}", seconds_text(sum(times.values())), *(_cell(times[c]) for c in COLUMNS)])
        rows.append([f"{t.rank:<4}  all", seconds_text(t.step_s), *(_cell(t.total[c]) for c in COLUMNS)])
    lines += columns(rows)
    if any(t.communication_s for t in found.times):
        lines.append("")
        lines += [
            f"rank {t.rank}: communication under way {seconds_text(t.communication_s)}, of it while computing {seconds_text(t.overlap_s)} "
            f"({share_text(t.overlap_s / t.communication_s if t.communication_s else 0.0)})"
            for t in found.times
        ]
    lines += _device_lines(found, devices or {})
    lines += _clocks(found)
    lines += ["", "what to do, by what it could gain per step"]
    lines += [f"{i:2}. {c.line()}" for i, c in enumerate(found.causes[:limit], 1)]
    if len(found.causes) > limit:
        lines.append(f"    ... {len(found.causes) - limit} more")
    lines += [f"note: {w}" for w in found.warnings]
    return "\n".join(lines)


def _device_lines(found: Breakdown, devices: Mapping[int, DeviceTimes]) -> list[str]:
    """Device totals of each rank, with the steps they cover."""
    lines = [""] if devices else []
    for view in found.views:
        if view.rank in devices:
            t = devices[view.rank]
            left_out = sorted({s.number for s in view.steps} - set(t.steps)) if t.steps else []
            what = f"steps {t.steps[0]} to {t.steps[-1]}" if len(t.steps) > 1 else f"step {t.steps[0]}" if t.steps else "the whole trace"
            what += f" without step {left_out[-1]}" if left_out else ""
            parts = {"computing": t.compute_s, "copies and exposed communication": t.other_s, "idle": t.idle_s}
            lines.append(f"rank {view.rank}: device totals of {what}: {', '.join(f'{k} {seconds_text(v)}' for k, v in parts.items())}")
    return lines


def _cell(time_s: float) -> str:
    return seconds_text(time_s) if time_s else "-"


def _clocks(found: Breakdown) -> list[str]:
    if len(found.times) < 2:
        return []
    lines = [""]
    clocks = found.clocks
    for t, shift, uncertain, spread in zip(found.times, clocks.shift_ns, clocks.uncertain_ns, clocks.spread_ns, strict=True):
        if t.rank != found.times[0].rank and spread and not (shift or uncertain):
            apart = f"ends of collectives differ by {seconds_text(spread / 1e9)} in the middle"
            lines.append(f"rank {t.rank}: on the machine of rank {found.times[0].rank}, so on its clock; {apart}")
        elif t.rank != found.times[0].rank and (shift or uncertain or spread):
            sure = f"proven within {seconds_text(uncertain / 1e9)}" if uncertain >= 0 else "nothing bounds it"
            ends = f"ends of collectives agree within {seconds_text(spread / 1e9)}"
            lines.append(f"rank {t.rank}: clock shifted by {seconds_text(shift / 1e9)}; {ends}, {sure}")
    totals = sorted(_by_rank(found).items(), key=lambda item: -item[1]["waited_s"])
    count = len(found.stragglers)
    for rank, w in totals[:3]:
        lines.append(f"rank {rank} came last to {w['last']} of {count} collectives; the others waited {seconds_text(w['waited_s'])} per step for it")
    return lines
