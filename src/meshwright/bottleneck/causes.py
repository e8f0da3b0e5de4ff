"""What on the critical path could go away, ranked by how much, with what to do about it.

Every cause gets an upper limit of what removing it gains per step: its time on the path where all of it can go (a data stall, a copy, the time
before a rank that is always late, exposed communication), or what exceeds its like where some must stay (a module beside its siblings, a link
beside the other links). Computing as such gains nothing by itself: the modules that take most of it come last. Removing one cause may bring
another onto the path: limits do not add up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clocks import Shared
from .lanes import STAGES, Kind, RankView, Stage
from .path import CriticalPath

__all__ = ["Cause", "rank_causes"]

MIN_SIBLINGS = 3  # modules of one form from which one can stick out: of two, neither is the usual one
MIN_SIBLING_FACTOR = 1.3  # times the median sibling that a module must take to be named
MAX_SLOW_LINK_SHARE = 0.6  # of the median rate of the other links, below which a link is named
RATE_QUANTILE = 0.9  # a link's rate is this quantile of its messages' rates: most messages wait for something else
MIN_LATE_SHARE = 0.6  # of all lateness that one rank must cause to be named
MAX_MODULES = 3  # modules listed for where computing went
I64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """`where`: the module, stage, rank or link. `path_s`: on the critical path, per step; `gain_s`: at most gained by removing it."""

    kind: str
    where: str
    path_s: float
    gain_s: float
    share: float  # of the step: gain_s / step
    advice: str
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        return f"{self.where}: {self.kind}, {self.path_s * 1e3:.3f} ms of the path ({100 * self.share:.1f} % to gain): {self.advice}"


def rank_causes(
    views: Sequence[RankView], shared: Shared, path: CriticalPath, *, rates_Bps: Mapping[tuple[int, int], float] | None = None, least: float = 0.005
) -> list[Cause]:
    """Causes by gain; those below the share `least` of the step are left out, the largest computing modules come last.

    `rates_Bps`: what links between ranks should carry; those without are compared with the median of the others.
    """
    books = _Books(views, shared, path, rates_Bps or {})
    found = [*books.data(), *books.copies(), *books.links(), *books.exposed(), *books.late(), *books.siblings(), *books.host(), *books.idle()]
    ranked = sorted((c for c in found if c.share >= least), key=lambda c: (-c.gain_s, c.kind, c.where))
    return ranked + books.computing()


class _Books:
    """Sums over the path."""

    def __init__(self, views: Sequence[RankView], shared: Shared, path: CriticalPath, rates_Bps: Mapping[tuple[int, int], float]) -> None:
        self.rates_Bps = rates_Bps
        self.views, self.shared, self.path = views, shared, path
        self.length: I64 = path.links.end - path.links.start
        self.steps = max(max(len(v.steps) for v in views), 1)
        self.step_s = (path.end - path.start) / 1e9 / self.steps
        self.slow_meetings: set[int] = set()

    def cause(self, kind: str, where: str, path_ns: float, gain_ns: float, advice: str, **facts: Any) -> Cause:
        gain_s = gain_ns / 1e9 / self.steps
        share = gain_s / self.step_s if self.step_s else 0.0
        return Cause(kind=kind, where=where, path_s=path_ns / 1e9 / self.steps, gain_s=gain_s, share=share, advice=advice, facts=facts)

    def by_module(self, chosen: NDArray[np.bool_]) -> dict[tuple[str, int], int]:
        """(module path, stage) -> ns."""
        sums: dict[tuple[str, int], int] = defaultdict(int)
        links, view = self.path.links, self.path.view
        for number, v in enumerate(self.views):
            rows = np.flatnonzero(chosen & (view == number))
            keys = links.module[rows].astype(np.int64) * len(STAGES) + links.stage[rows]
            for key, total in enumerate(np.bincount(keys, weights=self.length[rows]).tolist() if len(rows) else ()):
                if total:
                    sums[v.modules[key // len(STAGES)], key % len(STAGES)] += int(total)
        return sums

    def ranks(self, chosen: NDArray[np.bool_]) -> str:
        """Those with at least a tenth of the chosen time."""
        spent = np.bincount(self.path.view[chosen], weights=self.length[chosen], minlength=len(self.views))
        found = sorted(self.views[i].rank for i in np.flatnonzero(spent >= 0.1 * spent.sum()).tolist())
        return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"

    # ---- causes
    def data(self) -> list[Cause]:
        chosen = self.path.links.kind == Kind.DATA
        total = int(self.length[chosen].sum())
        if not total:
            return []
        advice = "load ahead of the step (more DataLoader workers, prefetch, pinned memory) or make the dataset cheaper"
        return [self.cause("data stall", f"load data on {self.ranks(chosen)}", total, total, advice)]

    def copies(self) -> list[Cause]:
        """Copies of tensors by module; those of the optimizer and of loading data are not a module's."""
        links = self.path.links
        chosen = np.isin(links.kind, (Kind.COPY, Kind.TRANSFER))
        sums: dict[str, int] = defaultdict(int)
        stages: dict[str, set[str]] = defaultdict(set)
        for (module, stage), total in self.by_module(chosen).items():
            where = f"module {module}" if module else f"stage {STAGES[stage]}"
            sums[where] += total
            stages[where].add(STAGES[stage])
        advice = "copies tensors: keep one memory layout (drop transpose().contiguous(), .to(), .clone()), or let the producer write it that way"
        return [self.cause("copies", where, total, total, advice, stages=sorted(stages[where])) for where, total in sums.items()]

    def siblings(self) -> list[Cause]:
        """Modules that take longer than others of the same form: their paths differ in a number only."""
        groups: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        for (module, stage), total in self.by_module(self.path.links.kind == Kind.COMPUTE).items():
            if module:
                groups[re.sub(r"\d+", "*", module), stage][module] = total
        excess: dict[str, float] = defaultdict(float)
        whole: dict[str, float] = defaultdict(float)
        for members in groups.values():
            middle = float(np.median(list(members.values())))
            for module, total in members.items():
                whole[module] += total
                if len(members) >= MIN_SIBLINGS and total > MIN_SIBLING_FACTOR * middle:
                    excess[module] += total - middle
        advice = "takes longer than its siblings: look for work only this one does (copies, another shape or dtype, a fallback kernel)"
        return [self.cause("slow module", f"module {m}", whole[m], over, advice) for m, over in excess.items()]

    def links(self) -> list[Cause]:
        """Links whose messages are slower than the other links'; what exceeds the others' rate could go.

        A link's rate is that of its faster messages (9 in 10 are slower), from sending to arrival: a slow link is never fast, one that waits for
        others sometimes is. Both directions of a pair share a connection with its notices and acknowledgements, so a slow direction delays the
        other one too: of a pair the slower direction is named, with the time of both.
        """
        moved = self._moved()
        rate = {pair: float(np.quantile([b / max(d, 1) for _, d, b in rows], RATE_QUANTILE)) for pair, rows in moved.items()}  # bytes per ns
        found = []
        for pair in sorted(rate):
            back = (pair[1], pair[0])
            others = [r for p, r in rate.items() if p not in (pair, back)] or [r for p, r in rate.items() if p != pair]
            stated = self.rates_Bps.get(pair, 0.0) / 1e9
            usual = stated or (float(np.median(others)) if others else 0.0)
            if rate[pair] >= MAX_SLOW_LINK_SHARE * usual or rate.get(back, np.inf) < rate[pair]:
                continue
            size = {i: b for p in (pair, back) for i, _, b in moved.get(p, ())}
            on_path = np.flatnonzero(np.isin(self.path.meeting, list(size)))
            self.slow_meetings |= set(size)
            total = int(self.length[on_path].sum())
            needed = sum(size[m] for m in np.unique(self.path.meeting[on_path]).tolist()) / usual
            like = "the fabric says" if stated else "the other links carry"
            advice = f"carries {rate[pair]:.3g} GB/s where {like} {usual:.3g}: check this link, or plan around it"
            name = f"link {pair[0]} -> {pair[1]}"
            facts = {"rate_Bps": rate[pair] * 1e9, "expected_Bps": usual * 1e9}
            found.append(self.cause("slow link", name, total, max(total - needed, 0), advice, **facts))
        return found

    def _moved(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """(source, destination) -> of each message its shared meeting, ns from sending to arrival, and bytes."""
        moved: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        arrives, leaves = self.shared.times(self.views)
        place = {v.rank: i for i, v in enumerate(self.views)}
        for i, row in enumerate(self.shared.row):
            some = int(np.flatnonzero(row >= 0)[0])
            m, at = self.views[some].meetings, int(row[some])
            source, destination, size = int(m.source[at]), int(m.destination[at]), int(m.size_bytes[at])
            if source in place and destination in place and size > 0:
                moved[source, destination].append((i, int(leaves[i, place[destination]] - arrives[i, place[source]]), size))
        return moved

    def exposed(self) -> list[Cause]:
        """Communication on the path, by operation and group; what slow links explain is theirs."""
        links = self.path.links
        chosen = np.isin(links.kind, (Kind.COLLECTIVE, Kind.WAIT)) & (links.meeting >= 0)
        chosen &= ~np.isin(self.path.meeting, list(self.slow_meetings)) if self.slow_meetings else True
        sums: dict[str, int] = defaultdict(int)
        for i in np.flatnonzero(chosen).tolist():
            m, row = self.views[self.path.view[i]].meetings, int(links.meeting[i])
            group = m.queue[row].partition("/")[0]
            pair = f" {m.source[row]} -> {m.destination[row]}" if m.source[row] >= 0 and m.destination[row] >= 0 else ""
            sums[("message" if pair else m.label[row]) + pair + (f" of group {group}" if group else "")] += int(self.length[i])
        advice = "nothing computes meanwhile: start it earlier (smaller buckets, prefetch), overlap it, send less, or use a faster network"
        return [self.cause("exposed communication", where, total, total, advice) for where, total in sums.items()]

    def late(self) -> list[Cause]:
        """A rank that is late again and again, by its own work; what it loads or copies meanwhile is counted there."""
        lateness: dict[int, int] = defaultdict(int)
        own = self._own_work()
        for x in self.path.late:
            lateness[x.rank] += own(x.since, x.until)
        total = sum(lateness.values())
        if len(self.views) < 2 or not total:
            return []
        worst = max(lateness, key=lambda r: (lateness[r], -r))
        others = [lateness.get(r, 0) for r in range(len(self.views)) if r != worst]
        gain = lateness[worst] - float(np.mean(others))
        if lateness[worst] < MIN_LATE_SHARE * total or gain <= 0:
            return []
        rank = self.views[worst].rank
        advice = "the others wait for it: give it less work or find what slows it (clock, other processes, memory)"
        count = sum(x.rank == worst for x in self.path.late)
        return [self.cause("slow rank", f"rank {rank}", lateness[worst], gain, advice, late_to=count, of=len(self.path.late))]

    def _own_work(self) -> Callable[[int, int], int]:
        """(since, until) -> time on the path in between that the rank which the path goes along until then spent on its own."""
        links, view = self.path.links, self.path.view
        own = np.isin(links.kind, (Kind.COMPUTE, Kind.LAUNCH, Kind.HOST, Kind.SYNC))
        spent = np.concatenate([[0], np.cumsum(np.where(own, self.length, 0))])
        breaks = np.concatenate([[True], (view[1:] != view[:-1]) | (links.kind[1:] == Kind.COLLECTIVE)])
        first = np.maximum.accumulate(np.where(breaks, np.arange(len(view)), 0))

        def between(since: int, until: int) -> int:
            last = int(np.searchsorted(links.end, until))
            if last >= len(links) or int(links.end[last]) != until:
                return 0
            low = max(int(np.searchsorted(links.start, since, side="right")) - 1, int(first[last]))
            cut = max(since - int(links.start[low]), 0) if own[low] else 0
            return max(int(spent[last + 1] - spent[low]) - cut, 0)

        return between

    def host(self) -> list[Cause]:
        """Time in which the host starts work or runs Python between operators."""
        links, found = self.path.links, []
        for kind, word, advice in (
            (Kind.LAUNCH, "launch-bound", "the device waits for the host to start kernels: torch.compile, CUDA graphs, larger batches, fewer syncs"),
            (Kind.HOST, "host overhead", "Python runs between operators: torch.compile, fewer and larger operators, work out of the loop"),
        ):
            by_stage = self.by_stage(links.kind == kind)
            found += [self.cause(word, f"stage {stage}", total, total, advice) for stage, total in by_stage.items()]
        return found

    def by_stage(self, chosen: NDArray[np.bool_]) -> dict[str, int]:
        sums = np.bincount(self.path.links.stage[chosen], weights=self.length[chosen], minlength=len(STAGES))
        return {name: int(x) for name, x in zip(STAGES, sums, strict=True) if x}

    def idle(self) -> list[Cause]:
        links = self.path.links
        chosen = np.isin(links.kind, (Kind.IDLE, Kind.SYNC)) | ((links.kind == Kind.WAIT) & (links.meeting < 0))
        advice = "nothing was recorded: look at what runs outside operators (logging, checkpoints, evaluation, other threads)"
        found = []
        for stage, total in self.by_stage(chosen).items():
            where = f"stage {stage} on {self.ranks(chosen & (links.stage == STAGES.index(stage)))}"
            found.append(self.cause("idle", where, total, total, advice))
        return found

    def computing(self) -> list[Cause]:
        sums: dict[str, int] = defaultdict(int)
        for (module, stage), total in self.by_module(self.path.links.kind == Kind.COMPUTE).items():
            sums[f"module {module}" if module and stage != Stage.DATA else f"stage {STAGES[stage]}"] += total
        largest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:MAX_MODULES]
        advice = "computes, and nothing of it is known to be avoidable: faster kernels, lower precision, or a finer split"
        return [self.cause("computing", where, total, 0.0, advice) for where, total in largest]
