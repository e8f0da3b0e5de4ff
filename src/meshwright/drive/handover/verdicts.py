"""Verdicts on other tools' files: the checker's rules, on the program that our readers make of a file."""

from __future__ import annotations

from functools import partial

from ...check.foreign.msccl import judge_msccl
from ...check.foreign.mscclpp import judge_mscclpp
from ...check.verdict import Verdict
from ...interop.from_msccl import import_msccl
from ...interop.from_mscclpp import import_mscclpp
from ...interop.msccl import ExecutorLimits, MscclAlgo
from ...interop.mscclpp import MscclppPlan

__all__ = ["check_msccl", "check_mscclpp"]


def check_msccl(algo: MscclAlgo, *, limits: ExecutorLimits | None = None, run_copies: bool = False) -> Verdict:
    """All checks of an MSCCL file; see `check.msccl.judge_msccl`."""
    return judge_msccl(algo, import_msccl, limits=limits, run_copies=run_copies)


def check_mscclpp(plan: MscclppPlan, *, root: int | None = None) -> Verdict:
    """All checks of an MSCCL++ plan; see `check.mscclpp.judge_mscclpp`."""
    return judge_mscclpp(plan, partial(import_mscclpp, root=root))
