"""Models captured once per run: tests of many modules read the same few graphs, and a capture takes seconds."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.graph.graph import OpGraph
from meshwright.io.model.graph import read_graph, write_graph

__all__ = ["captured", "forget", "shared"]


@functools.cache
def captured(model: str, *, scalable: bool = True, loss: str = "cross-entropy") -> OpGraph:
    """The graph as `capture` gives it; nobody changes it. Its name is `model`, however the file is written there."""
    file, _, function = model.rpartition(":")
    return msgspec.structs.replace(_captured(f"{Path(file).resolve()}:{function}", scalable, loss), model=model)


@functools.cache
def _captured(model: str, scalable: bool, loss: str) -> OpGraph:
    from meshwright.capture.graph import capture

    def make(kept: Path) -> None:
        write_graph(kept, capture(model, scalable=scalable, loss=loss))

    found = shared(f"{model} {scalable} {loss}", make)
    return read_graph(found) if found else capture(model, scalable=scalable, loss=loss)


def shared(key: str, make: Callable[[Path], None]) -> Path | None:
    """The file that `make` writes for this key, once in a run: of several workers one makes it, the others wait. None: there is one worker only."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return None
    folder = _folder(run)
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes
        if not kept.exists():
            make(kept)
    return kept


def _folder(run: str) -> Path:
    return Path(tempfile.gettempdir(), f"meshwright-captured-{run}")


def forget(run: str) -> None:
    """At the end of a run."""
    shutil.rmtree(_folder(run), ignore_errors=True)
