"""What the run says about the model: the ranked bottlenecks with what to do, and the module tree with the time that each module took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...bottleneck.breakdown import Breakdown
from ...bottleneck.lanes import Kind, RankView, Stage
from ...explain.numbers import seconds_text, share_text
from .html import Html, joined, shortened, source_link, table, tag

__all__ = ["ModuleTime", "module_times", "modules_section"]

MAX_MODULES = 200  # in the table
MAX_CAUSES = 10  # in the list, those that gain most first
COUNTED = (Stage.FORWARD, Stage.LOSS, Stage.BACKWARD, Stage.OPTIMIZER)


@dataclass(kw_only=True)
class ModuleTime:
    """Seconds of one step of all ranks together, mean over steps, those of the modules inside it included. `path`: "" is the model."""

    path: str
    depth: int
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def module_times(views: Sequence[RankView]) -> list[ModuleTime]:
    """The model, then its modules, parents first, children in the order in which they ran. Of computing only: waiting is nobody's."""
    found = {"": ModuleTime(path="", depth=0)}
    for view in views:
        host, steps = view.host, max(len(view.steps), 1)
        for stage in COUNTED:
            chosen = (host.kind == Kind.COMPUTE) & (host.stage == stage)
            took = np.bincount(host.module[chosen], weights=(host.end - host.start)[chosen], minlength=len(view.modules)) / 1e9 / steps
            for path, seconds in zip(view.modules, took.tolist(), strict=True):
                for above in _around(path):
                    at = found.setdefault(above, ModuleTime(path=above, depth=above.count(".") + 1 if above else 0))
                    at.seconds[stage] += seconds
    children: dict[str, list[str]] = {}
    for path in found:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    order, waiting = [], [""]
    while waiting:
        path = waiting.pop()
        order.append(found[path])
        waiting += reversed(children.get(path, []))
    return order


def _around(path: str) -> list[str]:
    """The model, the modules around `path`, itself."""
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def modules_section(measured: Breakdown, of: str = "") -> Html:
    """Bottlenecks, then modules; what is below a thousandth of the step's computing is left out. `of`: which run, where the page has several."""
    causes = [tag("li", c.line()) for c in measured.causes[:MAX_CAUSES]]
    parts = [tag("p", "From the recording of the run: steps that nothing slowed. ", source_link("measured"))]
    if causes:
        parts += [tag("h3", "Bottlenecks, and what to do about them"), tag("ol", *causes)]
    times = module_times(measured.views)
    whole = times[0].total_s or 1.0
    shown = [t for t in times if t.total_s >= whole / 1000]
    if len(times) == 1:
        parts.append(tag("p", "The run recorded no modules (`--no-module-spans`, or a model that runs as one)."))
        return joined(parts)
    rows = [[_name(t), *(seconds_text(t.seconds[s]) if t.seconds[s] else "" for s in COUNTED), seconds_text(t.total_s), share_text(t.total_s / whole)]
            for t in shown[:MAX_MODULES]]  # fmt: skip
    heads = ["module", "forward", "loss", "backward", "optimizer", "all", "share"]
    left = len(times) - len(rows)
    caption = f"{f'{of}: c' if of else 'C'}omputing per step and module, all ranks together, modules inside included"
    caption += f"; {left} small ones left out" if left else ""
    return joined([*parts, tag("h3", "Modules"), table(caption, heads, rows, numbers=range(1, 7))])


def _name(t: ModuleTime) -> Html:
    name = t.path.rpartition(".")[2] if t.path else "the model"
    return tag("span", shortened(name), cls=f"depth{min(t.depth, 8)}", title=t.path or None)
