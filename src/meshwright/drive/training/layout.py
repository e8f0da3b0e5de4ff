"""The decision on the layout: degrees, micro-batch size and placement, every candidate simulated with what other decisions make of it.

Candidates of the grid come in the order of a closed form, a few per combination of degrees; of each, several placements are judged, and the fastest
that fits wins. Sequence parallelism is part of the grid: both ways are candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...cite import Cite
from ...decide.experts.replicas import CITE as REPLICAS
from ...decide.layout import LayoutCandidate, grid, megatron, sequence
from ...decide.layout.data_sharding import PLAIN
from ...decide.layout.experts import tensor_part
from ...decide.layout.problem import Degrees
from ...decide.layout.unlike_devices import EVEN
from ...io.quantity import show_time
from ...kernels.stages import innermost
from ...plan.context import EXCHANGES, exchange_of
from ...plan.experts import GSHARD
from .context import Context, Decision, Found, Looks
from .copies import copies_entry
from .evaluated import Evaluated
from .order import Refusal
from .program_sizes import MAX_PROGRAM_STEPS, expected_steps
from .routing import routing_range
from .sharding import Sharding, ShardingWanted
from .wishes import LayoutWanted

__all__ = ["Layout"]

# Micro-batch sizes simulated per combination of degrees, best closed form first.
MAX_SIZES_PER_DEGREES = 2
# Candidates simulated in one search that fit, and those that do not, however much counted work is left.
MAX_SIMULATED = 40
MAX_UNFIT = 120
# Candidates whose closed form is so many times the fastest simulated step are left out.
MAX_TIMES_FASTEST = 4.0


@dataclass(frozen=True)
class Layout(Decision):
    name = "layout"

    def choose(self, found: Found, context: Context) -> Found:
        search = _Search(context.scouting())
        looks = search.run()
        best = context.written_out(search.judged, lambda e: (e.candidate.degrees, e.candidate.division, e.placement_name))
        return replace(found, best=best, judged=search.judged).noted(self.name, search.refusal.left_out).cut(self.name, looks.budget.cut)

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        best, layout = found.winner, found.winner.layout
        options: dict[str, Any] = {"data": layout.data // layout.context, "tensor": layout.tensor, "pipeline": layout.pipeline}
        options["microbatch_size"] = layout.microbatch_size
        options |= {"division": str(best.candidate.division)} if best.candidate.division != EVEN else {}
        simulated = [e for e in found.judged if e.timeline is not None]
        fitting = sum(e.fits for e in simulated)
        why = f"shortest simulated step of {fitting} layouts that fit, {len(simulated)} simulated, {len(found.judged)} considered"
        entries: dict[str, Any] = {
            "layout": {"strategy": "grid", "options": options, "why": why, "cite": [c.key for c in (grid.CITE, megatron.CITE)]},
            "placement": {"strategy": best.placement_name, "options": {}, "why": "fastest of the axis orders tried", "cite": []},
        }
        if layout.tensor > 1:
            entries["sequence"] = _sequence(context.wish(LayoutWanted).tensor_options.sequence, best, found.judged)
        if layout.expert > 1 or context.wish(LayoutWanted).expert != 1:
            tensor = tensor_part(context.evaluator.positions_for(layout), layout)
            entry = entries["experts"] = _experts(context.wish(LayoutWanted).expert, best, found.judged, tensor)
            entry["options"] |= routing_range(best, context.evaluator)
        if spare := context.wish(LayoutWanted).spare:
            entries["copies"] = copies_entry(spare, best, found.judged)
        if layout.context > 1 or context.wish(LayoutWanted).context != 1:
            entries["context"] = _context(context.wish(LayoutWanted).context, best, found.judged)
        return entries

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        rests_on: dict[str, tuple[Cite, ...]] = {
            "layout": (grid.CITE, megatron.CITE), "sequence": (sequence.CITE,), "context": (*EXCHANGES.values(),), "experts": (GSHARD,),
            "copies": (REPLICAS,),
        }  # fmt: skip
        known = rests_on.get(key, ())
        return [(key, c) for c in known if c.key in entry["cite"]]


class _Search:
    def __init__(self, context: Context) -> None:
        self.context, self.judged = context, list[Evaluated]()
        self.refusal = Refusal(context)
        self.seen: Counter[Degrees] = Counter()
        self.further: list[LayoutCandidate] = []  # of further micro-batch sizes, for when the first do not fit
        self.fitting, self.unfitting, self.fastest_s = 0, 0, float("inf")
        # A level that is asked for is part of every candidate: at another one nobody needs their times, and they may not fit.
        wanted = context.wish(ShardingWanted)
        self.sharding = wanted.at(wanted.level) if wanted.level and Sharding.name not in context.without else PLAIN

    def run(self) -> Looks:
        """Judges all that is worth it."""
        candidates = replace(self.context.grid(self.refusal), sharding=self.sharding).plan(self.context.problem)
        candidates.sort(key=lambda c: (c.layout is None, self.context.hoped_s(c)))
        unfit = [self.unfit(c) for c in candidates]
        looks = Looks(sum(not why for why, _ in unfit) + len(self.further), self.context.budget.work_s)
        for c, (why, excess_bytes) in zip(candidates, unfit, strict=True):
            why, before = why or self.hopeless(c, looks), len(self.judged)
            if not why and not looks.at(partial(self.judge, c)) and len(self.judged) == before:
                why = "not simulated: the time limit"
            if why:
                self.judged.append(Evaluated(candidate=c, why=why, excess_bytes=excess_bytes))
        nothing_fits = self.fastest_s == float("inf")
        for c in self.further:
            if (nothing_fits if self.context.is_large(c) else self.relieves(c)) and not self.hopeless(c, looks):
                known = self.judged
                self.judged = [e for e in known if e.candidate is not c]
                if not looks.at(partial(self.judge, c)):
                    self.judged = known
        return looks

    def unfit(self, c: LayoutCandidate) -> tuple[str, int]:
        """(why a candidate is not simulated whatever others do, bytes that it needs too many where that is why)."""
        if c.layout is None:
            return c.why or "not built", 0
        if self.sharding != PLAIN and c.degrees.replicas == 1:
            return "no replicas that could divide training state", 0
        steps = expected_steps(c.layout)
        if steps > MAX_PROGRAM_STEPS and not self.context.evaluator.is_folded(c.layout):
            return f"not simulated: about {steps:,} program steps, at most {MAX_PROGRAM_STEPS:,}", 0
        limit = max(d.memory_bytes for d in self.context.fabric.devices)
        if limit and c.memory_floor_bytes > limit:
            why = f"weights, gradients and optimiser state alone need {c.memory_floor_bytes} bytes, devices have {limit}"
            return why, c.memory_floor_bytes - limit
        degrees = replace(c.degrees, microbatch_size=1)
        self.seen[degrees] += 1
        if self.seen[degrees] <= MAX_SIZES_PER_DEGREES:
            return "", 0
        self.further.append(c)
        return _behind(c), 0

    def relieves(self, c: LayoutCandidate) -> bool:
        """Whether larger micro-batches of the same degrees need more than there is as they are: then this one may need less, or less of it again."""
        alike = replace(c.degrees, microbatch_size=1)
        same = (e for e in self.judged if e.timeline is not None and replace(e.candidate.degrees, microbatch_size=1) == alike)
        tight = any(e.excess_bytes > 0 and e.candidate.degrees.microbatch_size > c.degrees.microbatch_size for e in same)
        return tight and c.estimate_s < self.fastest_s

    def hopeless(self, c: LayoutCandidate, looks: Looks) -> str:
        """Why a candidate is not simulated after what was, or nothing."""
        if self.fitting >= MAX_SIMULATED or self.unfitting >= MAX_UNFIT:
            return _behind(c)
        if looks.spent:
            return f"not simulated: the search's work, {self.context.budget.work_s:g} s, is done"
        if self.context.is_large(c) and c.least_s >= self.fastest_s:
            return f"not simulated: it takes at least {c.least_s:.4g} s, the fastest step {self.fastest_s:.4g} s"
        if not self.context.is_large(c) and c.estimate_s > MAX_TIMES_FASTEST * self.fastest_s:
            return f"not simulated: closed form {c.estimate_s:.4g} s is over {MAX_TIMES_FASTEST} times the fastest step"
        return ""

    def judge(self, c: LayoutCandidate) -> None:
        """On every placement, with the variants that decisions know; of a folded program on one, others that have its symmetry are much alike."""
        context = self.context
        assert c.layout is not None
        for name, placement in context.placements(c.layout):
            others = [v for d in context.made for v in d.variants(c, placement, context)]
            found = [e for variant in (c, *others) for e in context.judge(variant, placement, name, self.fastest_s)]
            self.judged += found
            fitting = sum(e.fits for e in found)
            self.fitting, self.unfitting = self.fitting + fitting, self.unfitting + len(found) - fitting
            for e in found:
                if e.excess_bytes <= 0 and e.time_s < self.fastest_s:
                    self.fastest_s, innermost().best = e.time_s, f"{e.candidate.what}, {show_time(e.time_s)} a step"
            if any(e.folded and not e.lone_sums for e in found):
                return


def _behind(c: LayoutCandidate) -> str:
    return f"not simulated: closed form {c.estimate_s:.4g} s is not among the best of its degrees"


def _sequence(wanted: bool | None, best: Evaluated, judged: list[Evaluated]) -> dict[str, Any]:
    """Why what lies between the tensor-parallel regions is split along the sequence, or is not: the same degrees the other way."""
    chosen = best.layout.sequence
    other = replace(best.candidate.degrees, sequence=not chosen)
    same = [e for e in judged if e.candidate.degrees == other]
    rival = min((e for e in same if e.timeline is not None), key=lambda e: (e.excess_bytes > 0, e.time_s), default=None)
    if wanted is not None:
        why = "as asked"
    elif rival is not None:
        other_way = "without" if chosen else "with"
        why = f"{best.time_s:.4g} s and {best.peak_bytes} bytes per rank; {other_way}, {rival.time_s:.4g} s and {rival.peak_bytes} bytes"
        why += ", which is more than there is" if rival.excess_bytes > 0 else ""
    else:
        why = next((e.why for e in same if e.why), "only this way was considered")
    return {
        "strategy": "sequence" if chosen else "whole", "options": {"wanted": {None: "auto", True: "on", False: "off"}[wanted]}, "why": why,
        "cite": [sequence.CITE.key] if chosen else [],
    }  # fmt: skip


def _context(wanted: int | None, best: Evaluated, judged: list[Evaluated]) -> dict[str, Any]:
    """Why so many ranks divide positions, and why by this exchange: the best of the other ways."""
    layout, chosen = best.layout, exchange_of(best.layout)
    others: dict[str, Evaluated] = {}
    for e in judged:
        way = f"{e.candidate.degrees.exchange or 'none'} {e.candidate.degrees.context}"
        if e.timeline is not None and way != f"{chosen or 'none'} {layout.context}" and (way not in others or e.time_s < others[way].time_s):
            others[way] = e
    refused = next((e.why for e in judged if e.candidate.degrees.context > 1 and e.why and e.timeline is None), "")
    rivals = "; ".join(f"{way} {e.time_s:.4g} s" + (", which does not fit" if e.excess_bytes > 0 else "") for way, e in sorted(others.items()))
    why = f"{best.time_s:.4g} s; {rivals or refused or 'the only way considered'}"
    options = {"degree": layout.context, "wanted": "auto" if wanted is None else str(wanted)}
    return {"strategy": chosen or "none", "options": options, "why": why, "cite": [EXCHANGES[chosen].key] if chosen else []}


def _experts(wanted: int | None, best: Evaluated, judged: list[Evaluated], tensor: int) -> dict[str, Any]:
    """Why so many replicas divide experts: the best of every other degree. `tensor`: ranks that divide what a replica has."""
    others: dict[int, Evaluated] = {}
    for e in judged:
        degree = e.candidate.degrees.expert
        if e.timeline is not None and degree != best.layout.expert and (degree not in others or e.time_s < others[degree].time_s):
            others[degree] = e
    refused = next((e.why for e in judged if e.candidate.degrees.expert > 1 and e.why and e.timeline is None), "")
    rivals = "; ".join(f"degree {n} {e.time_s:.4g} s" + (", which does not fit" if e.excess_bytes > 0 else "") for n, e in sorted(others.items()))
    why = f"{best.time_s:.4g} s; {rivals or refused or 'the only degree considered'}"
    options = {"degree": best.layout.expert, "wanted": "auto" if wanted is None else str(wanted)}
    options |= {"tensor": tensor} if tensor > 1 else {}
    divided = best.layout.expert * tensor > 1
    strategy = "exchange" if best.layout.expert > 1 else "tensor" if divided else "none"
    return {"strategy": strategy, "options": options, "why": why, "cite": [GSHARD.key] if divided else []}
