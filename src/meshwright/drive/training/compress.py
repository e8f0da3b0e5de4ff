"""The decision on compressed gradient sums of a training plan: which gradients replicas exchange together, and through which codec.

The layout, placement, schedule and backward are decided before, without codecs. From the simulated backward of that plan comes when each gradient is
ready on the ranks of every stage, from a profile what codecs cost and how long the fabric takes among a stage's replicas; the traffic planner groups
the stage's gradients and gives each group a codec, or none; the groups become the buckets of the layout, and the whole step is lowered and simulated
again. `auto` also tries the best groups without codecs, and takes codecs only where the simulated step is shorter by a margin, so it is never slower
by prediction. Gradients of shared parameters of several stages, and with tensor parallelism of parameters that every rank has whole, are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from ...cite import Cite
from ...codec.codec import parse_codec
from ...codec.kinds import CODECS
from ...cost import Priced
from ...decide.layout.data_sharding import DataSharding
from ...decide.traffic import CITES
from ...decide.traffic.problem import curve_at
from ...errors import Unsupported
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...lower.compressed import divided_parameters, local_shapes, unsupported_codec, unsupported_layout
from ...plan.plan import GradientBucket, TrainingLayout
from ...program.program import Kind
from ...traffic import GradientTensor, TrafficPlan, TrafficProfile
from ..traffic import UNCOMPRESSED, plan_traffic, risks_of
from .collective_choice import Collectives
from .context import Context, Decision, Found
from .evaluated import Evaluated
from .sharding import ShardingWanted, as_wanted

__all__ = ["OFFERED", "CompressWanted", "Compression", "Profiler"]

AUTO = "auto"
# How many times faster a step with codecs must be: predictions are not better than that, and a codec changes the training.
MIN_SPEEDUP = 1.05
# to `auto`: all that promise the dense loss after as many steps, and whose payloads have a fixed size
OFFERED = tuple(k.name for k in CODECS if k.keeps_loss and k.name != UNCOMPRESSED and not unsupported_codec(parse_codec(k.name)))
ADDING = ("B", "W")  # phases that add to gradients of parameters

Ready = dict[str, int]  # parameter -> ns from the start of the step

# (gradients in ready order, end of the backward in ns, fabric, codecs) -> what they cost there
Profiler = Callable[[Sequence[GradientTensor], int, Fabric, Sequence[str]], TrafficProfile]


@dataclass(frozen=True, kw_only=True)
class CompressWanted:
    """`codec`: `auto`, or one for every group whatever it costs; empty: sums are as they are. `profile` times codecs, e.g.
    `probe.traffic.profile.profile_tensors`.

    `kept`: codecs of an older plan, whose memories are to go on: chosen among them, whatever that costs, where the layout has replicas.
    Raises: UnknownName, UsageError (no such codec); Unsupported for one that training steps cannot use.
    """

    codec: str = ""
    profile: Profiler | None = None
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.codec not in ("", AUTO) and (reason := unsupported_codec(parse_codec(self.codec))):
            raise Unsupported(reason, where="--compress", hint="e.g. topk:density=0.01, int8, powersgd; `meshwright traffic plan` knows the others")

    @property
    def offered(self) -> tuple[str, ...]:
        if self.kept:
            return self.kept
        return (*OFFERED, UNCOMPRESSED) if self.codec == AUTO else (parse_codec(self.codec).text,)

    @property
    def forced(self) -> bool:
        return self.codec != AUTO or bool(self.kept)


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What the ranks of one family, `pipeline` the first index of them, send of their gradients."""

    pipeline: int
    plan: TrafficPlan


@dataclass(frozen=True)
class Compression(Decision):
    name = "compression"

    def refine(self, found: Found, context: Context) -> Found:
        """Raises: Unsupported when a codec is asked for by name and no layout that was judged can use it."""
        wanted = context.wish(CompressWanted)
        if not wanted.codec:
            return found
        best, entry = _choose(context, found, wanted)
        return replace(found, best=best).noted(self.name, entry)

    def entries(self, found: Found, context: Context) -> dict[str, Any]:
        return {"compress": found.notes[self.name]} if self.name in found.notes else {}

    def cites(self, key: str, entry: Mapping[str, Any]) -> list[tuple[str, Cite]]:
        """Of the strategy and the codecs."""
        if key != "compress":
            return []
        found = [(key, CITES[entry["strategy"]])] if entry["strategy"] in CITES else []
        for codec in dict.fromkeys(g["codec"] for g in entry.get("groups", ())):
            cite = parse_codec(codec).kind.cite
            found += [(f"codec:{codec}", cite)] if cite is not None else []
        return found


