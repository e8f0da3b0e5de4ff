"""MONeT: which forward results a training step keeps, which it computes again, and how every operator runs, chosen together."""

from .strategy import CITE, Monet

__all__ = ["CITE", "Monet"]
