"""Handing schedules over: program -> MSCCL algorithm -> check, with other ways of writing it where one does not pass; and back, as plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...check.verdict import Verdict
from ...cost import Cost
from ...decide.collective.problem import CollectiveProblem
from ...errors import Unsupported
from ...interop.from_msccl import import_msccl
from ...interop.msccl import CITE, MscclAlgo, collective_of
from ...interop.mscclpp import MscclppPlan
from ...interop.to_msccl import MscclOptions, lower_to_msccl, most_connections, refuse_too_large
from ...interop.to_mscclpp import to_mscclpp
from ...plan.plan import Plan
from ...program.hash import program_hash
from ...program.program import Program
from ..plans import check_plan, make_plan
from .verdicts import check_msccl, check_mscclpp

__all__ = ["Handover", "chunk_bytes_of", "export_msccl", "export_mscclpp", "original_msccl", "plan_of_msccl"]


_WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"squeeze": True},
    {"relaxed": False},
    {"merge": False},
    {"merge": False, "relaxed": False},
    {"pool": True, "squeeze": True},
)


@dataclass(frozen=True)
class Handover:
    """A checked algorithm and the options with which it was written."""

    algo: MscclAlgo
    verdict: Verdict
    options: MscclOptions


def export_msccl(program: Program, options: MscclOptions | None = None, *, place: str = "auto") -> Handover:
    """The first right way of writing a program, simplest waits and fewest blocks first.

    place: `in`, `out`, `both`, or `auto`: both, else out of place, else in place.
    Raises: Unsupported when no way is within the format and the executor's limits; `data["limit"]` names the limit of the last way tried.
    """
    how = options or MscclOptions()
    refuse_too_large(program, how.limits, how.blocks)
    pooled = most_connections(program) > how.blocks  # a block sends over one connection only, so nothing but sharing them helps
    places = ("both", "out", "in") if place == "auto" else (place,)
    failed: Unsupported | None = None
    for where in places:
        crowded = False  # more blocks than a GPU holds: only ways that join more can help
        for ways in _WAYS:
            if (crowded and not (ways.get("squeeze") or ways.get("pool"))) or (pooled and not ways.get("pool")):
                continue
            tried = replace(how, place=where, **ways)  # type: ignore[arg-type]
            try:
                algo = lower_to_msccl(program, tried)
            except Unsupported as error:
                failed = _more_telling(failed, error)
                crowded |= error.data.get("limit") == "blocks"
                if "limit" not in error.data:  # no way of writing it will help, or only another place
                    break
                continue
            verdict = check_msccl(algo, limits=how.limits)
            if verdict.ok:
                return Handover(algo, verdict, tried)
            first = verdict.findings[0]
            limit = "depth" if first.check == "deadlock" else first.check
            text = f"written for MSCCL the schedule fails the {first.check} check: {first.message}"
            failed = _more_telling(failed, Unsupported(text, hint="the executor's channels and waits cannot say it", data={"limit": limit}))
    assert failed is not None, "there is a way to try"
    raise failed


def export_mscclpp(
    program: Program, *, place: str = "auto", min_bytes: int = 0, max_bytes: int = 0, blocks: int = 108, server: Mapping[int, str] | None = None
) -> MscclppPlan:
    """A checked MSCCL++ plan of a program: its MSCCL algorithm with messages as puts. `server`: of every rank; by default all are on one.

    place: `in`, `out`, or `auto`: out of place, else in place. Raises: Unsupported as `export_msccl`, and for operations without plans.
    """
    if place == "both":
        raise Unsupported("an MSCCL++ plan is for calls in place or out of place, not for both", hint="use --place in or --place out")
    failed: Unsupported | None = None
    for where in ("out", "in") if place == "auto" else (place,):
        try:
            options = MscclOptions(min_bytes=min_bytes, max_bytes=max_bytes, blocks=blocks)
            made = to_mscclpp(export_msccl(program, options, place=where).algo, in_place=where == "in", server=server)
        except Unsupported as error:
            failed = error
            continue
        verdict = check_mscclpp(made)
        verdict.raise_if_wrong()
        return made
    assert failed is not None, "there is a place to try"
    raise failed


def _more_telling(old: Unsupported | None, new: Unsupported) -> Unsupported:
    """A stated limit says more than a way of writing that did not work out."""
    if old is not None and "needed" in old.data and "needed" not in new.data:
        return old
    return new


# ---- plans from foreign files ------------------------------------------------------------------------------------------
def plan_of_msccl(algo: MscclAlgo, text: str, problem: CollectiveProblem, *, source: str) -> Plan:
    """A plan that carries out a foreign algorithm on a fabric, with bound and prediction. The file goes along (`text`), so that an unchanged
    plan can be written back as it was: GPU, block, step and dependence numbers included.

    Raises: Unsupported for another number of ranks or another operation than the problem's; CheckFailed for a wrong algorithm.
    """
    from ...decide.collective.bounds.collective import collective_bound
    from ...decide.collective.program_time import simulated_time_s
    if algo.ranks != len(problem.ranks):
        raise Unsupported(f"{source} is for {algo.ranks} gpus, {len(problem.ranks)} devices are given", hint="choose with --devices")
    if collective_of(algo) != problem.op:
        raise Unsupported(f"{source} is a {algo.collective}, not a {problem.op}")
    check_msccl(algo).raise_if_wrong()
    in_place = algo.modes[0]
    chunk_bytes = chunk_bytes_of(algo, problem.size_bytes, problem.element_bytes)
    program = import_msccl(algo, in_place=in_place, chunk_bytes=chunk_bytes).program
    time_s = simulated_time_s(program, problem.fabric, problem.ranks, problem.transport)
    cost = Cost() if problem.transport is None else Cost(transport=problem.transport)
    job = {
        "op": problem.op, "ranks": list(problem.ranks), "size_bytes": problem.size_bytes, "root": problem.root,
        "element_bytes": problem.element_bytes,
    }  # fmt: skip
    decision = {
        "strategy": "msccl", "options": {"in_place": in_place, "chunk_bytes": chunk_bytes}, "notes": {"source": source, "xml": text},
        "why": f"imported from {source}", "cite": [CITE.key],
    }  # fmt: skip
    plan = make_plan(
        "collective", problem.fabric, problem.ranks, program, job={"collective": job}, cost=cost,
        decisions={f"collective:{problem.op}": decision}, bound=collective_bound(problem), prediction=time_s,
    )  # fmt: skip
    check_plan(plan)
    return plan


def chunk_bytes_of(algo: MscclAlgo, size_bytes: int, element_bytes: int) -> int:
    """Bytes of a chunk of a call of that size (padded to whole elements)."""
    whole = algo.chunks_per_loop * (algo.ranks if collective_of(algo) in ("gather", "scatter") else 1)
    elements = (size_bytes + element_bytes - 1) // element_bytes
    return (elements + whole - 1) // whole * element_bytes


def original_msccl(plan: Plan) -> MscclAlgo | None:
    """The file that the plan was imported from, if its program is still what that file says.

    Raises: FormatError when the plan carries something that is no MSCCL file.
    """
    from ...io.msccl.xml import parse_msccl

    for decision in plan.decisions.values():
        notes, options = decision.get("notes", {}), decision.get("options", {})
        if decision.get("strategy") == "msccl" and isinstance(notes.get("xml"), str):
            algo = parse_msccl(notes["xml"].encode(), "the plan's MSCCL file")
            made = import_msccl(algo, in_place=bool(options.get("in_place")), chunk_bytes=int(options.get("chunk_bytes", 4)))
            if program_hash(made.program) == plan.cycle[0].program:
                return algo
    return None
