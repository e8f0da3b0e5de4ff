"""The checker: proves a program or a plan right, or says what is wrong and where. It imports the nouns only (docs/guarantees.md)."""

from .program.deadlock import smallest_depth
from .program.memory import worst_order_memory
from .program.volume import check_volume
from .verdict import Finding, Verdict
from .whole import check_plan, check_program

__all__ = ["Finding", "Verdict", "check_plan", "check_program", "check_volume", "smallest_depth", "worst_order_memory"]
