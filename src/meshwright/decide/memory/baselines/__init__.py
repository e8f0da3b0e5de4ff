"""Published strategies for a step's memory, to compare with: Chen's segments, Revolve, Rotor."""

from .chain import Chain, chain_of
from .chen import Chen
from .revolve import Revolve, fewest_steps
from .rotor import Rotor

__all__ = ["Chain", "Chen", "Revolve", "Rotor", "chain_of", "fewest_steps"]
