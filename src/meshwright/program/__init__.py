"""The executable form of a plan: lanes of steps, channels, buffers; built, hashed, folded, inlined and cut here. No times, no device names."""

from .builder import ProgramBuilder
from .calls import inline
from .fold import expand
from .fold_find import fold
from .hash import program_hash
from .program import Program, Step

__all__ = ["Program", "ProgramBuilder", "Step", "expand", "fold", "inline", "program_hash"]
