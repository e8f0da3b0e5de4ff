"""Where numba keeps compiled kernels: beside the package or in the user's cache; where neither can be written, in a folder of this user under /tmp.

numba refuses to compile a function with `cache=True` when it finds no place to write (a container with a read-only root, an account without a
home). `ensure_place` is called when the package is imported, before numba is; it only looks, and makes a folder only where it must.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["ensure_place", "fallback_in_use", "user_cache"]

_VARIABLE = "NUMBA_CACHE_DIR"
_fallback = ""


def ensure_place() -> None:
    """Names a temporary folder in NUMBA_CACHE_DIR where there is no other place; does nothing where there is one."""
    global _fallback
    package = Path(__file__).parents[1]
    given = os.environ.get(_VARIABLE, "")
    if (given and _writable(Path(given))) or _writable(package) or user_cache("numba"):
        return
    if folder := _own_folder():
        _fallback = os.environ[_VARIABLE] = folder


def fallback_in_use() -> str:
    """The temporary folder, where one had to be taken; else nothing."""
    return _fallback


def user_cache(name: str) -> Path | None:
    """The folder `name` where this user keeps caches; None where there is no such place, or nothing can be written there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if base else Path("~/.cache").expanduser()) / name
    except RuntimeError:  # no HOME, and the account has none either
        return None
    return folder if folder.is_absolute() and _writable(folder) else None


def _writable(place: Path) -> bool:
    """Whether files can be made there, or the folder itself. On a read-only file system the answer is no for root too."""
    for folder in (place, *place.parents):
        try:
            found = folder.stat()
        except OSError:
            continue
        return stat.S_ISDIR(found.st_mode) and os.access(folder, os.W_OK | os.X_OK)
    return False


def _own_folder() -> str:
    """A folder that only this user can write: numba runs what it finds there. Nothing where no temporary folder can be written."""
    import tempfile

    try:
        folder = Path(tempfile.gettempdir(), f"meshwright-kernels-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return str(folder)
        return tempfile.mkdtemp(prefix="meshwright-kernels-")
    except OSError:
        return ""
