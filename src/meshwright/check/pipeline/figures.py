"""The figures that a pipeline bound's certificate rests on, against the problem that the plan was made for.

`bounds.pipeline` shows what follows from the figures; here they are the problem's. A certificate may understate seconds (it proves less) and never
overstate them; stages, placement, micro-batches and bytes are as stated. Exact rationals of the floats given, equal up to rounding in floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from ...bound import fraction_of
from ...plan.plan import Plan
from .work import PipelineWork, pipeline_work

__all__ = ["figures_of"]

ROUNDING = Fraction(1, 10**9)  # share by which a product of floats may differ from the exact one


def figures_of(plan: Plan, data: Mapping[str, Any]) -> Iterator[str]:
    """What the certificate says otherwise than the plan's problem and schedule. Raises: NoWork."""
    work, problem = pipeline_work(plan), plan.job["problem"]
    speeds = [Fraction(x) for x in problem["speeds"]]
    if data["form"] == "any":
        yield from _any(problem, speeds, data)
        return
    counts = [work.copy_of.count(c) for c in range(len(work.placement))]
    chunks = work.stages // work.devices
    kept = [work.share("activation_bytes", k, chunks * work.parts) for k in range(work.stages)]
    for name, says, does in (
        ("devices", data["devices"], work.devices), ("stages", data["stages"], work.stages), ("split", bool(data["split"]), work.split),
        ("placement", [list(x) for x in data["placement"]], [list(x) for x in work.placement]), ("microbatches", list(data["microbatches"]), counts),
        ("activation_bytes", list(data["activation_bytes"]), kept),
    ):  # fmt: skip
        if says != does:
            yield f"its {name} are {says}, the schedule's {does}"
            return
    beside = _beside(work, problem, speeds)
    for c, where in enumerate(work.placement):
        for k in range(work.stages):
            for kind, rows in data["seconds"].items():
                most = _seconds(work, problem, kind, k) / speeds[where[k]]
                if kind == "F":
                    most = min(most, beside.get((c, k), most))
                if fraction_of(str(rows[c][k])) > most * (1 + ROUNDING):
                    yield f"{kind} of stage {k} takes {float(most):.6g} s, it says {float(fraction_of(str(rows[c][k]))):.6g}"
                    return
            for name, a, b in (("up_s", k, k + 1), ("down_s", k + 1, k)) if k < work.stages - 1 else ():
                most = _message(work, problem, k, where[a], where[b])
                if fraction_of(str(data[name][c][k])) > most * (1 + ROUNDING):
                    yield f"a message over border {k} takes {float(most):.6g} s, it says {float(fraction_of(str(data[name][c][k]))):.6g}"
                    return
    caps = [int(x) for x in problem["memory_cap_bytes"]]
    stated = {int(data["device"]): int(data["cap_bytes"])} if data["form"] == "memory" else {}
    if data["form"] == "counts":
        stated = {d: int(x) for d, x in enumerate(data["cap_bytes"]) if int(x)}
    if stated and any(work.away):
        yield "it counts activations that wait in the host's memory as kept"
        return
    for device, cap in stated.items():
        weights = sum(-(-int(problem["weight_bytes"][k * work.devices // work.stages]) // chunks) for _, k in work.hosted(device))
        if not caps or not caps[device] or cap < caps[device] - weights:
            yield f"device {device} has {caps[device] - weights if caps else 'unlimited'} bytes for activations, it says {cap}"
            return


def _seconds(work: PipelineWork, problem: Mapping[str, Any], kind: str, stage: int) -> Fraction:
    """Of one micro-batch of the schedule on a device of speed 1."""
    name = {"F": "forward_s", "B": "backward_s", "I": "input_grad_s", "W": "weight_grad_s"}[kind]
    if not stage and not problem["first_input_grad"]:
        if kind == "I":
            return Fraction(0)
        name = "weight_grad_s" if kind == "B" else name
    return Fraction(problem[name][stage * work.devices // work.stages]) / (work.stages // work.devices * work.parts)


def _beside(work: PipelineWork, problem: Mapping[str, Any], speeds: list[Fraction]) -> dict[tuple[int, int], Fraction]:
    """[copy, stage] -> the least that a forward beside a backward takes over the backward alone."""
    found: dict[tuple[int, int], Fraction] = {}
    for device, order in enumerate(work.orders):
        for copy, stage, other, count in {
            (work.copy_of[a.first], a.stage, a.beside, len(a.microbatches)) for a in order if a.phase == "F" and a.beside >= 0
        }:  # fmt: skip
            one = count * _seconds(work, problem, "F", stage)
            two = sum((_seconds(work, problem, kind, other) for kind in ("IW" if work.split else "B")), Fraction(0))
            if own := problem.get("pair_s"):
                pieces = work.stages // work.devices * work.parts
                pair = max(one, two, count * Fraction(own[stage * work.devices // work.stages]) / pieces)
            else:
                pair = one + two - Fraction(problem.get("pair_overlap", 0)) * min(one, two)
            key, left = (copy, stage), (pair - two) / speeds[device]
            found[key] = min(found.get(key, left), left)
    return found


def _message(work: PipelineWork, problem: Mapping[str, Any], border: int, a: int, b: int) -> Fraction:
    if a == b:
        return Fraction(0)
    latency, rate = problem["p2p_latency_s"], problem["p2p_rate_Bps"]
    near = next((x for x, y in ((a, b), (b, a)) if (x + 1) % work.devices == y), -1)
    slow, fast = (latency[near], rate[near]) if near >= 0 else (max(latency), min(rate))
    return Fraction(slow) + Fraction(work.share("message_bytes", border, work.parts), int(fast))


def _any(problem: Mapping[str, Any], speeds: list[Fraction], data: Mapping[str, Any]) -> Iterator[str]:
    """All work over all speeds, and one micro-batch's way on the fastest devices."""
    if [fraction_of(str(x)) for x in data["speeds"]] != speeds or int(data["microbatches"]) != int(problem["microbatches"]):
        yield "its speeds or micro-batches are not the problem's"
        return
    work = path = Fraction(0)
    longest = max(Fraction(max(b, i + w)) for b, i, w in zip(problem["backward_s"], problem["input_grad_s"], problem["weight_grad_s"], strict=True))
    for k in range(int(problem["devices"])):
        f, b, i, w = (Fraction(problem[x][k]) for x in ("forward_s", "backward_s", "input_grad_s", "weight_grad_s"))
        if own := problem.get("pair_s"):
            f = min(f, max(Fraction(0), Fraction(own[k]) - longest))
        else:
            f *= 1 - Fraction(problem.get("pair_overlap", 0))
        idle = not k and not problem["first_input_grad"]  # of the first stage's backward only the weights' part is sure
        work += f + min(b, w if idle else i + w)
        path += f if idle else f + min(b, i)
    for name, says, does in (("work_s", data["work_s"], work), ("path_s", data["path_s"], path)):
        if fraction_of(str(says)) > does * (1 + ROUNDING):
            yield f"its {name} is {float(fraction_of(str(says))):.6g}, the problem's {float(does):.6g}"
