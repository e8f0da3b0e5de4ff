"""Generators, mutation operators, twins and serial runs, for our tests and for those of anyone who writes a strategy, a protocol or a checker."""

from .fabrics import SHAPES, fabrics, rates
from .mutate import OPERATORS, Mutant, mutants, mutate
from .programs import programs

__all__ = ["Mutant", "OPERATORS", "SHAPES", "fabrics", "mutants", "mutate", "programs", "rates"]
