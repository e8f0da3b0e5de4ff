"""meshwright: decide how a job runs on a fabric of devices, prove it, simulate it, run it, compare.

The nouns are here; they load numpy and msgspec only when they are touched, and torch never.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Bound": "bound", "Cost": "cost", "Fabric": "fabric", "MeshwrightError": "errors", "OpGraph": "graph", "Plan": "plan", "Program": "program",
    "ProgramBuilder": "program_builder", "Timeline": "timeline", "Training": "job", "check": "drive", "plan_training": "drive", "simulate": "drive",
    "read_fabric": "drive", "read_plan": "drive", "write_plan": "drive",
}  # fmt: skip
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
