"""Curves as drawings without a script: memory over time of each rank, losses and step times of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...explain.numbers import bytes_text, seconds_text
from ...program.flat import represented_by
from ...timeline import Timeline
from .content import PageContent
from .html import Html, joined, shortened, source_link, table, tag

__all__ = ["memory_section", "run_section", "thinned"]

F64 = NDArray[np.float64]
WIDTH, HEIGHT = 1000, 100
MAX_CURVES = 32  # ranks whose memory is drawn, those of the highest peaks
MAX_POINTS = 400  # of one curve: more are thinned
MAX_STEPS = 2000  # training steps of a loss curve, the last ones


def thinned(time_s: F64, value: F64, end_s: float, most: int = MAX_POINTS) -> tuple[F64, F64]:
    """At most `most` steps of a staircase: of every stretch of time the highest value in it, so that no peak is lost."""
    if len(time_s) <= most or end_s <= 0:
        return time_s, value
    cell = np.minimum((time_s / end_s * most).astype(np.int64), most - 1)
    first = np.flatnonzero(np.diff(cell, prepend=-1))
    carried = np.concatenate([[0.0], value[first[1:] - 1]])  # what holds when the stretch begins
    return cell[first] * (end_s / most), np.maximum(np.maximum.reduceat(value, first), carried)


def _staircase(time_s: F64, value: F64, end_s: float, top: float) -> Html:
    x = np.clip(time_s / end_s, 0, 1) * WIDTH
    y = HEIGHT - value / top * HEIGHT
    points = [f"M0 {HEIGHT}"]
    for at, height in zip(x.tolist(), y.tolist(), strict=True):
        points.append(f"H{at:.1f}V{height:.1f}")
    return Html("".join([*points, f"H{WIDTH}V{HEIGHT}Z"]))


def memory_section(page: PageContent) -> Html:
    """Predicted memory over the step, rank by rank, with the measured peak as a line; then all peaks in numbers."""
    shown = page.run.comparison.predicted if page.run is not None else page.timeline
    measured = page.run.comparison.measured.memory_peak_bytes if page.run is not None else ()
    of = represented_by(page.plan.main)
    curves = {r: shown.counters[f"memory of rank {r}"] for r in sorted(set(of.tolist())) if f"memory of rank {r}" in shown.counters}
    chosen = sorted(sorted(curves, key=lambda r: (-shown.memory_peak_bytes[r], r))[:MAX_CURVES])
    source = "simulated for the run" if page.run is not None else "simulated"
    parts: list[Html] = []
    if not any(shown.memory_peak_bytes):
        return tag("p", "The program's buffers hold nothing that would be counted.")
    top = max([*shown.memory_peak_bytes, *measured, 1]) * 1.05
    figures = [_curve(page, r, curves[r], shown, measured[r] if r < len(measured) else 0, top) for r in chosen]
    notes = ["Every drawing has the same scale. ", source_link(source)]
    if measured:
        notes += [" A dashed line is the measured peak (the run records peaks, not curves). ", source_link("measured")]
    if page.plan.main.fold is not None:
        notes.append(" Symmetric ranks have one drawing.")
    if len(curves) > len(chosen):
        notes.append(f" Shown are the {len(chosen)} fullest of {len(curves)} ranks.")
    parts += [tag("p", *notes), tag("div", *figures, cls="curves"), _peaks(page, shown, measured)]
    return joined(parts)


def _curve(page: PageContent, rank: int, curve: tuple[F64, F64], t: Timeline, measured: int, top: float) -> Html:
    time_s, value = thinned(np.asarray(curve[0], np.float64), np.asarray(curve[1], np.float64), t.makespan_s)
    peak = t.memory_peak_bytes[rank]
    lines = [tag("path", d=_staircase(time_s, value, t.makespan_s or 1.0, top), cls="predicted")]
    said = f"predicted peak {bytes_text(peak)}"
    if measured:
        y = f"{HEIGHT - measured / top * HEIGHT:.1f}"
        lines.append(tag("line", x1=0, x2=WIDTH, y1=y, y2=y, cls="measured"))
        said += f", measured {bytes_text(measured)} ({100 * (peak / measured - 1):+.1f} %)"
    label = page.rank_name(rank)
    svg = tag("svg", *lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img", aria_label=f"{label}: {said}")
    plot = _plot(svg, (bytes_text(top), "0 B"), ("0 s", "time in the step", seconds_text(t.makespan_s)))
    return tag("figure", tag("figcaption", shortened(label, 40), tag("br"), said), plot)


def _plot(svg: Html, up: tuple[str, str], along: tuple[str, str, str]) -> Html:
    """A drawing with its axes. `up`: what stands at the top and at the bottom; `along`: at the left, what the axis is, at the right."""
    left = tag("div", *(tag("span", x) for x in up), cls="up", aria_hidden="true")
    return tag("div", left, svg, tag("div", *(tag("span", x) for x in along), cls="along", aria_hidden="true"), cls="plot")


def _peaks(page: PageContent, shown: Timeline, measured: Sequence[int]) -> Html:
    worst = page.plan.prediction.memory_worst_bytes if page.plan.prediction is not None else ()
    rss = page.run.comparison.measured.rss_peak_bytes if page.run is not None else ()
    heads, rows = ["rank", "device has", "predicted peak", "in the worst order"], []
    heads += ["measured peak", "resident set"] if measured else []
    most = 128
    for r in range(min(page.ranks, most)):
        limit = page.fabric.device(page.plan.placement[r]).memory_bytes
        row = [str(r), bytes_text(limit) if limit else "not stated", bytes_text(shown.memory_peak_bytes[r])]
        row.append(bytes_text(worst[r]) if r < len(worst) else "")
        rows.append(row + ([bytes_text(measured[r]), bytes_text(rss[r])] if measured else []))
    left = f", the first {most} of {page.ranks} ranks" if page.ranks > most else ""
    return table(f"Peaks of memory{left}", heads, rows, numbers=range(1, len(heads)))


def run_section(page: PageContent) -> Html:
    """What the run did: losses and how long each step took."""
    run = page.run
    assert run is not None
    c = run.comparison
    losses, steps = [x for x in c.measured.losses if math.isfinite(x)][-MAX_STEPS:], c.step_s[-MAX_STEPS:]
    figures = []
    if losses:
        first = len(c.measured.losses) - len(losses)
        said = f"Loss: {losses[0]:.4f} to {losses[-1]:.4f} in {len(c.measured.losses)} steps"
        figures.append(_line(losses, said, first=first, text="{:.4g}".format, least=min(losses)))
    if steps:
        said = f"Step time: {seconds_text(min(steps))} to {seconds_text(max(steps))}, predicted {seconds_text(c.predicted.makespan_s)} (dashed)"
        first = len(c.step_s) - len(steps)
        figures.append(_line(steps, said, mark=c.predicted.makespan_s, first=first, text=seconds_text))
        batch = int(page.plan.job.get("training", {}).get("global_batch", 0))
        if batch and min(steps) > 0:
            rate = [batch / s for s in steps]
            predicted = batch / c.predicted.makespan_s if c.predicted.makespan_s else 0.0
            said = f"Throughput: {min(rate):.4g} to {max(rate):.4g} samples/s, predicted {predicted:.4g} (dashed)"
            figures.append(_line(rate, said, mark=predicted, first=first, text="{:.4g}/s".format))
    cpu = [[str(r), seconds_text(p), seconds_text(m)] for r, (p, m) in enumerate(zip(c.cpu_s, c.measured.cpu_s, strict=False))][:128]
    parts = [tag("p", "Every step of the run. ", source_link("measured")), tag("div", *figures, cls="curves")]
    if cpu:
        parts.append(table("Processor time of a step", ["rank", "predicted", "measured"], cpu, numbers=(1, 2)))
    return joined(parts)


def _line(
    values: Sequence[float], said: str, *, mark: float = 0.0, first: int = 0, text: Callable[[float], str], least: float = 0.0
) -> Html:
    """One value per step, from step `first`; `mark`: a dashed line there; `text`: how a value is written at its axis, which begins at `least`."""
    top = max([*values, mark])
    low, high = least - 0.05 * (top - least) if least else 0.0, (top + 0.05 * (top - least)) or 1.0
    wide, span = max(len(values) - 1, 1), (high - low) or 1.0

    def y(value: float) -> str:
        return f"{HEIGHT - (value - low) / span * HEIGHT:.1f}"

    points = Html(" ".join(f"{WIDTH * i / wide:.1f},{y(v)}" for i, v in enumerate(values)))
    parts = [tag("polyline", points=points, cls="line")]
    if mark:
        parts.append(tag("line", x1=0, x2=WIDTH, y1=y(mark), y2=y(mark), cls="measured"))
    svg = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img", aria_label=said)
    return tag("figure", tag("figcaption", said), _plot(svg, (text(high), text(low)), (str(first), "step", str(first + len(values) - 1))))
