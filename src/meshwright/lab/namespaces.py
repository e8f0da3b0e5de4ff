"""Linux namespaces from Python: the few system calls that the standard library of Python 3.11 does not have.

Everything that is made here belongs to the calling process and its children and ends with them; nothing is given a name
that others can see.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = [
    "NEWNET", "NEWNS", "NEWPID", "NEWUSER", "NEWUTS", "become_root_of_user_namespace", "bind", "mount", "set_hostname", "setns", "unshare",
]  # fmt: skip

NEWNS, NEWUTS, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones. Raises: OSError."""
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that `fd` refers to (the calling thread alone). Raises: OSError."""
    _call("setns", ctypes.c_int(fd), ctypes.c_int(kind))


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Raises: OSError."""
    _call("mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)


def bind(source: str, target: str) -> None:
    """Make `source` appear at `target` in this mount namespace. Raises: OSError."""
    mount(source, target, "", MS_BIND)


def set_hostname(name: str) -> None:
    """Raises: OSError."""
    data = name.encode()
    _call("sethostname", data, ctypes.c_size_t(len(data)))


def become_root_of_user_namespace() -> None:
    """A new user namespace in which our own user is root (and nobody else exists). Raises: OSError where the system forbids it."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
