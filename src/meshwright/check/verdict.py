"""What a check answers: ok, wrong with a witness, or unknown. A checker that crashes or gives up is `unknown`, never a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import CheckFailed, Deadlock, MeshwrightError

__all__ = ["MAX_FINDINGS_OF_A_KIND", "Finding", "Status", "Verdict", "guarded"]

Status = Literal["ok", "wrong", "unknown"]
MAX_FINDINGS_OF_A_KIND = 8  # a broken rule is mostly broken in many places: so many of them are listed, so that a report can be read


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong (or could not be decided). `witness` is JSON-able: rank, lane, step, iteration, chunk, link, ..."""

    check: str  # "format" | "wellformed" | "deadlock" | "races" | "values" | "memory" | "links" | "certificate" | "plan"
    message: str
    witness: Mapping[str, Any] = field(default_factory=dict)
    status: Literal["wrong", "unknown"] = "wrong"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`status` is wrong if any finding is, else unknown if any finding is, else ok. `facts` are figures found on the way."""

    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was proved in a weaker form, and why

    @property
    def status(self) -> Status:
        kinds = {f.status for f in self.findings}
        return "wrong" if "wrong" in kinds else "unknown" if kinds else "ok"

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def raise_if_wrong(self) -> None:
        """Raise Deadlock if a cycle was found first, else CheckFailed, with the witness as data. `unknown` does not raise."""
        wrong = [f for f in self.findings if f.status == "wrong"]
        if wrong:
            first = wrong[0]
            error = Deadlock if first.check == "deadlock" else CheckFailed
            data = {"check": first.check, "witness": dict(first.witness), "findings": len(wrong)}
            raise error(first.message, where=first.check, hint="see `meshwright program show` at the step named", data=data)

    def to_json(self) -> dict[str, Any]:
        found = [{"check": f.check, "status": f.status, "message": f.message, "witness": dict(f.witness)} for f in self.findings]
        return {"status": self.status, "findings": found, "facts": dict(self.facts), "notes": list(self.notes)}


def guarded(check: str, run: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of `run`; if it fails, one `unknown` finding that says how."""
    try:
        return list(run())
    except (MeshwrightError, Exception) as error:  # a crashed checker has proved nothing
        detail = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
        return [Finding(check=check, message=f"the {check} check could not decide: {detail}", status="unknown")]
