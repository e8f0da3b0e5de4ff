"""What a writer of files writes, as bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["written"]


def written(write: Callable[[Path], Any], name: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="meshwright-soak-") as folder:
        path = Path(folder) / name
        write(path)
        return path.read_bytes()
