"""`meshwright layout search`: stages, degrees, recomputation and sharding for a model on a fabric of any size and mix, with bounds."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import graph_given, require_directory, routing_of, training_arguments
from .frame import Result

if TYPE_CHECKING:
    from ..cost import Cost
    from ..decide.layout.mixed.search import Judged
    from ..drive.layout.search import LayoutFindings
    from ..fabric.fabric import Fabric
    from ..graph.graph import OpGraph
    from ..job import Training

HELP = "find stages, degrees, recomputation and sharding for a model on a fabric of any size and mix, and say how far from a bound"


def arguments(parser: argparse.ArgumentParser) -> None:
    training_arguments(parser)
    parser.add_argument("--cost", default="roofline", help="roofline (default), tables:SYSTEM, or a cost file")
    parser.add_argument("--framework", default="", help="price layers as this framework runs them: megatron-core, torchtitan, ... (docs/profiles.md)")
    parser.add_argument("--precision", default="mixed", choices=("mixed", "fp32"), help="mixed (default): bf16 with fp32 states; fp32")
    parser.add_argument("--microbatches", default="1,2,3,4,6,8", help="micro-batch sizes to try (default 1,2,3,4,6,8; those that divide the batch)")
    parser.add_argument("--tensors", default="", help="tensor degrees to try (default: powers of two within a server)")
    parser.add_argument("--contexts", default="", help="context degrees to try, 1: none (default: powers of two that leave a rank 8192 positions)")
    parser.add_argument("--ep", default="1", help="expert degrees to try, e.g. 1,8,64: replicas that divide experts of converted layers (default 1)")
    parser.add_argument("--routing", default="uniform", metavar="uniform|zipf:S|FILE", help="how tokens choose experts (default uniform)")
    parser.add_argument(
        "--no-sequence-parallel", action="store_true",
        help="do not split the parts between tensor-parallel regions along the sequence",
    )  # fmt: skip
    parser.add_argument(
        "--sharding-messages", default="overlapped", choices=("overlapped", "blocking"),
        help="whether messages of sharding levels 2 and 3 overlap computation (default overlapped)",
    )  # fmt: skip
    parser.add_argument("--levels", default="0,1,2,3", help="sharding levels allowed (default 0,1,2,3)")
    parser.add_argument("--recompute", default="none,selective,full", help="recomputation allowed (default none,selective,full)")
    parser.add_argument("--memory", help="memory of every device, e.g. 40GiB (default: what the fabric says)")
    parser.add_argument("--objective", default="time", choices=("time", "cost", "energy"), help="what to minimise (default time)")
    parser.add_argument(
        "--price", action="append", default=[], metavar="KIND=X",
        help="price of one device per hour, by kind of device; may be repeated",
    )  # fmt: skip
    parser.add_argument("--power", action="append", default=[], metavar="KIND=W", help="watts of one device, by kind; may be repeated")
    parser.add_argument("--budget", type=float, default=0.0, help="highest cost of a step, in the unit of --price (default 0: no limit)")
    parser.add_argument("--min-throughput", type=float, default=0.0, metavar="S", help="lowest samples per second")
    parser.add_argument("--methods", default="", help="strategies, separated by commas, from `strategies list layout` (default: all)")
    parser.add_argument(
        "--schedules", default="",
        help="schedules allowed beside 1F1B, separated by commas, from `strategies list pipeline` (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE",
        help="a field of the runtime, see docs/profiles.md; may be repeated",
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=8, help="runners-up to print (default 8)")
    parser.add_argument("--out", "-o", type=Path, help="write the fastest layout that `train run` can execute as a training plan")
    parser.add_argument(
        "--optimizer", default="adamw",
        help="adamw (default), sgd, or module:function; its state counts as memory, and the plan of --out names it",
    )  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="learning rate of the plan")
    parser.add_argument("--seed", type=int, default=0, help="seed of the plan")


def run(args: argparse.Namespace) -> Result:
    from msgspec import structs

    from ..decide.layout.mixed.search import Demands
    from ..drive.layout.search import find_expert_layouts, find_layouts
    from ..drive.plans import read_fabric
    from ..graph.scale import at_batch
    from ..plan.narrowed import with_optimizer
    from ..plan.precision import FULL, MIXED
    from ..probe.costs.name import load_cost
    from ..profile.frameworks import framework
    from .collective_export import size_bytes
    from .profile_predict import require_settings, with_settings
    from .recipe_arguments import require_made

    if args.out is not None:
        require_directory(args.out)
    given, fabric = graph_given(args), read_fabric(args.fabric, args.devices)
    require_settings(args.set)
    if given is None:
        require_made(_job(args))
    cost = load_cost(args.cost, fabric)
    made, precision = framework(args.framework) if args.framework else None, MIXED if args.precision == "mixed" else FULL
    if made is not None and args.precision == "mixed":
        precision = structs.replace(MIXED, state=made.state)
    demands = Demands(
        objective=args.objective, price_per_hour=_numbers(args.price, "--price"), watts=_numbers(args.power, "--power"), budget=args.budget,
        samples_per_s=args.min_throughput,
    )  # fmt: skip
    sizes, tensors, levels = _whole(args.microbatches, "--microbatches"), _whole(args.tensors, "--tensors"), _whole(args.levels, "--levels", least=0)
    contexts, memory_bytes = _whole(args.contexts, "--contexts"), size_bytes(args.memory, "--memory") if args.memory else 0
    routing, degrees = routing_of(args.routing), _whole(args.ep, "--ep")
    graph_of = cache(lambda: given or _captured(args))  # when it is asked for: it takes longest, and all else is read by then
    found, each = find_expert_layouts(degrees, lambda degree: find_layouts(
        lambda batch: at_batch(graph_of(), batch), fabric, cost, global_batch=args.global_batch, precision=with_optimizer(precision, args.optimizer),
        microbatches=sizes, tensors=tensors, contexts=contexts, sequence=not args.no_sequence_parallel, memory_bytes=memory_bytes, demands=demands,
        methods=args.methods.split(",") if args.methods else (), adjust=lambda runtime: with_settings(runtime, args.set),
        levels=levels, sharding_messages=args.sharding_messages,
        recompute=[x for x in args.recompute.split(",") if x], schedules=[x for x in args.schedules.split(",") if x], framework=made,
        experts=degree, routing=routing,
    ))  # fmt: skip
    document, text = document_of(found, args.show), text_of(found, args.show)
    if degrees != (1,):
        degree = found.problem.table.experts
        others = "; ".join(f"{d}: {x}" for d, x in each.items() if d != degree)
        document |= {"expert_degree": degree, "expert_degrees": {str(d): x for d, x in each.items()}, "routing": str(routing)}
        text += f"\nexperts over {degree} replicas, {routing}; in layer times, not simulated as flows" + (f"; {others}" if others else "")
    if args.out is not None:
        written, said = _write_plan(args, found, graph_of(), fabric, cost)
        document, text = {**document, "plan": written}, f"{text}\n{said}"
    return Result(document, text, cut=found.found.cut)


def _write_plan(args: argparse.Namespace, found: LayoutFindings, graph: OpGraph, fabric: Fabric, cost: Cost) -> tuple[dict[str, Any], str]:
    """The plan of the fastest layout that can be run; what keeps faster ones from it."""
    from ..drive.plans import cost_of, write_plan
    from ..drive.training.found_layout import best_runnable, not_runnable, plan_found

    chosen = best_runnable(found)
    plan = plan_found(found, chosen, _job(args, graph), fabric, cost, graph, routing=routing_of(args.routing))
    write_plan(args.out, plan)
    assert plan.prediction is not None
    name, why = chosen.candidate.layout.name, not_runnable(found, found.found.best)
    row = {"file": str(args.out), "layout": name, "search_time_s": chosen.time_s, "time_s": plan.prediction.time_s, "best_not_runnable": list(why)}
    time_s, dtype = plan.prediction.time_s, cost_of(plan).dtype
    lines = [f"{args.out}: {name}, checked; {time_s:.6g} s a step as lowered ({dtype}), {chosen.time_s:.6g} s by the search"]
    lines += [f"  the best layout cannot be run: {x}" for x in why]
    return row, "\n".join(lines)


def _job(args: argparse.Namespace, graph: OpGraph | None = None) -> Training:
    from ..job import Training

    model, loss = (args.model, args.loss or "cross-entropy") if graph is None else (args.model or graph.model, args.loss or graph.loss)
    return Training(
        model=model, global_batch=args.global_batch, loss=loss, optimizer=args.optimizer, learning_rate=args.learning_rate, seed=args.seed
    )


def _captured(args: argparse.Namespace) -> OpGraph:
    from ..capture.graph import capture

    return capture(args.model, loss=args.loss or "cross-entropy")


def _numbers(given: list[str], where: str) -> dict[str, float]:
    from ..errors import UsageError

    found = {}
    for text in given:
        name, sep, value = text.partition("=")
        try:
            if not (sep and name):
                raise ValueError
            found[name] = float(value)
        except ValueError:
            raise UsageError(f"{text!r} is not KIND=NUMBER", where=where, hint=f"e.g. {where} a100=2.5") from None
    return found


def _whole(text: str, where: str, *, least: int = 1) -> tuple[int, ...]:
    from ..errors import UsageError
    from ..io.limits import MAX_INT32

    parts = [p for p in text.split(",") if p]
    if not all(p.isdecimal() and least <= int(p) <= MAX_INT32 for p in parts):
        raise UsageError(f"{text[:64]!r} is not a list of whole numbers from {least} on", where=where, hint="e.g. 1,2,4")
    return tuple(map(int, parts))


# ---- output ------------------------------------------------------------------------------------------------------------
def document_of(found: LayoutFindings, show: int) -> dict[str, Any]:
    import msgspec

    from ..decide.layout import strategies

    f, best = found.found, found.found.best
    universal, family = f.bounds.gaps(best.time_s)
    kinds = [
        {"kind": p.kind.name, "zone": p.kind.zone, "servers": len(p.kind.servers), "gpus": p.kind.gpus, "nics": p.kind.nics,
         "nic_Bps": p.kind.nic_Bps, "memory_bytes": p.memory_bytes}
        for p in found.problem.pools
    ]  # fmt: skip
    return {
        "schema": "meshwright.layout-search", "version": 1, "model": found.problem.table.model, "global_batch": found.problem.global_batch,
        "layers": found.problem.table.layers, "fabric": kinds, "objective": found.demands.objective, "counts": dict(f.counts),
        "best": _row(found, best), "bounds": {
            "universal_s": f.bounds.universal_s, "universal": f.bounds.universal, "universal_gap": universal, "family_s": f.bounds.family_s,
            "family": f.bounds.family, "family_gap": family,
        },
        "runners_up": [_row(found, j) for j in f.ranked[1 : show + 1]],
        "refused": [{"layout": j.candidate.layout.name, "why": j.why} for j in f.others[:show]],
        "cites": [kind.cite.key for kind in strategies("layers") if f.counts.get(kind.name)],
        "assumptions": list(assumptions(found)), "notes": list(found.problem.table.notes), "runtime": msgspec.to_builtins(found.problem.runtime),
    }  # fmt: skip


def _row(found: LayoutFindings, j: Judged) -> dict[str, Any]:
    import msgspec

    c, d = j.candidate, found.demands
    unsaid = {"schedule": None, "context": 1}  # fields that say nothing where they have these values
    layout = {k: v for k, v in msgspec.to_builtins(c.layout).items() if k not in unsaid or v != unsaid[k]}
    row: dict[str, Any] = {
        "name": c.layout.name, "source": c.source, "time_s": j.time_s, "closed_form_s": j.estimate.time_s, "why": j.why,
        "layout": layout, "choices": _runs(found, j),
        "prediction": j.prediction.to_json() if j.prediction is not None else None,
    }  # fmt: skip
    if d.price_per_hour:
        row["cost"] = d.cost(c, j.time_s)
    if d.watts:
        row["energy_J"] = d.joules(c, j.time_s)
    return row


def _runs(found: LayoutFindings, j: Judged) -> list[dict[str, Any]]:
    """Layers with the same choice in the same stage, together."""
    rows: list[dict[str, Any]] = []
    for s in range(len(j.candidate.layout.stages)):
        for layer in j.candidate.layout.layers_of(s):
            choice = j.candidate.choices[layer]
            last = rows[-1] if rows else None
            if last is not None and last["stage"] == s and (last["recompute"], last["sharding"]) == (choice.recompute, choice.sharding):
                last["layers"] += 1
            else:
                first = found.problem.table.names[layer]
                rows.append({"stage": s, "first": first, "layers": 1, "recompute": choice.recompute, "sharding": choice.sharding})
    return rows


def assumptions(found: LayoutFindings) -> list[str]:
    p = found.problem
    said = list(found.found.best.prediction.assumptions) if found.found.best.prediction is not None else []
    alone = "every operator priced alone, " if p.table.stolen == 0 else ""  # no framework's kernels
    said[:1] = [said[0].replace(" in 1 B per value", "")] if said else []
    said += [
        f"layer times: {p.table.source}; {alone}tensor-parallel collectives as rings inside a server",
        f"messages of sharding levels 2 and 3: {p.table.sharding_messages}, at the group's share of a server's links, each stage's as one flow",
        *(["exchanges of context ranks: in layer times, beside a ring's own computation, not simulated as flows"] if p.table.contexts else []),
        f"state per parameter: weight {p.table.state.weight:g}, gradient {p.table.state.gradient:g}, optimizer {p.table.state.optimizer:g} B",
        "a tied table is held by both of its stages; the sum of its two gradients is not priced",
        "temporaries of single operators are not counted in memory",
    ]
    return said


def text_of(found: LayoutFindings, show: int) -> str:
    f, best, p = found.found, found.found.best, found.problem
    universal, family = f.bounds.gaps(best.time_s)
    devices = ", ".join(
        f"{q.kind.devices} {q.kind.name}{' in ' + q.kind.zone if q.kind.zone else ''} ({len(q.kind.servers)} servers)" for q in p.pools
    )  # fmt: skip
    lines = [f"{p.table.model}: {p.table.layers} layers on {devices}; global batch {p.global_batch}"]
    lines.append(
        f"{f.counts['candidates']} candidates, {f.counts['fitting']} fit, {f.counts['simulated']} simulated ("
        + ", ".join(f"{n} {k}" for k, n in f.counts.items() if k not in ("candidates", "fitting", "simulated")) + ")"
    )  # fmt: skip
    rate = p.global_batch / best.time_s
    lines.append(f"best: {best.candidate.layout.name} [{best.candidate.source}]: {best.time_s:.6g} s a step, {rate:.6g} samples/s")
    lines.append(_spending(found, best))
    lines += _stages(found, best)
    lines.append(f"bound of any layout     {f.bounds.universal_s:.6g} s, gap {universal:.1%}  ({_says(f.bounds.universal)})")
    lines.append(f"bound of its family     {f.bounds.family_s:.6g} s, gap {family:.1%}  ({f.bounds.family})")
    lines.append("runners-up")
    for j in f.ranked[1 : show + 1]:
        lines.append(f"  {j.time_s:.6g} s  {j.candidate.layout.name} [{j.candidate.source}; {_choice(j)}]: {j.why}")
    lines += ["rests on", *(f"  {a}" for a in assumptions(found)), *(f"  note: {n}" for n in p.table.notes[:6])]
    return "\n".join(x for x in lines if x)


def _says(parts: dict[str, Any]) -> str:
    said = f"{parts['flops']:.4g} operations at {parts['flops_per_s']:.4g}/s: {parts['compute_s']:.6g} s; between servers {parts['cut_s']:.3g} s"
    return said + (f"; with a micro-batch's way {parts['path_s']:.6g} s" if parts["path_s"] > parts["compute_s"] else "")


def _spending(found: LayoutFindings, j: Judged) -> str:
    d = found.demands
    said = []
    if d.price_per_hour:
        said.append(f"costs {d.cost(j.candidate, j.time_s):.6g} a step")
    if d.watts:
        said.append(f"takes {d.joules(j.candidate, j.time_s) / 3.6e6:.6g} kWh a step")
    return "      " + ", ".join(said) if said else ""


def _choice(j: Judged) -> str:
    return " / ".join(dict.fromkeys(f"recompute {c.recompute}, sharding {c.sharding}" for c in j.candidate.choices))


def _stages(found: LayoutFindings, j: Judged) -> list[str]:
    assert j.prediction is not None
    lines = ["  stage  layers  devices                    GiB  forward+backward"]
    runs = _runs(found, j)
    for s, stage in enumerate(j.candidate.layout.stages):
        kinds: dict[str, int] = {}
        for r in stage.replicas:
            kinds[f"{r.device} x{r.tensor}"] = kinds.get(f"{r.device} x{r.tensor}", 0) + 1
        what = ", ".join(f"{n} of {k}" for k, n in kinds.items())
        memory, compute = j.prediction.memory_peak_bytes[s] / 2**30, j.prediction.stage_compute_s[s]
        said = "; ".join(f"{r['layers']} {r['recompute']}/{r['sharding']}" for r in runs if r["stage"] == s)
        lines.append(f"  {s:>5}  {stage.layers:>6}  {what:<24} {memory:>6.2f}  {compute:.4g} s  (recompute/sharding: {said})")
    counts = sorted(set(j.candidate.layout.microbatches))
    lines.append(f"  micro-batches of {j.candidate.layout.microbatch} per pipeline: {', '.join(map(str, counts))}")
    return lines
