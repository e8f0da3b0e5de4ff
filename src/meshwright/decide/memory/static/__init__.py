"""The arena decision: an offset for every storage of a step that runs on parallel streams, safe in every interleaving."""

from .antichain import heaviest_antichain
from .order import Lifetimes, conflicts, lifetimes
from .plan import CITE, MINIMALLOC, FirstFit, StaticMemory

__all__ = ["CITE", "MINIMALLOC", "FirstFit", "Lifetimes", "StaticMemory", "conflicts", "heaviest_antichain", "lifetimes"]