def _choose(context: Context, found: Found, wanted: CompressWanted) -> tuple[Evaluated, dict[str, Any]]:
    """The plan to take, and its entry."""
    best = found.winner
    base, reason = _base(context, best, found.judged)
    ready = gradient_times(base) if base is not None else []
    profiles = _profiles(context, base, ready, wanted) if base is not None else []
    if base is None or not profiles:
        reason = reason or "no rank has gradients of its own that replicas exchange"
        if wanted.codec != AUTO and not wanted.kept:
            hint = "another layout (--dp, --tp, --pp, --zero), or --compress none"
            raise Unsupported(f"no gradients can go through {wanted.codec}: {reason}", where="--compress", hint=hint)
        return best, _entry(context, wanted, best, best, [], reason)

    def made_of(codecs: Iterable[str]) -> tuple[Evaluated, list[_Sums]]:
        sums = [_Sums(pipeline=p, plan=plan_traffic(profile, codecs=list(codecs))) for p, profile in profiles]
        made = _evaluated(context, base, ready, sums)
        return (Collectives().refine(Found(made), context).winner if made.fits else made), sums

    tried = [made_of(wanted.offered)]
    if wanted.forced:
        made, sums = tried[0]
        if not made.fits:
            why = made.why or f"needs {made.excess_bytes} bytes more than a device has"
            raise Unsupported(
                f"the plan with {', '.join(wanted.offered)} cannot be made: {why}", where="--compress", hint="--compress none, or more memory"
            )
        return made, _entry(context, wanted, made, best, sums, "")
    tried.append(made_of([UNCOMPRESSED]))
    fitting = [(made, sums) for made, sums in tried if made.fits]
    plain = min([best.time_s, *(made.time_s for made, sums in fitting if not _compresses(sums))])
    for made, sums in sorted(fitting, key=lambda x: x[0].time_s):
        if made.time_s * (MIN_SPEEDUP if _compresses(sums) else 1.0) < plain or (made.time_s < best.time_s and not _compresses(sums)):
            return made, _entry(context, wanted, made, best, sums, "")
    told = ", ".join(f"{made.time_s:.4g} s" for made, sums in fitting if _compresses(sums)) or "no such plan"
    return best, _entry(context, wanted, best, best, [], f"codecs must shorten the simulated step by {100 * (MIN_SPEEDUP - 1):.0f} %: {told}")


def _compresses(sums: Sequence[_Sums]) -> bool:
    return any(g.codec != UNCOMPRESSED for s in sums for g in s.plan.groups)


def _base(context: Context, best: Evaluated, judged: Sequence[Evaluated]) -> tuple[Evaluated | None, str]:
    """The fastest layout whose gradients can go through codecs, summed during backward where that is allowed; or why there is none."""
    sharding = context.wish(ShardingWanted)
    if any(d.kind != "cpu" for d in context.fabric.devices):
        return None, "codecs run on processors, and the fabric has other devices"
    if best.program is not None and best.program.fold is not None:
        return None, "the program of so many ranks is folded"
    fitting = [e for e in (best, *judged) if e.fits and as_wanted(e, sharding)]
    fitting = [e for e in fitting if bool(e.candidate.schedule) == bool(best.candidate.schedule) and (e.program is None or e.program.fold is None)]
    able = [e for e in fitting if not unsupported_layout(e.layout)]
    if not able:
        return None, unsupported_layout(best.layout) or "no layout that was judged can use them"
    base = min(able, key=lambda e: e.time_s)
    if sharding.overlap is False or base.layout.overlap or base.candidate.schedule:
        return base, ""
    summed = DataSharding(base.layout.zero_level, True, sharding.bucket_bytes)
    candidate = context.grid().sharded(context.problem, base.candidate.degrees, summed, base.candidate.division)
    if candidate.layout is None:
        return base, ""
    early = context.judge(candidate, base.placement, base.placement_name)[-1]
    return (early if early.fits else base), ""


