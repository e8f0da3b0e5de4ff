"""meshwright: decide how a job runs on a fabric of devices, prove it, simulate it, run it, compare.

The nouns are here; they load numpy and msgspec only when they are touched, and torch never. The names below are imported twice: for type checkers and
import-linter, and by `__getattr__` when they are first used. A test holds the two equal.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import notebook_repr

if TYPE_CHECKING:
    from .bound import Bound
    from .cost import Cost
    from .drive.plans import check, read_fabric, read_plan, simulate, write_plan
    from .drive.training.training import plan_training
    from .errors import MeshwrightError
    from .fabric import Fabric
    from .graph import OpGraph
    from .job import Training
    from .plan import Plan
    from .program import Program, ProgramBuilder
    from .timeline import Timeline

__version__ = "0.1.0"

_HOME = {
    "Bound": "bound", "Cost": "cost", "Fabric": "fabric", "MeshwrightError": "errors", "OpGraph": "graph", "Plan": "plan", "Program": "program",
    "ProgramBuilder": "program", "Timeline": "timeline", "Training": "job", "check": "drive.plans", "plan_training": "drive.training.training",
    "simulate": "drive.plans", "read_fabric": "drive.plans", "read_plan": "drive.plans", "write_plan": "drive.plans",
}  # fmt: skip
__all__ = [
    "Bound", "Cost", "Fabric", "MeshwrightError", "OpGraph", "Plan", "Program", "ProgramBuilder", "Timeline", "Training", "__version__", "check",
    "plan_training", "read_fabric", "read_plan", "simulate", "write_plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__


def _html_of(noun: object) -> str:
    from .report.notebook import html_of

    return html_of(noun)


notebook_repr.draw_with(_html_of)
