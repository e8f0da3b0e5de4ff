"""Problem and schedule of a pipeline plan as its JSON, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...decide.pipeline import Action, PipelineProblem, Schedule
from ...decide.pipeline.orders import check_orders
from ...decide.pipeline.problem import Collective, Offload
from ...errors import FormatError, MeshwrightError, UsageError
from ...plan.plan import Plan

__all__ = ["problem_document", "problem_of_plan", "schedule_document", "schedule_of_plan"]


def problem_document(problem: PipelineProblem) -> dict[str, Any]:
    """The problem as JSON; of overlapped pairs only what is given."""
    return {k: v for k, v in asdict(problem).items() if k not in ("pair_s", "pair_overlap", "host_out_Bps", "host_in_Bps") or v}


def schedule_document(schedule: Schedule) -> dict[str, Any]:
    """The schedule as JSON: actions as `<stage><kind><micro-batch>`, `-<last>` behind where several run at once,
    `&<stage>` in a pair of a forward and a backward of that stage."""
    return {
        "name": schedule.name, "devices": schedule.devices, "stages": schedule.stages, "placement": [list(x) for x in schedule.placement],
        "copy_of": list(schedule.copy_of), "split": schedule.split, "parts": schedule.parts,
        "orders": [" ".join(map(str, order)) for order in schedule.orders],
        "collectives": [[list(c) for c in row] for row in schedule.collectives], "receives_ahead": schedule.receives_ahead,
        **({"offloads": [[list(x) for x in row] for row in schedule.offloads]} if any(schedule.offloads) else {}),
    }  # fmt: skip


def schedule_of_plan(plan: Plan) -> Schedule:
    """The schedule that a pipeline plan holds. Raises: UsageError for another kind of plan, FormatError for a damaged one."""
    if plan.kind != "pipeline":
        raise UsageError(f"this is a {plan.kind} plan, not a pipeline plan", hint="make one with `meshwright pipeline plan`")
    try:
        doc = plan.job["schedule"]
        copy_of = tuple(map(int, doc["copy_of"]))
        schedule = Schedule(
            name=str(doc["name"]), devices=int(doc["devices"]), stages=int(doc["stages"]), copy_of=copy_of,
            placement=tuple(tuple(map(int, row)) for row in doc["placement"]), split=bool(doc["split"]), parts=int(doc["parts"]),
            orders=tuple(tuple(_action(text, copy_of) for text in row.split()) for row in doc["orders"]),
            collectives=tuple(tuple(Collective(*c) for c in row) for row in doc["collectives"]), receives_ahead=int(doc["receives_ahead"]),
            offloads=tuple(tuple(Offload(*map(int, x)) for x in row) for row in doc.get("offloads", ())),
        )  # fmt: skip
        check_orders(schedule)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, MeshwrightError) as error:
        raise FormatError(f"is no schedule: {str(error)[:160]}", where="plan.job.schedule", hint="make the plan again") from None
    return schedule


def problem_of_plan(plan: Plan) -> PipelineProblem:
    """The problem that a pipeline plan was made for. Raises: as `schedule_of_plan`."""
    if plan.kind != "pipeline":
        raise UsageError(f"this is a {plan.kind} plan, not a pipeline plan", hint="make one with `meshwright pipeline plan`")
    try:
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plan.job["problem"].items()}
        return PipelineProblem(**found)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"is no problem: {str(error)[:160]}", where="plan.job.problem", hint="make the plan again") from None


def _action(text: str, copy_of: Sequence[int]) -> Action:
    at = next(i for i, c in enumerate(text) if c in "FBIW")
    name, _, beside = text.partition("&")
    first, _, last = name[at + 1 :].partition("-")
    m = int(first)
    return Action(text[at], int(text[:at]), m, copy_of[m], int(last) - m + 1 if last else 1, int(beside or -1))  # type: ignore[arg-type]
