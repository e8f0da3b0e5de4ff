"""The checker: proves a program or a plan right, or says what is wrong and where. It imports the nouns only (docs/guarantees.md)."""

from .deadlock import smallest_depth
from .memory import worst_order_memory
from .verdict import Finding, Verdict
from .volume import check_volume
from .whole import check_plan, check_program

__all__ = ["Finding", "Verdict", "check_plan", "check_program", "check_volume", "smallest_depth", "worst_order_memory"]
