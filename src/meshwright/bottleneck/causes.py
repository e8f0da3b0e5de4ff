"""What on the critical path could go away, ranked by how much, with what to do about it.

Every cause gets an upper limit of what removing it gains per step: its time on the path where all of it can go (a data stall, a copy, the time
before a rank that is always late, exposed communication), or what exceeds its like where some must stay (a module beside its siblings, a link
beside the other links). Of the time in which a rank's host is on the path only that counts during which its device waited, of its communication
only that during which it did not compute. Time that one cause claims is no other's: a slow rank's own work is not shown once more as overhead of
the host. Computing as such gains nothing by itself: the modules that take most of it come last. Removing one cause may bring another onto the path.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .clocks import Shared
from .lanes import STAGES, Kind, RankView, Stage
from .path import CriticalPath
from .tiles import busy_before

__all__ = ["Cause", "rank_causes"]

MIN_SIBLINGS = 3  # modules of one form from which one can stick out: of two, neither is the usual one
MIN_SIBLING_FACTOR = 1.3  # times the median sibling that a module must take to be named
MAX_SLOW_LINK_SHARE = 0.6  # of the median rate of the other links, below which a link is named
PARTS = 4  # of the recording: without a stated rate a link must be slow in each of them, which other work on a machine that comes and goes is not
MIN_MESSAGES = 3  # of a link in each of them
RATE_QUANTILE = 0.9  # a link's rate is this quantile of its messages' rates: most messages wait for something else
MIN_LATE_SHARE = 0.6  # of all lateness that one rank must cause to be named
MAX_MODULES = 3  # modules listed for where computing went
_OWN = (Kind.COMPUTE, Kind.LAUNCH, Kind.HOST, Kind.SYNC)  # a rank's own work
_HOST = (Kind.DATA, Kind.LAUNCH, Kind.HOST, Kind.SYNC, Kind.IDLE, Kind.WAIT)  # in which a device may be busy meanwhile
_OWN_PYTHON = "its Python runs between operators: look at what it does there beside calling them (sleeping, reading, printing, .item())"
_NOTHING = "nothing was recorded: look at what runs outside operators (logging, checkpoints, evaluation, other threads)"
_LOOP_PYTHON = "Python runs between operators: torch.compile, fewer and larger operators, work out of the loop"
I64 = NDArray[np.int64]


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """`where`: the module, stage, rank or link. `path_s`: on the critical path, per step; `gain_s`: at most gained by removing it."""

    kind: str
    where: str
    path_s: float
    gain_s: float
    share: float  # of the step: gain_s / step
    advice: str
    facts: dict[str, Any] = msgspec.field(default_factory=dict)

    def line(self) -> str:
        time = f"{self.path_s * 1e3:.3f} ms" if self.path_s < 1 else f"{self.path_s:.2f} s"
        return f"{self.where}: {self.kind}, {time} of the path ({100 * self.share:.1f} % to gain): {self.advice}"


def rank_causes(
    views: Sequence[RankView], shared: Shared, path: CriticalPath, *, rates_Bps: Mapping[tuple[int, int], float] | None = None, least: float = 0.005
) -> list[Cause]:
    """Causes by gain; those below the share `least` of the step are left out, the largest computing modules come last.

    `rates_Bps`: what links between ranks should carry; those without are compared with the median of the others.
    """
    books = _Books(views, shared, path, rates_Bps or {})
    found = [*books.data(), *books.copies(), *books.links(), *books.exposed(), *books.siblings(), *books.late(), *books.host(), *books.idle()]
    ranked = sorted((c for c in found if c.share >= least), key=lambda c: (-c.gain_s, c.kind, c.where))
    return ranked + books.computing()


class _Books:
    """Sums over the path."""

    def __init__(self, views: Sequence[RankView], shared: Shared, path: CriticalPath, rates_Bps: Mapping[tuple[int, int], float]) -> None:
        self.rates_Bps = rates_Bps
        self.views, self.shared, self.path = views, shared, path
        self.length: I64 = path.links.end - path.links.start
        self.free: I64 = self._waited()  # ns of each link that removing it could gain, and that no cause has claimed
        self.steps = max(max(len(v.steps) for v in views), 1)
        self.step_s = (path.end - path.start) / 1e9 / self.steps
        self.slow_meetings: set[int] = set()

    def cause(self, kind: str, where: str, path_ns: float, gain_ns: float, advice: str, **facts: Any) -> Cause:
        gain_s = gain_ns / 1e9 / self.steps
        share = gain_s / self.step_s if self.step_s else 0.0
        return Cause(kind=kind, where=where, path_s=path_ns / 1e9 / self.steps, gain_s=gain_s, share=share, advice=advice, facts=facts)

    def _waited(self) -> I64:
        """Of each link: without the time in which its rank's device was busy with something else (the host's links), or computing (its messages)."""
        links, out = self.path.links, self.length.copy()
        for number, v in enumerate(self.views):
            if v.device is None:
                continue
            work = v.device.work
            computing = np.isin(work.kind, (Kind.COMPUTE, Kind.COPY))
            for kinds, busy in ((_HOST, np.ones(len(work), bool)), ((Kind.COLLECTIVE, Kind.TRANSFER), computing)):
                rows = np.flatnonzero((self.path.view == number) & np.isin(links.kind, kinds))
                spent = busy_before(work.start[busy], work.end[busy], np.concatenate([links.start[rows], links.end[rows]]))
                out[rows] -= spent[len(rows) :] - spent[: len(rows)]
        return out

    def claimed(self, chosen: NDArray[np.bool_]) -> int:
        """What is free of the chosen links, which then is this cause's alone."""
        total = int(self.free[chosen].sum())
        self.free = np.where(chosen, 0, self.free)
        return total

    def by_module(self, chosen: NDArray[np.bool_], length: I64 | None = None) -> dict[tuple[str, int], int]:
        """(module path, stage) -> ns."""
        length = self.length if length is None else length
        sums: dict[tuple[str, int], int] = defaultdict(int)
        links, view = self.path.links, self.path.view
        for number, v in enumerate(self.views):
            rows = np.flatnonzero(chosen & (view == number))
            keys = links.module[rows].astype(np.int64) * len(STAGES) + links.stage[rows]
            for key, total in enumerate(np.bincount(keys, weights=length[rows]).tolist() if len(rows) else ()):
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
        return [self.cause("data stall", f"load data on {self.ranks(chosen)}", total, self.claimed(chosen), advice)]

    def copies(self) -> list[Cause]:
        """Copies of tensors by module; those of the optimizer and of loading data are not a module's."""
        links = self.path.links
        chosen = np.isin(links.kind, (Kind.COPY, Kind.TRANSFER))
        sums: dict[str, int] = defaultdict(int)
        gains: dict[str, int] = defaultdict(int)
        stages: dict[str, set[str]] = defaultdict(set)
        gain = self.by_module(chosen, self.free)
        self.claimed(chosen)
        for (module, stage), total in self.by_module(chosen).items():
            where = f"module {module}" if module else f"stage {STAGES[stage]}"
            sums[where] += total
            gains[where] += gain.get((module, stage), 0)
            stages[where].add(STAGES[stage])
        advice = "copies tensors: keep one memory layout (drop transpose().contiguous(), .to(), .clone()), or let the producer write it that way"
        return [self.cause("copies", where, total, gains[where], advice, stages=sorted(stages[where])) for where, total in sums.items()]

    def siblings(self) -> list[Cause]:
        """Modules that take longer than others of the same form: their paths differ in a number only."""
        groups: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        computing = self.path.links.kind == Kind.COMPUTE
        for (module, stage), total in self.by_module(computing).items():
            if module:
                groups[re.sub(r"\d+", "*", module), stage][module] = total
        excess: dict[str, float] = defaultdict(float)
        whole: dict[str, float] = defaultdict(float)
        for (_, stage), members in groups.items():
            middle = float(np.median(list(members.values())))
            for module, total in members.items():
                whole[module] += total
                if len(members) >= MIN_SIBLINGS and total > MIN_SIBLING_FACTOR * middle:
                    excess[module] += total - middle
                    self._reduce(module, stage, middle / total)
        advice = "takes longer than its siblings: look for work only this one does (copies, another shape or dtype, a fallback kernel)"
        return [self.cause("slow module", f"module {m}", whole[m], over, advice) for m, over in excess.items()]

    def _reduce(self, module: str, stage: int, share: float) -> None:
        """Leave only `share` of a module's computing to other causes."""
        for number, v in enumerate(self.views):
            if module in v.modules:
                links = self.path.links
                of = v.modules.index(module)
                chosen = (self.path.view == number) & (links.kind == Kind.COMPUTE) & (links.stage == stage) & (links.module == of)
                self.free = np.where(chosen, (self.free * share).astype(np.int64), self.free)

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
            if not stated and not _always_slow(moved[pair], MAX_SLOW_LINK_SHARE * usual):
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
            free = self.claimed(np.isin(np.arange(len(self.length)), on_path))
            found.append(self.cause("slow link", name, total, min(max(total - needed, 0), free), advice, **facts))
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
        gains: dict[str, int] = defaultdict(int)
        for i in np.flatnonzero(chosen).tolist():
            m, row = self.views[self.path.view[i]].meetings, int(links.meeting[i])
            group = m.queue[row].partition("/")[0]
            pair = f" {m.source[row]} -> {m.destination[row]}" if m.source[row] >= 0 and m.destination[row] >= 0 else ""
            where = ("message" if pair else m.label[row]) + pair + (f" of group {group}" if group else "")
            sums[where] += int(self.length[i])
            gains[where] += int(self.free[i])
        self.claimed(chosen)
        advice = "nothing computes meanwhile: start it earlier (smaller buckets, prefetch), overlap it, send less, or use a faster network"
        return [self.cause("exposed communication", where, total, gains[where], advice) for where, total in sums.items()]

    def late(self) -> list[Cause]:
        """A rank that is late again and again, by its own work; what it loads or copies meanwhile is counted there."""
        lateness: dict[int, int] = defaultdict(int)
        own = self._own_work()
        spent = [own(x.since, x.until) for x in self.path.late]
        for x, (time_ns, _, _) in zip(self.path.late, spent, strict=True):
            lateness[x.rank] += time_ns
        total = sum(lateness.values())
        if len(self.views) < 2 or not total:
            return []
        worst = max(lateness, key=lambda r: (lateness[r], -r))
        others = [lateness.get(r, 0) for r in range(len(self.views)) if r != worst]
        gain = lateness[worst] - float(np.mean(others))
        if lateness[worst] < MIN_LATE_SHARE * total or gain <= 0:
            return []
        rank = self.views[worst].rank
        for x, (_, low, high) in zip(self.path.late, spent, strict=True):
            if x.rank == worst:
                self.free[low:high] = np.where(np.isin(self.path.links.kind[low:high], _OWN), 0, self.free[low:high])
        advice = "the others wait for it: give it less work or find what slows it (clock, other processes, memory)"
        count = sum(x.rank == worst for x in self.path.late)
        return [self.cause("slow rank", f"rank {rank}", lateness[worst], gain, advice, late_to=count, of=len(self.path.late))]

    def _own_work(self) -> Callable[[int, int], tuple[int, int, int]]:
        """(since, until) -> time on the path in between that the rank which the path goes along until then spent on its own; on which links."""
        links, view = self.path.links, self.path.view
        own = np.isin(links.kind, _OWN)
        spent = np.concatenate([[0], np.cumsum(np.where(own, self.free, 0))])
        breaks = np.concatenate([[True], (view[1:] != view[:-1]) | (links.kind[1:] == Kind.COLLECTIVE)])
        first = np.maximum.accumulate(np.where(breaks, np.arange(len(view)), 0))

        def between(since: int, until: int) -> tuple[int, int, int]:
            last = int(np.searchsorted(links.end, until))
            if last >= len(links) or int(links.end[last]) != until:
                return 0, 0, 0
            low = max(int(np.searchsorted(links.start, since, side="right")) - 1, int(first[last]))
            cut = max(since - int(links.start[low]), 0) if own[low] else 0
            return max(int(spent[last + 1] - spent[low]) - cut, 0), low, last + 1

        return between

    def host(self) -> list[Cause]:
        """Time in which the host starts work, by stage, or runs Python between operators, by module where one is known."""
        links, found = self.path.links, []
        advice = "the device waits for the host to start kernels: torch.compile, CUDA graphs, larger batches, fewer syncs"
        launching = links.kind == Kind.LAUNCH
        free = self.by_stage(launching, self.free)
        found = [self.cause("launch-bound", f"stage {stage}", total, free.get(stage, 0), advice) for stage, total in self.by_stage(launching).items()]
        between = links.kind == Kind.HOST
        gains = self.by_module(between, self.free)
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for (module, stage), total in self.by_module(between).items():
            both = sums[f"module {module}" if module else f"stage {STAGES[stage]}"]
            both[0] += total
            both[1] += gains.get((module, stage), 0)
        for where, (total, gain) in sums.items():
            advice = _OWN_PYTHON if where.startswith("module") else _LOOP_PYTHON
            found.append(self.cause("host overhead", where, total, gain, advice))
        self.claimed(launching | between)
        return found

    def by_stage(self, chosen: NDArray[np.bool_], length: I64 | None = None) -> dict[str, int]:
        sums = np.bincount(self.path.links.stage[chosen], weights=(self.length if length is None else length)[chosen], minlength=len(STAGES))
        return {name: int(x) for name, x in zip(STAGES, sums, strict=True) if x}

    def idle(self) -> list[Cause]:
        links = self.path.links
        chosen = np.isin(links.kind, (Kind.IDLE, Kind.SYNC)) | ((links.kind == Kind.WAIT) & (links.meeting < 0))
        gains = self.by_module(chosen, self.free)
        found = []
        for (module, stage), total in self.by_module(chosen).items():
            here = f"module {module}" if module else f"stage {STAGES[stage]} on {self.ranks(chosen & (links.stage == stage))}"
            advice = _OWN_PYTHON if module else _NOTHING
            found.append(self.cause("idle", here, total, gains.get((module, stage), 0), advice))
        return found

    def computing(self) -> list[Cause]:
        sums: dict[str, int] = defaultdict(int)
        for (module, stage), total in self.by_module(self.path.links.kind == Kind.COMPUTE).items():
            sums[f"module {module}" if module and stage != Stage.DATA else f"stage {STAGES[stage]}"] += total
        largest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:MAX_MODULES]
        advice = "computes, and nothing of it is known to be avoidable: faster kernels, lower precision, or a finer split"
        return [self.cause("computing", where, total, 0.0, advice) for where, total in largest]


def _always_slow(messages: Sequence[tuple[int, int, int]], limit: float) -> bool:
    """Whether a link's rate is below the limit (bytes per ns) in every part of the recording. A link with few messages is not said to be."""
    if len(messages) < PARTS * MIN_MESSAGES:
        return False
    rates = [np.array([size / max(took, 1) for _, took, size in part]) for part in _parts(sorted(messages))]
    return all(float(np.quantile(r, RATE_QUANTILE)) < limit for r in rates)


def _parts(messages: Sequence[tuple[int, int, int]]) -> list[Sequence[tuple[int, int, int]]]:
    ends = [len(messages) * k // PARTS for k in range(PARTS + 1)]
    return [messages[a:b] for a, b in pairwise(ends)]
