"""Handing a schedule over: program -> MSCCL algorithm -> check, with other ways of writing it where one does not pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .check.msccl import check_msccl
from .check.verdict import Verdict
from .errors import Unsupported
from .msccl import MscclAlgo
from .program import Program
from .to_msccl import MscclOptions, lower_to_msccl

__all__ = ["Handover", "export_msccl"]


_WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"squeeze": True},
    {"relaxed": False},
    {"merge": False},
    {"merge": False, "relaxed": False},
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
    places = ("both", "out", "in") if place == "auto" else (place,)
    failed: Unsupported | None = None
    for where in places:
        for ways in _WAYS:
            tried = replace(how, place=where, **ways)  # type: ignore[arg-type]
            try:
                algo = lower_to_msccl(program, tried)
            except Unsupported as error:
                failed = _more_telling(failed, error)
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


def _more_telling(old: Unsupported | None, new: Unsupported) -> Unsupported:
    """A stated limit says more than a way of writing that did not work out."""
    if old is not None and "needed" in old.data and "needed" not in new.data:
        return old
    return new