def _profiles(context: Context, base: Evaluated, ready: Sequence[Ready], wanted: CompressWanted) -> list[tuple[int, TrafficProfile]]:
    """Of the first index of every family whose gradients can go through codecs: what sending them costs among its replicas."""
    assert wanted.profile is not None, "who asks for codecs says what times them"
    lay, graph, found = base.layout, context.evaluator.graph_for(base.layout), list[tuple[int, TrafficProfile]]()
    for family in lay.families():
        tensors, backward_ns = ready_gradients(base.layout, ready[family[0]], graph)
        devices = [base.placement[lay.rank(p, d, 0)] for p in family for d in range(lay.data)]
        fabric = context.fabric if len(devices) == len(context.fabric.devices) else context.fabric.subset(devices)
        if tensors:
            found.append((family[0], wanted.profile(tensors, backward_ns, fabric, wanted.offered)))
    return found


def ready_gradients(lay: TrainingLayout, ready: Ready, graph: OpGraph) -> tuple[tuple[GradientTensor, ...], int]:
    """(gradients of a pipeline index that codecs may send, in the order in which they are ready, end of its backward in ns)."""
    users = Counter(p for family in lay.families() for p in lay.held(family[0]).params)
    divided, shapes = divided_parameters(lay), local_shapes(graph, lay, 0)
    end = max(ready.values(), default=0)
    able = [p.name for p in graph.parameters if p.trainable and p.name in ready and p.name in divided and users[p.name] == 1]
    place = {name: i for i, name in enumerate(ready)}
    at = {name: ready[name] if lay.overlap else end for name in able}  # otherwise sums wait for the end of backward
    order = sorted(able, key=lambda name: (at[name], -place[name]))  # of one segment, the last parameters' gradients come first
    return tuple(GradientTensor(name=n, shape=shapes[n], ready_ns=at[n]) for n in order), end


def gradient_times(e: Evaluated) -> list[Ready]:
    """By pipeline index: when every parameter's gradient is complete on its first rank, by the simulated timeline."""
    p, spans, found = e.inlined.program, e.recorded().spans, list[Ready]()
    for pipeline in range(e.layout.pipeline):
        ends: dict[str, int] = {}
        mine = (spans.rank == e.layout.rank(pipeline, 0, 0)) & (spans.step >= 0)
        for step, end_s in zip(spans.step[mine].tolist(), spans.end_s[mine].tolist(), strict=True):
            op = int(p.steps.op[step])
            if p.steps.kind[step] == Kind.COMPUTE and p.ops.name[op] in ADDING:
                ends[p.ops.graph[op]] = max(ends.get(p.ops.graph[op], 0), round(end_s * 1e9))
        ready: Ready = {}
        for s in e.layout.segments:
            for name in s.params if s.key in ends else ():
                ready[name] = max(ready.get(name, 0), ends[s.key])
        found.append(ready)
    return found


def _bucketed(lay: TrainingLayout, times: Sequence[Ready], sums: Sequence[_Sums]) -> TrainingLayout:
    """The layout with the planned groups as its buckets; what is in no group stays in the buckets that it was in."""
    stage_of = {p: s.index for s in reversed(lay.stages) for p in s.params}  # of several of one rank, the one whose backward comes last
    ready = {name: at for found in times for name, at in found.items()}
    made: list[GradientBucket] = []
    for s in sums:
        for g in s.plan.groups:
            names = [t.name for t in s.plan.profile.tensors[g.first : g.last]]
            for stage, run in groupby(sorted(names, key=stage_of.__getitem__), key=stage_of.__getitem__):
                made.append(GradientBucket(stage=stage, params=tuple(run), codec="" if g.codec == UNCOMPRESSED else g.codec))
    grouped = {p for b in made for p in b.params}
    rest = [msgspec.structs.replace(b, params=tuple(p for p in b.params if p not in grouped)) for b in lay.buckets]
    buckets = sorted((*made, *(b for b in rest if b.params)), key=lambda b: max(ready.get(p, 0) for p in b.params))
    return msgspec.structs.replace(lay, buckets=tuple(buckets))


