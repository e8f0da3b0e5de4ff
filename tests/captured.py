"""Models captured once per process: tests of many modules read the same few graphs, and a capture takes seconds."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from meshwright.capture.graph import capture
from meshwright.graph.graph import OpGraph

__all__ = ["captured"]


@functools.cache
def captured(model: str, *, scalable: bool = True, loss: str = "cross-entropy") -> OpGraph:
    """The graph as `capture` gives it; nobody changes it. Its name is `model`, however the file is written there."""
    file, _, function = model.rpartition(":")
    return msgspec.structs.replace(_captured(f"{Path(file).resolve()}:{function}", scalable, loss), model=model)


@functools.cache
def _captured(model: str, scalable: bool, loss: str) -> OpGraph:
    return capture(model, scalable=scalable, loss=loss)
