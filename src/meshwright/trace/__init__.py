"""What a profiler recorded, as columns: slices, modules, phases, runs on one clock."""

from .module_tree import ModuleTree
from .trace import Trace

__all__ = ["ModuleTree", "Trace"]