def _evaluated(context: Context, base: Evaluated, ready: Sequence[Ready], sums: Sequence[_Sums]) -> Evaluated:
    """The layout with the planned groups as its buckets, lowered and simulated; encodes and decodes cost what the profile says."""
    layout = _bucketed(base.layout, ready, sums)
    share = context.evaluator.table_share or 1.0
    prices: dict[str, Priced] = {}
    for s in sums:
        profile, elements_of = s.plan.profile, {t.name: t.elements for t in s.plan.profile.tensors}
        for p in layout.mates(s.pipeline):
            for i, bucket in enumerate(layout.buckets_of(p)):
                if not bucket.codec:
                    continue
                cost = profile.codecs[profile.position(bucket.codec)]
                elements = np.array([sum(elements_of[name] for name in bucket.params)], np.int64)
                # a second round reads the gradients once more, as the first did
                for name, curve in (("encode", cost.encode), ("advance", cost.encode), ("decode", cost.decode)):
                    prices[f"codec{p}@{i}|{name}"] = Priced(float(curve_at(curve, elements)[0]) / 1e9 / share, "measured")
    return context.evaluator.evaluate(replace(base.candidate, layout=layout), base.placement, base.placement_name, base.policy, prices)


def _entry(
    context: Context, wanted: CompressWanted, chosen: Evaluated, plain: Evaluated, sums: Sequence[_Sums], refused: str
) -> dict[str, Any]:
    """The plan's entry: groups with bytes and times, what each codec states of its error, the step with and without."""
    used = list(sums) if chosen is not plain else []
    strategies = list(dict.fromkeys(s.plan.strategy for s in used))
    entry: dict[str, Any] = {
        "strategy": strategies[0] if strategies else "none", "options": {"wanted": wanted.codec, "offered": list(wanted.offered)},
        "cite": [CITES[s].key for s in strategies if s in CITES], "step_s": chosen.time_s, "uncompressed_s": plain.time_s,
    }  # fmt: skip
    if not used:
        return entry | {"why": f"gradients are sent as they are: {refused}; {plain.time_s:.4g} s"}
    entry["groups"] = [_group(s, g.first, g.last, g.codec) for s in used for g in s.plan.groups]
    entry["risks"] = list({r.codec: asdict(r) for s in used for r in risks_of(s.plan)}.values())
    sent = sum(g["payload_bytes"] for g in entry["groups"])
    dense = sum(t.elements for s in used for t in s.plan.profile.tensors) * used[0].plan.profile.element_bytes
    codecs = ", ".join(dict.fromkeys(g["codec"] for g in entry["groups"]))
    change = f"{plain.time_s / chosen.time_s:.3g} times faster" if chosen.time_s < plain.time_s else "not faster; it was asked for"
    whose = "per rank" if len(used) == 1 else f"over {len(used)} stages"
    why = f"{codecs} in {len(entry['groups'])} groups: {chosen.time_s:.4g} s, without {plain.time_s:.4g} s ({change}); "
    why += f"{sent} of {dense} bytes {whose}"
    left = len({p.name for p in context.graph.parameters if p.trainable} - {n for g in entry["groups"] for n in g["params"]})
    return entry | {"why": why + (f"; {left} parameters as they are" if left else ""), "left_alone": left}


def _group(sums: _Sums, first: int, last: int, codec: str) -> dict[str, Any]:
    p, tensors = sums.plan.profile, sums.plan.profile.tensors[first:last]
    cost = p.codecs[p.position(codec)]
    elements, payload = sum(t.elements for t in tensors), sum(cost.payload_bytes[first:last])

    def seconds(curve: Any, size: int) -> float:
        return float(curve_at(curve, np.array([size], np.int64))[0]) / 1e9

    return {
        "codec": codec, "pipeline": sums.pipeline, "params": [t.name for t in tensors], "elements": elements, "payload_bytes": payload,
        "ready_s": tensors[-1].ready_ns / 1e9, "encode_s": seconds(cost.encode, elements), "exchange_s": seconds(cost.exchange, payload),
        "decode_s": seconds(cost.decode, elements),
    }  # fmt: skip
