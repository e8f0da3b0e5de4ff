"""Process groups that objects of this library hold end before the interpreter does.

gloo's worker threads hold the tensors of a finished collective until they are scheduled once more, and need the interpreter's lock to let them go. An
interpreter that is ending gives its lock to nobody: it ends such a thread, and with it the process (SIGABRT, "terminate called without an active
exception"). `torch.distributed.destroy_process_group` waits for these threads, unless somebody still holds the group. So who keeps one in an
attribute says so here, and at exit, while threads still run, these attributes are emptied.
"""

from __future__ import annotations

import atexit
import weakref

__all__ = ["holds_group", "let_groups_go"]

_HOLDERS: list[weakref.ref[object]] = []


def holds_group(holder: object) -> None:
    """`holder.group` is a process group. An object that is known already, or is gone meanwhile, costs nothing."""
    _HOLDERS[:] = [x for x in _HOLDERS if (known := x()) is not None and known is not holder]
    _HOLDERS.append(weakref.ref(holder))


@atexit.register
def let_groups_go() -> None:
    """Empty the attributes. After this the holders cannot send any more."""
    for known in _HOLDERS:
        if (holder := known()) is not None:
            object.__setattr__(holder, "group", None)
    _HOLDERS.clear()
