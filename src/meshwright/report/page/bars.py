"""How sure the predicted step is: every number that it rests on with its error bar, and the step if that number alone were so wrong."""

from __future__ import annotations

from ...explain.assumptions import NOT_MODELLED, Assumption, ErrorBars
from ...explain.numbers import seconds_text
from .html import Html, joined, shortened, source_link, table, tag

__all__ = ["error_bars_table"]

WIDTH, HEIGHT = 240, 12


def error_bars_table(bars: ErrorBars, step_s: float) -> Html:
    """`step_s`: the prediction. What moves it most comes first; what does not move it is named in a sentence."""
    ends = [bars.low_s, bars.high_s, *(t for a in bars.assumptions for t in (a.low_s, a.high_s))]
    scale = min(ends), max(ends)
    moving = [a for a in bars.assumptions if a.high_s - a.low_s > 1e-6 * step_s]
    still = sorted({a.what for a in bars.assumptions} - {a.what for a in moving})
    everything = [tag("strong", "all of it, the same way"), "", "", "", *_step(bars.low_s, bars.high_s, step_s, scale), ""]
    rows = [everything, *(_row(a, step_s, scale) for a in sorted(moving, key=lambda a: (a.low_s - a.high_s, a.what)))]
    heads = ["what", "value", "evidence", "may be off by", "the step then", "beside the prediction (the line)", "source"]
    made = table("What the predicted step rests on, with error bars", heads, rows, numbers=(3,))
    rest = f"Wrong by their errors, these do not move the step: {', '.join(still)}. " if still else ""
    said = tag("p", rest, f"Outside every error bar, because nothing here models it: {NOT_MODELLED}. ", source_link("simulated"), cls="note")
    return joined([made, said])


def _row(a: Assumption, step_s: float, scale: tuple[float, float]) -> list[object]:
    what, value, source = shortened(a.what, 40), shortened(a.value, 40), shortened(a.source, 48)
    return [what, value, a.evidence, f"±{100 * a.error:.0f} %", *_step(a.low_s, a.high_s, step_s, scale), source]


def _step(low_s: float, high_s: float, step_s: float, scale: tuple[float, float]) -> list[object]:
    text = f"{seconds_text(low_s)} to {seconds_text(high_s)}"
    if scale[1] <= scale[0]:
        return [text, ""]
    x = [(t - scale[0]) / (scale[1] - scale[0]) * WIDTH for t in (low_s, high_s, step_s)]
    bar = tag("rect", x=f"{x[0]:.1f}", y=3, width=f"{max(x[1] - x[0], 1):.1f}", height=HEIGHT - 6, cls="reach")
    line = tag("line", x1=f"{x[2]:.1f}", x2=f"{x[2]:.1f}", y1=0, y2=HEIGHT, cls="here")
    return [text, tag("svg", bar, line, viewBox=f"-1 0 {WIDTH + 2} {HEIGHT}", cls="error-bar", role="img", aria_label=text)]
