"""The decision on compressed gradient sums of a training plan: which gradients replicas exchange together, and through which codec.

The layout, placement and backward are decided before, without codecs. From the simulated backward of that plan comes when each gradient is ready,
from a profile what codecs cost and how long the fabric takes; the traffic planner groups the gradients and gives each group a codec, or none;
the groups become the buckets of the layout, and the whole step is lowered and simulated again. `auto` also tries the best groups without codecs,
and takes codecs only where the simulated step is shorter by a margin, so it is never slower by prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np

from .cite import Cite
from .codec import parse_codec
from .cost import Priced
from .decide.layout.data_sharding import DataSharding
from .decide.layout.grid import Grid
from .decide.layout.problem import LayoutProblem
from .decide.traffic import CITES
from .decide.traffic.problem import curve_at
from .drive_layouts import Evaluated, LayoutSearch
from .drive_sharding import ShardingWanted, as_wanted
from .drive_traffic import UNCOMPRESSED, plan_traffic, risks_of
from .errors import Unsupported
from .fabric import Fabric
from .graph import OpGraph
from .lowering_compressed import unsupported_codec, unsupported_layout
from .plan import GradientBucket, TrainingLayout
from .program import Kind
from .traffic import GradientTensor, TrafficPlan, TrafficProfile

__all__ = ["OFFERED", "CompressWanted", "Profiler", "choose_compression", "compression_citations"]

AUTO = "auto"
WORTH = 1.05  # how many times faster a step with codecs must be: predictions are not better than that, and a codec changes the training
OFFERED = ("int8", "topk:density=0.01")  # to `auto`: error feedback, the dense loss after as many steps, and payloads of a fixed size

# (gradients in ready order, end of the backward in ns, fabric, codecs) -> what they cost there
Profiler = Callable[[Sequence[GradientTensor], int, Fabric, Sequence[str]], TrafficProfile]


@dataclass(frozen=True, kw_only=True)
class CompressWanted:
    """`codec`: `auto`, or one for every group whatever it costs. `profile` times codecs, e.g. `probe.traffic_profile.profile_tensors`.

    Raises: UnknownName, UsageError (no such codec); Unsupported for one that training steps cannot use.
    """

    codec: str
    profile: Profiler

    def __post_init__(self) -> None:
        if self.codec != AUTO and (reason := unsupported_codec(parse_codec(self.codec))):
            raise Unsupported(reason, where="--compress", hint="e.g. topk:density=0.01, int8, efsign; `meshwright traffic plan` knows the others")

    @property
    def offered(self) -> tuple[str, ...]:
        return (*OFFERED, UNCOMPRESSED) if self.codec == AUTO else (parse_codec(self.codec).text,)


def choose_compression(
    search: LayoutSearch, best: Evaluated, judged: Sequence[Evaluated], wanted: CompressWanted | None, sharding: ShardingWanted
) -> tuple[Evaluated, dict[str, Any]]:
    """The plan to take, and its entry `compress` (empty where nothing was asked).

    Raises: Unsupported when a codec is asked for by name and no layout that was judged can use it.
    """
    if wanted is None:
        return best, {}
    base, reason = _base(search, best, judged, sharding)
    if base is None:
        if wanted.codec != AUTO:
            hint = "--zero 0 --tp 1 --pp 1, or --compress none"
            raise Unsupported(f"no gradients can go through {wanted.codec}: {reason}", where="--compress", hint=hint)
        return best, _entry(wanted, best, best, None, reason)
    profile = _profile(search, base, wanted)
    tried = [_try(search, base, plan_traffic(profile, codecs=list(wanted.offered)))]
    if wanted.codec != AUTO:
        made, plan = tried[0]
        if made.timeline is None or made.excess_bytes > 0:
            why = made.why or f"needs {made.excess_bytes} bytes more than a device has"
            raise Unsupported(f"the plan with {wanted.codec} cannot be made: {why}", where="--compress", hint="--compress none, or more memory")
        return made, _entry(wanted, made, best, plan, "")
    tried.append(_try(search, base, plan_traffic(profile, codecs=[UNCOMPRESSED])))
    fitting = [(made, plan) for made, plan in tried if made.timeline is not None and made.excess_bytes <= 0]
    plain = min([best.time_s, *(made.time_s for made, plan in fitting if not _compresses(plan))])
    for made, plan in sorted(fitting, key=lambda x: x[0].time_s):
        if made.time_s * (WORTH if _compresses(plan) else 1.0) < plain or (made.time_s < best.time_s and not _compresses(plan)):
            return made, _entry(wanted, made, best, plan, "")
    told = ", ".join(f"{made.time_s:.4g} s" for made, plan in fitting if _compresses(plan)) or "no such plan"
    return best, _entry(wanted, best, best, None, f"codecs must shorten the simulated step by {100 * (WORTH - 1):.0f} %: {told}")


def _compresses(plan: TrafficPlan) -> bool:
    return any(g.codec != UNCOMPRESSED for g in plan.groups)


def _try(search: LayoutSearch, base: Evaluated, plan: TrafficPlan) -> tuple[Evaluated, TrafficPlan]:
    made = _evaluated(search, base, plan)
    return (search.refine_collectives(made) if made.timeline is not None and made.excess_bytes <= 0 else made), plan


def _base(search: LayoutSearch, best: Evaluated, judged: Sequence[Evaluated], sharding: ShardingWanted) -> tuple[Evaluated | None, str]:
    """The fastest layout whose gradients can go through codecs, summed during backward where that is allowed; or why there is none."""
    if any(d.kind != "cpu" for d in search.fabric.devices):
        return None, "codecs run on processors, and the fabric has other devices"
    if best.program is not None and best.program.fold is not None:
        return None, "the program of so many ranks is folded"
    fitting = [e for e in (best, *judged) if e.timeline is not None and e.excess_bytes <= 0 and as_wanted(e, sharding)]
    able = [e for e in fitting if not unsupported_layout(e.layout)]
    if not able or best.candidate.schedule:
        return None, unsupported_layout(best.layout) or "a pipeline schedule was asked for"
    base = min(able, key=lambda e: e.time_s)
    if sharding.overlap is False or base.layout.overlap:
        return base, ""
    problem = LayoutProblem(
        graph_at=search.graph_at, fabric=search.fabric, cost=search.cost, global_batch=search.job.global_batch, fixed=(None,) * 4,
        borders=search.borders,
    )  # fmt: skip
    from .graph_liveness import segment_workspace

    candidate = Grid(workspace=segment_workspace, tensor_options=search.tensor_options).sharded(
        problem, base.candidate.degrees, DataSharding(0, True, sharding.bucket_bytes)
    )
    if candidate.layout is None:
        return base, ""
    early = search.evaluate_with_recomputation(candidate, base.placement, base.placement_name)[-1]
    return (early if early.timeline is not None and early.excess_bytes <= 0 else base), ""


def _profile(search: LayoutSearch, base: Evaluated, wanted: CompressWanted) -> TrafficProfile:
    tensors, backward_ns = ready_gradients(base, search.graph_at(base.layout.microbatch_size))
    return wanted.profile(tensors, backward_ns, search.fabric, wanted.offered)


def ready_gradients(e: Evaluated, graph: OpGraph) -> tuple[tuple[GradientTensor, ...], int]:
    """(gradients of rank 0 in the order in which they are ready, end of its backward in ns), by the simulated timeline."""
    p, spans = e.inlined.program, e.recorded().spans
    ends: dict[str, int] = {}
    mine = (spans.rank == 0) & (spans.step >= 0)
    for step, end_s in zip(spans.step[mine].tolist(), spans.end_s[mine].tolist(), strict=True):
        op = int(p.steps.op[step])
        if p.steps.kind[step] == Kind.COMPUTE and p.ops.name[op] == "B":
            ends[p.ops.graph[op]] = max(ends.get(p.ops.graph[op], 0), round(end_s * 1e9))
    shapes = {x.name: tuple(x.shape) for x in graph.parameters if x.trainable}
    ready: dict[str, int] = {}
    for s in e.layout.segments:
        for name in s.params:
            if name in shapes and s.key in ends:
                ready[name] = max(ready.get(name, 0), ends[s.key])
    place = {name: i for i, name in enumerate(ready)}
    order = sorted(ready, key=lambda name: (ready[name], -place[name]))  # of one segment, the last parameters' gradients come first
    return tuple(GradientTensor(name=n, shape=shapes[n], ready_ns=ready[n]) for n in order), max(ends.values())


def _evaluated(search: LayoutSearch, base: Evaluated, plan: TrafficPlan) -> Evaluated:
    """The layout with the planned groups as its buckets, lowered and simulated; encodes and decodes cost what the profile says."""
    tensors = plan.profile.tensors
    layout: TrainingLayout = msgspec.structs.replace(
        base.layout,
        buckets=tuple(
            GradientBucket(stage=0, params=tuple(t.name for t in tensors[g.first : g.last]), codec="" if g.codec == UNCOMPRESSED else g.codec)
            for g in plan.groups
        ),
    )
    share = search.fabric.device(base.placement[0]).cpu_share or 1.0
    prices: dict[str, Priced] = {}
    for i, g in enumerate(plan.groups):
        cost = plan.profile.codecs[plan.profile.position(g.codec)]
        elements = np.array([sum(t.elements for t in tensors[g.first : g.last])], np.int64)
        for name, curve in (("encode", cost.encode), ("decode", cost.decode)):
            prices[f"codec0@{i}|{name}"] = Priced(float(curve_at(curve, elements)[0]) / 1e9 / share, "measured")
    search.codec_prices = prices  # stays for the refinement of this plan's collectives
    return search.evaluate(replace(base.candidate, layout=layout), base.placement, base.placement_name, search.planner, base.policy)


def _entry(wanted: CompressWanted, chosen: Evaluated, plain: Evaluated, plan: TrafficPlan | None, refused: str) -> dict[str, Any]:
    """The plan's entry: groups with bytes and times, what each codec states of its error, the step with and without."""
    used = chosen is not plain
    cites = [CITES[plan.strategy].key] if plan is not None and used and plan.strategy in CITES else []
    entry: dict[str, Any] = {
        "strategy": plan.strategy if plan is not None and used else "none", "options": {"wanted": wanted.codec, "offered": list(wanted.offered)},
        "cite": cites, "step_s": chosen.time_s, "uncompressed_s": plain.time_s,
    }  # fmt: skip
    if plan is None or not used:
        return entry | {"why": f"gradients are sent as they are: {refused}; {plain.time_s:.4g} s"}
    entry["groups"] = [_group(plan, g.first, g.last, g.codec) for g in plan.groups]
    entry["risks"] = [asdict(r) for r in risks_of(plan)]
    sent = sum(g["payload_bytes"] for g in entry["groups"])
    dense = sum(t.elements for t in plan.profile.tensors) * plan.profile.element_bytes
    codecs = ", ".join(dict.fromkeys(g.codec for g in plan.groups))
    change = f"{plain.time_s / chosen.time_s:.3g} times faster" if chosen.time_s < plain.time_s else "not faster; it was asked for"
    why = f"{codecs} in {len(plan.groups)} groups: {chosen.time_s:.4g} s, without {plain.time_s:.4g} s ({change}); {sent} of {dense} bytes per rank"
    return entry | {"why": why}


def _group(plan: TrafficPlan, first: int, last: int, codec: str) -> dict[str, Any]:
    p, tensors = plan.profile, plan.profile.tensors[first:last]
    cost = p.codecs[p.position(codec)]
    elements, payload = sum(t.elements for t in tensors), sum(cost.payload_bytes[first:last])

    def seconds(curve: Any, size: int) -> float:
        return float(curve_at(curve, np.array([size], np.int64))[0]) / 1e9

    return {
        "codec": codec, "params": [t.name for t in tensors], "elements": elements, "payload_bytes": payload, "ready_s": tensors[-1].ready_ns / 1e9,
        "encode_s": seconds(cost.encode, elements), "exchange_s": seconds(cost.exchange, payload), "decode_s": seconds(cost.decode, elements),
    }  # fmt: skip


def compression_citations(decision: Any) -> list[tuple[str, Cite]]:
    """(what, Cite) of the strategy and the codecs of a plan's entry."""
    found = [("compress", CITES[decision["strategy"]])] if decision["strategy"] in CITES else []
    for codec in dict.fromkeys(g["codec"] for g in decision.get("groups", ())):
        cite = parse_codec(codec).kind.cite
        found += [(f"codec:{codec}", cite)] if cite is not None else []
    return found
