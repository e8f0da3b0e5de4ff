"""meshwright: decide how a job runs on a fabric of devices, prove it, simulate it, run it, compare.

    import meshwright as mw

    plan = mw.plan(model, batch, fabric="dgx-h100:2", optimizer=optimizer)   # an nn.Module, or a function that makes one; nothing is run
    mw.check_plan(plan)                       # raises CheckFailed with a witness; every plan has been checked once already
    timeline = mw.simulate_plan(plan)         # on the plan's own fabric, or another
    mw.write_plan("plan.json", plan)

    step = mw.torch.parallelize(model, optimizer, plan)   # inside the own loop, under torchrun
    loss = step(batch)

`mw.plan` is `plan_model`. `mw.torch` also registers a backend of torch.distributed. All public names: docs/api.md.

The nouns are here; they load numpy and msgspec only when they are touched, and torch never. The names below are imported twice: for type checkers and
import-linter, and by `__getattr__` when they are first used. A test holds the two equal.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036  # a checkout on the path of an old Python: pip refuses by itself
    _TOO_OLD = "meshwright needs Python 3.11 or newer, this is Python {}.{}: start it with a newer one, e.g. python3.11".format(*sys.version_info)
    raise SystemExit("error: " + _TOO_OLD) if sys.argv[:1] == ["-m"] else ImportError(_TOO_OLD)

from . import notebook_repr
from .kernels.kept import ensure_place

if TYPE_CHECKING:
    from .bound import Bound
    from .cost import Cost
    from .drive.plans import check_plan, read_fabric, read_plan, simulate_plan, write_plan
    from .drive.training.own_model import plan_model
    from .drive.training.own_model import plan_model as plan
    from .drive.training.training import plan_training
    from .errors import MeshwrightError
    from .fabric import Fabric
    from .graph import OpGraph
    from .job import Recipe, Training
    from .plan import Plan
    from .program import Program, ProgramBuilder
    from .timeline import Timeline

__version__ = "0.1.0"
ensure_place()  # of compiled kernels, before numba looks for one

_HOME = {
    "Bound": "bound", "Cost": "cost", "Fabric": "fabric", "MeshwrightError": "errors", "OpGraph": "graph", "Plan": "plan", "Program": "program",
    "ProgramBuilder": "program", "Recipe": "job", "Timeline": "timeline", "Training": "job", "check_plan": "drive.plans",
    "plan_model": "drive.training.own_model", "plan_training": "drive.training.training", "read_fabric": "drive.plans",
    "read_plan": "drive.plans", "simulate_plan": "drive.plans", "write_plan": "drive.plans",
}  # fmt: skip
_ROOMS = frozenset({"plan", "torch"})  # public by themselves: the room `plan` can be called, `torch` is a module
__all__ = [
    "Bound", "Cost", "Fabric", "MeshwrightError", "OpGraph", "Plan", "Program", "ProgramBuilder", "Recipe", "Timeline", "Training",
    "__version__", "check_plan", "plan", "plan_model", "plan_training", "read_fabric", "read_plan", "simulate_plan", "write_plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})


class _CalledRoom(ModuleType):
    """The room `meshwright.plan`: `meshwright.plan(...)` is `meshwright.plan_model(...)`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `meshwright.plan_model`."""
        return __getattr__("plan_model")(*args, **options)


class _Front(ModuleType):
    """This package. The import system sets each room as an attribute of it, whoever imports it first: that of plans becomes one to call."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "plan" and type(value) is ModuleType:
            value.__class__ = _CalledRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Front


def _html_of(noun: object) -> str:
    from .report.notebook import html_of

    return html_of(noun)


notebook_repr.draw_with(_html_of)
