"""Training on a whole graph whose nodes lie on several workers: rows at planned bits, forward and backward, for any module."""

from .exchange import HaloExchange
from .networks import GraphNet
from .train import GraphRun, run_graph

__all__ = ["GraphNet", "GraphRun", "HaloExchange", "run_graph"]
