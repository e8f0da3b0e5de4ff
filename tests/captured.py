"""Models captured once per process: tests of many modules read the same few graphs, and a capture takes seconds."""

from __future__ import annotations

import functools

from meshwright.capture.graph import capture
from meshwright.graph.graph import OpGraph

__all__ = ["captured"]


@functools.cache
def captured(model: str, *, scalable: bool = True) -> OpGraph:
    """The graph as `capture` gives it; nobody changes it."""
    return capture(model, scalable=scalable)
