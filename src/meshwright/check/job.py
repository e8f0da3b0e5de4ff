"""Does a collective plan do the job that it says it is for? A file may have been edited by hand: each half alone can be sound."""

from __future__ import annotations

from typing import Any

from ..plan.plan import Plan
from ..program.program import Contract, Program
from .verdict import Finding

__all__ = ["check_job"]

ROOTED = ("broadcast", "reduce", "scatter", "gather")


def check_job(plan: Plan) -> list[Finding]:
    """The job's operation, ranks, root, peers and size against the main program's contract, the placement and the bound's certificate."""
    job = plan.job.get("collective")
    if plan.kind != "collective" or not isinstance(job, dict) or plan.main.contract is None:
        return []
    contract, ranks = plan.main.contract, list(job.get("ranks", ()))
    stated: list[tuple[str, Any, Any]] = [
        ("op", job.get("op"), contract.op), ("ranks", len(ranks), len(contract.members(plan.main.ranks))),
        ("ranks", ranks, [plan.placement[r] for r in contract.members(plan.main.ranks)]),
    ]  # fmt: skip
    if contract.op in ROOTED:
        stated.append(("root", job.get("root"), contract.root))
    if contract.op == "permute" and "peers" in job:
        stated.append(("peers", list(job["peers"]), list(contract.peers)))
    found = [_finding(name, f"the job says {_short(says)}, the program {_short(does)}") for name, says, does in stated if says != does]
    size = job.get("size_bytes")
    if isinstance(size, int) and not found and plan.main.fold is None and (moved := _bytes(plan.main, contract)) < size:
        found.append(_finding("size_bytes", f"the job says {size}, the program carries {moved}"))
    certified = plan.bound.certificate.data.get("size_bytes", size) if plan.bound is not None else size
    if certified != size:
        found.append(_finding("size_bytes", f"the job says {size}, the bound's certificate {certified}"))
    return found[:1] if len(found) > 1 and found[0].witness == found[1].witness else found


def _bytes(program: Program, contract: Contract) -> int:
    """Bytes of the largest range that a member gives or gets, what a size counts for every operation; padding included, every iteration counted."""
    chunk, turns = program.buffers.chunk_bytes, max((int(x) for x in program.lanes.repeat), default=1)
    return turns * max((int(chunk[buffer]) * count for buffer, _, count in (*contract.inputs, *contract.outputs) if buffer >= 0), default=0)


def _finding(name: str, message: str) -> Finding:
    return Finding(check="plan", message=f"job.collective.{name}: {message}", witness={"field": name})


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."
